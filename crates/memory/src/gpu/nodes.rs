//! The device nodes of the NVIDIA driver. Where one is missing or forbidden, CUDA only reports that
//! there is no device.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

/// What is wrong with the driver's nodes here, in a sentence with the remedy; `None` where all can
/// be opened.
pub(super) fn trouble() -> Option<String> {
    trouble_in(Path::new("/dev"))
}

fn trouble_in(folder: &Path) -> Option<String> {
    let gpus = numbered(folder);
    let mut names = vec!["nvidiactl".to_owned()];
    if gpus.is_empty() {
        names.push("nvidia0".to_owned());
    }
    names.extend(gpus);
    names.push("nvidia-uvm".to_owned());
    names.iter().find_map(|name| {
        let node = folder.join(name);
        let error = OpenOptions::new().read(true).write(true).open(&node).err()?;
        Some(format!("{} cannot be opened ({error}): {}", node.display(), advice(&error)))
    })
}

/// The nodes of single GPUs: `nvidia0`, `nvidia1`, ...
fn numbered(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let is_gpu = |name: &String| {
        name.strip_prefix("nvidia").is_some_and(|n| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).filter(is_gpu).collect();
    names.sort();
    names
}

/// The remedy for a device node that cannot be opened.
pub(super) fn advice(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::NotFound => {
            "it does not exist here; load the driver's module, or pass the node into the container (--gpus all, --device)"
        }
        io::ErrorKind::PermissionDenied => {
            "permission denied for this user; the default mode of driver nodes is 0666, and a container needs them passed in \
             (--gpus all, --device, cgroup device rules)"
        }
        _ => "see nvidia-smi and the kernel log",
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn the_node_that_is_missing_or_forbidden_is_named_with_what_to_do() {
        let folder = std::env::temp_dir().join(format!("nobounce-nodes-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let expect = |words: [&str; 2]| {
            let said = trouble_in(&folder).unwrap();
            assert!(words.iter().all(|word| said.contains(word)), "{said}");
        };
        expect(["nvidiactl cannot be opened", "does not exist here"]);
        for (name, next) in [("nvidiactl", "nvidia0"), ("nvidia0", "nvidia-uvm")] {
            fs::write(folder.join(name), "").unwrap();
            expect([next, "--gpus all"]);
        }
        fs::write(folder.join("nvidia-uvm"), "").unwrap();
        assert_eq!(trouble_in(&folder), None);
        // SAFETY: the call reads one number of this process.
        if unsafe { libc::geteuid() } != 0 {
            fs::set_permissions(folder.join("nvidiactl"), fs::Permissions::from_mode(0o000)).unwrap();
            expect(["nvidiactl cannot be opened", "permission denied for this user"]);
        }
        assert!(
            advice(&io::Error::from_raw_os_error(libc::EACCES)).contains("permission denied for this user")
        );
        fs::remove_dir_all(&folder).unwrap();
    }
}
