// Checks of a matrix's planes, and its rows as float32.
#pragma once

#include <cstdint>
#include <string>

#include "kernels.h"

namespace bonsai {

// Signs, then the orthonormal Hadamard transform of each `block` inputs. `signs` is null for none.
struct Transform {
    const int8_t* signs = nullptr;
    int64_t block = 0;

    bool operator==(const Transform& other) const;
    int64_t width = 0;
};

// One plane as it was handed over: [rows, stride] bytes.
struct Plane {
    const uint8_t* data = nullptr;
    int64_t rows = 0, stride = 0;
};

// Raises std::invalid_argument naming the numbers that disagree.
Matrix make_matrix(const std::string& packing, int64_t rows, int64_t columns, int group,
                   const Plane& codes, const Plane& scales, const Plane& biases);

// Row `row` as stored (no transform undone), float32 [columns].
void expand_row(const Matrix& matrix, int64_t row, float* out);

}  // namespace bonsai
