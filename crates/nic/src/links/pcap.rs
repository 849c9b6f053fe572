//! A capturing link: writes every packet sent and received to a pcap file for tshark and Wireshark.

use std::fs::File;
use std::io::{self, BufWriter};
use std::net::IpAddr;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use nobounce_protocol::pcap::Writer;
use nobounce_protocol::wire::icrc::Flow;
use nobounce_protocol::wire::{Header, ICRC_LEN, Parsed, ROCE_PORT};

use super::{Link, LocalRoute, PeerName, RxDatagram, TxBatch};
use crate::process::private_file;

/// The size at which a capture stops unless told otherwise: 256 MiB.
pub const DEFAULT_LIMIT: u64 = 256 << 20;
/// Recorders that write files of one name, at most.
const MAX_RECORDERS: u32 = 1000;
/// File header: magic, version, zone, snap length, link type.
const FILE_HEADER: u64 = 24;
/// Maximum overhead per packet in bytes: record, Ethernet, IPv6 and UDP headers.
const PER_PACKET: u64 = 16 + 14 + 40 + 8;

/// The capture file could not be made.
#[derive(Debug, thiserror::Error)]
#[error("the capture file {path} could not be created: {source}. Check that its folder exists and is writable", path = .path.display())]
pub struct CaptureError {
    /// The file.
    pub path: PathBuf,
    /// What the system said.
    pub source: io::Error,
}

/// Wraps a link and records what passes.
#[derive(Debug)]
pub struct PcapLink<L> {
    inner: L,
    recorder: Recorder,
    packets: u64,
    missed: u64,
}

/// A capture file, which several links may write.
#[derive(Clone, Debug)]
pub struct Recorder(Arc<Mutex<Record>>);

#[derive(Debug)]
struct Record {
    path: PathBuf,
    /// `None` once the limit is reached or the disk is full.
    writer: Option<Writer<BufWriter<File>>>,
    local: IpAddr,
    limit: u64,
    written: u64,
    packets: u64,
}

impl Recorder {
    /// Makes the file at `path`, for what is sent from and received at `local`, of at most `limit`
    /// bytes. `%p` in the path stands for the process ID, so that several processes do not share a
    /// file. Further devices of one process get a number, from PID.1 on.
    ///
    /// # Errors
    /// The file cannot be made.
    pub fn create(path: &Path, local: IpAddr, limit: u64) -> Result<Self, CaptureError> {
        let first = path_of_process(path);
        let (path, file) = open_unused(&first).map_err(|source| CaptureError { path: first, source })?;
        let writer = match Writer::new(BufWriter::with_capacity(1 << 16, file)) {
            Ok(writer) => writer,
            Err(source) => return Err(CaptureError { path, source }),
        };
        let record = Record { path, writer: Some(writer), local, limit, written: FILE_HEADER, packets: 0 };
        Ok(Self(Arc::new(Mutex::new(record))))
    }

    fn lock(&self) -> MutexGuard<'_, Record> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<L: Link> PcapLink<L> {
    /// Wraps `inner` and records there.
    pub fn new(inner: L, recorder: Recorder) -> Self {
        Self { inner, recorder, packets: 0, missed: 0 }
    }
}

/// Opens a file for writing that no other recorder writes: the first of `trace.pcap`,
/// `trace.1.pcap`, ... without a lock. Two libraries of one process (libibverbs and librdmacm) know
/// nothing of each other's files.
fn open_unused(first: &Path) -> io::Result<(PathBuf, File)> {
    let numbered = (1..MAX_RECORDERS).map(|number| {
        let ending = first.extension().map(|ending| format!(".{}", ending.display())).unwrap_or_default();
        first.with_extension(format!("{number}{ending}"))
    });
    for path in std::iter::once(first.to_owned()).chain(numbered) {
        // It holds payload. Truncated once it is locked.
        let file = private_file::options().create(true).truncate(false).open(&path)?;
        // SAFETY: the call takes a descriptor and a number.
        if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
            file.set_len(0)?;
            return Ok((path, file));
        }
    }
    Err(io::Error::other("too many recorders write to files of this name"))
}

