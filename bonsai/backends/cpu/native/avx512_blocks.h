// How blocks of codes become vectors of 64 bytes, and how those meet activations. Part of
// avx512vnni.cpp.
//
// A block is kBlock elements in kBytes bytes, of which the loads touch kReach. Its codes become
// kPlanes vectors of 16 units of 4 bytes, and a unit belongs to one of kChunks chunks. One row sums
// up whole vectors (`dot_block`) and then the units of each chunk (`chunk_sums`); many rows go unit
// by unit (`first_unit`, `last_unit`), with one row per lane.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "kernels.h"

namespace bonsai {
namespace {

inline __m512i load(const void* p) { return _mm512_loadu_si512(p); }

// One load of what is used several times. GCC would load it again for each use, and at an address
// that 64 does not divide every load costs twice.
inline __m512i load_once(const void* p) {
    __m512i x = load(p);
#if defined(__GNUC__)
    __asm__("" : "+v"(x));
#endif
    return x;
}

inline __m256i load_half(const void* p) {
    return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}

inline __m512i join(__m256i low, __m256i high) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
}

// The 16 units of every plane are `chunks` runs of equal length, whose first `used` hold elements.
template <int chunks, int used = 16 / chunks>
struct Runs {
    static constexpr int kChunks = chunks;
    static constexpr int first_unit(int chunk, int) { return chunk * (16 / chunks); }
    static constexpr int last_unit(int chunk, int plane) { return first_unit(chunk, plane) + used; }
};

// Codes 0 to 2 (a stray t2 code 3 counts as 3) times int8, four products per lane, in int32.
struct Ternary {
    static constexpr int kSlot = 1, kCenter = 1, kTop = 127;
    static __m512i add(__m512i sum, __m512i codes, __m512i q) {
        return _mm512_dpbusd_epi32(sum, codes, q);
    }
};

// Codes 0 to 255 times int16, in int32: a chunk of 32 is at most 32 * 255 * 32767 < 2^29.
struct Affine {
    static constexpr int kSlot = 2, kTop = 32767;
    static __m512i add(__m512i sum, __m512i codes, __m512i q) {
        return _mm512_dpwssd_epi32(sum, codes, q);
    }
};

// 64 bytes of four codes; plane j holds bits 2j and 2j + 1 of every byte.
template <int group>
struct T2 : Ternary, Runs<256 / group> {
    static constexpr int kBlock = 256, kBytes = 64, kReach = 64, kPlanes = 4;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load_once(p), low = _mm512_set1_epi8(3);
        c[0] = _mm512_and_si512(x, low);
        c[1] = _mm512_and_si512(_mm512_srli_epi16(x, 2), low);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        c[3] = _mm512_and_si512(_mm512_srli_epi16(x, 6), low);
    }
    static int element(int plane, int byte) { return 4 * byte + plane; }
};

// 32 bytes of eight bits. Each 4 of them are two units: bits 0 to 3, then bits 4 to 7. The code of
// a bit is 0 or 2, trit + 1 as in the other packings.
template <int group>
struct B1 : Ternary, Runs<256 / group> {
    static constexpr int kBlock = 256, kBytes = 32, kReach = 32, kPlanes = 4;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512i both = _mm512_permutexvar_epi32(twice, _mm512_castsi256_si512(load_half(p)));
        const __m512i x = _mm512_srlv_epi32(both, _mm512_set1_epi64(int64_t(4) << 32));
        const __m512i two = _mm512_set1_epi8(2);
        c[0] = _mm512_and_si512(_mm512_add_epi8(x, x), two);
        c[1] = _mm512_and_si512(x, two);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(x, 1), two);
        c[3] = _mm512_and_si512(_mm512_srli_epi16(x, 2), two);
    }
    static int element(int plane, int byte) {
        return 8 * (byte / 8 * 4 + byte % 4) + byte / 4 % 2 * 4 + plane;
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
struct T5<64> : Ternary, Runs<4> {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 55, kPlanes = 5;
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
};

// Two groups of 26 bytes, 7 units, one in each half.
template <>
struct T5<128> : Ternary, Runs<2, 7> {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 58, kPlanes = 5;
    static void unpack(const uint8_t* p, __m512i* c) {
        unpack_digits(join(load_half(p), load_half(p + 26)), c);
    }
    static int element(int plane, int byte) {
        const int found = t5_element(128, plane, byte % 32);
        return found < 0 ? found : found + byte / 32 * 128;
    }
};

// One group of 52 bytes, 13 units. Digits 0 to 3 of the first 8 units are elements 0 to 127, the
// first chunk; everything else is the second.
template <>
struct T5<256> : Ternary {
    static constexpr int kBlock = 256, kBytes = 52, kReach = 64, kPlanes = 5, kChunks = 2;
    static constexpr int first_unit(int chunk, int plane) { return chunk && plane < 4 ? 8 : 0; }
    static constexpr int last_unit(int chunk, int plane) { return chunk ? 13 : plane < 4 ? 8 : 0; }
    static void unpack(const uint8_t* p, __m512i* c) { unpack_digits(load_once(p), c); }
    static int element(int plane, int byte) { return t5_element(256, plane, byte); }
};

// 64 bytes of two codes, as 32 words of four.
struct Q4 : Affine, Runs<4> {
    static constexpr int kBlock = 128, kBytes = 64, kReach = 64, kPlanes = 4, kCenter = 8;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load_once(p), low = _mm512_set1_epi16(15);
        c[0] = _mm512_and_si512(x, low);
        c[1] = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
        c[2] = _mm512_and_si512(_mm512_srli_epi16(x, 8), low);
        c[3] = _mm512_srli_epi16(x, 12);
    }
    static int element(int plane, int word) { return 4 * word + plane; }
};

