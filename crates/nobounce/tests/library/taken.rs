//! The device, or its port, is taken away under traffic and given back: an error that names it, in
//! time, and the process goes on. How it is taken the environment says (`NOBOUNCE_TEST_TAKE`,
//! `NOBOUNCE_TEST_RETURN`, commands of a shell): tests/vm/hardware.py does.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{SOON, device, pair, waive};
use nobounce::{Config, ConnectOptions, Device, WaitError};

const TAKE: &str = "NOBOUNCE_TEST_TAKE";
const RETURN: &str = "NOBOUNCE_TEST_RETURN";
/// What must be said: `gone` or `down`.
const EXPECT: &str = "NOBOUNCE_TEST_EXPECT";
/// In an emulated machine on a busy one.
const BOUND: Duration = Duration::from_secs(10);

fn shell(command: &str) -> std::process::Child {
    Command::new("sh").args(["-c", command]).spawn().unwrap()
}

#[test]
fn a_device_that_is_taken_away_is_named_and_the_process_goes_on() {
    let Ok(take) = std::env::var(TAKE) else {
        waive(
            "a_device_that_is_taken_away",
            "NOBOUNCE_TEST_TAKE does not say how to remove the device (in the guest, hardware-taken does)",
        );
        return;
    };
    let expected = std::env::var(EXPECT).unwrap();
    let (a, b) = pair("127.174.0.1", &ConnectOptions::default());
    let (local, target) = (a.device().register(1 << 20).unwrap(), b.device().register(1 << 20).unwrap());
    // One whose peer is gone has a device as well.
    let (left, peer) = pair("127.174.0.1", &ConnectOptions::default());
    drop(peer);
    let deserted = Instant::now();
    while !left.is_peer_gone() {
        assert!(deserted.elapsed() < SOON, "the peer is gone, and that goes undetected");
    }
    // A wait for a receive alone must report it, too.
    let receive = a.recv(&local, 0..8).unwrap();
    let mut taker = None;
    let start = Instant::now();
    let mut taken = start;
    let (mut done, mut said) = (0, Vec::new());
    let error = loop {
        assert!(start.elapsed() < 4 * SOON, "{done} writes, and no word");
        while a.pending() < 8 && said.is_empty() {
            match a.write(&local, 0..65536, &target.remote(), 0) {
                Ok(_) => {}
                Err(error) if error.is_full() => break,
                Err(error) => said.push(error.to_string()),
            }
        }
        match a.wait_any(Duration::from_millis(200)) {
            Ok(_) => done += 1,
            Err(WaitError::Timeout { .. }) => {}
            Err(error) => break error,
        }
        if done == 50 {
            taken = Instant::now();
            taker = Some(shell(&take));
            done += 1;
        }
    };
    let took = taken.elapsed();
    eprintln!("after {done} writes and {took:?}: {error}; posting: {said:?}");
    assert!(taker.is_some(), "it failed by itself: {error}");
    assert!(took < BOUND, "{took:?}: {error}");
    let words = error.to_string();
    let name = a.device().nic().name().to_owned();
    match expected.as_str() {
        "down" => {
            let told = matches!(error, WaitError::PortLost { .. } | WaitError::PortDown { .. });
            assert!(told && words.contains(&format!("the port of {name} is down")), "{words}");
        }
        _ => {
            assert!(matches!(error, WaitError::DeviceGone { .. }), "{words}");
            assert!(words.contains(&format!("{name} is gone")), "{words}");
            let receive = a.wait(receive, SOON).unwrap_err().to_string();
            assert!(receive.contains(&name), "{receive}");
            let start = Instant::now();
            while !matches!(left.poll(), Err(WaitError::DeviceGone { .. })) {
                assert!(start.elapsed() < BOUND, "no thread watches the device once the peer is gone");
            }
        }
    }
    // The process goes on: it lets go of everything without hanging, and whatever else it does
    // works.
    drop((local, target, a, b, left));
    assert!(taker.unwrap().wait().unwrap().success(), "{take}");
    let other = Device::open_with(&Config { addr: "127.174.0.2".parse().unwrap(), ..Config::default() });
    // Where the kernel's rxe has RoCE's port, there is no software NIC; the error says so.
    assert!(other.is_ok() || other.is_err_and(|error| error.to_string().contains("4791")));
    let status = shell(&std::env::var(RETURN).unwrap()).wait().unwrap();
    assert!(status.success());
    let (a, b) = pair("127.174.0.1", &ConnectOptions::default());
    let (local, target) = (a.device().register(4096).unwrap(), b.device().register(4096).unwrap());
    local.write_at(0, b"there again").unwrap();
    let write = a.write(&local, 0..11, &target.remote(), 0).unwrap();
    a.wait(write, SOON).unwrap();
    let mut found = [0; 11];
    target.read_at(0, &mut found).unwrap();
    assert_eq!(&found, b"there again");
    drop(device("127.174.0.1"));
}
