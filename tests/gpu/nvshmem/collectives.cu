// NVSHMEM's collectives, called by one thread, a warp or a block of a kernel, by the host, and in the order of a stream; every value checked, and nb0's
// counters held against the bytes that had to move. Any number of PEs from two on.
//
//     nvcc -rdc=true -arch=native -split-compile=0 -o collectives collectives.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
//     ./collectives FOLDER [PES]
#include "pes.cuh"

static const size_t LARGEST = 1 << 18;
static const size_t COUNTS[] = {1, 32, 1000, LARGEST};
// Reduce-scatter keeps what comes from all PEs in half of its scratch memory (NVSHMEM_REDUCE_SCRATCH_SIZE, 512 KiB) and asserts that it fits; from the
// host it does not even ask.
static const size_t SCRATCH = 1 << 19;
enum Scope { THREAD, WARP, BLOCK };
static const int THREADS[] = {1, 32, 256};
enum What { FROM_ONE, FROM_ALL, ALL_TO_ALL, SUM, MOST, EXCLUSIVE_OR, SCATTERED, KINDS };
static const char *const WHAT[] = {"broadcast", "all-gather (fcollect)", "all-to-all", "sum", "maximum", "exclusive or", "reduce-scatter"};

// The values that PE `from` has for PE `to`, the same wherever they are asked for.
__host__ __device__ static inline uint32_t value(int from, int to, size_t i, int round) {
    return (uint32_t)(from + 1) * 1000003u + (uint32_t)to * 7919u + (uint32_t)i * 13u + (uint32_t)round * 101u;
}

// One kernel for each, so that the compiler can make them side by side (-split-compile).
template <What WHAT, Scope SCOPE> __global__ void collective(uint32_t *to, const uint32_t *from, size_t n, int root, int *failed) {
    nvshmem_team_t all = NVSHMEM_TEAM_WORLD;
    int code = 1;
#define BY_SCOPE(kind, name, arguments)                                                                             \
    if constexpr (WHAT == kind && SCOPE == THREAD) code = nvshmem_uint32_##name arguments;                          \
    if constexpr (WHAT == kind && SCOPE == WARP) code = nvshmemx_uint32_##name##_warp arguments;                    \
    if constexpr (WHAT == kind && SCOPE == BLOCK) code = nvshmemx_uint32_##name##_block arguments
    BY_SCOPE(FROM_ONE, broadcast, (all, to, from, n, root));
    BY_SCOPE(FROM_ALL, fcollect, (all, to, from, n));
    BY_SCOPE(ALL_TO_ALL, alltoall, (all, to, from, n));
    BY_SCOPE(SUM, sum_reduce, (all, to, from, n));
    BY_SCOPE(MOST, max_reduce, (all, to, from, n));
    BY_SCOPE(EXCLUSIVE_OR, xor_reduce, (all, to, from, n));
    BY_SCOPE(SCATTERED, sum_reducescatter, (all, to, from, n));
    if (code) atomicAdd(failed, 1);
}

typedef void (*Kernel)(uint32_t *, const uint32_t *, size_t, int, int *);
// Some scopes are left out: each of these takes the compiler half a minute.
static const Kernel KERNELS[][3] = {
    {collective<FROM_ONE, THREAD>, nullptr, collective<FROM_ONE, BLOCK>},
    {nullptr, collective<FROM_ALL, WARP>, collective<FROM_ALL, BLOCK>},
    {collective<ALL_TO_ALL, THREAD>, collective<ALL_TO_ALL, WARP>, collective<ALL_TO_ALL, BLOCK>},
    {collective<SUM, THREAD>, nullptr, collective<SUM, BLOCK>},
    {nullptr, nullptr, collective<MOST, BLOCK>},
    {nullptr, collective<EXCLUSIVE_OR, WARP>, nullptr},
    {nullptr, nullptr, collective<SCATTERED, BLOCK>},
};

static int from_host(What what, uint32_t *to, const uint32_t *from, size_t n, int root) {
    nvshmem_team_t all = NVSHMEM_TEAM_WORLD;
    switch (what) {
    case FROM_ONE: return nvshmem_uint32_broadcast(all, to, from, n, root);
    case FROM_ALL: return nvshmem_uint32_fcollect(all, to, from, n);
    case ALL_TO_ALL: return nvshmem_uint32_alltoall(all, to, from, n);
    case SUM: return nvshmem_uint32_sum_reduce(all, to, from, n);
    case MOST: return nvshmem_uint32_max_reduce(all, to, from, n);
    case EXCLUSIVE_OR: return nvshmem_uint32_xor_reduce(all, to, from, n);
    case SCATTERED: return nvshmem_uint32_sum_reducescatter(all, to, from, n);
    default: return 1;
    }
}

