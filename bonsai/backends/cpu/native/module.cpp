// What Python sees: arrays are checked here, once, so that no kernel can read or write beyond them.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "buffer.h"
#include "dispatch.h"
#include "kv_cache.h"
#include "linear.h"
#include "pool.h"
#include "sampler.h"

namespace nb = nanobind;

namespace bonsai {
namespace {

using Bytes = nb::ndarray<const uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Signs = nb::ndarray<const int8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using LongIds = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using OutRows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
// [T, H, D], where only the step from token to token may be larger than H * D.
using HeadsIn = nb::ndarray<const float, nb::ndim<3>, nb::device::cpu>;
using OutHeads = nb::ndarray<float, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

// Rows below this many elements in all are not worth waking a thread for.
constexpr int64_t kSmallRows = 1 << 14;

void expect(bool good, const char* what) {
    if (!good) throw std::invalid_argument(what);
}

// An array that is what it is called. A converted copy would be gone before it is read, and one of
// an output would never reach the caller.
template <class Array>
Array cast_as_is(nb::handle array) {
    Array found;
    if (!nb::try_cast(array, found, false)) {
        throw std::invalid_argument("an array has the wrong type, dimensions or strides");
    }
    return found;
}

Heads heads_of(const HeadsIn& x) {
    const int64_t tokens = int64_t(x.shape(0)), heads = int64_t(x.shape(1));
    const int64_t width = int64_t(x.shape(2));
    expect(x.stride(2) == 1 || width == 1, "heads must be contiguous");
    expect(x.stride(1) == width || heads == 1, "the heads of a token must be contiguous");
    expect(tokens <= 1 || x.stride(0) >= heads * width, "tokens must not overlap");
    return {x.data(), tokens, heads, x.stride(0)};
}

// work(token) for every token, on all threads when there is enough to do.
template <class Work>
void for_tokens(int64_t tokens, int64_t elements, Work&& work) {
    if (elements < kSmallRows) {
        for (int64_t t = 0; t < tokens; ++t) work(t);
    } else {
        Pool::shared().run(tokens, work);
    }
}

Plane plane_of(nb::handle array) {
    if (array.is_none()) return {};
    const auto bytes = cast_as_is<Bytes>(array);
    return {bytes.data(), int64_t(bytes.shape(0)), int64_t(bytes.shape(1))};
}

// A matrix as `ops.py` describes it; holds its arrays, so that the planes stay where they are.
class PackedMatrix {
public:
    PackedMatrix(const std::string& packing, int64_t rows, int64_t columns, int group,
                 nb::object codes, nb::object scales, nb::object biases, nb::object signs,
                 int64_t block)
        : arrays_{codes, scales, biases, signs} {
        matrix_ = make_matrix(packing, rows, columns, group, plane_of(codes), plane_of(scales),
                              plane_of(biases));
        if (signs.is_none()) return;
        const auto values = cast_as_is<Signs>(signs);
        expect(int64_t(values.shape(0)) == columns, "there must be one sign per column");
        expect(block > 0 && (block & (block - 1)) == 0 && columns % block == 0,
               "the block of a transform must be a power of two that divides the columns");
        transform_.signs = values.data();
        transform_.block = block;
        transform_.width = columns;
    }

    const Matrix& matrix() const { return matrix_; }
    const Transform& transform() const { return transform_; }

private:
    std::vector<nb::object> arrays_;
    Matrix matrix_{};
    Transform transform_;
};

class PackedLinear {
public:
    PackedLinear(const Kernels& kernels, std::vector<nb::object> matrices, bool exact)
        : matrices_(std::move(matrices)), linear_(kernels, parts(matrices_), exact) {}

    int64_t rows() const { return linear_.rows(); }
    int64_t columns() const { return linear_.columns(); }
    std::vector<std::string> routes() const {
        const auto names = linear_.routes();
        return {names.begin(), names.end()};
    }

    void run(const Rows& x, const OutRows& out, nb::object residual) const {
        expect(int64_t(x.shape(1)) == columns(), "x has another width than the matrix");
        expect(x.shape(0) == out.shape(0) && int64_t(out.shape(1)) == rows(),
               "out must be [tokens, rows]");
        const float* added = nullptr;
        if (!residual.is_none()) {
            const auto values = cast_as_is<Rows>(residual);
            expect(values.shape(0) == out.shape(0) && values.shape(1) == out.shape(1),
                   "the residual must have the shape of the output");
            added = values.data();
        }
        const float* from = x.data();
        float* to = out.data();
        const int64_t tokens = int64_t(x.shape(0));
        nb::gil_scoped_release unlocked;
        linear_.run(from, tokens, added, to);
    }

private:
    static std::vector<Part> parts(const std::vector<nb::object>& matrices) {
        std::vector<Part> found;
        for (const nb::object& object : matrices) {
            const auto& packed = nb::cast<const PackedMatrix&>(object);
            found.push_back({packed.matrix(), packed.transform()});
        }
        return found;
    }

