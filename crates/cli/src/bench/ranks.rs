//! Two processes of this program that measure together: rank 0 prints the figures as JSON.

use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, bail};

use super::free_loopback;

pub(crate) const LINK: &str = "NOBOUNCE_LINK";
const ADDR: &str = "NOBOUNCE_ADDR";

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

/// All that a rank says there.
fn text(pipe: Option<impl std::io::Read>) -> String {
    pipe.and_then(|pipe| std::io::read_to_string(pipe).ok()).unwrap_or_default()
}

/// A process that does not outlive this one's interest in it.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn start(rank: u32, link: &str, meet: SocketAddr, arguments: &[String]) -> anyhow::Result<Rank> {
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
    command.spawn().map(Rank).with_context(|| format!("cannot start rank {rank}"))
}
