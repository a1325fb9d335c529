// AVX2, FMA and F16C. Compiled with those flags, so nothing of the standard library may be
// instantiated here (see rowwise.h).
#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#include "avx2_attention.h"
#include "avx2_blocks.h"
#include "avx2_scales.h"
#include "kernels.h"
#include "rowwise.h"

namespace bonsai {
namespace {

constexpr int kPrefetch = 4096;  // bytes ahead; nearer loses up to a third when streaming from DRAM

void store(const Task& task, int64_t token, int64_t row, __m256 acc) {
    const int64_t at = token * task.y_stride + row;
    const float sum = horizontal_sum(acc);
    task.y[at] = task.residual ? task.residual[at] + sum : sum;
}

// One row of weights in scratch memory: its scales, and with several tokens its codes, unpacked.
struct UnpackedRow {
    RowScales scales;
    uint8_t* codes;
};

// The pieces of `Task::scratch`: products of scales for a tile of tokens, then a tile of rows.
struct Scratch {
    float* products;
    int64_t stride;     // floats per row of scales
    int64_t row_bytes;  // of codes
    float* scales;
    uint8_t* codes;

    UnpackedRow row(int64_t i) const {
        float* own = scales + 2 * i * stride;
        return {{own, own + stride}, codes + i * row_bytes};
    }
};

template <class Block>
Scratch cut(const Task& task) {
    auto* floats = reinterpret_cast<float*>(task.scratch);
    const int64_t stride = (task.x->chunks + kPadFloats + 15) & ~int64_t(15);
    float* scales = floats + kTokenTile * stride;
    auto* codes = reinterpret_cast<uint8_t*>(scales + 2 * kRowTile * stride);
    return {floats, stride, task.x->blocks * Sizes<Block>::kSlotBytes, scales, codes};
}

// Block `b` of a row. The last loads of the plane go through a copy: they may reach beyond it.
template <class Block>
void unpack_block(const Task& task, const uint8_t* row, int64_t b, __m256i* codes) {
    const uint8_t* from = row + b * Block::kBytes;
    if (from + Block::kReach <= task.w->codes_end) {
        Block::unpack(from, codes);
        return;
    }
    alignas(32) uint8_t copy[64] = {};
    const int64_t left = task.w->codes_end - from;
    std::memcpy(copy, from, size_t(left < Block::kBytes ? left : Block::kBytes));
    Block::unpack(copy, codes);
}

template <class Block>
void gemv(const Task& task) {
    const Activations& x = *task.x;
    const Scratch scratch = cut<Block>(task);
    const RowScales scales = scratch.row(0).scales;
    for (int64_t row = task.first; row < task.last; ++row) {
        __m256 acc = start_row(task, Block::kCenter, row, scales, scratch.products);
        const uint8_t* codes = task.w->codes + row * task.w->codes_stride;
        for (int64_t b = 0; b < x.blocks; ++b) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + b * Block::kBytes) + kPrefetch,
                         _MM_HINT_T0);
            __m256i planes[Block::kPlanes];
            unpack_block<Block>(task, codes, b, planes);
            acc = add_block<Block>(acc, planes, x.slots + b * Sizes<Block>::kSlotBytes,
                                   x.lane_sums + b * Sizes<Block>::kLanes,
                                   scratch.products + b * Block::kChunks);
        }
        store(task, 0, row, acc);
    }
}

