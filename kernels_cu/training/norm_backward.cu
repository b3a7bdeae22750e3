// what      The gradient of the residual through the beginning of a mix: the token shift's C plain mixes, the layer
//           norm, and the addition of the previous mix's result, whose gradient is computed, too.
// math      G_t = dxx_t + sum_c dmixed_c,t - D_t + D_{t+1}, D_t = dd_t + sum_c dmixed_c,t maa_c, within a sequence
//           dx = dy + the layer norm's pullback of G;  xhat = (x - mean) scale, moments are (mean, scale) of each
//           token, xx = xhat weight + bias, d = xx of the token before, less xx
//           drop is the residual's dropout. Added: dfirst = drop(dx); Gated: dfirst, dvalue are the pullback of
//           drop(dx) by sigmoid(first) value, value being stored in units of UNIT_OF_SQUARES<T>
//           parts = sum_t (G xhat, G, dmixed_c d) of the block's tokens: dweight, dbias, dmaa_c
// shapes    dxx dd [tokens, D] or null, dmixed [C, tokens, D], maa [C, D], weight bias [D]; x dy dx [tokens, D],
//           moments [tokens, 2]; first value dfirst dvalue [tokens, D]; parts [blocks, 2 + C, D]
// grid      a block for every `tokens_per_block` tokens, which it takes one after the other; a thread has 8 channels
// smem      the warps' parts of two sums, of even and odd tokens
// barriers  one a token: the warps' parts of its sums are in shared memory, where those of two tokens later overwrite
//           them
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 8, up to 8 THREADS; dy may be dx; null: no gradient comes from later operations
#include "training.cuh"

// From training.cuh:
//   Stored: eight neighbours as they are in memory
//   Tokens: goes over the block's tokens
//   dropped: the residual's dropout

template <typename T> struct Args {
  const T* dxx;
  const T* dd;
  const T* dmixed;
  const float* maa;
  const float* x;
  const float* moments;
  const float* weight;
  const float* bias;
  const float* dy;
  float* dx;
  const T* first;
  const T* value;
  T* dfirst;
  T* dvalue;
  float* parts;
  i64 tokens, T_;  // T_: of a sequence
  i64 D, tokens_per_block;
  Dropout drop;
};

// The previous mix's result, which was added to the residual: `load` reads it before `pull` stores its gradient, given
// the residual's gradient dy.
template <typename T> struct Added {
  __device__ __forceinline__ void load(const Args<T>&, i64) {}

  __device__ __forceinline__ void pull(const Args<T>& args, i64 index, const EightFloats& dy) const {
    store8(args.dfirst + index, dy);
  }
};

template <typename T> struct Gated {
  Stored<T> first, second;

  __device__ __forceinline__ void load(const Args<T>& args, i64 index) {
    first.load(args.first + index);
    second.load(args.value + index);
  }

  __device__ __forceinline__ void pull(const Args<T>& args, i64 index, const EightFloats& dy) const {
    const EightFloats gate = first.floats(), value = second.floats();
    EightFloats dgate, dvalue;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float opening = sigmoid(gate.x[n]);
      dvalue.x[n] = dy.x[n] * opening * UNIT_OF_SQUARES<T>;
      dgate.x[n] = dvalue.x[n] * value.x[n] * (1.f - opening);
    }
    store8(args.dfirst + index, dgate);
    store8(args.dvalue + index, dvalue);
  }
};

// xhat of token t.
template <typename T> __device__ __forceinline__ EightFloats normed(const Args<T>& args, i64 t) {
  EightFloats x = load8(args.x + t * args.D + 8 * threadIdx.x);
  const float mean = args.moments[2 * t], scale = args.moments[2 * t + 1];
#pragma unroll
  for (int n = 0; n < 8; ++n) x.x[n] = (x.x[n] - mean) * scale;
  return x;
}

// xx of a token, from its xhat.
template <typename T> __device__ __forceinline__ EightFloats affine(const Args<T>& args, EightFloats x) {
  const EightFloats weight = load8(args.weight + 8 * threadIdx.x), bias = load8(args.bias + 8 * threadIdx.x);
#pragma unroll
  for (int n = 0; n < 8; ++n) x.x[n] = fmaf(x.x[n], weight.x[n], bias.x[n]);
  return x;
}

