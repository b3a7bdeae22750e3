// what      Softmax attention's gradients of k and v on Hopper: one thread copies, two warpgroups multiply.
// math      s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);  p_ij = e^(s_ij - lse_i), lse_i = log sum_j
//           e^s_ij;  dv_j = sum_i p_ij do_i,  dk_j = scale sum_i p_ij (do_i . v_j - delta_i) q_i, delta_i = do_i . o_i
//           - dlse_i, over the queries of all heads that share the keys; with a cap each term of dk times 1 - (s_ij /
//           cap)^2.  Code: st holds s, then p, with keys as rows, dp do_i . v_j, ds = p (dp - delta), g = do
// shapes    k dk [B, H / group, Tk, K], v dv [.., V], q [B, H, Tq, K], do [B, H, Tq, V]; statistics [B, H, chunks, 2,
//           64] float32: lse in base 2 (L), then delta, of every 64 queries, as statistics.cu writes them. ds:
//           DsEntry, for query_gradient.cu, or null
// grid      as many blocks as multiprocessors; a block computes the key tiles (struct Work) of its column of `works`,
//           in turn. A warpgroup has 64 keys
// smem      Shared: two tiles of k and v, later of dk and dv; a ring of tiles of q, do and statistics
// barriers  full: k and v have arrived; empty: dk and dv that overwrote them have been stored; q_full: q and statistics
//           have arrived; g_full: do has; q_empty, g_empty: they have been read. Named: 1 + warpgroup in zero_rows:
//           zeros are written
// numerics  scores, weights and sums in float32; p and ds are rounded to T for their products
// source    Dao et al., "FlashAttention", 2022, algorithm 4; products have keys as rows, so that p and ds go from one
//           product to the next in registers
// limits    sm_90a; half data; rows of whole 16 bytes; K, V <= D; D of 64, 128
#include "softmax_sm90.cuh"

constexpr int KEYS = 128, QUERIES = CHUNK_QUERIES;

template <typename T> struct Args {
  TensorMap q, k, v, g, dk, dv;  // boxes of 64 columns and 64 tokens, of dk and dv 16; g is do
  Rows<T> dk_out, dv_out;        // dk, dv again, for a warp's 16 rows that are not all tokens of the tile
  const Work* works;             // [rounds, gridDim.x]
  const float* statistics;
  DsEntry* ds;                              // null: ds is not stored
  i64 H, group, K, V, left, right, chunks;  // H: heads of queries
  i64 ds_head, ds_entries;  // the head of queries, of B H, that ds begins with; a head's number of entries
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

// The producing thread: copies the tiles of all of the block's work.
template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  fetch_work(s.coming, next);
  prefetch_map(args.q), prefetch_map(args.k), prefetch_map(args.v), prefetch_map(args.g), prefetch_map(args.dk),
      prefetch_map(args.dv);
  Ring<2> kv;
  Ring<S::STAGES> r;
  while (true) {
    Work work = take_work(s.coming, next);
    const i64 first_head = i64(work.batch) * args.H + work.head * args.group - args.ds_head;
    work.ds_index += i32(first_head * args.ds_entries) + work.statistics_chunk;  // now in ds: first head, query tile 0
    barrier_wait(s.empty[kv.stage], kv.parity ^ 1);
    fence_async();  // orders the consumers' accesses to k and v, known by `empty`, before the copy engine's writes
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
        fence_async();  // likewise for q and statistics
        barrier_expect(s.q_full[r.stage], sizeof s.q[0] + sizeof s.statistics[0]);
        load_tile<64>(s.q[r.stage], args.q, s.q_full[r.stage], token, head, work.batch);
        copy_bulk(s.statistics[r.stage], args.statistics + (chunk + block) * (2 * CHUNK_QUERIES),
                  sizeof s.statistics[0], s.q_full[r.stage]);
        barrier_wait(s.g_empty[r.stage], r.parity ^ 1);
        barrier_expect(s.g_full[r.stage], sizeof s.g[0]);
        load_tile<64>(s.g[r.stage], args.g, s.g_full[r.stage], token, head, work.batch);
        r.next();
      }
    }
  }
}

