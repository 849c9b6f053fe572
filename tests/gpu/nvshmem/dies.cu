// A PE that dies inside a collective. NVSHMEM promises nothing for that: whoever waits for the dead one in a kernel waits until the adapter gives up
// sending to it, and then NVSHMEM ends the process; or for ever, if nothing was under way, or if its proxy thread waits for the answer to an atomic, for
// then it does not look at the adapter's errors. What must hold: no memory has changed that the collective does not write, and a put to the dead one
// comes back with an error, in bounded time. The last PE is killed while all of them gather; the others look at their own memory meanwhile.
//
// Not under MPS: the kernel of a client that is killed loses the host memory it works on, and MPS gives its fault to all clients of the GPU. Without
// MPS the kernels take turns on the GPU, and those of the living go on.
//
//     nvcc -rdc=true -arch=native -o dies dies.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
//     ./dies FOLDER [PES]
#include "pes.cuh"

static const size_t N = 1 << 16, GUARD = 1 << 16;
static const uint32_t ROUNDS = 20;
static const int LIMIT = 75; // seconds; NVSHMEM's own limit is 8 times 4.3 s with an adapter that keeps to the standard

// Gathers for ever: every element tells its place, whoever sent it, in every round.
__global__ void gather(uint32_t *to, uint32_t *from, size_t n, volatile uint32_t *rounds) {
    for (uint32_t round = 1;; round++) {
        nvshmemx_uint32_fcollect_block(NVSHMEM_TEAM_WORLD, to, from, n);
        nvshmemx_barrier_all_block();
        if (threadIdx.x == 0) *rounds = round;
        __threadfence_system();
    }
}

// Whether bytes in GPU memory are what they were; a kernel that waits must not keep the copy from running.
static std::vector<uint32_t> look(const uint32_t *at, size_t count, cudaStream_t stream) {
    std::vector<uint32_t> found(count);
    CUDA(cudaMemcpyAsync(found.data(), at, count * sizeof *at, cudaMemcpyDeviceToHost, stream));
    CUDA(cudaStreamSynchronize(stream));
    return found;
}

static void run() {
    uint32_t *before = symmetric<uint32_t>(GUARD), *to = symmetric<uint32_t>(N * (size_t)pes), *after = symmetric<uint32_t>(GUARD);
    uint32_t *from = symmetric<uint32_t>(N), *rounds;
    std::vector<uint32_t> guard(GUARD), mine(N), all(N * (size_t)pes);
    for (size_t i = 0; i < GUARD; i++) guard[i] = 0xabcd0000u + (uint32_t)i;
    for (size_t i = 0; i < N * (size_t)pes; i++) all[i] = (uint32_t)i;
    for (size_t i = 0; i < N; i++) mine[i] = (uint32_t)((size_t)me * N + i);
    upload(before, guard);
    upload(after, guard);
    upload(from, mine);
    upload(to, all);
    cudaStream_t kernels, copies;
    CUDA(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking));
    CUDA(cudaStreamCreateWithFlags(&copies, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc((void **)&rounds, sizeof *rounds, cudaHostAllocMapped));
    *rounds = 0;
    nvshmem_barrier_all();
    gather<<<1, 256, 0, kernels>>>(to, from, N, rounds);
    CUDA(cudaGetLastError());
    for (int i = 0; i < 2000 && *(volatile uint32_t *)rounds < ROUNDS; i++) usleep(10000);
    CHECK(*(volatile uint32_t *)rounds >= ROUNDS);
    good("gathering");
    if (me == pes - 1) kill(getpid(), SIGKILL);
    uint32_t last = 0;
    for (int quiet = 0; quiet < 10;) { // a second without another round
        usleep(100000);
        uint32_t now = *(volatile uint32_t *)rounds;
        quiet = now == last ? quiet + 1 : 0;
        last = now;
    }
    // Every place of the result has one right value, and whoever was to write it, dead or alive, writes nothing else.
    CHECK(look(to, N * (size_t)pes, copies) == all && look(from, N, copies) == mine);
    CHECK(look(before, GUARD, copies) == guard && look(after, GUARD, copies) == guard);
    printf("PE %d: good: it waits after %u rounds, and all memory is as it was\n", me, last);
    fflush(stdout);
    // Whoever of the host's thread and NVSHMEM's own sees the adapter's error first: the put returns, or NVSHMEM ends the process.
    signal(SIGALRM, [](int) { _exit(77); });
    alarm(LIMIT);
    time_t begin = time(nullptr);
    nvshmem_uint32_put(from, from, 1, pes - 1);
    printf("PE %d: good: a put to the dead one came back after %d s\n", me, (int)(time(nullptr) - begin));
    fflush(stdout);
    _exit(3);
}

static int judge(const std::vector<int> &statuses, const std::vector<double> &seconds) {
    int failed = 0;
    for (size_t pe = 0; pe < statuses.size(); pe++) {
        int status = statuses[pe], is_killed = WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL;
        bool is_last = pe + 1 == statuses.size();
        printf("nvshmem: PE %zu ended %.1f s after the first, with %s %d\n", pe, seconds[pe], WIFSIGNALED(status) ? "signal" : "exit code",
               WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status));
        // 1 is what CHECK gives, 77 that the put did not come back; anything else but a good end is ours or NVSHMEM's after an error.
        if (is_last ? !is_killed : (is_killed || status == 0 || (WIFEXITED(status) && (WEXITSTATUS(status) == 1 || WEXITSTATUS(status) == 77)))) failed = 1;
    }
    if (!failed) printf("nvshmem: the others ended by themselves, and no memory had changed\n");
    return failed;
}

int main(int argc, char **argv) { return start(argc, argv, judge, LIMIT + 5); }
