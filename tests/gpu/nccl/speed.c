/* NCCL's operations between two ranks on one GPU, called from C in the manner of nccl-tests: a stream of operations is started, then waited for. A
 * call from C takes a few microseconds where one through PyTorch takes thirty, so that the network is seen and not the application.
 *
 *     cc -O2 -o speed speed.c -ldl
 *     NCCL_LIBRARY=.../libnccl.so.2 ./speed FOLDER [OPERATION:BYTES]...
 *
 * FOLDER/rank0.json and FOLDER/rank1.json are what it saw. Without cases it takes all.
 *
 * It starts the second rank itself, and gives each a host name of its own: only then does NCCL use the network between them. NCCL and CUDA are found
 * when it runs; what it calls of them is declared here. */
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "../counted.h"

typedef void *comm_t;
typedef void *stream_t;
typedef struct { char bytes[128]; } unique_id;
enum { SUM = 0, FLOAT = 7 }; /* ncclSum, ncclFloat32 */

#define NCCL_FUNCTIONS(X)                                                                         \
    X(int, ncclGetVersion, (int *))                                                               \
    X(int, ncclGetUniqueId, (unique_id *))                                                        \
    X(int, ncclCommInitRank, (comm_t *, int, unique_id, int))                                     \
    X(int, ncclCommDestroy, (comm_t))                                                             \
    X(int, ncclGroupStart, (void))                                                                \
    X(int, ncclGroupEnd, (void))                                                                  \
    X(int, ncclAllReduce, (const void *, void *, size_t, int, int, comm_t, stream_t))             \
    X(int, ncclAllGather, (const void *, void *, size_t, int, comm_t, stream_t))                  \
    X(int, ncclReduceScatter, (const void *, void *, size_t, int, int, comm_t, stream_t))         \
    X(int, ncclBroadcast, (const void *, void *, size_t, int, int, comm_t, stream_t))             \
    X(int, ncclSend, (const void *, size_t, int, int, comm_t, stream_t))                          \
    X(int, ncclRecv, (void *, size_t, int, int, comm_t, stream_t))

#define CUDA_FUNCTIONS(X)                                            \
    X(int, cuInit, (unsigned))                                       \
    X(int, cuDevicePrimaryCtxRetain, (void **, int))                 \
    X(int, cuCtxSetCurrent, (void *))                                \
    X(int, cuStreamCreate, (stream_t *, unsigned))                   \
    X(int, cuStreamSynchronize, (stream_t))                          \
    X(int, cuMemAlloc_v2, (uint64_t *, size_t))                      \
    X(int, cuMemsetD32_v2, (uint64_t, unsigned, size_t))             \
    X(int, cuMemcpyHtoD_v2, (uint64_t, const void *, size_t))        \
    X(int, cuMemcpyDtoH_v2, (void *, uint64_t, size_t))

#define DECLARE(result, name, arguments) static result(*name) arguments;
NCCL_FUNCTIONS(DECLARE)
CUDA_FUNCTIONS(DECLARE)

#define CHECK(condition) do { if (!(condition)) { fprintf(stderr, "FAILED: rank %d, line %d: %s\n", rank, __LINE__, #condition); exit(1); } } while (0)
/* Of NCCL or CUDA: 0 is success. */
#define OK(call) do { int code = (call); if (code) { fprintf(stderr, "FAILED: rank %d, line %d: %s gives %d\n", rank, __LINE__, #call, code); exit(1); } } while (0)

enum { KIB = 1 << 10, MIB = 1 << 20, LARGEST = 256 * MIB, BATCHES = 7 };

/* What the two ranks tell each other beside NCCL. */
struct together {
    unique_id id;
    volatile int arrived[2];
};
static struct together *together;
static int rank, peer;
static comm_t comm;
static stream_t stream;
static uint64_t from, to;
static float *host;
static int measured;

static void barrier(void) {
    int turn = __atomic_add_fetch(&together->arrived[rank], 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&together->arrived[peer], __ATOMIC_SEQ_CST) < turn) sched_yield();
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

/* An operation on `count` numbers of this rank; how many it makes of them, where, and what each must be. */
struct operation {
    const char *name;
    void (*start)(size_t count);
    size_t (*makes)(size_t count);
    float (*expected)(size_t i, size_t count, unsigned seed);
};

