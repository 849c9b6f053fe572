//! Priority flow control (PFC) of an interface, by netlink without privilege.

use std::io;

use nobounce_topology::facts::{Facts, Read};

use super::netlink;

/// `RTM_GETDCB`, with its command `DCB_CMD_IEEE_GET`.
const GET_DCB: u16 = 78;
const IEEE_GET: u8 = 21;
/// Attributes: the interface's name, the IEEE settings, and of these the one for flow control.
const IF_NAME: u16 = 1;
const IEEE: u16 = 13;
const IEEE_PFC: u16 = 2;
const HEADER: usize = 16;
/// The header of this family behind the common one.
const DCB_HEADER: usize = 4;

/// Fills in whether flow control is on, for every interface of an adapter.
pub(super) fn fill(facts: &mut Facts) {
    for netdev in facts.nics.iter_mut().flat_map(|nic| &mut nic.ports).filter_map(|port| port.netdev.as_mut())
    {
        netdev.pfc = match ask(&netdev.name) {
            Ok(priorities) => Read::Yes(priorities != 0),
            Err(error) => Read::no(error.to_string()),
        };
    }
}

/// The priorities with flow control, a bit for each.
fn ask(interface: &str) -> io::Result<u8> {
    read(&netlink::exchange(&question(interface)?)?)
}

fn question(interface: &str) -> io::Result<Vec<u8>> {
    let name = interface.as_bytes();
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains(&0) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "invalid interface name"));
    }
    let attribute = u16::try_from(4 + name.len() + 1).map_err(io::Error::other)?;
    let mut message = vec![0_u8; 4];
    message.extend(GET_DCB.to_ne_bytes());
    message.extend(u16::try_from(libc::NLM_F_REQUEST).map_err(io::Error::other)?.to_ne_bytes());
    message.extend([0; 8]);
    message.extend([0, IEEE_GET, 0, 0]);
    message.extend(attribute.to_ne_bytes());
    message.extend(IF_NAME.to_ne_bytes());
    message.extend(name);
    message.push(0);
    message.resize(message.len().next_multiple_of(4), 0);
    let length = u32::try_from(message.len()).map_err(io::Error::other)?;
    message.splice(..4, length.to_ne_bytes());
    Ok(message)
}

/// The priorities in an answer.
fn read(answer: &[u8]) -> io::Result<u8> {
    let broken = || io::Error::new(io::ErrorKind::InvalidData, "malformed netlink answer from the kernel");
    let short = |at: usize| Some(u16::from_ne_bytes(answer.get(at..at + 2)?.try_into().ok()?));
    let kind = short(4).ok_or_else(broken)?;
    if i32::from(kind) == libc::NLMSG_ERROR {
        let code = answer.get(HEADER..HEADER + 4).and_then(|bytes| bytes.try_into().ok());
        let code = i32::from_ne_bytes(code.ok_or_else(broken)?);
        return Err(io::Error::from_raw_os_error(code.saturating_neg()));
    }
    if kind != GET_DCB {
        return Err(broken());
    }
    let settings =
        attribute(answer.get(HEADER + DCB_HEADER..).ok_or_else(broken)?, IEEE).ok_or_else(|| {
            io::Error::new(io::ErrorKind::Unsupported, "the driver does not report IEEE 802.1Qaz settings")
        })?;
    let control = attribute(settings, IEEE_PFC).ok_or_else(|| {
        io::Error::new(io::ErrorKind::Unsupported, "the driver does not report PFC settings")
    })?;
    // What it can do, then what is on.
    control.get(1).copied().ok_or_else(broken)
}

/// The payload of the first attribute of a kind.
fn attribute(mut rest: &[u8], wanted: u16) -> Option<&[u8]> {
    /// The highest bits say how the payload is written.
    const KIND: u16 = 0x3fff;
    loop {
        let length = usize::from(u16::from_ne_bytes(rest.get(..2)?.try_into().ok()?));
        let kind = u16::from_ne_bytes(rest.get(2..4)?.try_into().ok()?) & KIND;
        let payload = rest.get(4..length)?;
        if kind == wanted {
            return Some(payload);
        }
        rest = rest.get(length.next_multiple_of(4)..)?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part(kind: u16, payload: &[u8]) -> Vec<u8> {
        let mut bytes = u16::try_from(4 + payload.len()).unwrap().to_ne_bytes().to_vec();
        bytes.extend(kind.to_ne_bytes());
        bytes.extend(payload);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
        bytes
    }

    fn answer(kind: u16, rest: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
        bytes.extend(rest);
        bytes
    }

    /// As the kernel answers for an adapter with priority 3: the name, then settings in settings.
    fn told(priorities: u8) -> Vec<u8> {
        let inner = [part(1, &[0; 60]), part(IEEE_PFC, &[8, priorities, 0, 0, 0, 0, 0, 0])].concat();
        let rest = [vec![0, IEEE_GET, 0, 0], part(IF_NAME, b"eth0\0"), part(IEEE | 0x8000, &inner)].concat();
        answer(GET_DCB, &rest)
    }

    #[test]
    fn priorities_are_found_among_the_attributes() {
        assert_eq!(read(&told(0b1000)).unwrap(), 0b1000);
        assert_eq!(read(&told(0)).unwrap(), 0);
    }

    #[test]
    fn errors_and_broken_answers_are_errors() {
        let refused = answer(2, &(-libc::EOPNOTSUPP).to_ne_bytes());
        assert_eq!(read(&refused).unwrap_err().raw_os_error(), Some(libc::EOPNOTSUPP));
        let whole = told(1);
        for length in 0..whole.len() - 7 {
            assert!(read(&whole[..length]).is_err(), "{length}");
        }
        // An attribute of length 0 must not be read forever.
        assert!(read(&answer(GET_DCB, &[0; 64])).is_err());
    }

    #[test]
    fn the_kernel_is_asked_and_answers() {
        // The loop device has no flow control: the kernel says so.
        let error = ask("lo").unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::EOPNOTSUPP), "{error}");
        assert!(ask("a name that is far too long").is_err() && ask("").is_err());
    }
}
