/* A small MPI program that checks what it gets: point to point in many sizes, all-reduce, all-to-all, one-sided put, get and
 * accumulate. Ends with 0 when every byte was right on every rank. */
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, size, wrong;

static unsigned char pattern(int from, int to, size_t at) {
    return (unsigned char)(from * 31 + to * 17 + at * 7 + at / 251);
}

static void check(int good, const char *what) {
    if (!good && wrong++ < 5) printf("rank %d: %s is wrong\n", rank, what);
}

/* Every rank sends to its neighbour and receives from the other one, from nothing to 4 MiB. */
static void point_to_point(void) {
    static const size_t sizes[] = {0, 1, 8, 100, 1000, 8192, 8193, 65536, 100003, 1 << 20, 4 << 20};
    int next = (rank + 1) % size, last = (rank + size - 1) % size;
    unsigned char *out = malloc(4 << 20), *in = malloc(4 << 20);
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
        MPI_Request requests[2];
        for (size_t i = 0; i < sizes[s]; i++) out[i] = pattern(rank, next, i);
        memset(in, 0, sizes[s]);
        MPI_Irecv(in, (int)sizes[s], MPI_BYTE, last, 7, MPI_COMM_WORLD, &requests[0]);
        MPI_Isend(out, (int)sizes[s], MPI_BYTE, next, 7, MPI_COMM_WORLD, &requests[1]);
        MPI_Waitall(2, requests, MPI_STATUSES_IGNORE);
        int good = 1;
        for (size_t i = 0; i < sizes[s]; i++) good &= in[i] == pattern(last, rank, i);
        check(good, "a message");
    }
    free(out);
    free(in);
}

static void collectives(void) {
    enum { COUNT = 20000 };
    long *values = malloc(COUNT * sizeof *values), *sums = malloc(COUNT * sizeof *sums);
    for (long i = 0; i < COUNT; i++) values[i] = (rank + 1) * (i + 1);
    MPI_Allreduce(values, sums, COUNT, MPI_LONG, MPI_SUM, MPI_COMM_WORLD);
    int good = 1;
    for (long i = 0; i < COUNT; i++) good &= sums[i] == (i + 1) * size * (size + 1) / 2;
    check(good, "the sum of all");

    int *out = malloc((size_t)size * COUNT * sizeof *out), *in = malloc((size_t)size * COUNT * sizeof *in);
    for (int to = 0; to < size; to++)
        for (int i = 0; i < COUNT; i++) out[to * COUNT + i] = rank * 1000000 + to * 100000 + i;
    MPI_Alltoall(out, COUNT, MPI_INT, in, COUNT, MPI_INT, MPI_COMM_WORLD);
    good = 1;
    for (int from = 0; from < size; from++)
        for (int i = 0; i < COUNT; i++) good &= in[from * COUNT + i] == from * 1000000 + rank * 100000 + i;
    check(good, "all to all");
    free(values), free(sums), free(out), free(in);
}

static void one_sided(void) {
    enum { COUNT = 10000 };
    long *window_memory, *got = malloc(COUNT * sizeof *got), *put = malloc(COUNT * sizeof *put), one = 1;
    int next = (rank + 1) % size, last = (rank + size - 1) % size;
    MPI_Win window;
    MPI_Win_allocate((COUNT + 1) * sizeof *window_memory, sizeof *window_memory, MPI_INFO_NULL, MPI_COMM_WORLD, &window_memory, &window);
    for (int i = 0; i <= COUNT; i++) window_memory[i] = 0;
    for (int i = 0; i < COUNT; i++) put[i] = rank * 100000L + i;
    MPI_Win_fence(0, window);
    MPI_Put(put, COUNT, MPI_LONG, next, 0, COUNT, MPI_LONG, window);
    MPI_Win_fence(0, window);
    MPI_Get(got, COUNT, MPI_LONG, next, 0, COUNT, MPI_LONG, window);
    for (int i = 0; i < 10; i++) MPI_Accumulate(&one, 1, MPI_LONG, 0, COUNT, 1, MPI_LONG, MPI_SUM, window);
    MPI_Win_fence(0, window);
    int good = 1;
    for (int i = 0; i < COUNT; i++) good &= window_memory[i] == last * 100000L + i && got[i] == put[i];
    check(good, "what was put and got");
    check(rank != 0 || window_memory[COUNT] == 10L * size, "the accumulated count");
    MPI_Win_free(&window);
    free(got), free(put);
}

int main(int argc, char **argv) {
    int all;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    point_to_point();
    collectives();
    one_sided();
    MPI_Allreduce(&wrong, &all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (rank == 0) printf("%d ranks, %d wrong\n", size, all);
    MPI_Finalize();
    return all != 0;
}
