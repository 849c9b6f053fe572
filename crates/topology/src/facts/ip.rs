//! How IPv4 treats an interface among the others of its machine.

use serde::{Deserialize, Serialize};

/// Settings in effect for an interface: the kernel takes the greater of its own and that of `all`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IpSettings {
    /// 0: ARP requests for any address of the machine are answered; 1 and more: for those of this
    /// interface.
    pub arp_ignore: u32,
    /// 2: ARP requests carry an address of this interface.
    pub arp_announce: u32,
    /// ARP requests are answered only where the route back leaves by this interface.
    pub arp_filter: bool,
    /// 1: packets are dropped unless the route back leaves by this interface; 2: by any; 0: no
    /// test.
    pub rp_filter: u32,
}

impl IpSettings {
    /// Whether the interface answers ARP requests for addresses of other interfaces.
    #[must_use]
    pub const fn answers_for_others(&self) -> bool {
        self.arp_ignore == 0 && !self.arp_filter
    }

    /// Whether packets are dropped whose route back leaves by another interface.
    #[must_use]
    pub const fn is_strict(&self) -> bool {
        self.rp_filter == 1
    }
}
