#include "linear.h"

#include <algorithm>
#include <stdexcept>

#include "buffer.h"
#include "pool.h"

namespace bonsai {
namespace {

// Weights of the smallest item: enough to hide handing it out, and small enough that threads end
// together. Items shrink towards it: where one ends, what was prefetched belongs to another thread,
// which costs a fifth of the bandwidth if all of them are small.
constexpr int64_t kItemBytes = 32 * 1024;
constexpr int64_t kItemShare = 2;   // an item is one of this many per thread of what is left
constexpr int64_t kItemRows = 16;   // rows that kernels take at a time; items are whole ones
constexpr int64_t kManyRows = 64;   // rows of an item with several tokens
// Below this many multiply-adds a job is done before a sleeping worker would be awake.
constexpr int64_t kSmallJob = 100 * 1000;

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

thread_local Buffer item_scratch;

// Columns in whole groups.
int64_t padded_columns(const Matrix& m) { return m.group ? m.groups * m.group : m.columns; }

// `Task::scratch`, enough for any route: scales for a tile of tokens, then scales, biases and codes
// (of up to two bytes) for several rows.
int64_t scratch_bytes(const Layout& layout, const Activations& x) {
    const int64_t floats = (kTokenTile + 2 * kScratchRows) * round_up(x.chunks + kPadFloats, 16);
    return floats * 4 + kScratchRows * x.blocks * layout.slots * 2 + 64;
}

}  // namespace

// The input in the form of one need. `floats` is set for dense parts, `quantized` for the others.
struct Linear::Input {
    const float* floats;
    Activations quantized;
};

// Memory of one form of the input; kept from call to call by each thread that calls `run`.
struct Workspace {
    Buffer transformed, slots, scales, sums, lane_sums;
};

namespace {

// One need's memory per thread and position, so that nothing is allocated in the steady state.
Workspace& workspace(size_t need) {
    thread_local std::vector<std::unique_ptr<Workspace>> all;
    while (all.size() <= need) all.push_back(std::make_unique<Workspace>());
    return *all[need];
}

}  // namespace

Linear::Linear(const Kernels& kernels, std::vector<Part> parts, bool exact)
    : kernels_(kernels), exact_(exact) {
    if (parts.empty()) throw std::invalid_argument("a linear needs a matrix");
    columns_ = parts.front().matrix.columns;
    for (const Part& part : parts) {
        const Matrix& m = part.matrix;
        if (m.columns != columns_) {
            throw std::invalid_argument("matrices of " + std::to_string(columns_) + " and " +
                                        std::to_string(m.columns) + " columns share no input");
        }
        const bool quantized = m.group != 0 && !exact;
        const Route* route = quantized ? kernels.route(m.packing, m.group) : nullptr;
        if (quantized && !route)
            throw std::invalid_argument("no kernel for this packing and group");
        const int need = find_need({part.transform, route, padded_columns(m)});
        segments_.push_back({m, route, need, rows_});
        rows_ += m.rows;
    }
}

int Linear::find_need(const Need& wanted) {
    const auto same = [&wanted](const Need& need) {
        if (!(need.transform == wanted.transform)) return false;
        if (!need.route || !wanted.route) return need.route == wanted.route;
        // Quantized activations depend on nothing else.
        const Route &a = *need.route, &b = *wanted.route;
        const int64_t block = a.layout->block;
        return a.layout == b.layout && a.chunk == b.chunk && a.center == b.center &&
               a.top == b.top && round_up(need.padded, block) == round_up(wanted.padded, block);
    };
    const auto found = std::find_if(needs_.begin(), needs_.end(), same);
    if (found != needs_.end()) return int(found - needs_.begin());
    needs_.push_back(wanted);
    return int(needs_.size()) - 1;
}

std::vector<const char*> Linear::routes() const {
    std::vector<const char*> names;
    for (const Segment& segment : segments_) {
        names.push_back(segment.route ? segment.route->name : exact_ ? "exact" : "dense");
    }
    return names;
}

// Transforms and quantizes each token once.
Linear::Input Linear::prepare(const Need& need, const float* x, int64_t tokens,
                              Workspace& memory) const {
    Input input{x, {}};
    float* transformed = nullptr;
    if (need.transform.signs) {
        transformed = memory.transformed.get<float>(tokens * columns_);
        input.floats = transformed;
    }
    Activations& q = input.quantized;
    ActivationRow rows{};
    if (need.route) {
        const Layout& layout = *need.route->layout;
        q.blocks = round_up(need.padded, layout.block) / layout.block;
        q.chunk = need.route->chunk;
        q.chunks = q.blocks * layout.block / q.chunk;
        q.slots_stride = q.blocks * layout.slots * layout.slot_bytes;
        q.slots = rows.slots = memory.slots.get<uint8_t>(tokens * q.slots_stride);
        q.scales = rows.scales = memory.scales.get<float>(tokens * q.chunks + kPadFloats);
        q.sums = rows.sums = memory.sums.get<float>(tokens * q.chunks + kPadFloats);
        q.lane_sums = rows.lane_sums =
            memory.lane_sums.get<int32_t>(tokens * q.blocks * layout.lanes);
        std::fill_n(rows.scales + tokens * q.chunks, kPadFloats, 0.0f);
        std::fill_n(rows.sums + tokens * q.chunks, kPadFloats, 0.0f);
    }
    if (!transformed && !need.route) return input;
    Pool::shared().run(tokens, [&](int64_t t) {
        const float* from = x + t * columns_;
        if (transformed) {
            kernels_.hadamard(from, need.transform.signs, columns_, need.transform.block, false,
                              transformed + t * columns_);
            from = transformed + t * columns_;
        }
        if (!need.route) return;
        const ActivationRow row{rows.slots + t * q.slots_stride, rows.scales + t * q.chunks,
                                rows.sums + t * q.chunks,
                                rows.lane_sums + t * q.blocks * need.route->layout->lanes};
        kernels_.quantize(from, columns_, *need.route, q, row);
    });
    return input;
}

// Runs of rows of one segment after another, for `threads` that take them in this order.
std::vector<Linear::Run> Linear::cut(int threads, int64_t tokens) const {
    int64_t left = 0;  // bytes of codes
    for (const Segment& segment : segments_) {
        left += segment.matrix.rows * segment.matrix.codes_stride;
    }
    std::vector<Run> runs;
    for (const Segment& segment : segments_) {
        const Matrix& m = segment.matrix;
        for (int64_t first = 0; first < m.rows;) {
            const int64_t share = threads == 1 ? left : left / (kItemShare * threads);
            const int64_t least = tokens > 1 ? 1 : kItemBytes;
            int64_t step = round_up(std::max(share, least) / m.codes_stride + 1, kItemRows);
            if (tokens > 1) step = std::min(step, kManyRows);
            const int64_t last = std::min(first + step, m.rows);
            runs.push_back({&segment, first, last});
            left -= (last - first) * m.codes_stride;
            first = last;
        }
    }
    return runs;
}

void Linear::run(const float* x, int64_t tokens, const float* residual, float* y) const {
    std::vector<Input> inputs;
    inputs.reserve(needs_.size());
    for (size_t i = 0; i < needs_.size(); ++i) {
        inputs.push_back(prepare(needs_[i], x, tokens, workspace(i)));
    }
    const bool small = rows_ * columns_ * tokens < kSmallJob;
    const std::vector<Run> runs = cut(small ? 1 : Pool::shared().threads(), tokens);
    const auto item = [&](int64_t i) {
        const Run& run = runs[size_t(i)];
        const Input& input = inputs[size_t(run.segment->need)];
        if (run.segment->route) {
            run_segment(*run.segment, input, tokens, run.first, run.last, residual, y);
        } else {
            run_dense(*run.segment, input, tokens, run.first, run.last, residual, y);
        }
    };
    if (small) {
        for (int64_t i = 0; i < int64_t(runs.size()); ++i) item(i);
    } else {
        Pool::shared().run(int64_t(runs.size()), item);
    }
}

void Linear::run_segment(const Segment& segment, const Input& input, int64_t tokens, int64_t first,
                         int64_t last, const float* residual, float* y) const {
    Task task{};
    task.w = &segment.matrix;
    task.x = &input.quantized;
    task.tokens = tokens;
    task.first = first;
    task.last = last;
    task.y = y + segment.offset;
    task.residual = residual ? residual + segment.offset : nullptr;
    task.y_stride = rows_;
    task.scratch = item_scratch.get<uint8_t>(scratch_bytes(*segment.route->layout, *task.x));
    (tokens == 1 ? segment.route->gemv : segment.route->gemm)(task);
}

void Linear::run_dense(const Segment& segment, const Input& input, int64_t tokens, int64_t first,
                       int64_t last, const float* residual, float* y) const {
    const Matrix& m = segment.matrix;
    float* row = item_scratch.get<float>(columns_);
    for (int64_t r = first; r < last; ++r) {
        const uint8_t* values = m.codes + r * m.codes_stride;
        switch (m.packing) {
            case Packing::f16: kernels_.widen_f16(values, columns_, row); break;
            case Packing::bf16: kernels_.widen_bf16(values, columns_, row); break;
            default: expand_row(m, r, row); break;
        }
        for (int64_t t = 0; t < tokens; t += kTokenTile) {
            const int count = int(std::min<int64_t>(kTokenTile, tokens - t));
            float dots[kTokenTile];
            kernels_.dense_dot(row, columns_, input.floats + t * columns_, columns_, count, dots);
            for (int i = 0; i < count; ++i) {
                const int64_t at = (t + i) * rows_ + segment.offset + r;
                y[at] = residual ? residual[at] + dots[i] : dots[i];
            }
        }
    }
}

}  // namespace bonsai
