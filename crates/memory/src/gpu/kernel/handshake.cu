// Kernels that wait for the CPU, and always end when told to.
//
// Pinned host words shared with the CPU are named in kernel.rs (PinnedWords); here they are passed one by one.
// Launched with all arguments zero, a kernel does nothing: that is how it is brought to the GPU ahead of time.
// The .ptx beside this file is made from it by tools/ptx.

typedef unsigned long long u64;

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

// One thread: waits until `flag` (in GPU memory) holds first, first + 1, ... and answers each in `seen` (pinned host memory).
// The stop word is looked at only now and then: it lies across PCIe, and a look at it would be part of the time measured.
extern "C" __global__ void wait_flag(const u64 *flag, u64 *seen, const u64 *stop, u64 first, u64 rounds)
{
    for (u64 i = first; i != first + rounds; i++) {
        for (u64 looks = 1; load_acquire(flag) != i; looks++)
            if (looks % 4096 == 0 && load_acquire(stop))
                return;
        store_release(seen, i);
    }
}

static __device__ u64 now_ns()
{
    u64 time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// Occupies the multiprocessors until told to stop, or for `limit_ns` nanoseconds: all threads of a block stay, one of them looks at
// the stop word. Each block says that it has started in a word of its own.
extern "C" __global__ void spin(const u64 *stop, u64 *started, u64 limit_ns)
{
    if (!stop)
        return;
    if (threadIdx.x == 0) {
        u64 begin = now_ns();
        store_release(started + blockIdx.x, 1);
        while (!load_acquire(stop) && now_ns() - begin < limit_ns) {
        }
    }
    __syncthreads();
}
