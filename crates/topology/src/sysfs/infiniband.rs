//! RDMA adapters from `/sys/class/infiniband`.

use std::collections::BTreeMap;

use super::pci::is_address;
use super::{Root, ip};
use crate::facts::{Gid, Netdev, Nic, Port, Read};

const CLASS: &str = "/sys/class/infiniband";
const MAX_NICS: usize = 256;
const MAX_PORTS: usize = 16;
/// GID table entries that are read. mlx5 has 255.
const MAX_GIDS: u32 = 512;
/// Counters of packet loss in the network, or of link errors.
const COUNTERS: [&str; 9] = [
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "rx_icrc_encapsulated",
    "np_cnp_sent",
    "rp_cnp_handled",
    "link_downed",
    "symbol_error",
];

/// The adapters, in the order of their names.
pub(super) fn nics(root: &Root) -> Vec<Nic> {
    let mut names = root.names(CLASS).unwrap_or_default();
    // mlx5_2 before mlx5_10.
    names.sort_by_key(|name| {
        (name.trim_end_matches(|c: char| c.is_ascii_digit()).to_owned(), name.len(), name.clone())
    });
    names.into_iter().take(MAX_NICS).map(|name| nic(root, name)).collect()
}

fn nic(root: &Root, name: String) -> Nic {
    let folder = format!("{CLASS}/{name}");
    let parts = root.real_parts(&format!("{folder}/device")).unwrap_or_default();
    let address = parts.iter().rfind(|part| is_address(part)).cloned();
    let driver = root.link_name(&format!("{folder}/device/driver")).ok();
    let verbs = format!("{folder}/device/infiniband_verbs");
    let uverbs = match root.names(&verbs) {
        Ok(names) => Read::Yes(names.into_iter().next()),
        // A software device has no `device`: its file is found by name.
        Err(_) => Read::Yes(uverbs_of(root, &name)),
    };
    let mut ports: Vec<Port> = root
        .names(&format!("{folder}/ports"))
        .unwrap_or_default()
        .into_iter()
        .filter_map(|number| number.parse().ok())
        .take(MAX_PORTS)
        .map(|number| port(root, &folder, number))
        .collect();
    ports.sort_by_key(|port| port.number);
    let driver = driver.or_else(|| name.starts_with("rxe").then(|| "rdma_rxe".to_owned()));
    Nic {
        address,
        driver,
        firmware: root.text(&format!("{folder}/fw_ver")).into(),
        uverbs,
        ports,
        name,
        ..Nic::default()
    }
}

fn uverbs_of(root: &Root, name: &str) -> Option<String> {
    let class = "/sys/class/infiniband_verbs";
    root.names(class)
        .ok()?
        .into_iter()
        .find(|uverbs| root.text(&format!("{class}/{uverbs}/ibdev")).is_ok_and(|device| device == name))
}

/// The device file that takes management datagrams of a port: `/dev/infiniband/umad0`.
#[must_use]
pub fn umad(root: &Root, nic: &str, port: u32) -> Option<String> {
    let class = "/sys/class/infiniband_mad";
    let is_its = |name: &String| {
        let file = |attribute: &str| root.text(&format!("{class}/{name}/{attribute}"));
        // Beside each `umad` there is an `issm` with the same attributes.
        name.starts_with("umad")
            && file("ibdev").is_ok_and(|device| device == nic)
            && file("port").is_ok_and(|number| number == port.to_string())
    };
    root.names(class).ok()?.into_iter().find(is_its).map(|name| format!("/dev/infiniband/{name}"))
}

fn port(root: &Root, folder: &str, number: u32) -> Port {
    let file = |name: &str| format!("{folder}/ports/{number}/{name}");
    // `4: ACTIVE`, `5: LinkUp`.
    let word = |name: &str| {
        root.text(&file(name))
            .map(|text| text.rsplit(':').next().unwrap_or_default().trim().to_owned())
            .unwrap_or_default()
    };
    let rate = root.text(&file("rate"));
    let lanes = rate.as_ref().ok().and_then(|text| lanes(text));
    let (gids, unreadable_gids) = gids(root, folder, number);
    let name = gids.known().into_iter().flatten().find_map(|gid| gid.netdev.clone()).or_else(|| {
        let names = root.names(&format!("{folder}/device/net")).unwrap_or_default();
        let index = usize::try_from(number.saturating_sub(1)).ok()?;
        names.get(index).or(names.first()).cloned()
    });
    let counters = counters(root, &file(""));
    let mut netdev = name.map(|name| netdev(root, name));
    // If no file says so, CNPs that were sent or handled do.
    let notified = ["np_cnp_sent", "rp_cnp_handled"].iter().any(|name| counters.contains_key(*name));
    if let Some(netdev) = netdev.as_mut().filter(|netdev| notified && netdev.ecn.known().is_none()) {
        netdev.ecn = Read::Yes(true);
    }
    let link_layer = word("link_layer");
    let active_mtu = match netdev.as_ref().and_then(|netdev| netdev.mtu.get()) {
        Some(mtu) if link_layer.eq_ignore_ascii_case("ethernet") => {
            rdma_mtu(mtu).map_or_else(|| Read::no("the interface's MTU is too small"), Read::Yes)
        }
        _ => Read::no("only libibverbs tells"),
    };
    // Ethernet has neither.
    let address = |name: &str| match link_layer.eq_ignore_ascii_case("infiniband") {
        true => root.number::<u32>(&file(name)).map_or_else(|_| Read::default(), Read::Yes),
        false => Read::default(),
    };
    let (lid, sm_lid) = (address("lid"), address("sm_lid"));
    Port {
        number,
        lid,
        sm_lid,
        state: word("state"),
        physical_state: word("phys_state"),
        link_layer,
        rate_gbps: match rate {
            Ok(text) => gbps(&text).map_or_else(|| Read::no(format!("{text:?} is no rate")), Read::Yes),
            Err(error) => Read::no(error.to_string()),
        },
        lanes,
        own_end: Read::default(),
        peer_end: Read::default(),
        active_mtu,
        netdev,
        gids,
        unreadable_gids,
        counters,
    }
}

