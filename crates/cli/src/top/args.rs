//! `nobounce top` as it is typed.

const EXAMPLES: &str = "\
Keys: q quit, s sort by rate, total, staged bytes or program, / filter by program, space freeze, e show ended devices

Examples:
  nobounce top                     live view
  nobounce top --once              one table, for scripts and tickets
  nobounce top --once --json       the same as JSON";

/// Show the traffic of this user's devices, once a second.
#[derive(Debug, Clone, clap::Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TopArgs {
    /// Print one table, with rates over one second, and exit
    #[arg(long)]
    pub(crate) once: bool,

    /// Print JSON
    #[arg(long, requires = "once")]
    pub(crate) json: bool,
}
