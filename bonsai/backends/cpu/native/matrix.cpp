#include "matrix.h"

#include <cstring>
#include <stdexcept>

#include "half.h"
#include "unpack.h"

namespace bonsai {
namespace {

struct Kind {
    const char* name;
    Packing packing;
    int bits;  // per value; 0 for t5
    bool biased;
    int groups[4];
};

constexpr Kind kKinds[] = {
    {"t2", Packing::t2, 2, false, {32, 64, 128, 256}},
    {"t5", Packing::t5, 0, false, {64, 128, 256}},
    {"b1", Packing::b1, 1, false, {32, 64, 128, 256}},
    {"q4", Packing::q4, 4, true, {32, 64, 128}},
    {"q8", Packing::q8, 8, true, {32, 64, 128}},
    {"f32", Packing::f32, 32, false, {}},
    {"f16", Packing::f16, 16, false, {}},
    {"bf16", Packing::bf16, 16, false, {}},
};

const Kind& find_kind(const std::string& name) {
    for (const Kind& kind : kKinds) {
        if (name == kind.name) return kind;
    }
    throw std::invalid_argument("no packing is called '" + name + "'");
}

void expect(const char* plane, const Plane& found, int64_t rows, int64_t stride) {
    if (found.data && found.rows == rows && found.stride == stride) return;
    throw std::invalid_argument(std::string(plane) + ": " + std::to_string(found.rows) + " x " +
                                std::to_string(found.stride) + " bytes, expected " +
                                std::to_string(rows) + " x " + std::to_string(stride));
}

bool allowed(const Kind& kind, int group) {
    for (int known : kind.groups) {
        if (known && known == group) return true;
    }
    return false;
}

using Unpack = void (*)(const uint8_t* codes, int64_t elements, int16_t* out);

Unpack unpacker(Packing packing) {
    switch (packing) {
        case Packing::t2: return unpack_t2;
        case Packing::b1: return unpack_b1;
        case Packing::t5: return unpack_t5;
        case Packing::q4: return unpack_q4;
        default: return unpack_q8;
    }
}

void expand_dense(const Matrix& m, int64_t row, float* out) {
    const uint8_t* from = m.codes + row * m.codes_stride;
    if (m.packing == Packing::f32) {
        std::memcpy(out, from, size_t(m.columns) * 4);
    } else if (m.packing == Packing::f16) {
        for (int64_t i = 0; i < m.columns; ++i) out[i] = half_at(from, i);
    } else {
        for (int64_t i = 0; i < m.columns; ++i) {
            uint16_t high;
            std::memcpy(&high, from + 2 * i, 2);
            const uint32_t bits = uint32_t(high) << 16;
            std::memcpy(out + i, &bits, 4);
        }
    }
}

}  // namespace

bool Transform::operator==(const Transform& other) const {
    if (!signs || !other.signs) return signs == other.signs;
    return block == other.block && width == other.width &&
           std::memcmp(signs, other.signs, size_t(width)) == 0;
}

Matrix make_matrix(const std::string& packing, int64_t rows, int64_t columns, int group,
                   const Plane& codes, const Plane& scales, const Plane& biases) {
    const Kind& kind = find_kind(packing);
    // Below 2^31 each, so that no product of sizes overflows.
    if (rows < 1 || columns < 1 || rows >= INT32_MAX || columns >= INT32_MAX) {
        throw std::invalid_argument("a matrix of " + std::to_string(rows) + " x " +
                                    std::to_string(columns) + " is not supported");
    }
    Matrix m{kind.packing, rows,         columns, 0,       0,
             codes.data,   codes.stride, nullptr, nullptr, nullptr};
    m.codes_end = codes.data + codes.rows * codes.stride;
    if (kind.bits >= 16) {
        expect("values", codes, rows, columns * kind.bits / 8);
        return m;
    }
    if (!allowed(kind, group)) {
        throw std::invalid_argument(packing + " has no group " + std::to_string(group));
    }
    m.group = group;
    m.groups = (columns + group - 1) / group;
    const int64_t bytes = kind.bits ? group * kind.bits / 8 : 13 * group / 64;
    expect("codes", codes, rows, m.groups * bytes);
    expect("scales", scales, rows, m.groups * 2);
    m.scales = scales.data;
    if (kind.biased) {
        expect("biases", biases, rows, m.groups * 2);
        m.biases = biases.data;
    }
    return m;
}

void expand_row(const Matrix& m, int64_t row, float* out) {
    if (m.group == 0) return expand_dense(m, row, out);
    const Unpack unpack = unpacker(m.packing);
    const int64_t bytes = m.codes_stride / m.groups;
    const int center = m.biases ? 0 : 1;
    int16_t codes[kMaxBlock];
    for (int64_t g = 0; g < m.groups; ++g) {
        unpack(m.codes + row * m.codes_stride + g * bytes, m.group, codes);
        const float scale = half_at(m.scales, row * m.groups + g);
        const float bias = m.biases ? half_at(m.biases, row * m.groups + g) : 0.0f;
        const int64_t start = g * m.group;
        const int64_t count = m.columns - start < m.group ? m.columns - start : m.group;
        for (int64_t i = 0; i < count; ++i) {
            out[start + i] = float(codes[i] - center) * scale + bias;
        }
    }
}

}  // namespace bonsai
