// One linear map whose output is that of several matrices side by side.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "matrix.h"

namespace bonsai {

struct Part {
    Matrix matrix;
    Transform transform;
};

class Linear {
public:
    // The planes stay where they are and must outlive this. With `exact`, activations are not
    // quantized. Raises std::invalid_argument when the parts do not read the same input.
    Linear(const Kernels& kernels, std::vector<Part> parts, bool exact);

    int64_t rows() const { return rows_; }
    int64_t columns() const { return columns_; }

    // The route of each part, for people.
    std::vector<const char*> routes() const;

    // y [tokens, rows] = T(x) W^T (+ residual), x [tokens, columns]. `residual` may be null, or y.
    void run(const float* x, int64_t tokens, const float* residual, float* y) const;

private:
    // A form in which some part wants the input: transformed or not, floats or quantized.
    struct Need {
        Transform transform;
        const Route* route;  // null: floats
        int64_t padded;      // columns in whole groups
    };
    struct Segment {
        Matrix matrix;
        const Route* route;
        int need;
        int64_t offset;  // of its rows in the output
    };
    struct Run {
        const Segment* segment;
        int64_t first, last;  // rows
    };
    struct Input;

    std::vector<Run> cut(int threads, int64_t tokens) const;
    int find_need(const Need& wanted);
    Input prepare(const Need& need, const float* x, int64_t tokens, struct Workspace& memory) const;
    void run_segment(const Segment& segment, const Input& input, int64_t tokens, int64_t first,
                     int64_t last, const float* residual, float* y) const;
    void run_dense(const Segment& segment, const Input& input, int64_t tokens, int64_t first,
                   int64_t last, const float* residual, float* y) const;

    const Kernels& kernels_;
    bool exact_;
    int64_t rows_ = 0, columns_ = 0;
    std::vector<Segment> segments_;
    std::vector<Need> needs_;
};

}  // namespace bonsai
