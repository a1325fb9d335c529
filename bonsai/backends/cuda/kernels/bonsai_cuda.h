/* The C ABI of the CUDA kernels: raw device pointers, ints and a stream. No torch, no C++.
 *
 * Every function returns 0, a negative BONSAI_CUDA_* code when an argument is refused (nothing was
 * launched), or a positive cudaError_t of the launch. None exits, blocks, reads device memory from
 * the host, or allocates. Sizes and alignment are checked in host code. All work goes to `stream`
 * (a cudaStream_t), so a sequence of calls can be captured in a graph; what changes between replays
 * (position, token, uniform numbers, sampling settings) is read from device memory.
 *
 * Activations are float32 [T, width] with a row stride in elements (`ld`) where one is passed, and
 * contiguous elsewhere. Pointers to activations, matrices and caches are 16-byte aligned, and row
 * strides of float rows are multiples of 4.
 */
#ifndef BONSAI_CUDA_H
#define BONSAI_CUDA_H

#include <stdint.h>

#define BONSAI_CUDA_ABI 1

#if defined(_WIN32)
#define BONSAI_CUDA_EXPORT __declspec(dllexport)
#else
#define BONSAI_CUDA_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

enum {
    BONSAI_CUDA_OK = 0,
    BONSAI_CUDA_BAD_SIZE = -1,      /* a size is not positive, or the sizes do not fit together */
    BONSAI_CUDA_BAD_POINTER = -2,   /* a pointer is null that must not be, or is not aligned */
    BONSAI_CUDA_UNSUPPORTED = -3,   /* no kernel for this packing, group, width or number of rows */
    BONSAI_CUDA_BAD_GEOMETRY = -4   /* splits or chunk that the kernel cannot have */
};

/* What a code means, a constant string; for positive codes what the CUDA runtime says. */
BONSAI_CUDA_EXPORT const char* bonsai_cuda_error_text(int code);
BONSAI_CUDA_EXPORT int bonsai_cuda_abi(void);
/* 1: kernels may start while the one before them in the stream still runs (programmatic dependent
 * launch, compute capability 9.0 and later; ignored before). 0 (the default): they do not. */
BONSAI_CUDA_EXPORT int bonsai_cuda_set_overlap(int on);

/* ---- matrices --------------------------------------------------------------------------------- */

enum {
    BONSAI_T2 = 0, BONSAI_T5 = 1, BONSAI_B1 = 2, BONSAI_Q4 = 3, BONSAI_Q8 = 4,
    BONSAI_F32 = 5, BONSAI_F16 = 6, BONSAI_BF16 = 7
};

/* A [rows, columns] matrix in device memory, in the planes of the checkpoint (docs/format.md):
 * codes as they lie there, fp16 scales [rows, G], fp16 biases [rows, G] for q4 and q8 (else null),
 * G = ceil(columns / group). Dense (f32, f16, bf16): `codes` are the values, group 0, no scales.
 * Several matrices that read one input are one matrix whose planes follow each other. */
typedef struct {
    int32_t packing, group;
    int32_t rows, columns;
    const void* codes;
    const void* scales;
    const void* biases;
} bonsai_matrix;

/* ---- quantized activations -------------------------------------------------------------------- */

/* T rows of K int8 values; K is padded with zeros to Kp, a multiple of 128. Three planes in one
 * buffer, each of which starts at a multiple of 16 bytes:
 *   int8  q[T][Kp]           the order inside a block of 4 n values is that of the codes, below
 *   float scales[T][Kp/128]  the largest magnitude of 128 values / 127; value = scale * q
 *   int32 sums[T][Kp/32]     the sum of each 32 values of q
 * Order: byte j of the 32-bit word w of a block (w < n) is value n j + w: then one mask of a 32-bit
 * word of codes meets one word of activations. n = `interleave` is 4 for t2, 8 for b1, 2 for q4 and
 * 1 (plain order) for t5 and q8; bonsai_cuda_interleave says it. */