/// The path with the process ID substituted, and a number appended if this process has used the
/// name before.
fn path_of_process(path: &Path) -> PathBuf {
    static USED: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
    let Some(text) = path.to_str().filter(|text| text.contains("%p")) else { return path.to_owned() };
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    let pid = std::process::id();
    let before = used.iter().filter(|other| *other == path).count();
    used.push(path.to_owned());
    let number = if before == 0 { pid.to_string() } else { format!("{pid}.{before}") };
    text.replace("%p", &number).into()
}

impl Record {
    /// Adds a packet; whether it is in the file.
    fn add(&mut self, time_ns: u64, flow: &Flow, ip_id: u16, packet: &[u8]) -> bool {
        let size = PER_PACKET + u64::try_from(packet.len()).unwrap_or(u64::MAX);
        let Some(writer) = &mut self.writer else { return false };
        if self.written.saturating_add(size) > self.limit {
            tracing::warn!(
                "the capture {} has reached its limit of {} bytes and ends here, after {} packets",
                self.path.display(),
                self.limit,
                self.packets
            );
            self.stop();
            return false;
        }
        if let Err(error) = writer.write_packet(time_ns, flow, ip_id, packet) {
            self.fail(&error);
            return false;
        }
        self.written += size;
        self.packets += 1;
        true
    }

    /// After each call of the link: a process that aborts leaves what it sent and received until
    /// then.
    fn flush(&mut self) {
        if let Some(Err(error)) = self.writer.as_mut().map(Writer::flush) {
            self.fail(&error);
        }
    }

    fn fail(&mut self, error: &io::Error) {
        tracing::warn!("the capture {} ends here: {error}", self.path.display());
        self.stop();
    }

    /// Ends the capture with the current packet.
    fn stop(&mut self) {
        if let Some(mut writer) = self.writer.take() {
            // already logged, or visible in the file: nothing else can be done
            let _ = writer.flush();
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        if let Some(writer) = &mut self.writer
            && let Err(error) = writer.flush()
        {
            tracing::warn!("the end of the capture {} is missing: {error}", self.path.display());
        }
    }
}

/// The packets with their ICRCs as on the wire: a run in a ring is split again.
fn has_icrc(flow: &Flow, datagram: &RxDatagram<'_>) -> Vec<Vec<u8>> {
    let whole = datagram.whole.map_or_else(|| datagram.bytes.to_vec(), |whole| whole.to_vec());
    let close = |mut bytes: Vec<u8>| {
        flow.close(datagram.ip_id, &mut bytes);
        bytes
    };
    let parsed = Header::parse(datagram.bytes).ok().filter(|_| datagram.packets > 1);
    let Some(Parsed { mut header, payload }) = parsed else { return vec![close(whole.to_vec())] };
    let (head, piece) = (payload.start, payload.len() / usize::from(datagram.packets));
    let mut packets = Vec::new();
    for part in whole[payload].chunks(piece.max(1)).take(usize::from(datagram.packets)) {
        let mut bytes = vec![0; head + part.len() + ICRC_LEN];
        header.emit(&mut bytes);
        bytes[head..head + part.len()].copy_from_slice(part);
        packets.push(close(bytes));
        header.psn = header.psn.next();
    }
    packets
}

impl<L: Link> Link for PcapLink<L> {
    forward!(self => self.inner; identity, opening, same_host, services, waiting);

    /// Returns none, so that packets have an ICRC: readers of the capture expect one.
    fn local_route(&mut self, to: PeerName) -> Option<LocalRoute> {
        self.inner.local_route(to);
        None
    }

    fn send(&mut self, batch: &mut TxBatch) {
        if !batch.is_empty() {
            let time = wall_ns();
            let mut record = self.recorder.lock();
            for packet in batch.packets() {
                let flow = packet.flow(record.local);
                let added = record.add(time, &flow, packet.ip_id, &batch.bytes(packet));
                *(if added { &mut self.packets } else { &mut self.missed }) += 1;
            }
            record.flush();
        }
        self.inner.send(batch);
    }

