//! cuFile itself: its library and settings, and those of KvikIO.

use super::{ChainStep, step};
use crate::finding::{Finding, Fix, Severity};
use crate::storage_verdict::State;
use nobounce_topology::facts::{Facts, Storage};

/// A setting of cuFile, and where it is from.
pub(super) struct CufileSetting {
    pub(super) value: Option<bool>,
    source: String,
}

/// What cuFile's settings say.
pub(super) struct Settings {
    pub(super) force: CufileSetting,
    pub(super) allow: CufileSetting,
    pub(super) p2pdma: CufileSetting,
}

pub(super) fn settings(storage: &Storage) -> Settings {
    Settings {
        force: setting(storage, "CUFILE_FORCE_COMPAT_MODE", "force_compat_mode", false),
        allow: setting(storage, "CUFILE_ALLOW_COMPAT_MODE", "allow_compat_mode", true),
        p2pdma: setting(storage, "CUFILE_USE_PCIP2PDMA", "use_pci_p2pdma", false),
    }
}

fn setting(storage: &Storage, variable: &str, name: &str, default: bool) -> CufileSetting {
    match storage.property(variable, name) {
        Some((text, source)) => {
            CufileSetting { value: switch(text), source: format!("{source} is {text:?}") }
        }
        None if storage.cufile.config.known().is_none() => {
            let why = storage.cufile.config.why_not().unwrap_or_default();
            CufileSetting { value: None, source: format!("properties.{name}: {why}") }
        }
        None => CufileSetting {
            value: Some(default),
            source: format!("properties.{name} is not set; the default is {default}"),
        },
    }
}

fn switch(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" | "yes" | "on" => Some(true),
        "false" | "0" | "no" | "off" => Some(false),
        _ => None,
    }
}

pub(super) fn steps(facts: &Facts, storage: &Storage) -> Vec<ChainStep> {
    let mut steps = vec![configured(storage)];
    steps.push(asked(facts, storage));
    steps.push(library(storage));
    steps.push(udev(facts, storage));
    steps
}

/// Compat mode and the lists of what cuFile leaves alone.
fn configured(storage: &Storage) -> ChainStep {
    const NAME: &str = "cuFile settings";
    let settings = settings(storage);
    let kvikio = kvikio(storage);
    if let Some(denied) = denied(storage) {
        let finding = Finding::new(
            "storage-denylist",
            Severity::Error,
            format!("the settings of cuFile exclude {denied}"),
        )
        .why("cuFile does not use its direct routes for what its denylist names.")
        .seen("denylist in cufile.json", denied.clone())
        .fix(
            Fix::both()
                .run("sudoedit /etc/cufile.json")
                .remark("take it out of \"denylist\"; or point CUFILE_ENV_PATH_JSON to a file without it"),
        );
        return step(NAME, State::Blocks, State::Blocks, format!("denylist: {denied}"))
            .because(finding)
            .noting(kvikio);
    }
    match settings.force.value {
        Some(true) => {
            let finding = Finding::new("storage-compat-forced", Severity::Error, "compat mode is forced")
                .why("cuFile then reads every file through host memory, whatever machine and filesystem allow.")
                .seen("cuFile", settings.force.source)
                .fix(Fix::container().set("CUFILE_FORCE_COMPAT_MODE=false"));
            step(NAME, State::Blocks, State::Blocks, "compat mode is forced").because(finding).noting(kvikio)
        }
        Some(false) if storage.cufile.config.known().is_some() => {
            let file = match storage.cufile.config.known() {
                Some(Some(config)) => config.path.clone(),
                _ => "no cufile.json; defaults".to_owned(),
            };
            let allow = match settings.allow.value {
                Some(true) => "compat mode allowed",
                Some(false) => "compat mode not allowed",
                None => "compat mode unknown",
            };
            let poll =
                storage.property("CUFILE_USE_POLL_MODE", "use_poll_mode").and_then(|(text, _)| switch(text));
            let poll = if poll == Some(true) { ", poll mode" } else { "" };
            step(NAME, State::Ok, State::Ok, format!("{file}: {allow}{poll}")).noting(kvikio)
        }
        _ => {
            let source = storage.cufile.config.why_not().map_or(settings.force.source, ToOwned::to_owned);
            let severity =
                if storage.cufile.config.is_not_recorded() { Severity::Unknown } else { Severity::Error };
            let finding = Finding::new("storage-cufile-config", severity, "the settings of cuFile cannot be read")
                .why("They decide the route: compat mode can be forced, P2PDMA must be requested. cuFile may use its defaults, or fail.")
                .seen("cuFile", source.clone())
                .fix(Fix::both().run("sed 's|//.*||' \"${CUFILE_ENV_PATH_JSON:-/etc/cufile.json}\" | python3 -m json.tool"));
            step(NAME, State::Unknown, State::Unknown, source).because(finding).noting(kvikio)
        }
    }
}