    std::vector<nb::object> matrices_;
    Linear linear_;
};

void embed(const Kernels& kernels, const PackedMatrix& table, const Ids& ids, const OutRows& out) {
    const Matrix& m = table.matrix();
    const Transform& transform = table.transform();
    const int64_t tokens = int64_t(ids.shape(0));
    expect(int64_t(out.shape(0)) == tokens && int64_t(out.shape(1)) == m.columns,
           "out must be [tokens, columns]");
    for (int64_t t = 0; t < tokens; ++t) {
        expect(ids.data()[t] >= 0 && ids.data()[t] < m.rows,
               "a token id is not a row of the table");
    }
    const int32_t* id = ids.data();
    float* to = out.data();
    nb::gil_scoped_release unlocked;
    for_tokens(tokens, tokens * m.columns, [&](int64_t t) {
        float* row = to + t * m.columns;
        expand_row(m, id[t], row);
        if (!transform.signs) return;
        thread_local Buffer stored;
        float* copy = stored.get<float>(m.columns);
        std::copy(row, row + m.columns, copy);
        kernels.hadamard(copy, transform.signs, m.columns, transform.block, true, row);
    });
}

void rms_norm(const Kernels& kernels, const HeadsIn& x, const Vector& gain, float eps,
              const OutHeads& out) {
    const Heads in = heads_of(x);
    const int64_t width = int64_t(x.shape(2));
    expect(int64_t(gain.shape(0)) == width, "the gain has another width than the rows");
    expect(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1) && out.shape(2) == x.shape(2),
           "out must have the shape of x");
    const float* gains = gain.data();
    float* to = out.data();
    nb::gil_scoped_release unlocked;
    for_tokens(in.tokens, in.tokens * in.heads * width, [&](int64_t t) {
        for (int64_t h = 0; h < in.heads; ++h) {
            kernels.rms_norm(in.data + t * in.stride + h * width, gains, width, eps,
                             to + (t * in.heads + h) * width);
        }
    });
}

void rope(const Kernels& kernels, const HeadsIn& x, const Rows& cos, const Rows& sin,
          const OutHeads& out) {
    const Heads in = heads_of(x);
    const int64_t width = int64_t(x.shape(2)), half = int64_t(cos.shape(1));
    expect(out.shape(0) == x.shape(0) && out.shape(1) == x.shape(1) && out.shape(2) == x.shape(2),
           "out must have the shape of x");
    expect(cos.shape(0) == x.shape(0) && sin.shape(0) == x.shape(0) &&
               int64_t(sin.shape(1)) == half && 2 * half <= width,
           "cos and sin must be [tokens, dims / 2]");
    const float *cosines = cos.data(), *sines = sin.data();
    float* to = out.data();
    nb::gil_scoped_release unlocked;
    for_tokens(in.tokens, in.tokens * in.heads * width, [&](int64_t t) {
        for (int64_t h = 0; h < in.heads; ++h) {
            kernels.rope(in.data + t * in.stride + h * width, cosines + t * half, sines + t * half,
                         half, width, to + (t * in.heads + h) * width);
        }
    });
}

void swiglu(const Kernels& kernels, const Rows& gate_up, const OutRows& out) {
    const int64_t tokens = int64_t(out.shape(0)), n = int64_t(out.shape(1));
    expect(gate_up.shape(0) == out.shape(0) && int64_t(gate_up.shape(1)) == 2 * n,
           "out must be half as wide as the input");
    const float* from = gate_up.data();
    float* to = out.data();
    nb::gil_scoped_release unlocked;
    for_tokens(tokens, tokens * n, [&](int64_t t) {
        kernels.swiglu(from + 2 * t * n, from + (2 * t + 1) * n, n, to + t * n);
    });
}

int64_t sample(const Vector& logits, double temperature, int64_t top_k, double top_p, double min_p,
               double penalty, const LongIds& seen, double uniform) {
    const int64_t vocab = int64_t(logits.shape(0)), count = int64_t(seen.shape(0));
    for (int64_t i = 0; i < count; ++i) {
        expect(seen.data()[i] >= 0 && seen.data()[i] < vocab,
               "a seen id is outside the vocabulary");
    }
    const float* from = logits.data();
    const int64_t* ids = seen.data();
    nb::gil_scoped_release unlocked;
    return choose(from, vocab, {temperature, top_p, min_p, penalty, top_k}, ids, count, uniform);
}

// `state.py` counts the rows that are stored; here only what could reach outside memory is checked.
void append(KvCache& cache, const Kernels& kernels, int64_t layer, int64_t position,
            const HeadsIn& k, const HeadsIn& v) {
    const Heads keys = heads_of(k), values = heads_of(v);
    expect(layer >= 0 && layer < cache.layers(), "there is no such layer");
    expect(keys.heads == cache.kv_heads() && values.heads == cache.kv_heads() &&
               int64_t(k.shape(2)) == cache.head_dim() && int64_t(v.shape(2)) == cache.head_dim() &&
               keys.tokens == values.tokens,
           "k and v must be [tokens, kv_heads, head_dim]");
    expect(position >= 0 && position + keys.tokens <= cache.max_context(),
           "the rows do not fit into the context");
    nb::gil_scoped_release unlocked;
    cache.append(kernels, layer, position, keys, values);
}

void attend(const KvCache& cache, const Kernels& kernels, int64_t layer, int64_t position,
            const HeadsIn& q, const OutHeads& out) {
    const Heads queries = heads_of(q);
    expect(layer >= 0 && layer < cache.layers(), "there is no such layer");
    expect(queries.heads % cache.kv_heads() == 0 && int64_t(q.shape(2)) == cache.head_dim(),
           "q must be [tokens, heads, head_dim] with heads a multiple of kv_heads");
    expect(out.shape(0) == q.shape(0) && out.shape(1) == q.shape(1) && out.shape(2) == q.shape(2),
           "out must have the shape of q");
    expect(position >= 0 && position + queries.tokens <= cache.stored(layer),
           "the keys of these positions were not stored");
    float* to = out.data();
    nb::gil_scoped_release unlocked;
    cache.attend(kernels, layer, position, queries, to);
}

std::vector<std::string> names(const std::vector<const Kernels*>& tables) {
    std::vector<std::string> found;
    for (const Kernels* table : tables) found.emplace_back(table->name);
    return found;
}

const Kernels* kernels_named(const std::string& name) {
    const Kernels* found = find_kernels(name);
    if (!found) throw std::invalid_argument("no kernels are called '" + name + "' here");
    return found;
}

}  // namespace
}  // namespace bonsai

