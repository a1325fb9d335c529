// How blocks of codes become vectors of small integers, and how those meet activations.
// Part of avx2.cpp.
//
// A block type says: kBlock elements in kBytes bytes, of which the loads touch kReach; kPlanes
// vectors of codes, the first kFirst of which belong to one set of scales and the others to a
// second; the element and lane of every activation slot; and `scale`, which spreads the chunk
// scales over lanes.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace bonsai {
namespace {

inline __m256i load(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }

// Four chunk scales, spread by an index per lane.
inline __m256 spread(const float* s, __m256i index) {
    return _mm256_permutevar_ps(_mm256_broadcast_ps(reinterpret_cast<const __m128*>(s)), index);
}

// Codes 0 to 2 (a stray t2 code 3 counts as 3) times int8. A pair is at most 2 * 3 * 127 = 762 and
// a lane adds up to 6 planes before it is widened: 4572, far from the 32767 of an int16.
struct Ternary {
    static constexpr int kSlot = 1, kCenter = 1, kTop = 127;
    static __m256i multiply(__m256i codes, __m256i q) { return _mm256_maddubs_epi16(codes, q); }
    static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi16(a, b); }
    static __m256i widen(__m256i sum) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(1)); }
};

// Codes 0 to 255 times int16, in int32: q8 adds 2 planes of pairs, 4 * 255 * 32767 < 2^26.
struct Affine {
    static constexpr int kSlot = 2, kTop = 32767;
    static __m256i multiply(__m256i codes, __m256i q) { return _mm256_madd_epi16(codes, q); }
    static __m256i add(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
    static __m256i widen(__m256i sum) { return sum; }
};

// 32 bytes of four codes; plane j holds bits 2j and 2j + 1 of every byte.
template <int group>
struct T2 : Ternary {
    static constexpr int kBlock = 128, kBytes = 32, kReach = 32, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = 128 / group;
    static void unpack(const uint8_t* p, __m256i* c) {
        const __m256i x = load(p), low = _mm256_set1_epi8(3);
        c[0] = _mm256_and_si256(x, low);
        c[1] = _mm256_and_si256(_mm256_srli_epi16(x, 2), low);
        c[2] = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        c[3] = _mm256_and_si256(_mm256_srli_epi16(x, 6), low);
    }
    static int element(int plane, int byte) { return 4 * byte + plane; }
    static __m256 scale(const float* s) {
        if (kChunks == 1) return _mm256_broadcast_ss(s);
        return spread(s, kChunks == 2 ? _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1)
                                      : _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
    }
};

// 16 bytes of eight bits, twice: the low half holds bits 0 to 3 and the high half bits 4 to 7. The
// code of a bit is 0 or 2, trit + 1 as in the other packings.
template <int group>
struct B1 : Ternary {
    static constexpr int kBlock = 128, kBytes = 16, kReach = 16, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = 128 / group;
    static void unpack(const uint8_t* p, __m256i* c) {
        const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m256i both =
            _mm256_inserti128_si256(_mm256_castsi128_si256(half), _mm_srli_epi16(half, 4), 1);
        const __m256i two = _mm256_set1_epi8(2);
        c[0] = _mm256_and_si256(_mm256_add_epi8(both, both), two);
        c[1] = _mm256_and_si256(both, two);
        c[2] = _mm256_and_si256(_mm256_srli_epi16(both, 1), two);
        c[3] = _mm256_and_si256(_mm256_srli_epi16(both, 2), two);
    }
    static int element(int plane, int byte) { return 8 * (byte % 16) + plane + byte / 16 * 4; }
    static __m256 scale(const float* s) {
        if (kChunks == 1) return _mm256_broadcast_ss(s);
        return spread(s, kChunks == 2 ? _mm256_setr_epi32(0, 0, 1, 1, 0, 0, 1, 1)
                                      : _mm256_setr_epi32(0, 1, 2, 3, 0, 1, 2, 3));
    }
};

// `n` digits of 32 base-3 bytes. A byte is a fraction of 256, a digit is what passes 256 when the
// fraction is tripled: (fraction >= 86) + (fraction >= 171). Bytes are kept minus 128, because AVX2
// compares signed ones; tripling commutes with that, since 3 * 128 = 128 (mod 256).
template <int n>
inline void unpack_digits(__m256i bytes, __m256i* c) {
    const __m256i zero = _mm256_setzero_si256();
    __m256i x = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
    for (int d = 0; d < n; ++d) {
        const __m256i one = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(85 - 128));
        const __m256i two = _mm256_cmpgt_epi8(x, _mm256_set1_epi8(170 - 128));
        c[d] = _mm256_sub_epi8(_mm256_sub_epi8(zero, one), two);
        x = _mm256_add_epi8(x, _mm256_add_epi8(x, x));
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

// 26 bytes; the last 6 of the load are the next group's and meet activations of 0.
template <>
struct T5<128> : Ternary {
    static constexpr int kBlock = 128, kBytes = 26, kReach = 32, kPlanes = 5, kFirst = 5;
    static constexpr int kChunks = 1;
    static void unpack(const uint8_t* p, __m256i* c) { unpack_digits<5>(load(p), c); }
    static int element(int plane, int byte) { return t5_element(128, plane, byte); }
    static __m256 scale(const float* s) { return _mm256_broadcast_ss(s); }
};

// Two groups of 13 bytes, one in each half of the vector.
template <>
struct T5<64> : Ternary {
    static constexpr int kBlock = 128, kBytes = 26, kReach = 29, kPlanes = 5, kFirst = 5;
    static constexpr int kChunks = 2;
    static void unpack(const uint8_t* p, __m256i* c) {
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 13));
        unpack_digits<5>(_mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1), c);
    }
    static int element(int plane, int byte) {
        const int found = t5_element(64, plane, byte % 16);
        return found < 0 ? found : found + byte / 16 * 64;
    }
    static __m256 scale(const float* s) {
        return spread(s, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    }
};

