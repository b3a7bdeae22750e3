// what      softmax_backward_keys on Hopper: one thread copies, two warpgroups multiply.
// math      dv_j = sum_i p_ij do_i,   dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i,   p_ij = e^(s_ij - lse_i),
//           over the queries of all heads that share the keys; of capped scores each term of dk times 1 - (s_ij /
//           cap)^2
// shapes    those of softmax_backward_keys
// grid      as many blocks as multiprocessors; each takes the tiles of its column of `works`, in turn. A warpgroup has
//           64 keys
// smem      Shared: two tiles of keys and values, through which dk and dv leave; a ring of queries, do and statistics
// barriers  full, empty: of the tiles of keys and values; q_full, g_full, q_empty, g_empty: of the ring, statistics
//           with the queries. Named: 1 + warpgroup, zeros stand
// numerics  those of softmax_backward_keys
// source    Dao et al., "FlashAttention", 2022, algorithm 4; keys are the rows, so that p and its gradient go from one
//           product to the next in registers. One loop over all tiles
// limits    sm_90a; half data; rows of whole 16 bytes; K, V <= D; D of 64, 128
#include "softmax_sm90.cuh"

constexpr int KEYS = 128, QUERIES = STATISTICS;

template <typename T> struct Args {
  TensorMap q, k, v, g, dk, dv;  // boxes of 64 columns and 64 tokens, of dk and dv 16; g is do
  Rows<T> dk_out, dv_out;        // the same, for tiles that end within a sequence
  const Work* works;             // [rounds, gridDim.x]
  const float* statistics;
  i64 H, group, K, V, left, right, chunks;
  double scale, softcap;
};

template <typename T, int D> struct alignas(1024) Shared {
  static constexpr int STAGES = 3;
  Tile<T, D, KEYS> k[2], v[2];
  Tile<T, D, QUERIES> q[STAGES];
  Tile<T, D, QUERIES> g[STAGES];
  alignas(16) float statistics[STAGES][2][QUERIES];  // L, delta
  Work works[2], coming;
  Barrier full[2], empty[2], q_full[STAGES], q_empty[STAGES], g_full[STAGES], g_empty[STAGES];
};

template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  fetch_work(s.coming, next);
  prefetch_map(args.q), prefetch_map(args.k), prefetch_map(args.v), prefetch_map(args.g), prefetch_map(args.dk),
      prefetch_map(args.dv);
  Ring<2> kv;
  Ring<S::STAGES> r;
  while (true) {
    const Work work = take_work(s.coming, next);
    barrier_wait(s.empty[kv.stage], kv.parity ^ 1);
    fence_async();  // after what consumers read and wrote there, before the copy engine writes
    s.works[kv.stage] = work;
    if (!work.tiles) return barrier_arrive(s.full[kv.stage]);
    barrier_expect(s.full[kv.stage], 2 * sizeof s.k[0]);
    load_tile<64>(s.k[kv.stage], args.k, s.full[kv.stage], work.start, work.head, work.batch);
    load_tile<64>(s.v[kv.stage], args.v, s.full[kv.stage], work.start, work.head, work.batch);
    kv.next();
#pragma unroll 1
    for (int head = work.head * int(args.group), last = head + int(args.group); head < last; ++head) {
      const i64 chunk = (i64(work.batch) * args.H + head) * args.chunks + work.statistics_chunk;
#pragma unroll 1
      for (int block = work.first_tile; block < work.first_tile + work.tiles; ++block) {
        const int token = work.other_start + block * QUERIES;
        barrier_wait(s.q_empty[r.stage], r.parity ^ 1);
        fence_async();  // likewise
        barrier_expect(s.q_full[r.stage], sizeof s.q[0] + sizeof s.statistics[0]);
        load_tile<64>(s.q[r.stage], args.q, s.q_full[r.stage], token, head, work.batch);
        copy_bulk(s.statistics[r.stage], args.statistics + (chunk + block) * (2 * STATISTICS), sizeof s.statistics[0],
                  s.q_full[r.stage]);
        barrier_wait(s.g_empty[r.stage], r.parity ^ 1);
        barrier_expect(s.g_full[r.stage], sizeof s.g[0]);
        load_tile<64>(s.g[r.stage], args.g, s.g_full[r.stage], token, head, work.batch);
        r.next();
      }
    }
  }
}

