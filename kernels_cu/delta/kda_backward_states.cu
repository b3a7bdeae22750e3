// what      Kimi Delta Attention backward, from chunk to chunk of 32 tokens. Forwards: the state S [K, V] before every
//           chunk, and e, what every token's value differs from what its key reads. Backwards: the gradient C of the
//           state after every chunk, the gradients w of beta e, and dv.
// math      e_t = v_t - S'^T k_t. kd, ke, qd, M, A, N, D the chunk's decay: channel_forward.cu. Forwards: X = v - kd S,
//           e = (I - M N diag(beta)) X, S <- D S + (diag(beta) N^T ke)^T X. Backwards: Y = N^T ke C,
//           w = Y + scale (A N)^T do, dv = beta w, W = qd - A N diag(beta) kd,
//           C <- D C + scale W^T do - (diag(beta) kd)^T Y
// shapes    q k [B, H, T, K], v do dv [B, HV, T, V], g [B, HV, T, K], beta [B, HV, T]; initial dht dh0 [N, HV, K, V]
//           float32; e w [B, HV, T, V padded to a multiple of 64]; kept, S and C: channel_backward_storage.cuh
// grid      a block for every (direction, sequence, head of values, BV columns), directions slowest
// smem      ChannelShared in channel_chunk.cuh; backwards do in place of v, and W in that of M and A, which are
//           read
// barriers  seven a chunk: it has arrived | lengths | decayed tokens | M and A | N and qd | B and X | W and Z. Each:
//           these are in shared memory. Backwards one of each warp: its columns of Y are
// numerics  S and C in float32 accumulators; X, Y, e, w and the kept states are rounded to T
// source    Kimi Team, 2025 (2510.26692), eq. 1; the gradient takes the forward pass's matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/channel_backward_storage.cuh"
#include "delta/channel_chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, do_;
  Rows<const G> g, beta;           // a token's beta is a row of one number
  Rows<const float> initial, dht;  // null: zero
  Rows<float> dh0;                 // or null
  Rows<T> dv, e, w;
  T* kept;
  Shape shape;  // H: heads of values
  i64 group;    // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k, v, g, do and dv start on multiples of it, and are multiples long
};

// Stores queries decayed from the chunk's start (qd) in float32; for all warps but the first.
template <int THREADS, typename T, typename G, int BK>
__device__ __forceinline__ void decay_queries(ChannelMatrices<T, BK>& s, const T* q, const G* g) {
#pragma unroll 1
  for (int c = 2 * (int(threadIdx.x) - 32); c < BK; c += 2 * (THREADS - 32)) {
    float2 all = {1.f, 1.f};
#pragma unroll 4
    for (int i = 0; i < C; ++i) {
      all = times(all, decays_at<BK>(g, i, c));
      *reinterpret_cast<float2*>(&s.from_start[i][c]) =
          times(all, times(s.of.unit[C + i], unpack_pair(place<BK>(q, i, c))));
    }
  }
}

// Goes over the chunks of a sequence in one direction. S in the code is C if BACKWARDS. block: the number of the
// (sequence, head of values, BV columns).
template <bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void walk(ChannelShared<T, G, BK, BV>& s, const Args<T, G>& args, u32 block) {
  constexpr int THREADS = 2 * BV;
  Scored& of = s.of;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = block / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count, head = h / u32(args.group);
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
  T* W = reinterpret_cast<T*>(of.M);
  static_assert(sizeof(of.M) + sizeof(of.A) >= C * BK * sizeof(T));
  const Rows<const T>& values = BACKWARDS ? args.do_ : args.v;

  TokenNumbers next;
  const auto fetch = [&](int token, int stage) {
    token = opaque(token);  // `opaque`: addresses are computed again for each chunk, which saves registers
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.k[stage], args.k.row(b, head, at), args.k.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.q[stage], args.q.row(b, head, at), args.q.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.g[stage], args.g.row(b, h, at), args.g.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], values.row(b, h, at) + v_tile, values.t, rows, columns, bytes);
    cp_async_commit();
    next.ask_strength(args.beta, b, h, at, rows);
  };
  const auto chunk_of = [&](int step) { return BACKWARDS ? chunks - 1 - step : step; };
  if (chunks) fetch(C * chunk_of(0), 0);
