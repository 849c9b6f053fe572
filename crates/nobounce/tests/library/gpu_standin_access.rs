//! The application's own reads and writes of GPU regions, and what registering GPU memory refuses;
//! with the stand-in driver.

use crate::common::{SOON, device, is_dropin, is_hardware, pair, pattern, waived_on_hardware};
use fake_cuda::client::StandIn;
use nobounce::memory::gpu::{self, GpuRangeError};
use nobounce::nic::{any, soft};
use nobounce::{Access, AccessError, ConnectOptions, Device, GpuOptions, RegisterError, Require, hard};

const MIB: usize = 1 << 20;

fn gpu_device(addr: &str) -> (&'static StandIn, Device) {
    (StandIn::load(), device(addr))
}

fn options() -> [GpuOptions; 3] {
    let direct = GpuOptions::default();
    [direct, GpuOptions { staged: true, ..direct }, GpuOptions { window: false, ..direct }]
}

#[test]
fn bytes_and_words() {
    let (cuda, device) = gpu_device("127.75.0.1");
    for options in options() {
        let region = device.register_gpu_on(0, 4 * MIB, options).unwrap();
        assert_eq!((region.len(), region.owns_memory(), region.is_gpu()), (4 * MIB, true, true));
        for (seed, (at, len)) in
            (0..).zip([(0, 1), (13, 4096), (7, 100_001), (4 * MIB - 5, 5), (1, 4 * MIB - 1), (9, 0)])
        {
            let bytes = pattern(len, seed);
            region.write_at(at, &bytes).unwrap();
            assert!(cuda.peek(region.addr() + at as u64, len.max(1))[..len] == *bytes, "{at} {len}");
            let mut back = vec![0; len];
            region.read_at(at, &mut back).unwrap();
            assert!(back == bytes, "{at} {len}");
        }
        region.fill(3..3 * MIB, 0x5a).unwrap();
        let seen = cuda.peek(region.addr(), 3 * MIB + 1);
        assert!(seen[3..3 * MIB].iter().all(|byte| *byte == 0x5a));
        region.write_u64(64, u64::MAX - 1).unwrap();
        assert_eq!(
            (region.read_u64(64).unwrap(), region.read_u64(72).unwrap()),
            (u64::MAX - 1, 0x5a5a_5a5a_5a5a_5a5a)
        );
        // What is outside is refused, and nothing is touched.
        assert!(matches!(region.write_at(4 * MIB - 1, &[0; 2]), Err(AccessError::OutOfBounds { .. })));
        assert!(matches!(region.read_at(usize::MAX, &mut [0; 2]), Err(AccessError::OutOfBounds { .. })));
        assert!(matches!(region.fill(0..4 * MIB + 1, 1), Err(AccessError::OutOfBounds { .. })));
        assert!(matches!(region.read_u64(4), Err(AccessError::Misaligned { .. })));
        assert!(matches!(region.write_u64(4 * MIB - 4, 1), Err(AccessError::OutOfBounds { .. })));
    }
}

#[test]
fn memory_of_others() {
    let cuda = StandIn::program();
    let device = device("127.75.0.2");
    let addr = cuda.malloc(100_000);
    // SAFETY: memory of the stand-in without another user, freed after the region.
    let region =
        unsafe { device.register_gpu_raw(addr + 100, 5000, Access::all(), &GpuOptions::default()) }.unwrap();
    assert_eq!((region.addr(), region.len(), region.owns_memory()), (addr + 100, 5000, false));
    cuda.poke(addr, &pattern(6000, 1));
    let mut bytes = vec![0; 5000];
    region.read_at(0, &mut bytes).unwrap();
    assert!(bytes == pattern(6000, 1)[100..5100]);
    region.write_at(4999, &[7]).unwrap();
    assert_eq!(cuda.peek(addr + 5099, 2), [7, pattern(6000, 1)[5100]]);
    drop(region);

    // Pinned host memory: CUDA's, and yet the CPU's own.
    let mut pinned = 0;
    assert_eq!(cuda.alloc_host(&mut pinned, 8192, 0), 0);
    // SAFETY: as above.
    let region =
        unsafe { device.register_gpu_raw(pinned, 8192, Access::all(), &GpuOptions::default()) }.unwrap();
    assert!(region.paths().are_direct());
    region.write_at(5, b"pinned").unwrap();
    let mut bytes = [0; 6];
    region.read_at(5, &mut bytes).unwrap();
    assert_eq!(&bytes, b"pinned");
}

