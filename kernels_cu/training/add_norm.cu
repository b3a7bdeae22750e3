// what      Adds the previous mix's result to the residual, and computes its layer norm and C plain mixes of it: the
//           beginning of every mix of a training step.
// math      y = x + drop(change), xx = LN(y);  mixed_c = xx + d maa_c, d = xx of the token before, less xx; before a
//           sequence's first token xx is zero
//           change = first (Added), sigmoid(first) UNIT_OF_SQUARES<T> value (Gated: a channel mix, whose `value` is
//           stored divided by this unit, because squares may be larger than float16 holds);
//           y = drop(table_token) (Embedded); y = x (Kept)
// shapes    x y [tokens, D] in the order of `residual_of` (training.cuh); weight bias [D], moments [tokens, 2] for mean
//           and 1 / deviation; first value [tokens, D]; xx d [tokens, D], with `normed_row` numbers from a token to the
//           next one, may be null; maa [C, D], mixed [C, tokens, D]; table [V, D], token_ids [tokens / T, T + 1]
// grid      rwkv/cuda_grad.py launches a block for TOKENS tokens, one after the other, which normalises the token
//           before them as well if there are mixes; threads of 8 channels each
// smem      the warps' parts of two sums
// barriers  two a token: the mean, then the variance
// numerics  float32, xx, d and mixes rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    D a multiple of 8, up to 8 THREADS
#include "training.cuh"

// From training.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   Tokens: goes over the block's tokens
//   block_sum: the sum over the block, by one barrier. No barrier follows the reads, so two calls, one after the other,
//     have shared memory of their own
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
  T* d;
  const float* maa;
  T* mixed;
  i64 tokens, T_;  // T_: of a sequence
  i64 D, normed_row;
  Dropout drop;
  double eps;
};

// The kinds of change, of which the kernel's template argument is one. load() reads what residual() makes channels
// j ... j + 7 of token t's y of; index: their place in [tokens, D]. dropped (training.cuh) makes some channels 0 and
// scales the others up; a training step's backward pass draws the same ones.
template <typename T> struct Added {
  Stored<T> change;
  StoredResidual x;

  __device__ __forceinline__ void load(const Args<T>& args, i64 t, i64 j) {
    change.load(args.first + t * args.D + j);
    x.load(args.x, t, args.D);
  }
  __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64 index) const {
    EightFloats change = this->change.floats(), y = x.floats();
    dropped(change, args.drop, index);
#pragma unroll
    for (int n = 0; n < 8; ++n) y.x[n] += change.x[n];
    return y;
  }
};

template <typename T> struct Gated {
  Stored<T> gate, value;
  StoredResidual x;

  __device__ __forceinline__ void load(const Args<T>& args, i64 t, i64 j) {
    gate.load(args.first + t * args.D + j);
    value.load(args.value + t * args.D + j);
    x.load(args.x, t, args.D);
  }
  __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64 index) const {
    const EightFloats gate = this->gate.floats();
    EightFloats value = this->value.floats(), y = x.floats();
    dropped(value, args.drop, index);
#pragma unroll
    for (int n = 0; n < 8; ++n) y.x[n] = fmaf(UNIT_OF_SQUARES<T> * sigmoid(gate.x[n]), value.x[n], y.x[n]);
    return y;
  }
};

template <typename T> struct Embedded {
  Stored<float> row;

  __device__ __forceinline__ void load(const Args<T>& args, i64 t, i64 j) {
    // A row of token_ids has one token more than T, the last to predict.
    row.load(args.table + args.token_ids[t + t / args.T_] * args.D + j);
  }
  __device__ __forceinline__ EightFloats residual(const Args<T>& args, i64 index) const {
    EightFloats y = row.floats();
    dropped(y, args.drop, index);
    return y;
  }
};

