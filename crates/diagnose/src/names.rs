//! Lists of adapter names, as NCCL and UCX read them.

use nobounce_topology::analysis::{Analysis, Pair};
use nobounce_topology::facts::Nic;

/// Which adapters a variable lets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    /// Names, and the port where one is given.
    names: Vec<(String, Option<u32>)>,
    exclude: bool,
    exact: bool,
    /// A name without a port matches none of its ports (UCX).
    wants_port: bool,
}

impl Filter {
    /// `NCCL_IB_HCA`: names or their beginnings, with ports; `^` excludes, `=` wants whole names.
    /// Blanks belong to the names; a list of nothing takes all.
    pub(crate) fn nccl(text: &str) -> Self {
        let (exclude, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let names = rest.split(',').map(parse).filter(|(name, _)| !name.is_empty()).collect();
        Self { names, exclude, exact, wants_port: false }
    }

    /// `UCX_NET_DEVICES`: whole names with ports; `all`; `^` excludes; ranges as `mlx5_[0-3]:1`.
    pub(crate) fn ucx(text: &str) -> Self {
        let rest = text.trim();
        let (exclude, rest) = rest.strip_prefix('^').map_or((false, rest), |rest| (true, rest));
        let names: Vec<_> = rest.split(',').map(str::trim).filter(|name| !name.is_empty()).collect();
        if !exclude && names.contains(&"all") {
            return Self { names: Vec::new(), exclude: true, exact: true, wants_port: true };
        }
        let names = names.iter().flat_map(|name| expand(name)).map(|name| parse(&name)).collect();
        Self { names, exclude, exact: true, wants_port: true }
    }

    /// Whether an adapter matches with an active port; if it has none, with any.
    pub(crate) fn takes(&self, nic: &Nic) -> bool {
        let active = nic.ports.iter().any(nobounce_topology::facts::Port::is_active);
        let mut ports = nic.ports.iter().filter(|port| !active || port.is_active());
        // Without ports in the facts the first is meant.
        nic.ports.is_empty() && self.takes_port(&nic.name, 1)
            || ports.any(|port| self.takes_port(&nic.name, port.number))
    }

    fn takes_port(&self, nic: &str, port: u32) -> bool {
        let listed = self.names.iter().any(|(name, wanted)| {
            let named = if self.exact { nic == name } else { nic.starts_with(name.as_str()) };
            named && wanted.map_or(!self.wants_port, |wanted| wanted == port)
        });
        let all = !self.wants_port && self.names.is_empty();
        (listed || all) != self.exclude
    }

    /// Names in the list that no adapter has.
    pub(crate) fn unknown(&self, mut nics: impl FnMut(&str) -> bool) -> Vec<&str> {
        self.names.iter().map(|(name, _)| name.as_str()).filter(|name| !nics(name)).collect()
    }

    /// Names that begin or end with a blank.
    pub(crate) fn with_blanks(&self) -> Vec<&str> {
        self.names.iter().map(|(name, _)| name.as_str()).filter(|name| name.trim() != *name).collect()
    }

    /// Names without a port.
    pub(crate) fn without_port(&self) -> Vec<&str> {
        self.names.iter().filter(|(_, port)| port.is_none()).map(|(name, _)| name.as_str()).collect()
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }
}

/// Why a library does not use the adapter of a pair, and which one remains for the GPU.
pub(crate) fn left_out(analysis: &Analysis<'_>, pair: &Pair<'_>, filter: &Filter, variable: &str) -> String {
    let instead = analysis
        .pairs_of(&pair.gpu.address)
        .into_iter()
        .find(|other| !other.nic.is_software() && !other.closed && filter.takes(other.nic));
    let told = match instead.map(|other| (&other.nic.name, other.distance)) {
        Some((name, Some(distance))) => format!("; the nearest allowed one is {name} ({distance})"),
        Some((name, None)) => format!("; allowed: {name}"),
        None => String::new(),
    };
    format!("does not use {}: {variable}{told}", pair.nic.name)
}

/// `mlx5_0:1`. What is no number is port 0 to `atoi`, which no adapter has.
fn parse(text: &str) -> (String, Option<u32>) {
    match text.split_once(':') {
        Some((name, port)) => {
            let digits: String = port.trim().chars().take_while(char::is_ascii_digit).collect();
            (name.to_owned(), Some(digits.parse().unwrap_or(0)))
        }
        None => (text.to_owned(), None),
    }
}

/// `mlx5_[0-3]` becomes four names; more than a machine has become none.
fn expand(name: &str) -> Vec<String> {
    let ranged = || -> Option<Vec<String>> {
        let (begin, rest) = name.split_once('[')?;
        let (range, end) = rest.split_once(']')?;
        let (first, last) = range.split_once('-')?;
        let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
        (first <= last && last - first < 256)
            .then(|| (first..=last).map(|n| format!("{begin}{n}{end}")).collect())
    };
    ranged().unwrap_or_else(|| vec![name.to_owned()])
}

#[cfg(test)]
mod tests {
    use super::*;
    use nobounce_topology::facts::Port;

    /// An adapter with two ports, the first of them active.
    fn nic(name: &str) -> Nic {
        let port = |number, state: &str| Port { number, state: state.to_owned(), ..Port::default() };
        Nic { name: name.to_owned(), ports: vec![port(1, "ACTIVE"), port(2, "DOWN")], ..Nic::default() }
    }

    #[test]
    fn nccl_takes_beginnings_exclusions_and_whole_names() {
        let takes = |list: &str, name: &str| Filter::nccl(list).takes(&nic(name));
        assert!(takes("mlx5", "mlx5_3") && takes("mlx5_1", "mlx5_10") && !takes("=mlx5_1", "mlx5_10"));
        assert!(takes("^mlx5_0:1", "mlx5_1") && !takes("^mlx5_0:1", "mlx5_0"));
        assert!(!takes("^=mlx5_1,mlx5_2", "mlx5_2"));
    }

    #[test]
    fn nccl_keeps_blanks_reads_ports_and_takes_all_by_an_empty_list() {
        let takes = |list: &str, name: &str| Filter::nccl(list).takes(&nic(name));
        assert!(takes("mlx5_0, mlx5_1", "mlx5_0") && !takes("mlx5_0, mlx5_1", "mlx5_1"));
        assert_eq!(Filter::nccl("mlx5_0, mlx5_1").with_blanks(), [" mlx5_1"]);
        assert!(takes("", "mlx5_7") && !takes("mlx5_0:2", "mlx5_0") && takes("mlx5_0:1", "mlx5_0"));
    }

    #[test]
    fn ucx_takes_lists_ranges_and_all() {
        let takes = |list: &str, name: &str| Filter::ucx(list).takes(&nic(name));
        assert!(takes("mlx5_0:1,mlx5_2:1", "mlx5_2") && !takes("mlx5_0:1", "mlx5_2"));
        assert!(takes("all", "mlx5_9") && !takes("eth0", "mlx5_0"));
        assert!(takes("mlx5_[0-3]:1", "mlx5_3") && !takes("^mlx5_3:1", "mlx5_3"));
        assert!(!takes("mlx5_0", "mlx5_0"), "UCX's devices are called mlx5_0:1");
    }
}