#[test]
fn what_is_refused_says_why() {
    let cuda = StandIn::program();
    let device = device("127.75.0.3");
    let register = |addr: u64, len: usize| {
        // SAFETY: nothing of it is ever registered.
        unsafe { device.register_gpu_raw(addr, len, Access::all(), &GpuOptions::default()) }.unwrap_err()
    };
    let range = |error: RegisterError| match error {
        RegisterError::Nic(any::RegisterError::Soft(soft::RegisterError::Gpu(
            gpu::GpuRegisterError::Range(range),
        )))
        | RegisterError::Nic(any::RegisterError::Hard(hard::RegisterError::Gpu(
            gpu::GpuRegisterError::Range(range),
        ))) => range,
        other => panic!("{other}"),
    };
    let here = Box::new(0_u64);
    let error = range(register(std::ptr::from_ref(&*here).addr() as u64, 8));
    assert!(matches!(error, GpuRangeError::HostMemory { .. }), "{error}");
    let addr = cuda.malloc(4 * MIB);
    let told = range(register(addr + 4096, 4 * MIB)).to_string();
    assert!(told.contains("allocation"), "{told}");
    assert_eq!(cuda.free(addr), 0);
    range(register(addr, 4096));
    // SAFETY: as above.
    let rights = unsafe { device.register_gpu_raw(addr, 8, Access::REMOTE_WRITE, &GpuOptions::default()) };
    // A hardware NIC says what it thinks of rights when it registers, which it does not get to.
    let refused =
        matches!(rights, Err(RegisterError::Nic(any::RegisterError::Soft(soft::RegisterError::Rights))));
    assert!(refused || (is_hardware() && rights.is_err()), "{rights:?}");

    assert!(matches!(
        device.register_gpu_on(7, 8, GpuOptions::default()),
        Err(RegisterError::NoGpu { ordinal: 7, count: 1 })
    ));
    cuda.fail_next(c"cuMemCreate", 2);
    let told = device.register_gpu(1 << 40).unwrap_err().to_string();
    assert!(told.contains("CUDA_ERROR_OUT_OF_MEMORY") && told.contains("nvidia-smi"), "{told}");
}

/// Direct required: it is had, or the registration fails with the reason and leaves nothing behind.
#[test]
fn required_direct_fails_closed() {
    let (cuda, device) = gpu_device("127.75.0.4");
    let direct = GpuOptions { require: Require::Direct, ..GpuOptions::default() };
    match device.register_gpu_on(0, MIB, direct) {
        Ok(region) => assert!(region.paths().are_direct()),
        // The stand-in's memory is not GPU memory: a real device cannot reach it, and reports why
        // each method failed.
        Err(error) if is_hardware() && !is_dropin() => {
            let told = error.to_string();
            let words = ["a direct path is required", "dma-buf: ", "peermem: "];
            assert!(words.iter().all(|word| told.contains(word)), "{told}");
        }
        Err(error) => panic!("{error}"),
    }
    let before = cuda.live(c"allocations");
    for (options, reason) in [
        (GpuOptions { staged: true, ..direct }, "staging was asked for"),
        (GpuOptions { window: false, ..direct }, "the window is switched off"),
    ] {
        // Hardware reaches the memory by itself, without a window of the CPU's.
        if is_hardware() && !options.window {
            continue;
        }
        let told = device.register_gpu_on(0, MIB, options).unwrap_err().to_string();
        assert!(told.contains("a direct path is required") && told.contains(reason), "{told}");
    }
    assert_eq!(cuda.live(c"allocations"), before);
}

/// Memory that its owner freed is not read by its address any more.
#[test]
fn freed_memory_is_an_error() {
    let cuda = StandIn::program();
    let device = device("127.75.0.5");
    let addr = cuda.malloc(4 * MIB);
    // No BAR1 window: through one, freed memory stays readable until it is reused.
    let staged = GpuOptions { staged: true, window: false, ..GpuOptions::default() };
    // SAFETY: memory of the stand-in; that it is freed too early is what is tested.
    let region = unsafe { device.register_gpu_raw(addr, 4 * MIB, Access::all(), &staged) }.unwrap();
    region.write_at(0, &[1; 64]).unwrap();
    assert_eq!(cuda.free(addr), 0);
    let told = region.read_at(0, &mut [0; 64]).unwrap_err().to_string();
    assert!(told.contains("freed"), "{told}");
    assert!(region.write_at(0, &[1]).is_err());
}

/// The application reaches the memory as the device does: each settles what the other has stored.
#[test]
fn device_and_application_share_one_window() {
    if waived_on_hardware("device_and_application_share_one_window", "windows are the software NIC's") {
        return;
    }
    let _ = StandIn::load();
    let (a, b) = pair("127.75.0.6", &ConnectOptions::default());
    let (ours, theirs) = (a.device().register(64).unwrap(), b.device().register_gpu(4096).unwrap());
    let window = theirs.mr().gpu_memory().and_then(|memory| memory.window()).expect("a window");
    for round in 1..=3 {
        ours.write_at(0, &[round; 64]).unwrap();
        let write = a.write(&ours, 0..64, &theirs.remote(), 128).unwrap();
        a.wait(write, SOON).unwrap();
        assert!(window.is_dirty(), "the device has stored");
        let mut bytes = [0; 64];
        theirs.read_at(128, &mut bytes).unwrap();
        assert_eq!(bytes, [round; 64]);
        assert!(!window.is_dirty(), "the application's load came after it");
        theirs.write_u64(8, 7).unwrap();
        assert!(!window.is_dirty(), "what the application has stored is pushed on");
    }
}
