//! Every constant of the model, with its source. The table of docs/reference/predict-model.md is
//! made from this list.

use serde::Serialize;

/// One constant.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Constant {
    /// Its name in the code.
    pub name: &'static str,
    /// Its value.
    pub value: f64,
    /// The unit.
    pub unit: &'static str,
    /// Whether it was chosen so that published figures come out right. The others stand in the
    /// source that is named.
    pub fitted: bool,
    /// Where it comes from.
    pub source: &'static str,
}

macro_rules! constants {
    ($($(#[$doc:meta])* $name:ident: $value:expr, $unit:literal, $origin:ident, $source:literal;)*) => {
        $($(#[$doc])* pub(super) const $name: f64 = $value;)*
        /// All of them.
        pub const ALL: &[Constant] = &[$(Constant {
            name: stringify!($name), value: $value, unit: $unit, fitted: constants!(@$origin), source: $source,
        }),*];
    };
    (@fitted) => { true };
    (@sourced) => { false };
}

constants! {
    /// How sharply stages in series fall to the slowest of them: rates are added up as powers of
    /// this exponent.
    SERIES_EXPONENT: 16.0, "", fitted, "streams over EDR, HDR and NDR: stages of nearly the same speed cost 1 to 5 %";
    /// What one flow alone gets of what several get together.
    LONE_FLOW: 0.99, "", fitted, "ping-pong against stream over EDR, HDR and NDR, one queue pair against several";
    /// One message through two adapters and the cable between them.
    WIRE_BASE: 0.6, "us", sourced, "UCX, uct/ib: latency of EDR and faster ports";
    WIRE_BASE_FDR: 0.7, "us", sourced, "UCX, uct/ib: FDR";
    WIRE_BASE_QDR: 1.3, "us", sourced, "UCX, uct/ib: QDR";
    WIRE_BASE_DDR: 2.5, "us", sourced, "UCX, uct/ib: DDR";
    WIRE_BASE_SDR: 5.0, "us", sourced, "UCX, uct/ib: SDR";
    /// Ethernet's share.
    ROCE_EXTRA: 0.2, "us", sourced, "UCX, uct/ib: RoCE";
    /// iWARP's: TCP in the adapter.
    IWARP_EXTRA: 1.5, "us", sourced, "published latencies of iWARP adapters, 2 to 3 us where RoCE has about 1";
    /// One switch of the network.
    SWITCH_HOP: 0.1, "us", sourced, "data sheets of EDR and HDR switches: 90 to 130 ns";
    /// One call of the verbs, posting or polling.
    VERBS_CALL: 0.075, "us", sourced, "UCX, uct/ib/rc/verbs: overhead";
    /// Between two messages of one thread over plain verbs.
    VERBS_GAP: 0.125, "us", fitted, "message rate of ib_send_bw over EDR: 8 million/s";
    /// Longest message that travels inside its work request.
    INLINE: 220.0, "B", sourced, "perftest: default inline size";
    /// MPI's own work for one message, at each end.
    MPI_CALL: 0.5, "us", fitted, "osu_latency of host memory, two clusters";
    /// Between two messages of one MPI process.
    MPI_GAP: 0.15, "us", fitted, "osu_mbw_mr of host memory";
    /// Asking CUDA what a pointer is, each message and end.
    DEVICE_CALL: 0.8, "us", fitted, "osu_latency and osu_bw of GPU memory, one cluster";
    /// Smallest share of a message that goes over a rail of its own.
    MIN_RAIL_SHARE: 16384.0, "B", sourced, "UCX: UCX_MIN_RNDV_CHUNK_SIZE";
    /// NIXL's work for one transfer, from posting to the word that it is done.
    NIXL_CALL: 6.0, "us", fitted, "nixlbench over NDR";
    /// NCCL: from the call to the kernel and back.
    NCCL_BASE: 8.4, "us", sourced, "NCCL, tuning: base latency of a ring, protocol Simple";
    /// NCCL: one pass through the network.
    NCCL_NET: 14.0, "us", sourced, "NCCL, tuning: network latency of a ring, protocol Simple";
    /// NCCL: one pass through NVLink.
    NCCL_NVLINK: 3.4, "us", sourced, "NCCL, tuning: NVLink latency of a ring, protocol Simple";
    /// NCCL: slices of a chunk, the unit in which a step of a ring hands on.
    NCCL_SLICES: 2.0, "", sourced, "NCCL, collectives: a chunk has 4 of a buffer's 8 steps, a slice 2";
    /// NCCL: a tree's share of a ring's rate.
    NCCL_TREE: 0.92, "", sourced, "NCCL, tuning: a tree's bandwidth, protocol Simple";
    /// Round trip of a PCIe read: host memory.
    READ_HOST: 0.4, "us", sourced, "PCIe measurements: 0.4 to 0.6 us into the memory of the own socket";
    /// The same through one switch into a GPU.
    READ_SWITCH: 0.8, "us", sourced, "0.6 to 1 us through a switch: the middle";
    /// The same through the processor.
    READ_PROCESSOR: 1.0, "us", sourced, "1 to 2 us through a processor: the lower end, without other traffic";
    /// What the link between sockets adds.
    READ_SOCKET: 0.5, "us", sourced, "1 to 2 us through a processor: half the range";
    /// Reads that an adapter has under way at once.
    READ_TAGS: 32.0, "", sourced, "PCI Express: tags of 5 bits, what every device may use";
    /// A processor's own loads from a GPU's window that are under way at once.
    FILL_BUFFERS: 10.0, "", sourced, "Intel's optimisation manual: line fill buffers of a core";
    /// Round trip of such a load.
    WINDOW_LOAD: 1.2, "us", sourced, "1 to 2 us through a processor";
    /// Copy engine: share of what PCIe carries with packets of 256 bytes.
    COPY_ENGINE: 0.85, "", sourced, "24 GB/s on Gen4 x16 (ucx#6206), 12 on Gen3, 50 on Gen5";
    /// Starting a copy: launch or driver call.
    COPY_LAUNCH: 2.0, "us", sourced, "UCCL, stage costs: kernel launch";
    /// A short copy itself.
    COPY_SHORT: 3.0, "us", sourced, "UCCL, stage costs: small copy to the host";
    /// Learning that it is done, and handing the bytes to the adapter: event, post, poll.
    COPY_HANDOVER: 2.3, "us", sourced, "UCCL, stage costs: event 0.3, post 0.5, poll 1 to 2";
    /// One stage to the next, by a flag in GPU memory.
    COPY_FLAG: 1.0, "us", sourced, "UCCL, stage costs: flag by the window";
    /// Chunk of staged transfers.
    CHUNK: 524_288.0, "B", sourced, "UCX: UCX_RNDV_FRAG_SIZE of host memory";
    /// Packets of a kernel that copies over PCIe.
    KERNEL_PAYLOAD: 64.0, "B", sourced, "NCCL, topo: 64-byte packets between devices; reads and writes share the upstream link";
    /// How often staged bytes cross DRAM at one end: written once, read once.
    DRAM_PASSES: 2.0, "", sourced, "double copy: into the buffer and out of it";
    /// Share of the nominal rate of memory that programs get.
    DRAM_SHARE: 0.8, "", sourced, "common figure of STREAM on servers: 75 to 85 %";
    /// NVLink: share of the nominal rate.
    NVLINK: 0.824, "", sourced, "NCCL, topo: 20.6 of 25 GB/s for each link of SM90";
    /// xGMI: share of the nominal rate.
    XGMI: 0.75, "", sourced, "ROCm blog, RCCL and xGMI on MI300X: 48 of 64 GB/s for each link";
    /// The software NIC: one message through two engines and two system calls.
    SOFT_BASE: 3.8, "us", sourced, "our measurements: WRITE 8 B between two processes of a two-core machine";
    /// The software NIC: an engine's own share of it, at each end.
    SOFT_ENGINE: 0.5, "us", sourced, "our measurements: what WRITE 8 B takes beyond plain UDP";
    /// The software NIC: a READ against a WRITE.
    SOFT_READ: 1.6, "", sourced, "our measurements: READ 8 B against WRITE 8 B";
    /// The software NIC: bytes, one core at each end.
    SOFT_RATE: 3.7, "GB/s", sourced, "our measurements: WRITE 1 MiB on the same machine";
    /// The software NIC: its core copies.
    SOFT_COPY: 10.0, "GB/s", sourced, "within UCX's estimates of 5.3 to 12.6";
    /// The software NIC: between two messages.
    SOFT_GAP: 0.58, "us", sourced, "our measurements: 1.7 million/s";
    /// The software NIC: a short load out of GPU memory, through the window.
    SOFT_GPU_LOAD: 1.1, "us", sourced, "our measurements: H200, load of 64 bytes (docs/measurements, commit 843c7f7)";
    /// The software NIC: bytes of longer loads.
    SOFT_GPU_LOAD_RATE: 0.78, "GB/s", sourced, "our measurements: H200, long loads (docs/measurements, commit 843c7f7)";
    /// The software NIC: the first bytes by the copy engine.
    SOFT_GPU_FETCH: 8.03, "us", sourced, "our measurements: H200, copy engine, 64 bytes (docs/measurements, commit 843c7f7)";
    /// The software NIC: long messages of GPU memory against those of host memory.
    SOFT_GPU_SHARE: 0.87, "", sourced, "our measurements: H200, WRITE 1 MiB, 4.34 of 4.97 GB/s (docs/measurements, commit 843c7f7)";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_constant_has_a_source_and_none_is_named_twice() {
        let mut names: Vec<_> = ALL.iter().map(|constant| constant.name).collect();
        names.sort_unstable();
        let before = names.len();
        names.dedup();
        assert_eq!(names.len(), before);
        assert!(ALL.iter().all(|constant| constant.source.len() > 4 && constant.value > 0.0));
    }
}
