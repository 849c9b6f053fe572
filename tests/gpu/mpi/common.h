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
    uint32_t state = seed * 2654435761u + 1;
    for (size_t i = 0; i < length; i++) bytes[i] = (unsigned char)((state = state * 1664525u + 1013904223u) >> 24);
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
    unsigned char *seen = malloc(length + 1);
    CHECK(seen);
    CUDA(cudaMemcpy(seen, memory, length, cudaMemcpyDefault));
    int is_same = !memcmp(seen, wanted, length);
    for (size_t i = 0; !is_same && i < length; i++)
        if (seen[i] != wanted[i]) {
            fprintf(stderr, "rank %d: byte %zu of %zu is %02x, not %02x\n", rank, i, length, seen[i], wanted[i]);
            break;
        }
    free(seen);
    return is_same;
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
