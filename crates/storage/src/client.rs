//! The requesting end.

use std::collections::HashMap;
use std::net::ToSocketAddrs;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nobounce::Device;
use nobounce_transfer::{Agent, AgentOptions, Handler, MAX_UNREAD, Notification, Outcome, Peer, View};

use crate::error::ClientError;
use crate::request::{
    FileRange, Kind, MAX_FILES, MAX_PATH, MAX_RANGES, MAX_REQUESTS, Request, of_answer, of_tag,
};

/// A connection with a file server.
#[derive(Debug)]
pub struct FileClient {
    agent: Arc<Agent>,
    table: Arc<Table>,
    peer: Peer,
    next: AtomicU64,
    /// The messages of one request are not mixed with those of another.
    sending: Mutex<()>,
}

/// Requests without an answer. The agent's thread gives answers to their tickets.
#[derive(Debug, Default)]
struct Table {
    open: Mutex<HashMap<u64, Open>>,
    /// One of them has ended.
    ended: Condvar,
}

#[derive(Debug)]
struct Open {
    state: Arc<State>,
    messages: usize,
    /// Which files, for errors.
    files: String,
    /// It stays exported.
    _memory: Option<FileMemory>,
}

/// Memory that this server, and no other peer, may use until the last clone is gone.
#[derive(Clone, Debug)]
pub struct FileMemory(Arc<Exported>);

#[derive(Debug)]
struct Exported {
    agent: Arc<Agent>,
    name: String,
    view: View,
}

impl FileMemory {
    /// The memory.
    pub fn view(&self) -> &View {
        &self.0.view
    }
}

impl Drop for Exported {
    fn drop(&mut self) {
        self.agent.withdraw(&self.name);
    }
}

#[derive(Debug)]
struct State {
    result: Mutex<Option<Result<Answer, ClientError>>>,
    ended: Condvar,
}

#[derive(Clone, Copy, Debug)]
struct Answer {
    bytes: u64,
    size: u64,
}

/// A request in flight. Dropping it does not cancel it: keep its memory until it has ended.
#[derive(Clone, Debug)]
pub struct FileTicket(Arc<State>);

impl FileClient {
    /// Connects to a server.
    ///
    /// # Errors
    /// Nothing listens there, no file server does, or it does not admit this client.
    pub fn connect(
        device: &Device,
        addr: impl ToSocketAddrs,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        Self::connect_with(device, addr, AgentOptions::default(), timeout)
    }

    /// As [`connect`](Self::connect), with options of the connection.
    ///
    /// # Errors
    /// As for [`connect`](Self::connect).
    pub fn connect_with(
        device: &Device,
        addr: impl ToSocketAddrs,
        options: AgentOptions,
        timeout: Duration,
    ) -> Result<Self, ClientError> {
        let resolved = addr.to_socket_addrs().map_err(|error| ClientError::Connect {
            addr: "the given address".to_owned(),
            reason: error.to_string(),
        });
        let addrs: Vec<_> = resolved?.collect();
        let name = addrs.first().map_or_else(|| "an unknown host".to_owned(), ToString::to_string);
        let failed = |reason: String| ClientError::Connect { addr: name.clone(), reason };
        let table = Arc::new(Table::default());
        let agent = Agent::new_with(device, "files", options, Box::new(Answers(table.clone())));
        let agent = Arc::new(agent.map_err(|error| failed(error.to_string()))?);
        let peer = agent.connect(&addrs[..], timeout).map_err(|error| failed(error.to_string()))?;
        Ok(Self { agent, table, peer, next: AtomicU64::new(1), sending: Mutex::default() })
    }

    /// Host memory that the client allocates, for the server.
    ///
    /// # Errors
    /// It cannot be registered.
    pub fn register(&self, len: usize) -> Result<FileMemory, ClientError> {
        let view = self.agent.register(len).map_err(|error| ClientError::Export(error.to_string()))?;
        self.export(&view)
    }

