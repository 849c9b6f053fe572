//! Log lines on stderr, only when `NOBOUNCE_LOG` asks for them.

use tracing::level_filters::LevelFilter;

/// The environment variable that turns logging on.
pub(crate) const VARIABLE: &str = "NOBOUNCE_LOG";

/// `NOBOUNCE_LOG` holds a word that is no level.
#[derive(Debug, thiserror::Error)]
#[error("invalid {VARIABLE}={word:?}: expected off, error, warn, info, debug or trace")]
pub(crate) struct LevelError {
    word: String,
}

/// Installs the log writer. Silent unless the variable is set.
pub(crate) fn start() -> Result<(), LevelError> {
    let Some(word) = std::env::var_os(VARIABLE) else { return Ok(()) };
    let level = level(&word.to_string_lossy())?;
    // A second call (tests) finds a subscriber already there, which is fine.
    let _ = tracing_subscriber::fmt().with_max_level(level).with_writer(std::io::stderr).try_init();
    Ok(())
}

pub(crate) fn level(word: &str) -> Result<LevelFilter, LevelError> {
    if word.is_empty() {
        return Ok(LevelFilter::OFF);
    }
    // Numbers would parse too, with tracing's own meaning; we document words only.
    let known = ["off", "error", "warn", "info", "debug", "trace"];
    known
        .iter()
        .find(|name| name.eq_ignore_ascii_case(word))
        .and_then(|name| name.parse().ok())
        .ok_or_else(|| LevelError { word: word.to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_words() {
        assert_eq!(level("debug").unwrap(), LevelFilter::DEBUG);
        assert_eq!(level("WARN").unwrap(), LevelFilter::WARN);
        assert_eq!(level("").unwrap(), LevelFilter::OFF);
        let told = level("loud").unwrap_err().to_string();
        assert!(told.contains("loud") && told.contains("trace"), "{told}");
    }
}
