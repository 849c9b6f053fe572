//! Each kind of memory on a real GPU: its path, and transfers in both directions where there is a
//! window. The cells of docs/reference/paths.md, for the driver at hand.

// Allocates as CUDA programs do; `gpu_facts` prints more about the same memory.
#[path = "../examples/gpu_facts/memory.rs"]
#[allow(dead_code, reason = "the example uses more of it")]
mod memory;

mod gpu_common;

use std::env;
use std::process::Command;
use std::time::{Duration, Instant};

use nobounce_memory::gpu::api::Context;
use nobounce_memory::gpu::calibration::Calibration;
use nobounce_memory::gpu::copy_engine::CopyEngine;
use nobounce_memory::gpu::{CudaError, Gpu, GpuMemory, GpuOptions, Method};
use nobounce_memory::path::{Mechanism, Path, Require};

/// Expected result of a kind, by its name in the list.
#[derive(Debug, PartialEq, Eq)]
enum Expected {
    /// A window, with any driver.
    Window,
    /// A window only where the driver lets the CPU map dma-bufs, or gdrdrv is there.
    WindowByNewerDriver,
    /// Either; what counts is that a window, if there is one, is right.
    Either,
    /// No window, ever.
    Staged,
    /// Host memory.
    Cpu,
    /// Not registered at all.
    Refused,
}

fn expected(name: &str) -> Expected {
    match name {
        _ if name.starts_with("cudaMalloc, ") || name.starts_with("VMM, exportable") => Expected::Window,
        "VMM, three handles" => Expected::Window,
        "VMM, not exportable" | "cudaMallocAsync pool" => Expected::WindowByNewerDriver,
        "managed" => Expected::Staged,
        "pinned host" => Expected::Cpu,
        _ if name.starts_with("not CUDA's") => Expected::Refused,
        _ => Expected::Either,
    }
}

/// Required parts of the reason where there is no window, with drivers that map no dma-bufs (580):
/// docs/reference/paths.md has the same words.
fn reason(name: &str) -> &'static [&'static str] {
    match name {
        "VMM, not exportable" => &["cannot be exported", "POSIX_FILE_DESCRIPTOR"],
        "cudaMallocAsync pool" => &["does not share this memory", "IPC"],
        "managed" => &["moves between host and GPU"],
        _ => &[],
    }
}

#[test]
fn every_kind_of_memory_has_the_path_of_the_table() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let context = gpu.primary().unwrap();
    let (mut wrong, mut newer) = (Vec::new(), false);
    for (name, make) in memory::KINDS {
        let memory = match make(&gpu, context) {
            Ok(memory) => memory,
            // cuMemMap of a part of a handle: drivers up to 580 at least map whole handles only, so
            // that there is nothing to register.
            Err(error) if expected(name) == Expected::Either && error.code == CudaError::NOT_SUPPORTED => {
                println!("figure: {name}: there is no such memory with this driver: {error}");
                continue;
            }
            Err(error) => panic!("{name}: {error}"),
        };
        let registered = match GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()) {
            Ok(registered) => registered,
            Err(error) => {
                println!("figure: {name}: {error}");
                if expected(name) != Expected::Refused {
                    wrong.push(name);
                }
                continue;
            }
        };
        newer |= matches!(registered.method(), Some(Method::DmaBufMmap | Method::Gdrdrv));
        let method = registered.method().map_or_else(String::new, |method| format!(", by {method}"));
        println!("figure: {name}: {}{method}", registered.paths());
        let window = registered.window().is_some();
        let right = match expected(name) {
            Expected::Window => window,
            Expected::WindowByNewerDriver => window == newer,
            Expected::Either => true,
            Expected::Staged => !window && !registered.paths().inbound.is_direct(),
            Expected::Cpu => registered.paths().inbound == Path::Direct(Mechanism::Cpu),
            Expected::Refused => false,
        };
        if !right {
            wrong.push(name);
        }
        // One method maps them all; only memory that it refuses is left to gdrdrv.
        if expected(name) == Expected::Window {
            let first = if newer && registered.method() != Some(Method::Rm) {
                Method::DmaBufMmap
            } else {
                Method::Rm
            };
            assert_eq!(registered.method(), Some(first), "{name}: {:?}", registered.refusals());
        }
        if !window && !newer {
            let said = registered.paths().inbound.to_string();
            assert!(reason(name).iter().all(|words| said.contains(words)), "{name}: {said}");
        }
        if window {
            assert_eq!(memory::check_both_ways(&memory, &registered), "right", "{name}");
        }
        let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
        let required = GpuMemory::register(memory.addr, memory.len, &direct);
        assert_eq!(required.is_ok(), registered.paths().are_direct(), "{name}: {required:?}");
    }
    assert!(wrong.is_empty(), "not as docs/reference/paths.md says: {wrong:?}");
}

