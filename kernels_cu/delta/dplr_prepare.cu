// what      RWKV-7's recurrence: what each chunk of 32 tokens does to a state, for the kernels that walk over states.
// math      kd, qd, be, ke, N, L, H and B: dplr_chunk.cuh.   E = kd, W = w_scale (qd + H kd), Zb = N^T be,
//           Z = ke + L^T be
// shapes    q k a b g [B, H, T, K], prepared [B, H, NC]
// grid      a block for every (batch, head, chunk), chunks fastest
// smem      DplrMatrices. In the code q and a are "rows", k and b "columns", after their place in Axy
// barriers  seven: inputs have arrived | powers of 2, decays over blocks | decayed tokens | scores | N, L and
//           qd | H and B | W and Z. Each: these are in shared memory
// numerics  scores, N and L in float32; operands kd, W, Z, Zb in T, H and B as the sum of two T; other decayed
//           operands, N and L in float16, divided by powers of 2; decays: channel_chunk.cuh
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2406.06484), section 3
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/dplr_chunk.cuh"
#include "delta/prepared.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, a, b;
  Rows<const G> g;
  void* prepared;  // Prepared, or PreparedForGradients, of each chunk
  Shape shape;
  double w_scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows start on multiples of it, and are multiples long
};

template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<DplrMatrices<T, G, BK>>(256 / BK))
    delta_dplr_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<DplrMatrices<T, G, BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 chunks = u32(shape.NC), chunk = blockIdx.x % chunks, pair = blockIdx.x / chunks;
  const u32 b = pair / u32(shape.H), h = pair % u32(shape.H);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start), channels = int(shape.K), bytes = int(args.bytes);

  const auto copy = [&](auto* tile, const auto& from) {
    copy_chunk<BK, THREADS>(tile, from.row(b, h, span.start), from.t, rows, channels, bytes);
  };
  copy(s.rows[OF_Q], args.q), copy(s.rows[OF_A], args.a);
  copy(s.columns[WITH_K], args.k), copy(s.columns[WITH_B], args.b);
  copy(s.g, args.g);
  cp_async_commit();
  for (int at = threadIdx.x; at < 3 * C * LDS; at += THREADS) (&s.scores[0][0][0])[at] = 0.f;
  cp_async_wait<0>();
  __syncthreads();  // inputs have arrived
  look_at<THREADS>(s);
  decay_blocks<THREADS>(s.over_blocks, s.g);
  __syncthreads();  // powers of 2 and decays over blocks of 8 tokens are in shared memory
  score_blocks<THREADS>(s);
  const BlockTask task;
  float2 queries[BLOCK];  // qd of the thread's block of tokens and two channels
  decay_block(s, task.block, task.c, queries);
  __syncthreads();  // decayed rows and columns are in shared memory
  score_borders<THREADS>(s);
  __syncthreads();  // scores are in shared memory; their operands have been read, and qd may overwrite them
#pragma unroll
  for (int i = 0; i < BLOCK; ++i)
    *reinterpret_cast<float2*>(&s.from_start[task.block * BLOCK + i][task.c]) = queries[i];
  if (threadIdx.x < 64) solve_column(s, threadIdx.x / 32);
  __syncthreads();  // N, L and qd are in shared memory
  multiply_scores<THREADS>(s);
  __syncthreads();  // H, B and of_Z are in shared memory
  T(&W)[C * BK] = s.rows[OF_Q];
  make_wide<THREADS>(s, W, float(args.w_scale));
  __syncthreads();  // W and Z are in shared memory
  const i64 at = i64(pair) * chunks + chunk;
  const auto store = [&](auto& to) {
    store_pieces<THREADS>(to.E, s.kd);
    store_pieces<THREADS>(to.W, W);
    store_pieces<THREADS>(to.Z[0], s.Z[WITH_K]);
    store_pieces<THREADS>(to.Z[1], s.Z[WITH_B]);
    store_pieces<THREADS>(to.whole, s.whole);
  };
  if constexpr (GRADIENT) {
    auto& to = static_cast<PreparedForGradients<T, BK, 2>*>(args.prepared)[at];
    store(to);
    store_pieces<THREADS>(to.B[0].x, s.B.x);
    store_pieces<THREADS>(to.B[1].x, s.H.x);
    const auto& L = s.scores[2];
    for (int x = 2 * threadIdx.x; x < C * C; x += 2 * THREADS) {
      const int i = x / C, j = x % C;
      put_two(to.of_residual[0].at(i, j), s.N[i][j], s.N[i][j + 1]);
      put_two(to.of_residual[1].at(i, j), L[i][j], L[i][j + 1]);
    }
    clear_padding<THREADS>(to.of_residual[0]), clear_padding<THREADS>(to.of_residual[1]);
    if (threadIdx.x < C) to.beta[threadIdx.x] = 1.f;
  } else {
    auto& to = static_cast<Prepared<T, BK, true>*>(args.prepared)[at];
    store(to);
    store_pieces<THREADS>(to.B.x, s.B.x);
  }
}
