//! A Kubernetes device plugin for the software NIC.
//!
//! Exit codes: 0 after SIGTERM or SIGINT, 1 internal error, 2 wrong usage.
//!
//! ## Rooms
//!
//! A room imports its own modules and lower ones.
//!
//! ```text
//! resource            socket, server and registration of one resource over time
//! service  kubelet    both gRPC services: ours, and the call to the kubelet's
//! cdi  devices        health, requests
//! messages  socket    wire format, socket file
//! names  log          words
//! ```
//!
//! | room | what |
//! |---|---|
//! | `names`, `log`, `testing` | names of resources and CDI devices; log lines |
//! | `messages`, `socket` | messages of `proto/deviceplugin.proto`; the socket file |
//! | `cdi`, `devices` | whether the node has the CDI file; devices and checks of requests |
//! | `service`, `kubelet` | the service that the kubelet calls; registration at the kubelet |
//! | `resource`, `args` | the life of one resource; the command line |

mod args;
mod cdi;
mod devices;
mod kubelet;
mod log;
mod messages;
mod names;
mod resource;
mod service;
mod socket;
#[cfg(test)]
mod testing;

use std::io;
use std::process::ExitCode;

use clap::Parser;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinSet, spawn_blocking};

use args::Args;
use cdi::{Health, find_device};
use devices::Devices;
use resource::Resource;
use service::{DevicePlugin, Watchers};

fn main() -> ExitCode {
    let args = Args::parse(); // clap itself ends with 2 on wrong usage and 0 on --help
    if let Err(error) = args.check() {
        log::line(&error.to_string());
        return ExitCode::from(2);
    }
    match run_to_end(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::line(&error.to_string());
            ExitCode::FAILURE
        }
    }
}

fn run_to_end(args: Args) -> io::Result<()> {
    // One thread: the plugin answers a few calls per pod.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let outcome = runtime.block_on(run(args));
    // A check of the CDI files may wait for a slow file system: do not wait for it.
    runtime.shutdown_background();
    outcome
}

/// Serves all resources until a signal ends it.
async fn run(args: Args) -> io::Result<()> {
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    let health = check_health(args.clone()).await;
    log_health(&health);
    let (publish, health) = watch::channel(health);
    let mut tasks = JoinSet::new();
    for name in &args.resources {
        let service = DevicePlugin {
            devices: Devices { count: args.count },
            cdi_device: args.cdi_device.clone(),
            health: health.clone(),
            watchers: Watchers::default(),
        };
        tasks.spawn(Resource::new(name.clone(), &args.plugin_dir, service).run());
    }
    tasks.spawn(watch_health(args, publish));

    let ended_by = tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
        // The tasks have no end: one of them panicked.
        Some(Err(error)) = tasks.join_next() => return Err(io::Error::other(format!("internal error: {error}"))),
    };
    // Dropping the tasks removes their sockets.
    tasks.shutdown().await;
    log::line(&format!("ended by {ended_by}; sockets removed"));
    Ok(())
}

/// Checks the CDI files again and again. Streams get a new list only when the devices change their
/// state; the log gets every new reason.
async fn watch_health(args: Args, publish: watch::Sender<Health>) {
    loop {
        tokio::time::sleep(args.cdi_interval()).await;
        let now = check_health(args.clone()).await;
        publish.send_if_modified(|last| {
            if *last != now {
                log_health(&now);
            }
            let has_changed = last.is_healthy() != now.is_healthy();
            *last = now;
            has_changed
        });
    }
}

/// On another thread, so that a slow file system does not delay answers to the kubelet.
async fn check_health(args: Args) -> Health {
    spawn_blocking(move || find_device(&args.cdi_device, &args.cdi_dirs))
        .await
        .unwrap_or_else(|error| Health::Unhealthy(format!("cannot check the CDI files: {error}")))
}

fn log_health(health: &Health) {
    let word = health.word();
    match health {
        Health::Healthy(file) => log::line(&format!("devices are {word}: {} defines them", file.display())),
        Health::Unhealthy(reason) => log::line(&format!("devices are {word}: {reason}")),
    }
}
