// The scales of one row of weights, and sums of vector lanes. Part of avx2.cpp.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace bonsai {
namespace {

float horizontal_sum(__m256 v) {
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

// `groups` halves at `plane` to one float per chunk, and 0 for the chunks beyond them.
void widen_scales(const uint8_t* plane, int64_t groups, int per_group, int64_t chunks, float* out) {
    int64_t g = 0;
    for (; g + 8 <= groups; g += 8) {
        const auto* from = reinterpret_cast<const __m128i*>(plane + 2 * g);
        _mm256_storeu_ps(out + g, _mm256_cvtph_ps(_mm_loadu_si128(from)));
    }
    if (g < groups) {
        alignas(16) uint16_t last[8] = {};
        std::memcpy(last, plane + 2 * g, size_t(groups - g) * 2);
        const __m256 wide = _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<__m128i*>(last)));
        _mm256_storeu_ps(out + g, wide);
    }
    // From the back, so that no value is overwritten before it is read.
    if (per_group > 1) {
        for (int64_t c = per_group * groups - 1; c >= 0; --c) out[c] = out[c / per_group];
    }
    for (int64_t c = groups * per_group; c < chunks; ++c) out[c] = 0;
}

// Scales (and for q4, q8 biases with the center's share) of one row of weights, one per chunk.
struct RowScales {
    float* scales;
    float* biases;
};

void load_scales(const Task& task, int center, int64_t row, const RowScales& out) {
    const Matrix& w = *task.w;
    const int per_group = w.group / task.x->chunk;
    const int64_t at = 2 * row * w.groups, chunks = task.x->chunks;
    widen_scales(w.scales + at, w.groups, per_group, chunks, out.scales);
    if (!w.biases) return;
    widen_scales(w.biases + at, w.groups, per_group, chunks, out.biases);
    for (int64_t c = 0; c < chunks; ++c) out.biases[c] += float(center) * out.scales[c];
}

// s = w * x, in eights: all three have kPadFloats to spare.
void multiply_scales(const float* w, const float* x, int64_t n, float* s) {
    for (int64_t i = 0; i < n; i += 8) {
        _mm256_storeu_ps(s + i, _mm256_mul_ps(_mm256_loadu_ps(w + i), _mm256_loadu_ps(x + i)));
    }
}

// The mask of the first `count` lanes, all of them from 8 on.
inline __m256i first_lanes(int64_t count) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(int(count < 8 ? count : 8)), lanes);
}

// Where a sum starts: at what the biases contribute.
__m256 bias_lanes(const Task& task, const RowScales& row, const float* sums) {
    __m256 acc = _mm256_setzero_ps();
    if (!task.w->biases) return acc;
    const int64_t chunks = task.x->chunks;
    for (int64_t c = 0; c < chunks; c += 8) {
        // Behind the last chunk there is another token, or nothing.
        const __m256i mask = first_lanes(chunks - c);
        const __m256 b = _mm256_maskload_ps(row.biases + c, mask);
        acc = _mm256_fmadd_ps(b, _mm256_maskload_ps(sums + c, mask), acc);
    }
    return acc;
}

// Eight halves as floats.
inline __m256 widen_eight(const uint8_t* halves) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves)));
}

// The last `left` (1 to 7) halves before `end`, then zeros. Eight halves before `end` are read.
inline __m256 widen_last(const uint8_t* end, int64_t left) {
    alignas(16) static const uint8_t kMove[32] = {0,    1,    2,    3,    4,    5,    6,    7,
                                                  8,    9,    10,   11,   12,   13,   14,   15,
                                                  0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80,
                                                  0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80};
    const auto load = [](const uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    };
    return _mm256_cvtph_ps(_mm_shuffle_epi8(load(end - 16), load(kMove + 16 - 2 * left)));
}

// With one token, the products of scales and what the biases contribute, in one pass over the
// scales of a row; the same operations as `multiply_scales` and `bias_lanes` after `load_scales`.
__m256 start_row(const Task& task, int center, int64_t row, const RowScales& spare,
                 float* products) {
    const Matrix& w = *task.w;
    const Activations& x = *task.x;
    if (w.group != x.chunk || w.groups < 8) {
        load_scales(task, center, row, spare);
        multiply_scales(spare.scales, x.scales, x.chunks, products);
        return bias_lanes(task, spare, x.sums);
    }
    const uint8_t* scales = w.scales + 2 * row * w.groups;
    const uint8_t* biases = w.biases ? w.biases + 2 * row * w.groups : nullptr;
    const __m256 middle = _mm256_set1_ps(float(center));
    __m256 acc = _mm256_setzero_ps();
    int64_t g = 0;
    for (; g + 8 <= w.groups; g += 8) {
        const __m256 s = widen_eight(scales + 2 * g);
        _mm256_storeu_ps(products + g, _mm256_mul_ps(s, _mm256_loadu_ps(x.scales + g)));
        if (!biases) continue;
        const __m256 b = _mm256_add_ps(widen_eight(biases + 2 * g), _mm256_mul_ps(middle, s));
        acc = _mm256_fmadd_ps(b, _mm256_loadu_ps(x.sums + g), acc);
    }
    _mm256_storeu_ps(products + g, _mm256_setzero_ps());  // for chunks beyond the groups
    const int64_t left = w.groups - g;
    if (left == 0) return acc;
    const __m256 s = widen_last(scales + 2 * w.groups, left);
    _mm256_storeu_ps(products + g, _mm256_mul_ps(s, _mm256_loadu_ps(x.scales + g)));
    if (!biases) return acc;
    const __m256 b =
        _mm256_add_ps(widen_last(biases + 2 * w.groups, left), _mm256_mul_ps(middle, s));
    return _mm256_fmadd_ps(b, _mm256_loadu_ps(x.sums + g), acc);
}

}  // namespace
}  // namespace bonsai
