// what      Stage 4: the scores of a chunk: the weight of each token in the output of each later one.
// math      A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik), j <= i   (RWKV-6: to g_{i-1,k}; A_ii = sum_k q_ik u_k
//           k_ik)
// shapes    q k g [B, H, T, K], u [H, K], A [B, H, T, C] float32, zero above the diagonal
// grid      a block for every (batch, head, chunk, ROWS rows of it), batch slowest; a warp has 16 rows
// smem      Shared
// barriers  for every 16 keys: keys have arrived, and the last ones are read | they and their decays are float32 in
//           shared memory | the diagonal's scores are | queries and keys are multiplied by decays
// numerics  on the diagonal decays are multiplied token by token; below it a pair's decay is a factor of the query,
//           from the end of the key's sub-chunk, times a factor of the key, to that end, so that no exponent is
//           positive for g <= 0; products as in copies.cuh
// source    Yang et al., 2024, section 4.3 (secondary chunking)
// limits    K <= BK; BK of 64, 128, 256; C a multiple of 16
#include "read_order.cuh"
#include "ptx.cuh"
#include "stages/copies.cuh"
#include "tensor.cuh"

constexpr int WARPS = THREADS / 32, SUB = 16;  // tokens of a sub-chunk

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g;
  const float* u;  // [H, K], null for GLA
  Rows<float> A;
  Shape shape;
  i64 bytes;  // rows of q, k and g are whole pieces of so many
};

// A block's sub-chunks of rows, and its rows.
template <int BK> constexpr int SUBS = BK > 128 ? 1 : WARPS;
template <int BK> constexpr int ROWS = SUBS<BK> * SUB;
// The distance of rows of BK channels in floats: tensor cores' loads of pairs then touch every bank once.
template <int BK> constexpr int ROW = BK + 8;

template <typename T, typename G, int BK> struct alignas(16) Shared {
  float q[ROWS<BK> * ROW<BK>];  // the rows' queries, each decayed from the start of its sub-chunk
  float k[SUB * ROW<BK>];       // the keys of one sub-chunk
  float a[SUB * ROW<BK>];       // that sub-chunk's decays
  float carry[SUBS<BK>][BK];    // the decay from the end of that sub-chunk to the start of each 16 rows
  float total[BK];              // the decay over that sub-chunk
  float u[BK];
  float diagonal[SUB * SUB];  // scores of 16 rows with their own keys
  T given_k[SUB * BK];        // the next sub-chunk as it comes
  G given_g[SUB * BK];
  T given_q[sizeof(T) == 2 ? SUB * BK : 1];  // float32 queries come to their place at once
};

// Two neighbours as floats.
template <typename T> __device__ __forceinline__ float2 pair_of(const T* x) {
  if constexpr (sizeof(T) == 2) return unpack(*reinterpret_cast<const u32*>(x), T{});
  else return *reinterpret_cast<const float2*>(x);
}

// scores[i, j] of the 16 x 16 pairs of a sub-chunk, zero above the diagonal. Decays `a` are multiplied one after the
// other, as the recurrence does: exact for any gate. Eight neighbouring lanes have a key, each an eighth of its
// channels.
template <class ReadOrder, int BK>
__device__ void diagonal_scores(float* scores, const float* q, const float* k, const float* a, const float* u) {
  constexpr int LANES = THREADS / SUB;
  const int slice = threadIdx.x % LANES, j = threadIdx.x / LANES, warps_first = (threadIdx.x & ~31) / LANES;
  float score[SUB] = {};
#pragma unroll 1
  for (int c = 4 * slice; c < BK; c += 4 * LANES) {
    float w[4], bonus[4];
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      w[x] = k[j * ROW<BK> + c + x];
      bonus[x] = ReadOrder::reads_before_write ? u[c + x] : 1.f;
    }
#pragma unroll
    for (int i = 0; i < SUB; ++i) {
      if (i < warps_first) continue;  // the same for the whole warp
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float query = q[i * ROW<BK> + c + x], decay = a[i * ROW<BK> + c + x];
        if (!ReadOrder::reads_before_write && i > j) w[x] *= decay;
        const float weight = i == j ? bonus[x] * w[x] : w[x];
        if (i >= j) score[i] = fmaf(query, weight, score[i]);
        if (ReadOrder::reads_before_write && i > j) w[x] *= decay;
      }
    }
  }