NB_MODULE(_native, m) {
    using namespace bonsai;
    const auto as_is = [](const char* name) { return nb::arg(name).noconvert(); };
    m.doc() = "The kernels of the cpu backend. bonsai/backends/cpu/ops.py is its only caller.";
    m.def("compiled", [] { return names(compiled_kernels()); });
    m.def("supported", [] { return names(supported_kernels()); });
    m.def("kernels", kernels_named, nb::rv_policy::reference);
    m.def("threads", [] { return Pool::shared().threads(); });
    m.def("set_threads", [](int count) {
        nb::gil_scoped_release unlocked;
        Pool::shared().resize(count);
    });
    nb::class_<Kernels>(m, "Kernels").def_prop_ro("name", [](const Kernels& k) { return k.name; });
    nb::class_<PackedMatrix>(m, "PackedMatrix")
        .def(nb::init<const std::string&, int64_t, int64_t, int, nb::object, nb::object, nb::object,
                      nb::object, int64_t>(),
             nb::arg("packing"), nb::arg("rows"), nb::arg("columns"), nb::arg("group"),
             nb::arg("codes"), nb::arg("scales").none(), nb::arg("biases").none(),
             nb::arg("signs").none(), nb::arg("block"));
    nb::class_<PackedLinear>(m, "PackedLinear")
        .def(nb::init<const Kernels&, std::vector<nb::object>, bool>(), nb::arg("kernels"),
             nb::arg("matrices"), nb::arg("exact"))
        .def_prop_ro("rows", &PackedLinear::rows)
        .def_prop_ro("columns", &PackedLinear::columns)
        .def_prop_ro("routes", &PackedLinear::routes)
        .def("run", &PackedLinear::run, as_is("x"), as_is("out"), nb::arg("residual").none());
    nb::class_<KvCache>(m, "KvCache")
        .def(nb::init<int64_t, int64_t, int64_t, int64_t, bool>(), nb::arg("layers"),
             nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("max_context"), nb::arg("exact"))
        .def_prop_ro("nbytes", &KvCache::nbytes)
        .def("append", append, nb::arg("kernels"), nb::arg("layer"), nb::arg("position"),
             as_is("k"), as_is("v"))
        .def("attend", attend, nb::arg("kernels"), nb::arg("layer"), nb::arg("position"),
             as_is("q"), as_is("out"))
        .def("copy", &KvCache::copy, nb::arg("length"));
    m.def("embed", embed, nb::arg("kernels"), nb::arg("table"), as_is("ids"), as_is("out"));
    m.def("rms_norm", rms_norm, nb::arg("kernels"), as_is("x"), as_is("gain"), nb::arg("eps"),
          as_is("out"));
    m.def("rope", rope, nb::arg("kernels"), as_is("x"), as_is("cos"), as_is("sin"), as_is("out"));
    m.def("swiglu", swiglu, nb::arg("kernels"), as_is("gate_up"), as_is("out"));
    m.def("sample", sample, as_is("logits"), nb::arg("temperature"), nb::arg("top_k"),
          nb::arg("top_p"), nb::arg("min_p"), nb::arg("repetition_penalty"), as_is("seen"),
          nb::arg("uniform"));
}
