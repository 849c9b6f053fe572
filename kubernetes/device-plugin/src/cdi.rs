//! Whether the node has a CDI file that defines the device.
//!
//! The container runtime reads these files when it creates a container. Without the definition it
//! refuses the container, so devices are advertised as healthy only while the definition exists.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use saphyr_parser::{Event, Parser};

use crate::names::CdiDeviceName;

/// A longer file is not read. Files of other vendors have a few kilobytes per device.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// State of all devices: they share one CDI device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Health {
    /// The file that defines the device.
    Healthy(PathBuf),
    /// Why containers cannot get the device, and what to do.
    Unhealthy(String),
}

impl Health {
    pub(crate) fn is_healthy(&self) -> bool {
        matches!(self, Self::Healthy(_))
    }

    /// The word of the device plugin API.
    pub(crate) fn word(&self) -> &'static str {
        if self.is_healthy() { "Healthy" } else { "Unhealthy" }
    }
}

/// Searches the directories as container runtimes do: `*.json` and `*.yaml`, no subdirectories. Later
/// directories take precedence.
pub(crate) fn find_device(device: &CdiDeviceName, directories: &[PathBuf]) -> Health {
    let mut found = None;
    let mut unreadable = Vec::new();
    for directory in directories {
        let mut here = Vec::new();
        let files = match spec_files(directory) {
            Ok(files) => files,
            Err(error) => {
                unreadable.push(format!("{}: {error}", directory.display()));
                continue;
            }
        };
        for file in files {
            match read_bounded(&file).and_then(|text| defines(&text, device)) {
                Ok(true) => here.push(file),
                Ok(false) => {}
                Err(error) => unreadable.push(format!("{}: {error}", file.display())),
            }
        }
        if let [first, second, ..] = here.as_slice() {
            return Health::Unhealthy(format!(
                "{device} is defined twice, in {} and in {}, and container runtimes then refuse it; \
                 remove one of the files",
                first.display(),
                second.display()
            ));
        }
        found = here.pop().or(found);
    }
    found.map_or_else(|| Health::Unhealthy(not_found(device, directories, &unreadable)), Health::Healthy)
}

fn not_found(device: &CdiDeviceName, directories: &[PathBuf], unreadable: &[String]) -> String {
    let directories: Vec<_> = directories.iter().map(|path| path.display().to_string()).collect();
    let mut text = format!("no CDI file in {} defines {device}", directories.join(" or "));
    if let [first, others @ ..] = unreadable {
        text += &format!(" (cannot read {first}");
        if !others.is_empty() {
            text += &format!(", and {} more", others.len());
        }
        text.push(')');
    }
    text + "; run 'nobounce cdi generate --out /etc/cdi/nobounce.json' on this node"
}

