// Attention goes span by span: each span gives a maximum, a sum and weighted values, and these are
// merged in the order of the spans. One token and many go the same way, so a query's result does
// not depend on how the tokens were cut into calls, nor on the number of threads.
#include "kv_cache.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <new>
#include <stdexcept>

#include "buffer.h"
#include "pool.h"

namespace bonsai {
namespace {

constexpr int64_t kTile = 16;              // queries of one head that share a pass over a span
constexpr int64_t kSmallJob = 100 * 1000;  // multiply-adds that are not worth waking a thread for

thread_local Buffer tile_scratch;
thread_local Buffer partial_scratch;

// Results of n queries over one span, or over several once merged.
struct Partial {
    float* max;  // [n]
    float* sum;  // [n]
    float* out;  // [n, width]
};

// into = into + from, for query i of both.
void merge(const Partial& into, const Partial& from, int64_t i, int64_t j, int width) {
    const float max = std::max(into.max[i], from.max[j]);
    const float a = std::exp(into.max[i] - max), b = std::exp(from.max[j] - max);
    into.max[i] = max;
    into.sum[i] = into.sum[i] * a + from.sum[j] * b;
    float* to = into.out + i * width;
    const float* add = from.out + j * width;
    for (int d = 0; d < width; ++d) to[d] = to[d] * a + add[d] * b;
}

}  // namespace

// One call of `attend`. Query number i of a KV head is head h * group + i % group of token i /
// group.
struct KvCache::Queries {
    const Kernels* kernels;
    int64_t layer, position, group;
    Heads q;
    float* out;

    int64_t count() const { return q.tokens * group; }
    int64_t visible(int64_t i) const { return position + i / group + 1; }
    const float* query(int64_t head, int64_t i, int64_t head_dim) const {
        return q.data + i / group * q.stride + (head * group + i % group) * head_dim;
    }
    float* output(int64_t head, int64_t i, int64_t head_dim) const {
        return out + (i / group * q.heads + head * group + i % group) * head_dim;
    }
};

KvCache::KvCache(int64_t layers, int64_t kv_heads, int64_t head_dim, int64_t max_context,
                 bool exact)
    : kv_heads_(kv_heads),
      head_dim_(head_dim),
      max_context_(max_context),
      width_(int((head_dim + 15) / 16 * 16)),
      element_bytes_(exact ? 4 : 2) {
    const auto within = [](int64_t value, int64_t limit) { return value >= 1 && value <= limit; };
    if (!within(layers, 1 << 16) || !within(kv_heads, 1 << 16) || !within(head_dim, 1 << 16) ||
        !within(max_context, 1 << 30)) {
        throw std::invalid_argument("a KV cache of these sizes is not supported");
    }
    layers_.resize(size_t(layers));
}

void KvCache::Free::operator()(uint8_t* block) const { std::free(block); }

KvCache::Block KvCache::new_block() const {
    // Zeroed, so that padding is 0 and no kernel reads undefined bytes.
    Block block(static_cast<uint8_t*>(std::calloc(1, size_t(block_bytes()))));
    if (!block) throw std::bad_alloc();
    return block;
}

int64_t KvCache::nbytes() const {
    int64_t blocks = 0;
    for (const auto& layer : layers_) blocks += int64_t(layer.size());
    return blocks * block_bytes();
}

Span KvCache::span(int64_t layer, int64_t block, int64_t head) const {
    const uint8_t* start = layers_[size_t(layer)][size_t(block)].get();
    const uint8_t* keys = start + head * head_bytes();
    return {keys, keys + kv_heads_ * head_bytes(), width_};
}

void KvCache::append(const Kernels& kernels, int64_t layer, int64_t position, const Heads& k,
                     const Heads& v) {
    auto& blocks = layers_[size_t(layer)];
    while (int64_t(blocks.size()) * kSpan < position + k.tokens) blocks.push_back(new_block());
    const auto put = [&](const float* from, uint8_t* to) {
        if (element_bytes_ == 4) {
            std::memcpy(to, from, size_t(head_dim_) * 4);
        } else {
            kernels.narrow_f16(from, head_dim_, reinterpret_cast<uint16_t*>(to));
        }
    };
    for (int64_t t = 0; t < k.tokens; ++t) {
        uint8_t* block = blocks[size_t((position + t) / kSpan)].get();
        const int64_t row = (position + t) % kSpan * width_ * element_bytes_;
        for (int64_t h = 0; h < kv_heads_; ++h) {
            uint8_t* key = block + h * head_bytes() + row;
            put(k.data + t * k.stride + h * head_dim_, key);
            put(v.data + t * v.stride + h * head_dim_, key + kv_heads_ * head_bytes());
        }
    }
}

void KvCache::attend_span(const Kernels& kernels, const AttentionTask& task) const {
    (element_bytes_ == 4 ? kernels.attend_f32 : kernels.attend_f16)(task);
}

namespace {

// Scratch of `n` queries: padded queries, scores and one Partial.
struct Tile {
    float* queries;
    float* scores;
    Partial partial;

    static int64_t floats(int64_t n, int width) { return n * (2 * width + kSpan + 2); }

