// what      One token for B sequences; each state is read and written once, in place.
// math      o = scale q^T S', S' = diag(exp g) S + k v^T   (RWKV-6: o = scale q^T (S + diag(u) k v^T))
// shapes    q k g [B, H, K], v o [B, H, V], u [H, K], state [P, H, K, V], slots [B] or null
// grid      a block for every (sequence, head, 32 columns of V), sequence slowest; 128 threads: a lane a column,
//           a warp every fourth channel
// smem      StepTile: the warps' parts of o
// barriers  one: the parts of o stand
// numerics  float32, whatever the state is stored in
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19
// limits    the last axis of the state is contiguous
#include "policy.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32, BV = 32;

template <typename T, typename G, typename S> struct StepArgs {
  Rows<const T> q, k, v;  // the time stride is not used
  Rows<const G> g;
  Rows<T> o;
  const float* u;      // [H, K], null for GLA
  Rows<S> state;       // rows are channels
  const i64* slots;    // or null: sequence b has state b
  i64 H, K, V;
  double scale;
};

struct StepTile {
  float partial[WARPS][BV];
};

template <class Policy, typename T, typename G, typename S>
__global__ void __launch_bounds__(THREADS) step(const StepArgs<T, G, S> args) {
  StepTile& s = *reinterpret_cast<StepTile*>(dynamic_smem());
  const i64 tiles = (args.V + BV - 1) / BV, h = blockIdx.x / tiles % args.H, b = blockIdx.x / tiles / args.H;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 column = blockIdx.x % tiles * BV + lane, slot = args.slots ? args.slots[b] : b;
  const bool owns = column < args.V;
  const float v = owns ? to_float(args.v.row(b, h, 0)[column]) : 0.f;

  float o = 0.f;
#pragma unroll 4
  for (i64 c = warp; c < args.K; c += WARPS) {
    const float kv = to_float(args.k.row(b, h, 0)[c]) * v;
    S* at = args.state.row(slot, h, c) + column;
    const float before = owns ? to_float(*at) : 0.f;
    const float after = fmaf(decay_of(to_float(args.g.row(b, h, 0)[c])), before, kv);
    const float read = Policy::reads_before_write ? fmaf(args.u[h * args.K + c], kv, before) : after;
    o = fmaf(to_float(args.q.row(b, h, 0)[c]), read, o);
    if (owns) *at = from_float<S>(after);
  }
  s.partial[warp][lane] = o;
  __syncthreads();  // the parts of o stand
  if (warp == 0 && owns) {
    o = (s.partial[0][lane] + s.partial[1][lane]) + (s.partial[2][lane] + s.partial[3][lane]);
    args.o.row(b, h, 0)[column] = from_float<T>(float(args.scale) * o);
  }
}
