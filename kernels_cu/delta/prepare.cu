// what      The delta rule with one gate for all channels of a token: what each chunk of 32 tokens does to a state, for
//           the kernels that walk over states; GRADIENT: for those that walk in both directions.
// math      D_i decays from the chunk's start to token i; A, N: chunk.cuh.   B = A N diag(beta), W = w_scale (D_i q -
//           B D_i k), Z = diag(beta) N^T D_end k, E = -D_i k.
//           GRADIENT: B and Z without beta, and R = 1 - M N diag(beta)
// shapes    q k [B, H, T, K], g beta [B, HV, T]; prepared [B, HV, NC]
// grid      a block for every (batch, head of values, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices
// barriers  five: inputs have arrived | decays and lengths | M and A | N | B, of_W and of_Z | W and Z. Each: these are
//           in shared memory
// numerics  M, A and N in float32; E, W and Z in T; matrices [32, 32] that multiply tokens are the sum of two
//           numbers of T
// source    Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/chunk.cuh"
#include "delta/prepared.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g, beta;  // rows of one number, for each token
  void* prepared;         // Prepared, or PreparedForGradients, of each chunk
  Shape shape;            // its H are the heads of values
  i64 group;              // so many of them share a head of queries and keys
  double w_scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q and k start on multiples of it, and are multiples long
};

template <typename T, int BK> struct alignas(16) Shared {
  T q[C * BK], k[C * BK], W[C * BK], Z[C * BK];
  Matrix<T> B, of_W, of_Z;
  Scored of;
};

template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, BK>>(256 / BK))
    delta_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, BK>*>(dynamic_smem());
  Scored& of = s.of;
  const ChunkOfBlock of_block(args.shape);
  const u32 head = of_block.h / u32(args.group);
  const int channels = int(args.shape.K), bytes = int(args.bytes);

  copy_chunk<BK, THREADS>(s.k, of_block.row(args.k, head), args.k.t, of_block.rows, channels, bytes);
  copy_chunk<BK, THREADS>(s.q, of_block.row(args.q, head), args.q.t, of_block.rows, channels, bytes);
  cp_async_commit();
  TokenNumbers numbers;
  numbers.ask(args.g, args.beta, of_block.b, of_block.h, of_block.span.start, of_block.rows);
  numbers.put(of);
  cp_async_wait<0>();
  __syncthreads();  // inputs have arrived, and `of` has decays and beta
  score_pairs<BK, THREADS>(of, s.q, s.k, args.normalized);
  __syncthreads();  // M and A are in shared memory
  if (threadIdx.x < 32) solve_column(of);
  __syncthreads();  // N is in shared memory
  using Gradient = PreparedForGradients<T, BK, false>;
  if constexpr (GRADIENT)
    multiply_scores<THREADS>(of.M, of.N, [&](int i, int j, float x, float y) {
      put_two(static_cast<Gradient*>(args.prepared)[of_block.index].of_residual[0].at(i, j),
              float(i == j) - of.beta[j] * x, float(i == j + 1) - of.beta[j + 1] * y);
    });
  multiply_scores<THREADS>(of.A, of.N, [&](int i, int j, float x, float y) {
    const float beta = of.beta[j], next = of.beta[j + 1], row = GRADIENT ? 1.f : of.beta[i];
    put_two(s.B.at(i, j), GRADIENT ? x : beta * x, GRADIENT ? y : next * y);
    put_two(s.of_W.at(i, j), of.unit[j] * of.start[j] * beta * x, of.unit[j + 1] * of.start[j + 1] * next * y);
    put_two(s.of_Z.at(i, j), row * of.N[j][i] * (of.unit[j] * of.end[j]),
            row * of.N[j + 1][i] * (of.unit[j + 1] * of.end[j + 1]));
  });
  __syncthreads();  // B, of_W and of_Z are in shared memory
  make_wide<BK, THREADS>(s, s.q, s.k, float(args.w_scale));
  __syncthreads();  // W and Z are in shared memory; keys have been read
  const auto store = [&](auto& to, Matrix<T>& B) {
    for (int x = 2 * threadIdx.x; x < C * BK; x += 2 * THREADS) {
      const int i = x / BK;
      const float by = -of.unit[i] * of.start[i];
      T* key = place<BK>(s.k, i, x % BK);
      const float2 two = unpack_pair(key);
      *reinterpret_cast<u32*>(to.E + (key - s.k)) = pack<T>(by * two.x, by * two.y);
    }
    store_pieces<THREADS>(to.Z[0], s.Z);
    store_pieces<THREADS>(to.W, s.W);
    store_pieces<THREADS>(B.x, s.B.x);
    for (int c = threadIdx.x; c < BK; c += THREADS) to.whole[c] = of.start[C - 1];
  };
  if constexpr (GRADIENT) {
    auto& to = static_cast<Gradient*>(args.prepared)[of_block.index];
    store(to, to.B[0]);
    if (threadIdx.x < C) to.beta[threadIdx.x] = of.beta[threadIdx.x];
    clear_padding<THREADS>(to.of_residual[0]);
  } else {
    auto& to = static_cast<Prepared<T, BK, false>*>(args.prepared)[of_block.index];
    store(to, to.B);
  }
}
