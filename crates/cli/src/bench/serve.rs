//! The serving end of a bench: the process that another one starts, or one on another machine
//! (`--listen`).

use std::io::Read;
use std::time::Duration;

use nobounce::{Device, Listener};

use super::peer::{PeerArgs, open_all, options};
use super::{gpu_choice, measure};

/// The process that [`Child`](super::peer::Child) is the handle of.
pub(crate) fn child(args: &PeerArgs) -> anyhow::Result<()> {
    gpu_choice::choose(args.gpu);
    let devices = open_all(args)?;
    let listener = devices[0].listen_with("127.0.0.1:0", &options())?;
    println!("{}", listener.local_addr().port());
    std::thread::spawn(|| {
        // The parent process holds the other end of this pipe.
        let mut nothing = [0];
        while matches!(std::io::stdin().read(&mut nothing), Ok(n) if n > 0) {}
        std::process::exit(0);
    });
    serve_all(&listener, &devices)
}

/// `--listen`: serves one client after the other until it is interrupted.
pub(super) fn listen(devices: &[Device], addr: &str, port: u16) -> anyhow::Result<()> {
    // Without an address: that of the device, which is loopback unless --addr names another.
    let addr = if addr.is_empty() { devices[0].nic().local().to_string() } else { addr.to_owned() };
    let listener = devices[0].listen_with((addr.as_str(), port), &options())?;
    let at: Vec<String> = devices.iter().map(|device| device.nic().local().to_string()).collect();
    println!("serving on {}, device address {}; stop with Ctrl-C", listener.local_addr(), at.join(" and "));
    serve_all(&listener, devices)
}

fn serve_all(listener: &Listener, devices: &[Device]) -> anyhow::Result<()> {
    loop {
        match listener.accept(Duration::from_secs(3600)) {
            // One peer's trouble is no reason to leave the others alone.
            Ok(connection) => {
                if let Err(error) = measure::serve(connection, devices, listener.local_addr().ip()) {
                    eprintln!("nobounce: {error:#}");
                }
            }
            Err(nobounce::AcceptError::Timeout { .. }) => {}
            Err(error) => eprintln!("nobounce: {error:#}"),
        }
    }
}
