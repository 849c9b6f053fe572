/* How fast: pinning and mapping, one short write, long writes and reads, all checked. Prints one line for each figure, beside what is asked
 * for. On the stand-in the figures are those of host memory and mean nothing; what is checked is the same. */
#include "gdr.h"

#include <sys/mman.h>

static int missed;

static void figure(const char *what, double seen, const char *unit, const char *asked, int good) {
    printf("figure %-34s %8.3f %-5s asked: %s\n", what, seen, unit, asked);
    if (!good) printf("goal missed: %s: %.3f %s, asked for %s\n", what, seen, unit, asked);
    missed += !good;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    size_t gib = argc > 1 ? strtoul(argv[1], NULL, 0) << 20 : 1ul << 30;
    enum { MIB = 1 << 20, TIMES = 5, SMALL = 20000, BATCHES = 20, LONG = 200, READS = 20 };
    static double took[SMALL];
    load_gdr("libgdrapi.so.2");
    load_cuda();
    gdr_t g = gdr_open();
    CHECK(g);

    /* The first pin of a process proves the way to the memory; the others only compare. */
    struct memory little = allocate(GPU_PAGE);
    double start = now();
    struct mapped first = map(g, little.at, GPU_PAGE);
    figure("first pin + map, 64 KiB", (now() - start) * 1e3, "ms", "-", 1);
    unmap(g, &first);

    struct memory large = allocate(gib);
    struct mapped m;
    for (int i = 0; i < TIMES; i++) {
        start = now();
        m = map(g, large.at, gib);
        took[i] = (now() - start) * 1e3;
        if (i < TIMES - 1) unmap(g, &m);
    }
    qsort(took, TIMES, sizeof *took, by_value);
    figure("pin + map of 1 GiB, slowest of 5", took[TIMES - 1], "ms", "< 20 ms", took[TIMES - 1] < 20);
    figure("pin + map of 1 GiB, median", took[TIMES / 2], "ms", "< 20 ms", took[TIMES / 2] < 20);

    /* Both ends of the range are the ones they should be. */
    unsigned char word[64], back[64];
    for (int i = 0; i < 2; i++) {
        size_t at = i ? gib - sizeof word : 0;
        pattern(word, sizeof word, 21 + (unsigned)i);
        GIVES(0, gdr_copy_to_mapping(m.mh, m.at + at, word, sizeof word));
        holds(large.at + at, word, sizeof word);
        GIVES(0, gdr_copy_from_mapping(m.mh, back, m.at + at, sizeof back));
        CHECK(!memcmp(word, back, sizeof back));
    }

    /* 64 bytes, with the fence that ends every copy: each for itself, and all of them by the clock around. */
    for (int i = 0; i < SMALL; i++) {
        memcpy(word, &i, sizeof i);
        start = now();
        GIVES(0, gdr_copy_to_mapping(m.mh, m.at + 4096, word, sizeof word));
        took[i] = (now() - start) * 1e6;
    }
    holds(large.at + 4096, word, sizeof word);
    qsort(took, SMALL, sizeof *took, by_value);
    /* The median of batches: a batch in which the scheduler took the CPU away says nothing. */
    double each[BATCHES];
    for (int batch = 0; batch < BATCHES; batch++) {
        start = now();
        for (int i = 0; i < SMALL / BATCHES; i++) GIVES(0, gdr_copy_to_mapping(m.mh, m.at + 4096, word, sizeof word));
        each[batch] = (now() - start) / (SMALL / BATCHES) * 1e6;
    }
    qsort(each, BATCHES, sizeof *each, by_value);
    double write = each[BATCHES / 2];
    figure("64 B write, mean of 1000, median", write, "us", "<= 0.3 us", write <= 0.3);
    figure("64 B write, median with its clock", took[SMALL / 2], "us", "-", 1);
    figure("64 B write, 99 % with its clock", took[SMALL * 99 / 100], "us", "-", 1);

    unsigned char *source = mmap(NULL, 2 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *target = source + MIB;
    CHECK(source != MAP_FAILED);
    pattern(source, MIB, 31);
    memset(target, 0, MIB);
    for (int i = 0; i < LONG; i++) {
        start = now();
        GIVES(0, gdr_copy_to_mapping(m.mh, m.at + (size_t)(i % 8) * MIB, source, MIB));
        took[i] = MIB / (now() - start) * 1e-9;
    }
    holds(large.at, source, MIB);
    holds(large.at + 7 * MIB, source, MIB);
    qsort(took, LONG, sizeof *took, by_value);
    figure("1 MiB write, median", took[LONG / 2], "GB/s", ">= 15 GB/s", took[LONG / 2] >= 15);
    figure("1 MiB write, best", took[LONG - 1], "GB/s", "-", 1);

    pattern(source, MIB, 32);
    GIVES(0, cuMemcpyHtoD_v2(large.at, source, MIB));
    for (int i = 0; i < READS; i++) {
        start = now();
        GIVES(0, gdr_copy_from_mapping(m.mh, target, m.at, MIB));
        took[i] = MIB / (now() - start) * 1e-9;
    }
    CHECK(!memcmp(source, target, MIB));
    qsort(took, READS, sizeof *took, by_value);
    figure("1 MiB read, median", took[READS / 2], "GB/s", ">= 0.6 GB/s", took[READS / 2] >= 0.6);
    start = now();
    for (int i = 0; i < 1000; i++) GIVES(0, gdr_copy_from_mapping(m.mh, back, m.at, sizeof back));
    figure("64 B read, mean", (now() - start) * 1e3, "us", "-", 1);

    unmap(g, &m);
    GIVES(0, gdr_close(g));
    printf("%d figures missed what was asked for; all bytes were right\n", missed);
    return 0;
}