static float value(int of, size_t i, unsigned seed) {
    return (float)(((uint32_t)i * 7 + (uint32_t)(of + 1) * 3 + seed) % 5);
}
static size_t same(size_t count) { return count; }
static size_t twice(size_t count) { return 2 * count; }
static size_t at_receiver(size_t count) { return rank == 1 ? count : 0; }
static float sum(size_t i, size_t count, unsigned seed) { (void)count; return value(0, i, seed) + value(1, i, seed); }
static float gathered(size_t i, size_t count, unsigned seed) { return value(i >= count, i % count, seed); }
static float scattered(size_t i, size_t count, unsigned seed) { return sum((size_t)rank * count + i, count, seed); }
static float of_first(size_t i, size_t count, unsigned seed) { (void)count; return value(0, i, seed); }
/* Each rank has the part that was meant for it, of both. */
static float exchanged(size_t i, size_t count, unsigned seed) { return value(i >= count, (size_t)rank * count + i % count, seed); }

static void all_reduce(size_t count) { OK(ncclAllReduce((void *)from, (void *)to, count, FLOAT, SUM, comm, stream)); }
static void all_gather(size_t count) { OK(ncclAllGather((void *)from, (void *)to, count, FLOAT, comm, stream)); }
static void reduce_scatter(size_t count) { OK(ncclReduceScatter((void *)from, (void *)to, count, FLOAT, SUM, comm, stream)); }
static void broadcast(size_t count) { OK(ncclBroadcast((void *)from, (void *)to, count, FLOAT, 0, comm, stream)); }
static void all_to_all(size_t count) {
    OK(ncclGroupStart());
    for (int other = 0; other < 2; other++) {
        OK(ncclSend((float *)from + (size_t)other * count, count, FLOAT, other, comm, stream));
        OK(ncclRecv((float *)to + (size_t)other * count, count, FLOAT, other, comm, stream));
    }
    OK(ncclGroupEnd());
}
static void send_receive(size_t count) {
    if (rank == 0) OK(ncclSend((void *)from, count, FLOAT, 1, comm, stream));
    if (rank == 1) OK(ncclRecv((void *)to, count, FLOAT, 0, comm, stream));
}

static const struct operation OPERATIONS[] = {
    {"all_reduce", all_reduce, same, sum},          {"all_gather", all_gather, twice, gathered}, {"reduce_scatter", reduce_scatter, same, scattered},
    {"broadcast", broadcast, same, of_first},       {"all_to_all", all_to_all, twice, exchanged}, {"send/recv", send_receive, at_receiver, of_first},
};
static const struct { int operation; size_t bytes; } CASES[] = {
    {0, 8}, {0, KIB}, {0, 4 * KIB}, {0, 16 * KIB}, {0, 32 * KIB}, {0, 64 * KIB}, {0, 256 * KIB}, {0, MIB}, {0, 16 * MIB}, {0, 256 * MIB},
    {1, 64 * KIB}, {2, 64 * KIB}, {3, 64 * KIB}, {4, 64 * KIB}, {5, 8}, {5, 64 * KIB}, {5, MIB}, {5, 64 * MIB},
};

