//! Lists of adapter names, as NCCL and UCX read them.

/// Which adapters a variable lets through.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Filter {
    names: Vec<String>,
    exclude: bool,
    exact: bool,
}

impl Filter {
    /// `NCCL_IB_HCA`: names or their beginnings, with ports; `^` excludes, `=` wants whole names.
    pub(crate) fn nccl(text: &str) -> Self {
        let mut rest = text.trim();
        let (mut exclude, mut exact) = (false, false);
        loop {
            if let Some(after) = rest.strip_prefix('^') {
                (exclude, rest) = (true, after);
            } else if let Some(after) = rest.strip_prefix('=') {
                (exact, rest) = (true, after);
            } else {
                break;
            }
        }
        Self { names: split(rest), exclude, exact }
    }

    /// `UCX_NET_DEVICES`: whole names with ports; `all`; `^` excludes; ranges as `mlx5_[0-3]`.
    pub(crate) fn ucx(text: &str) -> Self {
        let rest = text.trim();
        let (exclude, rest) = rest.strip_prefix('^').map_or((false, rest), |rest| (true, rest));
        let names = split(rest);
        if !exclude && names.iter().any(|name| name == "all") {
            return Self { names: Vec::new(), exclude: true, exact: true };
        }
        let names = names.iter().flat_map(|name| expand(name)).collect();
        Self { names, exclude, exact: true }
    }

    /// Whether an adapter passes.
    pub(crate) fn takes(&self, nic: &str) -> bool {
        let listed = self
            .names
            .iter()
            .any(|name| if self.exact { nic == name } else { nic.starts_with(name.as_str()) });
        listed != self.exclude
    }

    /// Names in the list that no adapter has.
    pub(crate) fn unknown(&self, mut nics: impl FnMut(&str) -> bool) -> Vec<&str> {
        self.names.iter().map(String::as_str).filter(|name| !nics(name)).collect()
    }

    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }
}

/// Names without their ports.
fn split(list: &str) -> Vec<String> {
    list.split(',')
        .map(|name| name.trim().split(':').next().unwrap_or_default().to_owned())
        .filter(|name| !name.is_empty())
        .collect()
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

    #[test]
    fn nccl_takes_beginnings_exclusions_and_whole_names() {
        assert!(Filter::nccl("mlx5").takes("mlx5_3"));
        assert!(Filter::nccl("mlx5_1").takes("mlx5_10"));
        assert!(!Filter::nccl("=mlx5_1").takes("mlx5_10"));
        assert!(Filter::nccl("^mlx5_0:1").takes("mlx5_1") && !Filter::nccl("^mlx5_0:1").takes("mlx5_0"));
        assert!(!Filter::nccl("^=mlx5_1,mlx5_2").takes("mlx5_2"));
    }

    #[test]
    fn ucx_takes_lists_ranges_and_all() {
        assert!(Filter::ucx("mlx5_0:1,mlx5_2:1").takes("mlx5_2") && !Filter::ucx("mlx5_0:1").takes("mlx5_2"));
        assert!(Filter::ucx("all").takes("mlx5_9") && !Filter::ucx("eth0").takes("mlx5_0"));
        assert!(Filter::ucx("mlx5_[0-3]:1").takes("mlx5_3") && !Filter::ucx("^mlx5_3").takes("mlx5_3"));
    }
}
