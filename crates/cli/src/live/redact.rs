//! Devices without what names a machine, a user or a program.

use std::collections::HashMap;

use nobounce_topology::facts::hide_addresses;

use super::LiveDevice;

/// Renames devices, the same one always to the same name.
#[derive(Debug, Default)]
pub(crate) struct Redactor {
    numbers: HashMap<String, u32>,
    next: u32,
}

impl Redactor {
    /// The devices without process IDs, names of programs and addresses.
    pub(crate) fn redact(&mut self, devices: Vec<LiveDevice>) -> Vec<LiveDevice> {
        self.numbers.retain(|id, _| devices.iter().any(|device| device.id == *id));
        devices.into_iter().map(|device| self.redacted(device)).collect()
    }

    fn redacted(&mut self, device: LiveDevice) -> LiveDevice {
        let number = *self.numbers.entry(device.id).or_insert_with(|| {
            self.next += 1;
            self.next
        });
        let hidden = |reasons: Vec<String>| reasons.iter().map(|reason| hide_addresses(reason)).collect();
        LiveDevice {
            id: number.to_string(),
            pid: 0,
            program: format!("program {number}"),
            address: String::new(),
            peers: (1..=device.peers.len()).map(|peer| format!("peer {peer}")).collect(),
            staged_reason: hidden(device.staged_reason),
            udp_reason: hidden(device.udp_reason),
            ..device
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_and_numbers_stay_the_same() {
        let device = |id: &str| LiveDevice {
            id: id.to_owned(),
            pid: 12041,
            program: "secret_model".to_owned(),
            address: "10.1.2.3".to_owned(),
            peers: vec!["10.1.2.4".to_owned()],
            udp_reason: vec!["10.1.2.4: no memory in /users/someone/x (10.1.2.5)".to_owned()],
            packets_sent: 5,
            ..LiveDevice::default()
        };
        let mut redactor = Redactor::default();
        let first = redactor.redact(vec![device("12041-0"), device("12041-1")]);
        let told = serde_json::to_string(&first).unwrap();
        for secret in ["12041", "secret_model", "10.1.2", "someone"] {
            assert!(!told.contains(secret), "{secret}: {told}");
        }
        let second = redactor.redact(vec![device("12041-1"), device("12042-0")]);
        let ids = |devices: &[LiveDevice]| devices.iter().map(|device| device.id.clone()).collect::<Vec<_>>();
        assert_eq!((ids(&first), ids(&second)), (vec!["1".into(), "2".into()], vec!["2".into(), "3".into()]));
        assert_eq!(second[0].packets_sent, 5);
    }
}
