//! `nobounce serve`: files of this machine for the memory of others.

pub(crate) mod args;

use std::process::ExitCode;

use nobounce::Device;
use nobounce_storage::{FileServer, ServerOptions};
use nobounce_transfer::AgentOptions;

use self::args::ServeArgs;

pub(crate) fn main(args: &ServeArgs) -> anyhow::Result<ExitCode> {
    let mut agent = AgentOptions { lanes: args.lanes, ..AgentOptions::default() };
    if !args.allow.is_empty() {
        agent.allow = args.allow.join(",").parse()?;
    }
    let options =
        ServerOptions { listen: args.listen, is_writable: args.write, agent, ..ServerOptions::default() };
    let server = FileServer::start(&Device::open()?, &args.root, options)?;
    let access = if args.write { "read and written" } else { "read" };
    println!(
        "files below {} are {access} at nb://{}; Ctrl-C ends it",
        args.root.display(),
        server.local_addr()
    );
    loop {
        std::thread::park();
    }
}
