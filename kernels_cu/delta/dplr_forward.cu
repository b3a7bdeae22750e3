// what      RWKV-7's recurrence in chunks of 32 tokens: a delta rule that erases with vectors a and b of its own.
// math      S_t = (diag(e^g_t) + b_t a_t^T) S_{t-1} + k_t v_t^T, o_t = scale q_t^T S_t. For a chunk, S is the state
//           before it. kd_i: a_i decayed from the chunk's start to token i - 1; qd_i: q_i decayed from the start to i;
//           ke, be: k and b decayed to the chunk's end. Axy_ij = x_i . y_j with the decay between both, for x = q or a,
//           y = k or b; q_i takes its own gate, j <= i; a_i does not, j < i.
//           N = (I - Aab)^-1, L = N Aak, H = Aqb N, B = Aqk + Aqb L;   W = qd + H kd, Zb = N^T be, Zk = ke + L^T be
//           X = kd S;   o = scale (W S + B v),   S <- diag(the chunk's decay) S + Zb^T X + Zk^T v
// shapes    q k a b g [B, H, T, K], v o [B, H, T, V], initial and final state [N, H, K, V] float32
// grid      a block for every (sequence, head, BV columns), sequence slowest; a warp for every 16 columns
// smem      DplrShared: a chunk of inputs and the next chunk's v; the chunk's matrices. In the code q and a are "rows",
//           k and b "columns", after their place in Axy
// barriers  seven a chunk: it has arrived | norms' powers of 2 | decayed tokens | scores | N, L and qd | H, B and X | W
//           and Z. Each: these are in shared memory
// numerics  S, scores, N and L in float32; operands kd, W, Z, X and S in T, H and B as the sum of two T; other decayed
//           operands, N and L in float16, divided by powers of 2; decays: channel_chunk.cuh
// source    Peng et al., 2025 (2503.14456), eq. 17; Yang et al., 2024 (2406.06484), section 3
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "delta/dplr_chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, a, b;
  Rows<const G> g;
  Rows<T> o;
  const float* initial;  // or null
  float* final;          // or null
  Shape shape;
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows start on multiples of it, and are multiples long
};

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, 1) delta_dplr_forward(const Args<T, G> args) {
  constexpr int THREADS = 2 * BV;
  auto& s = *reinterpret_cast<DplrShared<T, G, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = blockIdx.x / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count;
  const Span span = tokens_of(shape, n % count);
  const int v_tile = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(shape.V - v_tile, i64(BV))), column = threadIdx.x / 32 * 16;

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, i64(pair) * shape.K, shape.V, v_tile, channels, columns, f); };
  each([&](float& x, i64 at, bool inside) { x = args.initial && inside ? args.initial[at] : 0.f; });
  for (int at = threadIdx.x; at < 3 * C * LDS; at += THREADS) (&s.scores[0][0][0])[at] = 0.f;

  const auto fetch = [&](int token, int stage) {
    token = opaque(token);  // `opaque`: addresses are computed again for each chunk, which saves registers
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.rows[OF_Q], args.q.row(b, h, at), args.q.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.rows[OF_A], args.a.row(b, h, at), args.a.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.columns[WITH_K], args.k.row(b, h, at), args.k.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.columns[WITH_B], args.b.row(b, h, at), args.b.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.g, args.g.row(b, h, at), args.g.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], args.v.row(b, h, at) + v_tile, args.v.t, rows, columns, bytes);
    cp_async_commit();
  };
  if (tokens) fetch(0, 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += C, stage ^= 1) {
    const T* v = s.v[stage];
    cp_async_wait<0>();
    __syncthreads();  // the chunk has arrived; the previous chunk's matrices have been read
    look_at<THREADS>(s);
    __syncthreads();  // powers of 2 are in shared memory
    decay_tokens<THREADS>(s);
    __syncthreads();  // decayed rows and columns are in shared memory
    score_borders<THREADS>(s);
    Columns found = {};
    read_state<BK>(found, S, s.kd);
    __syncthreads();  // scores are in shared memory; their operands have been read, and qd may overwrite them
    if (threadIdx.x < 64) solve_column(s, threadIdx.x / 32);
    else decay_queries<THREADS>(s);
    __syncthreads();  // N, L and qd are in shared memory; inputs but v have been read: the next chunk is copied
    if (token + C < tokens) fetch(token + C, stage ^ 1);
    multiply_scores<THREADS>(s);
    each_pair([&](int i, int c, int m, int across, int down) {
      const float* read = found[m][across] + 2 * down;
      put_pair(place<BV>(s.X, i, c), {read[0], read[1]});
    });
    __syncthreads();  // H, B, of_Z and X are in shared memory
    make_wide<THREADS>(s, s.kd, 1.f);
    __syncthreads();  // W and Z are in shared memory

    Columns o = {};
    read_state<BK>(o, S, s.kd);
    write_state<BK, BV>(S, s.Z[WITH_B], s.X, s.whole, column);
    write_state<BK, BV>(S, s.Z[WITH_K], v, nullptr, column);
#pragma unroll
    for (int m = 0; m < C / 16; ++m) multiply_tokens<LOWER, BV>(o[m], s.B, v, 16 * m, column);
    const float scale = float(args.scale);
    each_pair([&](int i, int c, int m, int across, int down) {
      const float* two = o[m][across] + 2 * down;
      if (token + i < tokens)
        store_pair(args.o.row(b, h, span.start + token + i) + v_tile, c, columns, bytes, scale * two[0],
                   scale * two[1]);
    });
  }
  if (args.final)
    each([&](float& x, i64 at, bool inside) {
      if (inside) args.final[at] = x;
    });
}