    /// Lets the server use memory of the caller: a view of [`agent`](Self::agent)'s, or
    /// [`View::of`] a region of the same device.
    ///
    /// # Errors
    /// The device refuses.
    pub fn export(&self, view: &View) -> Result<FileMemory, ClientError> {
        let name = format!("memory-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let exported = self.agent.export(&name, view);
        exported.map_err(|error| ClientError::Export(error.to_string()))?;
        Ok(FileMemory(Arc::new(Exported { agent: self.agent.clone(), name, view: view.clone() })))
    }

    /// The agent: it registers memory, and has counters.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The size of a file.
    ///
    /// # Errors
    /// There is no such file, the server is gone, or no answer comes in time.
    pub fn stat(&self, path: &str, timeout: Duration) -> Result<u64, ClientError> {
        self.request(Kind::Stat, None, &[(path, &[])])?.answer(timeout).map(|answer| answer.size)
    }

    /// Has the server write ranges of files into the memory. Waits while the server has as many
    /// requests of this client as it takes.
    ///
    /// # Errors
    /// A path or the list is too long, a range is not inside the memory, or the server is gone.
    /// Errors of the server are those of the ticket.
    pub fn read(
        &self,
        memory: &FileMemory,
        files: &[(&str, &[FileRange])],
    ) -> Result<FileTicket, ClientError> {
        self.request(Kind::Read, Some(memory), files)
    }

    /// Has the server read ranges of the memory into files, which grow as needed.
    ///
    /// # Errors
    /// As for [`read`](Self::read).
    pub fn write(
        &self,
        memory: &FileMemory,
        files: &[(&str, &[FileRange])],
    ) -> Result<FileTicket, ClientError> {
        self.request(Kind::Write, Some(memory), files)
    }

    fn request(
        &self,
        kind: Kind,
        memory: Option<&FileMemory>,
        files: &[(&str, &[FileRange])],
    ) -> Result<FileTicket, ClientError> {
        check(files, memory.map_or(0, |memory| memory.view().len()))?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let export = memory.map(|memory| memory.0.name.clone()).unwrap_or_default();
        let mut request = Request::new(id, kind, export);
        request.files = files.iter().map(|(path, ranges)| ((*path).to_owned(), ranges.to_vec())).collect();
        let state = Arc::new(State { result: Mutex::default(), ended: Condvar::new() });
        let messages = request.message_count();
        let open = Open { state: state.clone(), messages, files: named(files), _memory: memory.cloned() };
        self.table.admit(id, open);
        let sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let mut sent = request.messages().map(|message| self.peer.send_message(&message.encode()));
        let failed = sent.find_map(Result::err);
        drop(sending);
        if let Some(error) = failed {
            self.table.end(id, Err(error.clone().into()));
            return Err(error.into());
        }
        // The connection may have ended before the request was in the table.
        if self.peer.gone().is_some() {
            self.table.end_all(&self.peer);
        }
        Ok(FileTicket(state))
    }
}

/// `"a", "b"`, or `"a", "b", "c" and 2 more`.
fn named(files: &[(&str, &[FileRange])]) -> String {
    const SHOWN: usize = 3;
    let names: Vec<_> = files.iter().take(SHOWN).map(|(path, _)| format!("{path:?}")).collect();
    let more = files.len().saturating_sub(SHOWN);
    let more = if more == 0 { String::new() } else { format!(" and {more} more") };
    format!("{}{more}", names.join(", "))
}

fn check(files: &[(&str, &[FileRange])], size: u64) -> Result<(), ClientError> {
    let count: usize = files.iter().map(|(_, ranges)| ranges.len()).sum();
    if count > MAX_RANGES || files.len() > MAX_FILES {
        return Err(ClientError::TooMany(count.max(files.len())));
    }
    if let Some((path, _)) = files.iter().find(|(path, _)| path.len() > MAX_PATH) {
        return Err(ClientError::Path(path.len()));
    }
    let outside = |range: &&FileRange| range.memory.checked_add(range.len).is_none_or(|end| end > size);
    match files.iter().flat_map(|(_, ranges)| *ranges).find(outside) {
        Some(&FileRange { len, memory, .. }) => Err(ClientError::OutOfBounds { memory, len, size }),
        None => Ok(()),
    }
}

impl Drop for FileClient {
    fn drop(&mut self) {
        self.agent.close();
        self.table.end_all(&self.peer);
    }
}

impl Table {
    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Open>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a request, as soon as the server has room for its messages.
    fn admit(&self, id: u64, new: Open) {
        let is_full = |open: &mut HashMap<u64, Open>| {
            let ahead: usize = open.values().map(|open| open.messages).sum();
            ahead > 0 && (ahead + new.messages > MAX_UNREAD || open.len() >= MAX_REQUESTS)
        };
        let waited = self.ended.wait_while(self.lock(), is_full);
        waited.unwrap_or_else(PoisonError::into_inner).insert(id, new);
    }

