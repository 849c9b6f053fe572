// What the examples share: arguments, checks of CUDA calls, time.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cuda_runtime.h>

#include "nobounce.cuh"
#include "nobounce.h"

#define CHECK(call)                                                                                                      \
    do {                                                                                                                 \
        cudaError_t error_ = (call);                                                                                     \
        if (error_ != cudaSuccess) {                                                                                     \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(error_));                                              \
            exit(1);                                                                                                     \
        }                                                                                                                \
    } while (0)

// PROGRAM RANK RANKS ADDRESS:PORT, once for each rank.
inline nb_world *join(int count, char **arguments, size_t heap) {
    if (count < 4) {
        fprintf(stderr, "usage: %s RANK RANKS ADDRESS:PORT, once for each rank\n", arguments[0]);
        exit(2);
    }
    nb_options options = NB_OPTIONS;
    options.rank = (uint32_t)atoi(arguments[1]);
    options.ranks = (uint32_t)atoi(arguments[2]);
    options.rendezvous = arguments[3];
    options.heap = heap;
    char error[512];
    nb_world *world = nb_join(&options, error, sizeof error);
    if (!world) {
        fprintf(stderr, "cannot join: %s\n", error);
        exit(1);
    }
    return world;
}

inline void leave(nb_world *world, bool is_right) {
    char reports[1024] = "";
    if (nb_reports(world, reports, sizeof reports))
        fprintf(stderr, "%s", reports);
    nb_barrier(world); // no rank leaves while others wait for it
    nb_leave(world);
    if (!is_right)
        exit(1);
}

__device__ inline unsigned long long now_ns() {
    unsigned long long time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
}