#pragma unroll
  for (int i = 0; i < SUB; ++i) {
    for (int distance = LANES / 2; distance > 0; distance /= 2)
      score[i] += __shfl_xor_sync(0xffffffffu, score[i], distance);
    if (i % LANES == slice) scores[i * SUB + j] = score[i];
  }
}

// Multiplies query i of a sub-chunk by the decay from the sub-chunk's start to the state that token i reads. A thread
// has a channel.
template <class ReadOrder, int BK> __device__ __forceinline__ void decay_queries(float* q, const float* a) {
  for (int c = threadIdx.x; c < BK; c += THREADS) {
    float decay = 1.f;
#pragma unroll
    for (int i = 0; i < SUB; ++i) {
      if (!ReadOrder::reads_before_write) decay *= a[i * ROW<BK> + c];
      q[i * ROW<BK> + c] *= decay;
      if (ReadOrder::reads_before_write) decay *= a[i * ROW<BK> + c];
    }
  }
}

// Multiplies key j of a sub-chunk by the decay from token j to the sub-chunk's end; `total` becomes the decay over the
// sub-chunk. A thread has a channel.
template <int BK> __device__ __forceinline__ void decay_keys(float* k, const float* a, float* total) {
  for (int c = threadIdx.x; c < BK; c += THREADS) {
    float decay = 1.f;
#pragma unroll
    for (int j = SUB - 1; j >= 0; --j) {
      k[j * ROW<BK> + c] *= decay;
      decay *= a[j * ROW<BK> + c];
    }
    total[c] = decay;
  }
}

// d = the scores of 16 rows, whose queries are decayed from their start, with the decayed keys of an earlier sub-chunk,
// from whose end to the rows' start `carry` decays: of a warp, in columns 8 and 8.
template <typename T, int BK>
__device__ __forceinline__ void score_pairs(float (&d)[2][4], const float* q, const float* k, const float* carry) {
  const int t = threadIdx.x & 3;
#pragma unroll 2
  for (int c = 0; c < BK; c += 16) {
    LeftOf<T> a;
    RightOf<T> b[2];
    each_matrix<true, false>(q + c, ROW<BK>, [&](int m, float2 x) {
      const float2 decay = pair_of(carry + c + 8 * (m >> 1) + 2 * t);
      a.set(m, float2{x.x * decay.x, x.y * decay.y});
    });
    load_rounded<true>(b, k + c, ROW<BK>);
    multiply(d, a, b);
  }
}

