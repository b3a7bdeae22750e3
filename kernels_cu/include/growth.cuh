// what      The pairs of tokens of a sub-chunk where gates grow: each by the decay between them, with no inverse and no
//           bound. For chunks in which a gate is above GROWTH, which are few.
// math      with D_ij = prod_{j<m<=i} a_m (RWKV-6: j < m < i), a = exp g, j < i:
//           A_ij = sum_c q_i D_ij k_j;   dq_i = sum_j dA_ij D_ij k_j,   dk_j = sum_i dA_ij D_ij q_i,
//           dg_t = sum of q_i D_ij k_j dA_ij over j < t <= i  (RWKV-6: j < t < i)
// numerics  float32. Decays meet only with those beside them: they overflow where the growth from one token to another
//           does, over 88 nats, and what grew before a reset is forgotten.
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// Factors about the middle of a sub-chunk serve all gates up to this, in nats: three of those stay far from the end of
// float32, and let e^-10 of a token pass a reset at most.
constexpr float GROWTH = 1.f;

constexpr int PAIRED = 8;                         // tokens of a sub-chunk
constexpr int PAIRS = PAIRED * (PAIRED - 1) / 2;  // of a query and a key before it

// The n-th pair.
struct TokenPair {
  int query, key;
};
__device__ __forceinline__ TokenPair pair_of(int n) {
  int query = 1;
  while (n >= query) n -= query++;
  return {query, n};
}

// By a warp: its lane n gets the score of pair n. Pointers are to a sub-chunk's first token, in any memory; of its 8
// tokens there are `rows`. A lane by itself, with few registers: callers have none to spare.
template <class ReadOrder, typename T, typename G>
__device__ __noinline__ float score_of_pair(const T* q, const T* k, const G* g, i64 q_stride, i64 k_stride,
                                            i64 g_stride, int rows, int channels) {
  const TokenPair pair = pair_of(threadIdx.x & 31);
  if (pair.query >= rows || pair.query >= PAIRED) return 0.f;
  const int gates = pair.query - pair.key - ReadOrder::reads_before_write;
  q += pair.query * q_stride, k += pair.key * k_stride, g += (pair.key + 1) * g_stride;
  float sum = 0.f;
#pragma unroll 1
  for (int c = 0; c < channels; ++c) {
    float between = 0.f;  // nats
    const G* gate = g + c;
#pragma unroll
    for (int m = 0; m + 1 < PAIRED; ++m, gate += g_stride)
      if (m < gates) between += to_float(*gate);
    sum = fmaf(to_float(q[c]) * decay_of(between), to_float(k[c]), sum);
  }
  return sum;
}

// What token t of a sub-chunk has of its pairs in the gradients, of one channel. q(i), k(j) and a(m) are that
// channel's queries, keys and decays; dA(i, j) is asked for with j < i alone.
struct PairGradients {
  float dq, dk, dg;
};
template <class ReadOrder, class Query, class Key, class Decay, class Weight>
__device__ __forceinline__ PairGradients gradients_of_pairs(int t, Query q, Key k, Decay a, Weight dA) {
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;
  PairGradients sums = {};
  float decay = 1.f;
#pragma unroll 1
  for (int i = t + 1; i < PAIRED; ++i) {
    if (INCLUSIVE) decay *= a(i);
    sums.dk = fmaf(dA(i, t), decay * q(i), sums.dk);
    if (!INCLUSIVE) decay *= a(i);
  }
  decay = 1.f;  // from the key to token t, which decays in `later` where it does
#pragma unroll 1
  for (int j = t - 1; j >= 0; --j) {
    const float key = decay * k(j);
    const float own = a(t);
    sums.dq = fmaf(dA(t, j), (INCLUSIVE ? own : 1.f) * key, sums.dq);
    float later = own;
    if (INCLUSIVE) sums.dg = fmaf(dA(t, j), later * q(t) * key, sums.dg);
#pragma unroll 1
    for (int i = t + 1; i < PAIRED; ++i) {
      if (INCLUSIVE) later *= a(i);
      sums.dg = fmaf(dA(i, j), later * q(i) * key, sums.dg);
      if (!INCLUSIVE) later *= a(i);
    }
    decay *= a(j);
  }
  return sums;
}
