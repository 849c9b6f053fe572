//! `nobounce metrics`: published counters in Prometheus' text format.

pub(crate) mod args;
mod families;
mod format;
mod node_sums;

use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

use self::args::MetricsArgs;
pub(crate) use self::format::Format;
use crate::http::{Answer, Request, Server};
use crate::live;

/// The file in the textfile collector's folder.
const FILE: &str = "nobounce.prom";

pub(crate) fn main(args: &MetricsArgs) -> anyhow::Result<ExitCode> {
    if let Some(trouble) = live::trouble() {
        eprintln!("nobounce: {trouble}");
    }
    let text = |node_names: bool, format| {
        let devices = live::devices();
        let sums = node_names.then(|| node_sums::update(&devices));
        format::text(&families::of(&devices, sums.as_ref()), format)
    };
    if let Some(addr) = args.listen {
        let server = Server::bind(addr)?;
        eprintln!("scrapes are answered at http://{}/metrics; Ctrl-C ends it", server.addr());
        let node_names = args.node_names;
        server.run(move |request| answer(request, |format| text(node_names, format)))?;
    } else if let Some(folder) = &args.textfile {
        replace(folder, &text(args.node_names, Format::Prometheus))?;
    } else {
        write!(std::io::stdout().lock(), "{}", text(args.node_names, Format::Prometheus))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(request: &Request, text: impl Fn(Format) -> String) -> Answer {
    match request.path.as_str() {
        "/metrics" => {
            let format = Format::wanted(&request.accept);
            Answer::Whole(200, format.media_type(), text(format).into_bytes())
        }
        "/" => Answer::Whole(200, "text/plain; charset=utf-8", b"see /metrics\n".to_vec()),
        _ => Answer::error(404, "there is only /metrics"),
    }
}

/// Replaces the file: a reader sees the old one or the new one, never a part.
fn replace(folder: &Path, text: &str) -> anyhow::Result<()> {
    let (file, partly) = (folder.join(FILE), folder.join(format!("{FILE}.{}", std::process::id())));
    let written = std::fs::write(&partly, text).with_context(|| format!("cannot write {}", partly.display()));
    let replaced = written.and_then(|()| {
        std::fs::rename(&partly, &file).with_context(|| format!("cannot replace {}", file.display()))
    });
    replaced.inspect_err(|_| {
        let _ = std::fs::remove_file(&partly); // the first error is the one to tell
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_format_follows_the_accept_header() {
        let ask = |path: &str, accept: &str| {
            let request = Request { path: path.to_owned(), accept: accept.to_owned(), ..Request::default() };
            match answer(&request, |format| format!("{format:?}")) {
                Answer::Whole(status, kind, text) => (status, kind, String::from_utf8(text).unwrap()),
                Answer::Events(_) => unreachable!("metrics are no stream"),
            }
        };
        assert_eq!(ask("/metrics", "*/*").2, "Prometheus");
        let open = ask("/metrics", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5");
        assert!(open.2 == "OpenMetrics" && open.1.starts_with("application/openmetrics-text"));
        assert_eq!(ask("/other", "").0, 404);
    }

    #[test]
    fn a_textfile_is_replaced_in_one_step() {
        let folder = std::env::temp_dir().join(format!("nobounce-textfile-{}", std::process::id()));
        std::fs::create_dir(&folder).unwrap();
        replace(&folder, "one\n").unwrap();
        replace(&folder, "two\n").unwrap();
        let names: Vec<_> =
            std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [FILE]);
        assert_eq!(std::fs::read_to_string(folder.join(FILE)).unwrap(), "two\n");
        std::fs::remove_file(folder.join(FILE)).unwrap();
        std::fs::create_dir(folder.join(FILE)).unwrap();
        assert!(replace(&folder, "").unwrap_err().to_string().contains("cannot replace"));
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 1, "no part is left");
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(replace(&folder, "").unwrap_err().to_string().contains("cannot write"));
    }
}
