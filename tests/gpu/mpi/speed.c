/* Latency, bandwidth and bandwidth in both directions at once between two ranks, by MPI's send and receive on buffers in GPU memory. Every message of a
 * measurement has bytes of its own and a place of its own, at both ends: what arrived is compared as a whole when the clock has stopped, so that a message
 * that was lost, repeated or put elsewhere is seen. One line for each size: what was measured, and by which way the bytes of all its messages came in
 * over nb0.
 *
 *     mpicc -O2 -o speed speed.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 ./speed [device|host] [up-to BYTES] [at-most TURNS] [latency|bandwidth|bidirectional]...
 */
#include "common.h"

enum { WINDOW = 16 };
static const size_t SIZES[] = {1, 8, 64, 512, 4096, 8192, 16384, 32768, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

static unsigned char *out, *in, *pattern;
static size_t largest = 64 << 20;
static int most_turns = 400;

/* Long messages need few turns to be measured, and short ones many. */
static int turns_for(const char *what, size_t size) {
    int turns = size <= 8192 ? 400 : size <= 262144 ? 100 : size <= 4 << 20 ? 20 : 6;
    if (strcmp(what, "latency")) turns = turns / 10 + 2;
    return turns < most_turns ? turns : most_turns;
}

/* How many messages of each direction are on their way at once. */
static int window_for(const char *what, size_t size) {
    return !strcmp(what, "latency") ? 1 : size <= 4 << 20 ? WINDOW : 4;
}

/* One message there and one back, again and again. */
static double latency(size_t size, int turns) {
    int peer = 1 - rank;
    double start = MPI_Wtime();
    for (int turn = 0; turn < turns; turn++) {
        size_t at = (size_t)turn * size;
        if (rank == 0) MPI_Send(out + at, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        MPI_Recv(in + at, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(out + at, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
    }
    return (MPI_Wtime() - start) / turns / 2;
}

/* Windows of messages from rank 0 to rank 1, and in the other direction too if asked for; an answer ends each. */
static double stream(size_t size, int turns, int window, int is_both) {
    MPI_Request requests[2 * WINDOW];
    int peer = 1 - rank, sends = is_both || rank == 0, receives = is_both || rank == 1;
    unsigned char answer = 0;
    double start = MPI_Wtime();
    for (int turn = 0; turn < turns; turn++) {
        size_t at = (size_t)turn * (size_t)window * size;
        int count = 0;
        for (int i = 0; receives && i < window; i++) MPI_Irecv(in + at + (size_t)i * size, (int)size, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[count++]);
        for (int i = 0; sends && i < window; i++) MPI_Isend(out + at + (size_t)i * size, (int)size, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[count++]);
        MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
        if (rank == 1) MPI_Send(&answer, 1, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
        if (rank == 0) MPI_Recv(&answer, 1, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    return (MPI_Wtime() - start) / turns;
}

/* Runs with bytes that were never there before, and holds all that came against all that was sent. */
static double checked(const char *what, size_t size, int turns, unsigned seed) {
    int is_latency = !strcmp(what, "latency"), is_both = !strcmp(what, "bidirectional"), window = window_for(what, size);
    size_t used = size * (size_t)window * (size_t)turns;
    fill(pattern, used, seed * 2 + (unsigned)rank);
    put(out, pattern, used);
    clear(in, used);
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = is_latency ? latency(size, turns) : stream(size, turns, window, is_both);
    fill(pattern, used, seed * 2 + 1 - (unsigned)rank);
    CHECK(!(is_latency || is_both || rank == 1) || holds(in, pattern, used));
    return seconds;
}

static void measure(const char *what) {
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES && SIZES[s] <= largest; s++) {
        size_t size = SIZES[s];
        int is_latency = !strcmp(what, "latency"), turns = turns_for(what, size);
        checked(what, size, size > 1 << 20 ? 1 : 2, 100 + (unsigned)s); /* to warm up */
        struct counted before = count_in();
        double seconds = checked(what, size, turns, 200 + (unsigned)s);
        MPI_Barrier(MPI_COMM_WORLD);
        struct counted in_each = count_since(before);
        unsigned long long mine[3] = {in_each.cpu, in_each.window + in_each.engine, in_each.staged}, all[3];
        MPI_Reduce(mine, all, 3, MPI_UNSIGNED_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
        /* Every message of the measurement, in both directions where there are two. */
        unsigned long long messages = (unsigned long long)turns * (unsigned)window_for(what, size) * (strcmp(what, "bandwidth") ? 2 : 1);
        double figure = is_latency ? seconds * 1e6 : (double)size * (double)messages / turns / seconds / 1e9;
        if (rank == 0)
            printf("%s %s %zu %.3f %s moved %llu host %llu direct %llu staged %llu\n", what, on_device ? "device" : "host", size, figure,
                   is_latency ? "us" : "GB/s", messages * size, all[0], all[1], all[2]);
        fflush(stdout);
    }
}

/* Room for all messages of the largest measurement. */
static size_t room(void) {
    size_t most = 0;
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES && SIZES[s] <= largest; s++)
        for (int i = 0; i < 2; i++) {
            const char *what = i ? "latency" : "bandwidth";
            size_t used = SIZES[s] * (size_t)window_for(what, SIZES[s]) * (size_t)turns_for(what, SIZES[s]);
            if (used > most) most = used;
        }
    return most;
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CHECK(ranks == 2);
    int at = 1;
    if (at < argc && (!strcmp(argv[at], "device") || !strcmp(argv[at], "host"))) on_device = !strcmp(argv[at++], "device");
    if (at + 1 < argc && !strcmp(argv[at], "up-to")) largest = strtoul(argv[at + 1], NULL, 0), at += 2;
    if (at + 1 < argc && !strcmp(argv[at], "at-most")) most_turns = atoi(argv[at + 1]), at += 2;
    CHECK(most_turns > 0);
    out = buffer(room());
    in = buffer(room());
    CHECK((pattern = malloc(room())) != NULL);
    if (at == argc)
        for (const char *const *what = (const char *const[]){"latency", "bandwidth", "bidirectional", NULL}; *what; what++) measure(*what);
    for (; at < argc; at++) measure(argv[at]);
    release(out);
    release(in);
    if (rank == 0) printf("speed: every byte was right\n");
    MPI_Finalize();
    return 0;
}