// 52 bytes, two loads. Digits 0 to 3 of the first 32 bytes are elements 0 to 127, the first chunk;
// everything else is the second.
template <>
struct T5<256> : Ternary {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 64, kPlanes = 10, kFirst = 4;
    static constexpr int kChunks = 2;
    static void unpack(const uint8_t* p, __m256i* c) {
        unpack_digits<5>(load(p), c);
        unpack_digits<5>(load(p + 32), c + 5);
    }
    static int element(int plane, int byte) {
        return plane < 5 ? t5_element(256, plane, byte) : t5_element(256, plane - 5, byte + 32);
    }
    static __m256 scale(const float* s) { return _mm256_broadcast_ss(s); }
};

// 32 bytes of two codes, as 16 words of four.
struct Q4 : Affine {
    static constexpr int kBlock = 64, kBytes = 32, kReach = 32, kPlanes = 4, kFirst = 4;
    static constexpr int kChunks = 2, kCenter = 8;
    static void unpack(const uint8_t* p, __m256i* c) {
        const __m256i x = load(p), low = _mm256_set1_epi16(15);
        c[0] = _mm256_and_si256(x, low);
        c[1] = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
        c[2] = _mm256_and_si256(_mm256_srli_epi16(x, 8), low);
        c[3] = _mm256_srli_epi16(x, 12);
    }
    static int element(int plane, int word) { return 4 * word + plane; }
    static __m256 scale(const float* s) {
        return spread(s, _mm256_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1));
    }
};

struct Q8 : Affine {
    static constexpr int kBlock = 32, kBytes = 32, kReach = 32, kPlanes = 2, kFirst = 2;
    static constexpr int kChunks = 1, kCenter = 128;
    static void unpack(const uint8_t* p, __m256i* c) {
        const __m256i x = load(p);
        c[0] = _mm256_and_si256(x, _mm256_set1_epi16(255));
        c[1] = _mm256_srli_epi16(x, 8);
    }
    static int element(int plane, int word) { return 2 * word + plane; }
    static __m256 scale(const float* s) { return _mm256_broadcast_ss(s); }
};

