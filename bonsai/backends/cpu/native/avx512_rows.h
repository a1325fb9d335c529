// One row times one token, and 16 rows times several. Part of avx512vnni.cpp.
//
// Both compute the same, bit for bit: the exact sum of each chunk, times its scales, added to
// partial sum number (chunk % 16); then the 16 partial sums in the order of `sum_lanes`.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

#include "avx512_blocks.h"
#include "kernels.h"

namespace bonsai {
namespace {

constexpr int kPrefetch = 4096;  // bytes ahead; nearer loses up to a third when streaming from DRAM
constexpr int kPanel = 16;       // rows that are interleaved, one per lane
static_assert(kPanel <= kScratchRows, "the scratch memory is too small");
// With fewer tokens, interleaving rows costs more than it saves.
constexpr int64_t kFewTokens = 4;

inline __mmask16 first_lanes(int64_t count) {
    return __mmask16(count >= 16 ? 0xffff : (1 << count) - 1);
}

// Lane i + lane (i + 8), of these i + (i + 4), and so on.
float sum_lanes(__m512 v) {
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
    __m128 sum = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
    return _mm_cvtss_f32(_mm_add_ss(sum, _mm_shuffle_ps(sum, sum, 1)));
}

// What is the same for all rows: which of 16 chunks, and of their groups, there are. All of them
// before chunk `whole`, then those of the masks.
struct Plan {
    int shift;  // a group is 1, 2 or 4 chunks: 1 << shift
    int64_t whole;
    __mmask16 chunks, groups;
};

inline Plan make_plan(const Task& task) {
    const int64_t groups = task.w->groups, chunks = task.x->chunks;
    const int shift = task.w->group / task.x->chunk >> 1;
    const int64_t covered = groups << shift, whole = (covered < chunks ? covered : chunks) & ~15;
    return {shift, whole, first_lanes(chunks - whole), first_lanes(groups - (whole >> shift))};
}

// 16 >> shift halves, one for each of 16 chunks.
inline __m512 widen_scales(__m256i halves, int shift) {
    if (shift) {
        const __m128i low = _mm256_castsi256_si128(halves), pairs = _mm_unpacklo_epi16(low, low);
        halves = shift == 1 ? _mm256_set_m128i(_mm_unpackhi_epi16(low, low), pairs)
                            : _mm256_set_m128i(_mm_unpackhi_epi32(pairs, pairs),
                                               _mm_unpacklo_epi32(pairs, pairs));
    }
    return _mm512_cvtph_ps(halves);
}

// The scales (or biases) of chunks [first, first + 16) of a row; 0 for chunks beyond the groups.
inline __m512 chunk_scales(const uint8_t* plane, const Matrix& w, int64_t row, const Plan& plan,
                           int64_t first) {
    const uint8_t* from = plane + 2 * (row * w.groups + (first >> plan.shift));
    const __mmask16 all = __mmask16(0xffff >> (16 - (16 >> plan.shift)));
    const __mmask16 mask = first < plan.whole ? all : plan.groups;
    return widen_scales(_mm256_maskz_loadu_epi16(mask, from), plan.shift);
}

// What weights contribute besides their codes: the bias, with the center that was taken out of
// them.
template <class Block>
__m512 chunk_biases(const Matrix& w, int64_t row, const Plan& plan, int64_t first, __m512 scales) {
    const __m512 biases = chunk_scales(w.biases, w, row, plan, first);
    return _mm512_fmadd_ps(_mm512_set1_ps(float(Block::kCenter)), scales, biases);
}

// Block `b` of a row. The last loads of the plane go through a copy: they may reach beyond it.
template <class Block>
void unpack_block(const Matrix& w, int64_t row, int64_t b, __m512i* codes) {
    const uint8_t* from = w.codes + row * w.codes_stride + b * Block::kBytes;
    if (from + Block::kReach <= w.codes_end) {
        Block::unpack(from, codes);
        return;
    }
    alignas(64) uint8_t copy[64] = {};
    const int64_t left = w.codes_end - from;
    std::memcpy(copy, from, size_t(left < Block::kBytes ? left : Block::kBytes));
    Block::unpack(copy, codes);
}

// The sums of code * q of chunks [first, first + 16), which may be beyond the last.
template <class Block>
inline __m512i dot_chunks(const Task& task, int64_t row, const uint8_t* slots, int64_t first) {
    constexpr int count = 16 / Block::kChunks;
    constexpr int64_t slot_bytes = 64 * Block::kPlanes;
    const int64_t start = first / Block::kChunks, left = task.x->blocks - start;
    const uint8_t* from = task.w->codes + row * task.w->codes_stride + start * Block::kBytes;
    slots += start * slot_bytes;
    for (int i = 0; i < count * Block::kBytes; i += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(from + i) + kPrefetch, _MM_HINT_T0);
    }
    __m512i sums[count];
    if (left >= count && from + (count - 1) * Block::kBytes + Block::kReach <= task.w->codes_end) {
        for (int i = 0; i < count; ++i) {
            __m512i planes[Block::kPlanes];
            Block::unpack(from + i * Block::kBytes, planes);
            sums[i] = dot_block<Block>(planes, slots + i * slot_bytes);
        }
        return chunk_sums<Block::kChunks>(sums);
    }
    for (int i = 0; i < count; ++i) sums[i] = _mm512_setzero_si512();
    for (int i = 0; i < count && i < left; ++i) {
        __m512i planes[Block::kPlanes];
        unpack_block<Block>(*task.w, row, start + i, planes);
        sums[i] = dot_block<Block>(planes, slots + i * slot_bytes);
    }
    return chunk_sums<Block::kChunks>(sums);
}

template <class Block>
float dot_row(const Task& task, const Plan& plan, int64_t row, int64_t token) {
    const Activations& x = *task.x;
    const Matrix& w = *task.w;
    const uint8_t* slots = x.slots + token * x.slots_stride;
    const int64_t at = token * x.chunks;
    __m512 acc = _mm512_setzero_ps();
    for (int64_t c = 0; c < x.chunks; c += 16) {
        const __mmask16 mask = c < plan.whole ? __mmask16(0xffff) : plan.chunks;
        const __m512i center = _mm512_maskz_loadu_epi32(mask, x.lane_sums + at + c);
        const __m512i dots = _mm512_sub_epi32(dot_chunks<Block>(task, row, slots, c), center);
        const __m512 scales = chunk_scales(w.scales, w, row, plan, c);
        const __m512 both = _mm512_mul_ps(scales, _mm512_maskz_loadu_ps(mask, x.scales + at + c));
        acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), both, acc);
        if constexpr (Block::kSlot == 1) continue;
        const __m512 biases = chunk_biases<Block>(w, row, plan, c, scales);
        acc = _mm512_fmadd_ps(biases, _mm512_maskz_loadu_ps(mask, x.sums + at + c), acc);
    }
    return sum_lanes(acc);
}

