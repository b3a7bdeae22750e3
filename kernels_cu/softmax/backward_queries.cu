// what      Softmax attention's gradient of the queries, and the statistics that the gradients of keys and values need.
// math      dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j,   p_ij = e^(s_ij - lse_i),   delta_i = do_i . o_i -
//           dlse_i; of capped scores each term times 1 - (s_ij / cap)^2
// shapes    q dq [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o do [B, H, Tq, V], L [B, H, Tq] as the forward
//           leaves it, dL the same or null
// grid      a block for every tile of `works`, the longest first; a warp has 32 queries
// smem      Shared: the queries, then dq; the gradients of o; o, then two tiles of keys and values, one at hand and one
//           under way
// barriers  queries and o arrived | o read; then one a tile of keys: it has arrived, nobody reads the one before
// numerics  p is recomputed in float32 from L, the scores in float32 as well; p (dp - delta) is rounded to T. delta is
//           made of the rounded o: where one key has nearly all the weight, dq and dk are small and carry its rounding.
//           A query whose L is over 2^24 in base 2 has weights of 0: see `known_logarithm`
// source    Dao et al., "FlashAttention", 2022, algorithm 4, its loops turned so that nothing is added atomically
// limits    half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int QUERIES = 128, KEYS = 32;

template <typename T> struct Args {
  Rows<const T> q, k, v, o, g;  // g is do
  Rows<T> dq;
  const Work* works;
  const float *L, *dL;
  float* statistics;
  i64 H, group, Tq, K, V, left, right, chunks;
  double scale, softcap;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, int D> struct alignas(128) Shared {
  T q[QUERIES * D];
  T g[QUERIES * D];
  union {
    T o[QUERIES * D];
    T kv[2][2][KEYS * D];  // keys, values of two tiles
  };
  float L[QUERIES], delta[QUERIES];
  Work work;
};

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(THREADS, 2) softmax_backward_queries(const Args<T> args) {
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (2 * QUERIES + 4 * KEYS) + 8 * QUERIES + 128, "what the host asks for");
  if (threadIdx.x == 0) s.work = args.works[blockIdx.x];
  __syncthreads();  // the place stands
  const Work& work = s.work;
  const int row = threadIdx.x / 32 * 32, lane = threadIdx.x & 31;
  // Where the diagonal meets the warp's first query, and the last tile, made anew each time for want of registers.
  auto diagonal = [&] { return work.diagonal + row; };
  auto end = [&] { return work.first_tile + work.tiles; };
  auto fetch_keys = [&](int block, int stage) {
    const int head = work.head / int(args.group), rows = work.other_length - block * KEYS,
              token = work.other_start + block * KEYS;
    fetch<KEYS, D>(s.kv[stage][0], args.k, work.batch, head, token, rows, args.K, args.vectors);
    fetch<KEYS, D>(s.kv[stage][1], args.v, work.batch, head, token, rows, args.V, args.vectors);
    cp_async_commit();
  };

  fetch<QUERIES, D>(s.q, args.q, work.batch, work.head, work.start, work.tokens, args.K, args.vectors);
  fetch<QUERIES, D>(s.g, args.g, work.batch, work.head, work.start, work.tokens, args.V, args.vectors);
  fetch<QUERIES, D>(s.o, args.o, work.batch, work.head, work.start, work.tokens, args.V, args.vectors);
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();  // q, do and o have arrived
  static_assert(QUERIES == THREADS);
  {
    const int n = threadIdx.x;
    float delta = 0.f;
#pragma unroll
    for (int piece = 0; piece < D / 8; ++piece) {
      const T *g = piece_of<D>(s.g, n, piece), *o = piece_of<D>(s.o, n, piece);
#pragma unroll
      for (int i = 0; i < 8; ++i) delta = fmaf(to_float(g[i]), to_float(o[i]), delta);
    }
    const i64 pair = i64(work.batch) * args.H + work.head, token = pair * args.Tq + work.start + n;
    float L = minus_infinity();
    if (n < work.tokens) {
      L = LOG2E * args.L[token];
      if (args.dL) delta -= args.dL[token];
    }
    s.L[n] = L = known_logarithm(L);
    s.delta[n] = delta;
    if (n / CHUNK_QUERIES * CHUNK_QUERIES < work.tokens) {
      float* const to =
          args.statistics + (pair * args.chunks + work.statistics_chunk + n / CHUNK_QUERIES) * (2 * CHUNK_QUERIES);
      to[n % CHUNK_QUERIES] = L, to[CHUNK_QUERIES + n % CHUNK_QUERIES] = delta;
    }
  }
  __syncthreads();  // o is read, L and delta stand
  fetch_keys(work.first_tile, 0);

  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;
  // Of a lane's rows; L is read anew each time for want of registers.
  auto L = [&](int m, int half) { return s.L[row + 16 * m + 8 * half + lane / 4]; };
  float delta[2][2];
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int half = 0; half < 2; ++half) delta[m][half] = s.delta[row + 16 * m + 8 * half + lane / 4];
  Fragment<2, D> dq = {};
  for (int block = work.first_tile, stage = 0; block < end(); ++block, stage ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has arrived; the other may be overwritten
    if (block + 1 < end()) fetch_keys(block + 1, stage ^ 1);
    const int key = block * KEYS;
    if (key > diagonal() + 31 + int(args.right) || key + KEYS <= diagonal() - int(args.left)) continue;  // none is seen
    Fragment<2, KEYS> p = {}, dp = {};
    multiply_transposed<D, 2, KEYS, CAPPED>(p, s.q, row, s.kv[stage][0]);
    multiply_transposed<D, 2, KEYS, CAPPED>(dp, s.g, row, s.kv[stage][1]);
    if (CAPPED) {
      const float inner = float(args.scale) * inverse(float(args.softcap));
      each<2, KEYS>(p, [&](float& x, int, int, int) { x = tanh_of(inner * x); });
    }
    each<2, KEYS>(p, [&](float& x, int m, int half, int) { x = exp2_approx(fmaf(scale, x, -L(m, half))); });
    if (partly_seen<32, KEYS>(key, diagonal(), int(args.left), int(args.right), work.other_length))
#pragma unroll
      for (int m = 0; m < 2; ++m)
        mask_rows(p[m], key, diagonal() + 16 * m + lane / 4, int(args.left), int(args.right), work.other_length, 0.f);
    if (CAPPED) each<2, KEYS>(p, [&](float& x, int m, int half, int) { x *= slope_of_cap(x, L(m, half), scale); });
    each_of_two<2, KEYS>(p, dp, [&](float& x, float d, int m, int half, int) { x *= d - delta[m][half]; });
    multiply_rows<D, 2, KEYS>(dq, p, s.kv[stage][0]);
  }
  store<D, 2>(dq, [&](int, int) { return float(args.scale); }, s.q, row, args.dq, work, args.K, args.vectors);
}