BONSAI_CUDA_EXPORT int64_t bonsai_cuda_activation_bytes(int32_t T, int32_t K);
BONSAI_CUDA_EXPORT int bonsai_cuda_interleave(int32_t packing); /* or a negative code */

enum { /* what is computed of x before norm and transform; silu(a) = a s(a), s(a) = 1/(1+exp(-a)) */
    BONSAI_PLAIN = 0,        /* x                          x [T, K] */
    BONSAI_SWIGLU = 1,       /* silu(a) b                  x [T, 2K]: a the first K, b the last */
    BONSAI_RELU2_GLU = 2,    /* max(a, 0)^2 b              x [T, 2K] */
    BONSAI_SIGMOID_GATE = 3, /* x s(z)                     z(t, h, d) below */
    BONSAI_GATED_NORM = 4    /* rms_norm(x, gain) silu(z)  per head of `head_dim`; gain [head_dim] */
};

/* Producer, norm, signed Hadamard transform and quantization of rows, in one launch.
 * z(t, h, d) = z[t * ld_z + h * z_head + d] for K = heads * head_dim values.
 * gain [K]: an rms_norm over the row follows (null: none; GATED_NORM uses `gain` itself).
 * signs int8 [K] and block (a power of 2 up to 1024 that divides K): H(signs * y); signs may be
 * null (block 0: no transform).
 * out_f32: y before the transform, [T, ld_out]; activations: the quantized H(y). Either may be null,
 * not both. */
typedef struct {
    int32_t producer, interleave;
    int32_t head_dim, block;
    const float* x;
    int64_t ld_x;
    const float* z;
    int64_t ld_z, z_head;
    const float* gain;
    float eps;
    const int8_t* signs;
    float* out_f32;
    int64_t ld_out;
    void* activations;
} bonsai_produce;

BONSAI_CUDA_EXPORT int bonsai_cuda_produce(const bonsai_produce* p, int32_t T, int32_t K,
                                           void* stream);

/* y[t, h] = rms_norm of each head: x(t, h, d) = x[t * ld_x + h * x_head + d]; y [T, H, D]. */
BONSAI_CUDA_EXPORT int bonsai_cuda_head_norm(int32_t T, int32_t H, int32_t D, const float* x,
                                             int64_t ld_x, int64_t x_head, const float* gain,
                                             float eps, float* y, void* stream);

/* ---- linears: y = residual + x W^T ------------------------------------------------------------ */

/* Partial sums of splits along K. Zero it once after allocating; every call leaves it usable for
 * the next one in the same stream. */
BONSAI_CUDA_EXPORT int64_t bonsai_cuda_linear_workspace(int32_t rows, int32_t T, int32_t splits);

/* y and residual: float [T, rows] with row strides; residual may be null or y itself.
 * `splits` blocks share the columns of each row (see dispatch.py); 1 needs no workspace. */
typedef struct {
    float* y;
    int64_t ld_y;
    const float* residual;
    int64_t ld_residual;
    int32_t splits;
    void* workspace;
} bonsai_output;

/* T = 1: dp4a, 16-byte loads of the codes. */
BONSAI_CUDA_EXPORT int bonsai_cuda_matvec(const bonsai_matrix* w, const void* activations,
                                          const bonsai_output* out, void* stream);
/* T = 1 to 16: int8 tensor cores, codes from memory straight to registers. */
BONSAI_CUDA_EXPORT int bonsai_cuda_rows(const bonsai_matrix* w, const void* activations, int32_t T,
                                        const bonsai_output* out, void* stream);
/* Any T: int8 tensor cores on tiles of 128 rows by 128 tokens, codes unpacked once a tile. splits
 * is 1. */
BONSAI_CUDA_EXPORT int bonsai_cuda_tiles(const bonsai_matrix* w, const void* activations, int32_t T,
                                         const bonsai_output* out, void* stream);
/* Dense matrices times float activations x [T, ld_x], in float32. splits is 1. */
BONSAI_CUDA_EXPORT int bonsai_cuda_dense(const bonsai_matrix* w, const float* x, int64_t ld_x,
                                         int32_t T, const bonsai_output* out, void* stream);

