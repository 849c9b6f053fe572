//! `nobounce cdi generate`.

use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::net::IpAddr;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, bail};

use super::args::CdiGenerateArgs;
use super::spec::{CdiDevice, Edits, KIND, Mount, Spec};
use crate::run::container;

pub(super) fn main(args: &CdiGenerateArgs) -> anyhow::Result<ExitCode> {
    let mut dropin = container::dropin()?;
    if let Some(folder) = &args.install {
        install(&dropin, folder)
            .with_context(|| format!("cannot copy the libraries to {}", folder.display()))?;
        dropin.clone_from(folder);
    }
    let spec = spec(args, &dropin)?;
    let text = format!("{}\n", serde_json::to_string_pretty(&spec)?);
    let Some(out) = &args.out else {
        std::io::stdout().write_all(text.as_bytes())?;
        return Ok(ExitCode::SUCCESS);
    };
    write(out, &text).with_context(|| format!("cannot write {}", out.display()))?;
    let names: Vec<_> = spec.devices.iter().map(|device| format!("{KIND}={}", device.name)).collect();
    println!("{}: {}", out.display(), names.join(", "));
    // The file is right for a user who can read the libraries; say so if that is not everyone.
    for problem in super::check::readable(&dropin) {
        eprintln!("nobounce: {problem}");
    }
    Ok(ExitCode::SUCCESS)
}

/// A directory that all users can read, whatever the mask is.
fn create_folder(folder: &Path) -> std::io::Result<()> {
    if folder.as_os_str().is_empty() || folder.is_dir() {
        return Ok(());
    }
    if let Some(parent) = folder.parent() {
        create_folder(parent)?;
    }
    match fs::create_dir(folder) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists && folder.is_dir() => Ok(()),
        made => made.and_then(|()| fs::set_permissions(folder, fs::Permissions::from_mode(0o755))),
    }
}

/// Copies the libraries. Each is renamed into place: running containers keep the former one.
fn install(from: &Path, to: &Path) -> std::io::Result<()> {
    create_folder(to)?;
    fs::set_permissions(to, fs::Permissions::from_mode(0o755))?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let path = entry.path();
        let name = entry.file_name();
        // Not the name of a library with a number behind it.
        let partly = to.join(format!(".{}.{}.part", name.display(), std::process::id()));
        let _ = fs::remove_file(&partly); // left by a killed process of the same ID
        match fs::read_link(&path) {
            Ok(target) => symlink(target, &partly)?,
            Err(_) => {
                fs::copy(&path, &partly)?;
                fs::set_permissions(&partly, fs::Permissions::from_mode(0o755))?;
            }
        }
        fs::rename(&partly, to.join(name))?;
    }
    Ok(())
}

/// Renamed into place: an engine reads a complete file or none. All users can read it.
fn write(out: &Path, text: &str) -> std::io::Result<()> {
    create_folder(out.parent().unwrap_or(Path::new("")))?;
    // Engines read files that end in .json or .yaml.
    let mut partly = out.as_os_str().to_owned();
    partly.push(format!(".{}", std::process::id()));
    // Left by a killed process of the same ID, or a link that leads elsewhere.
    let _ = fs::remove_file(&partly);
    let mut file = OpenOptions::new().write(true).create_new(true).open(&partly)?;
    let written = file
        .write_all(text.as_bytes())
        .and_then(|()| file.set_permissions(fs::Permissions::from_mode(0o644)))
        .and_then(|()| fs::rename(&partly, out));
    written.inspect_err(|_| {
        let _ = fs::remove_file(&partly); // the first error is the one to tell
    })
}

fn spec(args: &CdiGenerateArgs, dropin: &Path) -> anyhow::Result<Spec> {
    let addrs: Vec<&str> = args.addr.split(',').map(str::trim).collect();
    for addr in &addrs {
        check_name(addr)?;
    }
    if let Some(wrong) = args.env.iter().find(|set| !set.contains('=') || set.starts_with('=')) {
        bail!("--env {wrong}: expected NAME=VALUE");
    }
    let inside =
        args.container_path.to_str().filter(|path| path.starts_with('/') && !path.contains([' ', ':', ';']));
    let inside = inside.with_context(|| {
        format!(
            "--container-path {}: expected an absolute path without spaces, colons and semicolons",
            args.container_path.display()
        )
    })?;
    let mount = Mount {
        host_path: dropin.to_str().context("the path of the drop-in libraries is not UTF-8")?.to_owned(),
        container_path: inside.to_owned(),
        options: ["ro", "nosuid", "nodev", "rbind"].map(str::to_owned).to_vec(),
        kind: String::new(), // 0.4.0 and later only
    };
    let device = |name: String, addrs: &[&str]| {
        let is_local =
            |addr: &&str| *addr == "lo" || addr.parse::<IpAddr>().is_ok_and(|addr| addr.is_loopback());
        let set = container::variables(dropin, Path::new(inside), addrs.len(), addrs.iter().all(is_local));
        let set = set.into_iter().map(|(name, value)| format!("{name}={value}"));
        let env = set.chain([format!("NOBOUNCE_ADDR={}", addrs.join(","))]).chain(args.env.iter().cloned());
        CdiDevice {
            name,
            container_edits: Edits { env: env.collect(), ..Edits::default() },
            ..CdiDevice::default()
        }
    };
    let single = addrs.iter().enumerate().map(|(number, addr)| device(format!("nb{number}"), &[addr]));
    let all = [device("all".to_owned(), &addrs)];
    Ok(Spec::new(mount, single.chain(all).collect()))
}

