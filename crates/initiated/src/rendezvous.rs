//! How ranks find each other: every rank gives some bytes, and gets those of all.
//!
//! ```text
//! rank 1, 2, ...                         rank 0, which listens
//! magic, token, rank, ranks, bytes  ->
//!                                   <-   bytes of all ranks
//! ```
//! Rank 0 ignores connections with another token. Numbers are 4 bytes, little-endian; bytes are
//! preceded by their length. The connections stay open for further rounds.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const MAGIC: [u8; 8] = *b"nbranks2";
/// Ranks at most, and bytes of one rank: what a stranger can make rank 0 keep.
pub const MAX_RANKS: u32 = 1024;
const MAX_BYTES: usize = 64 << 10;
const RETRY: Duration = Duration::from_millis(20);

/// What a rank must know to connect to rank 0.
pub type Token = [u8; 16];

/// Why ranks did not find each other.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)]
pub enum RendezvousError {
    #[error("rank {rank} of {ranks}: ranks count from 0, and there are 1 to {MAX_RANKS}")]
    Rank { rank: u32, ranks: u32 },
    #[error("cannot listen at {addr} for the other ranks: {source}; choose a free port of this machine")]
    Listen { addr: SocketAddr, source: io::Error },
    #[error("{missing} of {ranks} ranks did not connect to {addr} within {limit:?}: {}", who(.absent))]
    Missing { missing: usize, ranks: u32, addr: SocketAddr, limit: Duration, absent: Vec<u32> },
    #[error(
        "rank 0 cannot be reached at {addr} within {limit:?}: {source}; is it started, and is the address right?"
    )]
    Connect { addr: SocketAddr, limit: Duration, source: io::Error },
    #[error("rank {rank} connected twice, or started with another number of ranks ({ranks})")]
    Mismatch { rank: u32, ranks: u32 },
    #[error(
        "the connection between rank 0 and rank {rank} failed while ranks were exchanging addresses: {source}"
    )]
    Io { rank: u32, source: io::Error },
}

fn who(absent: &[u32]) -> String {
    let some: Vec<_> = absent.iter().take(8).map(u32::to_string).collect();
    format!("missing are {}{}", some.join(", "), if absent.len() > 8 { " and others" } else { "" })
}

/// All ranks, connected with rank 0.
#[derive(Debug)]
pub struct Rendezvous {
    rank: u32,
    ranks: u32,
    /// Rank 0: those of the other ranks, in order. Others: one, to rank 0.
    streams: Vec<TcpStream>,
    /// A round has failed: ranks may be in different ones.
    is_broken: bool,
}

impl Rendezvous {
    /// Connects with all ranks: rank 0 listens at `addr`, the others connect to it.
    ///
    /// # Errors
    /// Not all ranks came in time, or one of them does not fit.
    pub fn meet(addr: SocketAddr, rank: u32, ranks: u32, limit: Duration) -> Result<Self, RendezvousError> {
        check(rank, ranks)?;
        if rank != 0 {
            return Self::join(addr, Token::default(), rank, ranks, limit);
        }
        let listener = TcpListener::bind(addr);
        let listener = listener.map_err(|source| RendezvousError::Listen { addr, source })?;
        Self::host(&listener, Token::default(), ranks, limit)
    }

    /// As rank 0, waits for all others.
    ///
    /// # Errors
    /// Not all ranks came in time, or one of them does not fit.
    pub fn host(
        listener: &TcpListener,
        token: Token,
        ranks: u32,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        check(0, ranks)?;
        Self::of(accept(listener, token, ranks, limit)?, 0, ranks, limit)
    }

    /// As another rank, connects to rank 0.
    ///
    /// # Errors
    /// Rank 0 cannot be reached in time.
    pub fn join(
        addr: SocketAddr,
        token: Token,
        rank: u32,
        ranks: u32,
        limit: Duration,
    ) -> Result<Self, RendezvousError> {
        check(rank, ranks)?;
        Self::of(vec![connect(addr, token, rank, ranks, limit)?], rank, ranks, limit)
    }

