// what      The gradient of the residual through the beginning of a mix: the token shift's C plain mixes, the layer
//           norm, and the addition of the previous mix's result, whose gradient is computed, too.
// math      G_t = dxx_t + sum_c dmixed_c,t - D_t + D_{t+1}, D_t = dd_t + sum_c dmixed_c,t maa_c, within a sequence
//           dx = dy + the layer norm's pullback of G;  xhat = (x - mean) scale, moments are (mean, scale) of each
//           token, xx = xhat weight + bias, d = xx of the token before, less xx
//           drop is the residual's dropout. Added: dfirst = drop(dx); Gated: dfirst, dvalue are the pullback of
//           drop(dx) by sigmoid(first) value, value being stored in units of UNIT_OF_SQUARES<T>
//           parts = sum_t (G xhat, G, dmixed_c d) of the block's tokens: dweight, dbias, dmaa_c
// shapes    dxx dd [tokens, D] or null, dmixed [C, tokens, D], maa [C, D], weight bias [D]; x dy dx [tokens, D] in the
//           order of `residual_of` (training.cuh), moments [tokens, 2]; first value dfirst dvalue [tokens, D]; parts
//           [blocks, 2 + C, D]
// grid      rwkv/cuda_grad.py launches a block for every `tokens_per_block` tokens, which it takes one after the other;
//           a thread has 8 channels
// smem      Shared: the next token's arrays, and x and dy of the current one. A thread copies and reads its 8 channels.
//           The warps' parts of two sums, of even and odd tokens
// barriers  one a token: the warps' parts of its sums are in shared memory, where those of two tokens later overwrite
//           them
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 3-4
// limits    D a multiple of 8, up to 8 THREADS; dy may be dx; null: no gradient comes from later operations
#include "training.cuh"