    fn receive(&mut self, sink: &mut dyn FnMut(&RxDatagram<'_>)) -> usize {
        let Self { inner, recorder, packets, missed } = self;
        let mut time = None;
        let received = inner.receive(&mut |datagram| {
            // The recorder's lock is not held while the packet is handled, which takes longer.
            let mut record = recorder.lock();
            let flow = Flow {
                src: datagram.src,
                dst: datagram.destination(record.local),
                src_port: datagram.src_port,
                dst_port: ROCE_PORT,
            };
            let time = *time.get_or_insert_with(wall_ns);
            let mut add = |packet: &[u8]| {
                let added = record.add(time, &flow, datagram.ip_id, packet);
                *(if added { &mut *packets } else { &mut *missed }) += 1;
            };
            if datagram.has_icrc {
                add(datagram.bytes);
            } else {
                has_icrc(&flow, datagram).iter().for_each(|packet| add(packet));
            }
            drop(record);
            sink(datagram);
        });
        if time.is_some() {
            recorder.lock().flush();
        }
        received
    }

    fn next_deadline(&self) -> Option<u64> {
        self.inner.next_deadline()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.inner.counters();
        all.extend([("pcap_packets", self.packets), ("pcap_missed", self.missed)]);
        all
    }
}

/// Nanoseconds since 1970, as captures have them.
fn wall_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use nobounce_protocol::pcap::Reader;
    use nobounce_protocol::wire::icrc::IcrcCheck;
    use nobounce_protocol::wire::{BTH_LEN, Opcode, Psn, Qpn};

    use super::*;
    use crate::links::stub::{HERE, StubLink, THERE, number_of, numbered};

    /// A file name of this test's own, removed at the end.
    struct TempCapture(PathBuf);

