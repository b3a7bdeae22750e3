// what      The delta rule backward, from chunk to chunk of 32 tokens. Forwards: the state S [K, V] before every chunk,
//           and X, the values less what S returns for their keys. Backwards: the gradient C of the state after every
//           chunk, the gradient w of each token's written value beta (v - S^T k), and dv = beta w.
// math      N, A, B, W, Z: chunk.cuh. Decays: D of the chunk, D_i from its start to token i, D_end from i to its end.
//           Forwards: X = v - D_i k S, S <- D S + Z^T X. Backwards: Y = N^T D_end k C, w = Y + scale (A N)^T do,
//           dv = beta w,   C <- D C + scale W^T do - (D_i k)^T beta Y
// shapes    q k [B, H, T, K], v do dv [B, HV, T, V], g beta [B, HV, T]; initial dht dh0 [N, HV, K, V] float32; X w [B,
//           HV, T, V padded to a multiple of 64]; kept, S and C: backward_storage.cuh
// grid      a block for every (direction, sequence, head of values, BV columns), directions slowest
// smem      DeltaShared in chunk_storage.cuh
// barriers  of the block, a chunk: it has arrived | decays and lengths | M and A | N | B, of_W, of_Z, X | W and Z are
//           in shared memory; backwards one of each warp: its columns of Y are
// numerics  S and C in float32 accumulators; X, w and the kept states are rounded to T
// source    Yang et al., 2024 (2412.06464), section 3.3; the gradient takes the same matrices, transposed
// limits    T of bfloat16, float16; K <= BK; BK and BV of 64, 128
#include "cards.cuh"
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, do_;
  Rows<const G> g, beta;           // rows of one number, for each token
  Rows<const float> initial, dht;  // null: zero
  Rows<float> dh0;                 // or null
  Rows<T> dv, X, w;
  T* kept;
  Shape shape;  // H: heads of values
  i64 group;    // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k, v, do and dv start on multiples of it, and are multiples long
};

