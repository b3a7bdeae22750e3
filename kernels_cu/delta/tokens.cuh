// what      Tokens of the delta rules in shared memory, and what a block computes once for each token, before it
//           updates its columns of the state.
// math      S before the token, S+ after it, S' = D S, D = diag(exp g); GatedDelta has one log gate g for all channels.
//           GatedDelta, Kda: S+ = S' + k (beta (v - S'^T k))^T.   Dplr: S+ = S' + b (S^T a)^T + k v^T.
// numerics  float32; float64 for float64 data
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
#include "delta/lengths.cuh"
#include "lanes.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   shape.H: heads of values
//   LEAST_SQUARE = 1e-6 is added to the square of a length

// The recurrences. channel_gates: every channel has a gate, else the token has one. own_erasure: what is taken from the
// state is found by a vector `a` of its own in the state before its decay, else by the key in the decayed state.
struct GatedDelta {
  static constexpr bool channel_gates = false, own_erasure = false;
};
struct Kda {
  static constexpr bool channel_gates = true, own_erasure = false;
};
struct Dplr {
  static constexpr bool channel_gates = true, own_erasure = true;
};

constexpr int THREADS = 128, WARPS = THREADS / 32;

// The arguments that the kernels of whole sequences read.
template <typename T, typename G> struct DeltaArgs {
  StridedRows<const T> q, k, v, a, b;           // a and b are for Dplr only
  StridedRows<const G> g, beta;                 // beta is not for Dplr; a gate of a token is a row of one number
  StridedRows<const FloatOrDouble<T>> initial;  // [N, H, K, V], null for zeros
  Shape shape;                                  // H is the number of value heads
  i64 group;                                    // value heads that share a head of queries and keys
  double scale;
  i64 normalized;            // whether the kernel divides queries and keys by their Euclidean lengths
  i64 bytes;                 // every row starts on, and is a multiple of, this many bytes: 16, 8, 4 or 2
  FloatOrDouble<T>* starts;  // of segments (segments.cuh); null: no sequence is cut
  i64 P;                     // segments of a sequence, which are the sequences of `shape`
};

// A block's work: sequence n, in batch row b; value head h; `columns` columns of V from first_column on; the sequence's
// tokens. more: how many more tiles of `columns` columns follow those of V, for F (join_segments.cu); first_column
// counts on there.
struct BlockWork {
  u32 n, b, h, first_column;
  Span span;
  __device__ __forceinline__ BlockWork(const Shape& shape, int columns, u32 more = 0) {
    const u32 tiles = u32((shape.V + columns - 1) / columns) + more, sequence_head = blockIdx.x / tiles,
              row_sequences = u32(shape.row_sequences);
    first_column = blockIdx.x % tiles * columns, h = sequence_head % u32(shape.H), n = sequence_head / u32(shape.H);
    b = n / row_sequences;
    span = tokens_of(shape, n % row_sequences);
  }
};

// A float64 argument as R. `opaque` hides where the number comes from: else the compiler converts it again for every
// token.
template <typename R> __device__ __forceinline__ R converted_once(double x) {
  if constexpr (sizeof(R) == 4) return __uint_as_float(opaque(__float_as_uint(float(x))));
  else return x;
}

