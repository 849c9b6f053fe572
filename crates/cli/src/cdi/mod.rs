//! `nobounce cdi`: Container Device Interface files, by which container engines give a container
//! the software NIC.

pub(crate) mod args;
mod check;
mod generate;
mod rootfs;
mod rules;
mod spec;
mod yaml;

use std::process::ExitCode;

use self::args::{CdiArgs, CdiCommand};

pub(crate) fn main(args: &CdiArgs) -> anyhow::Result<ExitCode> {
    match &args.command {
        CdiCommand::Generate(args) => generate::main(args),
        CdiCommand::Check(args) => check::main(args),
    }
}
