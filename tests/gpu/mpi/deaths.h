/* What the programs share in which a rank is killed: memory between guards, what it may hold when a message or a collective did not end, and the moment
 * when the other is gone. */
#ifndef DEATHS_H
#define DEATHS_H

#include "common.h"
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { GUARD = 1 << 20 };
/* What goes out of a rank's memory and what comes in, in bytes. */
static size_t size_sent, size_received;

/* What lies around the buffers of a rank: guard, sent, guard, received, guard. */
static unsigned char *whole, *sent, *received;
static unsigned char *before, *after; /* what `whole` must hold before what does not end, and behind it */
static int is_scratch; /* MPI may keep what it likes in `received` until it is done */

static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static size_t length(void) { return 3 * GUARD + size_sent + size_received; }
static unsigned char *after_sent(void) { return after + GUARD; }
static unsigned char *after_received(void) { return after + 2 * GUARD + size_sent; }

static void make_buffers(size_t to_send, size_t to_receive) {
    size_sent = to_send;
    size_received = to_receive;
    whole = buffer(length());
    sent = whole + GUARD;
    received = sent + size_sent + GUARD;
    CHECK((before = malloc(length())) && (after = malloc(length())));
    fill(after, length(), 12345u + (unsigned)rank);
    put(whole, after, length());
}

/* Whether every byte is what it was or what it was to become, and nothing has changed where nothing goes. */
static void look(const char *when) {
    unsigned char *seen = malloc(length());
    size_t fresh = 0, wrong = 0;
    CHECK(seen);
    CUDA(cudaMemcpy(seen, whole, length(), cudaMemcpyDefault));
    for (size_t i = 0; i < length(); i++) {
        int is_new = seen[i] == after[i];
        if (is_scratch && i >= 2 * GUARD + size_sent && i < 2 * GUARD + size_sent + size_received) continue;
        if (!is_new && seen[i] != before[i] && !wrong++) fprintf(stderr, "rank %d: byte %zu of %zu is %02x, not %02x or %02x\n", rank, i, length(), seen[i], before[i], after[i]);
        fresh += is_new && after[i] != before[i];
    }
    free(seen);
    CHECK(!wrong);
    printf("rank %d: good: %s: guards and what was sent are as they were, %zu bytes of what was to come are in\n", rank, when, fresh);
    tell_ways();
}

/* The last rank's process, for the others to see its end. */
static int watch_last(void) {
    int process = (int)getpid();
    MPI_Bcast(&process, 1, MPI_INT, ranks - 1, MPI_COMM_WORLD);
    if (rank == ranks - 1) return -1;
    CHECK((process = (int)syscall(SYS_pidfd_open, process, 0)) >= 0);
    /* UCX's log names processes, not ranks. */
    printf("rank %d: process %d\n", rank, (int)getpid());
    fflush(stdout);
    return process;
}

static int is_gone(int process) {
    struct pollfd ended = {.fd = process, .events = POLLIN};
    return poll(&ended, 1, 0) == 1;
}

static void tell_error(double since) {
    printf("rank %d: good: nb0 reported the death as an error after %.1f s\n", rank, seconds() - since);
    fflush(stdout);
}

/* For SIGABRT: UCX 1.13 ends whoever talked to the dead one when its adapter tells of the error. Nobody may have looked by then. */
static void aborted(int number) {
    (void)number;
    printf(counted_errors() ? "rank %d: good: nb0 reported the death as an error: UCX ended it\n" : "rank %d: UCX ended it, of no error that nb0 counted\n", rank);
    look("after the death");
    _exit(3);
}

#endif
