// Bytes that both ends can compute: written and checked on the GPU, where they lie.
//
// Byte k of a message is byte k % 8 (little-endian) of pattern_word(seed, k / 8); kernel.rs has the same function for the CPU.
// Launched with all arguments zero, a kernel does nothing: that is how it is brought to the GPU ahead of time.
// The .ptx beside this file is made from it by tools/ptx.

typedef unsigned long long u64;
typedef unsigned char u8;

// What `check` and `check_byte` found: added to, never reset here, so that several launches give one answer.
struct Finding {
    u64 wrong; // bytes that differ
    u64 first; // the complement of the lowest offset that differs; 0: none (so that zeroed memory is a fresh start)
};

// SplitMix64's finisher: every input bit changes half of the output bits.
static __device__ u64 pattern_word(u64 seed, u64 index)
{
    u64 x = seed + index + 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

static __device__ u8 pattern_byte(u64 seed, u64 at)
{
    return (u8)(pattern_word(seed, at / 8) >> (at % 8 * 8));
}

static __device__ u64 self() { return blockIdx.x * (u64)blockDim.x + threadIdx.x; }
static __device__ u64 threads() { return gridDim.x * (u64)blockDim.x; }

static __device__ void differs(Finding *out, u64 wrong, u64 offset)
{
    atomicAdd(&out->wrong, wrong);
    atomicMax(&out->first, ~offset);
}

// Whole words where the message starts on one; bytes for the rest.
static __device__ u64 whole_words(const void *message, u64 len) { return (u64)message % 8 ? 0 : len / 8; }

extern "C" __global__ void fill(u8 *message, u64 len, u64 seed)
{
    u64 words = whole_words(message, len);
    for (u64 i = self(); i < words; i += threads())
        ((u64 *)message)[i] = pattern_word(seed, i);
    for (u64 at = words * 8 + self(); at < len; at += threads())
        message[at] = pattern_byte(seed, at);
}

// Loads are volatile: what is checked is what memory holds now, not what a cache of this multiprocessor remembers.
extern "C" __global__ void check(const u8 *message, u64 len, u64 seed, Finding *out)
{
    u64 words = whole_words(message, len);
    for (u64 i = self(); i < words; i += threads()) {
        u64 difference = ((const volatile u64 *)message)[i] ^ pattern_word(seed, i);
        if (difference) {
            u64 wrong = 0;
            for (int k = 0; k < 64; k += 8)
                wrong += (difference >> k & 0xff) != 0;
            differs(out, wrong, i * 8 + (__ffsll(difference) - 1) / 8);
        }
    }
    for (u64 at = words * 8 + self(); at < len; at += threads())
        if (((const volatile u8 *)message)[at] != pattern_byte(seed, at))
            differs(out, 1, at);
}

// The same for memory that must hold one value everywhere (guard zones).
extern "C" __global__ void check_byte(const u8 *memory, u64 len, u64 value, Finding *out)
{
    for (u64 at = self(); at < len; at += threads())
        if (((const volatile u8 *)memory)[at] != (u8)value)
            differs(out, 1, at);
}