/// More than was allocated is refused with what there is, and nothing is registered.
#[test]
fn a_range_that_leaves_its_allocation() {
    let Some((gpu, _alone)) = gpu_common::gpu(false) else { return };
    let context = gpu.primary().unwrap();
    for (name, make) in memory::KINDS.into_iter().take(4) {
        let memory = make(&gpu, context).unwrap();
        // The bytes up to the next possible allocation are unused.
        let room = memory.len.next_multiple_of(512);
        for (offset, wanted) in
            [(0, room + 1), (memory.len - 1, room - memory.len + 2), (memory.len / 2, 64 << 30)]
        {
            let refused = GpuMemory::register(memory.addr + offset as u64, wanted, &GpuOptions::default());
            let told = refused.expect_err("it is longer than what was allocated").to_string();
            if offset == 0 {
                println!("figure: {name}, and one byte of what follows: {told}");
            }
            assert!(told.contains("at most "), "{name}: {told}");
        }
        assert!(
            GpuMemory::register(memory.addr + memory.len as u64 - 1, 1, &GpuOptions::default()).is_ok(),
            "{name}"
        );
    }
}

/// Memory that another process allocated and shares by CUDA IPC: no window with a driver that maps
/// no dma-bufs, and a reason.
#[test]
fn memory_imported_by_ipc() {
    const HANDLE: &str = "NOBOUNCE_TEST_IPC_HANDLE";
    let Some((gpu, _alone)) = gpu_common::gpu(env::var_os(HANDLE).is_none()) else { return };
    let context = gpu.primary().unwrap();
    let Ok(handle) = env::var(HANDLE) else {
        let memory = memory::cuda_malloc(&gpu, context, 4 << 20).unwrap();
        let words = memory::ipc_words(&memory).expect("an IPC handle of cudaMalloc memory");
        let handle: String = words.iter().map(|word| format!("{word:08x}")).collect();
        let importer = Command::new(env::current_exe().unwrap())
            .args(["memory_imported_by_ipc", "--exact", "--nocapture"])
            .env(HANDLE, handle)
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&importer.stdout);
        told.lines().filter(|line| line.starts_with("figure: ")).for_each(|line| println!("{line}"));
        assert!(importer.status.success(), "{told}\n{}", String::from_utf8_lossy(&importer.stderr));
        assert!(told.contains("imported by IPC: "), "the other process did not register: {told}");
        return;
    };
    let memory = memory::imported(&gpu, context, &handle).unwrap();
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).unwrap();
    println!("figure: imported by IPC: {}", registered.paths());
    if registered.window().is_some() {
        assert_eq!(memory::check_both_ways(&memory, &registered), "right");
    } else {
        assert_eq!(registered.refusals().len(), Method::ALL.len());
        assert!(registered.paths().inbound.to_string().contains("imported by IPC"));
    }
    let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    let required = GpuMemory::register(memory.addr, memory.len, &direct);
    assert_eq!(required.is_ok(), registered.paths().are_direct(), "{required:?}");
}

/// CUDA exposes no GPU to this process (`CUDA_VISIBLE_DEVICES=`): opening one, or registering
/// memory, returns an error that says so and names the remedy.
#[test]
fn hidden_gpu_is_told() {
    const HIDDEN: &str = "NOBOUNCE_TEST_HIDDEN";
    if env::var_os(HIDDEN).is_none() {
        let Some((_gpu, _alone)) = gpu_common::gpu(false) else { return };
        let blind = Command::new(env::current_exe().unwrap())
            .args(["hidden_gpu_is_told", "--exact", "--nocapture"])
            // The stand-in goes by its own variable.
            .envs([(HIDDEN, "1"), ("CUDA_VISIBLE_DEVICES", ""), ("FAKE_CUDA_DEVICES", "0")])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&blind.stdout);
        told.lines().filter(|line| line.contains("figure: ")).for_each(|line| println!("{line}"));
        assert!(blind.status.success(), "{told}\n{}", String::from_utf8_lossy(&blind.stderr));
        assert!(told.contains("registering: "), "the other process did not try: {told}");
        return;
    }
    let listed = Gpu::list().expect_err("no GPU is shown").to_string();
    let registered = GpuMemory::register(0x7f00_0000_0000, 4096, &GpuOptions::default());
    let registered = registered.expect_err("there is no GPU").to_string();
    println!("\nfigure: no GPU to be seen: {listed}");
    println!("figure: registering: {registered}");
    for told in [listed, registered] {
        assert!(told.contains("CUDA_VISIBLE_DEVICES is set to '': unset it, or name a GPU"), "{told}");
    }
}

