// The GPU's side of the litmus tests: readers that notice a store which came too early, writers whose stores are to be read
// after their flag. The .ptx beside this file is made from it by tools/ptx.
//
// Every kernel gets a block of pinned host words shared with the CPU (their places: gpu_litmus/stage.rs). Launched with all
// arguments zero, it does nothing.

typedef unsigned long long u64;

enum { STOP = 0, GO = 8, ACK = 16, BAD = 17, FIRST = 18, READS = 19, CHANGES = 20 };

static __device__ u64 load_acquire(const u64 *word)
{
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

static __device__ void store_release(u64 *word, u64 value)
{
    asm volatile("st.release.sys.global.u64 [%0], %1;" : : "l"(word), "l"(value) : "memory");
}

// One block. Round i: every thread waits until `flag` holds i, then counts those of `words` words of `message` which do not
// hold i. The flag may be a word of the message, another word of GPU memory, or pinned host memory. The count stands in host
// memory before the acknowledgement does.
extern "C" __global__ void reader(const u64 *message, u64 words, const u64 *flag, u64 rounds, u64 *host)
{
    __shared__ u64 bad, first;
    if (threadIdx.x == 0) {
        bad = 0;
        first = ~0ull;
    }
    __syncthreads();
    for (u64 i = 1; i <= rounds; i++) {
        int stopped = 0;
        for (u64 looks = 1; !stopped && load_acquire(flag) != i; looks++)
            stopped = looks % 4096 == 0 && load_acquire(host + STOP);
        if (!stopped)
            for (u64 k = threadIdx.x; k < words; k += blockDim.x)
                if (((const volatile u64 *)message)[k] != i) {
                    atomicAdd(&bad, 1);
                    atomicMin(&first, k);
                }
        if (__syncthreads_or(stopped))
            return;
        if (threadIdx.x == 0) {
            host[BAD] = bad;
            host[FIRST] = first;
            store_release(host + ACK, i);
        }
        __syncthreads();
    }
}

// One block. Round i: all words of `message` become i, then the host's word ACK does; waits for GO to be i before the next.
extern "C" __global__ void writer(u64 *message, u64 words, u64 rounds, u64 *host)
{
    for (u64 i = 1; i <= rounds; i++) {
        for (u64 k = threadIdx.x; k < words; k += blockDim.x)
            ((volatile u64 *)message)[k] = i;
        __threadfence_system();
        __syncthreads();
        int stopped = 0;
        if (threadIdx.x == 0) {
            store_release(host + ACK, i);
            for (u64 looks = 1; !stopped && load_acquire(host + GO) != i; looks++)
                stopped = looks % 64 == 0 && load_acquire(host + STOP);
        }
        if (__syncthreads_or(stopped))
            return;
    }
}

// One block, a thread for each word. Reads them again and again until told to stop, and counts those whose halves differ: torn
// ones; and how often a word changed, so that a test which saw nothing change is known to have seen nothing.
extern "C" __global__ void torn_reader(const u64 *message, u64 words, u64 *host)
{
    __shared__ u64 bad, reads, changes;
    if (!host)
        return;
    if (threadIdx.x == 0)
        bad = reads = changes = 0;
    __syncthreads();
    u64 my_bad = 0, my_reads = 0, my_changes = 0, before = 0;
    do {
        for (u64 k = threadIdx.x; k < words; k += blockDim.x) {
            u64 value = ((const volatile u64 *)message)[k];
            my_bad += (unsigned)value != (unsigned)(value >> 32);
            my_changes += value != before;
            before = value;
            my_reads++;
        }
    } while (my_reads && !(my_reads % 256 == 0 && load_acquire(host + STOP)));
    atomicAdd(&bad, my_bad);
    atomicAdd(&reads, my_reads);
    atomicAdd(&changes, my_changes);
    __syncthreads();
    if (threadIdx.x == 0) {
        host[BAD] = bad;
        host[READS] = reads;
        host[CHANGES] = changes;
        store_release(host + ACK, 1);
    }
}

// One block. Writes words with two equal halves, ever new ones, until told to stop.
extern "C" __global__ void torn_writer(u64 *message, u64 words, const u64 *host)
{
    for (u64 i = 1; host && (i % 64 || !load_acquire(host + STOP)); i++)
        for (u64 k = threadIdx.x; k < words; k += blockDim.x)
            ((volatile u64 *)message)[k] = (i & 0xffffffff) << 32 | (i & 0xffffffff);
}

// Counts the words of a message that do not hold `value`, as seen by a kernel that was launched after it was stored.
extern "C" __global__ void look(const u64 *message, u64 words, u64 value, u64 *host)
{
    __shared__ u64 bad;
    if (!host)
        return;
    if (threadIdx.x == 0)
        bad = 0;
    __syncthreads();
    for (u64 k = threadIdx.x; k < words; k += blockDim.x)
        if (((const volatile u64 *)message)[k] != value)
            atomicAdd(&bad, 1);
    __syncthreads();
    if (threadIdx.x == 0) {
        host[BAD] += bad;
        store_release(host + ACK, value);
    }
}
