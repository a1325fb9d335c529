// One token id from logits: the twin of `choose` in bonsai/sampling.py, which is its specification.
#pragma once

#include <cstdint>

namespace bonsai {

struct SamplingRules {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
};

// `seen` holds distinct ids. Returns -1 when the largest logit is NaN, +inf or -inf.
int64_t choose(const float* logits, int64_t vocab, const SamplingRules& rules, const int64_t* seen,
               int64_t seen_count, double uniform);

}  // namespace bonsai
