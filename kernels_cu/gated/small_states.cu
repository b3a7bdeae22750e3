// what      What segments of sequences with heads of at most 16 channels and columns leave behind by themselves: the
//           state, and, backwards in time, the gradient of the state before them.
// math      S <- diag(exp g_t) S + k_t v_t^T;   backwards C <- diag(exp g_t) (C + scale q_t do_t^T)  (RWKV-6: diag(exp
//           g_t) C + scale q_t do_t^T)
// shapes    q k g [B, H, T, K], v do [B, H, T, V], initial, dht [N, H, K, V] float32 without `dht` and do: left [N P,
//           H, K, V], decays [N P, H, 2, K] float32, as scan_segments.cu has them; of both directions: left [2, N P,
//           H, K, V], decays [2, N P, H, K], as backward_states.cu leaves them
// grid      a warp for every 64 / D heads of all segments that are needed, directions slowest; a lane has two columns
//           of a head's state
// smem      two steps of a warp's tokens, the decays of one
// barriers  of warps, two a step: tokens have arrived and their decays are there | they are read
// numerics  float32 throughout
// source    Yang et al., 2024, eq. 3; Blelloch, 1990, section 1.4.1
// limits    K, V <= D; D of 8, 16
#include "gated/small_heads.cuh"

constexpr int WARPS = 4;

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v, do_;  // of both directions: q and do_ too
  Rows<const G> g;
  const float *initial, *dht;  // null where there is none
  float *left, *decays;
  Shape shape;
  double scale;
  i64 of, needed;  // of so many segments in turn so many are computed
  i64 both;        // whether directions are two: then all segments are launched
  i64 bytes;       // all rows are whole pieces of so many: 16, 8, 4 or 2
};

template <typename T, typename G, int D> struct Shared {
  struct Warp {
    struct Stage {
      Tile<T, D, D / 2> x, y;  // k and v, or q and do
      Tile<G, D, D / 2> g;
    } stages[2];
    Tile<float, D, D / 2> decays;
  } warps[WARPS];
};

template <class ReadOrder, typename T, typename G, int D>
__global__ void __launch_bounds__(32 * WARPS, D == 8 ? sizeof(G) == 2 ? 5 : 4 : 3)
    gated_small_states(const Args<T, G> args) {
  constexpr int LANES = D / 2;
  using Inputs = Tile<T, D, LANES>;
  const int warp = threadIdx.x >> 5;
  auto& s = reinterpret_cast<Shared<T, G, D>*>(dynamic_smem())->warps[warp];
  const Shape& shape = args.shape;
  const LaneOf<LANES> me;
  const u32 half = args.both ? gridDim.x / 2 : gridDim.x;
  const bool backwards = blockIdx.x >= half;
  Head at = head_of(shape, ((blockIdx.x - backwards * half) * WARPS + warp) * Inputs::HEADS + me.head, u32(args.of),
                    u32(args.needed));
  const int K = int(shape.K), V = int(shape.V), bytes = int(args.bytes), column = 2 * me.lane, P = int(args.of);
  const int segment = backwards ? P - 1 - int(at.n % P) : int(at.n % P);
  const i64 size = i64(K) * V, slot = (backwards * (shape.B * shape.count) + at.n) * shape.H + at.h;

  float S[D][2] = {}, whole[2] = {1.f, 1.f};
  const auto each = [&](auto f) {
#pragma unroll
    for (int c = 0; c < D; ++c)
#pragma unroll
      for (int x = 0; x < 2; ++x)
        if (at.n >= 0 && c < K && column + x < V) f(S[c][x], c * V + column + x);
  };
  if (args.both && segment == 0) {  // it starts from what is given, which has its place among the others
    const float* given = backwards ? args.dht : args.initial;
    each([&](float& x, int place) {
      if (given) x = given[(at.n / P * shape.H + at.h) * size + place];
      args.left[slot * size + place] = x;
    });
  }
  if (args.both && segment == P - 1) at.n = -1, at.tokens = 0;  // nobody needs what the last one leaves

  const auto& tiles = s.stages[0];
  const auto xs = pieces_of(tiles.x, backwards ? args.q : args.k, at, me.lane);
  const auto ys = pieces_of(tiles.y, backwards ? args.do_ : args.v, at, me.lane);
  const auto gs = pieces_of(tiles.g, args.g, at, me.lane);
  const int most = most_tokens<LANES>(at.tokens), last = (most - 1) / STEP * STEP;
  const auto fetch_step = [&](int n) {
    const int token = backwards ? last - n : n, left = at.tokens - token;
    auto& to = s.stages[n / STEP % 2];
    fetch(to.x, xs, me.head, me.lane, token, left, K, bytes);
    fetch(to.y, ys, me.head, me.lane, token, left, V, bytes);
    fetch(to.g, gs, me.head, me.lane, token, left, K, bytes);
    cp_async_commit();
  };
  const float scale = backwards ? float(args.scale) : 1.f;
  const bool early = backwards && !ReadOrder::reads_before_write;  // the token comes before its gate
  if (most) fetch_step(0);
#pragma unroll 1
  for (int n = 0; n < most; n += STEP) {
    const auto& in = s.stages[n / STEP % 2];
    cp_async_wait<0>();
    put_decays(s.decays, in.g, me.head, me.lane);
    __syncwarp();  // the tokens have arrived, and their decays are in shared memory
    if (n + STEP < most) fetch_step(n + STEP);
    const auto take = [&](int i) {
      float x[D], a[D], own[2], y[2];
      in.x.row(x, i, me.head), in.y.row(y, i, me.head, column);
      s.decays.row(a, i, me.head), s.decays.row(own, i, me.head, column);
      y[0] *= scale, y[1] *= scale, whole[0] *= own[0], whole[1] *= own[1];
#pragma unroll
      for (int c = 0; c < D; ++c)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          S[c][j] = early ? a[c] * fmaf(x[c], y[j], S[c][j]) : fmaf(a[c], S[c][j], x[c] * y[j]);
    };
    if (backwards) {
#pragma unroll
      for (int i = STEP - 1; i >= 0; --i) take(i);
    } else {
#pragma unroll
      for (int i = 0; i < STEP; ++i) take(i);
    }
    __syncwarp();  // they are read
  }
  const i64 next = args.both ? slot + (backwards ? -shape.H : shape.H) : slot;
  each([&](float& x, int place) { args.left[next * size + place] = x; });
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    if (at.n < 0 || column + j >= K) continue;
    float* decay = args.decays + slot * (args.both ? K : 2 * K) + column + j;
    *decay = whole[j];
    if (!args.both) decay[K] = 1.f;
  }
}
