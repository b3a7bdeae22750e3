// what      GLA and RWKV-6 forward in one pass: q, k, v, g are read once, o is written once, nothing else moves.
// math      per sub-chunk of 16:  o = scale ((q decayed) S + A v),   S <- diag(decay) S + (k decayed)^T v
// shapes    q k g [B, H, T, K], v o [B, H, T, V], u [H, K], initial and final state [N, H, K, V] float32
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; a warp for every 16 of the columns
// smem      SubChunk: the 16 tokens at hand as floats; Incoming: the next 16 as they come from memory
// barriers  four a sub-chunk: tiles arrived | spread | scores done | queries and keys decayed
// numerics  S stays in float32 accumulators; products are tf32, three of them for float32 data (product.cuh)
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    K <= BK; BK of 64, 128, 256; BV of 64, 128
#include "read_order.cuh"
#include "product.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "subchunk.cuh"
#include "tensor.cuh"

constexpr int LDA = SUB + 4;

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v;
  Rows<const G> g;
  Rows<T> o;
  const float *u, *initial;  // [H, K] and [N, H, K, V]; null where there is none
  float* final;              // [N, H, K, V] or null
  Shape shape;
  double scale;
  i64 vectors;  // whether all rows of q, k, v and g are whole pieces of 16 bytes
};

template <typename T, typename G, int BK, int BV> struct alignas(16) Incoming {
  T q[SUB * BK];  // [16, BK]
  T k[SUB * BK];  // [16, BK]
  G g[SUB * BK];  // [16, BK]
  T v[SUB * BV];  // [16, BV]
};

template <int BK, int BV> struct alignas(16) SubChunk {
  float q[SUB * LD<BK>];  // [16, BK]
  float k[SUB * LD<BK>];  // [16, BK]
  float a[SUB * LD<BK>];  // [16, BK], decays
  float v[SUB * LD<BV>];  // [16, BV]
  float A[SUB * LDA];     // [16, 16]
  float carry[BK];        // the sub-chunk's whole decay
  float u[BK];
};

// o[16, 16] += A v
template <typename T, int BV>
__device__ __forceinline__ void read_subchunk(float (&o)[2][4], const float* s_A, const float* s_v) {
#pragma unroll
  for (int j = 0; j < SUB; j += 8) {
    Operand<sizeof(T) == 4, 4> a;
    Data<T, 2> b;
    load_a(a, s_A + j, LDA);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_b(b, s_v + j * LD<BV> + 8 * half, LD<BV>);
      multiply(o[half], a, b);
    }
  }
}

template <class ReadOrder, typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, BK * sizeof(T) <= 256 ? 2 : 1) gated_forward(const Args<T, G> args) {
  constexpr bool EXACT = sizeof(T) == 4;
  constexpr int THREADS = 2 * BV;
  SubChunk<BK, BV>& s = *reinterpret_cast<SubChunk<BK, BV>*>(dynamic_smem());
  Incoming<T, G, BK, BV>& next = *reinterpret_cast<Incoming<T, G, BK, BV>*>(&s + 1);
  const Shape& shape = args.shape;
  const i64 tiles = (shape.V + BV - 1) / BV, v_tile = blockIdx.x % tiles * BV, h = blockIdx.x / tiles % shape.H;
  const i64 n = blockIdx.x / tiles / shape.H, b = n / shape.count;
  const Span span = tokens_of(shape, n % shape.count);
  const i64 state_at = (n * shape.H + h) * shape.K * shape.V;
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;

  State<BK> S;  // transposed: a warp's rows are its columns of V
  each<BK>(S, [&](float& x, int channel, int column) {
    const bool inside = args.initial && channel < shape.K && v_tile + column < shape.V;
    x = inside ? args.initial[state_at + channel * shape.V + v_tile + column] : 0.f;
  });
  if (ReadOrder::reads_before_write)
    for (int c = threadIdx.x; c < BK; c += THREADS) s.u[c] = c < shape.K ? args.u[h * shape.K + c] : 0.f;

  auto fetch = [&](i64 token) {
    fetch_tile<SUB, BK, THREADS>(next.g, args.g, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS>(next.q, args.q, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS>(next.k, args.k, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BV, THREADS>(next.v, args.v, b, h, token, span.stop, v_tile, shape.V, args.vectors);
    cp_async_commit();
  };
  auto same = [](float x) { return x; };

  if (span.start < span.stop) fetch(span.start);
  for (i64 token = span.start; token < span.stop; token += SUB) {
    cp_async_wait<0>();
    __syncthreads();  // the next tiles have arrived; the last ones may be overwritten
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.a, next.g, decay_of);
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.q, next.q, same);
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.k, next.k, same);
    spread_tile<SUB, BV, LD<BV>, THREADS>(s.v, next.v, same);
    for (int c = threadIdx.x; c < BK; c += THREADS) s.carry[c] = 1.f;
    __syncthreads();  // the tiles stand, the room for the next ones is free
    if (token + SUB < span.stop) fetch(token + SUB);
    diagonal_scores<ReadOrder, BK, THREADS, LDA>(s.q, s.k, s.a, s.u, s.A);
    __syncthreads();  // the scores stand, q and k may be overwritten
    decay_queries<ReadOrder, BK, THREADS>(s.q, s.a);
    decay_keys<BK, THREADS>(s.k, s.a, s.carry);
    __syncthreads();  // the decayed q and k stand

    float o[2][4] = {};
    read_state<Operand<EXACT, 4>, Operand<EXACT, 2>, LD<BK>, BK>(o, S, s.q);
    read_subchunk<T, BV>(o, s.A, s.v + 16 * warp);
    each<BK>(S, [&](float& x, int channel, int) { x *= s.carry[channel]; });
    write_state<Data<T, 4>, Operand<EXACT, 2>, LD<BV>, LD<BK>, BK>(S, s.v + 16 * warp, s.k);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const i64 row = token + g + 8 * lower, column = v_tile + 16 * warp + 2 * t;
      if (row >= span.stop) continue;
      T* to = args.o.row(b, h, row) + column;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int across = 8 * (x >> 1) + (x & 1);
        if (column + across < shape.V) to[across] = from_float<T>(float(args.scale) * o[x >> 1][2 * lower + (x & 1)]);
      }
    }
  }
  if (args.final)
    each<BK>(S, [&](float& x, int channel, int column) {
      if (channel < shape.K && v_tile + column < shape.V)
        args.final[state_at + channel * shape.V + v_tile + column] = x;
    });
}
