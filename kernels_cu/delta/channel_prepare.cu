// what      The delta rule with a gate for every channel (Kimi Delta Attention): what each chunk of 32 tokens does to a
//           state, for the kernels that walk over states; GRADIENT: for those that walk in both directions.
// math      kd, qd: k and q decayed from the chunk's start; ke: k decayed to its end; M and A: channel_chunk.cuh.
//           N = (I + diag(beta) M)^-1, B = A N diag(beta);   E = -kd, W = w_scale (qd - B kd), Z = diag(beta) N^T ke
//           GRADIENT: B and Z without beta, residuals by I - M N diag(beta)
// shapes    q k [B, H, T, K], g [B, HV, T, K], beta [B, HV, T]; prepared [B, HV, NC]
// grid      a block for every (batch, head of values, chunk), chunks fastest
// smem      Shared: a chunk's inputs, its matrices
// barriers  seven: inputs have arrived | lengths, decays over blocks | decayed tokens | M and A | N and qd | B | W and
//           Z. Each: these are in shared memory
// numerics  M, A and N in float32; E, W, Z in T, B as the sum of two T; decays: channel_chunk.cuh
// source    Kimi Team, 2025 (2510.26692), eq. 1; Yang et al., 2024 (2412.06464), section 3.3
// limits    T of bfloat16, float16; K <= BK; BK of 64, 128
#include "cards.cuh"
#include "delta/channel_chunk.cuh"
#include "delta/prepared.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k;
  Rows<const G> g, beta;  // a token's beta is a row of one number
  void* prepared;         // Prepared, or PreparedForGradients, of each chunk
  Shape shape;            // its H are the heads of values
  i64 group;              // so many of them share a head of queries and keys
  double w_scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k and g start on multiples of it, and are multiples long
};

template <typename T, typename G, int BK> struct alignas(16) Shared : ChannelMatrices<T, BK> {
  union {
    T q[C * BK];
    T W[C * BK];
  };
  T k[C * BK];
  G g[C * BK];
};

template <typename T, typename G, int BK, bool GRADIENT>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, G, BK>>(256 / BK))
    delta_channel_prepare(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK;
  auto& s = *reinterpret_cast<Shared<T, G, BK>*>(dynamic_smem());
  Scored& of = s.of;
  const Shape& shape = args.shape;
  const u32 chunks = u32(shape.NC), chunk = blockIdx.x % chunks, pair = blockIdx.x / chunks;
  const u32 b = pair / u32(shape.H), h = pair % u32(shape.H), head = h / u32(args.group);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start), channels = int(shape.K), bytes = int(args.bytes);

  copy_chunk<BK, THREADS>(s.k, args.k.row(b, head, span.start), args.k.t, rows, channels, bytes);
  copy_chunk<BK, THREADS>(s.q, args.q.row(b, head, span.start), args.q.t, rows, channels, bytes);
  copy_chunk<BK, THREADS>(s.g, args.g.row(b, h, span.start), args.g.t, rows, channels, bytes);
  cp_async_commit();
  TokenNumbers numbers;
  numbers.ask_strength(args.beta, b, h, span.start, rows);
  numbers.put(of);
  for (int at = threadIdx.x; at < C * LD; at += THREADS) of.M[at / LD][at % LD] = of.A[at / LD][at % LD] = 0.f;
  cp_async_wait<0>();
  __syncthreads();  // inputs have arrived
  look_at<THREADS>(s, s.q, s.k, args.normalized);
  decay_blocks<THREADS>(s.over_blocks, s.g);
  __syncthreads();  // lengths and decays over blocks of 8 tokens are in shared memory
  score_blocks<THREADS>(s, s.q, s.k, s.g);
  const BlockTask task;
  float2 queries[BLOCK];  // qd of the thread's block of tokens and two channels
  decay_block(s, s.q, s.k, s.g, task.block, task.c, queries);
  __syncthreads();  // decayed queries and keys are in shared memory
  score_borders<THREADS>(s);
  __syncthreads();  // M and A are in shared memory; their operands have been read, and qd may overwrite them
#pragma unroll
  for (int i = 0; i < BLOCK; ++i)
    *reinterpret_cast<float2*>(&s.from_start[task.block * BLOCK + i][task.c]) = queries[i];
  if (threadIdx.x < 32) solve_column(of);
  __syncthreads();  // N and qd are in shared memory
  const i64 at = i64(pair) * chunks + chunk;
  using Gradient = PreparedForGradients<T, BK, 1>;
  Gradient* const gradient = GRADIENT ? static_cast<Gradient*>(args.prepared) + at : nullptr;
  multiply_scores<THREADS>(of.A, of.N, [&](int i, int j, float x, float y) {
    const float beta = GRADIENT ? 1.f : of.beta[i];
    put_two(s.B.at(i, j), of.beta[j] * x, of.beta[j + 1] * y);
    put_two(s.of_Z.at(i, j), beta * of.N[j][i], beta * of.N[j + 1][i]);
    if constexpr (GRADIENT) put_two(gradient->B[0].at(i, j), x, y);
  });
  if constexpr (GRADIENT)
    multiply_scores<THREADS>(of.M, of.N, [&](int i, int j, float x, float y) {
      put_two(gradient->of_residual[0].at(i, j), float(i == j) - of.beta[j] * x,
              float(i == j + 1) - of.beta[j + 1] * y);
    });
  __syncthreads();  // B and of_Z are in shared memory
  make_wide<THREADS>(s, s.W, float(args.w_scale));
  __syncthreads();  // W and Z are in shared memory
  const auto store = [&](auto& to) {
    store_pieces<THREADS>(to.E, s.kd, SIGNS);
    store_pieces<THREADS>(to.W, s.W);
    store_pieces<THREADS>(to.Z[0], s.Z);
    store_pieces<THREADS>(to.whole, s.whole);
  };
  if constexpr (GRADIENT) {
    store(*gradient);
    store_pieces<THREADS>(gradient->beta, of.beta);
    clear_padding<THREADS>(gradient->B[0]), clear_padding<THREADS>(gradient->of_residual[0]);
  } else {
    auto& to = static_cast<Prepared<T, BK, false>*>(args.prepared)[at];
    store(to);
    store_pieces<THREADS>(to.B.x, s.B.x);
  }
}