template <class Block>
void gemv(const Task& task) {
    const Plan plan = make_plan(task);
    for (int64_t row = task.first; row < task.last; ++row) {
        for (int64_t t = 0; t < task.tokens; ++t) {
            const float sum = dot_row<Block>(task, plan, row, t);
            const int64_t at = t * task.y_stride + row;
            task.y[at] = task.residual ? task.residual[at] + sum : sum;
        }
    }
}

// 16 rows in scratch memory, one per lane: scales and biases of each chunk, and each unit of codes.
struct Panel {
    __m512* scales;  // [chunks]
    __m512* biases;  // [chunks]
    __m512i* codes;  // [blocks, planes, 16 units]
    int64_t first;   // row of the matrix
    __mmask16 rows;  // those that there are; the others are 0
};

template <class Block>
void fill_scales(const Task& task, int rows, const Panel& panel) {
    const Matrix& w = *task.w;
    const Plan plan = make_plan(task);
    for (int64_t c = 0; c < task.x->chunks; c += 16) {
        __m512i scales[16] = {}, biases[16] = {};
        for (int r = 0; r < rows; ++r) {
            const __m512 found = chunk_scales(w.scales, w, panel.first + r, plan, c);
            scales[r] = _mm512_castps_si512(found);
            if constexpr (Block::kSlot == 1) continue;
            biases[r] =
                _mm512_castps_si512(chunk_biases<Block>(w, panel.first + r, plan, c, found));
        }
        transpose(scales, reinterpret_cast<__m512i*>(panel.scales + c));
        transpose(biases, reinterpret_cast<__m512i*>(panel.biases + c));
    }
}

template <class Block>
void fill_codes(const Task& task, int rows, const Panel& panel) {
    for (int64_t b = 0; b < task.x->blocks; ++b) {
        __m512i codes[16][Block::kPlanes] = {}, plane[16];
        for (int r = 0; r < rows; ++r) unpack_block<Block>(*task.w, panel.first + r, b, codes[r]);
        for (int j = 0; j < Block::kPlanes; ++j) {
            for (int r = 0; r < 16; ++r) plane[r] = codes[r][j];
            transpose(plane, panel.codes + (b * Block::kPlanes + j) * 16);
        }
    }
}