template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const int warpgroup = uniform(threadIdx.x / 128), own = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first of a tile
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;
  const float inner = __uint_as_float(opaque(__float_as_uint(float(args.scale) * inverse(float(args.softcap)))));
  Ring<2> kv;
  Ring<S::STAGES> r;
  float st[QUERIES / 2], dp[QUERIES / 2], dk[D / 2], dv[D / 2];
  u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
  bool leaving = false;  // lane 0: this warp's dk and dv may still be read, in the tile of keys before
  int blocks, ahead, end, heads, shift, length;  // of the tile at hand, from which on `ahead` end at tile `end`

  auto leave = [&](Barrier& b) {
    if (lane == 0) barrier_arrive(b);
  };
  auto hand_back = [&] {  // the place of the tile before, from which dk and dv have left
    if (leaving) {
      tensor_store_wait();
      barrier_arrive(s.empty[kv.stage ^ 1]);
      leaving = false;
    }
  };
  auto skip = [&] {  // tiles of queries that see none of the warpgroup's keys, but for the last one
    while (ahead > 1 && (end - ahead) * QUERIES + QUERIES - 1 < shift + own - int(args.right)) {
      barrier_wait(s.q_full[r.stage], r.parity);
      leave(s.q_empty[r.stage]);
      barrier_wait(s.g_full[r.stage], r.parity);
      leave(s.g_empty[r.stage]);
      r.next();
      --ahead;
    }
  };
  auto begin = [&](const Work& work) {
    blocks = ahead = uniform(work.tiles), end = uniform(work.first_tile + work.tiles), heads = int(args.group);
    shift = uniform(work.diagonal), length = uniform(work.other_length);
    skip();
  };
  auto start = [&] {  // the products of scores and of dp, turned over: a row a key
    const int valid = length - (end - ahead) * QUERIES;
    const u64 kt = wgmma_tile(s.k[kv.stage][0] + own * PANEL, 16, 1024),
              vt = wgmma_tile(s.v[kv.stage][0] + own * PANEL, 16, 1024);
    const u64 qt = wgmma_tile(s.q[r.stage][0], 16, 1024), gt = wgmma_tile(s.g[r.stage][0], 16, 1024);
    barrier_wait(s.q_full[r.stage], r.parity);
    if (valid < QUERIES) zero_rows(s.q[r.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
      wgmma<T, QUERIES, false>(st, kt + n / 4 * (KEYS * 128 / 16) + n % 4 * 2,
                               qt + n / 4 * (QUERIES * 128 / 16) + n % 4 * 2, n > 0);
    wgmma_commit();
    barrier_wait(s.g_full[r.stage], r.parity);
    if (valid < QUERIES) zero_rows(s.g[r.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n)
      wgmma<T, QUERIES, false>(dp, vt + n / 4 * (KEYS * 128 / 16) + n % 4 * 2,
                               gt + n / 4 * (QUERIES * 128 / 16) + n % 4 * 2, n > 0);
    wgmma_commit();
  };
  auto add = [&](float (&sum)[D / 2], const u32(&a)[QUERIES / 16][4], const T* tile, bool begun) {
    const u64 b = wgmma_tile(tile, QUERIES * 128, 1024);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n) wgmma<T, D, true>(sum, a[n], b + n * (16 * 128 / 16), n > 0 || begun);
    wgmma_commit();
  };
  auto round = [&](u32(&a)[QUERIES / 16][4], const float (&x)[QUERIES / 2]) {
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) a[n][i] = pack<T>(x[8 * n + 2 * i], x[8 * n + 2 * i + 1]);
  };
  // Calls f(a column's place in this lane's values, its L, its delta).
  auto each_column = [&](auto f) {
    const float* const L = s.statistics[r.stage][0] + 2 * (lane & 3);
#pragma unroll
    for (int n = 0; n < QUERIES / 8; ++n) {
      const float2 Ls = *reinterpret_cast<const float2*>(L + 8 * n);
      const float2 deltas = *reinterpret_cast<const float2*>(L + QUERIES + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) f(4 * n + 2 * half, Ls.x, deltas.x), f(4 * n + 2 * half + 1, Ls.y, deltas.y);
    }
  };
  auto weigh = [&] {
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < QUERIES / 2; ++n) st[n] = tanh_of(inner * st[n]);
    }
    each_column([&](int n, float L, float) { st[n] = exp2_approx(fmaf(scale, st[n], -L)); });
    const int query = (end - ahead) * QUERIES, diagonal = shift + own;
    if (partly_seen<64, QUERIES>(query, diagonal, int(args.right), int(args.left), length))
      mask_rows(st, query, shift + row, int(args.right), int(args.left), length, 0.f);
  };
  auto differ = [&] {
    each_column([&](int n, float, float delta) { dp[n] -= delta; });
#pragma unroll
    for (int n = 0; n < QUERIES / 2; ++n) dp[n] *= st[n];
  };
  auto finish = [&](int slot) {
    const Work& work = s.works[slot];
    const float by = float(args.scale);
    if (work.other_length == 0)  // the statistics were another sequence's, and 0 times its NaN is NaN
#pragma unroll
      for (int n = 0; n < D / 2; ++n) dk[n] = 0.f;
    store_rows(args.dk, args.dk_out, args.K, dk, by, by, s.k[slot], own, work);
    store_rows(args.dv, args.dv_out, args.V, dv, 1.f, 1.f, s.v[slot], own, work);
    leaving = lane == 0;
  };
  // The product of dv, and ds under it. `begun`: dv has something of this tile of keys.
  auto add_values = [&](bool begun) {
    if (D == 128) wgmma_wait<0>();  // there are registers for p when those of ds are free
    round(p, st);
    if (CAPPED) each_column([&](int n, float L, float) { st[n] *= slope_of_cap(st[n], L, scale); });
    add(dv, p, s.g[r.stage][0], begun);
    wgmma_wait<1>();
    wgmma_keep(dp);
  };
  auto end_step = [&] {
    differ();
    round(ds, dp);
    wgmma_keep(ds);
    before_next_copy();  // this warp has read the statistics; the wait stays behind what is above
    wgmma_wait<0>();
    wgmma_keep(dv);
    leave(s.g_empty[r.stage]);
  };

  barrier_wait(s.full[0], 0);
  if (!uniform(s.works[0].tiles)) return;
  begin(s.works[0]);
  start();
  wgmma_wait<1>();
  wgmma_keep(st);
  weigh();
  add_values(false);
  end_step();
  int before = r.stage;  // the stage whose queries are still to be multiplied
  bool begun = false;    // dk has something of its tile of keys
  while (true) {         // products under way across a loop's end would be serialised: what is to overlap are operands
    r.next();
    bool fresh = false;  // the next tile of queries is for other keys
    if (--ahead == 0) {
      fresh = --heads == 0;
      if (fresh) {
        hand_back();
        kv.next();
        barrier_wait(s.full[kv.stage], kv.parity);
        if (!uniform(s.works[kv.stage].tiles)) break;
        begin(s.works[kv.stage]);
      } else {
        ahead = blocks;
        skip();
      }
    }
    start();
    add(dk, ds, s.q[before][0], begun);
    if (!fresh) hand_back();
    wgmma_wait<CAPPED && D == 128 ? 0 : 2>();  // caps leave no registers for ds
    wgmma_keep(st);
    weigh();
    if (fresh) {
      wgmma_wait<0>();
      wgmma_keep(dk);
      finish(kv.stage ^ 1);
    }
    add_values(!fresh);
    wgmma_keep(dk);
    leave(s.q_empty[before]);
    before = r.stage;
    end_step();
    begun = !fresh;
  }
  add(dk, ds, s.q[before][0], begun);
  wgmma_wait<0>();
  wgmma_keep(dk);
  finish(kv.stage ^ 1);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(384, 1) softmax_sm90_backward_keys(const __grid_constant__ Args<T> args) {
  using S = Shared<T, D>;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) barrier_init(s.full[n], 1), barrier_init(s.empty[n], 8);
    for (int n = 0; n < S::STAGES; ++n) {
      barrier_init(s.q_full[n], 1), barrier_init(s.q_empty[n], 8);
      barrier_init(s.g_full[n], 1), barrier_init(s.g_empty[n], 8);
    }
    fence_async();  // the copy engine sees the barriers
  }
  __syncthreads();  // the barriers stand
  if (threadIdx.x < 256) {
    registers_up<240>();
    consume<T, D, CAPPED>(s, args);
  } else {
    registers_down<24>();
    if (threadIdx.x == 256) produce(s, args);
  }
}