template <class ReadOrder, typename T, typename G, int BK>
__global__ void __launch_bounds__(THREADS, BK > 128 ? 2 : 3) stages_intra_chunk(const Args<T, G> args) {
  Shared<T, G, BK>& s = *reinterpret_cast<Shared<T, G, BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 groups = (shape.chunk + ROWS<BK> - 1) / ROWS<BK>, group = blockIdx.x % groups;
  const i64 c = blockIdx.x / groups % shape.NC, h = blockIdx.x / groups / shape.NC % shape.H;
  const i64 batch = blockIdx.x / groups / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  const i64 first = span.start + group * ROWS<BK>, before = group * SUBS<BK>;  // sub-chunks before the rows
  if (first >= span.stop) return;                                              // the whole block: a short tail
  const i64 rows = span.stop - first < ROWS<BK> ? span.stop - first : ROWS<BK>;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;

  // Starts to copy sub-chunk `sub`. Of queries, only the rows' own.
  const auto fetch = [&](i64 sub) {
    if (sub < 0) return;
    const i64 token = span.start + sub * SUB;
    copy_tile<SUB, BK, BK>(s.given_k, args.k, batch, h, token, span.stop, 0, shape.K, args.bytes);
    copy_tile<SUB, BK, BK>(s.given_g, args.g, batch, h, token, span.stop, 0, shape.K, args.bytes);
    if (sub < before) return;
    if constexpr (sizeof(T) == 2)
      copy_tile<SUB, BK, BK>(s.given_q, args.q, batch, h, token, span.stop, 0, shape.K, args.bytes);
    else
      copy_tile<SUB, BK, ROW<BK>>(s.q + (sub - before) * SUB * ROW<BK>, args.q, batch, h, token, span.stop, 0, shape.K,
                                  args.bytes);
  };

  const i64 last = before + (rows - 1) / SUB;
  fetch(last);
  for (int x = threadIdx.x; x < BK; x += THREADS) {
    for (int sub = 0; sub < SUBS<BK>; ++sub) s.carry[sub][x] = 1.f;
    s.u[x] = ReadOrder::reads_before_write && x < shape.K ? args.u[h * shape.K + x] : 0.f;
  }
#pragma unroll 1
  for (i64 sub = last; sub >= 0; --sub) {
    const bool own = sub >= before;  // then it is a sub-chunk of rows, too
    float* const queries = s.q + (own ? sub - before : 0) * SUB * ROW<BK>;
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();  // the sub-chunk has arrived, and the last one's keys are read
    for (int at = 2 * threadIdx.x; at < SUB * BK; at += 2 * THREADS) {
      const int to = at / BK * ROW<BK> + at % BK;
      const float2 gate = pair_of(s.given_g + at);
      *reinterpret_cast<float2*>(s.k + to) = pair_of(s.given_k + at);
      *reinterpret_cast<float2*>(s.a + to) = {decay_of(gate.x), decay_of(gate.y)};
      if constexpr (sizeof(T) == 2)
        if (own) *reinterpret_cast<float2*>(queries + to) = pair_of(s.given_q + at);
    }
    __syncthreads();  // numbers and decays stand
    fetch(sub - 1);
    if (own) {
      diagonal_scores<ReadOrder, BK>(s.diagonal, queries, s.k, s.a, s.u);
      __syncthreads();  // the diagonal's scores stand
      decay_queries<ReadOrder, BK>(queries, s.a);
      const i64 top = span.start + sub * SUB;
      for (int at = threadIdx.x; at < SUB * SUB; at += THREADS)
        if (top + at / SUB < span.stop) args.A.row(batch, h, top + at / SUB)[sub * SUB + at % SUB] = s.diagonal[at];
      constexpr int LANES = THREADS / SUB;  // a row, of whose later columns each writes four
      if (const i64 row = top + threadIdx.x / LANES; row < span.stop)
        for (i64 column = (sub + 1) * SUB + threadIdx.x % LANES * 4; column < shape.chunk; column += 4 * LANES)
          *reinterpret_cast<float4*>(args.A.row(batch, h, row) + column) = {0.f, 0.f, 0.f, 0.f};
    }
    decay_keys<BK>(s.k, s.a, s.total);
    __syncthreads();  // queries and keys are decayed

    const i64 top = first + warp * SUB;  // the warp's rows
    if (warp >= SUBS<BK> || before + warp <= sub || top >= span.stop) continue;
    float d[2][4] = {};
    score_pairs<T, BK>(d, s.q + warp * SUB * ROW<BK>, s.k, s.carry[warp]);
    __syncwarp();  // the decays are read
    for (int x = lane; x < BK; x += 32) s.carry[warp][x] *= s.total[x];
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        const i64 row = top + lane / 4 + 8 * down;
        if (row < span.stop)
          *reinterpret_cast<float2*>(args.A.row(batch, h, row) + sub * SUB + 8 * half + 2 * (lane & 3)) = {
              d[half][2 * down], d[half][2 * down + 1]};
      }
  }
}