/* Rows `tokens` [T] (int32, device) of a table of any packing, as float [T, columns]; signs and
 * block as in bonsai_produce: signs * H(row). An id outside the table gives a row of zeros. */
BONSAI_CUDA_EXPORT int bonsai_cuda_embed(const bonsai_matrix* table, const int32_t* tokens,
                                         int32_t T, const int8_t* signs, int32_t block, float* y,
                                         int64_t ld_y, void* stream);

/* ---- attention -------------------------------------------------------------------------------- */

enum { BONSAI_KV_F16 = 0, BONSAI_KV_I8 = 1, BONSAI_KV_I4 = 2 };

/* Keys and values of one layer. Rows [heads][capacity][D] of fp16, int8 or 4-bit codes (element 2i
 * in the low half of byte i, stored + 8); int8 and int4 have fp16 scales [heads][capacity]
 * [ceil(D / 32)], value = scale * code, scale = the largest magnitude of 32 elements / 127 or / 7.
 * D is a multiple of 8, at most 256; heads times capacity is below 2^31. */
typedef struct {
    int32_t codec, heads, dim, capacity;
    void* keys;
    void* values;
    void* key_scales;
    void* value_scales;
} bonsai_kv;

/* Bytes of one plane of codes (keys or values) and of its scales. */
BONSAI_CUDA_EXPORT int64_t bonsai_cuda_kv_bytes(int32_t codec, int32_t heads, int32_t dim,
                                                int32_t capacity);
BONSAI_CUDA_EXPORT int64_t bonsai_cuda_kv_scale_bytes(int32_t codec, int32_t heads, int32_t dim,
                                                      int32_t capacity);

/* Norm of query and key heads, rotation, and writing of keys and values, in one launch.
 *   query head h of row t: x[t * ld_x + h * q_head]; heads may be 0
 *   key, value head j:     x[t * ld_x + k_offset + j * k_head], v_offset and v_head likewise
 * q_gain, k_gain [dim]: rms_norm with eps first (null: none). The first `dims` elements of each
 * query and key are rotated in half-split pairs (i, i + dims/2) by position * frequencies[i]
 * (double [dims/2], device), cos and sin times amplitude; dims may be 0. Row t has the position
 * *position + t (int32, device), where its key and value are written; kv may be null. Rows at or
 * beyond the capacity are not written. q_out [T, heads, dim]. */
typedef struct {
    int32_t heads, dim, dims;
    const float* x;
    int64_t ld_x, q_head, k_offset, k_head, v_offset, v_head;
    const float* q_gain;
    const float* k_gain;
    float eps, amplitude;
    const double* frequencies;
    const int32_t* position;
    float* q_out;
} bonsai_rope;

BONSAI_CUDA_EXPORT int bonsai_cuda_rope_kv(const bonsai_rope* p, const bonsai_kv* kv, int32_t T,
                                           void* stream);

/* y[t, h] = causal attention of q [T, H, D] over the rows [0, *position + t] of the cache, scores
 * q . k / sqrt(D), softmax in fp32; query head h reads KV head h / (H / heads). y [T, H, D].
 *
 * _split: T * H / heads <= 16. The cached rows are shared by `splits` blocks per KV head, whatever
 * *position is; the workspace as for linears.
 * _tiles: any T; blocks of 64 query rows. */
BONSAI_CUDA_EXPORT int64_t bonsai_cuda_attention_workspace(int32_t T, int32_t H, int32_t dim,
                                                           int32_t splits);
BONSAI_CUDA_EXPORT int bonsai_cuda_attention_split(const bonsai_kv* kv, const float* q, int32_t T,
                                                   int32_t H, const int32_t* position, float* y,
                                                   int32_t splits, void* workspace, void* stream);
BONSAI_CUDA_EXPORT int bonsai_cuda_attention_tiles(const bonsai_kv* kv, const float* q, int32_t T,
                                                   int32_t H, const int32_t* position, float* y,
                                                   void* stream);

/* ---- gated delta nets ------------------------------------------------------------------------- */

