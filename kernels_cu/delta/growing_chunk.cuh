// what      Prepares a chunk of the delta rules with gates of channels token by token, where gates let a state grow:
//           decayed tokens would leave the range of float16, in which other chunks have them.
// math      Z_j is what remains of token j's key. It begins as k_j. At each later token t, with its decay D:
//           KDA: Z_j <- D Z_j - beta_t k_t (k_t . D Z_j);   RWKV-7: Z_j <- D Z_j + b_t (a_t . Z_j), and the same from
//           b_j on. Z_j after the last token is Z; q_t . Z_j is B_tj, from b_j on H_tj; products with k_t, or a_t, are
//           what residuals are made of. E, W: as in channel_prepare.cu and dplr_prepare.cu
// shapes    a warp has a row of Z at a time, a lane 4 of its channels; E and W by BlockTask
// barriers  one: E and H are written
// numerics  float32, in the recurrence's order
#include "delta/channel_chunk.cuh"
#include "delta/prepared.cuh"

constexpr float GROWTH = 1.28f;  // float16 holds chunks whose decays are below it: 1.28^32 = 2697

// Whether one of a thread's decays is above GROWTH.
__device__ __forceinline__ bool grows(const float4 (&decays)[BLOCK]) {
  float largest = 0.f;
#pragma unroll
  for (const float4& x : decays) largest = fmaxf(largest, fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)));
  return largest > GROWTH;
}

// Prepares the chunk in the tiles q, k, a, b, g; KDA has k for a and b. KDA alone has betas, and lengths of keys and of
// queries. H: memory for this function.
template <bool TWO_WRITES, bool GRADIENT, int BK, typename T, typename G>
__device__ __noinline__ void prepare_by_tokens(typename PreparedFor<T, BK, TWO_WRITES, GRADIENT>::Type& to, const T* q,
                                               const T* k, const T* a, const T* b, const G* g, const Lengths* lengths,
                                               const float* betas, float (*H)[LD], float w_scale) {
  constexpr int WARPS = BK / 16;
  const auto inverse_length = [&](int kind, int t) {
    return TWO_WRITES ? 1.f : lengths[kind].factor[t] * lengths[kind].power[t];
  };
  const auto beta = [&](int t) { return TWO_WRITES ? 1.f : betas[t]; };
  const BlockTask<BK> task;
  float4 since = {1.f, 1.f, 1.f, 1.f}, W[BLOCK];
#pragma unroll 1
  for (int t = 0; t < task.first; ++t) since = times(since, decays_at(place<BK>(g, t, task.c)));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int t = task.first + n;
    const float4 before = since, row = unpack_four(task.at(a, n));
    since = times(since, decays_at(task.at(g, n)));
    put_four(task.at(to.E, n), TWO_WRITES ? times(before, row) : times(-inverse_length(0, t), times(since, row)));
    W[n] = times(w_scale * inverse_length(1, t), times(since, unpack_four(task.at(q, n))));
  }
  if (task.block == BLOCKS - 1) *reinterpret_cast<float4*>(to.decay + task.c) = since;

  const int lane = own_lane(), c = 4 * lane;
  const auto four = [&](const auto* tile, int t) { return c < BK ? unpack_four(place<BK>(tile, t, c)) : float4{}; };
#pragma unroll 1
  for (int n = threadIdx.x >> 5; n < (1 + TWO_WRITES) * BT; n += WARPS) {
    const int j = n % BT, kind = n / BT;  // kind 1 begins as b_j
    float4 z = times(inverse_length(0, j), four(kind ? b : k, j));
#pragma unroll 1
    for (int t = 0; t < BT; ++t) {
      float found = 0.f, score = 0.f;
      if (t > j) {
        const float4 gates = four(g, t), decay = decays_at(&gates.x), key = four(b, t);
        if (!TWO_WRITES) z = times(decay, z);
        add_product(found, four(a, t), z);
        found = inverse_length(0, t) * warp_sum(found);
        if (TWO_WRITES) z = times(decay, z);
        const float4 change = times((TWO_WRITES ? 1.f : -beta(t) * inverse_length(0, t)) * found, key);
        z = {z.x + change.x, z.y + change.y, z.z + change.z, z.w + change.w};
      }
      if (t >= j) {
        add_product(score, four(q, t), z);
        score = inverse_length(1, t) * warp_sum(score);
      }
      if (lane) continue;
      if (kind == TWO_WRITES) H[t][j] = w_scale * beta(j) * score;
      if constexpr (GRADIENT) {
        put_split(to.B[kind].at(t, j), score);
        put_split(to.residual_matrix[TWO_WRITES && !kind].at(t, j),
                  float(kind == TWO_WRITES && t == j) + (TWO_WRITES ? found : -beta(j) * found));
      } else if (kind == 0) {
        put_split(to.B.at(t, j), beta(j) * score);
      }
    }
    if (c < BK) put_four(place<BK>(to.Z[kind], j, c), times(GRADIENT ? 1.f : beta(j), z));
  }
  if constexpr (GRADIENT)
    for (int kind = 0; kind <= TWO_WRITES; ++kind)
      clear_padding<2 * BK>(to.B[kind]), clear_padding<2 * BK>(to.residual_matrix[kind]);
  else clear_padding<2 * BK>(to.B);
  __syncthreads();  // E and H are written
#pragma unroll 1
  for (int j = 0; j < BT; ++j) {
    const float4 E = unpack_four(place<BK>(to.E, j, task.c));
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const float4 x = times(H[task.first + n][j], E);
      W[n] = {W[n].x + x.x, W[n].y + x.y, W[n].z + x.z, W[n].w + x.w};
    }
  }
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(task.at(to.W, n), W[n]);
}
