/* A rank that is killed while messages between buffers in GPU memory are on the wire, in both directions. MPI promises nothing for that. When its adapter
 * reports the error UCX ends whoever talked to the dead one (1.13), or only says so (1.22); mpirun ends the others. What must hold: no memory of theirs has
 * changed that no message of the dead one was meant for, and what was meant to change holds nothing else than bytes of that message and what was there
 * before. `exits`: it ends by exit(0) there, without MPI_Finalize and with all that is registered; and every rank has had children before, which are
 * forked while a message is under way and take nothing of it along.
 *
 *     mpicc -O2 -o dies dies.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 --mca odls_base_sigkill_timeout 3 ./dies [BYTES [exits]]      so long mpirun waits before each of its signals to the others
 */
#include "deaths.h"
#include <sys/wait.h>

enum { FIRST = 5, MOST = 500, LIMIT = 4 /* seconds */ };
static size_t size = 64 << 20;
static int exits;

/* One that ends at once, or becomes another program, as the children of launchers and data loaders do. */
static void have_child(int becomes_another) {
    int status;
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        if (becomes_another) execlp("true", "true", (char *)NULL);
        _exit(becomes_another);
    }
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && !WEXITSTATUS(status));
}

static void begin_round(unsigned round, int peer) {
    fill(after_sent(), size, round * 64 + (unsigned)rank);
    put(sent, after_sent(), size);
    memcpy(before, after, length());
    fill(after_received(), size, round * 64 + (unsigned)peer);
}

static void begin_message(unsigned round, int peer, MPI_Request *requests) {
    MPI_Irecv(received, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(sent, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &requests[1]);
    if (exits && round < FIRST) have_child(round % 2);
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
        begin_message(round, peer, requests);
        for (int is_done = 0; !is_done;) {
            MPI_Testall(2, requests, &is_done, MPI_STATUSES_IGNORE);
            partly = came_in() - start;
            if (!is_done && round >= FIRST && partly >= whole_bytes / 4 && partly < whole_bytes && went_out() - out < whole_bytes) {
                printf("rank %d: good: it %s with %llu of %llu bytes of a message in\n", rank, exits ? "exits" : "dies", partly, whole_bytes);
                fflush(stdout);
                if (exits) exit(0);
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
        begin_message(round, dying, requests);
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
    exits = argc > 2 && !strcmp(argv[2], "exits");
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    make_buffers(size, size);
    int dead = watch_last();
    if (rank == ranks - 1) die();
    signal(SIGABRT, aborted);
    signal(SIGTERM, SIG_IGN);
    survive(dead);
}
