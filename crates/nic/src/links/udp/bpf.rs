//! Instructions of socket filters (classic BPF).

/// Loads a byte, or a word, of the packet at `k`.
pub(super) const LDB_ABS: u16 = 0x30;
pub(super) const LDW_ABS: u16 = 0x20;
/// Loads the length of the packet.
pub(super) const LD_LEN: u16 = 0x80;
pub(super) const AND_K: u16 = 0x54;
pub(super) const MOD_K: u16 = 0x94;
/// Skips `jt` instructions if the value is `k`, else `jf`.
pub(super) const JEQ_K: u16 = 0x15;
/// Ends with `k`, or with the value.
pub(super) const RET_K: u16 = 0x06;
pub(super) const RET_A: u16 = 0x16;

/// Offsets of [`LDW_ABS`] that stand for something else: the interface of the packet (SKF_AD_OFF +
/// SKF_AD_IFINDEX), a random number (SKF_AD_RANDOM), the IP header (SKF_NET_OFF).
pub(super) const INTERFACE: u32 = 0xffff_f008;
pub(super) const RANDOM: u32 = 0xffff_f038;
pub(super) const IP_HEADER: u32 = 0xfff0_0000;

/// An instruction without a jump.
pub(super) fn plain(code: u16, k: u32) -> libc::sock_filter {
    libc::sock_filter { code, jt: 0, jf: 0, k }
}

/// Skips `jf` instructions unless the value is `k`.
pub(super) fn unless(k: u32, jf: u8) -> libc::sock_filter {
    libc::sock_filter { code: JEQ_K, jt: 0, jf, k }
}