    impl TempCapture {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("nobounce-{}-{name}.pcap", std::process::id())))
        }

        fn read(&self) -> Vec<u8> {
            std::fs::read(&self.0).unwrap()
        }
    }

    impl Drop for TempCapture {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// UCX and libfabric in one program open the device once each.
    #[test]
    fn devices_of_one_process_do_not_share_a_file() {
        let pid = std::process::id();
        let name = Path::new("/x/y-%p.pcap");
        assert_eq!(path_of_process(name), Path::new(&format!("/x/y-{pid}.pcap")));
        assert_eq!(path_of_process(name), Path::new(&format!("/x/y-{pid}.1.pcap")));
        assert_eq!(path_of_process(Path::new("/x/plain")), Path::new("/x/plain"));
    }

    /// Two libraries of one process, or two processes, that were given one name.
    #[test]
    fn a_file_that_is_being_written_is_left_alone() {
        use std::os::unix::fs::PermissionsExt as _;
        let file = TempCapture::new("shared");
        let second = TempCapture(file.0.with_extension("1.pcap"));
        let first = Recorder::create(&file.0, HERE, DEFAULT_LIMIT).unwrap();
        let other = Recorder::create(&file.0, HERE, DEFAULT_LIMIT).unwrap();
        assert_eq!((&first.lock().path, &other.lock().path), (&file.0, &second.0));
        assert_eq!(std::fs::metadata(&file.0).unwrap().permissions().mode() & 0o777, 0o600);
        drop((first, other));
        let again = Recorder::create(&file.0, HERE, DEFAULT_LIMIT).unwrap();
        assert_eq!(again.lock().path, file.0, "an old capture is replaced");
        let link = TempCapture::new("link");
        std::os::unix::fs::symlink(&file.0, &link.0).unwrap();
        assert!(Recorder::create(&link.0, HERE, DEFAULT_LIMIT).is_err(), "a link is not followed");
    }

    #[test]
    fn what_was_sent_and_received_is_in_the_file_with_a_right_icrc() {
        let file = TempCapture::new("both");
        let (stub, log) = StubLink::new();
        let mut link = PcapLink::new(stub, Recorder::create(&file.0, HERE, DEFAULT_LIMIT).unwrap());
        let mut batch = TxBatch::new(link.capabilities());
        (0..5).for_each(|n| assert!(numbered(&mut batch, n, 64)));
        link.send(&mut batch);
        assert_eq!(log.lock().unwrap().len(), 5, "recording takes nothing away");
        let flow = Flow { src: THERE, dst: HERE, src_port: ROCE_PORT, dst_port: ROCE_PORT };
        let mut reply = vec![0; 64];
        reply[12..16].copy_from_slice(&99_u32.to_be_bytes());
        flow.close(0, &mut reply);
        link.inner.inbox.push(reply);
        assert_eq!(link.receive(&mut |d| assert_eq!(number_of(d.bytes), 99)), 1);
        drop(link);

        let bytes = file.read();
        let packets: Vec<_> = Reader::new(&bytes).unwrap().map(Result::unwrap).collect();
        assert_eq!(packets.iter().map(|p| number_of(p.packet)).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 99]);
        assert_eq!(packets.iter().map(|p| p.ip_id).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 0]);
        for p in &packets {
            assert_eq!(p.flow.verify(p.ip_id, p.packet), IcrcCheck::Valid { ip_id: Some(p.ip_id) });
        }
        assert_eq!((packets[0].flow.src, packets[5].flow.src), (HERE, THERE));
    }

    #[test]
    fn packets_that_came_as_one_are_recorded_as_those_they_are() {
        let mut whole = vec![0; BTH_LEN + 3 * 256 + ICRC_LEN];
        Header::new(Opcode::WriteMiddle, Qpn::new(7), Psn::new(0xff_ffff)).emit(&mut whole);
        (0..3_u8).for_each(|n| whole[BTH_LEN + usize::from(n) * 256..][..256].fill(n));
        let flow = Flow { src: THERE, dst: HERE, src_port: ROCE_PORT, dst_port: ROCE_PORT };
        let datagram = RxDatagram {
            arrival: crate::links::Arrival::Wire,
            group: None,
            src: THERE,
            src_port: ROCE_PORT,
            bytes: &whole,
            whole: Some((&whole).into()),
            ip_id: 0,
            has_icrc: false,
            packets: 3,
            marked: false,
        };
        let packets = has_icrc(&flow, &datagram);
        assert_eq!(packets.len(), 3);
        for (n, packet) in packets.iter().enumerate() {
            assert_eq!(flow.verify(0, packet), IcrcCheck::Valid { ip_id: Some(0) });
            let Parsed { header, payload } = Header::parse(packet).unwrap();
            let psn = (0xff_ffff + u32::try_from(n).unwrap()) & 0xff_ffff;
            assert_eq!((header.psn.get(), payload.len()), (psn, 256));
            assert!(packet[payload].iter().all(|byte| usize::from(*byte) == n));
        }
    }

    #[test]
    fn the_file_stays_below_its_limit_and_traffic_goes_on() {
        let file = TempCapture::new("limit");
        let (stub, log) = StubLink::new();
        let mut link = PcapLink::new(stub, Recorder::create(&file.0, HERE, 2000).unwrap());
        let mut batch = TxBatch::new(link.capabilities());
        (0..100).for_each(|n| assert!(numbered(&mut batch, n, 64)));
        link.send(&mut batch);
        let counters = link.counters();
        drop(link);
        let bytes = file.read();
        let written = Reader::new(&bytes).unwrap().count();
        assert!(bytes.len() <= 2000 && written > 5, "{} bytes, {written} packets", bytes.len());
        assert_eq!(counters, [("pcap_packets", written as u64), ("pcap_missed", 100 - written as u64)]);
        assert_eq!(log.lock().unwrap().len(), 100);
    }

    #[test]
    fn traffic_reaches_the_file_without_waiting_for_the_end() {
        let file = TempCapture::new("flush");
        let (stub, _log) = StubLink::new();
        let mut link = PcapLink::new(stub, Recorder::create(&file.0, HERE, DEFAULT_LIMIT).unwrap());
        let mut batch = TxBatch::new(link.capabilities());
        for sent in 1..=3 {
            assert!(numbered(&mut batch, 1, 64));
            link.send(&mut batch);
            batch.clear();
            assert_eq!(Reader::new(&file.read()).unwrap().count(), sent);
        }
    }

    #[test]
    fn a_file_that_cannot_be_made_is_named() {
        let error = Recorder::create(Path::new("/nonexistent/x-%p.pcap"), HERE, 1).unwrap_err().to_string();
        assert!(error.contains(&format!("/nonexistent/x-{}.pcap", std::process::id())), "{error}");
    }
}
