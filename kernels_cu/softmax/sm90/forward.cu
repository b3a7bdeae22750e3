// what      Softmax attention on Hopper: one thread copies, the other warpgroups multiply.
// math      o = softmax(s) v,  s_ij = scale q_i . k_j, or cap tanh(scale q_i . k_j / cap);  lse_i = log sum_j e^s_ij; a
//           head's sink is one more weight of every row, without a value
// shapes    q [B, H, Tq, K], k [B, H / group, Tk, K], v [.., V], o [B, H, Tq, V], L [B, H, Tq] float32 or null: lse
// grid      as many blocks as multiprocessors; each takes the tiles of its column of `works`, in turn. Two warpgroups
//           consume, 64 queries each, or three where K and V are small; of one more one thread produces
// smem      Shared: a ring of queries, through which o leaves; rings of keys and of values; the tiles' Work
// barriers  q_full, k_full, v_full: a tile has arrived; q_empty, k_empty, v_empty: each consuming warp has left it.
//           Named: 1 + warpgroup, zeros stand; 4 + warpgroup, its turn to issue products
// numerics  scores, m, l, o in float32; e^(s - m) is rounded to T. m grows only where it would by more than SLACK in
//           base 2: o and l have the same m, so the result is exact
// source    Shah et al., "FlashAttention-3", 2024: roles, and the last tile's values under this tile's softmax. Here
//           the last tile may be another tile of queries': one loop over all of a block's tiles
// limits    sm_90a; half data; rows of whole 16 bytes; K of 64, 128, 192, V of 64, 128, at most K
#include "softmax_sm90.cuh"

constexpr float SLACK = 8.f;

template <typename T> struct Args {
  TensorMap q, k, v, o;  // boxes of 64 columns and: 64 tokens, KEYS, KEYS, 16
  Rows<T> out;           // o, for tiles that end within a sequence
  const Work* works;     // [rounds, gridDim.x]
  float* L;
  const float* sinks;  // [H] or null
  i64 H, group, Tq, V, left, right;
  double scale, softcap;
};