/// Gives a program a `/dev` of its own: all nodes but `/dev/nvidiactl`, which is missing, or lies
/// on a mount that forbids devices. Uses a user and mount namespace, invisible to other processes;
/// exits with 77 where that is not permitted. $1: an empty folder, $2: which.
const OTHER_DEV: &str = r#"
set -e
trap 'test $? = 0 || exit 77' EXIT
old=$1 which=$2
shift 2
mount --rbind /dev "$old"
mount -t tmpfs none /dev
for node in "$old"/*; do
    name=${node##*/}
    if [ "$name" = nvidiactl ]; then continue; fi
    if [ -L "$node" ]; then
        cp -d "$node" /dev/
    elif [ -d "$node" ]; then
        mkdir "/dev/$name"
        mount --rbind "$node" "/dev/$name"
    else
        : > "/dev/$name"
        mount --bind "$node" "/dev/$name"
    fi
done
if [ "$which" = forbidden ]; then
    node=$old/nvidiactl
    if [ ! -e "$node" ]; then node=$old/null; fi
    : > /dev/nvidiactl
    mount --bind "$node" /dev/nvidiactl
    mount -o remount,bind,nodev,nosuid,noexec /dev/nvidiactl
fi
trap - EXIT
exec "$@"
"#;

/// The driver's control node is missing, or not permitted, as in a container without it. Opening a
/// GPU, or registering memory, returns an error with the node, the reason and the remedy.
#[test]
fn node_that_is_missing_or_forbidden_is_told() {
    const WHICH: &str = "NOBOUNCE_TEST_NODE";
    const CASES: [(&str, &str); 2] =
        [("missing", "it does not exist here"), ("forbidden", "permission denied for this user")];
    if let Ok(which) = env::var(WHICH) {
        let (_, words) = CASES.into_iter().find(|(name, _)| *name == which).unwrap();
        let listed = Gpu::list().expect_err("CUDA has no device").to_string();
        let registered = GpuMemory::register(0x7f00_0000_0000, 4096, &GpuOptions::default());
        let registered = registered.expect_err("there is no GPU").to_string();
        println!("\nfigure: /dev/nvidiactl {which}: {listed}\nfigure: registering: {registered}");
        for told in [listed, registered] {
            assert!(told.contains("/dev/nvidiactl cannot be opened") && told.contains(words), "{told}");
        }
        return;
    }
    let Some((_gpu, _alone)) = gpu_common::gpu(false) else { return };
    let old = env::temp_dir().join(format!("nobounce-dev-{}", std::process::id()));
    for (which, _) in CASES {
        std::fs::create_dir_all(&old).unwrap();
        let tried = Command::new("timeout")
            .args(["30", "unshare", "-rm", "sh", "-c", OTHER_DEV, "sh"])
            .args([old.as_os_str(), which.as_ref(), env::current_exe().unwrap().as_os_str()])
            .args(["node_that_is_missing_or_forbidden_is_told", "--exact", "--nocapture"])
            // The stand-in goes by its own variable.
            .envs([(WHICH, which), ("FAKE_CUDA_DEVICES", "0")])
            .output();
        // The mounts on it were visible to that program only.
        std::fs::remove_dir(&old).unwrap();
        let tried = match tried {
            Ok(tried) => tried,
            Err(error) => {
                return gpu_common::waive_for("namespaces", &format!("unshare cannot be run ({error})"));
            }
        };
        let [told, errors] = [&tried.stdout, &tried.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        told.lines().filter(|line| line.contains("figure: ")).for_each(|line| println!("{line}"));
        if !told.contains("running 1 test") {
            let reason = format!("a /dev of its own cannot be had ({})", errors.trim());
            return gpu_common::waive_for("namespaces", &reason);
        }
        assert!(tried.status.success() && told.contains("registering: "), "{told}\n{errors}");
    }
}

/// Resident memory and page tables of this process, in KiB.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let of = |name: &str| -> usize {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("0");
        line.split_whitespace().next().and_then(|number| number.parse().ok()).unwrap_or(0)
    };
    of("VmRSS:") + of("VmPTE:")
}