// Goes over the chunks of a sequence in one direction. S in the code is C if BACKWARDS. block: the number of the
// (sequence, head, BV columns).
template <bool BACKWARDS, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void walk(DeltaShared<T, BK, BV>& s, const Args<T, G>& args, u32 block) {
  constexpr int THREADS = 2 * BV;
  Scored& of = s.of;
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, pair = block / tiles, H = u32(shape.H), count = u32(shape.count);
  const u32 n = pair / H, h = pair % H, b = n / count, head = h / u32(args.group);
  const Span span = tokens_of(shape, n % count);
  const int v_tile = block % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(shape.K), columns = int(min(shape.V - v_tile, i64(BV)));
  const int warp = threadIdx.x >> 5, column = 16 * warp, kept_columns = padded_columns(shape.V) - v_tile;
  const int chunks = (tokens + C - 1) / C;
  const float scale = float(args.scale);

  State<BK> S;
  const auto each = [&](auto f) { each_number<BK>(S, 0, shape.V, v_tile, channels, columns, f); };
  {
    const Rows<const float>& given = BACKWARDS ? args.dht : args.initial;
    const float* from = given.p ? given.row(n, h, 0) : nullptr;
    each([&](float& x, i64 at, bool inside) { x = from && inside ? from[at] : 0.f; });
  }
  T* kept = args.kept + kept_at<BK>(shape, BACKWARDS, b, h, chunks_of(shape, n % count).start);
  const Rows<const T>& values = BACKWARDS ? args.do_ : args.v;

  TokenNumbers next;
  const auto fetch = [&](int token, int stage) {
    const int rows = tokens - token;
    const i64 at = span.start + token;
    copy_chunk<BK, THREADS>(s.k[stage], args.k.row(b, head, at), args.k.t, rows, channels, bytes);
    if constexpr (BACKWARDS)
      copy_chunk<BK, THREADS>(s.q[stage], args.q.row(b, head, at), args.q.t, rows, channels, bytes);
    copy_chunk<BV, THREADS>(s.v[stage], values.row(b, h, at) + v_tile, values.t, rows, columns, bytes);
    cp_async_commit();
    next.ask(args.g, args.beta, b, h, at, rows);
  };
  const auto chunk_of = [&](int step) { return BACKWARDS ? chunks - 1 - step : step; };
  if (chunks) fetch(C * chunk_of(0), 0);
#pragma unroll 1
  for (int step = 0, stage = 0; step < chunks; ++step, stage ^= 1) {
    const T *q = s.q[stage], *k = s.k[stage], *v = s.v[stage];
    const int token = C * chunk_of(step);
    cp_async_wait<0>();
    next.put(of);
    __syncthreads();  // the chunk has arrived; the previous chunk and its matrices have been read
    if (step + 1 < chunks) fetch(C * chunk_of(step + 1), stage ^ 1);
    if (column < kept_columns) {
      T* to = kept + i64(chunk_of(step)) * BK * padded_columns(shape.V) + (v_tile + column) * BK;
#pragma unroll
      for (int right = 0; right < 2; ++right)
#pragma unroll
        for (int c = 0; c < BK / 8; ++c)
          *reinterpret_cast<u32*>(to + (right * (BK / 8) + c) * 64 + 2 * (threadIdx.x & 31)) =
              pack<T>(S[c][2 * right], S[c][2 * right + 1]);
    }
    score_pairs<BACKWARDS, BK, THREADS>(of, q, k, args.normalized);
    for (int c = threadIdx.x; c < BK; c += THREADS) s.whole[c] = of.start[C - 1];
    __syncthreads();  // M and A are in shared memory
    if (warp == 0) solve_column(of);
    Columns found = {};
    if constexpr (!BACKWARDS) read_state<BK>(found, S, k);
    __syncthreads();  // N is in shared memory
    multiply_scores<BACKWARDS, THREADS>(of, [&](int i, int j, float x, float y) {
      if constexpr (BACKWARDS) {
        put_two(s.B.at(i, j), x, y);
        put_two(s.of_W.at(i, j), of.unit[j] * of.start[j] * of.beta[j] * x,
                of.unit[j + 1] * of.start[j + 1] * of.beta[j + 1] * y);
      }
      const float by = BACKWARDS ? 1.f : of.beta[i];
      put_two(s.of_Z.at(i, j), by * of.N[j][i] * (of.unit[j] * of.end[j]),
              by * of.N[j + 1][i] * (of.unit[j + 1] * of.end[j + 1]));
    });
    if constexpr (!BACKWARDS)
      each_pair([&](int i, int c, int m, int across, int down) {
        const float2 value = unpack_pair(place<BV>(v, i, c));
        const float *read = found[m][across] + 2 * down, from_start = of.unit[i] * of.start[i];
        put_pair(place<BV>(s.X, i, c), {value.x - from_start * read[0], value.y - from_start * read[1]});
      });
    float strengths[C / 16][2];  // beta of a lane's tokens; loaded here, before another warp stores the next chunk's
#pragma unroll
    for (int m = 0; m < C / 16; ++m)
#pragma unroll
      for (int down = 0; down < 2; ++down) strengths[m][down] = of.beta[16 * m + 8 * down + (threadIdx.x >> 2 & 7)];
    __syncthreads();  // B, of_W, of_Z and X are in shared memory
    make_wide<BACKWARDS>(s, q, k, scale);
    __syncthreads();  // W and Z are in shared memory

    if constexpr (BACKWARDS) {
      Columns worth = {};
      read_state<BK>(found, S, s.Z);
#pragma unroll
      for (int m = 0; m < C / 16; ++m) multiply_tokens<UPPER, BV, true>(worth[m], s.B, v, 16 * m, column);
      each_pair([&](int i, int c, int m, int across, int down) {
        const float *y = found[m][across] + 2 * down, *more = worth[m][across] + 2 * down;
        const float beta = strengths[m][down], by = -of.unit[i] * of.start[i] * beta;
        const float one = y[0] + scale * more[0], two = y[1] + scale * more[1];
        put_pair(place<BV>(s.X, i, c), {by * y[0], by * y[1]});
        if (token + i < tokens) {
          const i64 at = span.start + token + i;
          if (c < kept_columns) store_pair(args.w.row(b, h, at) + v_tile, c, kept_columns, 4, one, two);
          store_pair(args.dv.row(b, h, at) + v_tile, c, columns, bytes, beta * one, beta * two);
        }
      });
      __syncwarp();  // the warp's columns of -D_i beta Y are stored in s.X
      write_state<BK, BV>(S, s.W, v, s.whole, column);
      write_state<BK, BV>(S, k, s.X, nullptr, column);
    } else {
      write_state<BK, BV>(S, s.Z, s.X, s.whole, column);
      each_pair([&](int i, int c, int, int, int) {
        if (token + i < tokens && c < kept_columns)
          *reinterpret_cast<u32*>(args.X.row(b, h, span.start + token + i) + v_tile + c) =
              *reinterpret_cast<const u32*>(place<BV>(s.X, i, c));
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
__global__ void __launch_bounds__(2 * BV, blocks_with_room<DeltaShared<T, BK, BV>>(BV == 64 ? 2 : 1))
    delta_backward_states(const Args<T, G> args) {
  auto& s = *reinterpret_cast<DeltaShared<T, BK, BV>*>(dynamic_smem());
  const u32 half = gridDim.x / 2;
  if (blockIdx.x >= half) walk<true>(s, args, blockIdx.x - half);
  else walk<false>(s, args, blockIdx.x);
}
