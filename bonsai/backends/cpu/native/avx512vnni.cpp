// AVX-512 F, BW, DQ, VL and VNNI. Compiled with those flags, so nothing of the standard library may
// be instantiated here (see rowwise.h). Attention is that of AVX2.
#if defined(__x86_64__) || defined(_M_X64)

#include <immintrin.h>

#include "avx2_attention.h"
#include "avx512_rows.h"
#include "kernels.h"
#include "rowwise.h"

namespace bonsai {
namespace {

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
        dots[t] = sum_lanes(sum);
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
