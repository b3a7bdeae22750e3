// what      Tokens of the delta rules in shared memory, and what a block finds out about each before a state meets it.
// math      GatedDelta, Kda: S' = D S, S = S' + k (beta (v - S'^T k))^T.   Dplr: S = D S + b (S^T a)^T + k v^T.
//           D is diag(exp g): of GatedDelta one number a token
// numerics  float32, of float64 data float64
// source    Yang et al., 2024 (2412.06464), eq. 10; Kimi Team, 2025 (2510.26692), eq. 1; Peng et al., 2025 (2503.14456)
#include "delta/lengths.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// The recurrences. A gate is a number of every channel or of the token; erased is what the token's key finds, or what a
// key of its own finds before the decay.
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

// What every kernel of the recurrences reads.
template <typename T, typename G> struct DeltaArgs {
  Rows<const T> q, k, v, a, b;  // a and b of Dplr alone
  Rows<const G> g, beta;        // beta of the others alone; a token's gate is a row of one number
  Rows<const Real<T>> initial;  // [N, H, K, V], null where it is 0
  Shape shape;                  // its H are the heads of values
  i64 group;                    // so many of them share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // all rows are whole pieces of so many: 16, 8, 4 or 2
};

// Which tokens, head and columns a block has.
struct Place {
  u32 n, b, h, tile;
  Span span;
  __device__ __forceinline__ Place(const Shape& shape, int columns) {
    const u32 tiles = u32((shape.V + columns - 1) / columns), pair = blockIdx.x / tiles, count = u32(shape.count);
    tile = blockIdx.x % tiles * columns, h = pair % u32(shape.H), n = pair / u32(shape.H), b = n / count;
    span = tokens_of(shape, n % count);
  }
};

// The sum over neighbouring lanes, LANES of them, the same bits in each.
template <int LANES, typename R> __device__ __forceinline__ R sum_over_lanes(R x) {
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
  return x;
}

// Starts to copy [ROWS, COLS] from rows of `width` numbers; zeros behind `rows` and `width`.
template <int BYTES, int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_pieces(T* to, const T* from, i64 stride, int rows, int width) {
  constexpr int PIECE = BYTES / sizeof(T), ACROSS = COLS / PIECE;
  for (int at = threadIdx.x; at < ROWS * ACROSS; at += THREADS) {
    const int row = at / ACROSS, column = at % ACROSS * PIECE;
    const bool inside = row < rows && column < width;
    const T* piece = inside ? from + row * stride + column : from;
    if constexpr (BYTES >= 4) cp_async<BYTES>(to + row * COLS + column, piece, inside);
    else to[row * COLS + column] = inside ? *piece : from_real<T>(0.f);
  }
}
template <int ROWS, int COLS, typename T>
__device__ __noinline__ void copy_slowly(T* to, const T* from, i64 stride, int rows, int width, int bytes) {
  if (bytes == 8) copy_pieces<8, ROWS, COLS>(to, from, stride, rows, width);
  else if constexpr (sizeof(T) < 8) {
    if (bytes == 4) copy_pieces<4, ROWS, COLS>(to, from, stride, rows, width);
    else copy_pieces<sizeof(T), ROWS, COLS>(to, from, stride, rows, width);
  }
}
template <int ROWS, int COLS, typename T>
__device__ __forceinline__ void copy_tile(T* to, const T* from, i64 stride, int rows, int width, i64 bytes) {
  if (bytes == 16) copy_pieces<16, ROWS, COLS>(to, from, stride, rows, width);
  else copy_slowly<ROWS, COLS>(to, from, stride, rows, width, int(bytes));
}