/* One operation on numbers that were never there before. */
static void check_values(const struct operation *operation, size_t count, unsigned seed) {
    size_t made = operation->makes(count);
    for (size_t i = 0; i < 2 * count; i++) host[i] = value(rank, i, seed);
    OK(cuMemcpyHtoD_v2(from, host, 2 * count * sizeof(float)));
    OK(cuMemsetD32_v2(to, 0x7fc00000, 2 * count)); /* not a number: equal to nothing */
    operation->start(count);
    OK(cuStreamSynchronize(stream));
    if (made) OK(cuMemcpyDtoH_v2(host, to, made * sizeof(float)));
    for (size_t i = 0; i < made; i++)
        if (host[i] != operation->expected(i, count, seed)) {
            fprintf(stderr, "FAILED: rank %d: %s of %zu numbers: %g at %zu\n", rank, operation->name, count, (double)host[i], i);
            exit(1);
        }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double median(double *of, int count) {
    qsort(of, (size_t)count, sizeof *of, by_value);
    return of[count / 2];
}

static void measure(FILE *result, size_t which) {
    const struct operation *operation = &OPERATIONS[CASES[which].operation];
    size_t bytes = CASES[which].bytes, count = bytes / sizeof(float);
    int turns = bytes <= 64 * KIB ? 200 : bytes <= MIB ? 30 : bytes <= 16 * MIB ? 6 : 2, batches = bytes <= MIB ? BATCHES : 3;
    double took[BATCHES], issued[BATCHES], alone[BATCHES];
    check_values(operation, count, (unsigned)which);
    for (int turn = 0; turn < (turns < 15 ? 3 : turns / 5); turn++) operation->start(count);
    OK(cuStreamSynchronize(stream));
    struct counted before = count_in();
    for (int batch = 0; batch < batches; batch++) {
        barrier();
        double start = now();
        for (int turn = 0; turn < turns; turn++) operation->start(count);
        issued[batch] = (now() - start) / turns;
        OK(cuStreamSynchronize(stream));
        took[batch] = (now() - start) / turns;
    }
    /* Each waited for before the next: what an application that needs the result now has to wait. */
    for (int batch = 0; batch < batches; batch++) {
        barrier();
        int some = turns < 20 ? turns : 20;
        double start = now();
        for (int turn = 0; turn < some; turn++) {
            operation->start(count);
            OK(cuStreamSynchronize(stream));
        }
        alone[batch] = (now() - start) / some;
    }
    struct counted counted = count_since(before);
    check_values(operation, count, (unsigned)which + 100);
    double us = median(took, batches), issue_us = median(issued, batches), alone_us = median(alone, batches);
    fprintf(result, "%s\n  {\"test\": \"%s\", \"bytes\": %zu, \"us\": %.2f, \"issue_us\": %.2f, \"alone_us\": %.2f, \"verified\": true, \"window_bytes\": %llu, \"staged_bytes\": %llu}",
            measured++ ? "," : "", operation->name, bytes, us, issue_us, alone_us, counted.window, counted.staged);
}

static int is_wanted(size_t which, int count, char **wanted) {
    char name[64];
    snprintf(name, sizeof name, "%s:%zu", OPERATIONS[CASES[which].operation].name, CASES[which].bytes);
    for (int i = 0; i < count; i++)
        if (!strcmp(name, wanted[i])) return 1;
    return count == 0;
}

static void load(void) {
    const char *name = getenv("NCCL_LIBRARY");
    void *nccl = dlopen(name && *name ? name : "libnccl.so.2", RTLD_NOW), *cuda = dlopen("libcuda.so.1", RTLD_NOW);
    if (!nccl || !cuda) {
        fprintf(stderr, "FAILED: %s (NCCL_LIBRARY=.../libnccl.so.2 says where NCCL is)\n", dlerror());
        exit(2);
    }
#define FIND_NCCL(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(nccl, #name)));
#define FIND_CUDA(result, name, arguments) CHECK((name = (result(*) arguments)dlsym(cuda, #name)));
    NCCL_FUNCTIONS(FIND_NCCL)
    CUDA_FUNCTIONS(FIND_CUDA)
}

int main(int argc, char **argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: speed FOLDER [OPERATION:BYTES]...\n");
        return 2;
    }
    together = mmap(NULL, sizeof *together, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(together != MAP_FAILED);
    pid_t parent = getpid(), child = fork(); /* before CUDA, which does not live through a fork */
    CHECK(child >= 0);
    rank = child == 0;
    peer = 1 - rank;
    if (rank == 1) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != parent) return 1;
    }
    char name[4096];
    snprintf(name, sizeof name, "host-%d", rank);
    setenv("NCCL_HOSTID", name, 1);
    load();
    void *context;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    if (rank == 0) OK(ncclGetUniqueId(&together->id));
    barrier();
    OK(ncclCommInitRank(&comm, 2, together->id, rank));
    OK(cuStreamCreate(&stream, 1)); /* does not wait for the default stream */
    OK(cuMemAlloc_v2(&from, 2ul * LARGEST));
    OK(cuMemAlloc_v2(&to, 2ul * LARGEST));
    CHECK((host = malloc(2ul * LARGEST)));
    snprintf(name, sizeof name, "%s/rank%d.json", argv[1], rank);
    FILE *result = fopen(name, "w");
    CHECK(result);
    int version;
    OK(ncclGetVersion(&version));
    fprintf(result, "{\"version\": \"%d.%d.%d\", \"rows\": [", version / 10000, version / 100 % 100, version % 100);
    for (size_t which = 0; which < sizeof CASES / sizeof *CASES; which++)
        if (is_wanted(which, argc - 2, argv + 2)) measure(result, which);
    fprintf(result, "\n]}\n");
    CHECK(fclose(result) == 0);
    barrier();
    OK(ncclCommDestroy(comm));
    if (rank == 1) return 0;
    int status;
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1;
}