// One unpacked row, number `index` of the matrix, times N tokens from `first` on.
template <class Block, int N>
void multiply_tile(const Task& task, const Scratch& scratch, const UnpackedRow& row, int64_t index,
                   int64_t first) {
    const Activations& x = *task.x;
    const uint8_t* slots[N];
    const int32_t* lane_sums[N];
    __m256 acc[N];
    for (int t = 0; t < N; ++t) {
        const int64_t token = first + t;
        slots[t] = x.slots + token * x.slots_stride;
        lane_sums[t] = x.lane_sums + token * x.blocks * Sizes<Block>::kLanes;
        acc[t] = bias_lanes(task, row.scales, x.sums + token * x.chunks);
        multiply_scales(row.scales.scales, x.scales + token * x.chunks, x.chunks,
                        scratch.products + t * scratch.stride);
    }
    for (int64_t b = 0; b < x.blocks; ++b) {
        const auto* codes =
            reinterpret_cast<const __m256i*>(row.codes + b * Sizes<Block>::kSlotBytes);
        add_tile<Block, N>(acc, codes, slots, b, lane_sums, scratch.products, scratch.stride);
    }
    for (int t = 0; t < N; ++t) store(task, first + t, index, acc[t]);
}

template <class Block>
void unpack_row(const Task& task, int64_t index, const UnpackedRow& row) {
    load_scales(task, Block::kCenter, index, row.scales);
    const uint8_t* packed = task.w->codes + index * task.w->codes_stride;
    for (int64_t b = 0; b < task.x->blocks; ++b) {
        unpack_block<Block>(task, packed, b,
                            reinterpret_cast<__m256i*>(row.codes + b * Sizes<Block>::kSlotBytes));
    }
}

// Tokens [first, first + N) times `rows` unpacked rows: the activations stay in the first cache.
template <class Block, int N>
void multiply_rows(const Task& task, const Scratch& scratch, int64_t start, int64_t rows,
                   int64_t first) {
    for (int64_t i = 0; i < rows; ++i) {
        multiply_tile<Block, N>(task, scratch, scratch.row(i), start + i, first);
    }
}

template <class Block>
void gemm(const Task& task) {
    const Scratch scratch = cut<Block>(task);
    for (int64_t start = task.first; start < task.last; start += kRowTile) {
        const int64_t left = task.last - start, rows = left < kRowTile ? left : kRowTile;
        for (int64_t i = 0; i < rows; ++i) unpack_row<Block>(task, start + i, scratch.row(i));
        int64_t t = 0;
        for (; t + 4 <= task.tokens; t += 4) multiply_rows<Block, 4>(task, scratch, start, rows, t);
        if (t + 2 <= task.tokens) {
            multiply_rows<Block, 2>(task, scratch, start, rows, t);
            t += 2;
        }
        if (t < task.tokens) multiply_rows<Block, 1>(task, scratch, start, rows, t);
    }
}

template <class Block>
const Route* route_of(const char* name) {
    static const Route route{name,           block_layout<Block>(), Block::kBlock / Block::kChunks,
                             Block::kCenter, Block::kTop,           gemv<Block>,
                             gemm<Block>};
    return &route;
}

const Route* find_route(Packing packing, int group) {
    const char* t2 = "ternary_dot_t2_i8_avx2";
    const char* t5 = "ternary_dot_t5_i8_avx2";
    const char* b1 = "ternary_dot_b1_i8_avx2";
    const char* q4 = "affine_dot_q4_i16_avx2";
    const char* q8 = "affine_dot_q8_i16_avx2";
    switch (int(packing) * 1000 + group) {
        case int(Packing::t2) * 1000 + 32: return route_of<T2<32>>(t2);
        case int(Packing::t2) * 1000 + 64: return route_of<T2<64>>(t2);
        case int(Packing::t2) * 1000 + 128:
        case int(Packing::t2) * 1000 + 256: return route_of<T2<128>>(t2);
        case int(Packing::t5) * 1000 + 64: return route_of<T5<64>>(t5);
        case int(Packing::t5) * 1000 + 128: return route_of<T5<128>>(t5);
        case int(Packing::t5) * 1000 + 256: return route_of<T5<256>>(t5);
        case int(Packing::b1) * 1000 + 32: return route_of<B1<32>>(b1);
        case int(Packing::b1) * 1000 + 64: return route_of<B1<64>>(b1);
        case int(Packing::b1) * 1000 + 128:
        case int(Packing::b1) * 1000 + 256: return route_of<B1<128>>(b1);
        case int(Packing::q4) * 1000 + 32:
        case int(Packing::q4) * 1000 + 64:
        case int(Packing::q4) * 1000 + 128: return route_of<Q4>(q4);
        case int(Packing::q8) * 1000 + 32:
        case int(Packing::q8) * 1000 + 64:
        case int(Packing::q8) * 1000 + 128: return route_of<Q8>(q8);
        default: return nullptr;
    }
}

