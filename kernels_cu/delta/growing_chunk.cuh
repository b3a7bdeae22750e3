// what      Prepares a chunk of 32 tokens of the delta rules with a gate for each channel (KDA and RWKV-7), token by
//           token: what the chunk does to a state. The kernels call it for chunks in which a token's decay, the exp of
//           its log gate, is above GROWTH in a channel. They prepare other chunks from tokens times products of decays,
//           for 16-bit data in float16, whose range these products would leave here. float32 data take the same way
// math      D_t is the decay of each channel at token t, P_t the product of those of the chunk's tokens through t.
//           z_j [K] is the direction in which token j has written, as later tokens change it. It begins as k_j. At each
//           token t > j:   KDA: z_j <- D_t z_j - beta_t k_t (k_t . D_t z_j)
//                          RWKV-7: z_j <- D_t z_j + b_t (a_t . z_j), and the same for a second z_j, which begins as b_j
//           score_tj = q_t . z_j after token t, read_tj = k_t . D_t z_j (KDA) or a_t . z_j (RWKV-7) before it.
//           The results are members of `to` (prepared.cuh): `decay`, P of the last token; E, Z and W; and matrices, B
//           and residual_matrix (`residual` here: R and L). Matrices have a row for each token t, a column for each j,
//           and zeros for j > t; I is the identity; (k), (b): of the z_j that begin as k_j, as b_j:
//                       KDA                  KDA, GRADIENT     RWKV-7          RWKV-7, GRADIENT
//             B         beta_j score         score             score (k)       [0]: score (k); [1]: score (b)
//             residual  -                    [0], R:           -               [0], R: I + read (b)
//                                            I - beta_j read                   [1], L: read (k)
//             Z, row j  beta_j z_j           z_j               [0]: z_j (k);   as without GRADIENT
//                                                              [1]: z_j (b)
//           Z is that of the chunk's end. The function's argument H is w_scale times beta_j score (KDA) or score (b)
//           (RWKV-7); what prepared.cuh calls H is B[1].
//           KDA: E_t = -P_t k_t;   RWKV-7: E_t = P_{t-1} a_t;   both: W_t = w_scale P_t q_t + sum_j H_tj E_j
// shapes    a warp has one z_j at a time, a lane 4 of its channels in each PANEL of 128. Of E and W a thread has 4
//           tokens and 4 channels: those of its BlockTask
// barriers  one: E and H are written
// numerics  float32. z_j, scores and reads in the recurrence's order. E and W by P_t, which must be finite in float32.
//           W is computed from E as stored, in T
// limits    blocks of 2 BK threads, all of which call it
#include "delta/channel_chunk.cuh"
#include "delta/prepared.cuh"

// From the includes:
//   BT = 32 tokens in BLOCKS = 8 blocks of BLOCK = 4
//   put_split: stores a number as the sum of two (a `single` as it is)
//   PreparedFor<...>::Type: the struct that is stored
//   decays_at(g): exp of four neighbouring log gates; LD = 36: the distance of H's rows

// The largest decay in chunks whose decayed tokens are held in float16. There a token is held as Lengths::factor times
// itself, with a length below 2; Lengths::power, a power of 2, undoes this later. It then grows by at most 1.28^32 =
// 2696 over a chunk of 32 tokens: to less than float16's largest number, 65504.
constexpr float GROWTH = 1.28f;

// The largest of these; a NaN is passed over.
__device__ __forceinline__ float largest_of(float largest, float4 decays) {
  return fmaxf(fmaxf(largest, fmaxf(decays.x, decays.y)), fmaxf(decays.z, decays.w));
}

