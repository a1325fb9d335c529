// How blocks of codes become vectors of 64 bytes, and how those meet activations. Part of
// avx512vnni.cpp.
//
// A block type says what one of avx2_blocks.h says, for vectors of twice the size: kBlock elements
// in kBytes bytes, of which the loads touch kReach; kPlanes vectors of codes, the first kFirst of
// which belong to one set of scales and the others to a second.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace bonsai {
namespace {

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

inline __m256i load_half(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

inline __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// 2, 4 or 8 scales in the low lanes. No more is loaded, so that what was just stored is forwarded.
template <int chunks>
inline __m512 load_scales(const float* s) {
    if (chunks == 2) {
        return _mm512_castps128_ps512(
            _mm_castpd_ps(_mm_load_sd(reinterpret_cast<const double*>(s))));
    }
    return chunks == 4 ? _mm512_castps128_ps512(_mm_loadu_ps(s))
                       : _mm512_castps256_ps512(_mm256_loadu_ps(s));
}

// The scales, each on as many of the 16 lanes.
template <int chunks>
inline __m512 spread(const float* s) {
    constexpr int n = 16 / chunks;
    const __m512i index =
        _mm512_setr_epi32(0, 1 / n, 2 / n, 3 / n, 4 / n, 5 / n, 6 / n, 7 / n, 8 / n, 9 / n, 10 / n,
                          11 / n, 12 / n, 13 / n, 14 / n, 15 / n);
    return _mm512_permutexvar_ps(index, load_scales<chunks>(s));
}

// Codes 0 to 2 (a stray t2 code 3 counts as 3) times int8, four products per lane, in int32.
struct Ternary {
    static constexpr int kSlot = 1, kCenter = 1, kTop = 127;
    static __m512i add(__m512i sum, __m512i codes, __m512i q) {
        return _mm512_dpbusd_epi32(sum, codes, q);
    }
};

// Codes 0 to 255 times int16, in int32: q4 adds 4 planes of pairs, 8 * 15 * 32767, and q8 2 planes,
// 4 * 255 * 32767 < 2^26.
struct Affine {
    static constexpr int kSlot = 2, kTop = 32767;
    static __m512i add(__m512i sum, __m512i codes, __m512i q) {
        return _mm512_dpwssd_epi32(sum, codes, q);
    }
};

// 64 bytes of four codes; plane j holds bits 2j and 2j + 1 of every byte.
template <int group>
struct T2 : Ternary {
    static constexpr int kBlock = 256, kBytes = 64, kReach = 64, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = kBlock / group;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load(p), low = _mm512_set1_epi8(3);
        c[0] = _mm512_and_si512(x, low);
        c[1] = _mm512_and_si512(_mm512_srli_epi16(x, 2), low);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        c[3] = _mm512_and_si512(_mm512_srli_epi16(x, 6), low);
    }
    static int element(int plane, int byte) { return 4 * byte + plane; }
    static __m512 scale(const float* s) { return spread<kChunks>(s); }
};

// 32 bytes of eight bits, twice: the low half holds bits 0 to 3 and the high half bits 4 to 7. The
// code of a bit is 0 or 2, trit + 1 as in the other packings.
template <int group>
struct B1 : Ternary {
    static constexpr int kBlock = 256, kBytes = 32, kReach = 32, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = kBlock / group;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m256i half = load_half(p);
        const __m512i both = join(half, _mm256_srli_epi16(half, 4)), two = _mm512_set1_epi8(2);
        c[0] = _mm512_and_si512(_mm512_add_epi8(both, both), two);
        c[1] = _mm512_and_si512(both, two);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(both, 1), two);
        c[3] = _mm512_and_si512(_mm512_srli_epi16(both, 2), two);
    }
    static int element(int plane, int byte) { return 8 * (byte % 32) + plane + byte / 32 * 4; }
    static __m512 scale(const float* s) {  // both halves are the same 256 elements
        constexpr int n = 8 / kChunks;
        const __m512i index = _mm512_setr_epi32(0, 1 / n, 2 / n, 3 / n, 4 / n, 5 / n, 6 / n, 7 / n,
                                                0, 1 / n, 2 / n, 3 / n, 4 / n, 5 / n, 6 / n, 7 / n);
        return _mm512_permutexvar_ps(index, load_scales<kChunks>(s));
    }
};

