//! What links can carry: PCIe and network, in GB/s of payload.

use crate::facts::{Link, Port};

/// GB/s of payload over a PCIe link with packets of `payload` bytes.
///
/// Overhead of each packet: framing, sequence number, header, checksum; and one flow-control packet
/// pair for every four.
#[must_use]
pub fn pcie(speed: f64, width: u32, payload: u32) -> f64 {
    let lanes = f64::from(width);
    let payload = f64::from(payload.clamp(64, 4096));
    if speed >= 64.0 {
        // Flits of 256 bytes carry 236 of packets.
        return speed * lanes / 8.0 * (236.0 / 256.0) * payload / (payload + 16.0);
    }
    let (encoding, overhead) = if speed < 8.0 { (0.8, 24.0) } else { (128.0 / 130.0, 26.0) };
    speed * lanes / 8.0 * encoding * (4.0 * payload) / (4.0 * (payload + overhead) + 16.0)
}

/// GB/s of payload that a link carries now.
#[must_use]
pub fn link_now(link: &Link, payload: u32) -> f64 {
    pcie(link.speed, link.width, payload)
}

/// GB/s of payload on the network, by rate, packet size and kind.
#[must_use]
pub fn port(port: &Port) -> Option<f64> {
    let rate = *port.rate_gbps.known()?;
    let mtu = f64::from(port.active_mtu.get().unwrap_or(4096));
    // Overhead of each packet: RoCEv2 over IPv4; InfiniBand without a GRH.
    let fixed = if port.is_ethernet() { 82.0 } else { 28.0 };
    Some(rate / 8.0 * mtu / (mtu + fixed))
}

/// The generation of PCIe, by its speed.
#[must_use]
pub fn generation(speed: f64) -> &'static str {
    match speed {
        s if s < 4.0 => "Gen1",
        s if s < 6.0 => "Gen2",
        s if s < 12.0 => "Gen3",
        s if s < 24.0 => "Gen4",
        s if s < 48.0 => "Gen5",
        s if s < 96.0 => "Gen6",
        _ => "Gen7",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::Read;

    #[test]
    fn figures_of_the_table() {
        let near =
            |value: f64, wanted: f64| assert!((value - wanted).abs() < 0.02, "{value} instead of {wanted}");
        near(pcie(16.0, 16, 256), 28.20);
        near(pcie(32.0, 16, 256), 56.41);
        near(pcie(8.0, 16, 128), 12.76);
        near(pcie(2.5, 16, 256), 3.61);
        let roce = Port {
            link_layer: "Ethernet".to_owned(),
            rate_gbps: Read::Yes(400.0),
            active_mtu: Read::Yes(4096),
            ..Port::default()
        };
        near(port(&roce).unwrap(), 49.02);
        near(port(&Port { link_layer: "InfiniBand".to_owned(), ..roce }).unwrap(), 49.66);
    }
}
