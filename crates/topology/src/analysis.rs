//! Facts combined: pairs of GPU and adapter, their distance, and the methods to register GPU
//! memory.

use crate::adapters;
use crate::facts::{Facts, Gpu, Nic};
use crate::methods::{self, Answer};
use crate::tree::{Distance, Tree};

/// Input of all checks and of the path for each pair.
#[derive(Debug)]
pub struct Analysis<'a> {
    /// What they are.
    pub facts: &'a Facts,
    /// The PCI tree.
    pub tree: Tree<'a>,
    /// Every GPU with every adapter, GPU by GPU.
    pub pairs: Vec<Pair<'a>>,
}

/// A GPU and an adapter.
#[derive(Debug)]
pub struct Pair<'a> {
    /// The GPU.
    pub gpu: &'a Gpu,
    /// The adapter.
    pub nic: &'a Nic,
    /// How far apart they are, where that is known.
    pub distance: Option<Distance>,
    /// Whether they are known to be on one socket, perhaps on two of its memory nodes.
    pub one_socket: bool,
    /// Ports on the way.
    pub bridges: Vec<&'a str>,
    /// Whether the GPU's driver exports dma-bufs.
    pub export: Answer,
    /// Whether the adapter's driver imports them.
    pub import: Answer,
    /// Whether the adapter registers what the GPU's driver exports: the last step of dma-buf.
    pub register: Answer,
    /// Whether nvidia-peermem serves.
    pub peermem: Answer,
    /// The process certainly cannot open the adapter.
    pub closed: bool,
    /// The method by which memory of this pair was actually registered.
    pub proven: Option<&'a str>,
}

impl<'a> Analysis<'a> {
    /// Puts the facts together.
    pub fn of(facts: &'a Facts) -> Self {
        let tree = Tree::new(facts);
        let exports: Vec<_> = facts
            .gpus
            .iter()
            .map(|gpu| (methods::export(facts, gpu), methods::peermem(facts, gpu)))
            .collect();
        let imports: Vec<_> = facts.nics.iter().map(|nic| methods::import(facts, nic)).collect();
        let mut pairs = Vec::new();
        for (gpu, (export, peermem)) in facts.gpus.iter().zip(&exports) {
            for (nic, import) in facts.nics.iter().zip(&imports) {
                pairs.push(Pair::of(facts, &tree, gpu, nic, export, import, peermem));
            }
        }
        Self { facts, tree, pairs }
    }

    /// Pairs of one GPU, nearest adapter first; among equals the faster port, then the order of the
    /// facts.
    pub fn pairs_of(&self, gpu: &str) -> Vec<&Pair<'a>> {
        let mut pairs: Vec<_> = self.pairs.iter().filter(|pair| pair.gpu.address == gpu).collect();
        pairs.sort_by(|a, b| a.rank().partial_cmp(&b.rank()).unwrap_or(std::cmp::Ordering::Equal));
        pairs
    }

    /// The best adapter of each GPU. Adapters of equal rank are assigned round-robin, so that two
    /// GPUs do not share one while another is idle.
    pub fn best(&self) -> Vec<Option<&Pair<'a>>> {
        let mut taken: Vec<(&str, u32)> = Vec::new();
        let mut best = Vec::new();
        for gpu in &self.facts.gpus {
            let pairs = self.pairs_of(&gpu.address);
            let uses =
                |name: &str| taken.iter().find(|(taken, _)| *taken == name).map_or(0, |(_, count)| *count);
            // Sorted by rank: candidates as near and as fast as the first are equivalent.
            let chosen = pairs
                .iter()
                .filter(|pair| {
                    pairs.first().is_some_and(|first| {
                        first.rank().0 == pair.rank().0
                            && first.rank().1 == pair.rank().1
                            && first.rank().2 >= pair.rank().2
                    })
                })
                .min_by_key(|pair| uses(&pair.nic.name))
                .copied();
            if let Some(pair) = chosen {
                match taken.iter_mut().find(|(name, _)| *name == pair.nic.name) {
                    Some((_, count)) => *count += 1,
                    None => taken.push((&pair.nic.name, 1)),
                }
            }
            best.push(chosen);
        }
        best
    }

    /// Whether every hardware pair satisfies `way`, so that none needs the method in question.
    pub fn all_have(&self, way: impl Fn(&Pair<'a>) -> bool) -> bool {
        !self.pairs.is_empty() && self.pairs.iter().filter(|pair| !pair.nic.is_software()).all(way)
    }

    /// Whether there is any hardware adapter.
    pub fn has_hardware_nic(&self) -> bool {
        self.facts.nics.iter().any(|nic| !nic.is_software())
    }
}