static uint32_t wanted(What what, size_t n, size_t i, int root, int round) {
    uint32_t result = 0;
    switch (what) {
    case FROM_ONE: return value(root, 0, i, round);
    case FROM_ALL: return value((int)(i / n), 0, i % n, round);
    case ALL_TO_ALL: return value((int)(i / n), me, i % n, round);
    default: break;
    }
    for (int pe = 0; pe < pes; pe++) {
        uint32_t theirs = what == SCATTERED ? value(pe, me, i, round) : value(pe, 0, i, round);
        result = what == MOST ? (theirs > result ? theirs : result) : what == EXCLUSIVE_OR ? result ^ theirs : result + theirs;
    }
    return result;
}

// One collective by kernel (or by the host, where `scope` is negative), checked; gives the bytes that had to come in here.
static unsigned long long once(What what, int scope, uint32_t *to, uint32_t *from, int *failed, size_t n, int round) {
    size_t others = (size_t)pes - 1, given = what == ALL_TO_ALL || what == SCATTERED ? n * (size_t)pes : n;
    size_t got = what == FROM_ALL || what == ALL_TO_ALL ? n * (size_t)pes : n;
    int root = round % pes;
    std::vector<uint32_t> host(given);
    for (size_t i = 0; i < given; i++) host[i] = value(me, (int)(i / n), i % n, round);
    upload(from, host);
    CUDA(cudaMemset(to, 0xee, got * sizeof *to));
    CUDA(cudaDeviceSynchronize());
    nvshmem_barrier_all();
    if (scope < 0)
        CHECK(from_host(what, to, from, n, root) == 0);
    else
        KERNELS[what][scope]<<<1, THREADS[scope]>>>(to, from, n, root, failed);
    CUDA(cudaDeviceSynchronize());
    std::vector<uint32_t> found = download(to, got);
    for (size_t i = 0; i < got; i++)
        if (found[i] != wanted(what, n, i, root, round)) {
            fprintf(stderr, "PE %d: %s of %zu: element %zu is %u, not %u\n", me, WHAT[what], n, i, found[i], wanted(what, n, i, root, round));
            CHECK(!"a value of a collective is wrong");
        }
    CHECK(download(failed, 1)[0] == 0);
    if (what == FROM_ONE) return me == root ? 0 : n * sizeof *to;
    return what == FROM_ALL || what == ALL_TO_ALL ? others * n * sizeof *to : n * sizeof *to;
}

static void all_collectives() {
    uint32_t *to = symmetric<uint32_t>(LARGEST * (size_t)pes), *from = symmetric<uint32_t>(LARGEST * (size_t)pes);
    int *failed = symmetric<int>(1);
    for (int what = 0; what < KINDS; what++) {
        struct counted before = count_in();
        nvshmem_barrier_all();
        unsigned long long moved = 0;
        int round = 0;
        for (int scope = -1; scope <= BLOCK; scope++)
            for (size_t n : COUNTS)
                for (int turn = 0; turn < 2; turn++) {
                    if (scope >= 0 && !KERNELS[what][scope]) continue;
                    if (scope == THREAD && n == LARGEST && what >= SUM) continue; // one thread adds for a long time
                    size_t most = what == SCATTERED ? SCRATCH / 2 / sizeof *to / (size_t)pes : LARGEST;
                    moved += once((What)what, scope, to, from, failed, n < most ? n : most, round++);
                }
        account(WHAT[what], before, moved);
    }
    good("broadcast, all-gather, all-to-all, sum, maximum, exclusive or, reduce-scatter from the host, a thread, a warp and a block");
    nvshmem_free(to);
    nvshmem_free(from);
}

// In the order of a stream, from the host.
static void on_streams() {
    const size_t N = 100000;
    int next = (me + 1) % pes, last = (me + pes - 1) % pes;
    uint32_t *to = symmetric<uint32_t>(N), *from = symmetric<uint32_t>(N), *sums = symmetric<uint32_t>(N);
    uint64_t *signal = symmetric<uint64_t>(1);
    std::vector<uint32_t> mine(N), theirs(N);
    for (size_t i = 0; i < N; i++) mine[i] = value(me, 0, i, 9), theirs[i] = value(last, 0, i, 9);
    upload(from, mine);
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    nvshmem_barrier_all();
    nvshmemx_putmem_signal_on_stream(to, from, N * sizeof *to, signal, 1, NVSHMEM_SIGNAL_SET, next, stream);
    nvshmemx_signal_wait_until_on_stream(signal, NVSHMEM_CMP_EQ, 1, stream);
    CHECK(nvshmemx_uint32_sum_reduce_on_stream(NVSHMEM_TEAM_WORLD, sums, to, N, stream) == 0);
    nvshmemx_barrier_all_on_stream(stream);
    CUDA(cudaStreamSynchronize(stream));
    CHECK(download(to, N) == theirs);
    std::vector<uint32_t> found = download(sums, N);
    for (size_t i = 0; i < N; i++) CHECK(found[i] == wanted(SUM, N, i, 0, 9));
    CUDA(cudaStreamDestroy(stream));
    good("put with signal, wait, sum and barrier in the order of a stream");
}

static void run() {
    all_collectives();
    on_streams();
    nvshmem_barrier_all();
    nvshmem_finalize();
    good("finalize");
}

int main(int argc, char **argv) { return start(argc, argv, all_good, 10); }
