//! Facts in one order, so that the same facts give the same answer however they were listed.

use super::{Facts, Read};

/// `mlx5_2` before `mlx5_10`.
fn natural(name: &str) -> (&str, usize, &str) {
    (name.trim_end_matches(|c: char| c.is_ascii_digit()), name.len(), name)
}

impl Facts {
    /// The same facts with devices by address or name. Lists whose order has a meaning (the
    /// kernel's log, the block devices of a path) stay as they are.
    #[must_use]
    pub fn in_order(mut self) -> Self {
        self.pci.sort_by(|a, b| a.address.cmp(&b.address));
        self.gpus.sort_by(|a, b| a.address.cmp(&b.address));
        if let Read::Yes(pairs) = &mut self.gpu_peers {
            for pair in pairs.iter_mut().filter(|pair| pair.other < pair.one) {
                std::mem::swap(&mut pair.one, &mut pair.other);
            }
            pairs.sort_by(|a, b| (&a.one, &a.other).cmp(&(&b.one, &b.other)));
        }
        self.nics.sort_by(|a, b| natural(&a.name).cmp(&natural(&b.name)));
        for nic in &mut self.nics {
            nic.ports.sort_by_key(|port| port.number);
            for port in &mut nic.ports {
                if let Read::Yes(gids) = &mut port.gids {
                    gids.sort_by_key(|gid| gid.index);
                }
                port.unreadable_gids.sort_unstable();
            }
        }
        self.registrations.sort_by(|a, b| {
            (&a.gpu, natural(&a.nic), &a.way, a.bytes).cmp(&(&b.gpu, natural(&b.nic), &b.way, b.bytes))
        });
        self.transfers.sort_by(|a, b| (&a.gpu, natural(&a.nic)).cmp(&(&b.gpu, natural(&b.nic))));
        self.machine.numa.sort_by_key(|node| node.id);
        if let Read::Yes(nodes) = &mut self.devices {
            nodes.sort_by(|a, b| a.path.cmp(&b.path));
        }
        for names in
            [&mut self.kernel.installed, &mut self.kernel.at_boot, &mut self.kernel.peer_memory_clients]
        {
            if let Read::Yes(names) = names {
                names.sort_unstable();
            }
        }
        if let Read::Yes(wheels) = &mut self.libraries.wheels {
            wheels.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
        }
        if let Read::Yes(Some(ucx)) = &mut self.libraries.ucx {
            ucx.modules.sort_unstable();
        }
        self
    }
}
