//! Two processes of this program that measure together: rank 0 prints the figures as JSON.

use std::io::{IsTerminal, Write};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};
use nobounce::{Device, GpuOptions};
use nobounce_transfer::View;
use plotters::style::RGBColor;

use super::args::BenchArgs;
use super::axis::size_label;
use super::plot::PlotError;
use super::{free_loopback, save, writable};

pub(crate) const LINK: &str = "NOBOUNCE_LINK";
const ADDR: &str = "NOBOUNCE_ADDR";

/// Bytes of the memory that a rank offers or uses.
pub(crate) const MEMORY: u64 = 64 << 20;

/// The device of a rank.
pub(crate) fn open(gpu: Option<i32>) -> anyhow::Result<Device> {
    Ok(match gpu {
        Some(gpu) => Device::open_near_gpu(gpu)?,
        None => Device::open()?,
    })
}

/// Memory of a rank.
pub(crate) fn memory(device: &Device, gpu: Option<i32>) -> anyhow::Result<View> {
    let len = usize::try_from(MEMORY)?;
    Ok(View::of(match gpu {
        Some(gpu) => device.register_gpu_on(gpu, len, GpuOptions::default())?,
        None => device.register(len)?,
    }))
}

/// `auto` is shared memory between two processes of one machine.
pub(crate) fn link_name(link: &str) -> &str {
    if link == "udp" { "udp" } else { "shm" }
}

/// The links to measure: the selected ones, or both.
pub(crate) fn links(asked: &[String]) -> Vec<String> {
    match asked {
        [] => vec!["auto".to_owned(), "udp".to_owned()],
        named => named.to_vec(),
    }
}

/// Runs both ranks of `nobounce bench` with these arguments over one link, and reads the figures.
pub(crate) fn measure<F: serde::de::DeserializeOwned>(link: &str, arguments: &[String]) -> anyhow::Result<F> {
    if std::io::stderr().is_terminal() {
        eprintln!("measuring over {}, about 15 s ...", link_name(link));
    }
    // Free now, and taken by a rank in a moment.
    let meet = TcpListener::bind("127.0.0.1:0").and_then(|socket| socket.local_addr())?;
    let mut ranks = [start(0, link, meet, arguments)?, start(1, link, meet, arguments)?];
    let [first, second] = ranks.each_mut().map(|rank| (rank.0.stdout.take(), rank.0.stderr.take()));
    // A rank that says much must not wait for the other one.
    let reading = std::thread::spawn(move || (text(second.0), text(second.1)));
    let said = [(text(first.0), text(first.1)), reading.join().unwrap_or_default()];
    for (rank, (child, (_, reason))) in ranks.iter_mut().zip(&said).enumerate() {
        let status = child.0.wait()?;
        let reason = reason.trim().trim_start_matches("nobounce: ");
        if !status.success() {
            let reason = if reason.is_empty() { status.to_string() } else { reason.to_owned() };
            bail!("rank {rank}, over {}: {reason}", link_name(link));
        }
        if !reason.is_empty() {
            eprintln!("{reason}");
        }
    }
    serde_json::from_str(&said[0].0).context("rank 0 printed no figures")
}

/// Prints the table, and writes JSON and plot where the arguments name files.
pub(crate) fn publish(
    args: &BenchArgs,
    report: &impl serde::Serialize,
    table: &str,
    svg: impl FnOnce() -> Result<String, PlotError>,
) -> anyhow::Result<()> {
    std::io::stdout().lock().write_all(table.as_bytes()).context("cannot print the results")?;
    if let Some(path) = &args.json {
        save(path, (serde_json::to_string_pretty(report)? + "\n").as_bytes())?;
    }
    if let Some(path) = &args.plot {
        save(path, svg()?.as_bytes())?;
    }
    Ok(())
}

/// Fails before the measurement if a result file cannot be written.
pub(crate) fn check_files(args: &BenchArgs) -> anyhow::Result<()> {
    [&args.json, &args.plot].into_iter().flatten().try_for_each(|path| writable(path))
}

/// The color of a link in plots; color-blind safe.
pub(crate) fn link_color(link: &str) -> RGBColor {
    if link_name(link) == "udp" { RGBColor(0xd5, 0x5e, 0x00) } else { RGBColor(0x00, 0x72, 0xb2) }
}

/// Bytes in the unit that fits.
pub(crate) fn size(bytes: u64) -> String {
    size_label(f64::from(u32::try_from(bytes).unwrap_or(u32::MAX)).log2())
}

/// All that a rank says there.
fn text(pipe: Option<impl std::io::Read>) -> String {
    pipe.and_then(|pipe| std::io::read_to_string(pipe).ok()).unwrap_or_default()
}

/// A process that does not outlive this one's interest in it.
struct RankProcess(Child);

impl Drop for RankProcess {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: u32, link: &str, meet: SocketAddr, arguments: &[String]) -> anyhow::Result<RankProcess> {
    let program = std::env::current_exe().context("cannot find this program")?;
    let mut command = Command::new(program);
    command
        .arg("bench")
        .args(arguments)
        .args(["--rank", &rank.to_string(), "--meet", &meet.to_string()])
        .env(LINK, link)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    if let Some(address) = free_loopback() {
        command.env(ADDR, address);
    }
    command.spawn().map(RankProcess).with_context(|| format!("cannot start rank {rank}"))
}
