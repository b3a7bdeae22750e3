// what      The delta rule in chunks, under a gate for every channel (KDA).
// math      kd and ke are k decayed from the chunk's start and to its end, qd is q from its start; channel_chunk.cuh
//           has M and A. N = (I + diag(beta) M)^-1, B = A N diag(beta), W = qd - B kd, Z = diag(beta) N^T ke
//           X = v - kd S;   o = scale (W S + B v),   S <- diag(decay) S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g [B, HV, T, K], beta [B, HV, T], initial and final state
//           [N, HV, K, V] float32
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; a warp for every 16 columns
// smem      ChannelShared: two chunks of inputs, what is made of the present one
// barriers  seven a chunk: it has arrived | lengths | decayed tokens | M and A | N, and queries from the start | B, X |
//           W and Z
// numerics  as forward.cu, and channel_chunk.cuh
// source    Kimi Team, 2025 (2510.26692), eq. 1; Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "cards.cuh"
#include "delta/channel_chunk.cuh"

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, blocks_with_room<ChannelShared<T, G, BK, BV>>(BV == 64 ? 2 : 1))
    delta_channel_forward(const ForwardArgs<T, G> args) {
  constexpr int THREADS = 2 * BV;
  auto& s = *reinterpret_cast<ChannelShared<T, G, BK, BV>*>(dynamic_smem());
  Scored& of = s.of;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = blockIdx.x / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count, head = h / u32(args.group);
  const Span span = tokens_of(shape, n % count);
  const int v_tile = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(shape.V - v_tile, i64(BV))), column = threadIdx.x / 32 * 16;

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, i64(pair) * shape.K, shape.V, v_tile, channels, columns, f); };
  each([&](float& x, i64 at, bool inside) { x = args.initial && inside ? args.initial[at] : 0.f; });
  for (int at = threadIdx.x; at < C * LD; at += THREADS) of.M[at / LD][at % LD] = of.A[at / LD][at % LD] = 0.f;

  TokenNumbers next;
  const auto fetch = [&](int token, int stage) {
    token = opaque(token);  // so that no array's address is carried from chunk to chunk
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.k[stage], args.k.row(b, head, at), args.k.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.q[stage], args.q.row(b, head, at), args.q.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.g[stage], args.g.row(b, h, at), args.g.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], args.v.row(b, h, at) + v_tile, args.v.t, rows, columns, bytes);
    cp_async_commit();
    next.ask_strength(args.beta, b, h, at, rows);
  };
  if (tokens) fetch(0, 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += C, stage ^= 1) {
    const T *q = s.q[stage], *k = s.k[stage], *v = s.v[stage];
    const G* g = s.g[stage];
    cp_async_wait<0>();
    next.put(of);
    __syncthreads();  // the chunk has arrived, and nobody reads the last one or what was made of it
    if (token + C < tokens) fetch(token + C, stage ^ 1);
    look_at<THREADS>(s, q, k, args.normalized);
    __syncthreads();  // lengths stand
    decay_tokens<THREADS>(s, q, k, g);
    __syncthreads();  // decayed tokens stand
    score_borders<THREADS>(s);
    Columns found = {};
    read_state<BK>(found, S, s.kd);
    __syncthreads();  // M and A stand, and nobody reads what they are made of
    if (threadIdx.x < 32) solve_column(of);
    else decay_queries<THREADS>(s, q, g);
    __syncthreads();  // N stands, and queries from the chunk's start
    multiply_scores<true, THREADS>(of, [&](int i, int j, float x, float y) {
      put_two(s.B.at(i, j), of.beta[j] * x, of.beta[j + 1] * y);
      put_two(s.of_Z.at(i, j), of.beta[i] * of.N[j][i], of.beta[i] * of.N[j + 1][i]);
    });
    each_pair([&](int i, int c, int m, int across, int down) {
      const float2 value = unpack_pair(place<BV>(v, i, c));
      const float* read = found[m][across] + 2 * down;
      put_pair(place<BV>(s.X, i, c), {value.x - read[0], value.y - read[1]});
    });
    __syncthreads();  // B stands, and X
    make_wide<THREADS>(s);
    __syncthreads();  // W and Z stand

    Columns o = {};
    read_state<BK>(o, S, s.kd);
    write_state<BK, BV>(S, s.Z, s.X, s.whole, column);
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
