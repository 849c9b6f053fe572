//! `nobounce ui`, a local page, and `nobounce report`, the same page as one file.

pub(crate) mod args;
mod assets;
mod data;
mod table;

use std::io::{Read as _, Write};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::Context;
use serde_json::{Value, json};

use self::args::{ReportArgs, UiArgs};
use self::data::Data;
use crate::http::{Answer, Request, Server};
use crate::live;

/// Between two events of the live view.
const INTERVAL: Duration = Duration::from_secs(1);

/// `nobounce ui`: serves until it is ended.
pub(crate) fn main(args: &UiArgs) -> anyhow::Result<ExitCode> {
    let data = Arc::new(Data::read(&args.shown)?);
    let mut server = Server::bind(SocketAddr::new(args.addr, args.port))?;
    server.headers = assets::HEADERS;
    let token = secret()?;
    let mut out = std::io::stdout().lock();
    writeln!(out, "http://{}/?token={token}", reachable(server.addr()))?;
    out.flush()?;
    drop(out);
    eprintln!("Open this address in a browser. Ctrl-C ends the server.");
    if !args.addr.is_loopback() {
        eprintln!(
            "The page can be opened from the network, by its address; the connection is not encrypted."
        );
    }
    server.run(move |request| answer(&data, &token, request))?;
    Ok(ExitCode::SUCCESS)
}

/// `nobounce report`.
pub(crate) fn report(args: &ReportArgs) -> anyhow::Result<ExitCode> {
    let data = Data::read(&args.shown)?;
    let page = assets::report(&content(&data)?, &secret()?);
    if args.out == Path::new("-") {
        std::io::stdout().lock().write_all(page.as_bytes())?;
    } else {
        std::fs::write(&args.out, page).with_context(|| format!("cannot write {}", args.out.display()))?;
        eprintln!("{} written; open it in a browser", args.out.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// The address to open: where the server listens at all addresses, the one that this machine has
/// towards others.
fn reachable(addr: SocketAddr) -> SocketAddr {
    if !addr.ip().is_unspecified() {
        return addr;
    }
    // Addresses of documentation. Connecting a UDP socket chooses a route, and sends nothing.
    let (any, far): (IpAddr, IpAddr) = if addr.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::new(192, 0, 2, 1).into())
    } else {
        (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1).into())
    };
    let chosen = UdpSocket::bind((any, 0)).and_then(|socket| {
        socket.connect((far, 9))?;
        socket.local_addr()
    });
    let here: IpAddr = if addr.is_ipv4() { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() };
    SocketAddr::new(chosen.map_or(here, |chosen| chosen.ip()), addr.port())
}

/// All that the page would ask for.
fn content(data: &Data) -> anyhow::Result<Value> {
    let option = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    // A machine without GPU or adapter has no prediction of its own.
    let predict = |options: &[(String, String)]| data.predict(options).unwrap_or(Value::Null);
    let software = |memory| {
        predict(&[option("software", "nobounce"), option("memory", memory), option("size", "8..1G")])
    };
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
    Ok(json!({
        "schema": "nobounce-page/1", "created": created, "machine": data.machine("this")?,
        "predict": {
            "machine": predict(&[option("size", "8..1G")]), "table": table::predictions(data),
            "software": { "gpu": software("gpu"), "host": software("host") },
        },
        "impact": predict(&[
            option("nodes", "8"), option("bytes", "14000000000"), option("compute", "400"), option("overlap", "0"),
        ]),
        "bench": data.bench_all(), "live": live::event(&data.devices(), None),
    }))
}

fn answer(data: &Arc<Data>, token: &str, request: &Request) -> Answer {
    let text = |kind, content: String| Answer::Whole(200, kind, content.into_bytes());
    match request.path.as_str() {
        "/" => return text("text/html; charset=utf-8", assets::HTML.to_owned()),
        "/page.css" => return text("text/css; charset=utf-8", assets::STYLE.to_owned()),
        "/page.js" => return text("text/javascript; charset=utf-8", assets::script()),
        _ => {}
    }
    let given = match request.path.as_str() {
        // A browser's EventSource cannot send headers.
        "/api/live" => request.asked("token").unwrap_or_default(),
        _ => request.authorization.strip_prefix("Bearer ").unwrap_or_default(),
    };
    if !is_same(given, token) {
        return Answer::error(
            401,
            "the token is missing or wrong: open the address that nobounce ui printed",
        );
    }
    match request.path.as_str() {
        "/api/machine" => match data.machine(request.asked("name").unwrap_or("this")) {
            Ok(found) => Answer::json(200, &found),
            Err(error) => Answer::error(404, &error.to_string()),
        },
        // A combination of parts that does not exist is an ordinary choice.
        "/api/predict" => match data.predict(&request.query) {
            Ok(found) => Answer::json(200, &found),
            Err(error) => Answer::error(200, &format!("{error:#}")),
        },
        "/api/bench" => Answer::json(200, &data.bench_list()),
        "/api/bench/file" => match request.asked("name").and_then(|name| data.bench_file(name)) {
            Some(file) => Answer::json(200, file),
            None => Answer::error(404, "there is no such measurement"),
        },
        "/api/live" => {
            let (mut is_first, data) = (true, data.clone());
            Answer::Events(Box::new(move || {
                if !std::mem::take(&mut is_first) {
                    std::thread::sleep(INTERVAL);
                }
                data.event().to_string()
            }))
        }
        _ => Answer::error(404, "there is no such page"),
    }
}

