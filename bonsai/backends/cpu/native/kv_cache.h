// The keys and values of one conversation, and attention over them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace bonsai {

// Heads of T tokens: head h of token t starts at data + t * stride + h * head_dim.
struct Heads {
    const float* data;
    int64_t tokens, heads, stride;
};

class KvCache {
public:
    // Raises std::invalid_argument on sizes that make no sense.
    KvCache(int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t max_context, bool exact);
    KvCache(const KvCache&) = delete;
    KvCache& operator=(const KvCache&) = delete;

    int64_t kv_heads() const { return kv_heads_; }
    int64_t head_dim() const { return head_dim_; }
    int64_t max_context() const { return max_context_; }
    int64_t layers() const { return int64_t(layers_.size()); }
    int64_t nbytes() const;
    // Positions of a layer that have memory: all that were appended, rounded up to a span.
    int64_t stored(int64_t layer) const { return int64_t(layers_[size_t(layer)].size()) * kSpan; }

    // Stores rows at [position, position + T). Every position below must have been stored before.
    void append(const Kernels& kernels, int64_t layer, int64_t position, const Heads& k,
                const Heads& v);

    // out [T, heads, head_dim]: query t sees the positions up to and including position + t.
    void attend(const Kernels& kernels, int64_t layer, int64_t position, const Heads& q,
                float* out) const;

    // A copy of the first `length` positions. Raises std::invalid_argument when fewer are stored.
    std::unique_ptr<KvCache> copy(int64_t length) const;

private:
    struct Free {
        void operator()(uint8_t* block) const;
    };
    // kSpan positions of one layer: keys [kv_heads, kSpan, width], then values. Blocks never move.
    using Block = std::unique_ptr<uint8_t, Free>;

    struct Queries;

    int64_t head_bytes() const { return int64_t(kSpan) * width_ * element_bytes_; }
    int64_t block_bytes() const { return 2 * kv_heads_ * head_bytes(); }
    Block new_block() const;
    Span span(int64_t layer, int64_t block, int64_t head) const;
    void attend_span(const Kernels& kernels, const AttentionTask& task) const;
    void attend_rows(const Queries& job, int64_t head, int64_t first, int64_t last) const;
    void attend_one(const Queries& job) const;

    int64_t kv_heads_, head_dim_, max_context_;
    int width_;  // head_dim rounded up to 16
    int element_bytes_;
    std::vector<std::vector<Block>> layers_;
};

}  // namespace bonsai