/* y[t, c] = silu(sum over j of taps[c, j] x[t - n + 1 + j, c]); rows before the first are the tail
 * [n - 1, C], oldest first, which then becomes the last n - 1 rows. taps [C, n], n = 2 to 8. x and
 * y do not overlap. One launch for T up to 32, two beyond. */
BONSAI_CUDA_EXPORT int bonsai_cuda_conv_silu(int32_t T, int32_t C, int32_t n, const float* x,
                                             int64_t ld_x, const float* taps, float* tail, float* y,
                                             int64_t ld_y, void* stream);

/* decay = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b); a, b [T, ld]; decay, beta [T, H]. */
BONSAI_CUDA_EXPORT int bonsai_cuda_delta_gates(int32_t T, int32_t H, const float* a, const float* b,
                                               int64_t ld, const float* a_log, const float* dt_bias,
                                               float* decay, float* beta, void* stream);

/* The gated delta rule of ops.py on the memory [heads, Dk, Dv] in place; y [T, heads, Dv].
 * q, k [T, key_heads, Dk] and v [T, heads, Dv] with row strides. q_gain, k_gain [Dk]: queries and
 * keys are normalised first, x gain / sqrt(mean(x^2) + eps) (null: they are already).
 * a_log null: decay and beta [T, ld_gates] are given. Else `decay` and `beta` hold a and b, and the
 * gates are computed as in bonsai_cuda_delta_gates.
 * Dk and Dv are multiples of 32 up to 256 (Dk: 128 when chunked).
 * chunk 0: token after token; 32: in chunks of 32 tokens. */
typedef struct {
    int32_t key_heads, heads, key_dim, value_dim;
    const float* q;
    const float* k;
    const float* v;
    int64_t ld_q, ld_k, ld_v;
    const float* q_gain;
    const float* k_gain;
    float eps;
    const float* decay;
    const float* beta;
    int64_t ld_gates;
    const float* a_log;
    const float* dt_bias;
    float* memory;
    float* y;
} bonsai_delta;

BONSAI_CUDA_EXPORT int bonsai_cuda_delta_rule(const bonsai_delta* p, int32_t T, int32_t chunk,
                                              void* stream);

/* ---- sampling --------------------------------------------------------------------------------- */

/* In device memory, so that a captured step serves every setting (the fields of sampling.py). */
typedef struct {
    double temperature, top_p, min_p, repetition_penalty;
    int64_t top_k;
} bonsai_sampling;

/* One id of logits [vocab] by the rules of sampling.choose.
 *   seen       bits [ceil(vocab / 32)] uint32: the ids of the context; the chosen one is added
 *   uniforms   double; the number uniforms[*drawn] decides, and *drawn grows by 1
 *   token      int32: the chosen id; ids (may be null): also written to ids[*drawn]
 *   status     int32: set to 1 when the logits are unusable (NaN, +inf, all -inf; the id is then 0)
 *   position   int32 (may be null): grows by `advance`
 * All in device memory; the workspace is bonsai_cuda_sample_workspace bytes, zeroed once. */
typedef struct {
    const bonsai_sampling* rules;
    uint32_t* seen;
    const double* uniforms;
    int32_t* drawn;
    int32_t* token;
    int32_t* ids;
    int32_t* status;
    int32_t* position;
    int32_t advance;
} bonsai_sample;

BONSAI_CUDA_EXPORT int64_t bonsai_cuda_sample_workspace(int32_t vocab);
BONSAI_CUDA_EXPORT int bonsai_cuda_sample(const float* logits, int32_t vocab, const bonsai_sample* p,
                                          void* workspace, void* stream);
/* Sets the bits of `ids` [count] (int32, device) in `seen`; ids outside the vocabulary are left. */
BONSAI_CUDA_EXPORT int bonsai_cuda_mark_seen(const int32_t* ids, int32_t count, int32_t vocab,
                                             uint32_t* seen, void* stream);
/* *position += count; for steps that sample nothing. */
BONSAI_CUDA_EXPORT int bonsai_cuda_advance(int32_t* position, int32_t count, void* stream);

#ifdef __cplusplus
}
#endif
#endif
