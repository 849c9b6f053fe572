//! What the path reads and changes in IP packets.

/// ECN code points: not capable, and congestion experienced.
const NOT_CAPABLE: u8 = 0;
const CONGESTION: u8 = 3;
/// Bytes of the offending packet that an ICMP message of IPv4 and of IPv6 quotes at most.
const QUOTED_V4: usize = 528;
const QUOTED_V6: usize = 1280 - 48;

fn version(packet: &[u8]) -> u8 {
    packet.first().map_or(0, |byte| byte >> 4)
}

/// Marks a packet as having met congestion (ECN CE), if its sender is capable of ECN. Returns
/// whether it did.
pub(crate) fn mark_congestion(packet: &mut [u8]) -> bool {
    match (version(packet), packet.first_chunk_mut::<20>()) {
        (4, Some(header)) if header[1] & 3 != NOT_CAPABLE => {
            header[1] |= CONGESTION;
            header[10..12].fill(0);
            let sum = checksum(&[header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            true
        }
        (6, Some(header)) if header[1] >> 4 & 3 != NOT_CAPABLE => {
            header[1] |= CONGESTION << 4;
            true
        }
        _ => false,
    }
}

/// The ICMP message to the sender of a packet that is longer than `mtu` and must not be fragmented.
/// Its source is the packet's destination, which needs no route of its own.
pub(crate) fn too_long(packet: &[u8], mtu: u32) -> Option<Vec<u8>> {
    match version(packet) {
        4 => {
            let header = packet.first_chunk::<20>()?;
            let quoted = packet.get(..packet.len().min(QUOTED_V4))?;
            let mut icmp = vec![3, 4, 0, 0, 0, 0];
            icmp.extend(u16::try_from(mtu).ok()?.to_be_bytes());
            icmp.extend(quoted);
            let sum = checksum(&[&icmp]);
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            let mut reply = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 1, 0, 0];
            reply.extend(&header[16..20]);
            reply.extend(&header[12..16]);
            reply[2..4].copy_from_slice(&u16::try_from(20 + icmp.len()).ok()?.to_be_bytes());
            let sum = checksum(&[&reply]);
            reply[10..12].copy_from_slice(&sum.to_be_bytes());
            reply.extend(icmp);
            Some(reply)
        }
        6 => {
            let header = packet.first_chunk::<40>()?;
            let quoted = packet.get(..packet.len().min(QUOTED_V6))?;
            let mut icmp = vec![2, 0, 0, 0];
            icmp.extend(mtu.to_be_bytes());
            icmp.extend(quoted);
            let (source, destination) = (&header[24..40], &header[8..24]);
            let length = u32::try_from(icmp.len()).ok()?.to_be_bytes();
            let sum = checksum(&[source, destination, &length, &[0, 0, 0, 58], &icmp]);
            icmp[2..4].copy_from_slice(&sum.to_be_bytes());
            let mut reply = vec![0x60, 0, 0, 0];
            reply.extend(u16::try_from(icmp.len()).ok()?.to_be_bytes());
            reply.extend([58, 64]);
            reply.extend(source);
            reply.extend(destination);
            reply.extend(icmp);
            Some(reply)
        }
        _ => None,
    }
}

/// The internet checksum of parts with an even length each, but for the last.
fn checksum(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u64;
    for pair in parts.iter().flat_map(|part| part.chunks(2)) {
        sum += u64::from(u16::from_be_bytes([pair[0], pair.get(1).copied().unwrap_or(0)]));
    }
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !u16::try_from(sum).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn v4(class: u8) -> Vec<u8> {
        let mut packet = vec![0x45, class, 0, 28, 0, 0, 0x40, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        let sum = checksum(&[&packet]);
        packet[10..12].copy_from_slice(&sum.to_be_bytes());
        packet.extend([7; 8]);
        packet
    }

    fn v6(class: u8) -> Vec<u8> {
        let mut packet = vec![0x60 | class >> 4, class << 4, 0, 0, 0, 8, 17, 64];
        packet.extend([1; 16]);
        packet.extend([2; 16]);
        packet.extend([7; 8]);
        packet
    }

    #[test]
    fn capable_packets_are_marked_and_stay_valid() {
        for (class, marked) in [(0, None), (1, Some(3)), (2, Some(3)), (3, Some(3)), (0xba, Some(0xbb))] {
            let mut packet = v4(class);
            assert_eq!(mark_congestion(&mut packet), marked.is_some(), "{class}");
            assert_eq!(packet[1], marked.unwrap_or(class));
            assert_eq!(checksum(&[&packet[..20]]), 0);
            let mut packet = v6(class);
            assert_eq!(mark_congestion(&mut packet), marked.is_some(), "{class}");
            assert_eq!(packet[0] << 4 | packet[1] >> 4, marked.unwrap_or(class));
        }
        assert!(!mark_congestion(&mut []) && !mark_congestion(&mut [0x45, 1]));
    }

    #[test]
    fn the_icmp_message_names_the_mtu_and_quotes_the_packet() {
        let mut packet = v4(0);
        packet.resize(3000, 9);
        let reply = too_long(&packet, 1400).unwrap();
        assert_eq!((&reply[12..16], &reply[16..20]), (&packet[16..20], &packet[12..16]));
        assert_eq!((checksum(&[&reply[..20]]), checksum(&[&reply[20..]])), (0, 0));
        assert_eq!((reply[20], reply[21], &reply[26..28]), (3, 4, &1400_u16.to_be_bytes()[..]));
        assert_eq!(usize::from(u16::from_be_bytes([reply[2], reply[3]])), reply.len());
        assert_eq!(reply[28..], packet[..QUOTED_V4]);

        let mut packet = v6(0);
        packet.resize(3000, 9);
        let reply = too_long(&packet, 1400).unwrap();
        assert_eq!((reply.len(), reply[40], reply[41]), (1280, 2, 0));
        assert_eq!((&reply[8..24], &reply[24..40]), (&packet[24..40], &packet[8..24]));
        assert_eq!(reply[44..48], 1400_u32.to_be_bytes());
        let length = u32::try_from(reply.len() - 40).unwrap().to_be_bytes();
        assert_eq!(checksum(&[&reply[8..40], &length, &[0, 0, 0, 58], &reply[40..]]), 0);
        assert_eq!(too_long(&[], 1400), None);
        assert_eq!(too_long(&[0x45; 10], 1400), None);
    }
}
