// what      softmax_backward_queries on Hopper: one thread copies, two warpgroups multiply.
// math      dq_i = scale sum_j p_ij (do_i . v_j - delta_i) k_j,   p_ij = e^(s_ij - lse_i),   delta_i = do_i . o_i -
//           dlse_i; of capped scores each term times 1 - (s_ij / cap)^2
// shapes    those of softmax_backward_queries
// grid      as many blocks as multiprocessors; each takes the tiles of its column of `works`, in turn. A warpgroup has
//           64 queries, q and do of them in registers
// smem      Shared: queries, do, and o, through which the last tile's dq leaves; rings of keys and values, 64 at a time
// barriers  full: q, do and o have arrived; empty: q and do are in registers; o_empty: o is read, or dq has left;
//           k_full, v_full, k_empty, v_empty: of the rings. Named: 1 + warpgroup, zeros stand
// numerics  those of softmax_backward_queries
// source    Dao et al., "FlashAttention", 2022, algorithm 4, its loops turned so that nothing is added in memory. The
//           last tile's p (dp - delta) multiplies its keys under this tile's other products: one loop over all tiles
// limits    sm_90a; half data; rows of whole 16 bytes; K, V <= D; D of 64, 128
#include "softmax_sm90.cuh"

constexpr int QUERIES = 128, KEYS = 64;

template <typename T> struct Args {
  TensorMap q, k, v, o, g, dq;  // boxes of 64 columns and 64 tokens, of dq 16; g is do
  Rows<T> out;                  // dq, for tiles that end within a sequence
  const Work* works;            // [rounds, gridDim.x]
  const float *L, *dL;
  float* statistics;
  i64 H, group, Tq, K, left, right, chunks;
  double scale, softcap;
};

template <typename T, int D> struct alignas(1024) Shared {
  static constexpr int K_STAGES = 4, V_STAGES = D == 64 ? 4 : 3;
  Tile<T, D, QUERIES> q, g, o;
  Tile<T, D, KEYS> k[K_STAGES];
  Tile<T, D, KEYS> v[V_STAGES];
  Work works[2], coming;
  Barrier full, empty, o_empty, k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
};

template <typename T, int D> __device__ __forceinline__ void produce(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const Work* next = args.works + blockIdx.x;
  fetch_work(s.coming, next);
  prefetch_map(args.q), prefetch_map(args.k), prefetch_map(args.v), prefetch_map(args.o), prefetch_map(args.g),
      prefetch_map(args.dq);
  Ring<S::K_STAGES> k;
  Ring<S::V_STAGES> v;
  for (u32 parity = 1;; parity ^= 1) {
    const Work work = take_work(s.coming, next);
    barrier_wait(s.empty, parity);
    fence_async();  // after what consumers read and wrote there, before the copy engine writes
    if (work.tiles) {
      load_tile<64>(s.q, args.q, s.full, work.start, work.head, work.batch);
      load_tile<64>(s.g, args.g, s.full, work.start, work.head, work.batch);
    }
    barrier_wait(s.o_empty, parity);
    fence_async();           // likewise
    s.works[parity] = work;  // whose last dq has left
    if (!work.tiles) return barrier_arrive(s.full);
    barrier_expect(s.full, 3 * sizeof s.q);
    load_tile<64>(s.o, args.o, s.full, work.start, work.head, work.batch);
    const int head = int(u32(work.head) / u32(args.group));
#pragma unroll 1
    for (int block = work.first_tile + work.tiles - 1; block >= work.first_tile; --block) {
      const int token = work.other_start + block * KEYS;
      barrier_wait(s.k_empty[k.stage], k.parity ^ 1);
      barrier_expect(s.k_full[k.stage], sizeof s.k[0]);
      load_tile<64>(s.k[k.stage], args.k, s.k_full[k.stage], token, head, work.batch);
      k.next();
      barrier_wait(s.v_empty[v.stage], v.parity ^ 1);
      barrier_expect(s.v_full[v.stage], sizeof s.v[0]);
      load_tile<64>(s.v[v.stage], args.v, s.v_full[v.stage], token, head, work.batch);
      v.next();
    }
  }
}

