//! Names of resources and CDI devices, checked when the command line is parsed.

use std::fmt;
use std::str::FromStr;

/// An extended resource such as `nobounce.dev/nic`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ResourceName {
    domain: String,
    name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ResourceNameError {
    #[error("a resource needs a domain: write it as DOMAIN/NAME, for example nobounce.dev/nic")]
    NoDomain,
    #[error(
        "the domain {0:?} is not valid: use at most {MAX_DOMAIN} lower-case letters, digits, \
         '-' and '.', each part between letters or digits"
    )]
    Domain(String),
    #[error("Kubernetes reserves the domain {0:?}: use another one, for example nobounce.dev")]
    Reserved(String),
    #[error(
        "the name {0:?} is not valid: use at most {MAX_NAME} letters, digits, '-', '_' and '.', \
         beginning and ending with a letter or digit"
    )]
    Name(String),
}

/// A DNS subdomain has 253 characters; quota names put "requests." before it.
const MAX_DOMAIN: usize = 253 - "requests.".len();
const MAX_NAME: usize = 63;

impl ResourceName {
    /// File name of the socket. A domain has no '_', so two resources never share a name.
    pub(crate) fn socket_name(&self) -> String {
        format!("nobounce-{}_{}.sock", self.domain, self.name)
    }
}

impl FromStr for ResourceName {
    type Err = ResourceNameError;

    /// The kubelet's rules for extended resources: a wrong name fails at once, not at registration.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (domain, name) = text.split_once('/').ok_or(ResourceNameError::NoDomain)?;
        if domain.is_empty() {
            return Err(ResourceNameError::NoDomain);
        }
        if domain.ends_with("kubernetes.io") || domain.starts_with("requests.") {
            return Err(ResourceNameError::Reserved(domain.to_owned()));
        }
        let is_label = |label: &str| {
            is_between_alphanumerics(label)
                && label.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
        };
        if domain.len() > MAX_DOMAIN || !domain.split('.').all(is_label) {
            return Err(ResourceNameError::Domain(domain.to_owned()));
        }
        let is_name = is_between_alphanumerics(name)
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        if name.len() > MAX_NAME || !is_name {
            return Err(ResourceNameError::Name(name.to_owned()));
        }
        Ok(Self { domain: domain.to_owned(), name: name.to_owned() })
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.domain, self.name)
    }
}

/// A fully qualified CDI device: `vendor/class=name`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CdiDeviceName {
    /// `vendor/class`, as `kind` in a CDI file.
    pub(crate) kind: String,
    pub(crate) name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a CDI device: write it as VENDOR/CLASS=NAME, for example nobounce.dev/nic=nb0")]
pub(crate) struct CdiDeviceNameError(String);

impl FromStr for CdiDeviceName {
    type Err = CdiDeviceNameError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let error = || CdiDeviceNameError(text.to_owned());
        let (kind, name) = text.split_once('=').ok_or_else(error)?;
        let (vendor, class) = kind.split_once('/').ok_or_else(error)?;
        let is_valid = |part: &str, others: &[u8]| {
            is_between_alphanumerics(part)
                && part.bytes().all(|b| b.is_ascii_alphanumeric() || others.contains(&b))
        };
        if is_valid(vendor, b"_-.") && is_valid(class, b"_-") && is_valid(name, b"_-.:") {
            Ok(Self { kind: kind.to_owned(), name: name.to_owned() })
        } else {
            Err(error())
        }
    }
}

impl fmt::Display for CdiDeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.kind, self.name)
    }
}

fn is_between_alphanumerics(text: &str) -> bool {
    let ends = [text.bytes().next(), text.bytes().last()];
    ends.iter().all(|end| end.is_some_and(|b| b.is_ascii_alphanumeric()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resource(text: &str) -> Result<ResourceName, ResourceNameError> {
        text.parse()
    }

    #[test]
    fn resources_of_the_kubelets_form_are_accepted() {
        for text in ["nobounce.dev/nic", "rdma/hca_shared_devices_a", "a.b-c.d/X.y-z_9"] {
            assert_eq!(resource(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn other_resources_are_refused_with_the_reason() {
        for text in ["nic", "", "/nic"] {
            assert_eq!(resource(text), Err(ResourceNameError::NoDomain), "{text}");
        }
        for text in ["a..b/nic", "-a/nic", "a-/nic", "A/nic", "a_b/nic", "ä/nic"] {
            assert!(matches!(resource(text), Err(ResourceNameError::Domain(_))), "{text}");
        }
        assert!(matches!(resource(&format!("{}/nic", "a".repeat(245))), Err(ResourceNameError::Domain(_))));
        for text in ["kubernetes.io/nic", "x.kubernetes.io/nic", "requests.a/nic"] {
            assert!(matches!(resource(text), Err(ResourceNameError::Reserved(_))), "{text}");
        }
        for text in ["a/", "a/b/c", "a/_b", "a/b.", "a/b c", "a/../kubelet"] {
            assert!(matches!(resource(text), Err(ResourceNameError::Name(_))), "{text}");
        }
        assert!(matches!(resource(&format!("a/{}", "b".repeat(64))), Err(ResourceNameError::Name(_))));
    }

    #[test]
    fn socket_names_are_distinct() {
        assert_eq!(resource("nobounce.dev/nic").unwrap().socket_name(), "nobounce-nobounce.dev_nic.sock");
        assert_ne!(resource("a/b_c").unwrap().socket_name(), resource("a.b/c").unwrap().socket_name());
    }

    #[test]
    fn cdi_devices_are_parsed() {
        let device: CdiDeviceName = "nobounce.dev/nic=nb0".parse().unwrap();
        assert_eq!((device.kind.as_str(), device.name.as_str()), ("nobounce.dev/nic", "nb0"));
        assert_eq!(device.to_string(), "nobounce.dev/nic=nb0");
        for text in
            ["nb0", "nobounce.dev/nic", "nic=nb0", "a/b=", "/b=c", "a/=c", "a/b/c=d", "a/b=c d", "a/b=c=d"]
        {
            assert!(text.parse::<CdiDeviceName>().is_err(), "{text}");
        }
    }
}
