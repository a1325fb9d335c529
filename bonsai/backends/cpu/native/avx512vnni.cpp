// AVX-512 F, BW, DQ, VL and VNNI. Compiled with those flags, so nothing of the standard library may
// be instantiated here (see rowwise.h). Attention and scales are those of AVX2.
#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#include "avx2_attention.h"
#include "avx2_scales.h"
#include "avx512_blocks.h"
#include "kernels.h"
#include "rowwise.h"

namespace bonsai {
namespace {

constexpr int kPrefetch = 4096;  // bytes ahead; nearer loses up to a third when streaming from DRAM

// What biases contributed, on the first 8 of 16 lanes.
__m512 widen_lanes(__m256 lanes) { return _mm512_insertf32x8(_mm512_setzero_ps(), lanes, 0); }

void store(const Task& task, int64_t token, int64_t row, __m512 acc) {
    const int64_t at = token * task.y_stride + row;
    const float sum =
        horizontal_sum(_mm256_add_ps(_mm512_castps512_ps256(acc), _mm512_extractf32x8_ps(acc, 1)));
    task.y[at] = task.residual ? task.residual[at] + sum : sum;
}

// One row of weights in scratch memory: its scales, and with several tokens its codes, unpacked.
struct UnpackedRow {
    RowScales scales;
    __m512i* codes;
};

constexpr int kTileRows = 2;  // 2 rows x 4 tokens: 8 sums of integers and 8 of floats in registers
constexpr int kHeldRows =
    6;  // unpacked at a time, so that activations are read from the first cache
static_assert(kTileRows * kTokenTile + 2 * kHeldRows <= kTokenTile + 2 * kRowTile, "scratch");

// The pieces of `Task::scratch`: products of scales for a tile, then the rows that are held.
struct Scratch {
    float* products;
    int64_t stride;   // floats per row of scales
    int64_t vectors;  // of codes per row
    float* scales;
    __m512i* codes;

    UnpackedRow row(int64_t i) const {
        float* own = scales + 2 * i * stride;
        return {{own, own + stride}, codes + i * vectors};
    }
};

Scratch cut(const Task& task, int planes) {
    auto* floats = reinterpret_cast<float*>(task.scratch);
    const int64_t stride = (task.x->chunks + kPadFloats + 15) & ~int64_t(15);
    float* scales = floats + kTileRows * kTokenTile * stride;
    auto* codes = reinterpret_cast<__m512i*>(scales + 2 * kHeldRows * stride);
    return {floats, stride, task.x->blocks * planes, scales, codes};
}

// Block `b` of a row. The last loads of the plane go through a copy: they may reach beyond it.
template <class Block>
void unpack_block(const Task& task, const uint8_t* row, int64_t b, __m512i* codes) {
    const uint8_t* from = row + b * Block::kBytes;
    if (from + Block::kReach <= task.w->codes_end) {
        Block::unpack(from, codes);
        return;
    }
    alignas(64) uint8_t copy[64] = {};
    const int64_t left = task.w->codes_end - from;
    std::memcpy(copy, from, size_t(left < Block::kBytes ? left : Block::kBytes));
    Block::unpack(copy, codes);
}

template <class Block>
void gemv(const Task& task) {
    const Activations& x = *task.x;
    const Scratch scratch = cut(task, Block::kPlanes);
    const RowScales scales = scratch.row(0).scales;
    for (int64_t row = task.first; row < task.last; ++row) {
        __m512 acc[1][1] = {
            {widen_lanes(start_row(task, Block::kCenter, row, scales, scratch.products))}};
        const uint8_t* codes = task.w->codes + row * task.w->codes_stride;
        for (int64_t b = 0; b < x.blocks; ++b) {
            _mm_prefetch(reinterpret_cast<const char*>(codes + b * Block::kBytes) + kPrefetch,
                         _MM_HINT_T0);
            __m512i planes[Block::kPlanes];
            unpack_block<Block>(task, codes, b, planes);
            const __m512i* block = planes;
            add_block<Block, 1, 1>(acc, &block, &x.slots, b, &x.lane_sums, scratch.products, 0);
        }
        store(task, 0, row, acc[0][0]);
    }
}

// Held rows [held, held + R), the first of which is row `row` of the matrix, times N tokens from
// `first` on. A result does not depend on the others of its tile.
template <class Block, int R, int N>
void multiply_tile(const Task& task, const Scratch& scratch, int64_t held, int64_t row,
                   int64_t first) {
    const Activations& x = *task.x;
    const __m512i* codes[R];
    const uint8_t* slots[N];
    const int32_t* lane_sums[N];
    __m512 acc[R][N];
    for (int t = 0; t < N; ++t) {
        const int64_t token = first + t;
        slots[t] = x.slots + token * x.slots_stride;
        lane_sums[t] = x.lane_sums + token * x.blocks * Sizes<Block>::kLanes;
        for (int r = 0; r < R; ++r) {
            const RowScales scales = scratch.row(held + r).scales;
            acc[r][t] = widen_lanes(bias_lanes(task, scales, x.sums + token * x.chunks));
            multiply_scales(scales.scales, x.scales + token * x.chunks, x.chunks,
                            scratch.products + (r * N + t) * scratch.stride);
        }
    }
    for (int r = 0; r < R; ++r) codes[r] = scratch.row(held + r).codes;
    for (int64_t b = 0; b < x.blocks; ++b) {
        add_block<Block, R, N>(acc, codes, slots, b, lane_sums, scratch.products, scratch.stride);
        for (int r = 0; r < R; ++r) codes[r] += Block::kPlanes;
    }
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < N; ++t) store(task, first + t, row + r, acc[r][t]);
    }
}

