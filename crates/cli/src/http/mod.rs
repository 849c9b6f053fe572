//! A small HTTP server for local readers: GET requests, one for each connection, answers made in
//! memory or streamed.

mod request;

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::Context;

use self::request::Refused;
pub(crate) use self::request::Request;

/// Connections at one time; more are closed at once.
const MOST_CONNECTIONS: usize = 64;
/// Bytes of a request.
const MOST_REQUEST: usize = 8 << 10;
/// Bytes that are read, and how long, after the answer to a request that is too long.
const MOST_DRAINED: usize = 8 << 20;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a peer may take for its request, or for a part of the answer.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An answer.
pub(crate) enum Answer {
    /// Status, media type and content.
    Whole(u16, &'static str, Vec<u8>),
    /// Server-sent events: one for each call, with pauses that the function makes.
    Events(Box<dyn FnMut() -> String + Send>),
}

impl Answer {
    /// JSON.
    pub(crate) fn json(status: u16, value: &serde_json::Value) -> Self {
        Self::Whole(status, "application/json", value.to_string().into_bytes())
    }

    /// An error, for people and programs.
    pub(crate) fn error(status: u16, text: &str) -> Self {
        Self::json(status, &serde_json::json!({ "error": text }))
    }
}

/// A server that is bound and not started.
pub(crate) struct Server {
    listener: TcpListener,
    addr: SocketAddr,
    /// Headers of all answers.
    pub(crate) headers: &'static str,
}

impl Server {
    pub(crate) fn bind(addr: SocketAddr) -> anyhow::Result<Self> {
        let listener = TcpListener::bind(addr)
            .with_context(|| format!("cannot listen at {addr}; choose another port or address"))?;
        let addr = listener.local_addr()?;
        Ok(Self { listener, addr, headers: "" })
    }

    pub(crate) fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// Answers requests until the process ends.
    pub(crate) fn run(
        self,
        answer: impl Fn(&Request) -> Answer + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let (answer, open) = (Arc::new(answer), Arc::new(AtomicUsize::new(0)));
        let (addr, headers) = (self.addr, self.headers);
        for stream in self.listener.incoming() {
            let Ok(stream) = stream else {
                // Too many descriptors: those in use will end.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            if open.fetch_add(1, Ordering::AcqRel) >= MOST_CONNECTIONS {
                open.fetch_sub(1, Ordering::AcqRel);
                continue;
            }
            let counted = OpenConnection(open.clone());
            let answer = answer.clone();
            let serve = move || {
                let _counted = counted;
                // A peer that went away needs no answer.
                let _ = serve(stream, addr, headers, &*answer);
            };
            // Without a thread the connection is closed; others may end meanwhile.
            let _ = std::thread::Builder::new().name("http".into()).spawn(serve);
        }
        Ok(())
    }
}

/// The answer to the request in these bytes, at this address.
pub(crate) fn respond(bytes: &[u8], addr: SocketAddr, answer: &dyn Fn(&Request) -> Answer) -> Answer {
    match Request::parse(bytes) {
        Ok(request) if is_for_us(&request, addr) => answer(&request),
        Ok(_) => Answer::error(421, "the Host header names another machine"),
        Err(Refused::Method) => Answer::error(405, "only GET is answered"),
        Err(Refused::Malformed) => Answer::error(400, "not an HTTP request"),
    }
}

struct OpenConnection(Arc<AtomicUsize>);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

fn serve(
    mut stream: TcpStream,
    addr: SocketAddr,
    headers: &str,
    answer: &dyn Fn(&Request) -> Answer,
) -> std::io::Result<()> {
    stream.set_read_timeout(Some(TIMEOUT))?;
    stream.set_write_timeout(Some(TIMEOUT))?;
    stream.set_nodelay(true)?;
    let (answered, is_whole) = match read(&mut stream)? {
        Some(bytes) => (respond(&bytes, addr, answer), true),
        None => (Answer::error(431, "the request is too long"), false),
    };
    match answered {
        Answer::Whole(status, kind, content) => {
            let (len, reason) = (content.len(), reason(status));
            let mut bytes = format!(
                "HTTP/1.1 {status} {reason}\r\nContent-Type: {kind}\r\nContent-Length: {len}\r\nConnection: close\r\n{headers}\r\n"
            )
            .into_bytes();
            bytes.extend(content);
            stream.write_all(&bytes)?;
            if is_whole { Ok(()) } else { drain(&mut stream) }
        }
        Answer::Events(mut next) => {
            let head = format!(
                "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n{headers}\r\n"
            );
            stream.write_all(head.as_bytes())?;
            loop {
                stream.write_all(format!("data: {}\n\n", next()).as_bytes())?;
            }
        }
    }
}

/// Reads what a peer still sends, within limits. Closing a socket with unread bytes would reset the
/// connection, and the peer may never see the answer.
fn drain(stream: &mut TcpStream) -> std::io::Result<()> {
    stream.shutdown(std::net::Shutdown::Write)?;
    let (mut part, mut left) = ([0; 4096], MOST_DRAINED);
    let until = std::time::Instant::now() + DRAIN_TIMEOUT;
    stream.set_read_timeout(Some(DRAIN_TIMEOUT))?;
    while left > 0 && std::time::Instant::now() < until {
        match stream.read(&mut part)? {
            0 => break,
            count => left = left.saturating_sub(count),
        }
    }
    Ok(())
}

/// The head of a request; `None` if it is too long.
fn read(stream: &mut TcpStream) -> std::io::Result<Option<Vec<u8>>> {
    let (mut bytes, mut part) = (Vec::new(), [0; 1024]);
    // Slow senders of single bytes must end, too.
    let until = std::time::Instant::now() + TIMEOUT;
    loop {
        let count = stream.read(&mut part)?;
        bytes.extend_from_slice(&part[..count]);
        if bytes.windows(4).any(|four| four == b"\r\n\r\n") || count == 0 {
            return Ok(Some(bytes));
        }
        if bytes.len() > MOST_REQUEST || std::time::Instant::now() > until {
            return Ok(None);
        }
    }
}

/// Whether the Host header names this server. A page of another site whose name resolves to
/// loopback sends its own name.
fn is_for_us(request: &Request, addr: SocketAddr) -> bool {
    if !addr.ip().is_loopback() {
        return true; // any name of this machine
    }
    let host = request.host.to_ascii_lowercase();
    // The colons of an IPv6 address are inside brackets. Without a port it means port 80.
    let with_port = host.rsplit_once(':').filter(|(_, port)| !port.ends_with(']'));
    let (name, port) = with_port.unwrap_or((&host, "80"));
    let ip = match name.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
        Some(inner) => inner.parse().map(IpAddr::V6),
        None if name == "localhost" => Ok(addr.ip()),
        None => name.parse().map(IpAddr::V4),
    };
    ip.is_ok_and(|ip| ip.is_loopback()) && port == addr.port().to_string()
}

const fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        400 => "Bad Request",
        401 => "Unauthorized",
        404 => "Not Found",
        405 => "Method Not Allowed",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        _ => "Error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(addr: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(addr).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer); // it may close before all is read
        answer
    }

    #[test]
    fn only_plain_requests_to_this_host_are_answered() {
        let server = Server::bind("127.0.0.1:0".parse().unwrap()).unwrap();
        let addr = server.addr();
        std::thread::spawn(move || {
            server
                .run(|request| Answer::Whole(200, "text/plain", format!("{:?}", request.query).into_bytes()))
        });
        let port = addr.port();
        let fine = ask(addr, &format!("GET /?a=b%20c&d HTTP/1.1\r\nHost: localhost:{port}\r\n\r\n"));
        assert!(
            fine.starts_with("HTTP/1.1 200 OK") && fine.ends_with(r#"[("a", "b c"), ("d", "")]"#),
            "{fine}"
        );
        for (request, status) in [
            ("GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n".to_owned(), "421"),
            ("GET / HTTP/1.1\r\n\r\n".to_owned(), "421"),
            ("GET / HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n".to_owned(), "421"),
            (format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:0{port}\r\n\r\n"), "421"),
            (format!("GET / HTTP/1.1\r\nHost: [::1]{port}\r\n\r\n"), "421"),
            (format!("POST / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n"), "405"),
            ("\0\0\0\0\r\n\r\n".to_owned(), "400"),
            (format!("GET /{} HTTP/1.1\r\n", "x".repeat(20_000)), "431"),
        ] {
            let answer = ask(addr, &request);
            assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{request:.40}: {answer}");
        }
        // Connections that say nothing leave room for others.
        let silent: Vec<_> = (0..MOST_CONNECTIONS / 2).map(|_| TcpStream::connect(addr).unwrap()).collect();
        assert!(ask(addr, &format!("GET / HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n")).contains("200 OK"));
        drop(silent);
        let by_ipv6 = format!("GET / HTTP/1.1\r\nHost: [::1]:{port}\r\n\r\n");
        assert!(ask(addr, &by_ipv6).contains("200 OK"));
    }
}
