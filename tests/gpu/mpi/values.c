/* MPI on buffers in GPU memory, every byte checked: messages of many sizes and alignments both ways at once, memory that is freed and allocated again
 * between messages, data with gaps, collectives, one-sided access. Any number of ranks from two on.
 *
 *     mpicc -O2 -o values values.c -I CUDA/include -L CUDA/lib64 -lcudart -ldl
 *     mpirun -np 2 ./values [messages] [freed] [gaps] [collectives] [one-sided]      without a name: all of these
 */
#include "common.h"

static unsigned char *pattern;
enum { LARGEST = 16 << 20 };

static void good(const char *what) {
    MPI_Barrier(MPI_COMM_WORLD);
    if (rank == 0) printf("good: %s\n", what);
    fflush(stdout);
}

/* A message to the next rank while one comes from the last. */
static void exchange(unsigned char *out, unsigned char *in, size_t size, unsigned seed) {
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    MPI_Request requests[2];
    fill(pattern, size, seed + (unsigned)rank);
    put(out, pattern, size);
    clear(in, size);
    MPI_Irecv(in, (int)size, MPI_BYTE, last, 7, MPI_COMM_WORLD, &requests[0]);
    MPI_Isend(out, (int)size, MPI_BYTE, next, 7, MPI_COMM_WORLD, &requests[1]);
    MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
    fill(pattern, size, seed + (unsigned)last);
    CHECK(holds(in, pattern, size));
}

static void messages(void) {
    static const size_t sizes[] = {0, 1, 3, 8, 63, 64, 100, 1000, 4096, 8191, 8193, 65536, 100003, 1 << 20, (4 << 20) + 5, LARGEST};
    unsigned char *out = buffer(LARGEST + 64), *in = buffer(LARGEST + 64);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
        for (size_t shift = 0; shift < 2; shift++) exchange(out + shift, in + 3 * shift, sizes[s], (unsigned)(s * 2 + shift) * 64);
    release(out);
    release(in);
    good("messages of 16 sizes, aligned and not, both ways at once");
}

/* CUDA gives the same addresses out again: whoever remembers a registration must have heard that the memory was freed. */
static void freed(void) {
    for (unsigned turn = 0; turn < 40; turn++) {
        size_t size = turn % 4 == 3 ? 300000 : (size_t)(1 + turn % 3) << 20;
        unsigned char *between = turn % 2 ? buffer(3 << 20) : NULL, *out = buffer(size), *in = buffer(size);
        exchange(out, in, size, turn * 64 + 9000);
        release(in);
        release(out);
        if (between) release(between);
    }
    good("memory freed and allocated again between messages, 40 times");
}