impl<'a> Pair<'a> {
    fn of(
        facts: &'a Facts,
        tree: &Tree<'a>,
        gpu: &'a Gpu,
        nic: &'a Nic,
        export: &Answer,
        import: &Answer,
        peermem: &Answer,
    ) -> Self {
        let way = nic
            .address
            .as_deref()
            .map(|address| (tree.distance(&gpu.address, address), tree.between(&gpu.address, address)));
        // The common upstream bridge is not crossed: its own link leads to the CPU.
        let (distance, bridges) = way.map_or((None, Vec::new()), |(distance, between)| {
            (distance, between.ports.iter().map(|port| port.address.as_str()).collect())
        });
        let one_socket = nic.address.as_deref().is_some_and(|nic| tree.share_a_socket(&gpu.address, nic));
        let of_pair = |way: &str| {
            facts.registrations.iter().find(|r| r.way == way && r.gpu == gpu.address && r.nic == nic.name)
        };
        let proven = ["dma-buf", "peermem"].into_iter().find(|way| of_pair(way).is_some_and(|r| r.probe.ok));
        // The method works for other pairs: this combination is at fault.
        let elsewhere = |way: &str| {
            facts.registrations.iter().any(|r| r.way == way && r.probe.ok && r.gpu == gpu.address)
        };
        let register = match of_pair("dma-buf") {
            Some(r) if r.probe.ok => Answer::Yes("registered by probe".to_owned()),
            Some(r) if methods::is_refused(facts, r) => methods::refusal(facts, r, elsewhere("dma-buf")),
            _ => Answer::Unknown("registering its dma-buf was not tried".to_owned()),
        };
        let (export, import) = (export.clone(), import.clone());
        let is_closed_type =
            adapters::without_dma_buf(nic).is_some() && !matches!(peermem, Answer::No("gpu-class", _));
        // Loading a module changes nothing for Amazon's adapters.
        let is_efa = nic.driver.as_deref() == Some("efa") && !matches!(peermem, Answer::No("gpu-class", _));
        let peermem = match of_pair("peermem") {
            Some(r) if r.probe.ok => Answer::Yes("registered by probe".to_owned()),
            Some(r) if methods::is_refused(facts, r) && !peermem.is_no() => {
                let id = if elsewhere("peermem") { "registration-pair" } else { "peermem-not-registered" };
                Answer::No(id, format!("registering failed: {}", r.probe.detail))
            }
            _ if nic.is_software() => {
                Answer::No("software-nic", "a software adapter has no DMA of its own".to_owned())
            }
            // No module of the kernel matters to this driver.
            _ if is_efa && adapters::may_pin_gpu_memory(facts, nic) => {
                Answer::Unknown("whether EFA's driver pins GPU memory by itself was not probed".to_owned())
            }
            // If no module is loaded either, report that first, unless the type is the whole cause.
            _ if (!peermem.is_no() || is_closed_type || is_efa)
                && let Some(driver) = adapters::without_peer_memory(nic) =>
            {
                let product = adapters::product(driver);
                Answer::No("peermem-nic", format!("{product} does not use the peer-memory interface"))
            }
            _ => peermem.clone(),
        };
        let closed = crate::usable::nic(facts, nic).is_no();
        Self { gpu, nic, distance, one_socket, bridges, export, import, register, peermem, closed, proven }
    }

    /// Whether its registration was refused although others of the GPU succeed.
    pub fn refused_alone(&self) -> bool {
        [&self.register, &self.peermem]
            .iter()
            .any(|answer| matches!(answer, Answer::No("registration-pair", _)))
    }

    /// Whether dma-buf works for it.
    pub fn dma_buf(&self) -> bool {
        self.proven == Some("dma-buf")
            || (self.export.is_yes() && self.import.is_yes() && !self.register.is_no())
    }

    /// Whether dma-buf certainly does not work for it.
    pub fn no_dma_buf(&self) -> bool {
        self.proven != Some("dma-buf")
            && (self.export.is_no() || self.import.is_no() || self.register.is_no())
    }

    /// Near, usable and fast adapters come first.
    fn rank(&self) -> (u32, (Distance, bool), f64) {
        let rate = self.nic.port().and_then(|port| port.rate_gbps.known().copied()).unwrap_or(0.0);
        (self.class().0, self.class().1, -rate)
    }

    fn class(&self) -> (u32, (Distance, bool)) {
        // An adapter without an active port, or that cannot be opened, is no choice while another
        // exists.
        let idle = self.closed || !self.nic.ports.iter().any(crate::facts::Port::may_be_active);
        let distance = self.distance.unwrap_or(Distance::Sys);
        // Memory nodes of one socket are nearer than those of two.
        let across = distance == Distance::Sys && !self.one_socket;
        (u32::from(idle) + 2 * u32::from(self.nic.is_software()), (distance, across))
    }
}