// 32 partial sums per token, whatever the number of tokens, so that a token's result is its own.
template <int N>
void dense_tile(const float* w, int64_t n, const float* x, int64_t x_stride, float* dots) {
    __m256 acc[N][4];
    for (int t = 0; t < N; ++t) {
        for (int j = 0; j < 4; ++j) acc[t][j] = _mm256_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 32 <= n; i += 32) {
        for (int j = 0; j < 4; ++j) {
            const __m256 weight = _mm256_loadu_ps(w + i + 8 * j);
            for (int t = 0; t < N; ++t) {
                const __m256 value = _mm256_loadu_ps(x + t * x_stride + i + 8 * j);
                acc[t][j] = _mm256_fmadd_ps(weight, value, acc[t][j]);
            }
        }
    }
    for (int t = 0; t < N; ++t) {
        float tail = 0;
        for (int64_t k = i; k < n; ++k) tail += w[k] * x[t * x_stride + k];
        const __m256 sum =
            _mm256_add_ps(_mm256_add_ps(acc[t][0], acc[t][1]), _mm256_add_ps(acc[t][2], acc[t][3]));
        dots[t] = horizontal_sum(sum) + tail;
    }
}

void dense_dot(const float* w, int64_t n, const float* x, int64_t x_stride, int tokens,
               float* dots) {
    int t = 0;
    for (; t + 2 <= tokens; t += 2) dense_tile<2>(w, n, x + t * x_stride, x_stride, dots + t);
    if (t < tokens) dense_tile<1>(w, n, x + t * x_stride, x_stride, dots + t);
}

void widen_f16(const uint8_t* values, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_prefetch(reinterpret_cast<const char*>(values + 2 * i) + kPrefetch, _MM_HINT_T0);
        const auto* from = reinterpret_cast<const __m128i*>(values + 2 * i);
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(from)));
    }
    for (; i < n; ++i) {
        uint16_t half;
        std::memcpy(&half, values + 2 * i, 2);
        out[i] = _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
    }
}

void widen_bf16(const uint8_t* values, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        _mm_prefetch(reinterpret_cast<const char*>(values + 2 * i) + kPrefetch, _MM_HINT_T0);
        const auto* from = reinterpret_cast<const __m128i*>(values + 2 * i);
        const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(from)), 16);
        _mm256_storeu_ps(out + i, _mm256_castsi256_ps(wide));
    }
    for (; i < n; ++i) {
        uint16_t high;
        std::memcpy(&high, values + 2 * i, 2);
        out[i] = bits_to_float(uint32_t(high) << 16);
    }
}

void narrow_f16(const float* values, int64_t n, uint16_t* out) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        const __m128i halves = _mm256_cvtps_ph(_mm256_loadu_ps(values + i), 0);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), halves);
    }
    for (; i < n; ++i) {
        out[i] = uint16_t(_mm_cvtsi128_si32(_mm_cvtps_ph(_mm_set_ss(values[i]), 0)));
    }
}

}  // namespace

extern const Kernels kAvx2;
const Kernels kAvx2{"avx2",     find_route,       dense_dot,    widen_f16,    widen_bf16,
                    narrow_f16, quantize_row,     hadamard_row, rms_norm_row, swiglu_row,
                    rope_row,   attend<uint16_t>, attend<float>};

}  // namespace bonsai

#endif
