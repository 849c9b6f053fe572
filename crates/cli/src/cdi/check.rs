//! `nobounce cdi check`.

use std::fs;
use std::io::Read as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;

use super::args::CheckArgs;
use super::spec::{Edits, KIND, Mount, Spec};
use super::{rootfs, rules, yaml};
use crate::run::container;

/// Where engines look for files. Devices of the second one replace those of the first.
const FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];
/// Engines read larger files, too, but no vendor has one.
const MOST_BYTES: u64 = 1 << 20;

/// A file, and what it says or why it says nothing.
struct File {
    path: PathBuf,
    spec: Result<Spec, String>,
}

pub(super) fn main(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let installed = installed(&FOLDERS.map(Path::new));
    let (files, beside) = if args.files.is_empty() {
        (installed, Vec::new())
    } else {
        (args.files.iter().map(|path| File::read(path)).collect(), installed)
    };
    if files.is_empty() && args.rootfs.is_none() {
        bail!(
            "no file of {KIND} in {}; make one: nobounce cdi generate --out {}/nobounce.json",
            FOLDERS.join(" and "),
            FOLDERS[0]
        );
    }
    let mut is_fine = true;
    for file in &files {
        let mut problems = match &file.spec {
            Ok(spec) => check(spec),
            Err(problem) => vec![problem.clone()],
        };
        problems.extend(conflicts(file, files.iter().chain(&beside)));
        is_fine &= problems.is_empty();
        tell(&file.path.display().to_string(), &problems);
    }
    if let Some(root) = &args.rootfs {
        let problems = rootfs::problems(root, &libraries(&files)?);
        is_fine &= problems.is_empty();
        tell(&root.display().to_string(), &problems);
    }
    Ok(ExitCode::from(u8::from(!is_fine)))
}

/// The libraries that files preload; without files those of this machine.
fn libraries(files: &[File]) -> anyhow::Result<Vec<PathBuf>> {
    let specs = files.iter().filter_map(|file| file.spec.as_ref().ok());
    let edits = specs.flat_map(|spec| spec.devices.iter().map(move |device| (spec, &device.container_edits)));
    let mut found: Vec<_> = edits.flat_map(|(spec, edits)| preloaded(spec, edits)).flatten().collect();
    if found.is_empty() {
        let entries = fs::read_dir(container::dropin()?)?.flatten();
        found = entries.map(|entry| entry.path()).filter(|path| path.is_file()).collect();
    }
    found.sort();
    found.dedup();
    Ok(found)
}

fn tell(what: &str, problems: &[String]) {
    if problems.is_empty() {
        println!("{what}: ok");
    }
    problems.iter().for_each(|problem| println!("{what}: {problem}"));
}

/// The files of our kind, and those that may be of it and cannot be read.
fn installed(folders: &[&Path]) -> Vec<File> {
    let entries = folders.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let mut paths: Vec<_> = entries.map(|entry| entry.path()).collect();
    paths.retain(|path| is_read_by_engines(path) && !path.is_dir());
    paths.sort();
    let files = paths.iter().map(|path| File::read(path));
    files
        .filter(|file| match &file.spec {
            Ok(spec) => spec.kind == KIND,
            Err(_) => text_of(&file.path).is_ok_and(|text| text.contains(KIND)),
        })
        .collect()
}

fn is_read_by_engines(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "json" || ending == "yaml")
}

impl File {
    fn read(path: &Path) -> Self {
        let spec = if is_read_by_engines(path) {
            text_of(path).and_then(|text| {
                let value = yaml::parse(&text).map_err(|error| format!("not a CDI file: {error}"))?;
                serde_json::from_value(value).map_err(|error| format!("not a CDI file: {error}"))
            })
        } else {
            Err("engines ignore it: give it the ending .json or .yaml".to_owned())
        };
        Self { path: path.to_owned(), spec }
    }

    fn folder(&self) -> Option<PathBuf> {
        self.path.canonicalize().ok()?.parent().map(Path::to_owned)
    }
}

fn text_of(path: &Path) -> Result<String, String> {
    let read = || {
        // Opening a FIFO would block.
        if !fs::metadata(path)?.is_file() {
            return Err(std::io::Error::other("not a regular file"));
        }
        let mut text = String::new();
        fs::File::open(path)?.take(MOST_BYTES + 1).read_to_string(&mut text)?;
        if text.len() as u64 > MOST_BYTES {
            return Err(std::io::Error::other(format!("longer than {MOST_BYTES} bytes")));
        }
        Ok(text)
    };
    read().map_err(|error| error.to_string())
}