// Starts to copy a tile [ROWS, COLS], whose rows are `stride` numbers apart in memory, to rows of COLS numbers in
// shared memory, in pieces of BYTES bytes, of which `from`, `stride` and `width` are multiples; zeros from row `rows`
// and column `width` on. Numbers of two bytes are copied at once, since cp.async takes four bytes at least.
template <int BYTES, int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_pieces(T* to, const T* from, i64 stride, int rows, int width) {
  constexpr int PIECE = BYTES / sizeof(T), ACROSS = COLS / PIECE;
  constexpr int UNROLLED = BYTES == 16 ? 8 : 1;
  static_assert(COLS % PIECE == 0);
#pragma unroll UNROLLED
  for (int first = 0; first < ROWS * ACROSS; first += THREADS) {
    const int index = first + threadIdx.x;
    if (ROWS * ACROSS % THREADS != 0 && index >= ROWS * ACROSS) break;
    const int row = index / ACROSS, column = index % ACROSS * PIECE;
    const bool inside = row < rows && column < width;
    const T* piece = inside ? from + row * stride + column : from;
    if constexpr (BYTES >= 4) cp_async<BYTES>(to + row * COLS + column, piece, inside);
    else to[row * COLS + column] = inside ? *piece : narrowed<T>(0.f);
  }
}
// copy_pieces of 8 or 4 bytes, or of single numbers; not inlined, which keeps the code for 16 bytes short.
template <int ROWS, int COLS, typename T>
__device__ __noinline__ void copy_slowly(T* to, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 8) copy_pieces<8, ROWS, COLS>(to, from, stride, rows, width);
  else if constexpr (sizeof(T) < 8) {
    if (bytes == 4) copy_pieces<4, ROWS, COLS>(to, from, stride, rows, width);
    else copy_pieces<sizeof(T), ROWS, COLS>(to, from, stride, rows, width);
  }
}
// Starts to copy a tile [ROWS, COLS] in pieces of `bytes` bytes.
template <int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_tile(T* to, const T* from, i64 stride, int rows, int width, i64 bytes) {
  if (bytes == 16) copy_pieces<16, ROWS, COLS>(to, from, stride, rows, width);
  else copy_slowly<ROWS, COLS>(to, from, stride, rows, width, int(bytes));
}

// TOKENS tokens of one stage, as they are in memory: rows of BK channels, or of the block's BV columns of v. An array
// that a recurrence does not have is 16 bytes long, since it must not be empty.
template <class Rule, typename T, typename G, int BK, int BV, int TOKENS> struct alignas(16) Tokens {
  static constexpr int PIECE = 16 / sizeof(T);
  T q[TOKENS * BK], k[TOKENS * BK];
  T a[Rule::own_erasure ? TOKENS * BK : PIECE], b[Rule::own_erasure ? TOKENS * BK : PIECE];
  G g[Rule::channel_gates ? TOKENS * BK : 16 / sizeof(G)];
  T v[TOKENS * BV];

  // Starts to copy `rows` tokens, from token `first` of the batch row on; zeros for the others.
  __device__ __forceinline__ void fetch(const DeltaArgs<T, G>& args, const BlockWork& work, i64 first, int rows) {
    const int K = int(args.shape.K), head = work.h / u32(args.group);
    copy_tile<TOKENS, BK>(k, args.k.row(work.b, head, first), args.k.token_stride, rows, K, args.bytes);
    copy_tile<TOKENS, BK>(q, args.q.row(work.b, head, first), args.q.token_stride, rows, K, args.bytes);
    if constexpr (Rule::channel_gates)
      copy_tile<TOKENS, BK>(g, args.g.row(work.b, work.h, first), args.g.token_stride, rows, K, args.bytes);
    if constexpr (Rule::own_erasure) {
      copy_tile<TOKENS, BK>(a, args.a.row(work.b, head, first), args.a.token_stride, rows, K, args.bytes);
      copy_tile<TOKENS, BK>(b, args.b.row(work.b, head, first), args.b.token_stride, rows, K, args.bytes);
    }
    copy_tile<TOKENS, BV>(v, args.v.row(work.b, work.h, first) + work.first_column, args.v.token_stride, rows,
                          int(args.shape.V) - work.first_column, args.bytes);
  }
};

// The numbers of a token that all columns of the state use; aligned for loads of 16 bytes.
template <typename R> struct alignas(16) TokenScalars {
  R decay, beta;                         // decay: GatedDelta only; beta: GatedDelta and Kda
  R inverse_q_length, inverse_k_length;  // 1 if not normalized
  R q_dot_k, q_dot_b;                    // of the given q, k and b, without the inverse lengths; q_dot_b: Dplr only
};