/// `200 Gb/sec (4X HDR)`.
fn gbps(text: &str) -> Option<f64> {
    let value: f64 = text.split_whitespace().next()?.parse().ok()?;
    (value.is_finite() && (0.0..100_000.0).contains(&value)).then_some(value)
}

fn lanes(text: &str) -> Option<u32> {
    text.split_once('(')?.1.split_once('X')?.0.trim().parse().ok()
}

/// RDMA packets are 256 to 4096 bytes, and RoCE's headers need room in the frame.
fn rdma_mtu(ethernet: u32) -> Option<u32> {
    [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| mtu + 58 <= ethernet)
}

/// Entries in use, and those whose type cannot be read.
fn gids(root: &Root, folder: &str, number: u32) -> (Read<Vec<Gid>>, Vec<u32>) {
    let table = format!("{folder}/ports/{number}/gids");
    let mut indexes: Vec<u32> = match root.names(&table) {
        Ok(names) => {
            names.iter().filter_map(|name| name.parse().ok()).filter(|index| *index < MAX_GIDS).collect()
        }
        Err(error) => return (Read::no(error.to_string()), Vec::new()),
    };
    indexes.sort_unstable();
    let (mut found, mut unreadable) = (Vec::new(), Vec::new());
    for index in indexes {
        let Ok(value) = root.text(&format!("{table}/{index}")) else { continue };
        if value.bytes().all(|byte| matches!(byte, b'0' | b':')) {
            continue;
        }
        let attribute = |name: &str| root.text(&format!("{folder}/ports/{number}/gid_attrs/{name}/{index}"));
        match attribute("types") {
            Ok(kind) => found.push(Gid { index, value, kind, netdev: attribute("ndevs").ok() }),
            Err(_) => unreadable.push(index),
        }
    }
    (Read::Yes(found), unreadable)
}

fn netdev(root: &Root, name: String) -> Netdev {
    let folder = format!("/sys/class/net/{name}");
    let any = |kind: &str| {
        let names = root.names(&format!("{folder}/ecn/{kind}/enable")).ok()?;
        Some(names.iter().any(|name| {
            root.text(&format!("{folder}/ecn/{kind}/enable/{name}")).is_ok_and(|text| text == "1")
        }))
    };
    let routes = root.text("/proc/net/route");
    Netdev {
        mtu: root.number(&format!("{folder}/mtu")).into(),
        up: root.text(&format!("{folder}/operstate")).map(|state| state == "up").into(),
        pfc: Read::default(),
        ecn: any("roce_np").map_or_else(Read::default, Read::Yes),
        // A table that is not there says as much as one that was not looked at.
        subnets: routes
            .as_deref()
            .map_or_else(|_| Read::default(), |table| Read::Yes(ip::subnets(table, &name))),
        ip: ip::settings(root, &name),
        sends_by: Read::default(),
        gateway: routes.as_deref().map_or_else(|_| Read::default(), |table| ip::gateway(table, &name)),
        name,
    }
}

fn counters(root: &Root, port: &str) -> BTreeMap<String, u64> {
    let read = |name: &str| {
        let at = |folder: &str| root.number::<u64>(&format!("{port}{folder}/{name}")).ok();
        at("hw_counters").or_else(|| at("counters"))
    };
    COUNTERS
        .iter()
        .filter_map(|name| Some((*name, read(name)?)))
        .filter(|(_, value)| *value > 0)
        .map(|(name, value)| (name.to_owned(), value))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn management_datagrams_go_to_the_file_of_the_port() {
        let folder = std::env::temp_dir().join(format!("nobounce-umad-{}", std::process::id()));
        for (name, device, port) in
            [("issm1", "mlx5_1", 1), ("umad0", "mlx5_0", 1), ("umad1", "mlx5_1", 1), ("umad2", "mlx5_1", 2)]
        {
            let class = folder.join("sys/class/infiniband_mad").join(name);
            std::fs::create_dir_all(&class).unwrap();
            std::fs::write(class.join("ibdev"), format!("{device}\n")).unwrap();
            std::fs::write(class.join("port"), format!("{port}\n")).unwrap();
        }
        let root = Root::new(&folder);
        assert_eq!(umad(&root, "mlx5_1", 1).as_deref(), Some("/dev/infiniband/umad1"));
        assert_eq!(umad(&root, "mlx5_1", 2).as_deref(), Some("/dev/infiniband/umad2"));
        assert_eq!((umad(&root, "mlx5_2", 1), umad(&root, "mlx5_0", 2)), (None, None));
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn rates_and_sizes() {
        assert_eq!((gbps("200 Gb/sec (4X HDR)"), lanes("200 Gb/sec (4X HDR)")), (Some(200.0), Some(4)));
        assert_eq!((gbps("2.5 Gb/sec (1X SDR)"), lanes("100 Gb/sec")), (Some(2.5), None));
        assert_eq!(gbps(""), None);
        assert_eq!(
            (rdma_mtu(9000), rdma_mtu(1500), rdma_mtu(4200), rdma_mtu(100)),
            (Some(4096), Some(1024), Some(4096), None)
        );
    }
}
