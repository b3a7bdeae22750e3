// what      GLA with a value gate beside the gate, token by token.
// math      S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T,   o_t = scale q_t^T S_t
// shapes    q k g [B, H, T, K], v gv o [B, H, T, V], initial and final state [N, H, K, V] float32
// grid      a block for every (sequence, head, 32 columns of V), sequence slowest; 128 threads: a lane a column,
//           a warp a quarter of the channels
// smem      Shared<BK>: 16 tokens of q, k, v and the decays, and the warps' parts of o
// barriers  three every 16 tokens: tiles loaded | exps taken | parts written; the first also frees those parts. Where a
//           gate is above 0 a fourth: gates loaded again
// numerics  float32 throughout. Beside a gate above 0 decays are exp(g + gv), since either may leave the range alone
// source    Yang et al., 2024, section 4.1
// limits    K <= BK; BK of 64, 128, 256
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, SLAB = 16, BV = 32;

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v;
  Rows<const G> g, gv;
  Rows<T> o;
  const float* initial;  // [N, H, K, V] or null
  float* final;          // [N, H, K, V] or null
  Shape shape;
  double scale;
};

template <int BK> struct Shared {
  float q[SLAB * BK];               // [16, BK]
  float k[SLAB * BK];               // [16, BK]
  float a[SLAB * BK];               // [16, BK], gates, then decays, or gates where one is above 0
  float v[SLAB * BV];               // [16, BV]
  float av[SLAB * BV];              // [16, BV], likewise
  float partial[WARPS][SLAB * BV];  // [16, BV], o over each warp's channels
};

template <typename T, typename G, int BK>
__global__ void __launch_bounds__(THREADS, 2) value_gate_recurrent(const Args<T, G> args) {
  constexpr int EACH = BK / WARPS;  // channels a thread
  Shared<BK>& s = *reinterpret_cast<Shared<BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 tiles = (shape.V + BV - 1) / BV, v_tile = blockIdx.x % tiles * BV, h = blockIdx.x / tiles % shape.H;
  const i64 n = blockIdx.x / tiles / shape.H, b = n / shape.count;
  const Span span = tokens_of(shape, n % shape.count);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, c0 = warp * EACH;
  const i64 state_at = (n * shape.H + h) * shape.K * shape.V + v_tile + lane;
  const bool owns = v_tile + lane < shape.V;
  const float scale = float(args.scale);

  float S[EACH];
#pragma unroll
  for (int c = 0; c < EACH; ++c)
    S[c] = args.initial && c0 + c < shape.K && owns ? args.initial[state_at + (c0 + c) * shape.V] : 0.f;
  for (i64 first = span.start; first < span.stop; first += SLAB) {
    const i64 stop = span.stop;
    load_tile<SLAB, BK, BK, THREADS>(s.q, args.q, b, h, first, stop, 0, shape.K);
    load_tile<SLAB, BK, BK, THREADS>(s.k, args.k, b, h, first, stop, 0, shape.K);
    load_tile<SLAB, BV, BV, THREADS>(s.v, args.v, b, h, first, stop, v_tile, shape.V);
    const auto load_gates = [&] {
      load_tile<SLAB, BK, BK, THREADS>(s.a, args.g, b, h, first, stop, 0, shape.K);
      load_tile<SLAB, BV, BV, THREADS>(s.av, args.gv, b, h, first, stop, v_tile, shape.V);
      __syncthreads();  // the tiles stand; all have read the parts
    };
    const auto go = [&](auto decayed) {
#pragma unroll 1
      for (int r = 0; r < SLAB; ++r) {  // rows past the last token write nothing and keep all
        const float v = s.v[r * BV + lane], av = s.av[r * BV + lane];
        float o = 0.f;
#pragma unroll
        for (int c = 0; c < EACH; ++c) {
          const int at = r * BK + c0 + c;
          S[c] = fmaf(s.k[at], v, decayed(S[c], s.a[at], av));
          o = fmaf(s.q[at], S[c], o);
        }
        s.partial[warp][r * BV + lane] = o;
      }
    };
    load_gates();
    float most = 0.f;
    const auto take_exp = [&](float& x) { most = fmaxf(most, x), x = decay_of(x); };
    for (int at = threadIdx.x; at < SLAB * BK; at += THREADS) take_exp(s.a[at]);
    for (int at = threadIdx.x; at < SLAB * BV; at += THREADS) take_exp(s.av[at]);
    if (__syncthreads_or(most > 0.f)) {  // the decays stand
      load_gates();
      go([](float x, float a, float av) { return grown(x, a + av); });
    } else {
      go([](float x, float a, float av) { return a * av * x; });
    }
    __syncthreads();  // the parts stand; the tiles may be overwritten
    for (int at = threadIdx.x; at < SLAB * BV; at += THREADS) {
      const i64 row = first + at / BV, column = v_tile + at % BV;
      if (row >= stop || column >= shape.V) continue;
      const float sum = (s.partial[0][at] + s.partial[1][at]) + (s.partial[2][at] + s.partial[3][at]);
      args.o.row(b, h, row)[column] = from_float<T>(scale * sum);
    }
  }
  if (args.final && owns)
#pragma unroll
    for (int c = 0; c < EACH; ++c)
      if (c0 + c < shape.K) args.final[state_at + (c0 + c) * shape.V] = S[c];
}
