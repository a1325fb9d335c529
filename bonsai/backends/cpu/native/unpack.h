// Codes of every packing to int16, in the natural order of elements. Baseline code: never include
// this where ISA flags are on.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>

namespace bonsai {

// Byte -> its `8 / bits` codes, lowest bits first, each multiplied by `factor`.
template <int bits, int factor>
constexpr std::array<int16_t, 256 * 8 / bits> code_table() {
    std::array<int16_t, 256 * 8 / bits> table{};
    for (int byte = 0; byte < 256; ++byte) {
        for (int i = 0; i < 8 / bits; ++i) {
            const int code = (byte >> (bits * i)) & ((1 << bits) - 1);
            table[size_t(byte * (8 / bits) + i)] = int16_t(factor * code);
        }
    }
    return table;
}

template <int bits, int factor>
void unpack_bits(const uint8_t* codes, int64_t elements, int16_t* out) {
    static constexpr auto table = code_table<bits, factor>();
    constexpr int per_byte = 8 / bits;
    for (int64_t i = 0; i < elements / per_byte; ++i) {
        std::memcpy(out + i * per_byte, &table[size_t(codes[i] * per_byte)],
                    per_byte * sizeof(int16_t));
    }
}

// trit + 1
inline void unpack_t2(const uint8_t* codes, int64_t elements, int16_t* out) {
    unpack_bits<2, 1>(codes, elements, out);
}

// trit + 1, that is 0 or 2, so that all ternary packings have the same center
inline void unpack_b1(const uint8_t* codes, int64_t elements, int16_t* out) {
    unpack_bits<1, 2>(codes, elements, out);
}

inline void unpack_q4(const uint8_t* codes, int64_t elements, int16_t* out) {
    unpack_bits<4, 1>(codes, elements, out);
}

inline void unpack_q8(const uint8_t* codes, int64_t elements, int16_t* out) {
    for (int64_t i = 0; i < elements; ++i) out[i] = codes[i];
}

// A stage of base-3 bytes: digit d of byte b is element d * count + b. A byte is the fraction
// value / 3^5 of 256, so each digit is what passes 256 when the fraction is multiplied by 3.
inline const uint8_t* unpack_t5_stage(const uint8_t* codes, int count, int digits, int16_t* out) {
    uint16_t fraction[32];
    for (int b = 0; b < count; ++b) fraction[b] = codes[b];
    for (int d = 0; d < digits; ++d) {
        for (int b = 0; b < count; ++b) {
            const uint16_t tripled = uint16_t(3 * fraction[b]);
            out[d * count + b] = int16_t(tripled >> 8);
            fraction[b] = tripled & 255;
        }
    }
    return codes + count;
}

// One group of trit + 1: 13 * group / 64 bytes.
inline void unpack_t5(const uint8_t* codes, int64_t group, int16_t* out) {
    const int g = int(group);
    codes = unpack_t5_stage(codes, g / 8, 5, out);
    codes = unpack_t5_stage(codes, g / 16, 5, out + g / 8 * 5);
    unpack_t5_stage(codes, g / 64, 4, out + g / 16 * 15);
}

}  // namespace bonsai
