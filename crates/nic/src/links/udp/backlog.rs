//! How much waits in the receive buffers of an address of this machine, for those whom no acknowledgement tells.
//!
//! The kernel lists every UDP socket with what lies in its buffer. To read that takes some 80 us, so it is for streams
//! that fill buffers, not for every packet. Addresses of other machines are not in the list.

use std::fmt::Write as _;
use std::fs::File;
use std::net::IpAddr;
use std::os::unix::fs::FileExt;

use nobounce_protocol::wire::ROCE_PORT;

#[derive(Debug, Default)]
pub(super) struct Backlog {
    v4: Option<File>,
    v6: Option<File>,
    text: Vec<u8>,
}

impl Backlog {
    /// Bytes in the fullest RoCE socket of that address; `None` where it has none here.
    pub(super) fn of(&mut self, addr: IpAddr) -> Option<u64> {
        let (file, path) = match addr {
            IpAddr::V4(_) => (&mut self.v4, "/proc/net/udp"),
            IpAddr::V6(_) => (&mut self.v6, "/proc/net/udp6"),
        };
        if file.is_none() {
            *file = File::open(path).ok();
        }
        let file = file.as_ref()?;
        self.text.clear();
        let mut part = [0; 4096];
        loop {
            let len = file.read_at(&mut part, self.text.len() as u64).ok()?;
            if len == 0 {
                break;
            }
            self.text.extend_from_slice(&part[..len]);
        }
        fullest(str::from_utf8(&self.text).ok()?, addr)
    }
}

/// Looks the address up in the kernel's list, whose lines are `number: address:port address:port state tx:rx ...`, all in
/// hex, the words of an address as this machine has them in memory.
fn fullest(list: &str, addr: IpAddr) -> Option<u64> {
    let octets = match addr {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let mut name = String::new();
    for word in octets.chunks_exact(4) {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        write!(name, "{word:08X}").ok()?;
    }
    write!(name, ":{ROCE_PORT:04X}").ok()?;
    list.lines()
        .filter_map(|line| {
            let mut fields = line.split_whitespace().skip(1);
            let queues = if fields.next()? == name { fields.nth(2)? } else { return None };
            u64::from_str_radix(queues.split(':').nth(1)?, 16).ok()
        })
        .max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_list_is_understood() {
        let list = "\
   sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode ref pointer drops
  100: 0100007F:12B7 00000000:0000 07 00000000:00000A00 00:00000000 00000000     0        0 1 2 0000000000000000 0
  100: 0100007F:12B7 00000000:0000 07 00000000:00000B00 00:00000000 00000000     0        0 1 2 0000000000000000 0
  101: 0100007F:12B8 00000000:0000 07 00000000:00FF0000 00:00000000 00000000     0        0 1 2 0000000000000000 0
  102: 0200007F:12B7 00000000:0000 07 00000000:00FF0000 00:00000000 00000000     0        0 1 2 0000000000000000 0";
        if cfg!(target_endian = "little") {
            assert_eq!(fullest(list, [127, 0, 0, 1].into()), Some(0xb00));
        }
        assert_eq!(fullest(list, [127, 0, 0, 3].into()), None);
        assert_eq!(fullest("", "::1".parse().unwrap()), None);
    }

    #[test]
    fn what_waits_in_a_socket_is_seen() {
        for addr in ["127.64.9.9", "::1"] {
            let addr: IpAddr = addr.parse().unwrap();
            // Others may use the port of the only IPv6 loopback address.
            let Ok(socket) = std::net::UdpSocket::bind((addr, ROCE_PORT)) else { continue };
            let mut backlog = Backlog::default();
            assert_eq!(backlog.of(addr), Some(0));
            socket.send_to(&[0; 1000], (addr, ROCE_PORT)).unwrap();
            assert!(backlog.of(addr).is_some_and(|bytes| bytes >= 1000));
        }
        assert_eq!(Backlog::default().of([192, 0, 2, 1].into()), None);
    }
}
