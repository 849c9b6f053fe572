//! NCCL's configuration files: `NAME=value` lines, which the environment overrides. Values that the
//! user has set there must not be overridden.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where all users of a machine have it.
const EVERYBODY: &str = "/etc/nccl.conf";

/// The settings of NCCL's files.
#[derive(Debug, Default)]
pub(crate) struct NcclConf(Vec<(String, String)>);

impl NcclConf {
    /// Reads the files that NCCL would read: the one named by `NCCL_CONF_FILE`, or else the user's
    /// own, and then the system-wide one.
    pub(crate) fn read(now: impl Fn(&str) -> Option<OsString>) -> Self {
        let named = now("NCCL_CONF_FILE").filter(|file| !file.is_empty()).map(PathBuf::from);
        let own = named.or_else(|| Some(Path::new(&now("HOME")?).join(".nccl.conf")));
        let mut found = Self::default();
        for file in own.into_iter().chain([PathBuf::from(EVERYBODY)]) {
            if let Ok(text) = std::fs::read(file) {
                found.add(&String::from_utf8_lossy(&text));
            }
        }
        found
    }

    fn add(&mut self, text: &str) {
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            if let Some((name, value)) = line.split_once('=') {
                self.0.push((name.to_owned(), value.to_owned()));
            }
        }
    }

    /// What a variable of NCCL's is there; the first file counts.
    pub(crate) fn get(&self, name: &str) -> Option<OsString> {
        let (_, value) = self.0.iter().find(|(known, _)| known == name && name.starts_with("NCCL_"))?;
        Some(value.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(files: &[&str]) -> NcclConf {
        let mut conf = NcclConf::default();
        files.iter().for_each(|text| conf.add(text));
        conf
    }

    #[test]
    fn the_first_word_counts_and_comments_do_not() {
        let conf = of(&[
            "# NCCL_PROTO=LL128\nNCCL_MAX_NCHANNELS=8\nno setting\n",
            "NCCL_MAX_NCHANNELS=2\nNCCL_PROTO=LL\n",
        ]);
        assert_eq!(conf.get("NCCL_MAX_NCHANNELS"), Some("8".into()));
        assert_eq!(conf.get("NCCL_PROTO"), Some("LL".into()));
        assert_eq!(conf.get("NCCL_DEBUG"), None);
    }

    /// NCCL puts all entries into its environment, but after the libraries are loaded: only its own
    /// names are settings.
    #[test]
    fn only_what_is_nccl_s_own_is_taken() {
        assert_eq!(of(&["LD_PRELOAD=x.so\n"]).get("LD_PRELOAD"), None);
    }

    #[test]
    fn the_file_that_is_named_is_read_in_place_of_the_user_s() {
        let folder = std::env::temp_dir().join(format!("nobounce-nccl-conf-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(".nccl.conf"), "NCCL_NET_GDR_LEVEL=PHB\n").unwrap();
        std::fs::write(folder.join("other"), "NCCL_NET_GDR_LEVEL=PIX\n").unwrap();
        let read = |named: Option<PathBuf>| {
            NcclConf::read(|name| match name {
                "HOME" => Some(folder.clone().into()),
                "NCCL_CONF_FILE" => named.clone().map(Into::into),
                _ => None,
            })
        };
        let levels = [None, Some(folder.join("other"))].map(|named| read(named).get("NCCL_NET_GDR_LEVEL"));
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(levels, [Some("PHB".into()), Some("PIX".into())]);
    }
}
