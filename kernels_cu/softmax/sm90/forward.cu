// what      softmax_forward on Hopper: producer warps fetch keys and values, two consumer warpgroups multiply.
// math      that of softmax_forward; while a tile's scores become weights, the last tile's weights multiply its values
// shapes    q k [B, H, T, K], v o [B, H, T, V], L [B, H, T] float32: log2 sum_j 2^(s_ij log2 e)
// grid      a block for every QUERIES queries of a (sequence, head), those that see most keys first. Eight warps
//           consume,
//           16 queries each; four produce
// smem      Shared: the queries, then o; two tiles of keys and of values. Rows of 128 bytes in the tensor cores'
//           swizzle
// barriers  keys[stage], values[stage]: they have arrived (the queries with the first keys); keys_read[stage],
//           values_read[stage]: the consumers are done with them; enum Named
// numerics  scores, m, l and o in float32; e^(s - m) is rounded to T before it multiplies v
// source    Shah et al., "FlashAttention-3", 2024, algorithm 2 and section 3.2 for the overlap
// limits    sm_90a; half data; K, V <= D; D of 64, 128
#include "softmax.cuh"
#include "wgmma.cuh"
#include "tensor.cuh"

constexpr int QUERIES = 128, KEYS = 128, PANEL = 64, STAGES = 2;
constexpr int CONSUMERS = 256;

enum Named { QUERIES_READ = 1 };

template <typename T, int D> struct alignas(1024) Shared {
  T q[D / PANEL][QUERIES * PANEL];
  T k[STAGES][D / PANEL][KEYS * PANEL];
  T v[STAGES][D / PANEL][KEYS * PANEL];
  Barrier keys[STAGES], values[STAGES], keys_read[STAGES], values_read[STAGES];
  WorkTile at;
};

template <int N>
__device__ __forceinline__ float (&flat(Fragment<1, N>& d)) [N / 2] { return reinterpret_cast<float (&)[N / 2]>(d); }

template <typename T, int D>
__device__ __forceinline__ void produce(Shared<T, D>& s, const SoftmaxForwardArgs<T>& args, int seen) {
  auto hand_over = [&](Barrier& b) {
    if (args.vectors) copies_arrive(b);
    else barrier_arrive(b);
  };
  for (int panel = 0; panel < D / PANEL; ++panel)
    fetch<QUERIES, PANEL>(s.q[panel], args.q, s.at, s.at.first, args.shape.K, args.vectors, panel * PANEL);
  for (int n = 0; n * KEYS < seen; ++n) {
    const int stage = n % STAGES, before = n / STAGES - 1 & 1;
    if (n >= STAGES) barrier_wait(s.keys_read[stage], before);
    for (int panel = 0; panel < D / PANEL; ++panel)
      fetch<KEYS, PANEL>(s.k[stage][panel], args.k, s.at, n * KEYS, args.shape.K, args.vectors, panel * PANEL);
    hand_over(s.keys[stage]);
    if (n >= STAGES) barrier_wait(s.values_read[stage], before);
    for (int panel = 0; panel < D / PANEL; ++panel)
      fetch<KEYS, PANEL>(s.v[stage][panel], args.v, s.at, n * KEYS, args.shape.V, args.vectors, panel * PANEL);
    hand_over(s.values[stage]);
  }
}

