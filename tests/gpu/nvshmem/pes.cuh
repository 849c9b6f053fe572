// What the NVSHMEM programs share. Each starts its PEs itself, all of them on one GPU, and waits for them: PROGRAM [FOLDER [PES]]. The folder is where
// they meet.
#pragma once
#include "../counted.h"
#include <cuda_runtime.h>
#include <nvshmem.h>
#include <nvshmemx.h>

#include <cstdint>
#include <signal.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#define CHECK(what)                                                                         \
    do {                                                                                    \
        if (!(what)) {                                                                      \
            fprintf(stderr, "PE %d: line %d: FAILED: %s\n", me, __LINE__, #what);           \
            fflush(nullptr);                                                                \
            _exit(1);                                                                       \
        }                                                                                   \
    } while (0)
#define CUDA(call)                                                                          \
    do {                                                                                    \
        cudaError_t error_ = (call);                                                        \
        if (error_ != cudaSuccess)                                                          \
            fprintf(stderr, "PE %d: FAILED: %s (%d): %s, after: %s\n", me, cudaGetErrorName(error_), (int)error_, cudaGetErrorString(error_), reached); \
        CHECK(error_ == cudaSuccess);                                                       \
    } while (0)

static int me = -1, pes = 2;
static std::string folder = "."; // where they meet
static const char *reached = "start"; // what was good last

// What a PE does once it is part of the job; each program has its own.
static void run();

static inline void good(const char *what) {
    printf("PE %d: good: %s\n", me, what);
    fflush(stdout);
    reached = what;
}

// Symmetric memory for so many things, all bytes 0.
template <typename T> static T *symmetric(size_t count) {
    T *memory = (T *)nvshmem_calloc(count, sizeof(T));
    CHECK(memory);
    return memory;
}

template <typename T> static void upload(T *to, const std::vector<T> &from) {
    CUDA(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
    // Copies from pageable memory return before the bytes are there, and the next to read them may be the adapter.
    CUDA(cudaDeviceSynchronize());
}

template <typename T> static std::vector<T> download(const T *from, size_t count) {
    std::vector<T> to(count);
    CUDA(cudaMemcpy(to.data(), from, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
}

// Holds nb0's counters against what had to come in to this PE: every byte of it went through the window, and nothing much beside it came. NVSHMEM sends
// short messages together with flags (twice the bytes), and its own words to and fro.
static inline void account(const char *what, struct counted before, unsigned long long moved) {
    nvshmem_barrier_all(); // all that was on its way to us is here,
    struct counted in = count_since(before);
    nvshmem_barrier_all(); // and nothing of what comes next.
    unsigned long long direct = in.window + in.engine;
    printf("PE %d: counted: %s: %llu bytes had to come in; direct %llu, host %llu, staged %llu\n", me, what, moved, direct, in.cpu, in.staged);
    fflush(stdout);
    if (!getenv("NOBOUNCE_WINDOW")) CHECK(in.staged == 0 && direct >= moved && direct <= 3 * moved + (1 << 20));
}

static inline void join() {
    std::string path = folder + "/uid", ready = folder + "/uid.ready";
    CUDA(cudaSetDevice(0));
    nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
    nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
    if (me == 0) {
        CHECK(nvshmemx_get_uniqueid(&id) == 0);
        FILE *file = fopen(path.c_str(), "wb");
        CHECK(file && fwrite(&id, sizeof id, 1, file) == 1 && !fclose(file) && !rename(path.c_str(), ready.c_str()));
    } else {
        for (int i = 0; i < 2000 && access(ready.c_str(), R_OK); i++) usleep(10000);
        FILE *file = fopen(ready.c_str(), "rb");
        CHECK(file && fread(&id, sizeof id, 1, file) == 1 && !fclose(file));
    }
    CHECK(nvshmemx_set_attr_uniqueid_args(me, pes, &id, &attributes) == 0);
    CHECK(nvshmemx_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes) == 0);
    CHECK(nvshmem_my_pe() == me && nvshmem_n_pes() == pes);
    good("init");
}

// Starts the PEs, or is one of them. `judge` has the last word on how they ended: their wait statuses, and seconds since the first of them ended.
static int start(int argc, char **argv, int (*judge)(const std::vector<int> &statuses, const std::vector<double> &seconds), int grace) {
    if (argc > 1) folder = argv[1];
    if (argc > 2) pes = atoi(argv[2]);
    if (argc > 3) {
        me = atoi(argv[3]);
        join();
        run();
        return 0;
    }
    unlink((folder + "/uid.ready").c_str());
    std::vector<pid_t> started((size_t)pes);
    for (int pe = 0; pe < pes; pe++)
        if (!(started[(size_t)pe] = fork())) {
            execl(argv[0], argv[0], folder.c_str(), std::to_string(pes).c_str(), std::to_string(pe).c_str(), (char *)nullptr);
            _exit(127);
        }
    std::vector<int> statuses((size_t)pes);
    std::vector<double> seconds((size_t)pes);
    timespec first = {}, now;
    for (int left = pes; left > 0;) {
        int status;
        pid_t ended = waitpid(-1, &status, left == pes ? 0 : WNOHANG);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (left == pes) first = now;
        double since = (double)(now.tv_sec - first.tv_sec) + 1e-9 * (double)(now.tv_nsec - first.tv_nsec);
        for (int pe = 0; pe < pes; pe++)
            if (ended > 0 && started[(size_t)pe] == ended) {
                statuses[(size_t)pe] = status;
                seconds[(size_t)pe] = since;
                started[(size_t)pe] = 0;
                left--;
            } else if (started[(size_t)pe] > 0 && left < pes && since > grace) {
                kill(started[(size_t)pe], SIGKILL); // one that failed leaves the others waiting
            }
        if (ended == 0) usleep(10000);
    }
    return judge(statuses, seconds);
}

static inline int all_good(const std::vector<int> &statuses, const std::vector<double> &) {
    for (size_t pe = 0; pe < statuses.size(); pe++)
        if (statuses[pe]) {
            printf("nvshmem: PE %zu ended with status %#x\n", pe, statuses[pe]);
            return 1;
        }
    printf("nvshmem: all %zu PEs are done, and everything was right\n", statuses.size());
    return 0;
}
