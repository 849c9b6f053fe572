// How fast NVSHMEM's kernels put, signal and add, between two PEs: beside `nobounce bench --gpu-initiated`. Latency is half a round trip of a put
// with a signal, from kernel to kernel, median.
//
//     nvcc -rdc=true -arch=native -o speed speed.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
//     ./speed FOLDER
#include "pes.cuh"

#include <algorithm>

static const int ROUNDS = 2000;
static const uint64_t POSTED = 100000;
static const size_t MOST = 8 << 20;

__device__ static inline uint64_t now_ns() {
    uint64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}

// One thread. The signal counts up from `before`.
__global__ void ping_pong(char *data, uint64_t *signal, size_t bytes, int rounds, uint64_t before, int me, uint64_t *times) {
    for (int round = 1; round <= rounds; round++) {
        uint64_t began = now_ns();
        if (me == 0) nvshmem_putmem_signal_nbi(data + bytes, data, bytes, signal, 1, NVSHMEM_SIGNAL_ADD, 1 - me);
        nvshmem_signal_wait_until(signal, NVSHMEM_CMP_GE, before + (uint64_t)round);
        if (me == 1) nvshmem_putmem_signal_nbi(data + bytes, data, bytes, signal, 1, NVSHMEM_SIGNAL_ADD, 1 - me);
        times[round - 1] = now_ns() - began;
    }
    nvshmem_quiet();
}

// One thread; times[0] is the time of all.
__global__ void puts(char *data, size_t bytes, int count, int peer, uint64_t *times) {
    uint64_t began = now_ns();
    for (int number = 0; number < count; number++) nvshmem_putmem_nbi(data + MOST, data, bytes, peer);
    nvshmem_quiet();
    times[0] = now_ns() - began;
}

enum Kind { VALUES, SIGNALS, FETCHES };
__global__ void words(uint64_t *word, Kind kind, uint64_t count, int peer, uint64_t *times) {
    uint64_t began = now_ns();
    for (uint64_t number = 1; number <= count; number++)
        if (kind == VALUES)
            nvshmem_uint64_p(word, number, peer);
        else if (kind == SIGNALS)
            nvshmemx_signal_op(word, 1, NVSHMEM_SIGNAL_ADD, peer);
        else
            nvshmem_uint64_atomic_fetch_add(word, 1, peer);
    nvshmem_quiet();
    times[0] = now_ns() - began;
}

static void run() {
    char *data = symmetric<char>(2 * MOST);
    uint64_t *shared = symmetric<uint64_t>(8), *times, before = 0;
    CHECK(pes == 2);
    CUDA(cudaMalloc(&times, ROUNDS * sizeof *times));
    for (size_t bytes : {8ul, 4096ul, 65536ul, 1048576ul}) {
        int rounds = bytes > 65536 ? ROUNDS / 10 : ROUNDS;
        nvshmem_barrier_all();
        ping_pong<<<1, 1>>>(data, shared, bytes, rounds, before, me, times);
        CUDA(cudaDeviceSynchronize());
        before += (uint64_t)rounds;
        std::vector<uint64_t> found = download(times, (size_t)rounds);
        std::sort(found.begin(), found.end());
        if (me == 0) printf("nvshmem: put with signal, %zu B: %.2f us\n", bytes, (double)found[found.size() / 2] / 2e3);
    }
    for (size_t bytes : {65536ul, 1048576ul, 8388608ul}) {
        int count = (int)((1ul << 30) / bytes);
        nvshmem_barrier_all();
        if (me == 0) {
            puts<<<1, 1>>>(data, bytes, count, 1, times);
            CUDA(cudaDeviceSynchronize());
            printf("nvshmem: puts of %zu B: %.2f GB/s\n", bytes, (double)bytes * count / (double)download(times, 1)[0]);
        }
    }
    const struct {
        Kind kind;
        const char *name;
        uint64_t count;
    } kinds[] = {{VALUES, "values of 8 B", POSTED}, {SIGNALS, "signals", POSTED}, {FETCHES, "fetching atomics", POSTED / 100}};
    for (auto [kind, name, count] : kinds) {
        uint64_t *word = shared + 1 + kind;
        nvshmem_barrier_all();
        if (me == 0) {
            words<<<1, 1>>>(word, kind, count, 1, times);
            CUDA(cudaDeviceSynchronize());
            double each = (double)download(times, 1)[0] / (double)count;
            printf("nvshmem: %s: %.3f millions/s, %.2f us each\n", name, 1e3 / each, each / 1e3);
        }
        nvshmem_barrier_all();
        if (me == 1) CHECK(download(word, 1)[0] == count);
    }
    fflush(stdout);
    nvshmem_finalize();
}

int main(int argc, char **argv) { return start(argc, argv, all_good, 10); }
