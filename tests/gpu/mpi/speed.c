/* Latency, bandwidth and bandwidth in both directions at once between two ranks, by MPI's send and receive on buffers in GPU memory. What arrives is
 * checked before and after every measurement. One line for each size: what was measured, and by which way the bytes of all its messages came in
 * over nb0.
 *
 *     mpicc -O2 -o speed speed.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 ./speed [device|host] [latency|bandwidth|bidirectional]...
 */
#include "common.h"

enum { WINDOW = 16, LARGEST = 64 << 20 };
static const size_t SIZES[] = {1, 8, 64, 512, 4096, 8192, 16384, 32768, 65536, 262144, 1 << 20, 4 << 20, 16 << 20, 64 << 20};

static unsigned char *out, *in, *pattern;

/* Long messages need few turns to be measured, and short ones many. */
static int turns_for(size_t size) {
    return size <= 8192 ? 400 : size <= 262144 ? 100 : size <= 4 << 20 ? 20 : 6;
}

/* How many messages are on their way at once. */
static int window_for(size_t size) {
    return size <= 4 << 20 ? WINDOW : 4;
}

/* How many messages of a window have a place of their own. */
static int places_for(size_t size) {
    return size * WINDOW <= LARGEST ? WINDOW : (int)(LARGEST / size);
}

static double latency(size_t size, int turns) {
    int peer = 1 - rank;
    double start = MPI_Wtime();
    for (int turn = 0; turn < turns; turn++) {
        if (rank == 0) MPI_Send(out, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        MPI_Recv(in, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (rank == 1) MPI_Send(out, (int)size, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
    }
    return (MPI_Wtime() - start) / turns / 2;
}

/* Windows of messages from rank 0 to rank 1, and in the other direction too if asked for; an answer ends each. */
static double stream(size_t size, int turns, int is_both) {
    MPI_Request requests[2 * WINDOW];
    int peer = 1 - rank, window = window_for(size), places = places_for(size), sends = is_both || rank == 0, receives = is_both || rank == 1;
    unsigned char answer = 0;
    double start = MPI_Wtime();
    for (int turn = 0; turn < turns; turn++) {
        int count = 0;
        for (int i = 0; receives && i < window; i++)
            MPI_Irecv(in + (size_t)(i % places) * size, (int)size, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[count++]);
        for (int i = 0; sends && i < window; i++)
            MPI_Isend(out + (size_t)(i % places) * size, (int)size, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &requests[count++]);
        MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
        if (rank == 1) MPI_Send(&answer, 1, MPI_BYTE, 0, 3, MPI_COMM_WORLD);
        if (rank == 0) MPI_Recv(&answer, 1, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
    return (MPI_Wtime() - start) / turns;
}

static double once(const char *what, size_t size, int turns) {
    return !strcmp(what, "latency") ? latency(size, turns) : stream(size, turns, !strcmp(what, "bidirectional"));
}

/* Runs with bytes that were never there before, and holds what came against what was sent. */
static double checked(const char *what, size_t size, int turns, unsigned seed) {
    int is_latency = !strcmp(what, "latency"), receives = is_latency || rank == 1 || !strcmp(what, "bidirectional");
    size_t used = is_latency ? size : size * (size_t)places_for(size);
    fill(pattern, used, seed * 2 + (unsigned)rank);
    put(out, pattern, used);
    clear(in, used);
    MPI_Barrier(MPI_COMM_WORLD);
    double seconds = once(what, size, turns);
    fill(pattern, used, seed * 2 + 1 - (unsigned)rank);
    CHECK(!receives || holds(in, pattern, used));
    return seconds;
}

static void measure(const char *what) {
    for (size_t s = 0; s < sizeof SIZES / sizeof *SIZES; s++) {
        size_t size = SIZES[s];
        int is_latency = !strcmp(what, "latency"), turns = turns_for(size);
        if (!is_latency) turns = turns / 10 + 2;
        checked(what, size, 2, 100 + (unsigned)s);
        struct counted before = count_in();
        double seconds = checked(what, size, turns, 200 + (unsigned)s);
        MPI_Barrier(MPI_COMM_WORLD);
        struct counted in_each = count_since(before);
        unsigned long long mine[3] = {in_each.cpu, in_each.window + in_each.engine, in_each.staged}, all[3];
        MPI_Reduce(mine, all, 3, MPI_UNSIGNED_LONG_LONG, MPI_SUM, 0, MPI_COMM_WORLD);
        /* Every message of the measurement, in both directions where there are two. */
        unsigned long long messages = is_latency ? 2ull * (unsigned)turns : (unsigned long long)turns * (unsigned)window_for(size);
        double figure = seconds * 1e6;
        if (!strcmp(what, "bidirectional")) messages *= 2;
        if (!is_latency) figure = (double)size * (double)messages / turns / seconds / 1e9;
        if (rank == 0)
            printf("%s %s %zu %.3f %s moved %llu host %llu direct %llu staged %llu\n", what, on_device ? "device" : "host", size, figure,
                   is_latency ? "us" : "GB/s", messages * size, all[0], all[1], all[2]);
        fflush(stdout);
    }
}

int main(int argc, char **argv) {
    begin(argc, argv);
    CHECK(ranks == 2);
    int at = 1;
    if (at < argc && (!strcmp(argv[at], "device") || !strcmp(argv[at], "host"))) on_device = !strcmp(argv[at++], "device");
    out = buffer(LARGEST);
    in = buffer(LARGEST);
    CHECK((pattern = malloc(LARGEST)) != NULL);
    if (at == argc)
        for (const char *const *what = (const char *const[]){"latency", "bandwidth", "bidirectional", NULL}; *what; what++) measure(*what);
    for (; at < argc; at++) measure(argv[at]);
    release(out);
    release(in);
    if (rank == 0) printf("speed: every byte was right\n");
    MPI_Finalize();
    return 0;
}