// Some tokens as they came. An array that a recurrence has not takes one piece of 16 bytes.
template <class Rule, typename T, typename G, int BK, int BV, int TOKENS> struct alignas(16) Tokens {
  static constexpr int PIECE = 16 / sizeof(T);
  T q[TOKENS * BK], k[TOKENS * BK];
  T a[Rule::own_erasure ? TOKENS * BK : PIECE], b[Rule::own_erasure ? TOKENS * BK : PIECE];
  G g[Rule::channel_gates ? TOKENS * BK : 16 / sizeof(G)];
  T v[TOKENS * BV];

  // Starts to copy those from `first` on, of which there are `rows`.
  __device__ __forceinline__ void fetch(const DeltaArgs<T, G>& args, const Place& at, i64 first, int rows) {
    const int K = int(args.shape.K), head = at.h / u32(args.group);
    copy_tile<TOKENS, BK>(k, args.k.row(at.b, head, first), args.k.t, rows, K, args.bytes);
    copy_tile<TOKENS, BK>(q, args.q.row(at.b, head, first), args.q.t, rows, K, args.bytes);
    if constexpr (Rule::channel_gates)
      copy_tile<TOKENS, BK>(g, args.g.row(at.b, at.h, first), args.g.t, rows, K, args.bytes);
    if constexpr (Rule::own_erasure) {
      copy_tile<TOKENS, BK>(a, args.a.row(at.b, head, first), args.a.t, rows, K, args.bytes);
      copy_tile<TOKENS, BK>(b, args.b.row(at.b, head, first), args.b.t, rows, K, args.bytes);
    }
    copy_tile<TOKENS, BV>(v, args.v.row(at.b, at.h, first) + at.tile, args.v.t, rows, int(args.shape.V) - at.tile,
                          args.bytes);
  }
};

// What a token says once for all columns.
template <typename R> struct Said {
  R decay, beta;  // of GatedDelta; of it and Kda
  R q, k;         // 1 / lengths, or 1
  R qk, qb;       // q . k and q . b of rows as they came
};

// The gate and the write strength of a token that a thread has asked for, TOKENS threads one each.
template <class Rule, typename R> struct TokenNumbers {
  R gate = 0, beta = 0;

  template <typename T, typename G>
  __device__ __forceinline__ void ask(const DeltaArgs<T, G>& args, const Place& at, i64 first, int rows) {
    if (int(threadIdx.x) >= rows) return;
    if constexpr (!Rule::channel_gates) gate = to_real(*args.g.row(at.b, at.h, first + threadIdx.x));
    if constexpr (!Rule::own_erasure) beta = to_real(*args.beta.row(at.b, at.h, first + threadIdx.x));
  }
  __device__ __forceinline__ void put(Said<R>* said, int rows) const {
    if (int(threadIdx.x) < rows) said[threadIdx.x].decay = decay_of(gate), said[threadIdx.x].beta = beta;
  }
};

// All that is to know of the tokens that have arrived, `rows` of them: `decays` [TOKENS, BK] where channels have gates.
// A warp has a token.
template <class Rule, typename T, typename G, int BK, int BV, int TOKENS>
__device__ __forceinline__ void look_at(Said<Real<T>>* said, Real<T>* decays,
                                        const Tokens<Rule, T, G, BK, BV, TOKENS>& in, int rows, bool normalized) {
  using R = Real<T>;
  const int lane = threadIdx.x & 31;
  for (int row = threadIdx.x >> 5; row < rows; row += WARPS) {
    R qq = 0, kk = 0, qk = 0, qb = 0;
#pragma unroll
    for (int c = lane; c < BK; c += 32) {
      const int place = row * BK + c;
      const R q = to_real(in.q[place]), k = to_real(in.k[place]);
      qk = fma(q, k, qk);
      if (normalized) qq = fma(q, q, qq), kk = fma(k, k, kk);
      if constexpr (Rule::own_erasure) qb = fma(q, R(to_real(in.b[place])), qb);
      if constexpr (Rule::channel_gates) decays[place] = decay_of(R(to_real(in.g[place])));
    }
    qk = sum_over_lanes<32>(qk);
    if constexpr (Rule::own_erasure) qb = sum_over_lanes<32>(qb);
    if (normalized) qq = sum_over_lanes<32>(qq), kk = sum_over_lanes<32>(kk);
    if (lane == 0) {
      Said<R>& of = said[row];
      of.q = normalized ? inverse_root(qq + R(LEAST_SQUARE)) : R(1), of.qk = qk, of.qb = qb;
      of.k = normalized ? inverse_root(kk + R(LEAST_SQUARE)) : R(1);
    }
  }
}

// Neighbouring numbers of a row, 2 or 4.
template <int N, typename T, typename R> __device__ __forceinline__ void load_near(R* to, const T* from) {
  struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Near {
    T x[N];
  };
  const Near near = *reinterpret_cast<const Near*>(from);
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = to_real(near.x[i]);
}