template <typename T> struct Kept {
  StoredResidual x;

  __device__ __forceinline__ void load(const Args<T>& args, i64 t, i64) { x.load(args.x, t, args.D); }
  __device__ __forceinline__ EightFloats residual(const Args<T>&, i64) const { return x.floats(); }
};

template <int WARPS> struct Shared {
  float sum[WARPS], squares[WARPS];
};

constexpr int TOKENS = 4;  // of a block

// The mean and 1 / deviation of a token's y, of which y has the thread's channels, zeros beyond D.
template <int WARPS>
__device__ __forceinline__ float2 moments_of(const EightFloats& y, bool inside, float inverse_D, float eps,
                                             Shared<WARPS>& s) {
  float sum = 0.f, squares = 0.f;
#pragma unroll
  for (int n = 0; n < 8; ++n) sum += y.x[n];
  const float mean = block_sum<WARPS>(sum, s.sum) * inverse_D;
  if (inside)
#pragma unroll
    for (int n = 0; n < 8; ++n) squares = fmaf(y.x[n] - mean, y.x[n] - mean, squares);
  return {mean, 1.f / sqrtf(block_sum<WARPS>(squares, s.squares) * inverse_D + eps)};
}

// Launch bounds: registers for up to 512 threads of a multiprocessor; without a number the compiler spills some.
template <typename T, int THREADS, template <typename> class Change, int C>
__global__ void __launch_bounds__(THREADS, 512 / THREADS) training_add_norm(const Args<T> args) {
  constexpr int WARPS = THREADS / 32;
  Shared<WARPS>& s = *reinterpret_cast<Shared<WARPS>*>(dynamic_smem());
  const i64 D = args.D, j = 8 * threadIdx.x;
  const bool inside = j < D;
  const float inverse_D = 1.f / D, eps = float(args.eps);
  EightFloats weight = {}, bias = {};
  if (inside) weight = load8(args.weight + j), bias = load8(args.bias + j);
  Tokens token(TOKENS, args.tokens, args.T_);
  Change<T> next = {};  // what has been read of the next token
  // xx of token t, which has been read; reads the one after it, if that is one of the block's, and stores y and moments
  // if t is one.
  const auto normed = [&](i64 t, bool in_block) {
    EightFloats x = {};
    if (inside) {
      x = next.residual(args, t * D + j);
      if (t + 1 < token.last) next.load(args, t + 1, j);
      if (args.y && in_block) store_residual(args.y, t, D, x);
    }
    const float2 moments = moments_of(x, inside, inverse_D, eps, s);
    if (in_block && threadIdx.x == 0) store2(args.moments + 2 * t, moments);
#pragma unroll
    for (int n = 0; n < 8; ++n) x.x[n] = fmaf((x.x[n] - moments.x) * moments.y, weight.x[n], bias.x[n]);
    return x;
  };
  EightFloats before = {};  // xx of the token before; 0 before a sequence's first
  const bool reads_before = C > 0 && !token.starts();
  if (inside && token.more()) next.load(args, token.t - reads_before, j);
  if (reads_before) before = normed(token.t - 1, false);
  for (; token.more(); token.next()) {
    const i64 index = token.t * D + j;
    const EightFloats xx = normed(token.t, true);
    if (!inside) continue;
    if (args.xx) store8(args.xx + token.t * args.normed_row + j, xx);
    EightFloats d;
#pragma unroll
    for (int n = 0; n < 8; ++n) d.x[n] = before.x[n] - xx.x[n];
    if (args.d) store8(args.d + token.t * args.normed_row + j, d);
#pragma unroll
    for (int c = 0; c < C; ++c) {
      EightFloats mixed = load8(args.maa + c * D + j);
#pragma unroll
      for (int n = 0; n < 8; ++n) mixed.x[n] = fmaf(d.x[n], mixed.x[n], xx.x[n]);
      store8(args.mixed + c * args.tokens * D + index, mixed);
    }
    before = token.ends() ? EightFloats{} : xx;
  }
}