/// Whether the settings request P2PDMA: it is off by default.
fn asked(facts: &Facts, storage: &Storage) -> ChainStep {
    const NAME: &str = "use_pci_p2pdma";
    let asked = settings(storage).p2pdma;
    match asked.value {
        Some(true) => step(NAME, State::Ok, State::NotNeeded, asked.source),
        Some(false) => {
            let finding =
                Finding::new("storage-p2pdma-off", Severity::Error, "cuFile is not told to use P2PDMA")
                    .why("P2PDMA needs no nvidia-fs and no patched drivers, but is off by default.")
                    .seen("cuFile", asked.source.clone())
                    .fix(
                        Fix::container()
                            .set("CUFILE_USE_PCIP2PDMA=true")
                            .remark("or \"properties\": {\"use_pci_p2pdma\": true} in /etc/cufile.json"),
                    );
            // Settings of the host do not reach a container by themselves.
            let finding = if facts.is_container() && storage.cufile.config.known() == Some(&None) {
                finding
                    .seen("/etc/cufile.json", "not there, in this container")
                    .fix(Fix::container().option("-v /etc/cufile.json:/etc/cufile.json:ro"))
            } else {
                finding
            };
            step(NAME, State::Blocks, State::NotNeeded, asked.source).because(finding)
        }
        // Settings that cannot be read have their finding already.
        None if storage.cufile.config.known().is_none() => {
            step(NAME, State::Unknown, State::NotNeeded, asked.source)
        }
        None => {
            let title = "use_pci_p2pdma is neither true nor false";
            let finding = Finding::new("storage-p2pdma-off", Severity::Unknown, title)
                .why("What cuFile makes of the value is not known.")
                .seen("cuFile", asked.source.clone())
                .fix(Fix::container().set("CUFILE_USE_PCIP2PDMA=true"));
            step(NAME, State::Unknown, State::NotNeeded, asked.source).because(finding)
        }
    }
}

fn library(storage: &Storage) -> ChainStep {
    const NAME: &str = "libcufile";
    let finding = |severity, title: &str, value: &str| {
        Finding::new("storage-no-libcufile", severity, title)
            .why("Without libcufile.so.0 programs read files into host memory by themselves (KvikIO's compatibility mode), or fail. A program may bring a library of its own, which was not searched for.")
            .seen("libcufile.so*", value)
            .fix(Fix::container().run("pip install nvidia-cufile-cu12").remark("for Python"))
.fix(Fix::container().run("sudo apt install nvidia-gds").remark("for other programs"))
    };
    match storage.cufile.library.known() {
        Some(Some(library)) => step(NAME, State::Ok, State::Ok, library.path.clone()),
        Some(None) => {
            step(NAME, State::Unknown, State::Unknown, "not found in the usual folders").because(finding(
                Severity::Unknown,
                "libcufile was not found",
                "neither in LD_LIBRARY_PATH, the system, CUDA, nor Python's packages",
            ))
        }
        None => {
            let why = storage.cufile.library.why_not().unwrap_or_default();
            step(NAME, State::Unknown, State::Unknown, why).because(finding(
                Severity::Unknown,
                "libcufile was not searched for",
                why,
            ))
        }
    }
}

fn udev(facts: &Facts, storage: &Storage) -> ChainStep {
    const NAME: &str = "udev";
    let finding = |value: &str| {
        let finding = Finding::new("storage-udev", Severity::Unknown, "/run/udev cannot be read")
            .why("cuFile identifies drives by udev's records; without them it logs 'error creating udev_device' and may use compat mode. KvikIO uses POSIX reads then.")
            .seen("/run/udev", value);
        if facts.is_container() {
            finding.fix(Fix::container().option("-v /run/udev:/run/udev:ro"))
        } else {
            finding.fix(Fix::host().run("sudo systemctl start systemd-udevd && ls /run/udev/data"))
        }
    };
    match storage.cufile.udev.known() {
        Some(true) => step(NAME, State::Ok, State::Ok, "/run/udev is readable"),
        Some(false) => step(NAME, State::Unknown, State::Unknown, "/run/udev is not there, or not readable")
            .because(finding("not readable")),
        None => {
            let why = storage.cufile.udev.why_not().unwrap_or_default();
            step(NAME, State::Unknown, State::Unknown, why).because(finding(why))
        }
    }
}

/// What the denylist says of this path.
fn denied(storage: &Storage) -> Option<String> {
    let config = storage.cufile.config.known()?.as_ref()?;
    let mount = storage.mount.known()?;
    let names = |list: &str| config.denylist.get(list).cloned().unwrap_or_default();
    if names("filesystems").contains(&mount.kind) {
        return Some(format!("filesystems of type {}", mount.kind));
    }
    if names("mounts").contains(&mount.point) {
        return Some(format!("the mount {}", mount.point));
    }
    let devices = names("devices");
    let device = storage
        .devices
        .known()
        .into_iter()
        .flatten()
        .find(|device| devices.contains(&format!("/dev/{}", device.name)));
    device.map(|device| format!("/dev/{}", device.name))
}

/// KvikIO has a compatibility mode of its own, which does not ask cuFile.
fn kvikio(storage: &Storage) -> Option<Finding> {
    let text = storage.cufile.environment.get("KVIKIO_COMPAT_MODE")?;
    (switch(text) == Some(true)).then(|| {
        Finding::new("storage-kvikio-compat", Severity::Warning, format!("KVIKIO_COMPAT_MODE={text}: KvikIO does not use cuFile"))
            .why("KvikIO, and cuDF and others above it, then read by POSIX calls through host memory, even where cuFile would be direct.")
            .seen("environment", format!("KVIKIO_COMPAT_MODE={text}"))
            .fix(Fix::container().run("unset KVIKIO_COMPAT_MODE").remark("AUTO: cuFile first, POSIX where it does not work"))
            .of_library("KvikIO")
    })
}