template <typename T, int K, int V, bool CAPPED> struct alignas(1024) Shared {
  static constexpr int WARPGROUPS = K == 64 && !CAPPED ? 3 : 2, QUERIES = 64 * WARPGROUPS, STAGES = K == 64 ? 4 : 2;
  static constexpr int KEYS = K > 128 ? 96 : 128, SLOTS = K > 128 ? 2 : 3;
  Tile<T, K, QUERIES> q[SLOTS];
  Tile<T, K, KEYS> k[STAGES];
  Tile<T, V, KEYS> v[STAGES];
  Work works[SLOTS], coming;
  Barrier q_full[SLOTS], q_empty[SLOTS], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

template <typename T, class S> __device__ __forceinline__ void produce(S& s, const Args<T>& args) {
  const Work* next = args.works + blockIdx.x;
  fetch_work(s.coming, next);
  prefetch_map(args.q), prefetch_map(args.k), prefetch_map(args.v), prefetch_map(args.o);
  Ring<S::STAGES> k, v;
  Ring<S::SLOTS> q;
  int token = -1, head = 0, batch = 0;  // of the tile whose values are still to come
  auto fetch_values = [&] {
    if (token < 0) return;
    barrier_wait(s.v_empty[v.at], v.parity ^ 1);
    barrier_expect(s.v_full[v.at], sizeof s.v[0]);
    load_tile<S::KEYS>(s.v[v.at], args.v, s.v_full[v.at], token, head, batch);
    v.next();
    token = -1;
  };
  while (true) {
    const Work at = take_work(s.coming, next);
    fetch_values();  // before a wait that may be long
    barrier_wait(s.q_empty[q.at], q.parity ^ 1);
    fence_async();  // after what consumers read and wrote there, before the copy engine writes
    s.works[q.at] = at;
    if (!at.blocks) {
      barrier_arrive(s.q_full[q.at]);
      return;
    }
    barrier_expect(s.q_full[q.at], sizeof s.q[0]);
    load_tile<64>(s.q[q.at], args.q, s.q_full[q.at], at.start, at.head, at.batch);
    q.next();
    const int shared_head = int(u32(at.head) / u32(args.group));
#pragma unroll 1
    for (int block = at.first + at.blocks - 1; block >= at.first; --block) {
      barrier_wait(s.k_empty[k.at], k.parity ^ 1);
      barrier_expect(s.k_full[k.at], sizeof s.k[0]);
      load_tile<S::KEYS>(s.k[k.at], args.k, s.k_full[k.at], at.others + block * S::KEYS, shared_head, at.batch);
      k.next();
      fetch_values();
      token = at.others + block * S::KEYS, head = shared_head, batch = at.batch;
    }
  }
}

template <typename T, int K, int V, bool CAPPED, class S>
__device__ __forceinline__ void consume(S& s, const Args<T>& args) {
  constexpr int KEYS = S::KEYS, WARPGROUPS = S::WARPGROUPS, FIRST_TURN = 4;
  constexpr bool TURNS = WARPGROUPS == 3;
  const int warpgroup = uniform(threadIdx.x / 128), own = 64 * warpgroup, lane = threadIdx.x & 31;
  const int row = own + threadIdx.x / 32 % 4 * 16 + lane / 4;  // this lane's first of a tile
  const float scale = size_of_scale(CAPPED ? args.softcap : args.scale);
  // What is made of float64 arguments is made here: float64 instructions in the loop took a quarter of its time.
  const bool negative = opaque(u32(args.scale < 0));
  const float inner = __uint_as_float(opaque(__float_as_uint(float(args.scale) * inverse(float(args.softcap)))));
  Ring<S::STAGES> k, v;
  Ring<S::SLOTS> q;
  float scores[KEYS / 2], o[V / 2], sum[2], kept[2];
  RowMaximum most[2];
  u32 weights[KEYS / 16][4];
  bool leaving = false;             // lane 0: this warp's o may still be read, in the slot of the queries before
  int last = 0;                     // that slot
  int first, ahead, shift, length;  // of the tile at hand; it comes behind `ahead` others, from the last to the first
  int valid;                        // tokens of the tile whose values are read next

  auto take_turn = [&] {
    if (TURNS) barrier_sync(FIRST_TURN + warpgroup, 256);
  };
  auto pass_turn = [&] {
    if (TURNS) barrier_pass(FIRST_TURN + (warpgroup + 1 == WARPGROUPS ? 0 : warpgroup + 1), 256);
  };
  auto leave = [&](Barrier& b) {
    if (lane == 0) barrier_arrive(b);
  };
  auto hand_back = [&] {  // the slot from which o has left
    if (leaving) {
      tensor_store_wait();
      barrier_arrive(s.q_empty[last]);
      leaving = false;
    }
  };
  auto begin = [&](const Work& at) {
    first = uniform(at.first), ahead = uniform(at.blocks) - 1;
    shift = uniform(at.shift), length = uniform(at.length);
  };
  auto score = [&] {
    const u64 a = wgmma_tile(s.q[q.at][0] + own * PANEL, 16, 1024), b = wgmma_tile(s.k[k.at][0], 16, 1024);
#pragma unroll
    for (int n = 0; n < K / 16; ++n)
      wgmma<T, KEYS, false>(scores, a + n / 4 * (S::QUERIES * 128 / 16) + n % 4 * 2,
                            b + n / 4 * (KEYS * 128 / 16) + n % 4 * 2, n > 0);
    wgmma_commit();
  };
  auto read = [&](bool begun) {
    if (valid < KEYS) zero_rows(s.v[v.at], valid, warpgroup);
    const u64 b = wgmma_tile(s.v[v.at][0], KEYS * 128, 1024);
    wgmma_fence();  // the wait before may be a branch
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) wgmma<T, V, true>(o, weights[n], b + n * (16 * 128 / 16), n > 0 || begun);
    wgmma_commit();
  };
  // Call it at the beginning of a branch that the whole warpgroup takes: the assembler moves a wait to the beginning of
  // its basic block, before what is to be computed under the product.
  auto end_reading = [&] {
    wgmma_wait<0>();
    wgmma_keep(o);
  };
  // Scores become weights; earlier weights are to be multiplied by `kept`.
  auto weigh = [&] {
    const int key = (first + ahead) * KEYS, diagonal = shift + own;
    valid = min(KEYS, length - key);
    if (CAPPED) {
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] = tanh_of(inner * scores[n]);
    } else if (negative)
#pragma unroll
      for (int n = 0; n < KEYS / 2; ++n) scores[n] = -scores[n];
    if (partly_seen<64, KEYS>(key, diagonal, int(args.left), int(args.right), length))
      mask_rows(scores, key, shift + row, int(args.left), int(args.right), length, minus_infinity());
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float part[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) part[n] = max(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]);
#pragma unroll
      for (int n = 4; n < KEYS / 8; ++n)
        part[n % 4] = max(part[n % 4], max(scores[4 * n + 2 * half], scores[4 * n + 2 * half + 1]));
      const float largest = row_max(max(max(part[0], part[1]), max(part[2], part[3])));
      kept[half] = most[half].raise(largest, scale, SLACK);
      float sums[2] = {sum[half] * kept[half], 0.f};