// The five digits of 64 base-3 bytes. A byte is a fraction of 256, a digit is what passes 256 when
// the fraction is tripled: (fraction >= 86) + (fraction >= 171).
inline void unpack_digits(__m512i x, __m512i* c) {
    const __m512i one = _mm512_set1_epi8(1), two = _mm512_set1_epi8(2);
    for (int d = 0; d < 5; ++d) {
        const __mmask64 first = _mm512_cmpgt_epu8_mask(x, _mm512_set1_epi8(85));
        const __mmask64 second = _mm512_cmpgt_epu8_mask(x, _mm512_set1_epi8(char(170)));
        c[d] = _mm512_mask_mov_epi8(_mm512_maskz_mov_epi8(first, one), second, two);
        x = _mm512_add_epi8(x, _mm512_add_epi8(x, x));
    }
}

// The element of a group of `g` in digit d of byte b of the group's 13 g / 64 bytes, or -1.
inline int t5_element(int g, int d, int b) {
    if (b < g / 8) return d * (g / 8) + b;
    b -= g / 8;
    if (b < g / 16) return g / 8 * 5 + d * (g / 16) + b;
    b -= g / 16;
    return b < g / 64 && d < 4 ? g / 16 * 15 + d * (g / 64) + b : -1;
}

template <int group>
struct T5;

// Four groups of 13 bytes, each in a quarter of the vector. What the loads read beyond a group
// meets activations of 0.
template <>
struct T5<64> : Ternary {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 55, kPlanes = 5, kFirst = 5;
    static constexpr int kChunks = 4;
    static void unpack(const uint8_t* p, __m512i* c) {
        const auto quarter = [p](int i) {
            return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 13 * i));
        };
        __m512i x = _mm512_castsi128_si512(quarter(0));
        x = _mm512_inserti32x4(x, quarter(1), 1);
        x = _mm512_inserti32x4(x, quarter(2), 2);
        unpack_digits(_mm512_inserti32x4(x, quarter(3), 3), c);
    }
    static int element(int plane, int byte) {
        const int found = t5_element(64, plane, byte % 16);
        return found < 0 ? found : found + byte / 16 * 64;
    }
    static __m512 scale(const float* s) { return spread<4>(s); }
};

// Two groups of 26 bytes, one in each half.
template <>
struct T5<128> : Ternary {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 58, kPlanes = 5, kFirst = 5;
    static constexpr int kChunks = 2;
    static void unpack(const uint8_t* p, __m512i* c) {
        unpack_digits(join(load_half(p), load_half(p + 26)), c);
    }
    static int element(int plane, int byte) {
        const int found = t5_element(128, plane, byte % 32);
        return found < 0 ? found : found + byte / 32 * 128;
    }
    static __m512 scale(const float* s) { return spread<2>(s); }
};

// One group of 52 bytes. Digits 0 to 3 of the first 32 bytes are elements 0 to 127, the first
// chunk; everything else is the second.
template <>
struct T5<256> : Ternary {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 64, kPlanes = 5, kFirst = 4;
    static constexpr int kChunks = 2;
    static void unpack(const uint8_t* p, __m512i* c) { unpack_digits(load(p), c); }
    static int element(int plane, int byte) { return t5_element(256, plane, byte); }
    static __m512 scale(const float* s) { return spread<2>(s); }
};

// 64 bytes of two codes, as 32 words of four.
struct Q4 : Affine {
    static constexpr int kBlock = 128, kBytes = 64, kReach = 64, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = 4, kCenter = 8;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load(p), low = _mm512_set1_epi16(15);
        c[0] = _mm512_and_si512(x, low);
        c[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(x, 8), low);
        c[3] = _mm512_srli_epi16(x, 12);
    }
    static int element(int plane, int word) { return 4 * word + plane; }
    static __m512 scale(const float* s) { return spread<4>(s); }
};

