//! The other end of a bench: the process that we start ourselves, and the device of each end.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use nobounce::{ConnectOptions, Device};

use super::devices::VARIABLE;
use super::drive::WINDOW;

/// The hidden subcommand under which we start ourselves again.
pub(crate) const SUBCOMMAND: &str = "bench-peer";

/// How long the other process may take to exit by itself, and the poll interval. It writes its
/// reports on exit; a killed one does not.
const LEAVES_WITHIN: Duration = Duration::from_secs(3);
const LEFT_EVERY: Duration = Duration::from_millis(1);

/// The device of one end, and its command-line arguments.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct PeerArgs {
    /// Device names [default: the software NIC]
    #[arg(long, value_delimiter = ',')]
    pub(super) device: Vec<String>,
    /// CUDA ordinal of the GPU
    #[arg(long, default_value_t = 0)]
    pub(super) gpu: i32,
    /// Address or interface of the device
    #[arg(long)]
    pub(super) addr: Option<String>,
    /// Link
    #[arg(long)]
    pub(super) link: Option<String>,
    /// Maximum number of engine threads
    #[arg(long)]
    pub(super) engines: Option<u8>,
    /// Thread that drives the device
    #[arg(long)]
    pub(super) progress: Option<String>,
    /// Share of sent packets to drop
    #[arg(long, default_value_t = 0.0)]
    pub(super) loss: f64,
    /// Seed of the packet loss
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
}

/// The child process. It exits at end of file on its standard input, which any exit of ours causes.
#[derive(Debug)]
pub(super) struct Child {
    process: std::process::Child,
    port: u16,
}

impl Child {
    pub(super) fn start(args: &PeerArgs) -> anyhow::Result<Self> {
        let myself = std::env::current_exe().context("cannot find the path of the nobounce program")?;
        let mut command = Command::new(myself);
        let PeerArgs { device, gpu, addr, link, engines, progress, loss, seed } = args;
        command.arg(SUBCOMMAND).arg(format!("--loss={loss}")).arg(format!("--seed={seed}"));
        command.arg(format!("--gpu={gpu}")).args(device.iter().map(|device| format!("--device={device}")));
        // What it names is in the arguments already.
        command.env_remove(VARIABLE);
        command.args(addr.iter().map(|addr| format!("--addr={addr}")));
        command.args(link.iter().map(|link| format!("--link={link}")));
        command.args(engines.iter().map(|engines| format!("--engines={engines}")));
        command.args(progress.iter().map(|progress| format!("--progress={progress}")));
        // A capture of both ends in one file would be neither's.
        command.env_remove("NOBOUNCE_PCAP").stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = command.spawn().context("cannot start the second process of the bench")?;
        let mut line = String::new();
        let stdout = process.stdout.take().context("the second process has no stdout")?;
        BufReader::new(stdout).read_line(&mut line).context("cannot read from the second process")?;
        let port = line
            .trim()
            .parse()
            .context("the second process of the bench exited early; its error is above")?;
        Ok(Self { process, port })
    }

    pub(super) fn target(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        drop(self.process.stdin.take());
        let end = Instant::now() + LEAVES_WITHIN;
        while matches!(self.process.try_wait(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(LEFT_EVERY);
        }
        let _ = self.process.kill(); // whatever keeps it
        let _ = self.process.wait();
    }
}

pub(super) fn options() -> ConnectOptions {
    ConnectOptions { depth: usize::try_from(2 * WINDOW).unwrap_or(128), ..ConnectOptions::default() }
}

/// Opens all devices that the arguments name: one, or the rails of every transfer.
pub(super) fn open_all(args: &PeerArgs) -> anyhow::Result<Vec<Device>> {
    if args.device.is_empty() {
        return Ok(vec![open(None, args)?]);
    }
    args.device.iter().map(|name| open(Some(name), args)).collect()
}

/// Opens the device of that name, or the software NIC, as the environment and the other arguments
/// say.
pub(super) fn open(name: Option<&str>, args: &PeerArgs) -> anyhow::Result<Device> {
    if let Some(name) = name {
        if Device::is_hardware(name) {
            ensure!(
                args.link.is_none() && args.engines.is_none() && args.progress.is_none() && args.loss == 0.0,
                "--link, --engines, --progress and --loss apply to the software NIC only; {name} is hardware"
            );
            let mut options = nobounce::hard::Options::from_env()?;
            match args.addr.as_ref().map(|addr| (addr, addr.parse())) {
                Some((_, Ok(addr))) => options.gid.addr = Some(addr),
                Some((interface, Err(_))) => options.gid.interface = Some(interface.clone()),
                None => {}
            }
            return Ok(Device::open_hardware(name, &options)?);
        }
        ensure!(
            name == "nb0" || args.addr.is_none(),
            "--device {name} and --addr both set the address of the software NIC; give one of them"
        );
        if name != "nb0" {
            return Ok(Device::open_named(name)?);
        }
    }
    let mut config = nobounce::Config::from_env()?;
    if let Some(addr) = &args.addr {
        config = config.at(addr)?;
    }
    if let Some(link) = &args.link {
        config.link = link.parse()?;
    }
    if let Some(engines) = args.engines {
        config.engines = Some(engines.into());
    }
    if let Some(progress) = &args.progress {
        config.progress = progress.parse()?;
    }
    if args.loss > 0.0 || config.fault.is_some() {
        let mut fault = config.fault.unwrap_or_default();
        if args.loss > 0.0 {
            fault.loss = args.loss;
        }
        // Each end has its own seed, or both would lose the same packets.
        fault.seed = fault.seed.wrapping_add(args.seed);
        config.fault = Some(fault);
    }
    Ok(Device::open_with(&config)?)
}
