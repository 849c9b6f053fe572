//! The kernel's UDP datagram counters: the evidence that `link: "udp"` is true.

use serde::{Deserialize, Serialize};

/// Datagrams of this network namespace since it began, IPv4 and IPv6 together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct UdpCounters {
    /// Sent. A GSO batch counts as the kernel counts it.
    pub(crate) out_datagrams: u64,
    /// Delivered to sockets.
    pub(crate) in_datagrams: u64,
    /// Dropped because a receive buffer was full.
    pub(crate) receive_buffer_errors: u64,
}

/// The counters around the measured cases (the raw measurement is outside).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KernelUdp {
    /// Before the first case.
    pub(crate) before: UdpCounters,
    /// After the last case.
    pub(crate) after: UdpCounters,
}

impl KernelUdp {
    /// Datagrams (sent, received) in between.
    pub(crate) fn moved(&self) -> (u64, u64) {
        (
            self.after.out_datagrams.saturating_sub(self.before.out_datagrams),
            self.after.in_datagrams.saturating_sub(self.before.in_datagrams),
        )
    }
}

impl UdpCounters {
    /// Reads them; `None` where the kernel shows none.
    pub(crate) fn now() -> Option<Self> {
        let v4 = std::fs::read_to_string("/proc/net/snmp").ok()?;
        // A kernel without IPv6 has no second file.
        let v6 = std::fs::read_to_string("/proc/net/snmp6").unwrap_or_default();
        Self::parse(&v4, &v6)
    }

    fn parse(v4: &str, v6: &str) -> Option<Self> {
        let mut lines = v4.lines().filter_map(|line| line.strip_prefix("Udp:"));
        let (names, values) = (lines.next()?, lines.next()?);
        let in_v4 = |wanted: &str| {
            let mut pairs = names.split_whitespace().zip(values.split_whitespace());
            pairs.find(|(name, _)| *name == wanted).and_then(|(_, value)| value.parse::<u64>().ok())
        };
        let in_v6 = |wanted: &str| {
            let value = v6.lines().find_map(|line| {
                let (name, value) = line.split_once(char::is_whitespace)?;
                (name == wanted).then(|| value.trim().parse::<u64>().ok())?
            });
            value.unwrap_or(0)
        };
        Some(Self {
            out_datagrams: in_v4("OutDatagrams")? + in_v6("Udp6OutDatagrams"),
            in_datagrams: in_v4("InDatagrams")? + in_v6("Udp6InDatagrams"),
            receive_buffer_errors: in_v4("RcvbufErrors").unwrap_or(0) + in_v6("Udp6RcvbufErrors"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_families_are_added_up_by_name() {
        let v4 = "Tcp: a b\nTcp: 1 2\nUdp: InDatagrams NoPorts OutDatagrams RcvbufErrors\nUdp: 10 9 20 3\n\
                  UdpLite: InDatagrams\nUdpLite: 77\n";
        let v6 =
            "Udp6InDatagrams                 1\nUdp6OutDatagrams                2\nUdpLite6InDatagrams 5\n";
        let found = UdpCounters::parse(v4, v6).unwrap();
        assert_eq!(found, UdpCounters { out_datagrams: 22, in_datagrams: 11, receive_buffer_errors: 3 });
        assert_eq!(UdpCounters::parse("", ""), None);
        assert_eq!(UdpCounters::parse("Udp: InDatagrams\nUdp: x\n", ""), None);
    }

    #[test]
    fn a_datagram_on_loopback_moves_them() {
        let Some(before) = UdpCounters::now() else { return eprintln!("waived: no /proc/net/snmp") };
        let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.send_to(b"x", socket.local_addr().unwrap()).unwrap();
        let moved = KernelUdp { before, after: UdpCounters::now().unwrap() }.moved();
        assert!(moved.0 >= 1, "{moved:?}");
    }
}