/// Host memory cost of a registered range besides its mapping, which has 8 bytes of page tables for
/// each page of 4 KiB.
#[test]
fn a_registration_costs_little_host_memory() {
    const LEN: usize = 1 << 30;
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let memory = memory::cuda_malloc(&gpu, gpu.primary().unwrap(), LEN).unwrap();
    // Once, so that the proof and the calibration are paid for.
    drop(GpuMemory::register(memory.addr, LEN, &GpuOptions::default()).unwrap());
    let before = resident();
    let registered = GpuMemory::register(memory.addr, LEN, &GpuOptions::default()).unwrap();
    let mapping = if registered.window().is_some() { LEN / 4096 * 8 / 1024 } else { 0 };
    let grown = resident().saturating_sub(before + mapping);
    println!("figure: 1 GiB registered: {grown} KiB of host memory besides {mapping} KiB of page tables");
    assert!(grown < LEN / (2 << 20), "{grown} KiB: more than 1 KiB for each 2 MiB");
}

#[test]
fn the_calibration_is_quick() {
    let Some((gpu, _alone)) = gpu_common::gpu(true) else { return };
    let calibration = Calibration::of(&gpu).unwrap();
    println!("figure: {calibration}");
    assert!(calibration.is_whole && calibration.took < Duration::from_millis(50), "{calibration}");
}

/// The window switched off by an option: staged in both directions, and refused where direct is
/// required.
#[test]
fn without_the_window_all_is_staged() {
    let Some((gpu, _alone)) = gpu_common::gpu(false) else { return };
    let memory = memory::cuda_malloc(&gpu, gpu.primary().unwrap(), 4 << 20).unwrap();
    let off = GpuOptions { window: false, ..GpuOptions::default() };
    let registered = GpuMemory::register(memory.addr, memory.len, &off).unwrap();
    assert!(!registered.paths().inbound.is_direct() && !registered.paths().outbound.is_direct());
    println!("figure: window off: {}", registered.paths());
    let required =
        GpuMemory::register(memory.addr, memory.len, &GpuOptions { require: Require::Direct, ..off });
    assert!(required.is_err_and(|error| error.to_string().contains("switched off")));
}

/// A destroyed context takes its memory along: each later use of the registration is an error, and
/// the process goes on.
#[test]
fn memory_of_a_destroyed_context() {
    let Some((gpu, _alone)) = gpu_common::gpu(false) else { return };
    let driver = gpu.driver();
    let mut context = Context::NULL;
    // SAFETY: the calls write one handle; the new context is popped again.
    let made = driver.relaxed(|api| unsafe {
        api.ctx_create(&raw mut context, 0, gpu.ordinal())?;
        let mut popped = Context::NULL;
        api.ctx_pop(&raw mut popped)
    });
    made.map_err(|error: CudaError| error).unwrap();
    let memory = memory::cuda_malloc(&gpu, context, 4 << 20).unwrap();
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).unwrap();
    let engine = CopyEngine::in_context(&gpu, context, 2, 4096).unwrap();
    let chunk = engine.take_chunk().unwrap();
    let copy = engine.start_read(&registered, 0, 4096, engine.take_chunk().unwrap()).unwrap();
    let start = Instant::now();
    while !engine.poll(&copy).unwrap() {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
    // SAFETY: the copy is over, and the context has no other user.
    driver.relaxed(|api| unsafe { api.ctx_destroy(context) }).map_err(|error: CudaError| error).unwrap();
    let gone = registered.check_alive().unwrap_err();
    println!("figure: after its context was destroyed: {gone}");
    assert!(engine.start_read(&registered, 0, 4096, chunk).is_err());
    assert!(GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).is_err());
    assert!(registered.range().context_now().is_err());
    drop((copy, engine, registered, memory));
    // The next engine and registration scan what the destroyed context has left behind.
    let memory = memory::cuda_malloc(&gpu, gpu.primary().unwrap(), 4 << 20).unwrap();
    let registered = GpuMemory::register(memory.addr, memory.len, &GpuOptions::default()).unwrap();
    let engine = CopyEngine::new(&gpu, 2, 4096).unwrap();
    let copy = engine.start_read(&registered, 0, 4096, engine.take_chunk().unwrap()).unwrap();
    let start = Instant::now();
    while !engine.poll(&copy).unwrap() {
        assert!(start.elapsed() < Duration::from_secs(5));
    }
}
