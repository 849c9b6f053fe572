// A stencil for halo.cu and nccl_compare.cu: a grid that is cut into bands of rows, one for each rank, and the result by the host.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

namespace halo {

constexpr int columns = 2048, band = 256, steps = 500;
constexpr size_t row_bytes = columns * sizeof(float), grid_bytes = (band + 2) * row_bytes;

// All threads. One row of a band; rows 0 and band + 1 are those of the neighbours.
__device__ inline void compute_row(float *next, const float *old, int row, unsigned rank, unsigned last) {
    for (int at = threadIdx.x; at < columns; at += blockDim.x) {
        const float *here = old + row * columns + at;
        bool is_edge = at == 0 || at == columns - 1 || (rank == 0 && row == 1) || (rank == last && row == band);
        float around = __ldcv(here - columns) + __ldcv(here + columns);
        next[row * columns + at] = is_edge ? *here : 0.25f * (around + here[-1] + here[1]);
    }
}

inline float start_value(int row, int column) { return (float)((row * 31 + column * 17) % 97); }

// The band of a rank, with the rows of its neighbours, before the first step.
inline std::vector<float> start(int rank) {
    std::vector<float> grid((band + 2) * (size_t)columns);
    for (int row = 0; row < band + 2; row++)
        for (int at = 0; at < columns; at++)
            grid[(size_t)row * columns + at] = start_value(rank * band + row - 1, at);
    return grid;
}

// The whole grid after the last step.
inline std::vector<float> reference(int rows) {
    std::vector<float> old((size_t)rows * columns), next;
    for (int row = 0; row < rows; row++)
        for (int at = 0; at < columns; at++)
            old[(size_t)row * columns + at] = start_value(row, at);
    next = old;
    for (int number = 0; number < steps; number++) {
        for (int row = 1; row < rows - 1; row++)
            for (int at = 1; at < columns - 1; at++) {
                const float *here = &old[(size_t)row * columns + at];
                next[(size_t)row * columns + at] = 0.25f * (here[-columns] + here[columns] + here[-1] + here[1]);
            }
        std::swap(old, next);
    }
    return old;
}

// Cells of a rank's band that differ from the host's.
inline size_t wrong_cells(const std::vector<float> &grid, int rank, int ranks) {
    std::vector<float> expected = reference(ranks * band);
    size_t wrong = 0;
    for (int row = 1; row <= band; row++)
        for (int at = 0; at < columns; at++)
            wrong += !(std::fabs(grid[(size_t)row * columns + at] - expected[(size_t)(rank * band + row - 1) * columns + at]) <= 1e-3f);
    return wrong;
}

} // namespace halo
