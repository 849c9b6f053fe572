/* CUDA's runtime for the MPI programs of tests/gpu/mpi, on host memory: what they check does not depend on where the memory lies. */
#ifndef CUDA_RUNTIME_API_H
#define CUDA_RUNTIME_API_H

#include <stdlib.h>
#include <string.h>

typedef int cudaError_t;
enum { cudaSuccess, cudaErrorMemoryAllocation = 2 };
enum cudaMemcpyKind { cudaMemcpyDefault = 4 };

static inline const char *cudaGetErrorString(cudaError_t error) { return error ? "out of memory" : "no error"; }
static inline cudaError_t cudaGetDeviceCount(int *count) { return *count = 1, cudaSuccess; }
static inline cudaError_t cudaSetDevice(int device) { return (void)device, cudaSuccess; }
static inline cudaError_t cudaDeviceSynchronize(void) { return cudaSuccess; }

static inline cudaError_t cudaMalloc(void **memory, size_t length) {
    *memory = aligned_alloc(4096, (length + 4095) / 4096 * 4096);
    return *memory ? cudaSuccess : cudaErrorMemoryAllocation;
}

static inline cudaError_t cudaFree(void *memory) { return free(memory), cudaSuccess; }

static inline cudaError_t cudaMemcpy(void *to, const void *from, size_t length, enum cudaMemcpyKind kind) {
    return (void)kind, memcpy(to, from, length), cudaSuccess;
}

static inline cudaError_t cudaMemset(void *memory, int value, size_t length) { return memset(memory, value, length), cudaSuccess; }

#endif