// A consuming warpgroup: its 64 keys of each of the block's key tiles. In a lane's accumulators of products [64, N],
// numbers 4 n + 2 half + i are of key `row` + 8 half and column 8 n + 2 (lane % 4) + i.
template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const int warpgroup = uniform(threadIdx.x / 128), own = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first of two rows; own: the warpgroup's
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;
  const float inner = __uint_as_float(opaque(__float_as_uint(float(args.scale) * inverse(float(args.softcap)))));
  Ring<2> kv;
  Ring<S::STAGES> r;
  float st[QUERIES / 2], dp[QUERIES / 2], dk[D / 2], dv[D / 2];
  u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
  constexpr bool HELD = D == 64;  // whether k and v are operands in registers, which have room for 64 columns
  u32 k[HELD ? D / 16 : 1][4], v[HELD ? D / 16 : 1][4];
  bool leaving = false;  // lane 0: the copy engine may still read this warp's dk and dv of the previous key tile
  // A head has `blocks` query tiles; the current one is end - ahead, the last one end - 1. heads: query heads that are
  // left; shift: query position of the key tile's first row; length: number of queries of the sequence.
  int blocks, ahead, end, heads, shift, length;

  auto leave = [&](Barrier& b) {
    if (lane == 0) barrier_arrive(b);
  };
  auto hand_back = [&] {  // lane 0: once dk and dv have been stored, the producer may copy the next k and v there
    if (leaving) {
      tensor_store_wait();
      barrier_arrive(s.empty[kv.stage ^ 1]);
      leaving = false;
    }
  };
  auto skip = [&] {  // skips query tiles that see none of the warpgroup's keys, but not the last one
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
    if constexpr (HELD) load_rows(k, s.k[kv.stage], own), load_rows(v, s.v[kv.stage], own);
    skip();
  };
  // Issues the product of 16 columns from 16 n on of keys or values, which are `a` or in the tile `at`, and of a tile.
  auto product = [&](float (&sum)[QUERIES / 2], const u32(&a)[4], u64 at, u64 tile, int n) {
    const u64 b = tile + n / 4 * (QUERIES * 128 / 16) + n % 4 * 2;
    if constexpr (HELD) wgmma<T, QUERIES, false>(sum, a, b, n > 0);
    else wgmma<T, QUERIES, false>(sum, at + n / 4 * (KEYS * 128 / 16) + n % 4 * 2, b, n > 0);
  };
  auto start = [&] {  // issues two products with keys as rows: st = k q^T, dp = v do^T
    const int valid = length - (end - ahead) * QUERIES;
    const u64 kt = wgmma_tile(s.k[kv.stage][0] + own * PANEL, 16, 1024),
              vt = wgmma_tile(s.v[kv.stage][0] + own * PANEL, 16, 1024);
    const u64 qt = wgmma_tile(s.q[r.stage][0], 16, 1024), gt = wgmma_tile(s.g[r.stage][0], 16, 1024);
    barrier_wait(s.q_full[r.stage], r.parity);
    if (valid < QUERIES) zero_rows(s.q[r.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) product(st, k[HELD ? n : 0], kt, qt, n);
    wgmma_commit();
    barrier_wait(s.g_full[r.stage], r.parity);
    if (valid < QUERIES) zero_rows(s.g[r.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) product(dp, v[HELD ? n : 0], vt, gt, n);
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
  // Calls f(index of an element of this lane's accumulators, L and delta of the element's query).
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
    const int tokens = uniform(s.works[kv.stage].tokens);
    if (own + 64 > tokens)  // a key of another sequence: its ds may be NaN, and would be multiplied by that key
#pragma unroll
      for (int n = 0; n < QUERIES / 2; ++n)
        if (row + n / 2 % 2 * 8 >= tokens) dp[n] = 0.f;
  };
  auto keep = [&] {  // stores ds
    if (!args.ds) return;
    const int head = int(args.group) - heads;
    ScoreGradients& to = args.ds[s.works[kv.stage].ds_index + head * int(args.ds_entries) + end - ahead][warpgroup];
#pragma unroll
    for (int n = 0; n < QUERIES / 16; ++n) store_once(to.of_warp[threadIdx.x / 32 % 4][n][lane], ds[n]);
  };
  auto finish = [&](int slot) {
    const Work& work = s.works[slot];
    const float by = float(args.scale);
    if (work.other_length == 0)  // the statistics were another sequence's, and 0 times NaN is NaN
#pragma unroll
      for (int n = 0; n < D / 2; ++n) dk[n] = 0.f;
    store_rows(args.dk, args.dk_out, args.K, dk, by, by, s.k[slot], own, work);
    store_rows(args.dv, args.dv_out, args.V, dv, 1.f, 1.f, s.v[slot], own, work);
    leaving = lane == 0;
  };
  // Issues dv = p do, or dv += p do if `begun`, and waits for dp.
  auto add_values = [&](bool begun) {
    if (D == 128) wgmma_wait<0>();  // p gets the registers of ds, which the previous product reads
    round(p, st);
    if (CAPPED) each_column([&](int n, float L, float) { st[n] *= slope_of_cap(st[n], L, scale); });
    add(dv, p, s.g[r.stage][0], begun);
    wgmma_wait<1>();
    wgmma_keep(dp);
  };
  auto end_step = [&] {  // computes ds while dv's product runs, then waits for dv
    differ();
    round(ds, dp);
    wgmma_keep(ds);
    before_next_copy();  // this warp has read the statistics; also keeps the wait after the computation of ds
    wgmma_wait<0>();
    wgmma_keep(dv);
    leave(s.g_empty[r.stage]);
    keep();
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
  int before = r.stage;  // the stage of the previous query tile, whose product with ds is issued next
  bool begun = false;    // dk holds sums of this key tile's earlier query tiles
  // An iteration issues a query tile's scores and the previous tile's product with ds. It waits for both: the assembler
  // would serialise products that are still running where the loop jumps back.
  while (true) {
    r.next();
    bool fresh = false;  // the next query tile is for the block's next key tile
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
    wgmma_wait<CAPPED && D == 128 ? 0 : 2>();  // with a cap, registers are too few for ds's product to run on
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
    fence_async();  // makes the barriers visible to the copy engine
  }
  __syncthreads();  // makes the barriers visible to all threads
  if (threadIdx.x < 256) {
    registers_up<240>();
    consume<T, D, CAPPED>(s, args);
  } else {
    registers_down<24>();
    if (threadIdx.x == 256) produce(s, args);
  }
}
