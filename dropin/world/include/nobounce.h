/* nobounce.h: the host side of GPU-initiated operations. The device side is nobounce.cuh.
 * SPDX-License-Identifier: MIT OR Apache-2.0
 *
 *     nb_options options = NB_OPTIONS;
 *     options.rank = rank;
 *     options.ranks = 2;
 *     char error[512];
 *     nb_world *world = nb_join(&options, error, sizeof error);
 *     kernel<<<1, 32>>>((nobounce::Channel *)nb_channel(world, 0));
 *     cudaDeviceSynchronize();
 *     nb_barrier(world);
 *     nb_leave(world);
 *
 * Link with -lnobounce. Every function may be called from any thread; those of one world from one thread
 * at a time.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct nb_world nb_world;

typedef struct nb_options {
    uint32_t rank;          /* of this process, from 0 on */
    uint32_t ranks;         /* how many there are */
    const char *rendezvous; /* "address:port" at which rank 0 listens for the others */
    int gpu;                /* CUDA ordinal */
    size_t heap;            /* bytes of the symmetric heap, the same at all ranks */
    uint32_t channels;      /* rings that kernels fill independently of each other */
    uint32_t log_depth;     /* logarithm of the descriptors in a ring */
    uint16_t signals;       /* of this rank */
    uint16_t counters;      /* of each channel */
    uint32_t timeout_ms;    /* how long to wait for the other ranks */
} nb_options;

#define NB_OPTIONS {0, 1, "127.0.0.1:14792", 0, 64u << 20, 1, 10, 64, 64, 60000}

/* Allocates the memory of this rank and connects it with all others. NULL on failure, with the reason in
 * `error`, which may be NULL. */
nb_world *nb_join(const nb_options *options, char *error, size_t error_len);

/* Carries out what kernels have posted and ends the proxy: kernels that wait return with an error. Then waits
 * for all kernels of this process, as cudaFree does. Other ranks lose this one: call nb_barrier first. NULL is
 * allowed. */
void nb_leave(nb_world *world);

/* A channel for kernels: a nobounce::Channel * in GPU memory. NULL if there is no such channel. */
void *nb_channel(const nb_world *world, uint32_t number);

/* The symmetric heap of this rank, in GPU memory. Offsets into it are the same at all ranks. */
void *nb_heap(const nb_world *world);
size_t nb_heap_bytes(const nb_world *world);

/* Waits until all ranks have called it: for hosts, kernels have their own. 0, or an errno value if a rank
 * is gone. */
int nb_barrier(nb_world *world);

/* Refused and failed descriptors so far, one line each, as text that ends in a zero byte. Returns its
 * length; text beyond `len` is cut off. */
size_t nb_reports(const nb_world *world, char *text, size_t len);

#ifdef __cplusplus
}
#endif