#pragma unroll
      for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          float& p = scores[4 * n + 2 * half + x];
          p = exp2_approx(fmaf(most[half].factor, p, -most[half].shift));
          sums[x] += p;
        }
      sum[half] = sums[0] + sums[1];
    }
    wgmma_keep(sum);  // else they are added up behind the wait for o
  };
  auto round_weights = [&] {
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n)
#pragma unroll
      for (int r = 0; r < 4; ++r) weights[n][r] = pack<T>(scores[8 * n + 2 * r], scores[8 * n + 2 * r + 1]);
  };
  auto finish = [&](int slot, const float (&shift)[2], const float (&sum)[2]) {
    const Work& at = s.works[slot];
    float by[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sink = args.sinks ? LOG2E * args.sinks[at.head] : minus_infinity();
      const RowEnd end = row_end(RowMaximum::score_of(shift[half], scale), row_sum(sum[half]), sink);
      by[half] = end.factor;
      if (args.L && lane % 4 == 0 && row + 8 * half < at.count)
        args.L[(i64(at.part) * args.H + at.head) * args.Tq + at.start + row + 8 * half] = end.logarithm / LOG2E;
    }
    store_rows(args.o, args.out, args.V, o, by[0], by[1], s.q[slot], own, at);
    leaving = lane == 0;
  };

  barrier_wait(s.q_full[0], 0);
  if (!uniform(s.works[0].blocks)) return;
  begin(s.works[0]);
  most[0] = most[1] = {scale}, sum[0] = sum[1] = 0.f;
  if (TURNS && warpgroup == WARPGROUPS - 1) pass_turn();  // the first one may begin
  barrier_wait(s.k_full[0], 0);
  wgmma_fence();
  score();
  wgmma_wait<0>();
  wgmma_keep(scores);
  leave(s.k_empty[0]);
  k.next();
  weigh();
  round_weights();
  bool begun = false;  // o has something of this tile
  while (true) {       // products under way across a loop's end would be serialised: what is to overlap are operands
    const bool fresh = ahead == 0;  // the next tile of keys is for other queries
    if (fresh) {
      hand_back();
      last = q.at;
      q.next();
      barrier_wait(s.q_full[q.at], q.parity);
      if (!uniform(s.works[q.at].blocks)) break;
    } else --ahead;
    barrier_wait(s.k_full[k.at], k.parity);
    take_turn();
    wgmma_fence();
    score();
    barrier_wait(s.v_full[v.at], v.parity);
    read(begun);
    pass_turn();
    if (fresh) begin(s.works[q.at]);
    else hand_back();
    wgmma_wait<1>();
    wgmma_keep(scores);
    leave(s.k_empty[k.at]);
    k.next();
    const float last_shift[2] = {most[0].shift, most[1].shift}, last_sum[2] = {sum[0], sum[1]};
    if (fresh) most[0].shift = most[1].shift = RowMaximum::NONE, sum[0] = sum[1] = 0.f;
    weigh();
    if (fresh) {
      end_reading();
      finish(last, last_shift, last_sum);
    } else {
      end_reading();
      if (__any_sync(0xffffffffu, kept[0] != 1.f || kept[1] != 1.f))
#pragma unroll
        for (int n = 0; n < V / 2; ++n) o[n] *= kept[n / 2 % 2];
    }
    leave(s.v_empty[v.at]);
    v.next();
    begun = !fresh;
    round_weights();
  }
  barrier_wait(s.v_full[v.at], v.parity);
  read(begun);
  end_reading();
  finish(last, {most[0].shift, most[1].shift}, sum);
  if (lane == 0) tensor_store_wait();
}

template <typename T, int K, int V, bool CAPPED>
__global__ void __launch_bounds__(128 * Shared<T, K, V, CAPPED>::WARPGROUPS + 128, 1)
    softmax_sm90_forward(const __grid_constant__ Args<T> args) {
  using S = Shared<T, K, V, CAPPED>;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  constexpr int CONSUMERS = 128 * S::WARPGROUPS;
  if (threadIdx.x == 0) {
    for (int n = 0; n < S::SLOTS; ++n) barrier_init(s.q_full[n], 1), barrier_init(s.q_empty[n], CONSUMERS / 32);
    for (int n = 0; n < S::STAGES; ++n) {
      barrier_init(s.k_full[n], 1), barrier_init(s.k_empty[n], CONSUMERS / 32);
      barrier_init(s.v_full[n], 1), barrier_init(s.v_empty[n], CONSUMERS / 32);
    }
    fence_async();  // the copy engine sees the barriers
  }
  __syncthreads();  // the barriers stand
  if (threadIdx.x < CONSUMERS) {
    registers_up<S::WARPGROUPS == 2 ? 240 : 160>();
    consume<T, K, V, CAPPED>(s, args);
  } else {
    registers_down<S::WARPGROUPS == 2 ? 24 : 32>();
    if (threadIdx.x == CONSUMERS) produce(s, args);
  }
}