/// Devices that another file of the folder defines, too.
fn conflicts<'a>(file: &File, others: impl Iterator<Item = &'a File>) -> Vec<String> {
    let (Ok(spec), Some(folder), Ok(path)) = (&file.spec, file.folder(), file.path.canonicalize()) else {
        return Vec::new();
    };
    let mut found = Vec::new();
    for other in others.filter(|other| other.folder().is_some_and(|there| there == folder)) {
        let (Ok(theirs), Ok(at)) = (&other.spec, other.path.canonicalize()) else { continue };
        if at == path || theirs.kind != spec.kind {
            continue;
        }
        let names = spec.devices.iter().map(|device| device.name.as_str());
        let both: Vec<_> =
            names.filter(|name| theirs.devices.iter().any(|device| device.name == *name)).collect();
        if !both.is_empty() {
            found.push(format!(
                "{} defines {}, too, and engines then refuse them: remove one of the files",
                other.path.display(),
                both.join(", ")
            ));
        }
    }
    found.sort();
    found.dedup();
    found
}

/// What is wrong with a file.
fn check(spec: &Spec) -> Vec<String> {
    let mut problems = rules::broken(spec);
    if spec.kind != KIND {
        problems.push(format!("kind {:?}: expected {KIND:?}", spec.kind));
    }
    let all = spec.devices.iter().map(|device| &device.container_edits).chain([&spec.container_edits]);
    for mount in all.flat_map(|edits| &edits.mounts) {
        // Of another type it has no folder.
        if Path::new(&mount.host_path).is_absolute() && ["", "bind", "none"].contains(&mount.kind.as_str()) {
            problems.extend(readable(Path::new(&mount.host_path)));
        }
    }
    for device in &spec.devices {
        let edits = &device.container_edits;
        let variable = |name| edits.variable(name).or_else(|| spec.container_edits.variable(name));
        if variable("NOBOUNCE_ADDR").is_none() {
            problems.push(format!("device {}: NOBOUNCE_ADDR is not set", device.name));
        }
        let files = preloaded(spec, edits);
        if files.is_empty() {
            problems.push(format!("device {}: LD_PRELOAD is not set", device.name));
        }
        for (file, preload) in files.iter().zip(names_of(variable("LD_PRELOAD"))) {
            match file {
                None => {
                    problems.push(format!("device {}: no mount has {preload} of LD_PRELOAD", device.name))
                }
                Some(file) if !file.is_file() => problems.push(format!(
                    "{}: no such library; install nobounce there, or generate the file again",
                    file.display()
                )),
                Some(_) => {}
            }
        }
    }
    problems.dedup();
    problems
}

fn mounts<'a>(spec: &'a Spec, edits: &'a Edits) -> impl Iterator<Item = &'a Mount> {
    spec.container_edits.mounts.iter().chain(&edits.mounts)
}

/// The libraries that are preloaded, where they are on this machine.
fn preloaded(spec: &Spec, edits: &Edits) -> Vec<Option<PathBuf>> {
    let list = edits.variable("LD_PRELOAD").or_else(|| spec.container_edits.variable("LD_PRELOAD"));
    let on_host = |path: &str| {
        mounts(spec, edits).find_map(|mount| {
            let rest = Path::new(path).strip_prefix(&mount.container_path).ok()?;
            Some(Path::new(&mount.host_path).join(rest))
        })
    };
    names_of(list).map(on_host).collect()
}

fn names_of(list: Option<&str>) -> impl Iterator<Item = &str> {
    list.unwrap_or_default().split(':').filter(|path| !path.is_empty())
}