// N tokens from `first` on times all `rows` held rows.
template <class Block, int N>
void multiply_rows(const Task& task, const Scratch& scratch, int64_t start, int64_t rows,
                   int64_t first) {
    int64_t i = 0;
    for (; i + 2 <= rows; i += 2) {
        multiply_tile<Block, 2, N>(task, scratch, i, start + i, first);
    }
    if (i < rows) multiply_tile<Block, 1, N>(task, scratch, i, start + i, first);
}

template <class Block>
void unpack_row(const Task& task, int64_t index, const UnpackedRow& row) {
    load_scales(task, Block::kCenter, index, row.scales);
    const uint8_t* packed = task.w->codes + index * task.w->codes_stride;
    for (int64_t b = 0; b < task.x->blocks; ++b) {
        unpack_block<Block>(task, packed, b, row.codes + b * Block::kPlanes);
    }
}

template <class Block>
void gemm(const Task& task) {
    const Scratch scratch = cut(task, Block::kPlanes);
    for (int64_t start = task.first; start < task.last; start += kHeldRows) {
        const int64_t left = task.last - start, rows = left < kHeldRows ? left : kHeldRows;
        for (int64_t i = 0; i < rows; ++i) unpack_row<Block>(task, start + i, scratch.row(i));
        int64_t t = 0;
        for (; t + 4 <= task.tokens; t += 4) multiply_rows<Block, 4>(task, scratch, start, rows, t);
        for (; t < task.tokens; ++t) multiply_rows<Block, 1>(task, scratch, start, rows, t);
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
    const char* t2 = "ternary_dot_t2_i8_avx512vnni";
    const char* t5 = "ternary_dot_t5_i8_avx512vnni";
    const char* b1 = "ternary_dot_b1_i8_avx512vnni";
    const char* q4 = "affine_dot_q4_i16_avx512vnni";
    const char* q8 = "affine_dot_q8_i16_avx512vnni";
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

// The `n` floats at p, n <= 16, and zeros.
__m512 load_first(const float* p, int64_t n) {
    return _mm512_maskz_loadu_ps(__mmask16((1u << n) - 1), p);
}

// 64 partial sums per token, whatever the number of tokens, so that a token's result is its own.
template <int N>
void dense_tile(const float* w, int64_t n, const float* x, int64_t x_stride, float* dots) {
    __m512 acc[N][4];
    for (int t = 0; t < N; ++t) {
        for (int j = 0; j < 4; ++j) acc[t][j] = _mm512_setzero_ps();
    }
    int64_t i = 0;
    for (; i + 64 <= n; i += 64) {
        for (int j = 0; j < 4; ++j) {
            const __m512 weight = _mm512_loadu_ps(w + i + 16 * j);
            for (int t = 0; t < N; ++t) {
                const __m512 value = _mm512_loadu_ps(x + t * x_stride + i + 16 * j);
                acc[t][j] = _mm512_fmadd_ps(weight, value, acc[t][j]);
            }
        }
    }
    for (; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        const __m512 weight = load_first(w + i, left);
        for (int t = 0; t < N; ++t) {
            const __m512 value = load_first(x + t * x_stride + i, left);
            acc[t][0] = _mm512_fmadd_ps(weight, value, acc[t][0]);
        }
    }
    for (int t = 0; t < N; ++t) {
        const __m512 sum =
            _mm512_add_ps(_mm512_add_ps(acc[t][0], acc[t][1]), _mm512_add_ps(acc[t][2], acc[t][3]));
        dots[t] = horizontal_sum(
            _mm256_add_ps(_mm512_castps512_ps256(sum), _mm512_extractf32x8_ps(sum, 1)));
    }
}

void dense_dot(const float* w, int64_t n, const float* x, int64_t x_stride, int tokens,
               float* dots) {
    int t = 0;
    for (; t + 4 <= tokens; t += 4) dense_tile<4>(w, n, x + t * x_stride, x_stride, dots + t);
    for (; t < tokens; ++t) dense_tile<1>(w, n, x + t * x_stride, x_stride, dots + t);
}

// The `left` 16-bit values at p, at most 16, and zeros.
__m256i load_words(const void* p, int64_t left) {
    return _mm256_maskz_loadu_epi16(__mmask16((1u << left) - 1), p);
}

void widen_f16(const uint8_t* values, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        _mm_prefetch(reinterpret_cast<const char*>(values + 2 * i) + kPrefetch, _MM_HINT_T0);
        const __m512 wide = _mm512_cvtph_ps(load_words(values + 2 * i, left));
        _mm512_mask_storeu_ps(out + i, __mmask16((1u << left) - 1), wide);
    }
}

void widen_bf16(const uint8_t* values, int64_t n, float* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        _mm_prefetch(reinterpret_cast<const char*>(values + 2 * i) + kPrefetch, _MM_HINT_T0);
        const __m512i bits = _mm512_cvtepu16_epi32(load_words(values + 2 * i, left));
        _mm512_mask_storeu_epi32(out + i, __mmask16((1u << left) - 1), _mm512_slli_epi32(bits, 16));
    }
}

void narrow_f16(const float* values, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; i += 16) {
        const int64_t left = n - i < 16 ? n - i : 16;
        const __m256i halves = _mm512_cvtps_ph(load_first(values + i, left), 0);
        _mm256_mask_storeu_epi16(out + i, __mmask16((1u << left) - 1), halves);
    }
}

}  // namespace

extern const Kernels kAvx512Vnni;
const Kernels kAvx512Vnni{"avx512vnni", find_route,       dense_dot,    widen_f16,    widen_bf16,
                          narrow_f16,   quantize_row,     hadamard_row, rms_norm_row, swiglu_row,
                          rope_row,     attend<uint16_t>, attend<float>};

}  // namespace bonsai

#endif
