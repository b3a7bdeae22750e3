// what      Stage 4: how much each token of a chunk weighs on each later one.
// math      A_ij = sum_k q_ik k_jk exp(g_{j+1,k} + ... + g_ik), j <= i   (RWKV-6: to g_{i-1,k}; A_ii = sum_k q_ik u_k
//           k_ik)
// shapes    q k g [B, H, T, K], u [H, K], A [B, H, T, C] float32, zero above the diagonal
// grid      a block for every (batch, head, chunk, 16 rows of it), batch slowest; 128 threads
// smem      Shared<BK>
// barriers  named where they are there: tiles loaded, decays taken, keys decayed, partial sums written, tiles free
// numerics  on the diagonal decays are multiplied token by token; below it rows and keys meet at the end of the key's
//           sub-chunk, so no exponent is positive for g <= 0; products as in product.cuh
// source    Yang et al., 2024, section 4.3 (secondary chunking)
// limits    K <= BK; BK of 64, 128, 256; C a multiple of 16
#include "read_order.cuh"
#include "product.cuh"
#include "ptx.cuh"
#include "subchunk.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128, WARPS = THREADS / 32;

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g;
  const float* u;  // [H, K], null for GLA
  Rows<float> A;
  Shape shape;
};

template <int BK> struct Shared {
  float q[SUB * LD<BK>];  // [16, BK], the rows' queries
  float k[SUB * LD<BK>];  // [16, BK], the keys of the sub-chunk at hand
  float a[SUB * LD<BK>];  // [16, BK], its gates, then decays
  float carry[BK];        // decay from the end of that sub-chunk to the start of the rows'
  float u[BK];
  float partial[WARPS][SUB * SUB];  // [16, 16], scores over each warp's share of the channels
};

// The whole block: scores of the 16 rows with the 16 keys at hand, each warp over a quarter of the channels.
template <bool EXACT, int BK> __device__ __forceinline__ void score_pairs(Shared<BK>& s) {
  const int warp = threadIdx.x >> 5, g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
  float d[2][4] = {};
#pragma unroll
  for (int c = warp * (BK / WARPS); c < (warp + 1) * (BK / WARPS); c += 8) {
    Operand<EXACT, 4> a;
    Operand<EXACT, 2> b;
    load_a(a, s.q + c, LD<BK>);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      load_b_transposed(b, s.k + 8 * half * LD<BK> + c, LD<BK>);
      multiply(d[half], a, b);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int x = 0; x < 4; ++x) s.partial[warp][(g + 8 * (x >> 1)) * SUB + 8 * half + 2 * t + (x & 1)] = d[half][x];
}

// 4 blocks a multiprocessor: without a word the compiler takes few registers and spills.
template <class ReadOrder, typename T, typename G, int BK>
__global__ void __launch_bounds__(THREADS, 4) stages_intra_chunk(const Args<T, G> args) {
  constexpr bool EXACT = sizeof(T) == 4;
  Shared<BK>& s = *reinterpret_cast<Shared<BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 subs = shape.chunk / SUB, sub = blockIdx.x % subs, c = blockIdx.x / subs % shape.NC;
  const i64 h = blockIdx.x / subs / shape.NC % shape.H, batch = blockIdx.x / subs / shape.NC / shape.H;
  const Span span = chunk_tokens(shape, c);
  const i64 first = span.start + sub * SUB;
  if (first >= span.stop) return;  // the whole block: the chunk is a short tail

  auto load_keys = [&](i64 token) {
    load_tile<SUB, BK, LD<BK>, THREADS>(s.k, args.k, batch, h, token, span.stop, 0, shape.K);
    load_tile<SUB, BK, LD<BK>, THREADS>(s.a, args.g, batch, h, token, span.stop, 0, shape.K);
    __syncthreads();  // the tiles are in shared memory
    exponentiate<BK, THREADS>(s.a);
    __syncthreads();  // the decays are in shared memory
  };
  auto write = [&](i64 column, auto value) {  // 16 columns of A; value(row, column)
    for (int at = threadIdx.x; at < SUB * SUB; at += THREADS)
      if (first + at / SUB < span.stop) args.A.row(batch, h, first + at / SUB)[column + at % SUB] = value(at);
  };

  load_tile<SUB, BK, LD<BK>, THREADS>(s.q, args.q, batch, h, first, span.stop, 0, shape.K);
  for (int x = threadIdx.x; x < BK; x += THREADS) {
    s.carry[x] = 1.f;
    if (ReadOrder::reads_before_write) s.u[x] = x < shape.K ? args.u[h * shape.K + x] : 0.f;
  }
  load_keys(first);
  diagonal_scores<ReadOrder, BK, THREADS, SUB>(s.q, s.k, s.a, s.u, s.partial[0]);
  __syncthreads();  // the diagonal's scores are in shared memory, q may be overwritten
  decay_queries<ReadOrder, BK, THREADS>(s.q, s.a);
  write(sub * SUB, [&](int at) { return s.partial[0][at]; });
  for (i64 later = sub + 1; later < subs; ++later) write(later * SUB, [](int) { return 0.f; });

  for (i64 earlier = sub - 1; earlier >= 0; --earlier) {
    __syncthreads();  // the tiles and partial sums may be overwritten
    load_keys(span.start + earlier * SUB);
    decay_keys<BK, THREADS>(s.k, s.a, s.carry);
    __syncthreads();  // the decayed keys are in shared memory
    score_pairs<EXACT, BK>(s);
    __syncthreads();  // the partial sums are in shared memory
    write(earlier * SUB,
          [&](int at) { return (s.partial[0][at] + s.partial[1][at]) + (s.partial[2][at] + s.partial[3][at]); });
  }
}