/// The interface need not exist here: the container has its own.
fn check_name(name: &str) -> anyhow::Result<()> {
    let is_interface = (1..16).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_graphic() && byte != b'/' && byte != b':');
    if !is_interface && name.parse::<IpAddr>().is_err() {
        bail!(
            "--addr {name:?}: expected an address, or the name of an interface in the container such as eth0"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nobounce_dropin::view::System;

    use super::*;

    fn args(addr: &str) -> CdiGenerateArgs {
        CdiGenerateArgs {
            addr: addr.to_owned(),
            out: None,
            container_path: "/opt/nb".into(),
            install: None,
            env: vec!["A=b".to_owned()],
        }
    }

    #[test]
    fn devices_of_two_interfaces() {
        let dropin = std::env::temp_dir().join(format!("cdi-generate-{}", std::process::id()));
        fs::create_dir(&dropin).unwrap();
        for file in ["libnobounce-paths.so", "libibverbs.so.1"] {
            fs::write(dropin.join(file), "").unwrap();
        }
        let spec = spec(&args("eth0, net1"), &dropin).unwrap();
        fs::remove_dir_all(&dropin).unwrap();
        let names: Vec<_> = spec.devices.iter().map(|device| device.name.as_str()).collect();
        assert_eq!(names, ["nb0", "nb1", "all"]);
        let of = |at: usize, name| spec.devices[at].container_edits.variable(name).unwrap();
        assert_eq!((of(1, "NOBOUNCE_ADDR"), of(2, "NOBOUNCE_ADDR")), ("net1", "eth0,net1"));
        assert_eq!((of(1, "A"), of(1, "NOBOUNCE_LOG")), ("b", "error"));
        assert!(of(0, "LD_PRELOAD").ends_with("/opt/nb/libnobounce-paths.so:/opt/nb/libibverbs.so.1"));
        let mount = &spec.container_edits.mounts[0];
        assert_eq!(
            (mount.host_path.as_str(), mount.container_path.as_str()),
            (dropin.to_str().unwrap(), "/opt/nb")
        );
        let text = serde_json::to_string(&spec).unwrap();
        assert!(!text.contains("NOBOUNCE_VIEW") && !text.contains("NOBOUNCE_REPORT"), "{text}");
        assert!(serde_json::from_str::<Spec>(&text).is_ok());
    }

    #[test]
    fn installed_libraries_are_replaced() {
        let (from, to) = ["from", "to"]
            .map(|name| std::env::temp_dir().join(format!("cdi-install-{name}-{}", std::process::id())))
            .into();
        fs::create_dir(&from).unwrap();
        for text in ["old", "new"] {
            fs::write(from.join("lib.so.1"), text).unwrap();
            let _ = symlink("lib.so.1", from.join("lib.so")); // there the second time
            install(&from, &to).unwrap();
            assert_eq!(fs::read_to_string(to.join("lib.so")).unwrap(), text);
            // What a process of any ID would leave.
            fs::write(to.join(format!(".lib.so.1.{}.part", std::process::id())), "left").unwrap();
        }
        assert_eq!(fs::read_dir(&to).unwrap().count(), 3);
        assert_eq!(fs::metadata(to.join("lib.so")).unwrap().permissions().mode() & 0o777, 0o755);
        for folder in [from, to] {
            fs::remove_dir_all(folder).unwrap();
        }
    }

    #[test]
    fn loopback_has_no_variables_of_a_network() {
        let set = |addr: &str| {
            let spec = spec(&args(addr), Path::new("/x")).unwrap();
            spec.devices[0].container_edits.variable("I_MPI_OFI_PROVIDER").map(str::to_owned)
        };
        for addr in ["lo", "127.0.0.1", "::1", "lo,127.0.0.2"] {
            assert_eq!(set(addr), None, "{addr}");
        }
        if !System::here().has_adapters() {
            assert_eq!(set("eth0").as_deref(), Some("verbs"));
        }
    }

    #[test]
    fn the_file_is_public_whole_or_absent() {
        let folder = std::env::temp_dir().join(format!("cdi-write-{}", std::process::id()));
        let out = folder.join("etc/cdi/nobounce.json");
        // SAFETY: takes a number. Tests of this process that run meanwhile set modes themselves.
        let mask = unsafe { libc::umask(0o077) };
        let first = write(&out, "first");
        // What another process has put there.
        fs::write(folder.join("victim"), "mine").unwrap();
        symlink(folder.join("victim"), folder.join(format!("etc/cdi/nobounce.json.{}", std::process::id())))
            .unwrap();
        let second = write(&out, "second");
        // SAFETY: as above.
        unsafe { libc::umask(mask) };
        first.and(second).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&out), mode(&folder.join("etc/cdi")), mode(&folder)), (0o644, 0o755, 0o755));
        assert_eq!(fs::read_to_string(&out).unwrap(), "second");
        assert_eq!(fs::read_to_string(folder.join("victim")).unwrap(), "mine");
        fs::create_dir(folder.join("etc/cdi/folder.json")).unwrap();
        write(&folder.join("etc/cdi/folder.json"), "third").unwrap_err();
        assert_eq!(fs::read_dir(folder.join("etc/cdi")).unwrap().count(), 2);
        fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn names_that_no_interface_has_are_refused() {
        for wrong in ["", "eth0,,eth1", "a/b", "a b", "sixteen-letters-x"] {
            assert!(spec(&args(wrong), Path::new("/x")).is_err(), "{wrong:?}");
        }
        assert!(spec(&args("fd00::1,127.0.0.1"), Path::new("/x")).is_ok());
    }
}
