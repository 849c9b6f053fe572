//! A fact that may not have been readable.

use std::collections::BTreeMap;

use serde::de::{self, DeserializeOwned};
use serde::{Deserialize, Deserializer, Serialize};

/// A fact, or why it is not known.
///
/// In the facts file a known fact is written plainly. One that could not be read is `{"unread":
/// "why"}`. One that is left out was not queried. A check reports an unknown fact as such, and
/// never takes it for a good one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Read<T> {
    /// Could not be read, and why.
    No(Unread),
    /// What was read.
    Yes(T),
}

impl<'de, T: DeserializeOwned> Deserialize<'de> for Read<T> {
    /// By its form, so that an error names what the fact itself should be.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        if value.get("unread").is_some() {
            return serde_json::from_value(value).map(Self::No).map_err(de::Error::custom);
        }
        let told = |error| de::Error::custom(format_args!("{error}, or {{\"unread\": \"why\"}}"));
        serde_json::from_value(value).map(Self::Yes).map_err(told)
    }
}

/// Why a fact is not known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Unread {
    /// For people: `Permission denied`, for instance.
    pub unread: String,
}

impl<'de> Deserialize<'de> for Unread {
    /// From a map alone: a derived deserializer would also accept a list of one text, which may be
    /// a fact.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let mut fields = BTreeMap::<String, String>::deserialize(deserializer)?;
        match (fields.remove("unread"), fields.is_empty()) {
            (Some(unread), true) => Ok(Self { unread }),
            _ => Err(de::Error::custom("it is no {\"unread\": \"why\"}")),
        }
    }
}

/// The reason for a fact that was not queried.
const NOT_RECORDED: &str = "not recorded";

impl<T> Default for Read<T> {
    fn default() -> Self {
        Self::no(NOT_RECORDED)
    }
}

impl<T> Read<T> {
    /// A fact that could not be read.
    pub fn no(why: impl Into<String>) -> Self {
        Self::No(Unread { unread: why.into() })
    }

    /// The fact, if it is known.
    #[must_use]
    pub fn known(&self) -> Option<&T> {
        match self {
            Self::Yes(value) => Some(value),
            Self::No(_) => None,
        }
    }

    /// Why it is not known, if it is not.
    #[must_use]
    pub fn why_not(&self) -> Option<&str> {
        match self {
            Self::Yes(_) => None,
            Self::No(unread) => Some(&unread.unread),
        }
    }

    /// The reason why it is not known, to be changed.
    pub(super) fn unread_mut(&mut self) -> Option<&mut String> {
        match self {
            Self::Yes(_) => None,
            Self::No(unread) => Some(&mut unread.unread),
        }
    }

    /// True for a fact that was not queried: it is left out of the file.
    #[must_use]
    pub fn is_not_recorded(&self) -> bool {
        self.why_not() == Some(NOT_RECORDED)
    }

    /// The fact in another form.
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Read<U> {
        match self {
            Self::Yes(value) => Read::Yes(f(value)),
            Self::No(unread) => Read::No(unread),
        }
    }
}

impl<T: Copy> Read<T> {
    /// The fact, if it is known.
    #[must_use]
    pub fn get(&self) -> Option<T> {
        self.known().copied()
    }
}

impl<T> From<std::io::Result<T>> for Read<T> {
    fn from(result: std::io::Result<T>) -> Self {
        match result {
            Ok(value) => Self::Yes(value),
            Err(error) => Self::no(error.to_string()),
        }
    }
}
