// what      The delta rule with a gate for every channel (Kimi Delta Attention), in chunks of 32 tokens.
// math      S' = diag(e^g_t) S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t. For a chunk, S
//           is the state before it; kd, qd: k and q decayed from the chunk's start; ke: k decayed to its end; M and A:
//           channel_chunk.cuh. N = (I + diag(beta) M)^-1, B = A N diag(beta), W = qd - B kd, Z = diag(beta) N^T ke
//           X = v - kd S;   o = scale (W S + B v),   S <- diag(the chunk's decay) S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g [B, HV, T, K], beta [B, HV, T], initial and final state
//           [N, HV, K, V] float32
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; a warp for every 16 columns
// smem      ChannelShared: inputs of two chunks; the matrices of one
// barriers  seven a chunk: it has arrived | lengths | decayed tokens | M and A | N and qd | B and X | W and Z. Each:
//           these are in shared memory
// numerics  S, M, A and N in float32; operands W, Z, X and S in T, B as the sum of two T; decays: channel_chunk.cuh
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
    token = opaque(token);  // `opaque`: addresses are computed again for each chunk, which saves registers
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
    __syncthreads();  // the chunk has arrived; the previous chunk and its matrices have been read
    if (token + C < tokens) fetch(token + C, stage ^ 1);
    look_at<THREADS>(s, q, k, args.normalized);
    __syncthreads();  // lengths are in shared memory
    decay_tokens<THREADS>(s, q, k, g);
    __syncthreads();  // decayed queries and keys are in shared memory
    score_borders<THREADS>(s);
    Columns found = {};
    read_state<BK>(found, S, s.kd);
    __syncthreads();  // M and A are in shared memory; their operands have been read, and qd may overwrite them
    if (threadIdx.x < 32) solve_column(of);
    else decay_queries<THREADS>(s, q, g);
    __syncthreads();  // N and qd are in shared memory
    multiply_scores<true, THREADS>(of, [&](int i, int j, float x, float y) {
      put_two(s.B.at(i, j), of.beta[j] * x, of.beta[j + 1] * y);
      put_two(s.of_Z.at(i, j), of.beta[i] * of.N[j][i], of.beta[i] * of.N[j + 1][i]);
    });
    each_pair([&](int i, int c, int m, int across, int down) {
      const float2 value = unpack_pair(place<BV>(v, i, c));
      const float* read = found[m][across] + 2 * down;
      put_pair(place<BV>(s.X, i, c), {value.x - read[0], value.y - read[1]});
    });
    __syncthreads();  // B, of_Z and X are in shared memory
    make_wide<THREADS>(s, s.kd, 1.f);
    __syncthreads();  // W and Z are in shared memory

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