template <class Block>
struct Sizes {
    static constexpr bool kTwoHalves = Block::kFirst < Block::kPlanes;
    static constexpr int kLanes = kTwoHalves ? 16 : 8;
    static constexpr int kPlaneBytes = 32;
    static constexpr int kSlotBytes = Block::kPlanes * kPlaneBytes;
};

// A plane is one vector; after `widen` the 4 bytes of a lane have been added up.
template <class Block>
const Layout* block_layout() {
    constexpr int per_plane = 32 / Block::kSlot, run = 4 / Block::kSlot;
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
                lane[i] = uint8_t(i % 8 + (i / 8 < Block::kFirst ? 0 : 8));
            }
        }
    } tables;
    return &tables.layout;
}

// Planes [from, to) of one block: exact sums of code * q, 8 lanes of int32.
template <class Block, int from, int to>
inline __m256i dot_planes(const __m256i* codes, const uint8_t* slots) {
    __m256i sum = Block::multiply(codes[from], load(slots + 32 * from));
    for (int j = from + 1; j < to; ++j) {
        sum = Block::add(sum, Block::multiply(codes[j], load(slots + 32 * j)));
    }
    return Block::widen(sum);
}

inline __m256 add_scaled(__m256 acc, __m256i dot, const int32_t* lane_sums, __m256 scale) {
    return _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(dot, load(lane_sums))), scale, acc);
}

// acc + the block's contribution. `s` points at the products of scales of its chunks.
template <class Block>
inline __m256 add_block(__m256 acc, const __m256i* codes, const uint8_t* slots,
                        const int32_t* lane_sums, const float* s) {
    constexpr int first = Block::kFirst, planes = Block::kPlanes;
    acc = add_scaled(acc, dot_planes<Block, 0, first>(codes, slots), lane_sums, Block::scale(s));
    if constexpr (first < planes) {
        const __m256i dot = dot_planes<Block, first, planes>(codes, slots);
        acc = add_scaled(acc, dot, lane_sums + 8, Block::scale(s + 1));
    }
    return acc;
}

// The same for N tokens, whose sums take turns on each vector of codes.
template <class Block, int N, int from, int to>
inline void dot_planes_tile(const __m256i* codes, const uint8_t* const* slots, int64_t offset,
                            __m256i* sums) {
    for (int t = 0; t < N; ++t) {
        sums[t] = Block::multiply(codes[from], load(slots[t] + offset + 32 * from));
    }
    for (int j = from + 1; j < to; ++j) {
        for (int t = 0; t < N; ++t) {
            const __m256i product = Block::multiply(codes[j], load(slots[t] + offset + 32 * j));
            sums[t] = Block::add(sums[t], product);
        }
    }
    for (int t = 0; t < N; ++t) sums[t] = Block::widen(sums[t]);
}

template <class Block, int N>
inline void add_tile(__m256* acc, const __m256i* codes, const uint8_t* const* slots, int64_t b,
                     const int32_t* const* lane_sums, const float* products, int64_t stride) {
    constexpr int first = Block::kFirst, planes = Block::kPlanes, lanes = Sizes<Block>::kLanes;
    const int64_t offset = b * Sizes<Block>::kSlotBytes;
    const float* s = products + b * Block::kChunks;
    __m256i sums[N];
    dot_planes_tile<Block, N, 0, first>(codes, slots, offset, sums);
    for (int t = 0; t < N; ++t) {
        acc[t] =
            add_scaled(acc[t], sums[t], lane_sums[t] + b * lanes, Block::scale(s + t * stride));
    }
    if constexpr (first < planes) {
        dot_planes_tile<Block, N, first, planes>(codes, slots, offset, sums);
        for (int t = 0; t < N; ++t) {
            acc[t] = add_scaled(acc[t], sums[t], lane_sums[t] + b * lanes + 8,
                                Block::scale(s + t * stride + 1));
        }
    }
}

}  // namespace
}  // namespace bonsai
