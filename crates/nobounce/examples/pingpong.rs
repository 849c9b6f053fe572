//! Two terminals: `cargo run --example pingpong` in the first, `cargo run --example pingpong
//! HOST:PORT` in the second. On two machines, set NOBOUNCE_ADDR to an address or interface on both,
//! and give the first `listen ADDR:PORT`.

use std::error::Error;
use std::time::{Duration, Instant};

use nobounce::{ConnectOptions, Connection, Device};

const ROUNDS: u32 = 10_000;
const SIZE: usize = 64;
const SOON: Duration = Duration::from_secs(60);

fn main() -> Result<(), Box<dyn Error>> {
    let device = Device::open()?;
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => serve(&device, "127.0.0.1:0"),
        ["listen", at] => serve(&device, at),
        [at] => play(&device.connect(at, &ConnectOptions::default())?, true),
        _ => Err("usage: pingpong [HOST:PORT | listen ADDR:PORT]".into()),
    }
}

fn serve(device: &Device, at: &str) -> Result<(), Box<dyn Error>> {
    let listener = device.listen(at)?;
    println!("waiting at {}", listener.local_addr());
    play(&listener.accept(SOON)?, false)
}

fn play(conn: &Connection, serves: bool) -> Result<(), Box<dyn Error>> {
    let region = conn.device().register(2 * SIZE)?;
    let mut receive = conn.recv(&region, 0..SIZE)?;
    conn.exchange_region(&region, SOON)?; // now both have a receive posted
    let start = Instant::now();
    for round in 0..ROUNDS {
        if serves {
            conn.send_imm(&region, SIZE..2 * SIZE, round)?;
        }
        // Our own sends end on the way; what counts is what comes.
        while conn.wait_any(SOON)?.ticket != receive {}
        receive = conn.recv(&region, 0..SIZE)?;
        if !serves {
            conn.send_imm(&region, SIZE..2 * SIZE, round)?;
        }
    }
    while conn.pending() > 1 {
        conn.wait_any(SOON)?; // the last send, for the last receive stays
    }
    let half_round_trip = start.elapsed() / (2 * ROUNDS);
    println!("{SIZE}-byte sends, {ROUNDS} rounds with {}: {half_round_trip:?} each way", conn.peer());
    Ok(())
}
