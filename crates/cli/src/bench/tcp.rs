//! The yardstick of `--busy`: one TCP stream and one TCP ping-pong between the two processes of the
//! bench.
//!
//! Both ends block, as socket programs do: a receiver sleeps in the kernel until data arrives. TCP
//! under the same load is what users would have without RDMA.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::numbers::{figure, float, rounded};
use super::stats::{Percentiles, median};

/// How long each of the two is measured at a time.
const STREAM_TIME: Duration = Duration::from_millis(300);
const PING_TIME: Duration = Duration::from_millis(150);
/// Bytes of one write, and of one read, of the stream.
const BLOCK: usize = 256 << 10;
const PING: usize = 8;
/// A peer that does not answer for so long is gone.
const TIMEOUT: Duration = Duration::from_secs(20);

const STREAM: u8 = b's';
const PING_PONG: u8 = b'p';

/// What TCP does between the two processes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Tcp {
    /// 10^9 bytes per second of one stream.
    pub(crate) gbytes_per_s: f64,
    /// Half of a ping-pong of 8 bytes, median, microseconds.
    pub(crate) half_round_trip_us: f64,
    /// The same, mean.
    pub(crate) half_round_trip_mean_us: f64,
    /// The figures of each measurement.
    pub(crate) gbytes_per_s_samples: Vec<f64>,
    pub(crate) half_round_trip_us_samples: Vec<f64>,
    pub(crate) half_round_trip_mean_us_samples: Vec<f64>,
}

impl Tcp {
    fn of(speed: f64, half: f64, mean: f64) -> Self {
        let [speed, half, mean] = [speed, half, mean].map(rounded);
        Self {
            gbytes_per_s: speed,
            half_round_trip_us: half,
            half_round_trip_mean_us: mean,
            gbytes_per_s_samples: vec![speed],
            half_round_trip_us_samples: vec![half],
            half_round_trip_mean_us_samples: vec![mean],
        }
    }

    /// The figures of both: medians of all measurements.
    pub(crate) fn and(mut self, later: Self) -> Self {
        self.gbytes_per_s_samples.extend(later.gbytes_per_s_samples);
        self.half_round_trip_us_samples.extend(later.half_round_trip_us_samples);
        self.half_round_trip_mean_us_samples.extend(later.half_round_trip_mean_us_samples);
        let middle = |samples: &[f64]| median(samples).map_or(0.0, rounded);
        self.gbytes_per_s = middle(&self.gbytes_per_s_samples);
        self.half_round_trip_us = middle(&self.half_round_trip_us_samples);
        self.half_round_trip_mean_us = middle(&self.half_round_trip_mean_us_samples);
        self
    }
}

impl std::fmt::Display for Tcp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{} GB/s, half round trip {} us (mean {})",
            figure(self.gbytes_per_s),
            figure(self.half_round_trip_us),
            figure(self.half_round_trip_mean_us)
        )
    }
}

/// Where the serving end waits for the asking one.
pub(super) fn listen() -> anyhow::Result<(TcpListener, u16)> {
    let listener =
        TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("cannot listen for TCP on loopback")?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// The serving end: two connections, one after the other.
pub(super) fn serve(listener: &TcpListener) -> anyhow::Result<()> {
    for _ in 0..2 {
        let (mut stream, _) = listener.accept()?;
        set_up(&stream)?;
        let mut kind = [0];
        stream.read_exact(&mut kind)?;
        if kind[0] == STREAM { sink(stream)? } else { echo(stream)? }
    }
    Ok(())
}

/// The asking end.
pub(super) fn measure(port: u16) -> anyhow::Result<Tcp> {
    let connect = |kind: u8| -> anyhow::Result<TcpStream> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
        set_up(&stream)?;
        stream.write_all(&[kind])?;
        Ok(stream)
    };
    let speed = blast(connect(STREAM)?)?;
    let halves = ping(connect(PING_PONG)?)?;
    let found = Percentiles::of(&halves).context("no TCP ping-pong completed")?;
    let mean = halves.iter().sum::<f64>() / float(halves.len() as u64);
    Ok(Tcp::of(speed, found.p50, mean))
}

fn set_up(stream: &TcpStream) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(TIMEOUT))?;
    Ok(stream.set_write_timeout(Some(TIMEOUT))?)
}

/// Sends for a while; 10^9 bytes per second that arrived.
fn blast(mut stream: TcpStream) -> anyhow::Result<f64> {
    let block = vec![0x5a; BLOCK];
    let start = Instant::now();
    while start.elapsed() < STREAM_TIME {
        stream.write_all(&block)?;
    }
    stream.shutdown(Shutdown::Write)?;
    let mut total = [0; 8];
    stream.read_exact(&mut total)?;
    Ok(float(u64::from_le_bytes(total)) / start.elapsed().as_secs_f64() / 1e9)
}

/// Takes everything, and tells how much it was.
fn sink(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut block = vec![0; BLOCK];
    let mut total = 0_u64;
    loop {
        match stream.read(&mut block)? {
            0 => return Ok(stream.write_all(&total.to_le_bytes())?),
            got => total += got as u64,
        }
    }
}

/// Half round trips, in microseconds.
fn ping(mut stream: TcpStream) -> anyhow::Result<Vec<f64>> {
    let mut halves = Vec::new();
    let mut message = [0; PING];
    let begin = Instant::now();
    let mut last = begin;
    while last - begin < PING_TIME {
        stream.write_all(&message)?;
        stream.read_exact(&mut message)?;
        let now = Instant::now();
        halves.push((now - last).as_secs_f64() / 2.0 * 1e6);
        last = now;
    }
    Ok(halves)
}

fn echo(mut stream: TcpStream) -> anyhow::Result<()> {
    let mut message = [0; PING];
    while stream.read_exact(&mut message).is_ok() {
        stream.write_all(&message)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_and_a_ping_pong_are_measured() {
        let (listener, port) = listen().unwrap();
        let server = std::thread::spawn(move || serve(&listener));
        let tcp = measure(port).unwrap();
        server.join().unwrap().unwrap();
        assert!(tcp.gbytes_per_s > 0.0 && tcp.half_round_trip_us > 0.0, "{tcp}");
        assert!(tcp.half_round_trip_mean_us > 0.0, "{tcp}");
    }

    #[test]
    fn several_measurements_have_one_middle() {
        let three = Tcp::of(1.0, 10.0, 20.0).and(Tcp::of(3.0, 30.0, 60.0)).and(Tcp::of(2.0, 50.0, 40.0));
        let Tcp { gbytes_per_s, half_round_trip_us, half_round_trip_mean_us, .. } = three;
        assert_eq!((gbytes_per_s, half_round_trip_us, half_round_trip_mean_us), (2.0, 30.0, 40.0));
        assert_eq!(three.gbytes_per_s_samples, [1.0, 3.0, 2.0]);
    }
}
