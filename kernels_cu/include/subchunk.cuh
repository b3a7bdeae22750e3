// what      A sub-chunk of 16 tokens in the stages' kernels: the scores of its pairs of tokens, and its queries and
//           keys decayed from its start and to its end.
// math      A_ij = sum_k q_ik k_jk prod_{j<m<=i} a_mk  (GLA)       prod_{j<m<i}, A_ii = sum_k q_ik u_k k_ik  (RWKV-6)
//           q_i prod_{m<=i} a_m  (RWKV-6: m < i),   k_j prod_{m>j} a_m,   a = exp g
// numerics  Decays are multiplied one after the other, as the recurrence does: one exp a gate, exact for any gate
//           (a = 0 at -inf), and no difference of cumulated gates anywhere.
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int SUB = 16;  // tokens a sub-chunk

// The distance of rows of BK channels in floats: loads of tensor cores then touch every bank once.
template <int BK> constexpr int LD = BK + 8;

// s_A[i, j] = the scores of the 16 x 16 pairs, zero above the diagonal. s_a: decays; s_u: RWKV-6's bonus. A sixteenth
// of the block's threads computes the scores of a key, each thread 4 channels at a time. The caller does the barrier.
template <class ReadOrder, int BK, int THREADS, int LDA>
__device__ void diagonal_scores(const float* s_q,  // [16, BK]
                                const float* s_k,  // [16, BK]
                                const float* s_a,  // [16, BK]
                                const float* s_u,  // [BK]
                                float* s_A) {      // [16, 16]
  constexpr int LANES = THREADS / SUB;
  const int slice = threadIdx.x % LANES, j = threadIdx.x / LANES, warps_first = (threadIdx.x & ~31) / LANES;
  float score[SUB] = {};
#pragma unroll 1
  for (int c = 4 * slice; c < BK; c += 4 * LANES) {
    float w[4], u[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      w[x] = s_k[j * LD<BK> + c + x];
      u[x] = ReadOrder::reads_before_write ? s_u[c + x] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < SUB; ++i) {
      if (i < warps_first) continue;  // the same for the whole warp
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float q = s_q[i * LD<BK> + c + x], a = s_a[i * LD<BK> + c + x];
        if (!ReadOrder::reads_before_write && i > j) w[x] *= a;
        const float weight = i == j ? u[x] * w[x] : w[x];
        if (i >= j) score[i] = fmaf(q, weight, score[i]);
        if (ReadOrder::reads_before_write && i > j) w[x] *= a;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < SUB; ++i) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
      score[i] += __shfl_xor_sync(0xffffffffu, score[i], distance);
    if (i % LANES == slice) s_A[i * LDA + j] = score[i];
  }
}

// Multiplies query i by the decay from the sub-chunk's start to the state that token i reads. In place; a thread has a
// channel.
template <class ReadOrder, int BK, int THREADS> __device__ void decay_queries(float* s_q, const float* s_a) {
  for (int c = threadIdx.x; c < BK; c += THREADS) {
    float carried = 1.f;
#pragma unroll
    for (int i = 0; i < SUB; ++i) {
      if (!ReadOrder::reads_before_write) carried *= s_a[i * LD<BK> + c];
      s_q[i * LD<BK> + c] *= carried;
      if (ReadOrder::reads_before_write) carried *= s_a[i * LD<BK> + c];
    }
  }
}

// Multiplies key j by the decay after token j and by `s_carry`, the decay from the sub-chunk's end to the state that
// reads the keys; multiplies s_carry by the decay of the whole sub-chunk. In place; a thread has a channel.
template <int BK, int THREADS> __device__ void decay_keys(float* s_k, const float* s_a, float* s_carry) {
  for (int c = threadIdx.x; c < BK; c += THREADS) {
    float carried = s_carry[c];
#pragma unroll
    for (int j = SUB - 1; j >= 0; --j) {
      s_k[j * LD<BK> + c] *= carried;
      carried *= s_a[j * LD<BK> + c];
    }
    s_carry[c] = carried;
  }
}

// Replaces gates by decays.
template <int BK, int THREADS> __device__ void exponentiate(float* s_g) {
  for (int at = threadIdx.x; at < SUB * BK; at += THREADS) {
    float& gate = s_g[at / BK * LD<BK> + at % BK];
    gate = decay_of(gate);
  }
}
