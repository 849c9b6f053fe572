// A PE that dies inside a collective. NVSHMEM promises nothing for that: whoever waits for the dead one in a kernel waits until the adapter gives up
// sending to it, and then NVSHMEM ends the process; or for ever, if nothing was under way, or if its proxy thread waits for the answer to an atomic, for
// then it does not look at the adapter's errors. What must hold: no memory has changed that the collective does not write, and a put to the dead one
// comes back with an error, in bounded time. The last PE is killed while all of them gather; the others look at their own memory as soon as it is gone,
// and again when they end, whoever ends them: over shared memory the adapter tells of the death after a tenth of a second, and NVSHMEM calls exit().
//
// Not under MPS: the kernel of a client that is killed loses the host memory it works on, and MPS gives its fault to all clients of the GPU. Without
// MPS the kernels take turns on the GPU, and those of the living go on.
//
//     nvcc -rdc=true -arch=native -o dies dies.cu -I NVSHMEM/include -L NVSHMEM/lib -lnvshmem_device -Xlinker -l:libnvshmem_host.so.3 -lcuda
//     ./dies FOLDER [PES]
#include "pes.cuh"

#include <atomic>
#include <chrono>
#include <fcntl.h>
#include <mutex>
#include <sys/mman.h>
#include <sys/syscall.h>

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

// All memory of a PE in this job, and what it must hold.
struct region {
    const uint32_t *at;
    std::vector<uint32_t> holds;
};
static std::vector<region> &regions = *new std::vector<region>; // never freed: threads look while the process ends
static uint32_t *rounds;
// The thread that ends the process looks last; CUDA is gone behind its back. 0 while there is none.
static std::atomic<long> ender;
static std::timed_mutex looking;
// A word that all PEs see; the last one sets it when it dies.
static volatile uint32_t *is_dead;

// Whether GPU memory is what it was. A stream of its own: a kernel that waits must not keep the copy from running.
static void look(const char *when) {
    cudaStream_t stream;
    bool is_right = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
    for (const region &one : regions) {
        std::vector<uint32_t> found(one.holds.size());
        is_right = is_right && cudaMemcpyAsync(found.data(), one.at, found.size() * sizeof found[0], cudaMemcpyDeviceToHost, stream) == cudaSuccess &&
                   cudaStreamSynchronize(stream) == cudaSuccess && found == one.holds;
    }
    CHECK(is_right);
    printf("PE %d: good: %s, after %u rounds, all memory is as it was\n", me, when, *(volatile uint32_t *)rounds);
    fflush(stdout);
}

static void at_the_end() {
    long nobody = 0, self = syscall(SYS_gettid);
    // Whoever looks now has the time to say what it saw, unless it is what was interrupted.
    bool is_ours = looking.try_lock_for(std::chrono::seconds(5));
    if (ender.compare_exchange_strong(nobody, self)) look("at its end");
    if (is_ours) looking.unlock();
    while (ender != self) pause(); // another ends it
}

static void look_meanwhile(const char *when) {
    std::lock_guard<std::timed_mutex> alone(looking);
    while (ender) pause(); // CUDA may be gone
    look(when);
}

static void survive() {
    for (int i = 0; i < 20000 && !*is_dead; i++) usleep(1000);
    CHECK(*is_dead);
    usleep(2000); // its last instruction
    look_meanwhile("when the other had died");
    uint32_t last = 0;
    for (int quiet = 0; quiet < 10;) { // a second without another round
        usleep(100000);
        uint32_t now = *(volatile uint32_t *)rounds;
        quiet = now == last ? quiet + 1 : 0;
        last = now;
    }
    look_meanwhile("a second later");
    // Whoever of the host's thread and NVSHMEM's own sees the adapter's error first: the put returns, or NVSHMEM ends the process.
    signal(SIGALRM, [](int) { _exit(77); });
    alarm(LIMIT);
    time_t begin = time(nullptr);
    uint32_t *from = (uint32_t *)regions[0].at;
    nvshmem_uint32_put(from, from, 1, pes - 1);
    while (ender) pause();
    printf("PE %d: good: a put to the dead one came back after %d s\n", me, (int)(time(nullptr) - begin));
    at_the_end();
    _exit(3);
}

static void run() {
    uint32_t *before = symmetric<uint32_t>(GUARD), *to = symmetric<uint32_t>(N * (size_t)pes), *after = symmetric<uint32_t>(GUARD);
    uint32_t *from = symmetric<uint32_t>(N);
    std::vector<uint32_t> guard(GUARD), mine(N), all(N * (size_t)pes);
    for (size_t i = 0; i < GUARD; i++) guard[i] = 0xabcd0000u + (uint32_t)i;
    for (size_t i = 0; i < N * (size_t)pes; i++) all[i] = (uint32_t)i;
    for (size_t i = 0; i < N; i++) mine[i] = (uint32_t)((size_t)me * N + i);
    // Every place of the result has one right value, and whoever was to write it, dead or alive, writes nothing else.
    regions = {{from, mine}, {before, guard}, {to, all}, {after, guard}};
    for (const region &one : regions) upload((uint32_t *)one.at, one.holds);
    cudaStream_t kernels;
    CUDA(cudaStreamCreateWithFlags(&kernels, cudaStreamNonBlocking));
    CUDA(cudaHostAlloc((void **)&rounds, sizeof *rounds, cudaHostAllocMapped));
    *rounds = 0;
    int file = -1;
    if (me == pes - 1) CHECK((file = open((folder + "/dead").c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600)) >= 0 && !ftruncate(file, 4096));
    nvshmem_barrier_all();
    if (me != pes - 1) {
        CHECK((file = open((folder + "/dead").c_str(), O_RDWR)) >= 0);
        // The first to be called, before CUDA's own.
        CHECK(atexit(at_the_end) == 0);
        signal(SIGABRT, [](int) {
            at_the_end();
            _exit(3);
        });
    }
    is_dead = (volatile uint32_t *)mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    CHECK(is_dead != MAP_FAILED);
    nvshmem_barrier_all();
    gather<<<1, 256, 0, kernels>>>(to, from, N, rounds);
    CUDA(cudaGetLastError());
    // The one that dies goes on a little longer: what it told of the others' last rounds may still be on its way.
    uint32_t wanted = ROUNDS + (me == pes - 1 ? 5 : 0);
    for (int i = 0; i < 2000 && *(volatile uint32_t *)rounds < wanted; i++) usleep(10000);
    CHECK(*(volatile uint32_t *)rounds >= wanted);
    good("gathering");
    if (me == pes - 1) {
        *is_dead = 1;
        kill(getpid(), SIGKILL);
    }
    survive();
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