template <typename T, int D>
__device__ __forceinline__ void consume(Shared<T, D>& s, const SoftmaxForwardArgs<T>& args, int seen) {
  const WorkTile& at = s.at;
  const int lane = threadIdx.x & 31, row = threadIdx.x / 32 * 16, query = at.first + row;  // the warp's first
  const float scale = size_of_scale(args.scale);

  auto wait_for = [](Barrier& b, int iteration) {
    barrier_wait(b, iteration & 1);
    fence_async();  // what was copied can be read by wgmma
  };

  u32 q[D / 16][4];
  wait_for(s.keys[0], 0);
#pragma unroll
  for (int k = 0; k < D / 16; ++k) {
    ldmatrix_x4(q[k], piece_of<PANEL>(s.q[k / 4], row + lane % 16, k % 4 * 2 + lane / 16));
    if (args.scale < 0)
#pragma unroll
      for (int r = 0; r < 4; ++r) q[k][r] ^= 0x80008000;
  }
  barrier_sync(QUERIES_READ, CONSUMERS);  // o may take their place

  Fragment<1, KEYS> p;
  Fragment<1, D> o = {};
  u32 weights[KEYS / 16][4];
  float most[2] = {minus_infinity(), minus_infinity()}, sum[2] = {}, kept[2];
  auto score = [&](int stage) {
#pragma unroll
    for (int k = 0; k < D / 16; ++k)
      wgmma<T, KEYS, false>(flat<KEYS>(p), q[k], wgmma_tile(s.k[stage][k / 4], 16, 1024) + k % 4 * 32 / 16, k > 0);
    wgmma_commit();
  };
  auto read = [&](int stage) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
      wgmma<T, D, true>(flat<D>(o), weights[k], wgmma_tile(s.v[stage], KEYS * 128, 1024) + k * 16 * 128 / 16, true);
    wgmma_commit();
  };
  auto weigh_tile = [&](int first) {
    if (first + KEYS > at.length || args.causal && first + KEYS - 1 > query)
      each<1, KEYS>(p, [&](float& x, int, int half, int column) {
        const int last = args.causal ? min(query + 8 * half + lane / 4, at.length - 1) : at.length - 1;
        if (first + column > last) x = minus_infinity();
      });
#pragma unroll
    for (int half = 0; half < 2; ++half) kept[half] = weigh<KEYS>(p[0], half, scale, most[half], sum[half]);
  };
  auto round_weights = [&] {
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float (&from)[4] = p[0][2 * k + r / 2];
        weights[k][r] = pack<T>(from[r % 2 * 2], from[r % 2 * 2 + 1]);
      }
  };
  auto leave = [&](Barrier& b) {
    if (lane == 0) barrier_arrive(b);
  };

  wgmma_fence();
  score(0);
  wgmma_wait<0>();
  wgmma_keep(flat<KEYS>(p));
  leave(s.keys_read[0]);
  weigh_tile(0);
  round_weights();
  int n = 1;
  for (; n * KEYS < seen; ++n) {
    const int stage = n % STAGES, before = (n - 1) % STAGES;
    wait_for(s.keys[stage], n / STAGES);
    wgmma_fence();
    score(stage);
    wait_for(s.values[before], (n - 1) / STAGES);
    read(before);
    wgmma_wait<1>();
    wgmma_keep(flat<KEYS>(p));
    leave(s.keys_read[stage]);
    weigh_tile(n * KEYS);
    wgmma_wait<0>();
    wgmma_keep(flat<D>(o));
    leave(s.values_read[before]);
    each<1, D>(o, [&](float& x, int, int half, int) { x *= kept[half]; });
    round_weights();
  }
  wait_for(s.values[(n - 1) % STAGES], (n - 1) / STAGES);
  wgmma_fence();
  read((n - 1) % STAGES);
  wgmma_wait<0>();
  wgmma_keep(flat<D>(o));

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = row_sum(sum[half]);
    const int token = query + 8 * half + lane / 4;
    if (args.L && lane % 4 == 0 && token < at.length) args.L[at.row + token] = scale * most[half] + log2f(sum[half]);
  }
  auto normaliser = [&](int, int half) { return 1.f / sum[half]; };
  store<D, 1>(o, normaliser, s.q[0], row, args.o, at, query, args.shape.V, args.vectors);
}

template <typename T, int D>
__global__ void __launch_bounds__(CONSUMERS + THREADS, 1) softmax_sm90_forward(const SoftmaxForwardArgs<T> args) {
  Shared<T, D>& s = *reinterpret_cast<Shared<T, D>*>(dynamic_smem());
  static_assert(sizeof(s) == 2 * D * (128 + 4 * 128) + 1024, "what the host asks for");
  const Shape& shape = args.shape;
  const u32 pairs = u32(shape.B * shape.H);
  if (threadIdx.x == 0) {
    s.at = work_tile(shape, int(shape.NC - 1 - blockIdx.x / pairs), blockIdx.x % pairs);
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.keys[stage], THREADS);
      barrier_init(s.values[stage], THREADS);
      barrier_init(s.keys_read[stage], CONSUMERS / 32);
      barrier_init(s.values_read[stage], CONSUMERS / 32);
    }
  }
  __syncthreads();  // the place and the barriers stand
  const int seen = args.causal ? min(s.at.first + QUERIES, s.at.length) : s.at.length;
  if (threadIdx.x < CONSUMERS) {
    registers_up<240>();
    consume(s, args, seen);
  } else {
    registers_down<24>();
    produce(s, args, seen);
  }
}