// A thread's 8 channels of the next token, and its sums over the block's tokens.
template <int C> struct State {
  EightFloats direct, shifted;  // G without D_{t+1}, and D_t
  EightFloats before;           // xx of the token before
  EightFloats dweight, dbias, dmaa[C > 0 ? C : 1];

  // Loads token t. first: whether it is the first of its sequence; in_block: whether it is one of the block's, whose
  // terms are added to dmaa. `before` must hold xx of token t - 1 unless `first`.
  template <typename T> __device__ __forceinline__ void load(const Args<T>& args, i64 t, bool first, bool in_block) {
    const i64 D = args.D, j = 8 * threadIdx.x, index = t * D + j;
    direct = shifted = {};
    if (args.dxx) direct = load8(args.dxx + index);
    if (args.dd) shifted = load8(args.dd + index);
    if constexpr (C > 0) {
      Stored<T> mixes[C];
#pragma unroll
      for (int c = 0; c < C; ++c) mixes[c].load(args.dmixed + c * args.tokens * D + index);
      const EightFloats xx = affine(args, normed(args, t));
#pragma unroll
      for (int n = 0; n < 8; ++n) before.x[n] = in_block ? (first ? 0.f : before.x[n]) - xx.x[n] : 0.f;
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const EightFloats dmixed = mixes[c].floats(), maa = load8(args.maa + c * D + j);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          direct.x[n] += dmixed.x[n];
          shifted.x[n] = fmaf(dmixed.x[n], maa.x[n], shifted.x[n]);
          dmaa[c].x[n] = fmaf(dmixed.x[n], before.x[n], dmaa[c].x[n]);
        }
      }
      before = xx;
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) direct.x[n] -= shifted.x[n];
  }
};

template <int WARPS> struct Shared {
  float2 sums[2][WARPS];
};

// Launch bounds: registers for up to 288 threads of a multiprocessor (224 a thread), for 256 if blocks have 64; none
// for wider blocks.
template <typename T, int THREADS, template <typename> class Change, int C>
__global__ void __launch_bounds__(THREADS, THREADS > 64 ? 288 / THREADS : 4)
    training_norm_backward(const Args<T> args) {
  constexpr int WARPS = THREADS / 32;
  Shared<WARPS>& s = *reinterpret_cast<Shared<WARPS>*>(dynamic_smem());
  const i64 D = args.D, j = 8 * threadIdx.x;
  const bool inside = j < D;
  Tokens token(args.tokens_per_block, args.tokens, args.T_);
  State<C> state = {};
  if (inside && token.more()) {
    if (C > 0 && !token.starts()) state.before = affine(args, normed(args, token.t - 1));
    state.load(args, token.t, token.starts(), true);
  }
  for (int parity = 0; token.more(); token.next(), parity ^= 1) {
    const i64 index = token.t * D + j;
    EightFloats G = {}, xhat = {}, dx = {};
    Change<T> change = {};
    float sum = 0.f, product = 0.f;
    const float scale = args.moments[2 * token.t + 1];
    if (inside) {
      xhat = normed(args, token.t);
      const EightFloats weight = load8(args.weight + j);
      if (args.dy) dx = load8(args.dy + index);
      change.load(args, index);
      G = state.direct;
      const bool next_in_block = token.t + 1 < token.last;
      if (next_in_block || !token.ends()) state.load(args, token.t + 1, token.ends(), next_in_block);
#pragma unroll
      for (int n = 0; n < 8; ++n) G.x[n] += token.ends() ? 0.f : state.shifted.x[n];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        state.dweight.x[n] = fmaf(G.x[n], xhat.x[n], state.dweight.x[n]);
        state.dbias.x[n] += G.x[n];
        G.x[n] *= weight.x[n];
        sum += G.x[n];
        product = fmaf(G.x[n], xhat.x[n], product);
      }
    }
    const float2 sums = block_sum<WARPS>(float2{sum, product}, s.sums[parity]);  // over all D channels; a barrier
    if (!inside) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n) dx.x[n] += scale * (G.x[n] - sums.x / D - xhat.x[n] * (sums.y / D));
    store8(args.dx + index, dx);
    dropped(dx, args.drop, index);  // the channels that the forward pass made 0 become 0; the others are scaled up
    change.pull(args, index, dx);
  }
  if (!inside) return;
  float* parts = args.parts + blockIdx.x * (2 + C) * D + j;
  store8(parts, state.dweight);
  store8(parts + D, state.dbias);
#pragma unroll
  for (int c = 0; c < C; ++c) store8(parts + (2 + c) * D, state.dmaa[c]);
}