// The log gate and the write strength beta of one token of a stage: thread i has token i. They are loaded to registers
// while the previous stage is computed, and stored to shared memory when no thread reads that stage's any more.
template <class Rule, typename R> struct TokenGates {
  R gate = 0, beta = 0;

  // first: the stage's first token in the batch row; rows: its number of tokens.
  template <typename T, typename G>
  __device__ __forceinline__ void load(const DeltaArgs<T, G>& args, const BlockWork& work, i64 first, int rows) {
    if (int(threadIdx.x) >= rows) return;
    if constexpr (!Rule::channel_gates) gate = widened(*args.g.row(work.b, work.h, first + threadIdx.x));
    if constexpr (!Rule::own_erasure) beta = widened(*args.beta.row(work.b, work.h, first + threadIdx.x));
  }
  __device__ __forceinline__ void store(TokenScalars<R>* scalars, int rows) const {
    if (int(threadIdx.x) < rows) scalars[threadIdx.x].decay = decay_of(gate), scalars[threadIdx.x].beta = beta;
  }
};

// Computes, of the `rows` tokens that have arrived in a stage, the decays of channels [TOKENS, BK], if channels have
// gates, and the scalars that TokenGates does not store: q_dot_k and q_dot_b only with DOTS. A warp has one token at a
// time.
template <bool DOTS, class Rule, typename T, typename G, int BK, int BV, int TOKENS>
__device__ __forceinline__ void prepare_tokens(TokenScalars<FloatOrDouble<T>>* scalars, FloatOrDouble<T>* decays,
                                               const Tokens<Rule, T, G, BK, BV, TOKENS>& in, int rows,
                                               bool normalized) {
  using R = FloatOrDouble<T>;
  const int lane = threadIdx.x & 31;
  for (int row = threadIdx.x >> 5; row < rows; row += WARPS) {
    R qq = 0, kk = 0, qk = 0, qb = 0;
#pragma unroll
    for (int c = lane; c < BK; c += 32) {
      const int place = row * BK + c;
      const R q = widened(in.q[place]), k = widened(in.k[place]);
      if (DOTS) qk = fma(q, k, qk);
      if (normalized) qq = fma(q, q, qq), kk = fma(k, k, kk);
      if constexpr (DOTS && Rule::own_erasure) qb = fma(q, R(widened(in.b[place])), qb);
      if constexpr (Rule::channel_gates) decays[place] = decay_of(R(widened(in.g[place])));
    }
    if constexpr (DOTS) qk = sum_over_lanes<32>(qk);
    if constexpr (DOTS && Rule::own_erasure) qb = sum_over_lanes<32>(qb);
    if (normalized) qq = sum_over_lanes<32>(qq), kk = sum_over_lanes<32>(kk);
    if (lane == 0) {
      TokenScalars<R>& token = scalars[row];
      token.inverse_q_length = normalized ? inverse_root(qq + R(LEAST_SQUARE)) : R(1);
      if (DOTS) token.q_dot_k = qk, token.q_dot_b = qb;
      token.inverse_k_length = normalized ? inverse_root(kk + R(LEAST_SQUARE)) : R(1);
    }
  }
}

// N neighbouring numbers, a power of 2. They are loaded and stored by up to 16 bytes at a time, to which their address
// is aligned. load_neighbours converts them to R.
template <int N, typename T> struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Neighbours {
  T x[N];
};
template <int N, typename T, typename R> __device__ __forceinline__ void load_neighbours(R* to, const T* from) {
  const auto neighbours = *reinterpret_cast<const Neighbours<N, T>*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = widened(neighbours.x[i]);
}
// Stores number_at(0), ..., number_at(N - 1).
template <int N, typename R, class Number> __device__ __forceinline__ void store_neighbours(R* to, Number number_at) {
  Neighbours<N, R> neighbours;
#pragma unroll
  for (int i = 0; i < N; ++i) neighbours.x[i] = number_at(i);
  *reinterpret_cast<Neighbours<N, R>*>(to) = neighbours;
}