    /// The files of a request without an answer.
    fn files(&self, id: u64) -> String {
        self.lock().get(&id).map(|open| open.files.clone()).unwrap_or_default()
    }

    fn end(&self, id: u64, result: Result<Answer, ClientError>) {
        let Some(Open { state, .. }) = self.lock().remove(&id) else { return };
        self.ended.notify_all();
        *state.result.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        state.ended.notify_all();
    }

    fn end_all(&self, peer: &Peer) {
        let reason = peer.gone().map_or_else(|| "it was closed".to_owned(), |gone| gone.to_string());
        let open: Vec<_> = self.lock().keys().copied().collect();
        for id in open {
            let addr = peer.addr().to_owned();
            let reason = format!("the connection ended during {}: {reason}", self.files(id));
            self.end(id, Err(ClientError::Connect { addr, reason }));
        }
    }
}

/// The table, as the agent's thread calls it.
struct Answers(Arc<Table>);

impl Handler for Answers {
    /// The answer to a short read.
    fn message(&self, _: &Peer, bytes: &[u8]) {
        if let Some((id, bytes)) = of_answer(bytes) {
            self.0.end(id, Ok(Answer { bytes, size: 0 }));
        }
    }

    fn notification(&self, found: Notification) {
        let Some((id, size)) = of_tag(&found.tag) else { return };
        let result = match found.outcome {
            Outcome::Complete { bytes } => Ok(Answer { bytes, size }),
            // The server's own words: they name the file.
            Outcome::Aborted { reason } if found.gone.is_none() => Err(ClientError::Refused(reason)),
            // What stopped the connection: a truncated file is an error of a WRITE there.
            Outcome::Failed { reason } | Outcome::Aborted { reason } => {
                Err(ClientError::Refused(format!("{}: {reason}", self.0.files(id))))
            }
        };
        self.0.end(id, result);
    }

    fn gone(&self, peer: &Peer) {
        self.0.end_all(peer);
    }
}

impl FileTicket {
    /// Whether the request has ended.
    pub fn is_done(&self) -> bool {
        self.0.result.lock().unwrap_or_else(PoisonError::into_inner).is_some()
    }

    /// Waits for the end, and returns the bytes moved. They are visible to the host and to kernels
    /// that are launched from now on.
    ///
    /// # Errors
    /// The server refused the request or is gone, a file failed, or there is no answer yet. A part
    /// of the bytes may have moved.
    pub fn wait(&self, timeout: Duration) -> Result<u64, ClientError> {
        self.answer(timeout).map(|answer| answer.bytes)
    }

    fn answer(&self, timeout: Duration) -> Result<Answer, ClientError> {
        let deadline = Instant::now().checked_add(timeout);
        let mut result = self.0.result.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = &*result {
                return result.clone();
            }
            let left = deadline.map_or(Duration::MAX, |at| at.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return Err(ClientError::Timeout(timeout));
            }
            let waited = self.0.ended.wait_timeout(result, left.min(Duration::from_secs(3600)));
            result = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}