// g . o of two pairs side by side, added to x.
template <typename T> __device__ __forceinline__ float add_dot(u32 g, u32 o, float x) {
  x = fmaf(to_float(T{u16(g)}), to_float(T{u16(o)}), x);
  return fmaf(to_float(T{u16(g >> 16)}), to_float(T{u16(o >> 16)}), x);
}

template <typename T, int D, bool CAPPED>
__device__ __forceinline__ void consume(Shared<T, D>& s, const Args<T>& args) {
  using S = Shared<T, D>;
  const int warpgroup = uniform(threadIdx.x / 128), own = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first of a tile
  const float scale = float(CAPPED ? args.softcap : args.scale) * LOG2E;
  const float inner = __uint_as_float(opaque(__float_as_uint(float(args.scale) * inverse(float(args.softcap)))));
  Ring<S::K_STAGES> k;
  Ring<S::V_STAGES> v;
  u32 q[D / 16][4], g[D / 16][4], ds[KEYS / 16][4];
  float p[KEYS / 2], dp[KEYS / 2], dq[D / 2], L[2], delta[2];
  u32 parity = 0;                   // of the tile at hand
  bool leaving = false;             // lane 0: this warp's dq may still be read, in o's place
  int first, ahead, shift, length;  // of the tile at hand; it comes behind `ahead` others, from the last to the first

  auto leave = [&](Barrier& b) {
    if (lane == 0) barrier_arrive(b);
  };
  auto hand_back = [&] {  // o's place, from which dq has left
    if (leaving) {
      tensor_store_wait();
      barrier_arrive(s.o_empty);
      leaving = false;
    }
  };
  // Take a tile's q, do and L, and make delta; behind the tile's end weights are to be 0.
  auto take = [&](const Work& work) {
    load_rows(q, s.q, own);
    load_rows(g, s.g, own);
    delta[0] = delta[1] = 0.f;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
      u32 o[4];
      ldmatrix_x4(o, matrix_row(s.o, own, n));
#pragma unroll
      for (int r = 0; r < 4; ++r) delta[r & 1] = add_dot<T>(g[n][r], o[r], delta[r & 1]);
    }
    before_next_copy();  // this warp has read q, do and o
    leave(s.empty);
    const i64 pair = i64(work.batch) * args.H + work.head;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = row + 8 * half;
      const i64 token = pair * args.Tq + work.start + n;
      delta[half] = row_sum(delta[half]);
      L[half] = minus_infinity();
      if (n < work.tokens) {
        L[half] = LOG2E * args.L[token];
        if (args.dL) delta[half] -= args.dL[token];
      } else delta[half] = 0.f;
      L[half] = known_logarithm(L[half]);
      if (lane % 4 == 0 && own < work.tokens) {
        float* const to =
            args.statistics + (pair * args.chunks + work.statistics_chunk + warpgroup) * (2 * STATISTICS) + n - own;
        to[0] = L[half], to[STATISTICS] = delta[half];
      }
    }
    first = uniform(work.first_tile), ahead = uniform(work.tiles) - 1;
    shift = uniform(work.diagonal), length = uniform(work.other_length);
    while (ahead > 0 && (first + ahead) * KEYS > shift + own + 63 + int(args.right)) {  // the warpgroup sees none of it
      barrier_wait(s.k_full[k.stage], k.parity);
      leave(s.k_empty[k.stage]);
      k.next();
      barrier_wait(s.v_full[v.stage], v.parity);
      leave(s.v_empty[v.stage]);
      v.next();
      --ahead;
    }
  };
  auto start = [&] {  // the products of scores and of dp
    const u64 kt = wgmma_tile(s.k[k.stage][0], 16, 1024), vt = wgmma_tile(s.v[v.stage][0], 16, 1024);
    const int valid = length - (first + ahead) * KEYS;
    barrier_wait(s.k_full[k.stage], k.parity);
    if (valid < KEYS) zero_rows(s.k[k.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) wgmma<T, KEYS, false>(p, q[n], kt + n / 4 * (KEYS * 128 / 16) + n % 4 * 2, n > 0);
    wgmma_commit();
    barrier_wait(s.v_full[v.stage], v.parity);
    if (valid < KEYS) zero_rows(s.v[v.stage], valid, warpgroup);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < D / 16; ++n) wgmma<T, KEYS, false>(dp, g[n], vt + n / 4 * (KEYS * 128 / 16) + n % 4 * 2, n > 0);
    wgmma_commit();
  };
  auto add = [&](int stage, bool begun) {
    const u64 kt = wgmma_tile(s.k[stage][0], KEYS * 128, 1024);
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) wgmma<T, D, true>(dq, ds[n], kt + n * (16 * 128 / 16), n > 0 || begun);
    wgmma_commit();
  };
  // Call it at the beginning of a branch that the whole warpgroup takes: the assembler moves a wait to the beginning of
  // its basic block, before what is to be computed under the product.
  auto end_adding = [&] {
    wgmma_wait<0>();
    wgmma_keep(dq);
  };
  auto weigh = [&] {
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) p[n] = tanh_of(inner * p[n]);
    }
