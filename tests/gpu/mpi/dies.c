/* A rank that is killed while messages between buffers in GPU memory are on the wire, in both directions. MPI promises nothing for that. When its adapter
 * reports the error UCX ends whoever talked to the dead one (1.13), or only says so (1.22); mpirun ends the others. What must hold: no memory of theirs has
 * changed that no message of the dead one was meant for, and what was meant to change holds nothing else than bytes of that message and what was there
 * before.
 *
 *     mpicc -O2 -o dies dies.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 --mca odls_base_sigkill_timeout 3 ./dies [BYTES]      so long mpirun waits before each of its signals to the others
 */
#include "deaths.h"

enum { FIRST = 5, MOST = 500, LIMIT = 4 /* seconds */ };
static size_t size = 64 << 20;

static void begin_round(unsigned round, int peer) {
    fill(after_sent(), size, round * 64 + (unsigned)rank);
    put(sent, after_sent(), size);
    memcpy(before, after, length());
    fill(after_received(), size, round * 64 + (unsigned)peer);
}

/* The last rank exchanges with one after the other of the others, and dies inside a message. Neither direction is through by then, whichever end moves the
 * bytes: the other has asked its adapter for something that cannot be done any more. */
static void die(void) {
    unsigned long long partly = 0, whole_bytes = size;
    for (unsigned round = 0; round < MOST; round++) {
        int peer = (int)(round % (unsigned)(ranks - 1));
        MPI_Request requests[2];
        begin_round(round, peer);
        unsigned long long start = came_in(), out = went_out();
        MPI_Irecv(received, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[0]);
        MPI_Isend(sent, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[1]);
        for (int is_done = 0; !is_done;) {
            MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE);
            partly = came_in() - start;
            if (!is_done && round >= FIRST && partly >= whole_bytes / 4 && partly < whole_bytes && went_out() - out < whole_bytes) {
                printf("rank %d: good: it dies with %llu of %llu bytes of a message in\n", rank, partly, whole_bytes);
                fflush(stdout);
                kill(getpid(), SIGKILL);
            }
        }
        CHECK(holds(whole, after, length()));
    }
    CHECK(!"a moment in the midst of a message");
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
    double death = seconds();
    /* Whatever is still under way arrives, and the adapter gives up what cannot be. MPI is not asked meanwhile. */
    usleep(700000);
    look("after the death");
    /* Over shared memory the adapter knows of the death; over UDP its retries must end (UCX_RC_TIMEOUT, UCX_RC_RETRY_COUNT). */
    int is_told = counted_errors();
    if (is_told) tell_error(death); /* before UCX is asked, which may end us then */
    do {
        code = MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE);
        if (!is_told && (is_told = counted_errors())) tell_error(death);
    } while (code == MPI_SUCCESS && !is_done && !is_told && seconds() < death + LIMIT);
    printf("rank %d: MPI says %s\n", rank, code != MPI_SUCCESS ? "that it failed" : is_done ? "that all is done" : "nothing");
    look("at the end");
    _exit(3);
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CHECK(ranks > 1);
    if (argc > 1) size = strtoul(argv[1], NULL, 0);
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    make_buffers(size, size);
    int dead = watch_last();
    if (rank == ranks - 1) die();
    signal(SIGABRT, aborted);
    signal(SIGTERM, SIG_IGN);
    survive(dead);
}
