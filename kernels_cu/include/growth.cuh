// what      Scores and gradients of a sub-chunk's pairs of tokens from the decay between each pair, without inverses
//           and clamps: for the few chunks that have a gate above GROWTH.
// math      with D_ij = prod_{j<m<=i} a_m (RWKV-6: j < m < i), a = exp g, j < i:
//           A_ij = sum_c q_i D_ij k_j;   dq_i = sum_j dA_ij D_ij k_j,   dk_j = sum_i dA_ij D_ij q_i,
//           dg_t = sum of q_i D_ij k_j dA_ij over j < t <= i  (RWKV-6: j < t < i)
//           A, dA: [query, key]; c is a channel: q, k, a, D and dg have a number for each
// numerics  float32. The decay between two tokens is a product from one to the other: it overflows only if the growth
//           between them exceeds 88 nats, and a reset between them makes it 0.
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// The largest gate, in nats, for which callers use factors about a sub-chunk's middle: queries and keys times decays
// between them and the middle, of which some are inverse. Three such gates are far from the end of float32's range. A
// reset (a = 0) counts as e^-20 there, or as e^-16 (decays.cuh), and at most 6 gates of 1 nat are beside it between two
// tokens of a sub-chunk: so at most e^-10 of a token passes a reset.
constexpr float GROWTH = 1.f;

constexpr int SUB_CHUNK = 8;  // tokens of a sub-chunk; decays.cuh gives each of four lanes two of them
constexpr int PAIRS = SUB_CHUNK * (SUB_CHUNK - 1) / 2;  // of a query and a key before it
static_assert(PAIRS <= 32, "a lane computes the score of each");

// The n-th pair of a query and an earlier key of a sub-chunk: (1, 0), (2, 0), (2, 1), (3, 0), ...
struct TokenPair {
  int query, key;
};
__device__ __forceinline__ TokenPair pair_of(int n) {
  int query = 1;
  while (n >= query) n -= query++;
  return {query, n};
}

// Returns to lane n of a warp the score of pair n; 0 if the pair's query is not one of the sub-chunk's `rows` tokens,
// and to lanes 28 to 31, which have no pair. The pointers are to the first of these tokens, in any memory; strides: of
// tokens. A lane computes its score alone, channel by channel, with few registers, since callers have no free ones.
template <class ReadOrder, typename T, typename G>
__device__ __noinline__ float score_of_pair(const T* q, const T* k, const G* g, i64 q_stride, i64 k_stride,
                                            i64 g_stride, int rows, int channels) {
  const TokenPair pair = pair_of(threadIdx.x & 31);
  if (pair.query >= rows || pair.query >= SUB_CHUNK) return 0.f;
  const int gates = pair.query - pair.key - ReadOrder::reads_before_write;
  q += pair.query * q_stride, k += pair.key * k_stride, g += (pair.key + 1) * g_stride;
  float sum = 0.f;
#pragma unroll 2
  for (int c = 0; c < channels; ++c) {
    float between = 0.f;  // nats
    const G* gate = g + c;
#pragma unroll
    for (int m = 0; m + 1 < SUB_CHUNK; ++m, gate += g_stride)
      if (m < gates) between += to_float(*gate);
    sum = fmaf(to_float(q[c]) * decay_of(between), to_float(k[c]), sum);
  }
  return sum;
}

// The terms of the sub-chunk's pairs in the gradients of token t, for one channel: dq_t, dk_t and dg_t as above. q(i),
// k(j) and a(m) return the channel's queries, keys and decays; dA(i, j) is called for j < i only.
struct PairGradients {
  float dq, dk, dg;
};
template <class ReadOrder, class Query, class Key, class Decay, class ScoreGradient>
__device__ __forceinline__ PairGradients gradients_of_pairs(int t, Query q, Key k, Decay a, ScoreGradient dA) {
  constexpr bool INCLUSIVE = !ReadOrder::reads_before_write;
  PairGradients sums = {};
  float decay = 1.f;  // over the tokens after t up to i (RWKV-6: to i - 1)
#pragma unroll 1
  for (int i = t + 1; i < SUB_CHUNK; ++i) {
    if (INCLUSIVE) decay *= a(i);
    sums.dk = fmaf(dA(i, t), decay * q(i), sums.dk);
    if (!INCLUSIVE) decay *= a(i);
  }
  decay = 1.f;  // over the tokens after key j and before t
#pragma unroll 1
  for (int j = t - 1; j >= 0; --j) {
    const float key = decay * k(j);
    const float decay_of_t = a(t);
    sums.dq = fmaf(dA(t, j), (INCLUSIVE ? decay_of_t : 1.f) * key, sums.dq);
    float later = decay_of_t;  // over tokens t to i (RWKV-6: to i - 1)
    if (INCLUSIVE) sums.dg = fmaf(dA(t, j), later * q(t) * key, sums.dg);
#pragma unroll 1
    for (int i = t + 1; i < SUB_CHUNK; ++i) {
      if (INCLUSIVE) later *= a(i);
      sums.dg = fmaf(dA(i, j), later * q(i) * key, sums.dg);
      if (!INCLUSIVE) later *= a(i);
    }
    decay *= a(j);
  }
  return sums;
}
