//! Knobs for tests: functions found by `dlsym`, callable before `cuInit` and at any time.

use std::collections::BTreeMap;
use std::ffi::c_char;

use crate::abi::Words;
use crate::copy::{read_now, write_now};
use crate::lane;
use crate::status::{Answer, Status};
use crate::world;

/// Called with the name of each function, on the calling thread and before the function does
/// anything.
pub(crate) type Watcher = extern "C" fn(*const c_char);

#[derive(Debug)]
pub(crate) struct Knobs {
    pub(crate) devices: i32,
    pub(crate) refuse_mmap: bool,
    pub(crate) wrong_export: bool,
    pub(crate) self_import: bool,
    pub(crate) crash_on_dead: bool,
    pub(crate) vmm_survives: bool,
    pub(crate) attributes: BTreeMap<i32, i32>,
    pub(crate) watcher: Option<Watcher>,
    failures: Vec<(String, u32)>,
}

impl Knobs {
    pub(crate) const fn new() -> Self {
        Self {
            devices: 1,
            refuse_mmap: false,
            wrong_export: false,
            self_import: false,
            crash_on_dead: false,
            vmm_survives: false,
            attributes: BTreeMap::new(),
            watcher: None,
            failures: Vec::new(),
        }
    }

    /// A real driver dereferences a handle whose context is gone. Here the process aborts, so that
    /// tests detect it.
    pub(crate) fn use_of_dead(&self, what: &str) {
        if self.crash_on_dead {
            eprintln!("stand-in: {what} of a destroyed context was passed to the driver");
            std::process::abort();
        }
    }

    /// The failure set for this call, which is then used up.
    pub(crate) fn failure_of(&mut self, name: &str) -> Option<u32> {
        let at = self.failures.iter().position(|(call, _)| call == name)?;
        Some(self.failures.remove(at).1)
    }
}

/// Whether mmap of exported dma-bufs fails, as with drivers up to 580. The driver's version changes
/// with it.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_refuse_dmabuf_mmap(on: i32) {
    world::lock().knobs.refuse_mmap = on != 0;
}

/// Whether dma-bufs export other memory than requested: the window verification must detect it.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_export_wrong_memory(on: i32) {
    world::lock().knobs.wrong_export = on != 0;
}

/// Whether a process may import its own IPC handles, which CUDA forbids: a single-process test gets
/// imported memory this way.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_allow_self_import(on: i32) {
    world::lock().knobs.self_import = on != 0;
}

/// Whether the process aborts on use of a destroyed context: made current, queried (a primary one
/// may be queried), or by one of its streams or events. A real driver may crash then.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_crash_on_dead_handles(on: i32) {
    world::lock().knobs.crash_on_dead = on != 0;
}

/// Whether VMM memory, which belongs to no context, survives a reset of its device, as on an H200
/// with driver 580.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_vmm_survives_reset(on: i32) {
    world::lock().knobs.vmm_survives = on != 0;
}

/// Reports each call to `watcher`, which must not call into this library.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_watch_calls(watcher: Watcher) {
    world::lock().knobs.watcher = Some(watcher);
}

/// Duration of each copy, in microseconds. Default: 5.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set_copy_delay_us(delay: u32) {
    lane::set_delay_us(u64::from(delay));
}

/// Whether calls that start asynchronous copies block, as they do while another thread loads a
/// kernel or frees memory.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_hold_copies(on: i32) {
    lane::set_held(on != 0);
}

/// Whether all calls block, as they may while another thread of the process waits inside the driver
/// for a kernel.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_hold_calls(on: i32) {
    lane::set_calls_held(on != 0);
}

/// Sets the number of devices. With none, `cuInit` finds no device.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set_device_count(count: i32) {
    world::lock().knobs.devices = count.clamp(0, 4);
}

/// Sets a device attribute.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_set_attribute(number: i32, value: i32) {
    world::lock().knobs.attributes.insert(number, value);
}

/// Streams made from now on share one queue, in which work waits for the default stream.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_few_queues(on: i32) {
    lane::set_few_queues(on != 0);
}

/// Starts or ends a kernel that spins on the default stream.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_spin(on: i32) {
    lane::set_spinning(on != 0);
}

/// Resets every device, as `cudaDeviceReset` does.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_device_reset() {
    let mut world = world::lock();
    for device in 0..world.knobs.devices {
        world.reset(device);
    }
}

/// Makes the next call of a function fail with a code. Set twice, it fails twice.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_fail_next(name: Words, code: u32) {
    world::lock().knobs.failures.push((name.take(), code));
}

/// Cancels pending failures.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_forget_failures() {
    world::lock().knobs.failures.clear();
}

/// Number of pending failures.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_failures() -> u64 {
    world::lock().knobs.failures.len() as u64
}

/// Call count of a function.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_calls(name: Words) -> u64 {
    world::lock().calls.get(name.take().as_str()).copied().unwrap_or(0)
}

/// How many there are: contexts, allocations, handles, reservations, streams, events, host, fds,
/// captures. -1: no such word.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_live(what: Words) -> i64 {
    let world = world::lock();
    let count = match what.take().as_str() {
        "contexts" => world.contexts.count(),
        "allocations" => world.memory.values().filter(|entry| !entry.is_host()).count(),
        "handles" => world.handles.values().filter(|handle| handle.is_held()).count(),
        "reservations" => world.reservations.len(),
        "streams" => world.streams_made(),
        "events" => world.events.len(),
        "host" => world.memory.values().filter(|entry| entry.is_host()).count(),
        "fds" => world.files_out(),
        "captures" => world.captures.len(),
        _ => return -1,
    };
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Reads device memory as a kernel would: under no rule of the driver, and never waiting.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_peek(from: u64, to: *mut u8, len: usize) -> Status {
    let pieces = world::lock().pieces(from, len);
    finish(pieces.map(|pieces| read_now(&pieces, to)))
}

/// Writes device memory as a kernel would.
#[unsafe(no_mangle)]
extern "C" fn fake_cuda_poke(to: u64, from: *const u8, len: usize) -> Status {
    let pieces = world::lock().pieces(to, len);
    finish(pieces.map(|pieces| write_now(&pieces, from)))
}

fn finish(answer: Answer) -> Status {
    answer.err().unwrap_or(Status::SUCCESS)
}