    fn of(streams: Vec<TcpStream>, rank: u32, ranks: u32, limit: Duration) -> Result<Self, RendezvousError> {
        for stream in &streams {
            let timeouts = || {
                stream.set_nonblocking(false)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(limit))?;
                stream.set_write_timeout(Some(limit))
            };
            timeouts().map_err(|source| RendezvousError::Io { rank, source })?;
        }
        Ok(Self { rank, ranks, streams, is_broken: false })
    }

    /// From now on rounds take as long as they take: a rank that is gone ends them.
    ///
    /// # Errors
    /// The system refuses.
    pub fn without_limit(self) -> Result<Self, RendezvousError> {
        for stream in &self.streams {
            let cleared = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
            cleared.map_err(|source| RendezvousError::Io { rank: self.rank, source })?;
        }
        Ok(self)
    }

    /// Gives the bytes of this rank, and returns those of all ranks.
    ///
    /// # Errors
    /// A rank is gone, or was in an earlier round.
    pub fn exchange(&mut self, ours: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        if self.is_broken {
            let source = io::Error::other("an earlier exchange failed");
            return Err(RendezvousError::Io { rank: self.rank, source });
        }
        let all = self.exchange_once(ours);
        self.is_broken = all.is_err();
        all
    }

    fn exchange_once(&mut self, ours: &[u8]) -> Result<Vec<Vec<u8>>, RendezvousError> {
        let failed = |rank| move |source| RendezvousError::Io { rank, source };
        if self.rank != 0 {
            let (rank, stream) = (self.rank, &mut self.streams[0]);
            write_bytes(stream, ours).map_err(failed(rank))?;
            let all = (0..self.ranks).map(|_| read_bytes(stream));
            return all.collect::<Result<_, _>>().map_err(failed(rank));
        }
        let mut all = vec![ours.to_vec()];
        for (stream, rank) in self.streams.iter_mut().zip(1..) {
            all.push(read_bytes(stream).map_err(failed(rank))?);
        }
        for (stream, rank) in self.streams.iter_mut().zip(1..) {
            all.iter().try_for_each(|bytes| write_bytes(stream, bytes)).map_err(failed(rank))?;
        }
        Ok(all)
    }
}

fn check(rank: u32, ranks: u32) -> Result<(), RendezvousError> {
    let exists = rank < ranks && ranks <= MAX_RANKS;
    if exists { Ok(()) } else { Err(RendezvousError::Rank { rank, ranks }) }
}

fn accept(
    listener: &TcpListener,
    token: Token,
    ranks: u32,
    limit: Duration,
) -> Result<Vec<TcpStream>, RendezvousError> {
    let began = Instant::now();
    let addr = listener.local_addr().map_err(|source| RendezvousError::Io { rank: 0, source })?;
    listener.set_nonblocking(true).map_err(|source| RendezvousError::Listen { addr, source })?;
    let mut found: Vec<Option<TcpStream>> = (1..ranks).map(|_| None).collect();
    while found.iter().any(Option::is_none) {
        if began.elapsed() > limit {
            let absent: Vec<_> =
                (1..ranks).zip(&found).filter(|(_, one)| one.is_none()).map(|(rank, _)| rank).collect();
            return Err(RendezvousError::Missing { missing: absent.len(), ranks, addr, limit, absent });
        }
        let Ok((mut stream, _)) = listener.accept() else {
            std::thread::sleep(RETRY / 4);
            continue;
        };
        // A stranger, or a client that says nothing, must not hold up the others.
        let hello = stream
            .set_nonblocking(false)
            .and_then(|()| stream.set_read_timeout(Some(Duration::from_secs(1))))
            .and_then(|()| read_hello(&mut stream));
        let Ok(Some((theirs, rank, count))) = hello else { continue };
        if theirs != token {
            continue;
        }
        match found.get_mut((rank as usize).wrapping_sub(1)) {
            Some(place @ None) if count == ranks => *place = Some(stream),
            _ => return Err(RendezvousError::Mismatch { rank, ranks: count }),
        }
    }
    Ok(found.into_iter().flatten().collect())
}

