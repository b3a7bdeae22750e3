// what      One token for B sequences; each state is read and written once, in place.
// math      o = scale q^T S', S' = diag(exp g) S + k v^T   (RWKV-6: o = scale q^T (S + diag(u) k v^T))
// shapes    q k g [B, H, K], v o [B, H, V], u [H, K], state [P, H, K, V], slots [B] or null
// grid      a block for every (sequence, head, 64 columns of V), sequence slowest; 128 threads: 4 columns and every
//           eighth channel each
// smem      StepTile: q, k, decay and bonus of 64 channels, then the rows' parts of o
// barriers  two for every 64 channels: they stand | they are read; one more: the parts of o stand
// numerics  float32, whatever the state is stored in
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19
// limits    the last axis of the state is contiguous
//
// Eight pieces of the state are on their way to a thread before it writes the first: that is what hides the memory's
// latency, since the compiler may not move a load before a store.
#include "policy.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, BV = 64, PIECE = 4, LANES = BV / PIECE, ROWS = THREADS / LANES, EACH = 8;

template <typename T, typename G, typename S> struct StepArgs {
  Rows<const T> q, k, v;  // the time stride is not used
  Rows<const G> g;
  Rows<T> o;
  const float* u;      // [H, K], null for GLA
  Rows<S> state;       // rows are channels
  const i64* slots;    // or null: sequence b has state b
  i64 H, K, V;
  double scale;
  i64 vectors;         // whether every row of the state is whole pieces of 4
};

struct StepTile {
  float q[ROWS * EACH], k[ROWS * EACH], decay[ROWS * EACH], u[ROWS * EACH];
  float parts[ROWS][BV];
};

template <typename S> struct alignas(PIECE * sizeof(S)) Piece {
  S x[PIECE];
};

// 4 neighbours of which `count` exist, the others 0.
template <typename S> __device__ __forceinline__ void load(float (&x)[PIECE], const S* from, int count, bool vector) {
  Piece<S> piece;
  if (vector && count > 0) piece = *reinterpret_cast<const Piece<S>*>(from);
#pragma unroll
  for (int i = 0; i < PIECE; ++i) x[i] = i >= count ? 0.f : to_float(vector ? piece.x[i] : from[i]);
}

template <typename S> __device__ __forceinline__ void store(S* to, const float (&x)[PIECE], int count, bool vector) {
  Piece<S> piece;
#pragma unroll
  for (int i = 0; i < PIECE; ++i) piece.x[i] = from_float<S>(x[i]);
  if (vector && count > 0) *reinterpret_cast<Piece<S>*>(to) = piece;
#pragma unroll
  for (int i = 0; i < PIECE; ++i)
    if (!vector && i < count) to[i] = piece.x[i];
}

template <class Policy, typename T, typename G, typename S>
__global__ void __launch_bounds__(THREADS) step(const StepArgs<T, G, S> args) {
  StepTile& s = *reinterpret_cast<StepTile*>(dynamic_smem());
  const i64 tiles = (args.V + BV - 1) / BV, h = blockIdx.x / tiles % args.H, b = blockIdx.x / tiles / args.H;
  const int lane = threadIdx.x % LANES, row = threadIdx.x / LANES;
  const i64 column = blockIdx.x % tiles * BV + lane * PIECE, slot = args.slots ? args.slots[b] : b;
  const int count = int(args.V - column);
  float v[PIECE], o[PIECE] = {};
  load(v, args.v.row(b, h, 0) + column, count, false);

  const i64 apart = ROWS * args.state.t;
  S* at = args.state.row(slot, h, row) + column;
  const int K = int(args.K);
  for (int first = 0; first < K; first += ROWS * EACH, at += EACH * apart) {
    float state[EACH][PIECE];
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      load(state[n], at + n * apart, first + row + n * ROWS < K ? count : 0, args.vectors);
    const int mine = first + threadIdx.x;
    if (threadIdx.x < ROWS * EACH && mine < K) {
      s.q[threadIdx.x] = to_float(args.q.row(b, h, 0)[mine]);
      s.k[threadIdx.x] = to_float(args.k.row(b, h, 0)[mine]);
      s.decay[threadIdx.x] = decay_of(to_float(args.g.row(b, h, 0)[mine]));
      if (Policy::reads_before_write) s.u[threadIdx.x] = args.u[h * args.K + mine];
    }
    __syncthreads();  // the channels' numbers stand
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
      const int c = row + n * ROWS;
      if (first + c >= K) break;
      float (&x)[PIECE] = state[n];
#pragma unroll
      for (int i = 0; i < PIECE; ++i) {
        const float kv = s.k[c] * v[i], after = fmaf(s.decay[c], x[i], kv);
        o[i] = fmaf(s.q[c], Policy::reads_before_write ? fmaf(s.u[c], kv, x[i]) : after, o[i]);
        x[i] = after;
      }
      store(at + n * apart, x, count, args.vectors);
    }
    __syncthreads();  // they are read
  }
#pragma unroll
  for (int i = 0; i < PIECE; ++i) s.parts[row][lane * PIECE + i] = o[i];
  __syncthreads();  // the parts of o stand
  const i64 mine = blockIdx.x % tiles * BV + threadIdx.x;
  if (threadIdx.x >= BV || mine >= args.V) return;
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < ROWS; ++n) sum += s.parts[n][threadIdx.x];
  args.o.row(b, h, 0)[mine] = from_float<T>(float(args.scale) * sum);
}