    Tile(float* memory, int64_t n, int width)
        : queries(memory),
          scores(queries + n * width),
          partial{scores + n * kSpan, scores + n * (kSpan + 1), scores + n * (kSpan + 2)} {}
};

void load_query(const float* from, int64_t head_dim, int width, float scale, float* to) {
    for (int64_t d = 0; d < head_dim; ++d) to[d] = from[d] * scale;
    for (int64_t d = head_dim; d < width; ++d) to[d] = 0;
}

void store_output(const Partial& from, int64_t i, int64_t head_dim, int width, float* to) {
    const float* out = from.out + i * width;
    for (int64_t d = 0; d < head_dim; ++d) to[d] = out[d] / from.sum[i];
}

}  // namespace

// Queries [first, last) of one KV head over all the spans that they see, one after another.
void KvCache::attend_rows(const Queries& job, int64_t head, int64_t first, int64_t last) const {
    const int64_t n = last - first;
    const float scale = float(1.0 / std::sqrt(double(head_dim_)));
    const int64_t floats = Tile::floats(n, width_);
    float* memory = tile_scratch.get<float>(2 * floats);
    const Tile tile(memory, n, width_), total(memory + floats, n, width_);
    for (int64_t i = 0; i < n; ++i) {
        load_query(job.query(head, first + i, head_dim_), head_dim_, width_, scale,
                   tile.queries + i * width_);
    }
    int counts[kTile];
    for (int64_t start = 0; start < job.visible(last - 1); start += kSpan) {
        // Later queries see more: those that see nothing of this span come first.
        int64_t skip = 0;
        while (job.visible(first + skip) <= start) ++skip;
        for (int64_t i = skip; i < n; ++i) {
            counts[i] = int(std::min<int64_t>(kSpan, job.visible(first + i) - start));
        }
        const Partial& to = start == 0 ? total.partial : tile.partial;
        attend_span(
            *job.kernels,
            {span(job.layer, start / kSpan, head), tile.queries + skip * width_, counts + skip,
             int(n - skip), tile.scores, to.max + skip, to.sum + skip, to.out + skip * width_});
        if (start == 0) continue;
        for (int64_t i = skip; i < n; ++i) merge(total.partial, tile.partial, i, i, width_);
    }
    for (int64_t i = 0; i < n; ++i) {
        store_output(total.partial, i, head_dim_, width_, job.output(head, first + i, head_dim_));
    }
}

// One token: spans are independent items, merged afterwards in their order.
void KvCache::attend_one(const Queries& job) const {
    const int64_t n = job.group, visible = job.visible(0);
    const int64_t spans = (visible + kSpan - 1) / kSpan, items = kv_heads_ * spans;
    const int64_t each = n * (width_ + 2);
    float* memory = partial_scratch.get<float>(items * each);
    const auto partial = [&](int64_t item) {
        float* start = memory + item * each;
        return Partial{start, start + n, start + 2 * n};
    };
    const float scale = float(1.0 / std::sqrt(double(head_dim_)));
    Pool::shared().run(items, [&](int64_t item) {
        const int64_t head = item / spans, block = item % spans;
        const Tile tile(tile_scratch.get<float>(Tile::floats(n, width_)), n, width_);
        int counts[kTile];
        for (int64_t i = 0; i < n; ++i) {
            counts[i] = int(std::min<int64_t>(kSpan, visible - block * kSpan));
            load_query(job.query(head, i, head_dim_), head_dim_, width_, scale,
                       tile.queries + i * width_);
        }
        const Partial to = partial(item);
        attend_span(*job.kernels, {span(job.layer, block, head), tile.queries, counts, int(n),
                                   tile.scores, to.max, to.sum, to.out});
    });
    for (int64_t head = 0; head < kv_heads_; ++head) {
        const Partial total = partial(head * spans);
        for (int64_t i = 0; i < n; ++i) {
            for (int64_t s = 1; s < spans; ++s) {
                merge(total, partial(head * spans + s), i, i, width_);
            }
            store_output(total, i, head_dim_, width_, job.output(head, i, head_dim_));
        }
    }
}

void KvCache::attend(const Kernels& kernels, int64_t layer, int64_t position, const Heads& q,
                     float* out) const {
    const Queries job{&kernels, layer, position, q.heads / kv_heads_, q, out};
    const int64_t work = 2 * q.tokens * (position + q.tokens) * q.heads * head_dim_;
    const bool split = work >= kSmallJob && q.tokens == 1 && job.group <= kTile;
    if (split) return attend_one(job);
    const int64_t tiles = (job.count() + kTile - 1) / kTile, items = kv_heads_ * tiles;
    const auto item = [&](int64_t i) {
        const int64_t first = i % tiles * kTile;
        attend_rows(job, i / tiles, first, std::min(first + kTile, job.count()));
    };
    if (work < kSmallJob) {
        for (int64_t i = 0; i < items; ++i) item(i);
    } else {
        Pool::shared().run(items, item);
    }
}

std::unique_ptr<KvCache> KvCache::copy(int64_t length) const {
    auto other = std::make_unique<KvCache>(layers(), kv_heads_, head_dim_, max_context_,
                                           element_bytes_ == 4);
    const int64_t row = int64_t(width_) * element_bytes_;
    for (size_t layer = 0; layer < layers_.size(); ++layer) {
        if (length < 0 || length > stored(int64_t(layer))) {
            throw std::invalid_argument("a copy of more positions than were stored");
        }
        for (int64_t start = 0; start < length; start += kSpan) {
            Block block = new_block();
            const uint8_t* from = layers_[layer][size_t(start / kSpan)].get();
            const size_t bytes = size_t(std::min<int64_t>(kSpan, length - start) * row);
            for (int64_t part = 0; part < 2 * kv_heads_; ++part) {
                std::memcpy(block.get() + part * head_bytes(), from + part * head_bytes(), bytes);
            }
            other->layers_[layer].push_back(std::move(block));
        }
    }
    return other;
}

}  // namespace bonsai
