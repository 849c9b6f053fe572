/* A rank that is killed while messages between buffers in GPU memory are on the wire, in both directions. MPI promises nothing for that. When its adapter
 * reports the error UCX ends whoever talked to the dead one (1.13), or only says so (1.22); mpirun ends the others. What must hold: no memory of theirs has
 * changed that no message of the dead one was meant for, and what was meant to change holds nothing else than bytes of that message and what was there
 * before.
 *
 *     mpicc -O2 -o dies dies.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 --mca odls_base_sigkill_timeout 3 ./dies [BYTES]      so long mpirun waits before each of its signals to the others
 */
#include "common.h"
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { GUARD = 1 << 20, FIRST = 5, MOST = 500 };
static size_t size = 64 << 20;

/* What lies around the buffers of a rank: guard, sent, guard, received, guard. */
static unsigned char *whole, *sent, *received;
static unsigned char *before, *after; /* what `whole` must hold before the message that does not end, and behind it */
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static size_t length(void) { return 3 * GUARD + 2 * size; }

static void begin_round(unsigned round, int peer) {
    size_t at_sent = GUARD, at_received = 2 * GUARD + size;
    fill(after + at_sent, size, round * 64 + (unsigned)rank);
    put(sent, after + at_sent, size);
    memcpy(before, after, length());
    fill(after + at_received, size, round * 64 + (unsigned)peer);
}

/* Whether every byte is what it was or what it was to become, and nothing has changed where no message goes. */
static void look(const char *when) {
    unsigned char *seen = malloc(length());
    size_t fresh = 0, wrong = 0;
    CHECK(seen);
    CUDA(cudaMemcpy(seen, whole, length(), cudaMemcpyDefault));
    for (size_t i = 0; i < length(); i++) {
        int is_new = seen[i] == after[i];
        if (!is_new && seen[i] != before[i] && !wrong++) fprintf(stderr, "rank %d: byte %zu of %zu is %02x, not %02x or %02x\n", rank, i, length(), seen[i], before[i], after[i]);
        fresh += is_new && after[i] != before[i];
    }
    free(seen);
    CHECK(!wrong);
    printf("rank %d: good: %s: guards and what was sent are as they were, %zu bytes of the last message are in\n", rank, when, fresh);
    tell_ways();
}

/* The last rank exchanges with one after the other of the others, and dies inside a message. */
static void die(void) {
    unsigned long long partly = 0, whole_bytes = size;
    for (unsigned round = 0; round < MOST; round++) {
        int peer = (int)(round % (unsigned)(ranks - 1));
        MPI_Request requests[2];
        begin_round(round, peer);
        unsigned long long start = came_in();
        MPI_Irecv(received, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[0]);
        MPI_Isend(sent, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[1]);
        for (int is_done = 0; !is_done;) {
            MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE);
            partly = came_in() - start;
            if (!is_done && round >= FIRST && partly >= whole_bytes / 4 && partly < whole_bytes) {
                printf("rank %d: good: it dies with %llu of %llu bytes of a message in\n", rank, partly, whole_bytes);
                fflush(stdout);
                kill(getpid(), SIGKILL);
            }
        }
        CHECK(holds(whole, after, length()));
    }
    CHECK(!"a moment in the midst of a message");
}

static int is_gone(int process) {
    struct pollfd ended = {.fd = process, .events = POLLIN};
    return poll(&ended, 1, 0) == 1;
}

/* UCX ends a process that talked to the dead one. */
static void aborted(int number) {
    (void)number;
    printf("rank %d: UCX ended it\n", rank);
    look("at the end");
    _exit(3);
}

static void survive(int dead) {
    int dying = ranks - 1, code = MPI_SUCCESS, is_done = 1;
    MPI_Request requests[2];
    for (unsigned round = (unsigned)rank; is_done; round += (unsigned)dying) {
        begin_round(round, dying);
        MPI_Irecv(received, (int)size, MPI_BYTE, dying, 1, MPI_COMM_WORLD, &requests[0]);
        MPI_Isend(sent, (int)size, MPI_BYTE, dying, 1, MPI_COMM_WORLD, &requests[1]);
        for (is_done = 0; !is_done && !is_gone(dead);) CHECK(MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE) == MPI_SUCCESS);
        if (is_done) CHECK(holds(whole, after, length()));
    }
    /* Whatever is still under way arrives, and the adapter gives up what cannot be. MPI is not asked meanwhile. */
    usleep(700000);
    look("after the death");
    for (double end = seconds() + 1.5; code == MPI_SUCCESS && !is_done && seconds() < end;) code = MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE);
    printf("rank %d: MPI says %s\n", rank, code != MPI_SUCCESS ? "that it failed" : is_done ? "that all is done" : "nothing");
    look("at the end");
    _exit(3);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CHECK(ranks > 1);
    if (argc > 1) size = strtoul(argv[1], NULL, 0);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    whole = buffer(length());
    sent = whole + GUARD;
    received = sent + size + GUARD;
    CHECK((before = malloc(length())) && (after = malloc(length())));
    fill(after, length(), 12345u + (unsigned)rank);
    put(whole, after, length());
    int process = (int)getpid();
    MPI_Bcast(&process, 1, MPI_INT, ranks - 1, MPI_COMM_WORLD);
    if (rank == ranks - 1) die();
    CHECK((process = (int)syscall(SYS_pidfd_open, process, 0)) >= 0);
    signal(SIGABRT, aborted);
    signal(SIGTERM, SIG_IGN);
    survive(process);
}
