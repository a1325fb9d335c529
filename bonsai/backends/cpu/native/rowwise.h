// Element by element work on one row, in plain loops that compilers vectorise.
//
// Included once by every instruction set's file and compiled with its flags. Everything is in an
// anonymous namespace and nothing of the standard library is instantiated: a function with external
// linkage that was compiled for a newer CPU could otherwise be linked into the portable path.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace bonsai {
namespace {

float bits_to_float(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

uint32_t float_to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Adding 1.5 * 2^23 to |x| < 2^22 leaves no room for a fraction: it rounds to nearest, ties to
// even, and the integer stands in the low bits.
constexpr float kRounder = 12582912.0f;

// exp(x) within 2 units in the last place; 0 below -87, NaN stays NaN. Limits are laid over the
// bits: a choice between floats would keep compilers that honour traps from vectorising the loop
// around it.
inline float exp_row(float x) {
    const uint32_t above = 0u - uint32_t(x > 88.0f), below = 0u - uint32_t(x < -87.0f);
    const uint32_t limit = (float_to_bits(88.0f) & above) | (float_to_bits(-87.0f) & below);
    const float t = bits_to_float((float_to_bits(x) & ~(above | below)) | limit);
    const float shifted = t * 1.44269504f + kRounder;
    const float n = shifted - kRounder;
    // ln 2 in two parts, so that n * high is exact for |n| < 2^15.
    const float r = (t - n * 0.693359375f) + n * 2.12194440e-4f;
    // Taylor to degree 7: |r| <= 0.35, so the rest is below 6e-9.
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const uint32_t exponent = (float_to_bits(shifted) - float_to_bits(kRounder) + 127u) << 23;
    return bits_to_float(float_to_bits(p * bits_to_float(exponent)) & ~below);
}

// a where it is larger, else b, also where a is NaN; as bits for the same reason.
inline float larger(float a, float b) {
    const uint32_t mask = 0u - uint32_t(a > b);
    return bits_to_float((float_to_bits(a) & mask) | (float_to_bits(b) & ~mask));
}

void swiglu_row(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + exp_row(-gate[i])) * up[i];
}

// Scores become exp(score - max), in place; those up to the next multiple of 8 become 0.
void softmax_row(float* scores, int count, float* max, float* sum) {
    const int padded = (count + 7) & ~7;
    for (int j = count; j < padded; ++j) scores[j] = bits_to_float(0xff800000u);  // -inf
    float lanes[8];
    for (int l = 0; l < 8; ++l) lanes[l] = scores[l];
    for (int j = 8; j < padded; j += 8) {
        for (int l = 0; l < 8; ++l) lanes[l] = larger(scores[j + l], lanes[l]);
    }
    float largest = lanes[0];
    for (int l = 1; l < 8; ++l) largest = larger(lanes[l], largest);
    for (int j = 0; j < padded; ++j) scores[j] = exp_row(scores[j] - largest);
    for (int l = 0; l < 8; ++l) lanes[l] = 0;
    for (int j = 0; j < padded; j += 8) {
        for (int l = 0; l < 8; ++l) lanes[l] += scores[j + l];
    }
    float total = 0;
    for (int l = 0; l < 8; ++l) total += lanes[l];
    *max = largest;
    *sum = total;
}

void rms_norm_row(const float* x, const float* gain, int64_t n, float eps, float* out) {
    double lanes[8] = {};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; ++j) lanes[j] += double(x[i + j]) * double(x[i + j]);
    }
    for (; i < n; ++i) lanes[0] += double(x[i]) * double(x[i]);
    double sum = 0;
    for (double lane : lanes) sum += lane;
    const float factor = float(1.0 / std::sqrt(sum / double(n) + double(eps)));
    for (i = 0; i < n; ++i) out[i] = x[i] * factor * gain[i];
}

void rope_row(const float* x, const float* cos, const float* sin, int64_t half, int64_t width,
              float* out) {
    for (int64_t i = 0; i < half; ++i) out[i] = x[i] * cos[i] - x[i + half] * sin[i];
    for (int64_t i = 0; i < half; ++i) out[i + half] = x[i + half] * cos[i] + x[i] * sin[i];
    for (int64_t i = 2 * half; i < width; ++i) out[i] = x[i];
}

// Strides 1, 2 and 4 of the butterfly in registers.
void hadamard_eights(float* x, int64_t n) {
    for (int64_t i = 0; i + 8 <= n; i += 8) {
        float* p = x + i;
        float a[8], b[8];
        for (int j = 0; j < 8; j += 2) a[j] = p[j] + p[j + 1], a[j + 1] = p[j] - p[j + 1];
        for (int j = 0; j < 8; j += 4) {
            b[j] = a[j] + a[j + 2], b[j + 1] = a[j + 1] + a[j + 3];
            b[j + 2] = a[j] - a[j + 2], b[j + 3] = a[j + 1] - a[j + 3];
        }
        for (int j = 0; j < 4; ++j) p[j] = b[j] + b[j + 4], p[j + 4] = b[j] - b[j + 4];
    }
}

