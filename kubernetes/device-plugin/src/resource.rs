//! The life of one resource: create the socket, serve it, register, and again after every restart
//! of the kubelet.
//!
//! A restarting kubelet removes the sockets in its plugin directory and forgets the plugins. Two
//! `stat` calls per second notice it; a watch on the directory would need the same check at its
//! start.

use std::path::{Path, PathBuf};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::Server;

use crate::kubelet::{self, register};
use crate::log::StateLog;
use crate::messages::{API_VERSION, RegisterRequest};
use crate::names::ResourceName;
use crate::service::{DevicePlugin, OPTIONS};
use crate::socket::{FileIdentity, SocketFile};

/// Time between two looks at the socket files.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Delay after a refused registration, doubled each time.
const FIRST_BACKOFF: Duration = Duration::from_secs(1);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// The kubelet opens ListAndWatch right after a registration. Without a stream for this time it has
/// lost the plugin.
const STREAM_TIMEOUT: Duration = Duration::from_secs(30);
/// Streams of one connection; the kubelet has one open and calls one method at a time.
const MAX_STREAMS: u32 = 64;

/// One resource with its socket in the kubelet's plugin directory.
#[derive(Debug)]
pub(crate) struct Resource {
    name: ResourceName,
    directory: PathBuf,
    service: DevicePlugin,
    log: StateLog,
}

/// A running gRPC server. Dropping it closes the listener and removes the socket file.
struct Endpoint {
    file: SocketFile,
    server: JoinHandle<()>,
}