#pragma unroll
    for (int n = 0; n < KEYS / 2; ++n) p[n] = exp2_approx(fmaf(scale, p[n], -L[n / 2 % 2]));
    const int key = (first + ahead) * KEYS, diagonal = shift + own;
    if (partly_seen<64, KEYS>(key, diagonal, int(args.left), int(args.right), length))
      mask_rows(p, key, shift + row, int(args.left), int(args.right), length, 0.f);
    if (CAPPED)
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) p[n] *= slope_of_cap(p[n], L[n / 2 % 2], scale);
  };
  auto differ = [&] {
#pragma unroll
    for (int n = 0; n < KEYS / 2; ++n) p[n] *= dp[n] - delta[n / 2 % 2];
  };
  auto round = [&] {
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) ds[n][r] = pack<T>(p[8 * n + 2 * r], p[8 * n + 2 * r + 1]);
  };
  auto finish = [&](const Work& work) {
    const float by = float(args.scale);
    store_rows(args.dq, args.out, args.K, dq, by, by, s.o, own, work);
    leaving = lane == 0;
  };

  barrier_wait(s.full, 0);
  if (!uniform(s.works[1].tiles)) return;
  take(s.works[1]);
  leave(s.o_empty);
  start();
  wgmma_wait<1>();
  wgmma_keep(p);
  weigh();
  wgmma_wait<0>();
  wgmma_keep(dp);
  leave(s.v_empty[v.stage]);
  v.next();
  int before = k.stage;  // the stage whose keys are still to be multiplied
  k.next();
  differ();
  round();
  bool begun = false;  // dq has something of this tile
  while (true) {       // products under way across a loop's end would be serialised: what is to overlap are operands
    const bool fresh = ahead == 0;  // the next tile of keys is for other queries
    if (fresh) {
      hand_back();
      parity ^= 1;
      barrier_wait(s.full, parity);
      if (!uniform(s.works[parity ^ 1].tiles)) break;
      take(s.works[parity ^ 1]);
    } else --ahead;
    start();
    add(before, begun);
    if (!fresh) hand_back();
    wgmma_wait<2>();
    wgmma_keep(p);
    weigh();
    wgmma_wait<1>();
    wgmma_keep(dp);
    leave(s.v_empty[v.stage]);
    v.next();
    differ();
    wgmma_keep(p);  // else it is made behind the wait
    if (fresh) {
      end_adding();
      finish(s.works[parity]);
    } else end_adding();
    leave(s.k_empty[before]);
    before = k.stage;
    k.next();
    begun = !fresh;
    round();
  }
  add(before, begun);
  end_adding();
  finish(s.works[parity]);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int D, bool CAPPED>
__global__ void __launch_bounds__(384, 1) softmax_sm90_backward_queries(const __grid_constant__ Args<T> args) {
  using S = Shared<T, D>;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  if (threadIdx.x == 0) {
    barrier_init(s.full, 1), barrier_init(s.empty, 8), barrier_init(s.o_empty, 8);
    for (int n = 0; n < S::K_STAGES; ++n) barrier_init(s.k_full[n], 1), barrier_init(s.k_empty[n], 8);
    for (int n = 0; n < S::V_STAGES; ++n) barrier_init(s.v_full[n], 1), barrier_init(s.v_empty[n], 8);
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