struct Q8 : Affine {
    static constexpr int kBlock = 64, kBytes = 64, kReach = 64, kPlanes = 2, kFirst = 2;
    static constexpr int kChunks = 2, kCenter = 128;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load(p);
        c[0] = _mm512_and_si512(x, _mm512_set1_epi16(255));
        c[1] = _mm512_srli_epi16(x, 8);
    }
    static int element(int plane, int word) { return 2 * word + plane; }
    static __m512 scale(const float* s) { return spread<2>(s); }
};

template <class Block>
struct Sizes {
    static constexpr bool kTwoHalves = Block::kFirst < Block::kPlanes;
    static constexpr int kLanes = kTwoHalves ? 32 : 16;
    static constexpr int kSlotBytes = 64 * Block::kPlanes;
};

// A plane is one vector; the 4 bytes of a lane are added up.
template <class Block>
const Layout* block_layout() {
    constexpr int per_plane = 64 / Block::kSlot, run = 4 / Block::kSlot;
    constexpr int slots = Block::kPlanes * per_plane;
    static const struct Tables {
        int16_t element[slots];
        uint8_t lane[slots / run];
        Layout layout;
        Tables()
            : layout{Block::kBlock, slots, Block::kSlot, Sizes<Block>::kLanes, run, element, lane} {
            for (int i = 0; i < slots; ++i) {
                const int found = Block::element(i / per_plane, i % per_plane);
                element[i] = int16_t(found < 0 ? Block::kBlock : found);
            }
            for (int i = 0; i < slots / run; ++i) {
                lane[i] = uint8_t(i % 16 + (i / 16 < Block::kFirst ? 0 : 16));
            }
        }
    } tables;
    return &tables.layout;
}

inline __m512 add_scaled(__m512 acc, __m512i dot, const int32_t* lane_sums, __m512 scale) {
    return _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(dot, load(lane_sums))), scale, acc);
}

// Planes [from, to) of one block of R rows times N tokens, whose sums take turns on each vector.
template <class Block, int R, int N, int from, int to>
inline void dot_planes(const __m512i* const* codes, const uint8_t* const* slots, int64_t offset,
                       __m512i (*sums)[N]) {
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < N; ++t) sums[r][t] = _mm512_setzero_si512();
    }
    for (int j = from; j < to; ++j) {
        for (int t = 0; t < N; ++t) {
            const __m512i q = load(slots[t] + offset + 64 * j);
            for (int r = 0; r < R; ++r) sums[r][t] = Block::add(sums[r][t], codes[r][j], q);
        }
    }
}

// Block `b` of R rows times N tokens; `codes` are those of the block. Row r * N + t of `products`
// [R * N, stride] holds the products of scales of row r and token t.
template <class Block, int R, int N>
inline void add_block(__m512 (*acc)[N], const __m512i* const* codes, const uint8_t* const* slots,
                      int64_t b, const int32_t* const* lane_sums, const float* products,
                      int64_t stride) {
    constexpr int first = Block::kFirst, planes = Block::kPlanes, lanes = Sizes<Block>::kLanes;
    const int64_t offset = b * Sizes<Block>::kSlotBytes;
    const float* s = products + b * Block::kChunks;
    __m512i sums[R][N];
    dot_planes<Block, R, N, 0, first>(codes, slots, offset, sums);
    for (int r = 0; r < R; ++r) {
        for (int t = 0; t < N; ++t) {
            const __m512 scale = Block::scale(s + (r * N + t) * stride);
            acc[r][t] = add_scaled(acc[r][t], sums[r][t], lane_sums[t] + b * lanes, scale);
        }
    }
    if constexpr (first < planes) {
        dot_planes<Block, R, N, first, planes>(codes, slots, offset, sums);
        for (int r = 0; r < R; ++r) {
            for (int t = 0; t < N; ++t) {
                const __m512 scale = _mm512_set1_ps(s[(r * N + t) * stride + 1]);
                acc[r][t] = add_scaled(acc[r][t], sums[r][t], lane_sums[t] + b * lanes + 16, scale);
            }
        }
    }
}

}  // namespace
}  // namespace bonsai
