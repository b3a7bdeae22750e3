// what      The delta rule with one gate for all channels of a token, in chunks of 32 tokens.
// math      S' = e^g_t S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t. For a chunk, S is
//           the state before it, D the chunk's decay, D_i the decay from its start to token i; N, B, W, Z: chunk.cuh.
//           X = v - D_i k S;   o = scale (W S + B v),   S <- D S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g beta [B, HV, T], initial and final state [N, HV, K, V] float32
// grid      a block for every (sequence, head of values, BV columns), sequence slowest; a warp for every 16 columns
// smem      DeltaShared: inputs of two chunks; the matrices of one
// barriers  six a chunk: it has arrived | decays and lengths | M and A | N | B, of_W and of_Z | W, Z and X. Each: these
//           are in shared memory
// numerics  S in float32 accumulators, N in float32; operands W, Z, X and S in T; matrices [32, 32] that multiply
//           tokens are the sum of two numbers of T
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "cards.cuh"
#include "delta/chunk.cuh"

template <typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, blocks_with_room<DeltaShared<T, BK, BV>>(BK + BV == 256 ? 1 : 2))
    delta_forward(const ForwardArgs<T, G> args) {
  constexpr int THREADS = 2 * BV;
  auto& s = *reinterpret_cast<DeltaShared<T, BK, BV>*>(dynamic_smem());
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

  TokenNumbers next;
  const auto fetch = [&](int token, int stage) {
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.k[stage], args.k.row(b, head, at), args.k.t, rows, channels, bytes);
    copy_chunk<BK, THREADS>(s.q[stage], args.q.row(b, head, at), args.q.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], args.v.row(b, h, at) + v_tile, args.v.t, rows, columns, bytes);
    cp_async_commit();
    next.ask(args.g, args.beta, b, h, at, rows);
  };
  if (tokens) fetch(0, 0);
#pragma unroll 1
  for (int token = 0, stage = 0; token < tokens; token += C, stage ^= 1) {
    const T *q = s.q[stage], *k = s.k[stage], *v = s.v[stage];
    cp_async_wait<0>();
    next.put(of);
    __syncthreads();  // the chunk has arrived; the previous chunk and its matrices have been read
    if (token + C < tokens) fetch(token + C, stage ^ 1);
    score_pairs<true, BK, THREADS>(of, q, k, args.normalized);
    for (int c = threadIdx.x; c < BK; c += THREADS) s.whole[c] = of.start[C - 1];
    __syncthreads();  // M and A are in shared memory
    if (threadIdx.x < 32) solve_column(of);
    Columns found = {};
    read_state<BK>(found, S, k);
    __syncthreads();  // N is in shared memory
    multiply_scores<true, THREADS>(of, [&](int i, int j, float x, float y) {
      x *= of.beta[j], y *= of.beta[j + 1];
      put_two(s.B.at(i, j), x, y);
      put_two(s.of_W.at(i, j), of.unit[j] * of.start[j] * x, of.unit[j + 1] * of.start[j + 1] * y);
      const float to_end = of.unit[j] * of.end[j], next_to_end = of.unit[j + 1] * of.end[j + 1];
      put_two(s.of_Z.at(i, j), of.beta[i] * of.N[j][i] * to_end, of.beta[i] * of.N[j + 1][i] * next_to_end);
    });
    __syncthreads();  // B, of_W and of_Z are in shared memory
    make_wide<true>(s, q, k, 1.f);
    each_pair([&](int i, int c, int m, int across, int down) {
      const float2 value = unpack_pair(place<BV>(v, i, c));
      const float *read = found[m][across] + 2 * down, from_start = of.unit[i] * of.start[i];
      put_pair(place<BV>(s.X, i, c), {value.x - from_start * read[0], value.y - from_start * read[1]});
    });
    __syncthreads();  // W, Z and X are in shared memory

    Columns o = {};
    read_state<BK>(o, S, s.W);
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