#pragma unroll 1
  for (int step = 0, stage = 0; step < chunks; ++step, stage ^= 1) {
    const T *q = s.q[stage], *k = s.k[stage], *v = s.v[stage];
    const G* g = s.g[stage];
    const int token = C * chunk_of(step);
    cp_async_wait<0>();
    next.put(of);
    __syncthreads();  // the chunk has arrived; the previous chunk and its matrices have been read
    if (step + 1 < chunks) fetch(C * chunk_of(step + 1), stage ^ 1);
    for (int at = threadIdx.x; at < C * LD; at += THREADS) (&of.M[0][0])[at] = (&of.A[0][0])[at] = 0.f;
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
    look_at<THREADS>(s, q, k, args.normalized);
    decay_blocks<THREADS>(s.over_blocks, g);
    __syncthreads();  // lengths and decays over blocks of 8 tokens are in shared memory
    score_blocks<THREADS>(s, q, k, g);
#pragma unroll 1
    for (int task = threadIdx.x >> 5; task < BK / 16; task += THREADS / 32) {
      float2 queries[BLOCK];
      decay_block<BACKWARDS>(s, q, k, g, task % BLOCKS, task / BLOCKS * 64 + 2 * own_lane(), queries);
    }
    __syncthreads();  // decayed queries and keys are in shared memory
    score_borders<THREADS>(s);
    Columns found = {};
    if constexpr (!BACKWARDS) read_state<BK>(found, S, s.kd);
    __syncthreads();  // M and A are in shared memory; their operands have been read, and qd may overwrite them
    if (threadIdx.x < 32) solve_column(of);
    else if constexpr (BACKWARDS) decay_queries<THREADS>(s, q, g);
    __syncthreads();  // N and qd are in shared memory
    {
      constexpr int EACH = C * C / THREADS;  // neighbouring columns
      const int i = threadIdx.x / (C / EACH), first = threadIdx.x % (C / EACH) * EACH;
      const auto& left = BACKWARDS ? of.A : of.M;
      float sums[EACH] = {};
#pragma unroll 8
      for (int m = 0; m < C; ++m)
#pragma unroll
        for (int j = 0; j < EACH; ++j) sums[j] = fmaf(left[i][m], of.N[m][first + j], sums[j]);
      const float by = BACKWARDS ? 1.f : of.beta[i];
#pragma unroll
      for (int x = 0; x < EACH; x += 2) {
        const int j = first + x;
        if constexpr (BACKWARDS) put_two(s.B.at(i, j), sums[x], sums[x + 1]);
        else
          put_two(s.B.at(i, j), float(i == j) - of.beta[j] * sums[x], float(i == j + 1) - of.beta[j + 1] * sums[x + 1]);
        put_two(s.of_Z.at(i, j), by * of.N[j][i], by * of.N[j + 1][i]);
      }
    }
    if constexpr (!BACKWARDS)
      each_pair([&](int i, int c, int m, int across, int down) {
        const float2 value = unpack_pair(place<BV>(v, i, c));
        const float* read = found[m][across] + 2 * down;
        put_pair(place<BV>(s.X, i, c), {value.x - read[0], value.y - read[1]});
      });
    float strengths[C / 16][2];  // beta of a lane's tokens; loaded here, before another warp stores the next chunk's
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int down = 0; down < 2; ++down) strengths[m][down] = of.beta[16 * m + 8 * down + (threadIdx.x >> 2 & 7)];
    __syncthreads();  // B, of_Z and X are in shared memory
    make_wide<THREADS, BACKWARDS>(s, W, scale);
    __syncthreads();  // W and Z are in shared memory

    Columns more = {};
    if constexpr (BACKWARDS) {
      read_state<BK>(found, S, s.Z);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) multiply_tokens<UPPER, BV, true>(more[m], s.B, v, 16 * m, column);
      each_pair([&](int i, int c, int m, int across, int down) {
        const float *y = found[m][across] + 2 * down, *worth = more[m][across] + 2 * down;
        const float one = fmaf(scale, worth[0], y[0]), two = fmaf(scale, worth[1], y[1]), beta = strengths[m][down];
        put_pair(place<BV>(s.X, i, c), {-y[0], -y[1]});
        if (token + i < tokens) {
          const i64 at = span.start + token + i;
          if (c < kept_columns) store_pair(args.w.row(b, h, at) + v_tile, c, kept_columns, 4, one, two);
          store_pair(args.dv.row(b, h, at) + v_tile, c, columns, bytes, beta * one, beta * two);
        }
      });
      __syncwarp();  // the warp's columns of -Y are stored in s.X
      write_state<BK, BV>(S, W, v, s.whole, column);
      write_state<BK, BV>(S, s.kd, s.X, nullptr, column);
    } else {
      write_state<BK, BV>(S, s.Z, s.X, s.whole, column);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) multiply_tokens<LOWER, BV>(more[m], s.B, s.X, 16 * m, column);
      each_pair([&](int i, int c, int m, int across, int down) {
        const float* e = more[m][across] + 2 * down;
        if (token + i < tokens && c < kept_columns)
          store_pair(args.e.row(b, h, span.start + token + i) + v_tile, c, kept_columns, 4, e[0], e[1]);
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
__global__ void __launch_bounds__(2 * BV, 1) delta_kda_backward_states(const Args<T, G> args) {
  auto& s = *reinterpret_cast<ChannelShared<T, G, BK, BV>*>(dynamic_smem());
  const u32 half = gridDim.x / 2;
  if (blockIdx.x >= half) walk<true>(s, args, blockIdx.x - half);
  else walk<false>(s, args, blockIdx.x);
}