struct Q8 : Affine, Runs<2> {
    static constexpr int kBlock = 64, kBytes = 64, kReach = 64, kPlanes = 2, kCenter = 128;
    static void unpack(const uint8_t* p, __m512i* c) {
        const __m512i x = load_once(p);
        c[0] = _mm512_and_si512(x, _mm512_set1_epi16(255));
        c[1] = _mm512_srli_epi16(x, 8);
    }
    static int element(int plane, int word) { return 2 * word + plane; }
};

// The chunk of a unit; empty units are anybody's.
template <class Block>
int chunk_of(int plane, int unit) {
    for (int c = 0; c < Block::kChunks; ++c) {
        if (Block::first_unit(c, plane) <= unit && unit < Block::last_unit(c, plane)) return c;
    }
    return 0;
}

template <class Block>
const Layout* block_layout() {
    constexpr int per_plane = 64 / Block::kSlot, run = 4 / Block::kSlot;
    constexpr int slots = Block::kPlanes * per_plane;
    static const struct Tables {
        int16_t element[slots];
        uint8_t lane[slots / run];
        Layout layout;
        Tables() : layout{Block::kBlock, slots, Block::kSlot, Block::kChunks, run, element, lane} {
            for (int i = 0; i < slots; ++i) {
                const int found = Block::element(i / per_plane, i % per_plane);
                element[i] = int16_t(found < 0 ? Block::kBlock : found);
            }
            for (int i = 0; i < slots / run; ++i)
                lane[i] = uint8_t(chunk_of<Block>(i / 16, i % 16));
        }
    } tables;
    return &tables.layout;
}

// Exact sums of code * q, per unit, of all planes of a block; the units are those of plane 0.
template <class Block>
inline __m512i dot_block(const __m512i* codes, const uint8_t* slots) {
    constexpr bool even = Block::last_unit(0, 0) == Block::last_unit(0, Block::kPlanes - 1);
    __m512i sum = _mm512_setzero_si512();
    for (int j = 0; j < Block::kPlanes - !even; ++j) {
        sum = Block::add(sum, codes[j], load(slots + 64 * j));
    }
    if constexpr (!even) {  // the last plane belongs to the second chunk, whose units are 8 to 15
        constexpr int j = Block::kPlanes - 1;
        const __m512i last = Block::add(_mm512_setzero_si512(), codes[j], load(slots + 64 * j));
        sum = _mm512_add_epi32(sum, _mm512_maskz_shuffle_i64x2(0xf0, last, last, 0x44));
        sum = _mm512_mask_add_epi32(sum, 0xff00, sum, last);
    }
    return sum;
}

// Sums of neighbours: those of a and then those of b, in each quarter.
inline __m512i add_pairs(__m512i a, __m512i b) {
    const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
    return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                            _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}

// The sums of 16 chunks in their order, from 16 / chunks vectors of sums per unit.
template <int chunks>
inline __m512i chunk_sums(const __m512i* v) {
    if constexpr (chunks == 8) {  // quarter q: chunks 2q and 2q + 1 of v[0], then of v[1]
        const __m512i order =
            _mm512_setr_epi32(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
        return _mm512_permutexvar_epi32(order, add_pairs(v[0], v[1]));
    } else if constexpr (chunks == 4) {  // quarter q: chunk q of v[0] to v[3]
        const __m512i order =
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
        const __m512i sums = add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
        return _mm512_permutexvar_epi32(order, sums);
    } else {  // the same with half a chunk each, for two times four vectors
        const __m512i order =
            _mm512_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15);
        const __m512i a = add_pairs(add_pairs(v[0], v[1]), add_pairs(v[2], v[3]));
        const __m512i b = add_pairs(add_pairs(v[4], v[5]), add_pairs(v[6], v[7]));
        const __m512i sums =
            _mm512_add_epi32(_mm512_shuffle_i32x4(a, b, 0x88), _mm512_shuffle_i32x4(a, b, 0xdd));
        return _mm512_permutexvar_epi32(order, sums);
    }
}

// Row i of 16 x 16 values becomes column i.
inline void transpose(const __m512i* in, __m512i* out) {
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(in[i], in[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(in[i], in[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // quarter q of u[i + k]: column 4q + k of rows i to i + 3
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int k = 0; k < 4; ++k) {
        const __m512i even = _mm512_shuffle_i32x4(u[k], u[4 + k], 0x88);
        const __m512i odd = _mm512_shuffle_i32x4(u[k], u[4 + k], 0xdd);
        const __m512i more_even = _mm512_shuffle_i32x4(u[8 + k], u[12 + k], 0x88);
        const __m512i more_odd = _mm512_shuffle_i32x4(u[8 + k], u[12 + k], 0xdd);
        out[k] = _mm512_shuffle_i32x4(even, more_even, 0x88);
        out[4 + k] = _mm512_shuffle_i32x4(odd, more_odd, 0x88);
        out[8 + k] = _mm512_shuffle_i32x4(even, more_even, 0xdd);
        out[12 + k] = _mm512_shuffle_i32x4(odd, more_odd, 0xdd);
    }
}

}  // namespace
}  // namespace bonsai
