//! The links of a leaf-spine fabric, and the way of a packet along them.

use crate::config::Fabric;
use crate::units::index;

/// A directed link. Numbers are consecutive within each kind: up from hosts, down to hosts, up from
/// leaves, down from spines.
pub(crate) type LinkId = u32;

/// What a link leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LinkEnd {
    Host(u32),
    Leaf(u32),
    Spine(u32),
}

/// Counts, and the numbering that follows from them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Topology {
    hosts: u32,
    per_leaf: u32,
    leaves: u32,
    spines: u32,
}

impl Topology {
    pub(crate) fn new(fabric: &Fabric) -> Self {
        Self {
            hosts: index(fabric.hosts),
            per_leaf: index(fabric.hosts_per_leaf),
            leaves: index(fabric.leaves()),
            spines: index(fabric.spines),
        }
    }

    pub(crate) const fn links(&self) -> u32 {
        2 * self.hosts + 2 * self.leaves * self.spines
    }

    /// Switches: leaves first, then spines.
    pub(crate) const fn switches(&self) -> u32 {
        self.leaves + self.spines
    }

    pub(crate) const fn spines(&self) -> u32 {
        self.spines
    }

    pub(crate) const fn leaf_of(&self, host: u32) -> u32 {
        host / self.per_leaf
    }

    pub(crate) const fn host_up(&self, host: u32) -> LinkId {
        host
    }

    pub(crate) const fn host_down(&self, host: u32) -> LinkId {
        self.hosts + host
    }

    pub(crate) const fn leaf_up(&self, leaf: u32, spine: u32) -> LinkId {
        2 * self.hosts + leaf * self.spines + spine
    }

    pub(crate) const fn spine_down(&self, spine: u32, leaf: u32) -> LinkId {
        2 * self.hosts + self.leaves * self.spines + spine * self.leaves + leaf
    }

    /// Whether a link belongs to a host: its rate is that of hosts.
    pub(crate) const fn is_host_link(&self, link: LinkId) -> bool {
        link < 2 * self.hosts
    }

    /// Where a link ends.
    pub(crate) const fn end(&self, link: LinkId) -> LinkEnd {
        let up = 2 * self.hosts;
        let down = up + self.leaves * self.spines;
        if link < self.hosts {
            LinkEnd::Leaf(self.leaf_of(link))
        } else if link < up {
            LinkEnd::Host(link - self.hosts)
        } else if link < down {
            LinkEnd::Spine((link - up) % self.spines)
        } else {
            LinkEnd::Leaf((link - down) % self.leaves)
        }
    }

    /// The switch whose buffer a link's queue occupies; none for the links of hosts.
    pub(crate) const fn switch_of(&self, link: LinkId) -> Option<u32> {
        let up = 2 * self.hosts;
        let down = up + self.leaves * self.spines;
        if link < self.hosts {
            None
        } else if link < up {
            Some(self.leaf_of(link - self.hosts))
        } else if link < down {
            Some((link - up) / self.spines)
        } else {
            Some(self.leaves + (link - down) / self.leaves)
        }
    }

    /// What a link is called in reports.
    pub(crate) fn name(&self, link: LinkId) -> String {
        let up = 2 * self.hosts;
        let down = up + self.leaves * self.spines;
        match self.end(link) {
            LinkEnd::Host(host) => format!("leaf {} to host {host}", self.leaf_of(host)),
            LinkEnd::Spine(spine) => format!("leaf {} to spine {spine}", (link - up) / self.spines),
            LinkEnd::Leaf(leaf) if link < self.hosts => format!("host {link} to leaf {leaf}"),
            LinkEnd::Leaf(leaf) => format!("spine {} to leaf {leaf}", (link - down) / self.leaves),
        }
    }
}

/// ECMP: the choice of a switch among `paths` for a flow. Every switch has a hash of its own.
pub(crate) const fn ecmp(seed: u64, flow: (u32, u32, u16), paths: u32) -> u32 {
    let (source, destination, port) = flow;
    let mut hash = seed ^ ((source as u64) << 40) ^ ((destination as u64) << 16) ^ port as u64;
    // The finalizer of SplitMix64.
    hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    // The high half times `paths`: no bias that matters, no division.
    (((hash >> 32) * paths as u64) >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_link_has_an_end_an_owner_and_a_name_of_its_own() {
        let topology = Topology::new(&Fabric::leaf_spine(12, 4, 100.0));
        assert_eq!(topology.links(), 2 * 12 + 2 * 3 * 4);
        let names: std::collections::BTreeSet<_> = (0..topology.links()).map(|l| topology.name(l)).collect();
        assert_eq!(names.len(), topology.links() as usize);
        assert_eq!(topology.end(topology.host_up(5)), LinkEnd::Leaf(1));
        assert_eq!(topology.end(topology.host_down(5)), LinkEnd::Host(5));
        assert_eq!(topology.end(topology.leaf_up(2, 3)), LinkEnd::Spine(3));
        assert_eq!(topology.end(topology.spine_down(3, 1)), LinkEnd::Leaf(1));
        assert_eq!(topology.switch_of(topology.host_up(5)), None);
        assert_eq!(topology.switch_of(topology.host_down(5)), Some(1));
        assert_eq!(topology.switch_of(topology.leaf_up(2, 3)), Some(2));
        assert_eq!(topology.switch_of(topology.spine_down(3, 1)), Some(3 + 3));
    }

    /// n flows on m paths: the expected number of unused paths is m (1 - 1/m)^n, and all flows have
    /// a path of their own with probability m! / ((m - n)! m^n).
    #[test]
    fn ecmp_collides_as_often_as_theory_says() {
        let (mut unused, mut apart, trials) = (0, 0, 20_000);
        for trial in 0..trials {
            let mut load = [0_u32; 32];
            let mut few = [0_u32; 32];
            for flow in 0..32 {
                let path = ecmp(trial, (flow, 1000 - flow, 0xc000 + 3), 32) as usize;
                load[path] += 1;
                few[path] += u32::from(flow < 6);
            }
            unused += load.iter().filter(|flows| **flows == 0).count();
            apart += u32::from(few.iter().all(|flows| *flows < 2));
        }
        let unused = unused as f64 / trials as f64;
        let expected = 32.0 * (31.0_f64 / 32.0).powi(32);
        assert!((unused / expected - 1.0).abs() < 0.01, "{unused} unused, theory {expected}");
        let apart = f64::from(apart) / trials as f64;
        let expected = (0..6).map(|taken| f64::from(32 - taken) / 32.0).product::<f64>();
        assert!((apart / expected - 1.0).abs() < 0.02, "{apart} apart, theory {expected}");
    }
}
