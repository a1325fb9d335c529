// The table that runs on any CPU: plain loops over int16 that compilers turn into the multiply-add
// of their baseline (pmaddwd on SSE2, smlal on NEON).
#include "half.h"
#include "kernels.h"
#include "rowwise.h"
#include "unpack.h"

namespace bonsai {
namespace {

using Unpack = void (*)(const uint8_t* codes, int64_t elements, int16_t* out);

// Natural order; one lane per chunk.
template <int block, int chunk>
const Layout* natural_layout() {
    static const struct Tables {
        int16_t element[block];
        uint8_t lane[block / chunk];
        Layout layout;
        Tables() : layout{block, block, 2, block / chunk, chunk, element, lane} {
            for (int i = 0; i < block; ++i) element[i] = int16_t(i);
            for (int i = 0; i < block / chunk; ++i) lane[i] = uint8_t(i);
        }
    } tables;
    return &tables.layout;
}

// int16 times int16 in int32: ternary 128 * 2 * 127, affine 32 * 255 * 32767 < 2^29.
inline int32_t dot_i16(const int16_t* a, const int16_t* b, int n) {
    int32_t sum = 0;
    for (int i = 0; i < n; ++i) sum += int32_t(a[i]) * int32_t(b[i]);
    return sum;
}

// Where token `t` lies in the activations.
ActivationRow row_of(const Activations& x, int64_t lanes, int64_t t) {
    return {const_cast<uint8_t*>(x.slots) + t * x.slots_stride,
            const_cast<float*>(x.scales) + t * x.chunks, const_cast<float*>(x.sums) + t * x.chunks,
            const_cast<int32_t*>(x.lane_sums) + t * x.blocks * lanes};
}

// One row of weights, unpacked: codes, the scale of each chunk, and for q4 and q8 the bias of each
// chunk with center * scale added, since the center is taken out of the codes.
struct Row {
    int16_t* codes;
    float* scales;
    float* biases;
};

template <Unpack unpack>
void unpack_row(const Task& task, const Layout& layout, int center, int64_t index, const Row& row) {
    const Matrix& w = *task.w;
    const int64_t bytes = w.codes_stride / task.x->blocks;
    const uint8_t* packed = w.codes + index * w.codes_stride;
    for (int64_t b = 0; b < task.x->blocks; ++b) {
        unpack(packed + b * bytes, layout.block, row.codes + b * layout.block);
    }
    for (int64_t c = 0; c < task.x->chunks; ++c) {
        const int64_t at = index * w.groups + c * task.x->chunk / w.group;
        row.scales[c] = half_at(w.scales, at);
        row.biases[c] = w.biases ? half_at(w.biases, at) + float(center) * row.scales[c] : 0.0f;
    }
}

// One output: the sum over chunks, always in this order.
float multiply(const Row& row, const Activations& shape, bool affine, const ActivationRow& x) {
    const auto* q = reinterpret_cast<const int16_t*>(x.slots);
    const int chunk = shape.chunk;
    float sum = 0;
    for (int64_t c = 0; c < shape.chunks; ++c) {
        const int32_t dot = dot_i16(row.codes + c * chunk, q + c * chunk, chunk) - x.lane_sums[c];
        sum += float(dot) * (row.scales[c] * x.scales[c]);
        if (affine) sum += row.biases[c] * x.sums[c];
    }
    return sum;
}

// Each row is unpacked once, whatever the number of tokens.
template <Unpack unpack, const Layout* (*layout_of)(), int center>
void rows(const Task& task) {
    const Layout& layout = *layout_of();
    auto* floats = reinterpret_cast<float*>(task.scratch);
    const Row row{reinterpret_cast<int16_t*>(floats + 2 * task.x->chunks), floats,
                  floats + task.x->chunks};
    for (int64_t r = task.first; r < task.last; ++r) {
        unpack_row<unpack>(task, layout, center, r, row);
        for (int64_t t = 0; t < task.tokens; ++t) {
            const ActivationRow x = row_of(*task.x, layout.lanes, t);
            const float sum = multiply(row, *task.x, task.w->biases != nullptr, x);
            const int64_t at = t * task.y_stride + r;
            task.y[at] = task.residual ? task.residual[at] + sum : sum;
        }
    }
}

template <Unpack unpack, int block, int chunk, int center>
const Route* natural_route(const char* name, int top) {
    constexpr auto layout = &natural_layout<block, chunk>;
    static const Route route{name,
                             layout(),
                             chunk,
                             center,
                             top,
                             &rows<unpack, layout, center>,
                             &rows<unpack, layout, center>};
    return &route;
}

template <Unpack unpack>
const Route* bit_route(const char* name, int group) {
    switch (group) {
        case 32: return natural_route<unpack, 32, 32, 1>(name, 127);
        case 64: return natural_route<unpack, 64, 64, 1>(name, 127);
        case 128:
        case 256: return natural_route<unpack, 128, 128, 1>(name, 127);
        default: return nullptr;
    }
}

const Route* t5_route(int group) {
    const char* name = "ternary_dot_t5_i8_portable";
    switch (group) {
        case 64: return natural_route<unpack_t5, 64, 64, 1>(name, 127);
        case 128: return natural_route<unpack_t5, 128, 128, 1>(name, 127);
        case 256: return natural_route<unpack_t5, 256, 128, 1>(name, 127);
        default: return nullptr;
    }
}

const Route* find_route(Packing packing, int group) {
    switch (packing) {
        case Packing::t2: return bit_route<unpack_t2>("ternary_dot_t2_i8_portable", group);
        case Packing::b1: return bit_route<unpack_b1>("ternary_dot_b1_i8_portable", group);
        case Packing::t5: return t5_route(group);
        case Packing::q4:
            return natural_route<unpack_q4, 32, 32, 8>("affine_dot_q4_i16_portable", 32767);
        case Packing::q8:
            return natural_route<unpack_q8, 32, 32, 128>("affine_dot_q8_i16_portable", 32767);
        default: return nullptr;
    }
}

void dense_dot(const float* w, int64_t n, const float* x, int64_t x_stride, int tokens,
               float* dots) {
    for (int t = 0; t < tokens; ++t) {
        const float* row = x + t * x_stride;
        float lanes[16] = {};
        int64_t i = 0;
        for (; i + 16 <= n; i += 16) {
            for (int j = 0; j < 16; ++j) lanes[j] += w[i + j] * row[i + j];
        }
        float sum = 0;
        for (; i < n; ++i) sum += w[i] * row[i];
        for (float lane : lanes) sum += lane;
        dots[t] = sum;
    }
}

void widen_f16(const uint8_t* values, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = half_at(values, i);
}

void widen_bf16(const uint8_t* values, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) {
        uint16_t high;
        std::memcpy(&high, values + 2 * i, 2);
        out[i] = bits_to_float(uint32_t(high) << 16);
    }
}

void narrow_f16(const float* values, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_to_half(values[i]);
}

inline float widened(uint16_t value) { return half_to_float(value); }
inline float widened(float value) { return value; }

template <class Element>
void attend(const AttentionTask& task) {
    const int width = task.kv.width;
    const auto* keys = static_cast<const Element*>(task.kv.keys);
    const auto* values = static_cast<const Element*>(task.kv.values);
    for (int i = 0; i < task.n; ++i) {
        const float* query = task.queries + int64_t(i) * width;
        float* scores = task.scores + int64_t(i) * kSpan;
        for (int j = 0; j < task.counts[i]; ++j) {
            const Element* key = keys + int64_t(j) * width;
            float lanes[16] = {};
            for (int d = 0; d < width; d += 16) {
                for (int l = 0; l < 16; ++l) lanes[l] += query[d + l] * widened(key[d + l]);
            }
            float dot = 0;
            for (float lane : lanes) dot += lane;
            scores[j] = dot;
        }
        softmax_row(scores, task.counts[i], task.max + i, task.sum + i);
        float* out = task.out + int64_t(i) * width;
        for (int d = 0; d < width; ++d) out[d] = 0;
        for (int j = 0; j < task.counts[i]; ++j) {
            const Element* value = values + int64_t(j) * width;
            for (int d = 0; d < width; ++d) out[d] += scores[j] * widened(value[d]);
        }
    }
}

}  // namespace

extern const Kernels kPortable;
const Kernels kPortable{"portable", find_route,       dense_dot,    widen_f16,    widen_bf16,
                        narrow_f16, quantize_row,     hadamard_row, rms_norm_row, swiglu_row,
                        rope_row,   attend<uint16_t>, attend<float>};

}  // namespace bonsai
