// A mixture-of-experts layer for moe.cu and nccl_compare.cu: sizes, routing, what an expert computes, and the result by the host.
// SPDX-License-Identifier: MIT OR Apache-2.0
#pragma once

#include <vector>

// Experts of each rank; experts that a token goes to; floats of a token; the most tokens of a rank.
constexpr int experts = 4, choices = 2, hidden = 1024, most_tokens = 128, rounds = 64;
constexpr size_t token_bytes = hidden * sizeof(float);
// A thread for each choice of each token.
constexpr int threads = most_tokens * choices;

enum Routing { random_routing, skewed, one_rank };
struct Case {
    const char *name;
    Routing routing;
    int tokens;
};
constexpr Case cases[] = {{"random", random_routing, 16}, {"random", random_routing, 128}, {"skewed", skewed, 128}, {"to one rank", one_rank, 128}};

// The experts of the tokens of a rank in one round: two different ones for each token. Skewed: half of the tokens go to expert 0.
inline std::vector<unsigned short> routes(const Case &wanted, int rank, int ranks, int round) {
    unsigned long long state = (round * 64 + rank) * 0x9e3779b97f4a7c15ull + 1;
    auto below = [&state](int limit) {
        state = state * 6364136223846793005ull + 1442695040888963407ull;
        return (int)((state >> 33) % limit);
    };
    std::vector<unsigned short> found;
    int count = wanted.routing == one_rank ? experts : ranks * experts;
    for (int token = 0; token < wanted.tokens; token++) {
        int first = wanted.routing == skewed && below(2) ? 0 : below(count);
        found.push_back((unsigned short)first);
        found.push_back((unsigned short)((first + 1 + below(count - 1)) % count));
    }
    return found;
}

// Small whole numbers: sums are exact. Tokens differ from round to round.
__host__ __device__ inline float token_value(int rank, int token, int at, int round) { return (float)((rank * 17 + token * 7 + at * 13) % 101 + round % 61); }
__host__ __device__ inline float weight(int choice) { return choice == 0 ? 0.75f : 0.25f; }
__host__ __device__ inline float expert_factor(int expert) { return (float)(expert + 1); }

// Floats of a rank's output that differ from the host's, over all rounds.
inline size_t wrong_floats(const Case &wanted, int rank, int ranks, const std::vector<float> &output) {
    size_t wrong = 0;
    for (int round = 0; round < rounds; round++) {
        std::vector<unsigned short> to = routes(wanted, rank, ranks, round);
        for (int token = 0; token < wanted.tokens; token++)
            for (int at = 0; at < hidden; at++) {
                float sum = 0;
                for (int choice = 0; choice < choices; choice++)
                    sum += weight(choice) * expert_factor(to[token * choices + choice]) * token_value(rank, token, at, round);
                wrong += output[((size_t)round * wanted.tokens + token) * hidden + at] != sum;
            }
    }
    return wrong;
}

// The experts of this rank's tokens in one round, and the place of each token among those for the same expert.
struct Routed {
    unsigned short expert[threads], place[threads], chosen[most_tokens];
};

// All threads. Fills `routed`, with the choices of one expert in `chosen`, and returns their number.
__device__ inline int route_block(Routed &routed, const unsigned short *to, int tokens, int expert) {
    int at = threadIdx.x;
    bool is_used = at < tokens * choices;
    routed.expert[at] = is_used ? to[at] : 0xffff;
    __syncthreads();
    int place = 0;
    for (int before = 0; before < at; before++)
        place += routed.expert[before] == routed.expert[at];
    routed.place[at] = (unsigned short)place;
    bool is_chosen = routed.expert[at] == expert;
    if (is_chosen)
        routed.chosen[place] = (unsigned short)at;
    return __syncthreads_count(is_chosen);
}

// All threads. Tokens for one expert, multiplied by a factor, one behind the other.
__device__ inline void gather_block(float *to, const Routed &routed, int count, int rank, int round, float factor) {
    for (int at = threadIdx.x; at < count * hidden; at += blockDim.x)
        to[at] = factor * token_value(rank, routed.chosen[at / hidden] / choices, at % hidden, round);
}

// All threads. Some of a rank's tokens: the weighted sums of what their experts returned. `returned(expert)` is where that lies.
template <typename Returned>
__device__ inline void combine_block(float *output, const Routed &routed, int tokens, Returned returned) {
    for (int token = blockIdx.x; token < tokens; token += gridDim.x)
        for (int at = threadIdx.x; at < hidden; at += blockDim.x) {
            float sum = 0;
            for (int choice = 0; choice < choices; choice++) {
                int which = token * choices + choice;
                sum += weight(choice) * __ldcv(returned(routed.expert[which]) + routed.place[which] * hidden + at);
            }
            output[token * hidden + at] = sum;
        }
}
