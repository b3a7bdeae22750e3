// what      The gradients of `rwkv6_gated_norm`; the norm is computed again.
// math      with n = GroupNorm_H(o), a = n weight + bias, s = sigmoid(gate):
//           dgate = dy a (s + gate s (1 - s)), da = dy gate s, do = the norm's pullback of da weight
//           parts = sum_t (da n, da) of the block's tokens: dweight, dbias
// shapes    dy o gate do dgate [tokens, D], weight bias [D], parts [blocks, 2, D]; heads of N channels
// grid      rwkv/cuda_grad.py launches a block for every `tokens_per_block` tokens, which it takes one after the other;
//           a thread has 8 channels
// smem      none
// barriers  none
// numerics  float32, rounded once; sums always in the same order
// source    Peng et al., 2024, "Eagle and Finch", eq. 19
// limits    N 8, 16, 32, 64, 128 or 256; D up to 8 THREADS
#include "training_heads.cuh"

// From training_heads.cuh:
//   EightFloats x: eight neighbouring channels, x.x[0] to x.x[7]; load8, store8: at addresses of whole 16 bytes
//   normalise: x becomes (x - mean) / deviation over its head

template <typename T> struct Args {
  const T* dy;
  const T* o;
  const T* gate;
  const float* weight;
  const float* bias;
  T* do_;
  T* dgate;
  float* parts;
  i64 tokens, D, N, tokens_per_block;
  double eps;
};

template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) training_gated_norm_backward(const Args<T> args) {
  const i64 D = args.D, j = 8 * threadIdx.x;
  const bool inside = j < D;
  const int N = int(args.N);
  const i64 first = blockIdx.x * args.tokens_per_block,
            last = first + args.tokens_per_block < args.tokens ? first + args.tokens_per_block : args.tokens;
  EightFloats weight = {}, bias = {}, dweight = {}, dbias = {};
  if (inside) {
    weight = load8(args.weight + j);
    bias = load8(args.bias + j);
  }
  for (i64 t = first; t < last; ++t) {
    const i64 index = t * D + j;
    EightFloats o = {}, gate = {}, dy = {};
    if (inside) {
      o = load8(args.o + index);
      gate = load8(args.gate + index);
      dy = load8(args.dy + index);
    }
    // o becomes n; scale: 1 / deviation. A head's N / 8 neighbouring lanes, all of the warp's, call this and head_sum.
    const float scale = normalise(o, N, float(args.eps));
    float sum = 0.f, product = 0.f;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float opening = sigmoid(gate.x[n]), silu = gate.x[n] * opening, da = dy.x[n] * silu;
      // dgate, in the place of gate.
      gate.x[n] = dy.x[n] * fmaf(o.x[n], weight.x[n], bias.x[n]) * fmaf(silu, 1.f - opening, opening);
      dweight.x[n] = fmaf(da, o.x[n], dweight.x[n]);
      dbias.x[n] += da;
      dy.x[n] = da * weight.x[n];
      sum += dy.x[n];
      product = fmaf(dy.x[n], o.x[n], product);
    }
    const float mean = head_sum(sum, N) / N, projection = head_sum(product, N) / N;
    if (!inside) continue;
#pragma unroll
    for (int n = 0; n < 8; ++n) dy.x[n] = scale * (dy.x[n] - mean - o.x[n] * projection);
    store8(args.do_ + index, dy);
    store8(args.dgate + index, gate);
  }
  if (!inside) return;
  store8(args.parts + blockIdx.x * 2 * D + j, dweight);
  store8(args.parts + (blockIdx.x * 2 + 1) * D + j, dbias);
}