// The 4 bytes of a unit of activations, on every lane.
inline __m512i broadcast(const uint8_t* unit) {
    int32_t value;
    std::memcpy(&value, unit, sizeof value);
    return _mm512_set1_epi32(value);
}

// The sums of one chunk of block `b` for 16 rows and N tokens.
template <class Block, int N>
inline void dot_units(const Panel& panel, const uint8_t* const* slots, int64_t b, int chunk,
                      __m512i* sums) {
    for (int t = 0; t < N; ++t) sums[t] = _mm512_setzero_si512();
    for (int j = 0; j < Block::kPlanes; ++j) {
        const int64_t plane = b * Block::kPlanes + j;
        for (int u = Block::first_unit(chunk, j); u < Block::last_unit(chunk, j); ++u) {
            const __m512i codes = panel.codes[plane * 16 + u];
            for (int t = 0; t < N; ++t) {
                const __m512i q = broadcast(slots[t] + plane * 64 + u * 4);
                sums[t] = Block::add(sums[t], codes, q);
            }
        }
    }
}

// The 16 partial sums of one token become outputs of the rows.
inline void finish(const Task& task, const Panel& panel, int64_t token, __m512* partial) {
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) partial[i] = _mm512_add_ps(partial[i], partial[i + half]);
    }
    const int64_t at = token * task.y_stride + panel.first;
    __m512 y = partial[0];
    if (task.residual) {
        y = _mm512_add_ps(_mm512_maskz_loadu_ps(panel.rows, task.residual + at), y);
    }
    _mm512_mask_storeu_ps(task.y + at, panel.rows, y);
}

// 16 rows times N tokens from `first` on.
template <class Block, int N>
void multiply_panel(const Task& task, const Panel& panel, int64_t first) {
    const Activations& x = *task.x;
    __m512 partial[N][16];
    const uint8_t* slots[N];
    for (int t = 0; t < N; ++t) {
        slots[t] = x.slots + (first + t) * x.slots_stride;
        for (int i = 0; i < 16; ++i) partial[t][i] = _mm512_setzero_ps();
    }
    for (int64_t b = 0; b < x.blocks; ++b) {
        for (int part = 0; part < Block::kChunks; ++part) {
            __m512i sums[N];
            dot_units<Block, N>(panel, slots, b, part, sums);
            const int64_t c = b * Block::kChunks + part;
            for (int t = 0; t < N; ++t) {
                const int64_t at = (first + t) * x.chunks + c;
                const __m512i dot = _mm512_sub_epi32(sums[t], _mm512_set1_epi32(x.lane_sums[at]));
                const __m512 scale = _mm512_mul_ps(panel.scales[c], _mm512_set1_ps(x.scales[at]));
                __m512& acc = partial[t][c % 16];
                acc = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, acc);
                if constexpr (Block::kSlot == 1) continue;
                acc = _mm512_fmadd_ps(panel.biases[c], _mm512_set1_ps(x.sums[at]), acc);
            }
        }
    }
    for (int t = 0; t < N; ++t) finish(task, panel, first + t, partial[t]);
}

template <class Block>
void gemm(const Task& task) {
    if (task.tokens < kFewTokens) return gemv<Block>(task);
    auto* vectors = reinterpret_cast<__m512*>(task.scratch);
    const int64_t chunks = (task.x->chunks + 15) & ~int64_t(15);
    Panel panel{vectors, vectors + chunks, reinterpret_cast<__m512i*>(vectors + 2 * chunks), 0, 0};
    for (int64_t row = task.first; row < task.last; row += kPanel) {
        const int rows = int(task.last - row < kPanel ? task.last - row : kPanel);
        panel.first = row;
        panel.rows = first_lanes(rows);
        fill_scales<Block>(task, rows, panel);
        fill_codes<Block>(task, rows, panel);
        int64_t t = 0;
        for (; t + 8 <= task.tokens; t += 8) multiply_panel<Block, 8>(task, panel, t);
        if (t + 4 <= task.tokens) {
            multiply_panel<Block, 4>(task, panel, t);
            t += 4;
        }
        for (; t < task.tokens; ++t) multiply_panel<Block, 1>(task, panel, t);
    }
}

}  // namespace
}  // namespace bonsai