/* Every second piece of 1000 bytes, then columns of a matrix. */
static void gaps(void) {
    enum { PIECES = 300, PIECE = 1000, STRIDE = 2000, SPAN = PIECES * STRIDE };
    unsigned char *out = buffer(SPAN), *in = buffer(SPAN), *wanted = malloc(SPAN);
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    MPI_Datatype pieces;
    CHECK(wanted);
    MPI_Type_vector(PIECES, PIECE, STRIDE, MPI_BYTE, &pieces);
    MPI_Type_commit(&pieces);
    fill(pattern, SPAN, 77u + (unsigned)rank);
    put(out, pattern, SPAN);
    clear(in, SPAN);
    MPI_Sendrecv(out, 1, pieces, next, 8, in, 1, pieces, last, 8, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    fill(pattern, SPAN, 77u + (unsigned)last);
    memset(wanted, 0xee, SPAN);
    for (int i = 0; i < PIECES; i++) memcpy(wanted + i * STRIDE, pattern + i * STRIDE, PIECE);
    CHECK(holds(in, wanted, SPAN));
    MPI_Type_free(&pieces);
    release(out);
    release(in);
    free(wanted);
    good("data with gaps");
}

static void collectives(void) {
    enum { COUNT = 100000 };
    size_t n = COUNT, all = n * (size_t)ranks;
    float *host = malloc(all * sizeof *host), *wanted = malloc(all * sizeof *wanted);
    float *one = buffer(n * sizeof *one), *many = buffer(all * sizeof *many), *others = buffer(all * sizeof *others);
    CHECK(host && wanted);
    for (size_t i = 0; i < n; i++) host[i] = (float)((rank + 1) * (int)(i % 1000));
    put(one, host, n * sizeof *host);

    clear(many, n * sizeof *many);
    MPI_Allreduce(one, many, COUNT, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
    for (size_t i = 0; i < n; i++) wanted[i] = (float)(ranks * (ranks + 1) / 2 * (int)(i % 1000));
    CHECK(holds(many, (unsigned char *)wanted, n * sizeof *wanted));

    clear(many, all * sizeof *many);
    MPI_Allgather(one, COUNT, MPI_FLOAT, many, COUNT, MPI_FLOAT, MPI_COMM_WORLD);
    for (size_t i = 0; i < all; i++) wanted[i] = (float)((int)(i / n + 1) * (int)(i % n % 1000));
    CHECK(holds(many, (unsigned char *)wanted, all * sizeof *wanted));

    for (size_t i = 0; i < all; i++) host[i] = (float)(rank * 1000000 + (int)(i / n) * 100000 + (int)(i % n));
    put(many, host, all * sizeof *host);
    clear(others, all * sizeof *others);
    MPI_Alltoall(many, COUNT, MPI_FLOAT, others, COUNT, MPI_FLOAT, MPI_COMM_WORLD);
    for (size_t i = 0; i < all; i++) wanted[i] = (float)((int)(i / n) * 1000000 + rank * 100000 + (int)(i % n));
    CHECK(holds(others, (unsigned char *)wanted, all * sizeof *wanted));

    for (int root = 0; root < ranks; root++) {
        fill((unsigned char *)host, n * sizeof *host, 500u + (unsigned)root);
        if (rank == root)
            put(one, host, n * sizeof *host);
        else
            clear(one, n * sizeof *one);
        MPI_Bcast(one, COUNT, MPI_FLOAT, root, MPI_COMM_WORLD);
        CHECK(holds(one, (unsigned char *)host, n * sizeof *host));
    }
    release(one);
    release(many);
    release(others);
    free(host);
    free(wanted);
    good("all-reduce, all-gather, all-to-all and broadcast");
}

static void one_sided(void) {
    enum { SIZE = 1 << 20 };
    unsigned char *exposed = buffer(SIZE), *mine = buffer(SIZE);
    int next = (rank + 1) % ranks, last = (rank + ranks - 1) % ranks;
    MPI_Win window;
    fill(pattern, SIZE, 600u + (unsigned)rank);
    put(mine, pattern, SIZE);
    clear(exposed, SIZE);
    MPI_Win_create(exposed, SIZE, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window);
    MPI_Win_fence(0, window);
    MPI_Put(mine, SIZE, MPI_BYTE, next, 0, SIZE, MPI_BYTE, window);
    MPI_Win_fence(0, window);
    fill(pattern, SIZE, 600u + (unsigned)last);
    CHECK(holds(exposed, pattern, SIZE));
    clear(mine, SIZE);
    MPI_Win_fence(0, window);
    MPI_Get(mine, SIZE, MPI_BYTE, next, 0, SIZE, MPI_BYTE, window);
    MPI_Win_fence(0, window);
    fill(pattern, SIZE, 600u + (unsigned)rank);
    CHECK(holds(mine, pattern, SIZE));
    MPI_Win_free(&window);
    release(exposed);
    release(mine);
    good("one-sided put and get");
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        void (*run)(void);
    } cases[] = {{"messages", messages}, {"freed", freed}, {"gaps", gaps}, {"collectives", collectives}, {"one-sided", one_sided}};
    begin(argc, argv);
    CHECK((pattern = malloc(LARGEST)) != NULL);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        int is_wanted = argc == 1;
        for (int at = 1; at < argc; at++) is_wanted |= !strcmp(argv[at], cases[i].name);
        if (is_wanted) cases[i].run();
    }
    tell_ways();
    MPI_Finalize();
    if (rank == 0) printf("values: every byte was right\n");
    return 0;
}
