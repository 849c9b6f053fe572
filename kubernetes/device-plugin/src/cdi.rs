//! Whether the node has a CDI file that defines the device, and the folders that it mounts.
//!
//! The container runtime reads these files when it creates a container. Without the definition, or
//! without a folder that it mounts, it refuses the container, so devices are advertised as healthy
//! only while both exist.

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

/// Searches the directories as container runtimes do: `*.json` and `*.yaml`, no subdirectories.
/// Later directories take precedence.
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
            match read_bounded(&file).and_then(|text| mounts_of(&text, device)) {
                Ok(Some(mounts)) => here.push((file, mounts)),
                Ok(None) => {}
                Err(error) => unreadable.push(format!("{}: {error}", file.display())),
            }
        }
        if let [(first, _), (second, _), ..] = here.as_slice() {
            return Health::Unhealthy(format!(
                "{device} is defined twice, in {} and in {}, and container runtimes then refuse it; \
                 remove one of the files",
                first.display(),
                second.display()
            ));
        }
        found = here.pop().or(found);
    }
    let Some((file, mounts)) = found else {
        return Health::Unhealthy(not_found(device, directories, &unreadable));
    };
    match mounts.iter().find(|path| !has_content(path)) {
        None => Health::Healthy(file),
        Some(path) => Health::Unhealthy(format!(
            "{} mounts {}, where nothing is; install nobounce there, or mount that folder into the plugin's container, too",
            file.display(),
            path.display()
        )),
    }
}

/// Whether a container would find anything at a path of this node.
fn has_content(path: &Path) -> bool {
    match fs::read_dir(path) {
        Ok(mut entries) => entries.next().is_some(),
        // A file, or a folder that only others may read.
        Err(_) => fs::metadata(path).is_ok(),
    }
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

/// What a CDI file says so far.
#[derive(Default)]
struct Contents {
    is_kind: bool,
    /// Folders that all devices mount, and those of the device that is asked for.
    common: Vec<PathBuf>,
    own: Option<Vec<PathBuf>>,
    /// The device that is being read.
    name: String,
    mounts: Vec<PathBuf>,
}

/// The folders of this node that the device mounts; None where the text of a CDI file does not
/// define it. JSON is read as YAML, as container runtimes do.
///
/// Works on parser events: anchors are not expanded, so a small file cannot occupy much memory.
fn mounts_of(text: &str, device: &CdiDeviceName) -> io::Result<Option<Vec<PathBuf>>> {
    let mut levels: Vec<Level> = Vec::new();
    let mut contents = Contents::default();
    for event in Parser::new_from_str(text) {
        let (event, _) = event.map_err(io::Error::other)?;
        match event {
            Event::Scalar(value, ..) => {
                if let Some(Level::Mapping(key @ None)) = levels.last_mut() {
                    *key = Some(value.into_owned());
                    continue;
                }
                contents.take(&place(&levels), &value, device);
                end_value(&mut levels);
            }
            Event::Alias(_) => end_value(&mut levels),
            Event::MappingStart(..) => levels.push(Level::Mapping(None)),
            Event::SequenceStart(..) => levels.push(Level::Sequence),
            Event::MappingEnd | Event::SequenceEnd => {
                levels.pop();
                if place(&levels) == ["devices", ""] {
                    contents.end_device(device);
                }
                end_value(&mut levels);
            }
            // Runtimes read the first document only.
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    let Contents { is_kind, common, own, .. } = contents;
    Ok(own.filter(|_| is_kind).map(|own| common.into_iter().chain(own).collect()))
}

/// The keys that lead to a value; a sequence is empty. A value that is a key itself has none.
fn place(levels: &[Level]) -> Vec<&str> {
    let names = levels.iter().map(|level| match level {
        Level::Mapping(key) => key.as_deref().unwrap_or("?"),
        Level::Sequence => "",
    });
    names.collect()
}

impl Contents {
    fn take(&mut self, place: &[&str], value: &str, device: &CdiDeviceName) {
        // Of another type, such as tmpfs, a mount has no folder.
        let folder = || Some(PathBuf::from(value)).filter(|path| path.is_absolute());
        match place {
            ["kind"] => self.is_kind = value == device.kind,
            ["devices", "", "name"] => value.clone_into(&mut self.name),
            ["containerEdits", "mounts", "", "hostPath"] => self.common.extend(folder()),
            ["devices", "", "containerEdits", "mounts", "", "hostPath"] => self.mounts.extend(folder()),
            _ => {}
        }
    }

    fn end_device(&mut self, device: &CdiDeviceName) {
        let mounts = std::mem::take(&mut self.mounts);
        if std::mem::take(&mut self.name) == device.name {
            self.own = Some(mounts);
        }
    }
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

    fn defines(text: &str, device: &CdiDeviceName) -> io::Result<bool> {
        Ok(mounts_of(text, device)?.is_some())
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
    fn folders_that_are_mounted_have_to_exist() {
        let text = "kind: nobounce.dev/nic\ncontainerEdits: {mounts: [{hostPath: /a, containerPath: /x}, {hostPath: tmpfs}]}\n\
                    devices:\n- containerEdits: {mounts: [{hostPath: /b}]}\n  name: nb0\n- name: nb1\n";
        let mounts = |name| mounts_of(text, &device(name)).unwrap().unwrap();
        assert_eq!(mounts("nb0"), ["/a", "/b"].map(PathBuf::from));
        assert_eq!(mounts("nb1"), ["/a"].map(PathBuf::from));

        let folder = TempDir::new("cdi-mounts");
        let (directories, libraries) = ([folder.path("cdi")], folder.path("lib"));
        fs::create_dir(&directories[0]).unwrap();
        let path = libraries.display();
        let text = format!(
            "kind: nobounce.dev/nic\ncontainerEdits: {{mounts: [{{hostPath: {path}}}]}}\ndevices: [{{name: nb0}}]\n"
        );
        fs::write(directories[0].join("a.yaml"), text).unwrap();
        let health = || find_device(&device("nb0"), &directories);
        assert!(reason(&health()).contains("where nothing is"), "{:?}", health());
        fs::create_dir(&libraries).unwrap();
        assert!(!health().is_healthy(), "an empty folder");
        fs::write(libraries.join("lib.so"), "").unwrap();
        assert!(health().is_healthy());
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