// Prepares the chunk whose tokens are in the tiles q, k, a, b, g [BT, BK] (`place`), in shared memory, zeros past the
// sequence's end. TWO_WRITES: RWKV-7. KDA passes k as a and b. It alone has betas, and divides queries and keys by
// their lengths if the call asks for that: `lengths` of keys, then of queries. GRADIENT: `to` is for the walks in both
// directions; a walk is a kernel that carries a state, or its gradient, from chunk to chunk. Everything in `to` is
// stored but beta. w_scale multiplies W. H: 32 rows of LD floats in shared memory, which overlap with no other
// argument, for the matrix [32 tokens, 32 tokens] that multiplies E in W.
template <bool TWO_WRITES, bool GRADIENT, int BK, typename T, typename G>
__device__ __noinline__ void prepare_by_tokens(typename PreparedFor<T, BK, TWO_WRITES, GRADIENT>::Type& to, const T* q,
                                               const T* k, const T* a, const T* b, const G* g, const Lengths* lengths,
                                               const float* betas, float (*H)[LD], float w_scale) {
  constexpr int WARPS = 2 * BK / 32, PANEL = 128, PANELS = BK > PANEL ? BK / PANEL : 1;
  // 1 over the length of token t, or 1 if the call does not normalize. kind: 0 for keys, 1 for queries.
  const auto inverse_length = [&](int kind, int t) {
    return TWO_WRITES ? 1.f : lengths[kind].factor[t] * lengths[kind].power[t];
  };
  const auto beta = [&](int t) { return TWO_WRITES ? 1.f : betas[t]; };
  // E and the first summand of W, in this thread's 4 tokens and 4 channels.
  const BlockTask<BK> task;
  float4 from_start = {1.f, 1.f, 1.f, 1.f}, W[BLOCK];  // from_start: P_t
#pragma unroll 1
  for (int t = 0; t < task.first; ++t) from_start = times(from_start, decays_at(place<BK>(g, t, task.c)));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    const int t = task.first + n;
    const float4 before = from_start, row = unpack_four(task.at(a, n));
    from_start = times(from_start, decays_at(task.at(g, n)));
    store_four(task.at(to.E, n),
               TWO_WRITES ? times(before, row) : times(-inverse_length(0, t), times(from_start, row)));
    W[n] = times(w_scale * inverse_length(1, t), times(from_start, unpack_four(task.at(q, n))));
  }
  if (task.block == BLOCKS - 1) *reinterpret_cast<float4*>(to.decay + task.c) = from_start;

  // From here on a warp has a token j, a lane channels c ... c + 3 of each panel of its z_j; lanes with c >= BK have
  // zeros.
  const int lane = own_lane(), c = 4 * lane;
  const auto own_channels = [&](const auto* tile, int t, int panel) {
    return c < BK ? unpack_four(place<BK>(tile, t, PANEL * panel + c)) : float4{};
  };
#pragma unroll 1
  for (int n = threadIdx.x >> 5; n < (1 + TWO_WRITES) * BT; n += WARPS) {
    const int j = n % BT, start = n / BT;  // 0: z_j begins as k_j; 1: as b_j
    float4 z[PANELS];
#pragma unroll
    for (int p = 0; p < PANELS; ++p) z[p] = times(inverse_length(0, j), own_channels(start ? b : k, j, p));
#pragma unroll 1
    for (int t = 0; t < BT; ++t) {
      float read = 0.f, score = 0.f;
      if (t > j) {
        float4 decay[PANELS];
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
          const float4 gates = own_channels(g, t, p);
          decay[p] = decays_at(&gates.x);
          if (!TWO_WRITES) z[p] = times(decay[p], z[p]);
          add_product(read, own_channels(a, t, p), z[p]);
        }
        read = inverse_length(0, t) * warp_sum(read);  // read_tj
        const float factor = (TWO_WRITES ? 1.f : -beta(t) * inverse_length(0, t)) * read;
#pragma unroll
        for (int p = 0; p < PANELS; ++p) {
          if (TWO_WRITES) z[p] = times(decay[p], z[p]);
          const float4 change = times(factor, own_channels(b, t, p));
          z[p] = {z[p].x + change.x, z[p].y + change.y, z[p].z + change.z, z[p].w + change.w};
        }
      }
      if (t >= j) {
#pragma unroll
        for (int p = 0; p < PANELS; ++p) add_product(score, own_channels(q, t, p), z[p]);
        score = inverse_length(1, t) * warp_sum(score);  // score_tj
      }
      if (lane) continue;  // lane 0 stores
      // H, and R in residual_matrix[0], are of the last `start`: KDA's only one, 0, and RWKV-7's z_j from b_j, 1. L, in
      // residual_matrix[1], is of RWKV-7's z_j from k_j.
      if (start == TWO_WRITES) H[t][j] = w_scale * beta(j) * score;
      if constexpr (GRADIENT) {
        put_split(to.B[start], t, j, score);
        put_split(to.residual_matrix[TWO_WRITES && !start], t, j,
                  float(start == TWO_WRITES && t == j) + (TWO_WRITES ? read : -beta(j) * read));
      } else if (start == 0) {
        put_split(to.B, t, j, beta(j) * score);
      }
    }
    if (c < BK)
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        store_four(place<BK>(to.Z[start], j, PANEL * p + c), times(GRADIENT ? 1.f : beta(j), z[p]));
  }
  __syncthreads();  // E and H are written
  // The second summand of W.
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
  for (int n = 0; n < BLOCK; ++n) store_four(task.at(to.W, n), W[n]);
}