/// Files that a container runtime would read, by name, so that messages do not change their order.
fn spec_files(directory: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry?.path();
        let is_spec = path.extension().is_some_and(|extension| extension == "json" || extension == "yaml");
        if is_spec && !path.is_dir() {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn read_bounded(path: &Path) -> io::Result<String> {
    // Opening a FIFO would block.
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a regular file"));
    }
    let mut text = String::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_FILE_BYTES {
        return Err(io::Error::other(format!("longer than {MAX_FILE_BYTES} bytes")));
    }
    Ok(text)
}

/// One open mapping or sequence of the document.
enum Level {
    /// The key whose value comes next; None where a key comes next.
    Mapping(Option<String>),
    Sequence,
}

/// Whether the text of a CDI file defines the device. JSON is read as YAML, as container runtimes do.
///
/// Works on parser events: anchors are not expanded, so a small file cannot occupy much memory.
fn defines(text: &str, device: &CdiDeviceName) -> io::Result<bool> {
    let mut levels: Vec<Level> = Vec::new();
    let (mut is_kind, mut has_device) = (false, false);
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(io::Error::other)?;
        match event {
            Event::Scalar(value, ..) => {
                if let Some(Level::Mapping(key @ None)) = levels.last_mut() {
                    *key = Some(value.into_owned());
                    continue;
                }
                match levels.as_slice() {
                    [Level::Mapping(Some(key))] if key == "kind" => is_kind = value == device.kind,
                    [Level::Mapping(Some(list)), Level::Sequence, Level::Mapping(Some(key))]
                        if list == "devices" && key == "name" =>
                    {
                        has_device |= value == device.name;
                    }
                    _ => {}
                }
                end_value(&mut levels);
            }
            Event::Alias(_) => end_value(&mut levels),
            Event::MappingStart(..) => levels.push(Level::Mapping(None)),
            Event::SequenceStart(..) => levels.push(Level::Sequence),
            Event::MappingEnd | Event::SequenceEnd => {
                levels.pop();
                end_value(&mut levels);
            }
            // Runtimes read the first document only.
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    Ok(is_kind && has_device)
}

/// After a value the enclosing mapping expects a key, after a key that is not a scalar a value.
fn end_value(levels: &mut [Level]) {
    if let Some(Level::Mapping(key)) = levels.last_mut() {
        *key = if key.is_some() { None } else { Some(String::new()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    const JSON: &str = r#"{"cdiVersion": "0.6.0", "kind": "nobounce.dev/nic",
        "devices": [{"name": "nb0", "containerEdits": {"env": ["A=b"]}}, {"name": "all"}]}"#;

    fn device(name: &str) -> CdiDeviceName {
        format!("nobounce.dev/nic={name}").parse().unwrap()
    }

    fn reason(health: &Health) -> &str {
        match health {
            Health::Unhealthy(reason) => reason,
            Health::Healthy(file) => panic!("healthy by {}", file.display()),
        }
    }

    #[test]
    fn devices_are_found_in_json() {
        assert!(defines(JSON, &device("nb0")).unwrap());
        assert!(defines(JSON, &device("all")).unwrap());
        assert!(!defines(JSON, &device("nb1")).unwrap());
        assert!(!defines(&JSON.replace("nobounce.dev", "example.com"), &device("nb0")).unwrap());
        let with_tabs = "{\n\t\"kind\": \"nobounce.dev/nic\",\n\t\"devices\": [\n\t\t{\n\t\t\t\"name\": \"nb0\"\n\t\t}\n\t]\n}\n";
        assert!(defines(with_tabs, &device("nb0")).unwrap());
    }

    #[test]
    fn devices_are_found_in_yaml() {
        let text = "# comment\ncdiVersion: 0.6.0\ndevices:\n- containerEdits:\n    env:\n    - name=nb1\n    mounts:\n    \
                    - {containerPath: /a, hostPath: /b}\n  name: nb0\n- name: 'nb 2'\nkind: \"nobounce.dev/nic\"\n";
        assert!(defines(text, &device("nb0")).unwrap());
        assert!(!defines(text, &device("nb1")).unwrap());
    }

    #[test]
    fn names_elsewhere_do_not_count() {
        for text in [
            "kind: nobounce.dev/nic\nname: nb0\n",
            "kind: nobounce.dev/nic\ndevices: {name: nb0}\n",
            "kind: nobounce.dev/nic\ndevices: [[{name: nb0}]]\n",
            "kind: nobounce.dev/nic\ndevices: [{other: {name: nb0}}]\n",
            "x: {kind: nobounce.dev/nic}\ndevices: [{name: nb0}]\n",
            "kind: other\n---\nkind: nobounce.dev/nic\ndevices: [{name: nb0}]\n",
            "? [kind]\n: nobounce.dev/nic\n",
            "kind",
            "",
        ] {
            assert!(!defines(text, &device("nb0")).unwrap(), "{text}");
        }
    }

    #[test]
    fn malformed_text_is_an_error() {
        let deep = "[".repeat(200_000);
        for text in ["{", "a: b: c", "\"", "kind: [", "{\"kind\": \"x\"", deep.as_str()] {
            assert!(defines(text, &device("nb0")).is_err(), "{}", &text[..text.len().min(20)]);
        }
    }

    #[test]
    fn aliases_are_not_expanded() {
        let mut text = String::from("a0: &a0 [x]\n");
        for level in 1..40 {
            let below = level - 1;
            text += &format!("a{level}: &a{level} [*a{below}, *a{below}, *a{below}, *a{below}]\n");
        }
        text += "kind: nobounce.dev/nic\ndevices:\n- name: nb0\n";
        assert!(defines(&text, &device("nb0")).unwrap());
    }

    #[test]
    fn directories_are_searched() {
        let folder = TempDir::new("cdi");
        let directories = [folder.path("etc"), folder.path("run")];
        let health = find_device(&device("nb0"), &directories);
        assert!(reason(&health).contains("nobounce cdi generate"), "{health:?}");
        assert_eq!(health.word(), "Unhealthy");

        fs::create_dir(&directories[0]).unwrap();
        fs::write(directories[0].join("nobounce.txt"), JSON).unwrap();
        fs::create_dir(directories[0].join("folder.json")).unwrap();
        assert!(!find_device(&device("nb0"), &directories).is_healthy());

        fs::write(directories[0].join("broken.yaml"), "a: b: c").unwrap();
        let health = find_device(&device("nb0"), &directories);
        assert!(reason(&health).contains("broken.yaml"), "{health:?}");

        // A file of another vendor that is broken does no harm.
        fs::write(directories[0].join("nobounce.json"), JSON).unwrap();
        let health = find_device(&device("nb0"), &directories);
        assert_eq!((health.is_healthy(), health.word()), (true, "Healthy"));
        assert!(!find_device(&device("nb7"), &directories).is_healthy());
    }

    #[test]
    fn a_later_directory_overrides_and_a_second_file_conflicts() {
        let folder = TempDir::new("cdi-conflict");
        let directories = [folder.path("etc"), folder.path("run")];
        for directory in &directories {
            fs::create_dir(directory).unwrap();
            fs::write(directory.join("a.json"), JSON).unwrap();
        }
        assert_eq!(find_device(&device("nb0"), &directories), Health::Healthy(directories[1].join("a.json")));
        fs::write(directories[0].join("b.yaml"), JSON).unwrap();
        let health = find_device(&device("nb0"), &directories);
        assert!(reason(&health).contains("defined twice"), "{health:?}");
        assert!(reason(&health).contains("b.yaml"), "{health:?}");
    }

    #[test]
    fn files_that_are_no_text_or_too_long_are_named() {
        let folder = TempDir::new("cdi-odd");
        let directories = [folder.path("")];
        fs::write(folder.path("bytes.json"), [0xff, 0xfe, 0x00]).unwrap();
        assert!(reason(&find_device(&device("nb0"), &directories)).contains("bytes.json"));
        fs::remove_file(folder.path("bytes.json")).unwrap();
        fs::write(folder.path("long.json"), vec![b' '; (1 << 20) + 1]).unwrap();
        assert!(reason(&find_device(&device("nb0"), &directories)).contains("longer than"));
    }
}
