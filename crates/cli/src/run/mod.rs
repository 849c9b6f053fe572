//! `nobounce run`: other people's RDMA programs, unmodified, on a device nb0.
//!
//! The order of a run: check the arguments, find the drop-in folder, create the folder of the run
//! with the view in it. Then start the command, forward signals to it, and exit as it does.
//! docs/guide/run.md is the user documentation.

pub(crate) mod args;
mod child;
pub(crate) mod container;
mod copies;
mod dropin;
mod environment;
mod mounts;
mod nccl_conf;
mod nccl_version;
mod report;
mod scratch;

use std::net::IpAddr;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::Context;
use nobounce::Config;
use nobounce::nic::links::OpenError;
use nobounce::nic::links::fault::FaultConfig;
use nobounce::nic::soft::PortSpeed;
use nobounce_dropin::view;
use nobounce_topology::sysfs::Root;

use self::args::RunArgs;

/// The command: arguments in, exit code out. An error is exit code 2.
pub(crate) fn main(args: &RunArgs) -> anyhow::Result<ExitCode> {
    let addrs = check(args)?;
    let speed = std::env::var("NOBOUNCE_SPEED").map_or(Ok(PortSpeed::default()), |speed| speed.parse())?;
    let executable = std::env::current_exe().context("cannot find the path of the nobounce program")?;
    let dropin = dropin::find(std::env::var_os(dropin::VARIABLE).map(Into::into), &executable)?;

    let cufile = dropin.join(dropin::CUFILE);
    anyhow::ensure!(
        !args.cufile || cufile.exists(),
        "--cufile: there is no {}. Build it with `make build`",
        cufile.display()
    );

    // From here on a signal must not end us before the folder is removed.
    let signals = child::ChildSignals::block();
    // Resolved: what is below it is compared with what realpath finds.
    let parent = std::env::temp_dir();
    let parent = parent.canonicalize().unwrap_or(parent);
    let scratch = scratch::Scratch::new(&parent).with_context(|| {
        format!("cannot create a directory for this run in {}; set TMPDIR to another one", parent.display())
    })?;
    let (view, reports) = (scratch.path().join("view"), scratch.path().join("report"));
    std::fs::DirBuilder::new()
        .mode(0o700)
        .create(&reports)
        .and_then(|()| view::make(&view, &addrs, speed, &view::System::here()))
        .with_context(|| {
            format!("cannot create the directories of the run in {}", scratch.path().display())
        })?;

    if args.cufile {
        let settings = scratch.path().join(environment::CUFILE_JSON);
        std::fs::write(&settings, "{}\n").with_context(|| format!("cannot write {}", settings.display()))?;
    }

    let conf = nccl_conf::NcclConf::read(|name| std::env::var_os(name));
    let now = |name: &str| std::env::var_os(name).or_else(|| conf.get(name));
    if let Some(warning) = environment::warning(now) {
        eprintln!("nobounce: {warning}");
    }
    let (gpus, engines) = (environment::gpus(), engines(args));
    let (devices, adapters) = (addrs.len(), view::System::here().has_adapters());
    let (program, arguments) = args.command.split_first().context("no command given")?;
    // A wheel has no plugin.
    let has_plugin = dropin.join("libnccl-gin.so").exists();
    let given = environment::Given {
        dropin: &dropin,
        view: &view,
        report: &reports,
        gpus,
        engines,
        devices,
        cpus: std::thread::available_parallelism().map_or(1, usize::from),
        is_loopback: addrs.iter().all(IpAddr::is_loopback),
        adapters,
        has_gpi: has_plugin && nccl_version::is_gpi(&Root::new("/"), program, now),
    };
    let mut command = Command::new(program);
    let variables = environment::variables(args, &given, now);
    if args.explain {
        for environment::Variable { name, value, reason } in &variables {
            eprintln!("nobounce: {name}={}  # {reason}", value.display());
        }
    }
    command.args(arguments).envs(variables.into_iter().map(|set| (set.name, set.value)));
    let mounts = match args.mounts {
        true => Some(mounts::Mounts::plan(&view, &scratch.path().join("mounts"), &view::System::here())?),
        false => None,
    };
    let mut child = match child::start(&mut command, &signals, mounts) {
        Ok(child) => child,
        Err(error) => {
            eprintln!("nobounce: {error}");
            return Ok(ExitCode::from(error.code()));
        }
    };
    let status = signals.wait(&mut child).context("cannot wait for the command")?;
    if !args.quiet {
        let totals = report::read(&reports);
        eprintln!("nobounce: {totals}");
        if args.explain {
            totals.details().iter().for_each(|line| eprintln!("nobounce: {line}"));
        }
    }
    Ok(ExitCode::from(child::code(status)))
}

/// Most engines that the command's devices will have. (The device reports invalid values.)
fn engines(args: &RunArgs) -> usize {
    let mut config = Config::from_env().unwrap_or_default();
    if let Some(at) = args.addr.as_deref().and_then(|all| all.split(',').next())
        && let Ok(there) = Config::default().at(at.trim())
    {
        config.addr = there.addr;
    }
    if let Some(link) = args.link.as_deref().and_then(|link| link.parse().ok()) {
        config.link = link;
    }
    config.engines = args.engines.map(usize::from).or(config.engines);
    config.engines()
}

/// Rejects here, once and before anything starts, whatever the device would reject.
fn check(args: &RunArgs) -> anyhow::Result<Vec<IpAddr>> {
    if let Some(option) = args.command.first().filter(|word| word.as_encoded_bytes().starts_with(b"-")) {
        anyhow::bail!("unknown option {}; see `nobounce run --help`", option.display());
    }
    let named = match &args.addr {
        Some(addr) => Some(addr.clone()),
        None => std::env::var("NOBOUNCE_ADDR").ok(),
    };
    let addrs = match &named {
        Some(list) => list
            .split(',')
            .map(|addr| Ok(Config::default().at(addr.trim())?.addr))
            .collect::<anyhow::Result<Vec<_>>>()?,
        None => vec![Config::default().addr],
    };
    for addr in &addrs {
        if addr.is_unspecified() {
            anyhow::bail!("{}", OpenError::Unspecified { addr: *addr });
        }
        // Any port will do: this only tests whether the address is local.
        if let Err(error) = std::net::UdpSocket::bind((*addr, 0)) {
            anyhow::bail!(
                "cannot use address {addr}: {error}. `ip address` lists the addresses of this machine"
            );
        }
    }
    let given = |typed: &Option<String>, name| typed.clone().or_else(|| std::env::var(name).ok());
    if let Some(fault) = given(&args.fault, "NOBOUNCE_FAULT") {
        fault.parse::<FaultConfig>().with_context(|| format!("--fault or NOBOUNCE_FAULT, {fault:?}"))?;
    }
    if let Some(level) = given(&args.log, "NOBOUNCE_LOG") {
        crate::log::level(&level)?;
    }
    if let Some(path) = given(&args.require, "NOBOUNCE_REQUIRE")
        && !["", "direct"].contains(&path.as_str())
    {
        anyhow::bail!("invalid NOBOUNCE_REQUIRE={path:?}: expected \"direct\"");
    }
    if let Some(folder) = args.pcap.as_deref().and_then(Path::parent)
        && !folder.as_os_str().is_empty()
        && !folder.is_dir()
    {
        anyhow::bail!("--pcap: no such directory: {}", folder.display());
    }
    Ok(addrs)
}
