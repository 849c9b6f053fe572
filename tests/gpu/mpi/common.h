/* What the MPI programs on device buffers share: CUDA's calls checked, buffers, and patterns in them. */
#ifndef COMMON_H
#define COMMON_H

#include "../counted.h"
#include <cuda_runtime_api.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int rank, ranks;

#define CHECK(what)                                                                       \
    do {                                                                                  \
        if (!(what)) {                                                                    \
            fprintf(stderr, "rank %d: line %d: FAILED: %s\n", rank, __LINE__, #what);     \
            MPI_Abort(MPI_COMM_WORLD, 1);                                                 \
        }                                                                                 \
    } while (0)
#define CUDA(call)                                                                        \
    do {                                                                                  \
        cudaError_t error_ = (call);                                                      \
        if (error_ != cudaSuccess) fprintf(stderr, "rank %d: %s\n", rank, cudaGetErrorString(error_)); \
        CHECK(error_ == cudaSuccess);                                                     \
    } while (0)

/* Bytes that differ from place to place, from sender to sender and from message to message. */
static inline void fill(unsigned char *bytes, size_t length, unsigned seed) {
    uint64_t state = seed * 2654435761ull + 1;
    for (size_t i = 0; i < length; i += sizeof state) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        uint64_t word = state ^ state >> 29;
        memcpy(bytes + i, &word, length - i < sizeof word ? length - i : sizeof word);
    }
}

/* Memory of the GPU, or of the host, as one kind of buffer. */
static int on_device = 1;

static inline void *buffer(size_t length) {
    void *memory = NULL;
    if (on_device)
        CUDA(cudaMalloc(&memory, length));
    else
        CHECK((memory = aligned_alloc(4096, (length + 4095) / 4096 * 4096)) != NULL);
    return memory;
}

static inline void release(void *memory) {
    if (on_device)
        CUDA(cudaFree(memory));
    else
        free(memory);
}

/* Pageable copies into the GPU return before the bytes are there: whoever reads them next may be an adapter. */
static inline void put(void *to, const void *from, size_t length) {
    CUDA(cudaMemcpy(to, from, length, cudaMemcpyDefault));
    CUDA(cudaDeviceSynchronize());
}

static inline void clear(void *memory, size_t length) {
    if (on_device) {
        CUDA(cudaMemset(memory, 0xee, length));
        CUDA(cudaDeviceSynchronize());
    } else {
        memset(memory, 0xee, length);
    }
}

static inline int holds(const void *memory, const unsigned char *wanted, size_t length) {
    enum { CHUNK = 16 << 20 };
    static unsigned char *seen;
    if (!seen) CHECK((seen = malloc(CHUNK)) != NULL);
    for (size_t at = 0; at < length; at += CHUNK) {
        size_t here = length - at < CHUNK ? length - at : CHUNK;
        CUDA(cudaMemcpy(seen, (const unsigned char *)memory + at, here, cudaMemcpyDefault));
        if (!memcmp(seen, wanted + at, here)) continue;
        for (size_t i = 0; i < here; i++)
            if (seen[i] != wanted[at + i]) {
                fprintf(stderr, "rank %d: byte %zu of %zu is %02x, not %02x\n", rank, at + i, length, seen[i], wanted[at + i]);
                return 0;
            }
    }
    return 1;
}

/* Bytes that came in over nb0, and that left, whichever way. */
static inline unsigned long long came_in(void) {
    struct counted in = count_in();
    return in.cpu + in.window + in.engine + in.staged;
}

static inline unsigned long long went_out(void) {
    struct counted out = count_out();
    return out.cpu + out.window + out.engine + out.staged;
}

static inline void tell_ways(void) {
    struct counted in = count_in();
    printf("rank %d: in over nb0: %llu bytes host, %llu direct, %llu staged\n", rank, in.cpu, in.window + in.engine, in.staged);
    fflush(stdout);
}

static inline void begin(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &ranks);
    int devices = 0;
    CUDA(cudaGetDeviceCount(&devices));
    CHECK(devices > 0);
    CUDA(cudaSetDevice(rank % devices));
    CUDA(cudaFree(NULL));
}

#endif
