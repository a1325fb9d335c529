// What an instruction set must provide, and the plain structs that kernels read.
//
// Each instruction set is one file that fills one `Kernels` table; `dispatch.cpp` picks a table at
// run time. This header is included by files that are compiled with ISA flags, so it holds no
// inline functions: the linker may keep any copy of an inline function, also one with instructions
// that an older CPU lacks.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bonsai {

enum class Packing : int { t2, t5, b1, q4, q8, f32, f16, bf16 };

// A [rows, columns] matrix as it lies in the checkpoint. Planes are byte pointers because nothing
// is known about their alignment. Every row of codes is `codes_stride` bytes; readable memory ends
// at `codes_end`, and a load may touch the next row but never a byte at or after that.
struct Matrix {
    Packing packing;
    int64_t rows, columns;
    int group;       // elements per scale; 0 for dense
    int64_t groups;  // scales per row; the codes are padded to groups * group elements
    const uint8_t* codes;
    int64_t codes_stride;
    const uint8_t* codes_end;
    const uint8_t* scales;  // fp16 [rows, groups]
    const uint8_t* biases;  // fp16 [rows, groups]; q4 and q8 only
};

// The order in which a route wants quantized activations. Elements of a row are cut into blocks of
// `block`; a block has `slots` places, of which those with element `block` hold 0. After a block
// has been multiplied, the kernel has `lanes` partial sums, and slot i went into number lane[i /
// run].
struct Layout {
    int block;
    int slots;
    int slot_bytes;  // 1: int8, 2: int16; |q| <= `top` of the route
    int lanes;
    int run;                 // consecutive slots that share a lane; divides `slots`
    const int16_t* element;  // [slots]
    const uint8_t* lane;     // [slots / run]
};

// Quantized activations of T tokens: value = scales[chunk] * q. A chunk is min(group, 128) elements
// for ternary routes (int8) and 32 for affine ones (int16), and never larger than a block.
// Blocks are whole; elements beyond the columns are 0 and chunks beyond them have scale 0. All
// float arrays have kPadFloats to spare at their end; those behind scales and sums are 0.
struct Activations {
    int64_t blocks, chunks;  // per token; chunks counts those of whole blocks
    int chunk;
    const uint8_t* slots;      // [T, blocks * layout.slots] of layout.slot_bytes
    int64_t slots_stride;      // bytes per token
    const float* scales;       // [T, chunks]
    const float* sums;         // [T, chunks]: scale * (sum of q)
    const int32_t* lane_sums;  // [T, blocks * lanes]: center * (sum of q of each lane)
};

// Where one token's quantized activations go; pointers into the arrays of `Activations`.
struct ActivationRow {
    uint8_t* slots;
    float* scales;
    float* sums;
    int32_t* lane_sums;
};

// The rows [first, last) of y = x W^T for T tokens. `y` points at output 0 of token 0 and tokens
// are `y_stride` floats apart; `residual`, if any, has the same shape and is added.
struct Task {
    const Matrix* w;
    const Activations* x;
    int64_t tokens, first, last;
    float* y;
    const float* residual;
    int64_t y_stride;
    uint8_t* scratch;  // `scratch_bytes`, aligned to 64
};

// One packing (and group) on one instruction set.
struct Route {
    const char* name;
    const Layout* layout;
    int chunk;   // elements per scale of the activations
    int center;  // subtracted from codes: sum((code - center) q) = sum(code q) - center sum(q)
    int top;     // the largest |q|
    // Code weights streamed once, for one token.
    void (*gemv)(const Task&);
    // Several tokens: each row is unpacked once. The result for a token equals gemv's bit for bit.
    void (*gemm)(const Task&);
};

// Keys and values of one head over consecutive positions: rows of `width` elements (a multiple of
// 16; what lies beyond head_dim is 0), fp16 or fp32.
struct Span {
    const void* keys;
    const void* values;
    int width;
};

// Queries of one head against one span. For query i, keys [0, counts[i]) are visible; counts[i]
// >= 1.
struct AttentionTask {
    Span kv;
    const float* queries;  // [n, width], already divided by sqrt(head_dim)
    const int* counts;     // [n]
    int n;
    float* scores;  // [n, kSpan] of scratch
    float* max;     // [n] largest score
    float* sum;     // [n] sum of exp(score - max)
    float* out;     // [n, width] sum of exp(score - max) * value
};

constexpr int kSpan = 256;        // positions per span of the KV cache
constexpr int kTokenTile = 4;     // tokens that share one pass over an unpacked row
constexpr int kRowTile = 8;       // rows that are unpacked at a time and share activations
constexpr int kScratchRows = 16;  // rows of scales and codes that `Task::scratch` has room for
constexpr int kMaxBlock = 256;    // largest Layout::block
constexpr int kMaxSlots = 320;    // largest Layout::slots
constexpr int kMaxLanes = 32;     // largest Layout::lanes
constexpr int kPadFloats = 16;    // floats that kernels may read beyond a row of scales

struct Kernels {
    const char* name;

    // Null where the packing does not exist with that group.
    const Route* (*route)(Packing packing, int group);

    // dots[t] = sum of w[i] * x[t * x_stride + i] over n, for t < tokens <= kTokenTile.
    void (*dense_dot)(const float* w, int64_t n, const float* x, int64_t x_stride, int tokens,
                      float* dots);
    void (*widen_f16)(const uint8_t* values, int64_t n, float* out);
    void (*widen_bf16)(const uint8_t* values, int64_t n, float* out);
    void (*narrow_f16)(const float* values, int64_t n, uint16_t* out);

    // One token of n elements, by the blocks and chunks of `shape`. A chunk that is not finite gets
    // the scale NaN, so that every output that reads it is NaN.
    void (*quantize)(const float* x, int64_t n, const Route& route, const Activations& shape,
                     const ActivationRow& out);

    // out = H (signs * x), or with `inverse` signs * (H x), in blocks; n is a multiple of block.
    void (*hadamard)(const float* x, const int8_t* signs, int64_t n, int64_t block, bool inverse,
                     float* out);

    void (*rms_norm)(const float* x, const float* gain, int64_t n, float eps, float* out);
    void (*swiglu)(const float* gate, const float* up, int64_t n, float* out);
    void (*rope)(const float* x, const float* cos, const float* sin, int64_t half, int64_t width,
                 float* out);

    void (*attend_f16)(const AttentionTask&);
    void (*attend_f32)(const AttentionTask&);
};

}  // namespace bonsai
