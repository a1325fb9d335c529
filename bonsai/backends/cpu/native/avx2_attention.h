// Softmax attention of several queries over one span of the KV cache. Part of avx2.cpp.
//
// What a query gets does not depend on the queries beside it: its sums run over the same keys in
// the same order whatever the tile.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"
#include "rowwise.h"

namespace bonsai {
namespace {

constexpr int kQueries =
    4;  // 4 queries x 2 keys, and 4 x 16 elements of the output: 8 accumulators

inline __m256 load8(const float* p) { return _mm256_loadu_ps(p); }

inline __m256 load8(const uint16_t* p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

inline float lane_sum(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_hadd_ps(sum, sum);
    return _mm_cvtss_f32(_mm_hadd_ps(sum, sum));
}

// scores[i][j] = query i . key j for keys [0, count), two keys at a time (a span has room for
// both).
template <int N, class Element>
void score_keys(const AttentionTask& task, const Element* keys, int first, int count) {
    const int width = task.kv.width;
    const float* queries = task.queries + int64_t(first) * width;
    float* scores = task.scores + int64_t(first) * kSpan;
    for (int j = 0; j < count; j += 2) {
        const Element* key = keys + int64_t(j) * width;
        __m256 acc[N][2];
        for (int i = 0; i < N; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        for (int d = 0; d < width; d += 8) {
            const __m256 a = load8(key + d), b = load8(key + width + d);
            for (int i = 0; i < N; ++i) {
                const __m256 q = load8(queries + int64_t(i) * width + d);
                acc[i][0] = _mm256_fmadd_ps(q, a, acc[i][0]);
                acc[i][1] = _mm256_fmadd_ps(q, b, acc[i][1]);
            }
        }
        for (int i = 0; i < N; ++i) {
            scores[i * kSpan + j] = lane_sum(acc[i][0]);
            scores[i * kSpan + j + 1] = lane_sum(acc[i][1]);
        }
    }
}

// out[i] = sum over j < count of weights[i][j] * value j; a query's weights beyond its keys are 0.
template <int N, class Element>
void add_values(const AttentionTask& task, const Element* values, int first, int count) {
    const int width = task.kv.width;
    const float* weights = task.scores + int64_t(first) * kSpan;
    for (int d = 0; d < width; d += 16) {
        __m256 acc[N][2];
        for (int i = 0; i < N; ++i) acc[i][0] = acc[i][1] = _mm256_setzero_ps();
        for (int j = 0; j < count; ++j) {
            const Element* value = values + int64_t(j) * width + d;
            const __m256 a = load8(value), b = load8(value + 8);
            for (int i = 0; i < N; ++i) {
                const __m256 p = _mm256_broadcast_ss(weights + i * kSpan + j);
                acc[i][0] = _mm256_fmadd_ps(p, a, acc[i][0]);
                acc[i][1] = _mm256_fmadd_ps(p, b, acc[i][1]);
            }
        }
        for (int i = 0; i < N; ++i) {
            float* out = task.out + int64_t(first + i) * width + d;
            _mm256_storeu_ps(out, acc[i][0]);
            _mm256_storeu_ps(out + 8, acc[i][1]);
        }
    }
}

template <int N, class Element>
void attend_tile(const AttentionTask& task, int first) {
    int count = 0;
    for (int i = first; i < first + N; ++i) count = task.counts[i] > count ? task.counts[i] : count;
    score_keys<N>(task, static_cast<const Element*>(task.kv.keys), first, count);
    for (int i = first; i < first + N; ++i) {
        float* scores = task.scores + int64_t(i) * kSpan;
        softmax_row(scores, task.counts[i], task.max + i, task.sum + i);
        for (int j = task.counts[i]; j < count; ++j) scores[j] = 0;
    }
    add_values<N>(task, static_cast<const Element*>(task.kv.values), first, count);
}

template <class Element>
void attend(const AttentionTask& task) {
    int i = 0;
    for (; i + kQueries <= task.n; i += kQueries) attend_tile<kQueries, Element>(task, i);
    switch (task.n - i) {
        case 3: attend_tile<3, Element>(task, i); break;
        case 2: attend_tile<2, Element>(task, i); break;
        case 1: attend_tile<1, Element>(task, i); break;
        default: break;
    }
}

}  // namespace
}  // namespace bonsai