// From training.cuh:
//   EightFloats: eight neighbouring channels; load8, store8: in memory; Stored: eight numbers as they are in memory
//   Copied: eight neighbours of every thread, which are copied to shared memory while the threads compute
//   residual_of, store_residual: a thread's channels of the residual, whose order of channels is its own
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
  Stored<T> stored_gate, stored_value;

  __device__ __forceinline__ void load(const Args<T>& args, i64 index) {
    stored_gate.load(args.first + index);
    stored_value.load(args.value + index);
  }

  __device__ __forceinline__ void pull(const Args<T>& args, i64 index, const EightFloats& dy) const {
    const EightFloats gate = stored_gate.floats(), value = stored_value.floats();
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

template <typename T, int THREADS, int C> struct Shared {
  Copied<T, THREADS> dxx, dd, dmixed[C > 0 ? C : 1];
  Copied<float, THREADS> x[2], dy[2];  // of even and odd tokens
  float2 sums[2][THREADS / 32];
};

// Mean and 1 / deviation of a token.
template <typename T> __device__ __forceinline__ float2 moments_of(const Args<T>& args, i64 t) {
  return reinterpret_cast<const float2*>(args.moments)[t];
}

// xhat, from x and the token's moments.
__device__ __forceinline__ EightFloats normed(EightFloats x, float2 moments) {
#pragma unroll
  for (int n = 0; n < 8; ++n) x.x[n] = (x.x[n] - moments.x) * moments.y;
  return x;
}

// A thread's 8 channels of the current token, and its sums over the block's tokens.
template <int C> struct ThreadChannels {
  float2 moments, copied_moments;  // of the current token, and of the one that is being copied
  EightFloats direct;              // G without D_{t+1}
  EightFloats dweight, dbias, dmaa[C > 0 ? C : 1];

  // Starts to copy token t. in_block: whether the token is one of the block's.
  template <typename T, int THREADS>
  __device__ __forceinline__ void copy(const Args<T>& args, Shared<T, THREADS, C>& s, i64 t, bool in_block) {
    const i64 index = t * args.D + 8 * threadIdx.x;
    copied_moments = moments_of(args, t);
    if (args.dxx) s.dxx.copy(args.dxx + index);
    if (args.dd) s.dd.copy(args.dd + index);
#pragma unroll
    for (int c = 0; c < C; ++c) s.dmixed[c].copy(args.dmixed + c * args.tokens * args.D + index);
    s.x[t % 2].copy(residual_of(args.x, t, args.D), args.D / 2);
    if (args.dy && in_block) s.dy[t % 2].copy(residual_of(args.dy, t, args.D), args.D / 2);
    cp_async_commit();
  }

  // Goes on to token t, which has been copied, and returns D_t. first: whether it is the first of its sequence;
  // in_block: whether it is one of the block's, whose terms are added to dmaa. The current token must be the one
  // before, unless `first`.
  template <typename T, int THREADS>
  __device__ __forceinline__ EightFloats next(const Args<T>& args, const Shared<T, THREADS, C>& s, i64 t, bool first,
                                              bool in_block) {
    const i64 D = args.D, j = 8 * threadIdx.x;
    cp_async_wait<0>();  // the thread reads only what it has copied itself
    EightFloats shifted = {};
    direct = {};
    if (args.dxx) direct = s.dxx.floats();
    if (args.dd) shifted = s.dd.floats();
    if constexpr (C > 0) {
      const EightFloats weight = load8(args.weight + j), bias = load8(args.bias + j);
      const EightFloats xhat = normed(s.x[t % 2].floats(), copied_moments),
                        before = normed(s.x[(t + 1) % 2].floats(), moments);
      EightFloats d;  // xx of the token before, less xx
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float xx = fmaf(xhat.x[n], weight.x[n], bias.x[n]);
        const float xx_before = first ? 0.f : fmaf(before.x[n], weight.x[n], bias.x[n]);
        d.x[n] = in_block ? xx_before - xx : 0.f;
      }
#pragma unroll
      for (int c = 0; c < C; ++c) {
        const EightFloats dmixed = s.dmixed[c].floats(), maa = load8(args.maa + c * D + j);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          direct.x[n] += dmixed.x[n];
          shifted.x[n] = fmaf(dmixed.x[n], maa.x[n], shifted.x[n]);
          dmaa[c].x[n] = fmaf(dmixed.x[n], d.x[n], dmaa[c].x[n]);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) direct.x[n] -= shifted.x[n];
    moments = copied_moments;
    return shifted;
  }
};

// Blocks of a multiprocessor that registers have room for: of 512 threads (128 registers each), with several mixes of
// 384 (168); at least one.
constexpr int blocks_with_registers(int threads, int mixes) {
  const int blocks = (mixes < 2 ? 512 : 384) / threads;
  return blocks > 0 ? blocks : 1;
}

template <typename T, int THREADS, template <typename> class Change, int C>
__global__ void __launch_bounds__(THREADS, blocks_with_registers(THREADS, C))
    training_norm_backward(const Args<T> args) {
  Shared<T, THREADS, C>& s = *reinterpret_cast<Shared<T, THREADS, C>*>(dynamic_smem());
  const i64 D = args.D, j = 8 * threadIdx.x;
  const float inverse_D = 1.f / D;
  const bool inside = j < D;
  Tokens token(args.tokens_per_block, args.tokens, args.T_);
  const auto exists = [&](i64 t) { return t <= token.last && t < args.tokens; };  // the token after the last one, too
  ThreadChannels<C> own = {};
  if (inside && token.more()) {
    if (const i64 before = token.t - 1; C > 0 && !token.starts()) {
      s.x[before % 2].copy(residual_of(args.x, before, D), D / 2);
      own.moments = moments_of(args, before);
    }
    own.copy(args, s, token.t, true);
    own.next(args, s, token.t, token.starts(), true);
    if (exists(token.t + 1)) own.copy(args, s, token.t + 1, token.t + 1 < token.last);
  }
  for (; token.more(); token.next()) {
    const i64 index = token.t * D + j, next = token.t + 1;
    const float2 moments = own.moments;
    EightFloats G = own.direct, xhat = {}, dx = {};
    Change<T> change = {};
    float sum = 0.f, product = 0.f;
    if (inside) {
      const EightFloats weight = load8(args.weight + j);
      change.load(args, index);
      if (exists(next)) {
        const EightFloats shifted = own.next(args, s, next, token.ends(), next < token.last);
#pragma unroll
        for (int n = 0; n < 8; ++n) G.x[n] += token.ends() ? 0.f : shifted.x[n];
      }
      xhat = normed(s.x[token.t % 2].floats(), moments);
      if (args.dy) dx = s.dy[token.t % 2].floats();
      if (exists(next + 1)) own.copy(args, s, next + 1, next + 1 < token.last);
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        own.dweight.x[n] = fmaf(G.x[n], xhat.x[n], own.dweight.x[n]);
        own.dbias.x[n] += G.x[n];
        G.x[n] *= weight.x[n];
        sum += G.x[n];
        product = fmaf(G.x[n], xhat.x[n], product);
      }
    }
    const float2 sums = block_sum<THREADS / 32>(float2{sum, product}, s.sums[token.t % 2]);  // over all D channels
    if (!inside) continue;
    const float mean = sums.x * inverse_D, along = sums.y * inverse_D;
#pragma unroll
    for (int n = 0; n < 8; ++n) dx.x[n] += moments.y * (G.x[n] - mean - xhat.x[n] * along);
    store_residual(args.dx, token.t, D, dx);
    dropped(dx, args.drop, index);  // the channels that the forward pass made 0 become 0; the others are scaled up
    change.pull(args, index, dx);
  }
  if (!inside) return;
  float* parts = args.parts + blockIdx.x * (2 + C) * D + j;
  store8(parts, own.dweight);
  store8(parts + D, own.dbias);
#pragma unroll
  for (int c = 0; c < C; ++c) store8(parts + (2 + c) * D, own.dmaa[c]);
}