/// An arbitrary request: parsed, and answered without the token.
#[doc(hidden)]
pub fn fuzz_request(bytes: &[u8]) {
    use std::sync::OnceLock;
    static DATA: OnceLock<Option<Arc<Data>>> = OnceLock::new();
    let Some(data) = DATA.get_or_init(|| Data::example().map(Arc::new)) else { return };
    judge(bytes, &|request| answer(data, "0123456789abcdef", request));
}

/// Panics if the answer to a request that lacks the token has data, or if it was given to another
/// host.
fn judge(bytes: &[u8], answer: &dyn Fn(&Request) -> Answer) {
    let here = SocketAddr::from(([127, 0, 0, 1], 8000));
    let host = std::cell::Cell::new(None);
    let seen = |request: &Request| {
        host.set(Some(request.host.clone()));
        answer(request)
    };
    match crate::http::respond(bytes, here, &seen) {
        Answer::Events(_) => panic!("a stream without the token"),
        Answer::Whole(200, kind, _) => assert_ne!(kind, "application/json", "data without the token"),
        Answer::Whole(..) => {}
    }
    let Some(host) = host.take() else { return };
    let name = host.strip_suffix(":8000").unwrap_or_default().to_ascii_lowercase();
    let is_loopback = match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse() == Ok(Ipv6Addr::LOCALHOST),
        None => name == "localhost" || name.parse::<Ipv4Addr>().is_ok_and(|ip| ip.octets()[0] == 127),
    };
    assert!(is_loopback, "a request to {host:?} was answered");
}

/// Compares without telling by the time it takes where they differ.
fn is_same(given: &str, token: &str) -> bool {
    given.len() == token.len() && given.bytes().zip(token.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b)) == 0
}

/// 128 random bits.
fn secret() -> anyhow::Result<String> {
    let mut bytes = [0; 16];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut file| file.read_exact(&mut bytes))
        .context("cannot read /dev/urandom")?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(path: &str, authorization: &str) -> (u16, String) {
        let (path, query) = path.split_once('?').unwrap_or((path, ""));
        let query = query.split('&').filter_map(|pair| pair.split_once('='));
        let request = Request {
            path: path.to_owned(),
            query: query.map(|(name, value)| (name.to_owned(), value.to_owned())).collect(),
            authorization: authorization.to_owned(),
            ..Request::default()
        };
        match answer(&Arc::new(Data::example().unwrap()), "secret", &request) {
            Answer::Whole(status, _, content) => (status, String::from_utf8(content).unwrap()),
            Answer::Events(mut next) => (200, next()),
        }
    }

    #[test]
    fn nothing_is_told_without_the_token() {
        for path in
            ["/api/machine", "/api/predict", "/api/bench", "/api/bench/file", "/api/live", "/api/../x", "/x"]
        {
            for given in ["", "Bearer ", "Bearer secre", "Bearer secret2", "secret"] {
                assert_eq!(ask(path, given).0, 401, "{path} {given}");
            }
        }
        assert_eq!(ask("/api/live?token=wrong", "").0, 401);
        assert_eq!(ask("/../../etc/passwd", "Bearer secret").0, 404);
        assert_eq!(ask("/api/bench/file?name=../../etc/passwd", "Bearer secret").0, 404);
    }

    #[test]
    fn the_address_can_be_opened() {
        for (listens, port) in [("0.0.0.0:8000", 8000), ("[::]:80", 80)] {
            let shown = reachable(listens.parse().unwrap());
            assert!(!shown.ip().is_unspecified() && shown.port() == port, "{shown}");
        }
        assert_eq!(reachable("127.0.0.1:7".parse().unwrap()).to_string(), "127.0.0.1:7");
    }

    const REQUEST: &[u8] = b"GET /api/live HTTP/1.1\r\nHost: localhost:8000\r\n\r\n";

    #[test]
    #[should_panic(expected = "a stream without the token")]
    fn fuzzing_sees_a_stream_without_the_token() {
        judge(REQUEST, &|_| Answer::Events(Box::new(String::new)));
    }

    #[test]
    #[should_panic(expected = "data without the token")]
    fn fuzzing_sees_data_without_the_token() {
        judge(REQUEST, &|_| Answer::json(200, &json!({})));
    }

    #[test]
    fn every_view_has_its_data() {
        let machine: Value = serde_json::from_str(&ask("/api/machine", "Bearer secret").1).unwrap();
        assert!(
            machine["doctor"]["verdicts"].is_array()
                && machine["topo"].is_object()
                && machine["facts"].is_object()
        );
        assert_eq!(ask("/api/machine?name=nothing", "Bearer secret").0, 404);
        assert_eq!(ask("/api/predict?size=8..1M", "Bearer secret").0, 200);
        let (status, refused) = ask("/api/predict?rails=many", "Bearer secret");
        assert!(status == 200 && refused.contains("error"), "{refused}");
        assert!(ask("/api/live?token=secret", "").1.contains("\"devices\""));
        let all = content(&Data::example().unwrap()).unwrap();
        let text = all.to_string();
        assert!(text.len() < 900_000, "{} bytes", text.len());
        assert!(all["predict"]["table"]["ib:ndr|gen5x16|PIX|1"]["rows"].as_array().unwrap().len() > 10);
    }
}
