//! cuFile: where its library is, and what its settings say.

use std::collections::BTreeMap;

use crate::facts::{Cufile, CufileConfig, CufileLibrary, Read};
use crate::sysfs::{Root, Surroundings, settings};

/// Files of settings, in the order of the library.
const FILES: [&str; 2] = ["/etc/cufile.json", "/usr/local/cuda/gds/cufile.json"];
/// Properties that decide the path of bytes.
const PROPERTIES: [&str; 4] = ["allow_compat_mode", "force_compat_mode", "use_pci_p2pdma", "use_poll_mode"];
/// Folders of CUDA and its packages, besides those of the system.
const FOLDERS: [&str; 4] = [
    "/usr/local/cuda/targets/x86_64-linux/lib",
    "/usr/local/cuda/targets/sbsa-linux/lib",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
];
/// Folders of Python packages that bring the library.
const PACKAGES: [&str; 3] = ["nvidia/cufile/lib", "nvidia/cu13/lib", "nvidia/cu12/lib"];
/// Longest file of settings.
const MAX_CONFIG: usize = 1 << 20;

pub(super) fn cufile(root: &Root, surroundings: &Surroundings) -> Cufile {
    let environment: BTreeMap<String, String> = surroundings
        .environment
        .iter()
        .filter(|(name, _)| name.starts_with("CUFILE_") || name.starts_with("KVIKIO_"))
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect();
    let udev = match root.names("/run/udev") {
        Ok(_) => Read::Yes(true),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Read::Yes(false),
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Read::Yes(false),
        Err(error) => Read::no(format!("/run/udev: {error}")),
    };
    Cufile {
        library: library(root, surroundings),
        config: config(root, environment.get("CUFILE_ENV_PATH_JSON").map(String::as_str)),
        environment,
        udev,
    }
}

fn library(root: &Root, surroundings: &Surroundings) -> Read<Option<CufileLibrary>> {
    let mut folders: Vec<String> = Vec::new();
    let paths = surroundings.environment.get("LD_LIBRARY_PATH").map(String::as_str).unwrap_or_default();
    folders.extend(paths.split(':').filter(|path| path.starts_with('/')).take(64).map(str::to_owned));
    folders.extend(settings::LIBRARY_FOLDERS.iter().chain(&FOLDERS).map(|folder| (*folder).to_owned()));
    for packages in settings::python_folders(root, surroundings) {
        folders.extend(PACKAGES.iter().map(|package| format!("{packages}/{package}")));
    }
    if let Some(conda) = surroundings.environment.get("CONDA_PREFIX") {
        folders.push(format!("{conda}/lib"));
    }
    for folder in folders {
        let Ok(names) = root.names(&folder) else { continue };
        let files = names.iter().filter(|name| name.starts_with("libcufile.so"));
        if let Some(name) = files.max_by_key(|name| name.len()) {
            let version = name.strip_prefix("libcufile.so.").filter(|version| version.contains('.'));
            let path = format!("{folder}/{name}");
            return Read::Yes(Some(CufileLibrary { path, version: version.map(str::to_owned) }));
        }
    }
    Read::Yes(None)
}

fn config(root: &Root, named: Option<&str>) -> Read<Option<CufileConfig>> {
    let files: Vec<&str> = named.map_or_else(|| FILES.to_vec(), |named| vec![named]);
    for file in files {
        let bytes = match root.bytes(file) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound && named.is_none() => continue,
            Err(error) => return Read::no(format!("{file}: {error}")),
        };
        return parse(file, &bytes);
    }
    Read::Yes(None)
}

fn parse(path: &str, bytes: &[u8]) -> Read<Option<CufileConfig>> {
    if bytes.len() > MAX_CONFIG {
        return Read::no(format!("{path} is larger than {} KiB", MAX_CONFIG >> 10));
    }
    let text = without_comments(&String::from_utf8_lossy(bytes));
    let json: serde_json::Value = match serde_json::from_str(&text) {
        Ok(json) => json,
        Err(error) => return Read::no(format!("{path} is not valid JSON: {error}")),
    };
    let mut properties = BTreeMap::new();
    for name in PROPERTIES {
        if let Some(value) = json.get("properties").and_then(|properties| properties.get(name)) {
            properties
                .insert(name.to_owned(), value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
    }
    let mut denylist = BTreeMap::new();
    for (name, list) in json.get("denylist").and_then(serde_json::Value::as_object).into_iter().flatten() {
        let texts: Vec<String> =
            list.as_array().into_iter().flatten().filter_map(|v| v.as_str().map(str::to_owned)).collect();
        if !texts.is_empty() {
            denylist.insert(name.clone(), texts);
        }
    }
    Read::Yes(Some(CufileConfig { path: path.to_owned(), properties, denylist }))
}

/// The file of cuFile has comments, which JSON has not: `//` to the end of a line and `/* */`.
/// Line ends stay, so that errors name the right line.
fn without_comments(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars().peekable();
    let mut quoted = false;
    while let Some(c) = chars.next() {
        match c {
            '\\' if quoted => {
                out.push(c);
                out.extend(chars.next());
            }
            '"' => {
                quoted = !quoted;
                out.push(c);
            }
            '/' if !quoted && chars.peek() == Some(&'/') => while chars.next_if(|c| *c != '\n').is_some() {},
            '/' if !quoted && chars.peek() == Some(&'*') => {
                let mut last = ' ';
                chars.next();
                for c in chars.by_ref() {
                    if last == '*' && c == '/' {
                        break;
                    }
                    if c == '\n' {
                        out.push(c);
                    }
                    last = c;
                }
            }
            _ => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"{
        // a comment with "quotes"
        "logging": { "dir": "http://x//y" }, /* two
        lines */
        "properties": {
            "use_pci_p2pdma": true, // at the end
            "allow_compat_mode": "false",
            "posix_pool_slab_size_kb": [4, 1024]
        },
        "denylist": { "filesystems": ["lustre"], "mounts": [] }
    }"#;

    #[test]
    fn settings_are_read_through_comments() {
        let Read::Yes(Some(config)) = parse("/etc/cufile.json", FILE.as_bytes()) else { panic!("unread") };
        assert_eq!(config.properties["use_pci_p2pdma"], "true");
        assert_eq!(config.properties["allow_compat_mode"], "false");
        assert_eq!(config.properties.len(), 2);
        assert_eq!(config.denylist["filesystems"], ["lustre"]);
        assert_eq!(config.denylist.len(), 1);
    }

    #[test]
    fn what_is_no_json_is_unread_with_its_line() {
        let read = parse("/etc/cufile.json", b"{\n// x\n\"a\": }");
        assert!(read.why_not().is_some_and(|why| why.contains("line 3")), "{read:?}");
        for length in 0..FILE.len() - 1 {
            if FILE.is_char_boundary(length) {
                assert!(parse("x", &FILE.as_bytes()[..length]).known().is_none(), "{length}");
            }
        }
        assert!(
            parse("x", b"[1]")
                .known()
                .is_some_and(|config| { config.as_ref().is_some_and(|config| config.properties.is_empty()) })
        );
    }
}