/// Why users other than the owner cannot load libraries from this folder.
pub(super) fn readable(folder: &Path) -> Vec<String> {
    let mode = |path: &Path| fs::metadata(path).map(|found| found.permissions().mode());
    let mut problems = Vec::new();
    match mode(folder) {
        Err(error) => return vec![format!("{}: {error}", folder.display())],
        // A bind mount hides the folders above it.
        Ok(mode) if mode & 0o005 != 0o005 => problems.push(format!(
            "{}: not readable by all users, so containers with another user get no device: chmod a+rx it",
            folder.display()
        )),
        Ok(_) => {}
    }
    let files = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for file in files.filter(|path| mode(path).is_ok_and(|mode| mode & 0o004 == 0)) {
        problems.push(format!("{}: not readable by all users: chmod a+r it", file.display()));
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    type Change<'a> = &'a dyn Fn(&mut serde_json::Value);

    fn spec(folder: &Path, change: impl Fn(&mut serde_json::Value)) -> Result<Spec, String> {
        let mut value = serde_json::json!({
            "cdiVersion": "0.5.0", "kind": KIND,
            "containerEdits": { "mounts": [{ "hostPath": folder, "containerPath": "/opt/nb" }] },
            "devices": [{ "name": "nb0", "containerEdits": { "env": ["LD_PRELOAD=/opt/nb/a.so", "NOBOUNCE_ADDR=eth0"] } }],
        });
        change(&mut value);
        serde_json::from_value(value).map_err(|error| error.to_string())
    }

    #[test]
    fn each_problem_is_named() {
        let folder = std::env::temp_dir().join(format!("cdi-check-{}", std::process::id()));
        fs::create_dir(&folder).unwrap();
        fs::write(folder.join("a.so"), "").unwrap();
        let told = |change: Change<'_>| check(&spec(&folder, change).unwrap()).join("\n");
        assert_eq!(told(&|_| {}), "");
        let edits = |value: &mut serde_json::Value, env: &[&str]| {
            value["devices"][0]["containerEdits"]["env"] = env.into()
        };
        let cases: [(Change<'_>, &str); 6] = [
            (&|value| value["kind"] = "vendor.com/net".into(), "expected \"nobounce.dev/nic\""),
            (&|value| value["devices"] = [0; 0].into(), "no device"),
            (&|value| edits(value, &["LD_PRELOAD=/opt/nb/a.so"]), "NOBOUNCE_ADDR is not set"),
            (&|value| edits(value, &["NOBOUNCE_ADDR=eth0"]), "LD_PRELOAD is not set"),
            (
                &|value| edits(value, &["NOBOUNCE_ADDR=eth0", "LD_PRELOAD=/usr/a.so"]),
                "no mount has /usr/a.so",
            ),
            (
                &|value| edits(value, &["NOBOUNCE_ADDR=eth0", "LD_PRELOAD=/opt/nb/b.so"]),
                "b.so: no such library",
            ),
        ];
        for (change, part) in cases {
            assert!(told(change).contains(part), "{part}: {}", told(change));
        }
        assert!(spec(&folder, |value| value["hook"] = 1.into()).unwrap_err().contains("unknown field"));
        fs::set_permissions(folder.join("a.so"), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(told(&|_| {}).contains("chmod a+r"));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(told(&|_| {}).contains("chmod a+rx"));
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn files_of_one_folder_are_compared() {
        let root = std::env::temp_dir().join(format!("cdi-compare-{}", std::process::id()));
        let folders = ["etc", "run"].map(|name| root.join(name));
        for folder in &folders {
            fs::create_dir_all(folder).unwrap();
        }
        let text = |kind: &str, name: &str| {
            format!(
                "cdiVersion: 0.5.0\nkind: {kind}\ndevices:\n- name: {name}\n  containerEdits: {{env: [A=b]}}\n"
            )
        };
        let write = |at: usize, file: &str, text: &str| fs::write(folders[at].join(file), text).unwrap();
        let told = || {
            let files = installed(&[&folders[0], &folders[1]]);
            let all: Vec<_> = files.iter().map(|file| conflicts(file, files.iter()).join("")).collect();
            all
        };
        write(0, "a.json", &text(KIND, "nb0"));
        write(0, "vendor.yaml", &text("vendor.com/net", "nb0"));
        write(0, "broken.yaml", "a: b: c");
        write(0, "notes.txt", KIND);
        write(1, "b.yaml", &text(KIND, "nb0"));
        assert_eq!(told(), ["", ""], "the second folder has precedence");
        write(0, "c.yaml", &text(KIND, "nb0"));
        let all = told();
        assert!(all[0].contains("c.yaml defines nb0, too") && all[1].contains("a.json defines"), "{all:?}");
        write(0, "c.yaml", &format!("kind: {KIND}: b"));
        assert_eq!(told().len(), 3, "a broken file of our kind is told");
        fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn endings_and_odd_files_are_named() {
        let root = std::env::temp_dir().join(format!("cdi-odd-{}", std::process::id()));
        fs::create_dir(&root).unwrap();
        let error = |name: &str| File::read(&root.join(name)).spec.unwrap_err();
        fs::write(root.join("a.yml"), "").unwrap();
        assert!(error("a.yml").contains("ending"));
        fs::write(root.join("a.json"), "{\"kind\": \"a\", \"kind\": \"b\"}").unwrap();
        assert!(error("a.json").contains("given twice"));
        assert!(error("none.json").contains("No such file"));
        fs::create_dir(root.join("folder.json")).unwrap();
        assert!(error("folder.json").contains("not a regular file"));
        fs::write(root.join("long.json"), vec![b' '; (1 << 20) + 1]).unwrap();
        assert!(error("long.json").contains("longer"));
        fs::remove_dir_all(root).unwrap();
    }
}
