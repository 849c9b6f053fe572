//! `nobounce cdi check`.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::bail;

use super::args::CheckArgs;
use super::generate::is_json;
use super::rootfs;
use super::spec::{Edits, KIND, Mount, Spec};
use crate::run::container;

/// Where engines look for files.
const FOLDERS: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

pub(super) fn main(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let files = if args.files.is_empty() { installed() } else { args.files.clone() };
    if files.is_empty() && args.rootfs.is_none() {
        bail!(
            "no file of {KIND} in {}; make one: nobounce cdi generate --out {}/nobounce.json",
            FOLDERS.join(" and "),
            FOLDERS[0]
        );
    }
    let mut is_fine = true;
    let mut libraries = Vec::new();
    for file in &files {
        let problems = match read(file) {
            Ok(spec) => {
                libraries.extend(
                    spec.devices
                        .iter()
                        .flat_map(|device| preloaded(&spec, &device.container_edits))
                        .flatten(),
                );
                check(&spec)
            }
            Err(problem) => vec![problem],
        };
        is_fine &= problems.is_empty();
        tell(&file.display().to_string(), &problems);
    }
    if let Some(root) = &args.rootfs {
        if libraries.is_empty() {
            let dropin = container::dropin()?;
            libraries = fs::read_dir(dropin)?
                .flatten()
                .map(|entry| entry.path())
                .filter(|path| path.is_file())
                .collect();
        }
        libraries.sort();
        libraries.dedup();
        let problems = rootfs::problems(root, &libraries);
        is_fine &= problems.is_empty();
        tell(&root.display().to_string(), &problems);
    }
    Ok(ExitCode::from(u8::from(!is_fine)))
}

fn tell(what: &str, problems: &[String]) {
    if problems.is_empty() {
        println!("{what}: ok");
    }
    problems.iter().for_each(|problem| println!("{what}: {problem}"));
}

/// The files of our kind.
fn installed() -> Vec<PathBuf> {
    let entries = FOLDERS.iter().flat_map(|folder| fs::read_dir(folder).into_iter().flatten().flatten());
    let mut files: Vec<_> = entries.map(|entry| entry.path()).collect();
    files.retain(|path| is_json(path) && fs::read_to_string(path).is_ok_and(|text| text.contains(KIND)));
    files.sort();
    files
}

fn read(file: &Path) -> Result<Spec, String> {
    if !is_json(file) {
        return Err("engines ignore it or read it as YAML: give it the ending .json".to_owned());
    }
    let text = fs::read_to_string(file).map_err(|error| error.to_string())?;
    serde_json::from_str(&text).map_err(|error| format!("not a CDI file: {error}"))
}

/// What is wrong with a file.
fn check(spec: &Spec) -> Vec<String> {
    let mut problems = Vec::new();
    if spec.kind != KIND {
        problems.push(format!("kind {:?}: expected {KIND:?}", spec.kind));
    }
    if spec.devices.is_empty() {
        problems.push("it has no device".to_owned());
    }
    for mount in mounts(spec, &Edits::default()) {
        problems.extend(readable(Path::new(&mount.host_path)));
    }
    for device in &spec.devices {
        let edits = &device.container_edits;
        if edits.variable("NOBOUNCE_ADDR").is_none() {
            problems.push(format!("device {}: NOBOUNCE_ADDR is not set", device.name));
        }
        let files = preloaded(spec, edits);
        if files.is_empty() {
            problems.push(format!("device {}: LD_PRELOAD is not set", device.name));
        }
        for (file, preload) in files.iter().zip(edits.variable("LD_PRELOAD").unwrap_or_default().split(':')) {
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
    let list = edits.variable("LD_PRELOAD").unwrap_or_default();
    let on_host = |path: &str| {
        mounts(spec, edits).find_map(|mount| {
            let rest = Path::new(path).strip_prefix(&mount.container_path).ok()?;
            Some(Path::new(&mount.host_path).join(rest))
        })
    };
    list.split(':').filter(|path| !path.is_empty()).map(on_host).collect()
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
        assert!(spec(&folder, |value| value["hooks"] = 1.into()).unwrap_err().contains("unknown field"));
        fs::set_permissions(folder.join("a.so"), fs::Permissions::from_mode(0o600)).unwrap();
        assert!(told(&|_| {}).contains("chmod a+r"));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(told(&|_| {}).contains("chmod a+rx"));
        fs::remove_dir_all(folder).unwrap();
    }
}
