/* A rank that is killed inside a collective on buffers in GPU memory: all gather in a loop, or reduce, and a second thread of the last
 * rank kills it when some of the bytes of a call have come in and others have not. MPI promises nothing for that; the others stand in the call, and mpirun ends
 * them. What must hold: the adapter tells of it as an error within its time-outs, no memory has changed that the collective does not write, and what it was to
 * write holds nothing else than its bytes and what was there before (where two gather; otherwise MPI uses it as scratch memory meanwhile). A second thread of
 * the others looks.
 *
 *     mpicc -O2 -pthread -o dies_inside dies_inside.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 --mca odls_base_sigkill_timeout 2 ./dies_inside gather|reduce [BYTES]      so long mpirun waits before each of its signals to the others
 */
#include "deaths.h"
#include <pthread.h>
#include <stdatomic.h>

enum { FIRST = 5, MOST = 500, LIMIT = 10 /* seconds */ };
static size_t size = 32 << 20;
static int reduces, dead;
/* Which collective this rank is in, 0 between two, and what had come in and left when it began. */
static atomic_uint inside;
static atomic_ullong in_at_begin, out_at_begin;

/* What everybody's bytes give: all of them, one behind the other, or combined. */
static void begin_round(unsigned round) {
    static unsigned char *theirs;
    if (!theirs) CHECK((theirs = malloc(size)));
    fill(after_sent(), size, round * 64 + (unsigned)rank);
    put(sent, after_sent(), size);
    memcpy(before, after, length());
    if (reduces) memset(after_received(), 0, size);
    for (int one = 0; one < ranks; one++) {
        fill(theirs, size, round * 64 + (unsigned)one);
        if (reduces)
            for (size_t i = 0; i < size; i++) after_received()[i] ^= theirs[i];
        else
            memcpy(after_received() + (size_t)one * size, theirs, size);
    }
}

static int collective(void) {
    if (reduces) return MPI_Allreduce(sent, received, (int)size, MPI_BYTE, MPI_BXOR, MPI_COMM_WORLD);
    return MPI_Allgather(sent, (int)size, MPI_BYTE, received, (int)size, MPI_BYTE, MPI_COMM_WORLD);
}

/* In the one that dies: at least as many bytes as one rank gives must come in, and leave. Neither is through, whichever end moves the bytes: the others have
 * asked their adapter for something that cannot be done any more. */
static void *kill_inside(void *nothing) {
    for (;;) {
        unsigned now = inside;
        unsigned long long partly = came_in() - in_at_begin, out = went_out() - out_at_begin;
        if (now < FIRST || partly < size / 8 || partly >= size / 4 * 3 || out >= size / 4 * 3 || inside != now) continue;
        printf("rank %d: good: it dies with %llu of %llu bytes of collective %u in\n", rank, partly, (unsigned long long)size, now);
        fflush(stdout);
        kill(getpid(), SIGKILL);
    }
    return nothing;
}

/* In the others: the first thread stands in the collective, and MPI is not to be asked by two. */
static void *watch(void *nothing) {
    int devices = 1;
    CUDA(cudaGetDeviceCount(&devices));
    CUDA(cudaSetDevice(rank % devices));
    struct pollfd gone = {.fd = dead, .events = POLLIN};
    CHECK(poll(&gone, 1, 60000) == 1);
    double death = seconds();
    usleep(500000); /* what was still under way from the dead one is in by now */
    look("after the death");
    /* Over shared memory the adapter knows of it; over UDP its retries must end (UCX_RC_TIMEOUT, UCX_RC_RETRY_COUNT). */
    while (!counted_errors() && seconds() < death + LIMIT) usleep(10000);
    if (counted_errors()) tell_error(death);
    look("at the end");
    return nothing; /* mpirun ends us now */
}

int main(int argc, char **argv) {
    pthread_t second;
    begin(argc, argv);
    CHECK(ranks > 1 && argc > 1);
    reduces = !strcmp(argv[1], "reduce");
    if (argc > 2) size = strtoul(argv[2], NULL, 0);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    make_buffers(size, reduces ? size : size * (size_t)ranks);
    is_scratch = reduces || ranks > 2;
    dead = watch_last();
    signal(SIGTERM, SIG_IGN);
    if (dead >= 0) signal(SIGABRT, aborted);
    int is_last = rank == ranks - 1, code = MPI_SUCCESS;
    CHECK(!pthread_create(&second, NULL, is_last ? kill_inside : watch, NULL));
    for (unsigned round = 1; round < MOST && code == MPI_SUCCESS; round++) {
        begin_round(round);
        in_at_begin = came_in();
        out_at_begin = went_out();
        inside = round;
        code = collective();
        if (code == MPI_SUCCESS && !is_last && is_gone(dead)) pause(); /* the last thing that the dead one did, or MPI does not know yet */
        inside = 0;
        if (code != MPI_SUCCESS) break;
        CHECK(holds(whole, after, length()));
    }
    CHECK(!is_last);
    printf("rank %d: MPI says that it failed\n", rank);
    fflush(stdout);
    pthread_join(second, NULL);
    _exit(3);
}
