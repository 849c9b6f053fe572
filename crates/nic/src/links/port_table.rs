//! Which sockets hold UDP port 4791, from the kernel's socket tables.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use nobounce_protocol::wire::ROCE_PORT;

/// A socket on the well-known port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PortHolder {
    /// Its address; the unspecified one stands for all.
    pub(crate) addr: IpAddr,
    pub(crate) uid: u32,
    /// It belongs to the kernel: rdma_rxe.
    pub(crate) is_kernel: bool,
}

impl PortHolder {
    /// The sockets of this network namespace, of all users.
    ///
    /// # Errors
    /// A table cannot be read. A kernel without IPv6 has one table.
    pub(crate) fn all() -> io::Result<Vec<Self>> {
        // Sockets belong to the network namespace of the thread that opens them.
        let mut table = fs::read_to_string("/proc/thread-self/net/udp")?;
        match fs::read_to_string("/proc/thread-self/net/udp6") {
            Ok(more) => table.push_str(&more),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
        Ok(table.lines().filter_map(Self::parse).collect())
    }

    /// Whether a device may listen at the address, as far as the tables tell. Users' sockets for
    /// all addresses are the guards of devices elsewhere.
    pub(crate) fn may_listen(addr: IpAddr) -> bool {
        let listens = |held: &Self| held.addr == addr || held.is_kernel && held.addr.is_unspecified();
        Self::all().map_or(true, |all| all.iter().any(listens))
    }

    /// Whether it keeps another socket from that address.
    pub(super) fn excludes(&self, addr: IpAddr) -> bool {
        self.addr == addr || self.addr.is_unspecified()
    }

    /// Reads one line of a table.
    fn parse(line: &str) -> Option<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let (host, port) = fields.get(1)?.split_once(':')?;
        if u16::from_str_radix(port, 16) != Ok(ROCE_PORT) {
            return None;
        }
        // The kernel prints an address as 32-bit words in the byte order of the machine.
        let word = |at: usize| u32::from_str_radix(host.get(at..at + 8)?, 16).ok().map(u32::to_ne_bytes);
        let addr = match host.len() {
            8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
            32 => {
                let mut octets = [0; 16];
                for (at, four) in octets.chunks_exact_mut(4).enumerate() {
                    four.copy_from_slice(&word(8 * at)?);
                }
                IpAddr::V6(Ipv6Addr::from(octets)).to_canonical()
            }
            _ => return None,
        };
        let is_kernel = fields.get(9)?.parse() == Ok(0_u64);
        Some(Self { addr, uid: fields.get(7)?.parse().ok()?, is_kernel })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(host: &str, port: &str, uid: &str, inode: &str) -> String {
        format!(
            "  12: {host}:{port} 00000000:0000 07 00000000:00000000 00:00000000 00000000 {uid} 0 {inode} 2 0 0"
        )
    }

    fn holder(addr: &str, uid: u32, is_kernel: bool) -> Option<PortHolder> {
        Some(PortHolder { addr: addr.parse().unwrap(), uid, is_kernel })
    }

    #[test]
    fn lines_of_the_tables_are_read() {
        let host = format!("{:08X}", u32::from_ne_bytes([127, 0, 0, 1]));
        let mapped = format!("0000000000000000{:08X}{host}", u32::from_ne_bytes([0, 0, 255, 255]));
        let [any, any6] = ["0", "0000"].map(|zeros| zeros.repeat(8));
        let read = |host: &str, uid, inode| PortHolder::parse(&line(host, "12B7", uid, inode));
        assert_eq!(read(&host, "65534", "77"), holder("127.0.0.1", 65534, false));
        assert_eq!(read(&mapped, "7", "77"), holder("127.0.0.1", 7, false));
        assert_eq!(read(&any, "0", "0"), holder("0.0.0.0", 0, true));
        assert_eq!(read(&any6, "1000", "5"), holder("::", 1000, false));
        assert_eq!(PortHolder::parse(&line(&host, "12B8", "0", "77")), None);
        for junk in
            ["", "sl local", "1: x:12B7", "1: :", "1: 00000000:12B7 a b c d e f g h", "1: é0000000:12B7 a b"]
        {
            assert_eq!(PortHolder::parse(junk), None);
        }
    }
}