impl Endpoint {
    fn is_serving(&self) -> bool {
        self.file.is_in_place() && !self.server.is_finished()
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Resource {
    pub(crate) fn new(name: ResourceName, directory: &Path, service: DevicePlugin) -> Self {
        let log = StateLog::new(&name.to_string());
        Self { name, directory: directory.to_owned(), service, log }
    }

    /// Runs until the future is dropped, which removes the socket.
    pub(crate) async fn run(mut self) {
        loop {
            let endpoint = self.serve().await;
            self.stay_registered(&endpoint).await;
            self.log.state(
                "its socket was removed, as by a restart of the kubelet; creating it again".to_owned(),
            );
        }
    }

    /// Creates the socket and serves it; retries until that works.
    async fn serve(&mut self) -> Endpoint {
        let path = self.directory.join(self.name.socket_name());
        let (listener, file) = loop {
            match SocketFile::claim(&path).await {
                Ok(claimed) => break claimed,
                Err(error) => self.log.state(error.to_string()),
            }
            sleep(POLL_INTERVAL).await;
        };
        let service = self.service.clone();
        let server = tokio::spawn(async move {
            let server = Server::builder().max_concurrent_streams(MAX_STREAMS);
            // The caller sees that the task has ended, and starts another one.
            let _ = server.serve_with_incoming(service, UnixListenerStream::new(listener)).await;
        });
        Endpoint { file, server }
    }

    /// Registers now and after each restart of the kubelet; returns when the socket is gone.
    async fn stay_registered(&mut self, endpoint: &Endpoint) {
        let kubelet_socket = self.directory.join(kubelet::SOCKET_NAME);
        let mut schedule = Schedule::default();
        while endpoint.is_serving() {
            let kubelet = FileIdentity::of(&kubelet_socket);
            let Some(kubelet) = kubelet else {
                schedule = Schedule::default();
                self.log
                    .state(format!("waiting for the kubelet: {} does not exist", kubelet_socket.display()));
                sleep(POLL_INTERVAL).await;
                continue;
            };
            if schedule.is_another(kubelet) {
                self.log.state("kubelet.sock was replaced; registering again".to_owned());
            }
            if schedule.is_due(kubelet, !self.service.watchers.is_empty(), Instant::now()) {
                match register(&kubelet_socket, self.register_request()).await {
                    Ok(()) => {
                        schedule.succeeded(kubelet, Instant::now());
                        self.log.state(self.registered_line());
                    }
                    Err(error) => {
                        schedule.failed(kubelet, Instant::now());
                        self.log.state(format!("{error}; retrying"));
                    }
                }
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    fn register_request(&self) -> RegisterRequest {
        RegisterRequest {
            version: API_VERSION.to_owned(),
            endpoint: self.name.socket_name(),
            resource_name: self.name.to_string(),
            options: Some(OPTIONS),
        }
    }

    fn registered_line(&self) -> String {
        let (count, device) = (self.service.devices.count, &self.service.cdi_device);
        format!("registered with the kubelet: {count} devices, each gives a container {device}")
    }
}

/// When to register next.
#[derive(Debug, Default)]
struct Schedule {
    /// The kubelet socket of the last attempt.
    kubelet: Option<FileIdentity>,
    /// Set after a successful registration: when the kubelet was last seen to watch the devices.
    watched_at: Option<Instant>,
    /// Set after a refused one.
    retry: Option<(Instant, Duration)>,
}

impl Schedule {
    /// Whether the last attempt was made at another kubelet socket.
    fn is_another(&self, kubelet: FileIdentity) -> bool {
        self.kubelet.is_some_and(|last| last != kubelet)
    }

    fn is_due(&mut self, kubelet: FileIdentity, is_watched: bool, now: Instant) -> bool {
        if self.kubelet != Some(kubelet) {
            return true;
        }
        if let Some((at, _)) = self.retry {
            return now >= at;
        }
        if is_watched {
            self.watched_at = Some(now);
        }
        self.watched_at.is_none_or(|at| now - at >= STREAM_TIMEOUT)
    }

    fn succeeded(&mut self, kubelet: FileIdentity, now: Instant) {
        *self = Self { kubelet: Some(kubelet), watched_at: Some(now), retry: None };
    }

    fn failed(&mut self, kubelet: FileIdentity, now: Instant) {
        let backoff = match self.retry {
            Some((_, last)) if self.kubelet == Some(kubelet) => (last * 2).min(LONGEST_BACKOFF),
            _ => FIRST_BACKOFF,
        };
        *self = Self { kubelet: Some(kubelet), watched_at: None, retry: Some((now + backoff, backoff)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::TempDir;

    const SECOND: Duration = Duration::from_secs(1);

    fn two_kubelets() -> (FileIdentity, FileIdentity) {
        let folder = TempDir::new("schedule");
        std::fs::write(folder.path("a"), "").unwrap();
        std::fs::write(folder.path("b"), "").unwrap();
        (FileIdentity::of(&folder.path("a")).unwrap(), FileIdentity::of(&folder.path("b")).unwrap())
    }

    #[test]
    fn a_new_kubelet_socket_means_registration() {
        let (first, second) = two_kubelets();
        let now = Instant::now();
        let mut schedule = Schedule::default();
        assert!(schedule.is_due(first, false, now) && !schedule.is_another(first));
        schedule.succeeded(first, now);
        assert!(!schedule.is_due(first, true, now + SECOND));
        assert!(schedule.is_due(second, true, now + SECOND) && schedule.is_another(second));
    }

    #[test]
    fn a_kubelet_that_stops_watching_means_registration() {
        let (kubelet, _) = two_kubelets();
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.succeeded(kubelet, now);
        assert!(!schedule.is_due(kubelet, false, now + STREAM_TIMEOUT - SECOND));
        assert!(!schedule.is_due(kubelet, true, now + STREAM_TIMEOUT * 2));
        assert!(!schedule.is_due(kubelet, false, now + STREAM_TIMEOUT * 2 + SECOND));
        assert!(schedule.is_due(kubelet, false, now + STREAM_TIMEOUT * 3));
    }

    #[test]
    fn refusals_back_off_until_the_kubelet_changes() {
        let (first, second) = two_kubelets();
        let mut now = Instant::now();
        let mut schedule = Schedule::default();
        let mut delays = Vec::new();
        for _ in 0..8 {
            schedule.failed(first, now);
            let start = now;
            while !schedule.is_due(first, false, now) {
                now += SECOND;
            }
            delays.push((now - start).as_secs());
        }
        assert_eq!(delays, [1, 2, 4, 8, 16, 32, 60, 60]);
        schedule.failed(first, now);
        assert!(schedule.is_due(second, false, now));
        schedule.failed(second, now);
        assert!(schedule.is_due(second, false, now + FIRST_BACKOFF));
    }
}
