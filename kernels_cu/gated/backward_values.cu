// what      GLA and RWKV-6 backward: dv, which is the forward backwards in time with k, q and do for q, k and v.
// math      per sub-chunk of 16, C the gradient of its state after:
//           dv = (k decayed) C + scale A^T do,   C <- diag(decay) C + scale (q decayed)^T do
// shapes    q k g [B, H, T, K], do dv [B, H, T, V], u [H, K], dht [N, H, K, V] float32
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; a warp for every 16 of the columns
// smem      SubChunk: the 16 tokens at hand as floats; Incoming: the 16 before them as they come from memory
// barriers  four a sub-chunk: tiles arrived | spread | scores done | queries and keys decayed
// numerics  C stays in float32 accumulators; products are tf32, three of them for float32 data (product.cuh)
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    K <= BK; BK of 64, 128, 256; BV of 64, 128
#include "read_order.cuh"
#include "product.cuh"
#include "ptx.cuh"
#include "state.cuh"
#include "subchunk.cuh"
#include "tensor.cuh"

constexpr int LDA = SUB + 8;  // A is read transposed: rows 8 apart touch every bank once

template <typename T, typename G> struct Args {
  Rows<const T> q, k, do_;
  Rows<const G> g;
  Rows<T> dv;
  const float *u, *dht;  // null where there is none
  Shape shape;
  double scale;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
};

template <typename T, typename G, int BK, int BV> struct alignas(16) Incoming {
  T q[SUB * BK];    // [16, BK]
  T k[SUB * BK];    // [16, BK]
  G g[SUB * BK];    // [16, BK]
  T do_[SUB * BV];  // [16, BV]
};

template <int BK, int BV> struct alignas(16) SubChunk {
  float q[SUB * LD<BK>];    // [16, BK]
  float k[SUB * LD<BK>];    // [16, BK]
  float a[SUB * LD<BK>];    // [16, BK], decays
  float do_[SUB * LD<BV>];  // [16, BV]
  float A[SUB * LDA];       // [16, 16]
  float carry[BK];          // the sub-chunk's whole decay
  float u[BK];
};

template <class ReadOrder, typename T, typename G, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, BK * sizeof(T) <= 256 ? 2 : 1) gated_backward_values(const Args<T, G> args) {
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

  State<BK> C;  // transposed: a warp's rows are its columns of V
  each<BK>(C, [&](float& x, int channel, int column) {
    const bool there = args.dht && channel < shape.K && v_tile + column < shape.V;
    x = there ? args.dht[state_at + channel * shape.V + v_tile + column] : 0.f;
  });
  if (ReadOrder::reads_before_write)
    for (int c = threadIdx.x; c < BK; c += THREADS) s.u[c] = c < shape.K ? args.u[h * shape.K + c] : 0.f;

  auto fetch = [&](i64 token) {
    fetch_tile<SUB, BK, THREADS>(next.g, args.g, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS>(next.q, args.q, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BK, THREADS>(next.k, args.k, b, h, token, span.stop, 0, shape.K, args.vectors);
    fetch_tile<SUB, BV, THREADS>(next.do_, args.do_, b, h, token, span.stop, v_tile, shape.V, args.vectors);
    cp_async_commit();
  };
  auto same = [](float x) { return x; };

  const i64 last = span.start + (span.stop - span.start - 1) / SUB * SUB;
  if (span.start < span.stop) fetch(last);
  for (i64 token = last; token >= span.start && span.start < span.stop; token -= SUB) {
    cp_async_wait<0>();
    __syncthreads();  // the next tiles have arrived; the last ones may be overwritten
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.a, next.g, decay_of);
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.q, next.q, [&](float x) { return float(args.scale) * x; });
    spread_tile<SUB, BK, LD<BK>, THREADS>(s.k, next.k, same);
    spread_tile<SUB, BV, LD<BV>, THREADS>(s.do_, next.do_, same);
    for (int c = threadIdx.x; c < BK; c += THREADS) s.carry[c] = 1.f;
    __syncthreads();  // the tiles stand, the room for the next ones is free
    if (token > span.start) fetch(token - SUB);
    diagonal_scores<ReadOrder, BK, THREADS, LDA>(s.q, s.k, s.a, s.u, s.A);
    __syncthreads();  // the scores stand, q and k may be overwritten
    decay_queries<ReadOrder, BK, THREADS>(s.q, s.a);
    decay_keys<BK, THREADS>(s.k, s.a, s.carry);
    __syncthreads();  // the decayed q and k stand

    float dv[2][4] = {};
    read_state<Operand<EXACT, 4>, Operand<EXACT, 2>, LD<BK>, BK>(dv, C, s.k);
#pragma unroll
    for (int i = 0; i < SUB; i += 8) {
      Operand<EXACT, 4> a;
      Data<T, 2> b;
      load_a_transposed(a, s.A + i * LDA, LDA);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_b(b, s.do_ + i * LD<BV> + 16 * warp + 8 * half, LD<BV>);
        multiply(dv[half], a, b);
      }
    }
    each<BK>(C, [&](float& x, int channel, int) { x *= s.carry[channel]; });
    write_state<Data<T, 4>, Operand<EXACT, 2>, LD<BV>, LD<BK>, BK>(C, s.do_ + 16 * warp, s.q);
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const i64 row = token + g + 8 * lower, column = v_tile + 16 * warp + 2 * t;
      if (row >= span.stop) continue;
      T* to = args.dv.row(b, h, row) + column;
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const int across = 8 * (x >> 1) + (x & 1);
        if (column + across < shape.V) to[across] = from_float<T>(dv[x >> 1][2 * lower + (x & 1)]);
      }
    }
  }
}
