//! The text formats of Prometheus and OpenMetrics.

use std::fmt::Write;

/// A metric with all its samples.
#[derive(Debug)]
pub(super) struct Family {
    /// Without the `_total` of counters.
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    pub(super) kind: MetricKind,
    pub(super) samples: Vec<Sample>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MetricKind {
    Counter,
    Gauge,
}

#[derive(Debug)]
pub(super) struct Sample {
    pub(super) labels: Vec<(&'static str, String)>,
    pub(super) value: f64,
    /// When counting began, in seconds since 1970: for counters.
    pub(super) created: u64,
}

/// A text format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Prometheus,
    OpenMetrics,
}

impl Format {
    /// The one that a scrape asks for.
    pub(super) fn wanted(accept: &str) -> Self {
        if accept.contains("application/openmetrics-text") { Self::OpenMetrics } else { Self::Prometheus }
    }

    pub(super) const fn media_type(self) -> &'static str {
        match self {
            Self::Prometheus => "text/plain; version=0.0.4; charset=utf-8",
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
        }
    }
}

pub(super) fn text(families: &[Family], format: Format) -> String {
    let mut text = String::new();
    for family in families.iter().filter(|family| !family.samples.is_empty()) {
        // Writing to a string cannot fail.
        let _ = write_family(&mut text, family, format);
    }
    if format == Format::OpenMetrics {
        text.push_str("# EOF\n");
    }
    text
}

fn write_family(text: &mut String, family: &Family, format: Format) -> std::fmt::Result {
    let Family { name, help, kind, samples } = family;
    let has_created = *kind == MetricKind::Counter && format == Format::OpenMetrics;
    let (kind, ending) = match kind {
        MetricKind::Counter => ("counter", "_total"),
        MetricKind::Gauge => ("gauge", ""),
    };
    // OpenMetrics names the family, Prometheus the samples.
    let titled = if format == Format::OpenMetrics { "" } else { ending };
    writeln!(text, "# HELP {name}{titled} {help}")?;
    writeln!(text, "# TYPE {name}{titled} {kind}")?;
    for Sample { labels, value, created } in samples {
        let labels: Vec<_> =
            labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escaped(value))).collect();
        let labels = labels.join(",");
        writeln!(text, "{name}{ending}{{{labels}}} {value}")?;
        if has_created {
            writeln!(text, "{name}_created{{{labels}}} {created}")?;
        }
    }
    Ok(())
}

fn escaped(value: &str) -> String {
    value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_formats() {
        let family = Family {
            name: "nobounce_bytes",
            help: "Bytes.",
            kind: MetricKind::Counter,
            samples: vec![Sample {
                labels: vec![("program", "a\"b\\c\nd".to_owned())],
                value: 12_345_678_901.0,
                created: 17,
            }],
        };
        let empty = Family { name: "none", help: "", kind: MetricKind::Gauge, samples: Vec::new() };
        let families = [family, empty];
        let created = "nobounce_bytes_created{program=\"a\\\"b\\\\c\\nd\"} 17\n";
        let line = "nobounce_bytes_total{program=\"a\\\"b\\\\c\\nd\"} 12345678901\n";
        assert_eq!(
            text(&families, Format::Prometheus),
            format!("# HELP nobounce_bytes_total Bytes.\n# TYPE nobounce_bytes_total counter\n{line}")
        );
        assert_eq!(
            text(&families, Format::OpenMetrics),
            format!("# HELP nobounce_bytes Bytes.\n# TYPE nobounce_bytes counter\n{line}{created}# EOF\n")
        );
    }
}
