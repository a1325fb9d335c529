// fp16 without hardware. Baseline code: never include this where ISA flags are on.
#pragma once

#include <cstdint>
#include <cstring>

namespace bonsai {

inline float half_to_float(uint16_t half) {
    const uint32_t sign = uint32_t(half & 0x8000u) << 16;
    const uint32_t magnitude = half & 0x7fffu;
    uint32_t bits;
    if (magnitude >= 0x7c00u) {  // inf, NaN
        bits = 0x7f800000u | (magnitude << 13);
    } else if (magnitude >= 0x0400u) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // 0 and subnormals: magnitude * 2^-24, exact in float
        const float value = float(magnitude) * 5.9604644775390625e-8f;
        std::memcpy(&bits, &value, 4);
    }
    bits |= sign;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float half_at(const uint8_t* plane, int64_t index) {
    uint16_t half;
    std::memcpy(&half, plane + 2 * index, 2);
    return half_to_float(half);
}

// To nearest, ties to even; overflow becomes inf.
inline uint16_t float_to_half(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t sign = uint16_t((bits >> 16) & 0x8000u);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return uint16_t(sign | 0x7e00u);   // NaN
    if (bits >= 0x477ff000u) return uint16_t(sign | 0x7c00u);  // 65520 and more
    if (bits < 0x38800000u) {  // below 2^-14: the sum's unit is 2^-24, that of a subnormal half
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        const float shifted = magnitude + 0.5f;
        uint32_t rounded;
        std::memcpy(&rounded, &shifted, 4);
        return uint16_t(sign | (rounded - 0x3f000000u));
    }
    const uint32_t odd = (bits >> 13) & 1u;
    return uint16_t(sign | ((bits - (112u << 23) + 0x0fffu + odd) >> 13));
}

}  // namespace bonsai
