// what      RWKV-7's recurrence backward, from chunk to chunk of 32 tokens. Forwards: the state S [K, V] before every
//           chunk, and u, what every token's `a` reads. Backwards: the gradient C of the state after every chunk, the
//           gradients du of u, and dv.
// math      u_t = S_{t-1}^T a_t. kd, N, L, H, B, W, Zb, Zk, D the chunk's decay: dplr_chunk.cuh. Forwards: X = kd S,
//           u = N X + L v, S <- D S + Zb^T X + Zk^T v. Backwards: Y = Zb C, du = Y + scale H^T do,
//           dv = Zk C + scale B^T do, C <- D C + scale W^T do + kd^T Y
// shapes    q k a b g [B, H, T, K], v do dv [B, H, T, V]; initial dht dh0 [N, H, K, V] float32; u du [B, H, T, V padded
//           to a multiple of 64]; kept, S and C: channel_backward_storage.cuh
// grid      a block for every (direction, sequence, head, BV columns), directions slowest
// smem      DplrShared in dplr_chunk.cuh; backwards do in place of v, and W in that of scores which have been read
// barriers  seven a chunk: it has arrived | norms' powers of 2 | decayed tokens | scores | N, L and qd | H, B and X | W
//           and Z. Each: these are in shared memory. Backwards one of each warp: its columns of Y are
// numerics  S and C in float32 accumulators; X, Y, u, du and the kept states are rounded to T
// source    Peng et al., 2025 (2503.14456), eq. 17; the gradient takes the forward pass's matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/channel_backward_storage.cuh"
#include "delta/dplr_chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, a, b, do_;
  Rows<const G> g;
  Rows<const float> initial, dht;  // null: zero
  Rows<float> dh0;                 // or null
  Rows<T> dv, u, du;
  T* kept;
  Shape shape;
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of inputs, do and dv start on multiples of it, and are multiples long
};

// Computes qd in float32; for all warps but the first two.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void decay_queries(DplrMatrices<T, G, BK>& s) {
#pragma unroll 1
  for (int c = 2 * (int(threadIdx.x) - 64); c < BK; c += 2 * (THREADS - 64)) {
    float2 all = {1.f, 1.f};
#pragma unroll 4
    for (int i = 0; i < C; ++i) {
      all = times(all, decays_at<BK>(s.g, i, c));
      *reinterpret_cast<float2*>(&s.from_start[i][c]) = times(all, unpack_pair(place<BK>(s.rows[OF_Q], i, c)));
    }
  }
}

// Goes over the chunks of a sequence in one direction. S in the code is C if BACKWARDS. block: the number of the
// (sequence, head, BV columns).
template <bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void walk(DplrShared<T, G, BK, BV>& s, const Args<T, G>& args, u32 block) {
  constexpr int THREADS = 2 * BV;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = block / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count;
  const Span span = tokens_of(shape, n % count);
  const int v_tile = block % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(shape.V - v_tile, i64(BV)));
  const int column = threadIdx.x / 32 * 16, kept_columns = padded(shape.V) - v_tile, chunks = (tokens + C - 1) / C;
  const i64 first_chunk = chunks_of(shape, n % count).start;
  const float scale = float(args.scale);

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, 0, shape.V, v_tile, channels, columns, f); };
  {
    const Rows<const float>& given = BACKWARDS ? args.dht : args.initial;
    const float* from = given.p ? given.row(n, h, 0) : nullptr;
    each([&](float& x, i64 at, bool inside) { x = from && inside ? from[at] : 0.f; });
  }
  T* W = reinterpret_cast<T*>(s.scores);
  static_assert(sizeof(s.scores) >= C * BK * sizeof(T));
  const Rows<const T>& values = BACKWARDS ? args.do_ : args.v;

  const auto fetch = [&](int token, int stage) {
    token = opaque(token);  // `opaque`: addresses are computed again for each chunk, which saves registers
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.rows[OF_Q], args.q.row(b, h, at), args.q.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.rows[OF_A], args.a.row(b, h, at), args.a.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.columns[WITH_K], args.k.row(b, h, at), args.k.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.columns[WITH_B], args.b.row(b, h, at), args.b.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.g, args.g.row(b, h, at), args.g.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], values.row(b, h, at) + v_tile, values.t, rows, columns, bytes);
    cp_async_commit();
  };
  const auto chunk_of = [&](int step) { return BACKWARDS ? chunks - 1 - step : step; };
  if (chunks) fetch(C * chunk_of(0), 0);