// One block of the unnormalised Sylvester transform, in place.
void hadamard_block(float* x, int64_t block) {
    int64_t stride = 1;
    if (block >= 8) {
        hadamard_eights(x, block);
        stride = 8;
    }
    for (; stride < block; stride *= 2) {
        for (int64_t start = 0; start < block; start += 2 * stride) {
            float* low = x + start;
            float* high = low + stride;
            for (int64_t j = 0; j < stride; ++j) {
                const float a = low[j], b = high[j];
                low[j] = a + b;
                high[j] = a - b;
            }
        }
    }
}

void hadamard_row(const float* x, const int8_t* signs, int64_t n, int64_t block, bool inverse,
                  float* out) {
    const float norm = float(1.0 / std::sqrt(double(block)));
    if (inverse) {
        std::memcpy(out, x, size_t(n) * sizeof(float));
    } else {
        for (int64_t i = 0; i < n; ++i) out[i] = x[i] * float(signs[i]);
    }
    for (int64_t start = 0; start < n; start += block) hadamard_block(out + start, block);
    if (inverse) {
        for (int64_t i = 0; i < n; ++i) out[i] = out[i] * norm * float(signs[i]);
    } else {
        for (int64_t i = 0; i < n; ++i) out[i] *= norm;
    }
}

// Rounds `chunk` elements to integers of at most `top`, adds them up, returns their scale.
template <int chunk>
float quantize_chunk(const float* x, int top, int16_t* q, int32_t* sum) {
    // As integers, magnitudes order like floats, and inf and NaN are the largest of all.
    uint32_t largest = 0;
    for (int i = 0; i < chunk; ++i) {
        const uint32_t bits = float_to_bits(x[i]) & 0x7fffffffu;
        largest = bits > largest ? bits : largest;
    }
    const float peak = bits_to_float(largest);
    *sum = 0;
    if (largest >= 0x7f800000u || peak <= 1e-30f) {  // so small: 0, or 1 / peak overflows
        std::memset(q, 0, chunk * sizeof *q);
        return largest >= 0x7f800000u ? bits_to_float(0x7fc00000u) : 0.0f;
    }
    const float inverse = float(top) / peak;
    int32_t total = 0;
    for (int i = 0; i < chunk; ++i) {
        const uint32_t value = float_to_bits(x[i] * inverse + kRounder) - float_to_bits(kRounder);
        q[i] = int16_t(value);
        total += int32_t(value);
    }
    *sum = total;
    return peak / float(top);
}

// One block into its slots and lane sums; q[layout.block] is 0.
template <class Slot>
void place_block(const int16_t* q, const Layout& layout, int center, uint8_t* slots,
                 int32_t* lane_sums) {
    for (int i = 0; i < layout.lanes; ++i) lane_sums[i] = 0;
    const int16_t* element = layout.element;
    for (int start = 0, j = 0; start < layout.slots; start += layout.run, ++j) {
        int32_t sum = 0;
        for (int i = start; i < start + layout.run; ++i) {
            const int16_t value = q[element[i]];
            const Slot slot = Slot(value);
            sum += value;
            std::memcpy(slots + int64_t(i) * int64_t(sizeof slot), &slot, sizeof slot);
        }
        // q8, the largest: 128 * 32 elements * 32767 < 2^27.
        lane_sums[layout.lane[j]] += center * sum;
    }
}

template <int chunk>
void quantize_chunks(const float* x, int64_t n, const Route& route, const Activations& shape,
                     const ActivationRow& out) {
    const Layout& layout = *route.layout;
    const int chunks = layout.block / chunk;
    alignas(64) int16_t q[kMaxBlock + 1];
    q[layout.block] = 0;
    for (int64_t b = 0; b < shape.blocks; ++b) {
        for (int c = 0; c < chunks; ++c) {
            const int64_t start = b * layout.block + int64_t(c) * chunk;
            alignas(64) float padded[chunk];
            const float* from = padded;
            if (start + chunk <= n) {
                from = x + start;
            } else {  // the last ones: what is missing is 0
                std::memset(padded, 0, sizeof padded);
                if (start < n) std::memcpy(padded, x + start, size_t(n - start) * sizeof(float));
            }
            int32_t sum;
            const float scale = quantize_chunk<chunk>(from, route.top, q + c * chunk, &sum);
            out.scales[b * chunks + c] = scale;
            out.sums[b * chunks + c] = scale * float(sum);
        }
        uint8_t* slots = out.slots + b * layout.slots * layout.slot_bytes;
        int32_t* lane_sums = out.lane_sums + b * layout.lanes;
        if (layout.slot_bytes == 1) {
            place_block<int8_t>(q, layout, route.center, slots, lane_sums);
        } else {
            place_block<int16_t>(q, layout, route.center, slots, lane_sums);
        }
    }
}

void quantize_row(const float* x, int64_t n, const Route& route, const Activations& shape,
                  const ActivationRow& out) {
    switch (shape.chunk) {
        case 32: quantize_chunks<32>(x, n, route, shape, out); break;
        case 64: quantize_chunks<64>(x, n, route, shape, out); break;
        default: quantize_chunks<128>(x, n, route, shape, out); break;
    }
}

}  // namespace
}  // namespace bonsai
