// what      Adds the previous mix's result to the residual, and computes its layer norm and C plain mixes of it: the
//           beginning of every mix of a training step.
// math      y = x + drop(change), xx = LN(y);  mixed_c = xx + d maa_c, d = xx of the token before, less xx; before a
//           sequence's first token xx is zero
//           change = first (Added), sigmoid(first) UNIT_OF_SQUARES<T> value (Gated: a channel mix, whose `value` is
//           stored divided by this unit, because squares may be larger than float16 holds);
//           y = drop(table_token) (Embedded); y = x (Kept)
// shapes    x y [tokens, D], weight bias [D], moments [tokens, 2] for mean and 1 / deviation; first value
//           xx [tokens, D], xx may be null; maa [C, D], mixed [C, tokens, D]; table [V, D], token_ids
//           [tokens / T, T + 1]
// grid      a block a token, which normalises the token before as well if there are mixes; threads of 8 channels each
// smem      the warps' parts of two sums
// barriers  two: the mean, then the variance
// numerics  float32, xx and mixes rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    D a multiple of 8, up to 8 THREADS
#include "training.cuh"

// From training.cuh:
//   block_sum: the sums over the block of both numbers of a float2, by one barrier; each call needs shared memory of
//     its own, since no barrier follows the reads
//   UNIT_OF_SQUARES: 2048 for float16, otherwise 1
//   Dropout: the seeds, the residual's number and the rate, which `dropped` takes

template <typename T> struct Args {
  const float* x;      // not read by Embedded
  const T* first;      // read by Added and Gated
  const T* value;      // read by Gated
  const float* table;  // this and token_ids: read by Embedded
  const i64* token_ids;
  const float* weight;
  const float* bias;
  float* y;  // null: not stored
  float* moments;
  T* xx;
  const float* maa;
  T* mixed;
  i64 tokens, T_;  // T_: of a sequence
  i64 D;
  Dropout drop;
  double eps;
};

// The kinds of change, of which the kernel's template argument is one. residual() returns channels j ... j + 7 of token
// t's y; index: their place in [tokens, D]. dropped (training.cuh) makes some channels 0 and scales the others up; a
// training step's backward pass draws the same ones.
struct Added {
  template <typename T>
  static __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64, i64 index, i64) {
    EightFloats change = load8(args.first + index), x = load8(args.x + index);
    dropped(change, args.drop, index);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] += change.x[n];
    return x;
  }
};

struct Gated {
  template <typename T>
  static __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64, i64 index, i64) {
    const EightFloats gate = load8(args.first + index);
    EightFloats value = load8(args.value + index), x = load8(args.x + index);
    dropped(value, args.drop, index);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = fmaf(UNIT_OF_SQUARES<T> * sigmoid(gate.x[n]), value.x[n], x.x[n]);
    return x;
  }
};

struct Embedded {
  template <typename T>
  static __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64 t, i64 index, i64 j) {
    // A row of token_ids has one token more than T, the last to predict.
    EightFloats x = load8(args.table + args.token_ids[t + t / args.T_] * args.D + j);
    dropped(x, args.drop, index);
    return x;
  }
};

struct Kept {
  template <typename T>
  static __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64, i64 index, i64) {
    return load8(args.x + index);
  }
};

template <int WARPS> struct Shared {
  float2 sum[WARPS], squares[WARPS];
};

template <typename T, int THREADS, class Change, int C>
__global__ void __launch_bounds__(THREADS) training_add_norm(const Args<T> args) {
  constexpr int WARPS = THREADS / 32;
  Shared<WARPS>& s = *reinterpret_cast<Shared<WARPS>*>(dynamic_smem());
  const i64 t = blockIdx.x, D = args.D, j = 8 * threadIdx.x, index = t * D + j;
  const bool inside = j < D, shifts = C > 0 && t % args.T_;  // whether a token before is mixed in
  EightFloats x = {}, before = {};
  float2 sums = {}, squares = {};  // of the token, and of the one before
  if (inside) {
    x = Change::residual(args, t, index, j);
    if (args.y) store8(args.y + index, x);
    if (shifts) before = Change::residual(args, t - 1, index - D, j);
#pragma unroll
    for (int n = 0; n < 8; ++n) sums.x += x.x[n], sums.y += before.x[n];
  }
  sums = block_sum<WARPS>(sums, s.sum);
  const float mean = sums.x / D, mean_before = sums.y / D;
  if (inside)
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      x.x[n] -= mean, before.x[n] -= mean_before;
      squares.x = fmaf(x.x[n], x.x[n], squares.x), squares.y = fmaf(before.x[n], before.x[n], squares.y);
    }
  squares = block_sum<WARPS>(squares, s.squares);
  const float scale = 1.f / sqrtf(squares.x / D + float(args.eps));
  const float scale_before = 1.f / sqrtf(squares.y / D + float(args.eps));
  if (threadIdx.x == 0) {
    args.moments[2 * t] = mean;
    args.moments[2 * t + 1] = scale;
  }
  if (!inside) return;
  const EightFloats weight = load8(args.weight + j), bias = load8(args.bias + j);
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    x.x[n] = fmaf(x.x[n] * scale, weight.x[n], bias.x[n]);
    before.x[n] = (shifts ? fmaf(before.x[n] * scale_before, weight.x[n], bias.x[n]) : 0.f) - x.x[n];  // d
  }
  if (args.xx) store8(args.xx + index, x);
#pragma unroll
  for (int c = 0; c < C; ++c) {
    EightFloats mixed = load8(args.maa + c * D + j);
#pragma unroll
    for (int n = 0; n < 8; ++n) mixed.x[n] = fmaf(before.x[n], mixed.x[n], x.x[n]);
    store8(args.mixed + c * args.tokens * D + index, mixed);
  }
}