#pragma unroll 1
  for (int step = 0, stage = 0; step < chunks; ++step, stage ^= 1) {
    const T* v = s.v[stage];
    const int token = C * chunk_of(step);
    cp_async_wait<0>();
    __syncthreads();  // the chunk has arrived; the previous chunk's matrices have been read
    for (int at = threadIdx.x; at < 3 * C * LDS; at += THREADS) (&s.scores[0][0][0])[at] = 0.f;
    look_at<THREADS>(s);
    decay_blocks<THREADS>(s.over_blocks, s.g);
    if (column < kept_columns) {
#pragma unroll
      for (int c = 0; c < BK / 8; ++c) {
        T* to = args.kept + kept_at(shape, BACKWARDS, b, h, first_chunk + chunk_of(step), c / 8 * KEPT);
        if (c / 8 * KEPT < channels)
#pragma unroll
          for (int right = 0; right < 2; ++right)
            *reinterpret_cast<u32*>(to + (((v_tile + column) / 8 + right) * 8 + c % 8) * 64 + 2 * (threadIdx.x & 31)) =
                pack<T>(S[c][2 * right], S[c][2 * right + 1]);
      }
    }
    __syncthreads();  // powers of 2 are in shared memory
    score_blocks<THREADS>(s);
#pragma unroll 1
    for (int task = threadIdx.x >> 5; task < BK / 16; task += THREADS / 32) {
      float2 queries[BLOCK];
      decay_block(s, task % BLOCKS, task / BLOCKS * 64 + 2 * own_lane(), queries);
    }
    __syncthreads();  // decayed rows and columns are in shared memory
    score_borders<THREADS>(s);
    Columns found = {};
    if constexpr (!BACKWARDS) read_state<BK>(found, S, s.kd);
    __syncthreads();  // scores are in shared memory; their operands have been read, and qd may overwrite them
    if (threadIdx.x < 64) solve_column(s, threadIdx.x / 32);
    else if constexpr (BACKWARDS) decay_queries<THREADS>(s);
    __syncthreads();  // N, L and qd are in shared memory; inputs but v have been read: the next chunk is copied
    if (step + 1 < chunks) fetch(C * chunk_of(step + 1), stage ^ 1);
    multiply_scores<THREADS, BACKWARDS>(s);
    if constexpr (!BACKWARDS)
      each_pair([&](int i, int c, int m, int across, int down) {
        const float* read = found[m][across] + 2 * down;
        put_pair(place<BV>(s.X, i, c), {read[0], read[1]});
      });
    __syncthreads();  // H, B, of_Z and X are in shared memory
    make_wide<THREADS, BACKWARDS>(s, W, scale);
    __syncthreads();  // W and Z are in shared memory

    Columns more = {};
    if constexpr (BACKWARDS) {
      const auto store = [&](const Columns& d, const Rows<T>& to, int width, int pieces) {
        each_pair([&](int i, int c, int m, int across, int down) {
          const float *read = d[m][across] + 2 * down, *worth = more[m][across] + 2 * down;
          if (token + i < tokens && c < width)
            store_pair(to.row(b, h, span.start + token + i) + v_tile, c, width, pieces, fmaf(scale, worth[0], read[0]),
                       fmaf(scale, worth[1], read[1]));
        });
      };
      read_state<BK>(found, S, s.Z[WITH_K]);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) multiply_tokens<UPPER, BV, true>(more[m], s.B, v, 16 * m, column);
      store(found, args.dv, columns, bytes);
#pragma unroll
      for (int m = 0; m < C / 16; ++m)
#pragma unroll
        for (int x = 0; x < 8; ++x) found[m][x / 4][x % 4] = more[m][x / 4][x % 4] = 0.f;
      read_state<BK>(found, S, s.Z[WITH_B]);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) multiply_tokens<UPPER, BV, true>(more[m], s.H, v, 16 * m, column);
      store(found, args.du, kept_columns, 4);
      each_pair([&](int i, int c, int m, int across, int down) {
        const float* y = found[m][across] + 2 * down;
        put_pair(place<BV>(s.X, i, c), {y[0], y[1]});
      });
      __syncwarp();  // the warp's columns of Y are stored in s.X
      write_state<BK, BV>(S, W, v, s.whole, column);
      write_state<BK, BV>(S, s.kd, s.X, nullptr, column);
    } else {
      write_state<BK, BV>(S, s.Z[WITH_B], s.X, s.whole, column);
      write_state<BK, BV>(S, s.Z[WITH_K], v, nullptr, column);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) {
        multiply_tokens<LOWER, BV>(more[m], s.H, s.X, 16 * m, column);
        multiply_tokens<LOWER, BV>(more[m], s.B, v, 16 * m, column);
      }
      each_pair([&](int i, int c, int m, int across, int down) {
        const float* u = more[m][across] + 2 * down;
        if (token + i < tokens && c < kept_columns)
          store_pair(args.u.row(b, h, span.start + token + i) + v_tile, c, kept_columns, 4, u[0], u[1]);
      });
    }
  }
  if (BACKWARDS && args.dh0.p) {
    float* to = args.dh0.row(n, h, 0);
    each([&](float& x, i64 at, bool inside) {
      if (inside) to[at] = x;
    });
  }
}

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, 1) delta_dplr_backward_states(const Args<T, G> args) {
  auto& s = *reinterpret_cast<DplrShared<T, G, BK, BV>*>(dynamic_smem());
  const u32 half = gridDim.x / 2;
  if (blockIdx.x >= half) walk<true>(s, args, blockIdx.x - half);
  else walk<false>(s, args, blockIdx.x);
}