fn connect(
    addr: SocketAddr,
    token: Token,
    rank: u32,
    ranks: u32,
    limit: Duration,
) -> Result<TcpStream, RendezvousError> {
    let began = Instant::now();
    loop {
        let left = limit.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        let connected = TcpStream::connect_timeout(&addr, left).and_then(|mut stream| {
            stream.write_all(&[&MAGIC[..], &token, &rank.to_le_bytes(), &ranks.to_le_bytes()].concat())?;
            Ok(stream)
        });
        match connected {
            Ok(stream) => return Ok(stream),
            Err(source) if began.elapsed() > limit => {
                return Err(RendezvousError::Connect { addr, limit, source });
            }
            Err(_) => std::thread::sleep(RETRY),
        }
    }
}

/// `None` if it is no rank.
fn read_hello(stream: &mut TcpStream) -> io::Result<Option<(Token, u32, u32)>> {
    let (mut magic, mut token) = ([0; MAGIC.len()], Token::default());
    stream.read_exact(&mut magic)?;
    stream.read_exact(&mut token)?;
    let (rank, ranks) = (read_u32(stream)?, read_u32(stream)?);
    Ok((magic == MAGIC).then_some((token, rank, ranks)))
}

fn read_u32(stream: &mut TcpStream) -> io::Result<u32> {
    let mut bytes = [0; 4];
    stream.read_exact(&mut bytes)?;
    Ok(u32::from_le_bytes(bytes))
}

fn write_bytes(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    let len = u32::try_from(bytes.len()).ok().filter(|_| bytes.len() <= MAX_BYTES);
    let len = len.ok_or_else(|| io::Error::other(format!("{} bytes, at most {MAX_BYTES}", bytes.len())))?;
    stream.write_all(&len.to_le_bytes())?;
    stream.write_all(bytes)
}

fn read_bytes(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let len = read_u32(stream)? as usize;
    if len > MAX_BYTES {
        return Err(io::Error::other(format!("{len} bytes announced, at most {MAX_BYTES}")));
    }
    let mut bytes = vec![0; len];
    stream.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free_addr() -> SocketAddr {
        TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()
    }

    /// The bytes of a rank in a round: they differ in both, also in length.
    fn bytes_of(rank: u32, round: u32) -> Vec<u8> {
        format!("{rank}.{round};").repeat((rank + round) as usize).into_bytes()
    }

    #[test]
    fn every_rank_gets_the_bytes_of_all() {
        let addr = free_addr();
        let run = |rank: u32| {
            std::thread::spawn(move || {
                let mut ranks = Rendezvous::meet(addr, rank, 3, Duration::from_secs(10)).unwrap();
                for round in 1..4 {
                    let all: Vec<_> = (0..3).map(|rank| bytes_of(rank, round)).collect();
                    assert_eq!(ranks.exchange(&bytes_of(rank, round)).unwrap(), all);
                }
            })
        };
        // Rank 0 comes last; a stranger may be there before the others.
        let all = [run(2), run(1), run(0)];
        if let Ok(mut stranger) = TcpStream::connect(addr) {
            let _ = stranger.write_all(b"GET / HTTP/1.1\r\n\r\n");
        }
        all.into_iter().for_each(|rank| rank.join().unwrap());
    }

    #[test]
    fn a_rank_with_another_token_is_ignored() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let limit = Duration::from_millis(300);
        let stranger = std::thread::spawn(move || {
            Rendezvous::join(addr, [1; 16], 1, 2, limit).and_then(|mut rank| rank.exchange(b"1")).is_err()
        });
        let error = Rendezvous::host(&listener, [2; 16], 2, limit).unwrap_err();
        assert!(matches!(error, RendezvousError::Missing { missing: 1, .. }), "{error}");
        assert!(stranger.join().unwrap());
    }

    #[test]
    fn ranks_that_do_not_come_are_named() {
        let error = Rendezvous::meet(free_addr(), 0, 3, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("2 of 3 ranks") && error.contains("missing are 1, 2"), "{error}");
        let error = Rendezvous::meet(free_addr(), 1, 2, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("rank 0 cannot be reached"), "{error}");
        let error = Rendezvous::meet(free_addr(), 2, 2, Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("rank 2 of 2"), "{error}");
    }
}
