//! The `nobounce` command.

fn main() -> std::process::ExitCode {
    nobounce_cli::main()
}
