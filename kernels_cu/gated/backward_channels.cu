// what      GLA and RWKV-6 backward, all that has channels: dq, dk and dg of a chunk, and its share of du.
// math      S the state before the chunk of 64, C the gradient of that after it, dA_ij = scale do_i . v_j, j < i:
//           dq_i = scale start_i (S do_i) + sum_j dA_ij decay_ij k_j + dA_ii k_i  (RWKV-6: u k_i)
//           dk_j = end_j (C v_j) + sum_i dA_ij decay_ij q_i + dA_jj q_j  (RWKV-6: u q_j);   du = sum_i dA_ii q_i k_i
//           dg_t = what passes gate t, gathered and not subtracted: queries from t on (RWKV-6: after t) with S, keys
//           before t with C, S with C, and the pairs of a key before t and a query from t on. Pairs meet at the borders
//           of 32, 16 and 8 tokens between them, or in the middle of their sub-chunk: there alone queries count from t
//           on less keys from t on, with the same operands on both sides, so that pairs behind t cancel to float32.
//           Where gates of a warp's channels grow, these pairs are summed one by one (growth.cuh)
// shapes    q k g dq dk dg [B, H, T, K], v do [B, H, T, V], u [H, K] float32, parts of du [B, NC, H, K] float32
//           kept: as backward_states leaves it
// grid      a block for every (batch, head, chunk, tile of 64 channels); a warp for every 16 channels
// smem      q, k, g; two stages of v and do, where dA stands later, and what both halves of the chunk need
// barriers  two for every 32 columns of V: they have arrived | they are read; then: dA stands | results stand
// numerics  products as fragments.cuh has it, of sums in float32, which factors outside of products multiply.
//           Columns may have gates of their own: then v and do come decayed to the chunk's end and from its start, and
//           dA comes made, so that the same kernel gives dq, dk and dg of GLA with a value gate; and, turned over, of
//           values for keys, what queries and keys are there
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    none
#include "backward.cuh"
#include "value_gate/by_token.cuh"
#include "cards.cuh"
#include "growth.cuh"

constexpr int COLUMNS = 32, STEPS = COLUMNS / 16;  // of V, that are there at once
constexpr int BLOCKS = CHUNK / 16;                 // of 16 tokens
constexpr int OWN = 3;                             // most 16 x 16 blocks of dA that a warp makes
constexpr float MOST = 3.4028235e38f;              // of float32
constexpr float CANCELLED = 1.f / 512;  // the share of its terms up to which a sum of float32 data is made anew

// What gates columns have: none, which values and their gradients are read under as they came; or of their own.
struct Ungated {
  static constexpr bool gated = false, turned = false;
  template <typename T, typename Stored> using Type = T;  // of v and do
};
struct Gated {
  static constexpr bool gated = true, turned = false;
  template <typename T, typename Stored> using Type = Stored;
};
// The same with values for keys: states are read with rows for columns.
struct GatedTurned : Gated {
  static constexpr bool turned = true;
};

template <typename T, typename G, typename E> struct Args {
  Rows<const T> q, k;
  Rows<const E> v, do_;
  Rows<const G> g;
  Rows<T> dq, dk;
  Rows<G> dg;
  const float* u;  // null for GLA
  const void* kept;
  float* partial_du;  // null for GLA
  Shape shape;
  i64 first, heads;  // the heads at hand
  double scale;
  i64 vectors;  // whether all rows are whole pieces of 16 bytes
  // of gated columns, null for others: dA [B, heads, NC, 64, 64], the diagonal apart [B, heads, NC, 64], what columns
  // decay by over the chunk [B, heads, NC, V], what rows and columns grow by [B, heads, NC], and v, do and their gates
  // as they came
  const void* pairs;
  const float *own, *decays, *row_growth, *column_growth;
  Rows<const T> given_v, given_do;
  Rows<const G> gv;
};

template <typename T> struct alignas(16) Values {
  T v[CHUNK * (COLUMNS + 8)];    // [64, 32]
  T do_[CHUNK * (COLUMNS + 8)];  // [64, 32]
};
constexpr int LDV = COLUMNS + 8, LDA = CHUNK + 8;

template <class M> struct TokenPairs {
  typename M::Stored dA[CHUNK * LDA];  // [64, 64]: query, key before it
  float own[CHUNK];                    // the diagonal
  Held<M> halves[BLOCKS][THREADS];     // tokens as they meet those beyond the chunk's middle
  float decays[SUBS][TILE];            // over sub-chunks
  float all_pass[2][THREADS];          // what a lane has of S C
};

template <typename T, typename G, int PRODUCTS, class Columns> struct alignas(16) Shared {
  T q[CHUNK * LD<T, TILE>];  // [64, 64], then dq
  T k[CHUNK * LD<T, TILE>];  // then dk
  G g[CHUNK * LD<G, TILE>];  // then dg
  union {
    Values<typename Columns::template Type<T, typename Math<T, PRODUCTS>::Stored>> values[2];
    TokenPairs<Math<T, PRODUCTS>> pairs;
  };
};

__device__ __forceinline__ float2 size_of(float2 x) { return {fabsf(x.x), fabsf(x.y)}; }

// Which 16 x 16 block of the lower triangle comes n-th.
__device__ __forceinline__ int row_of(int n) { return n < 1 ? 0 : n < 3 ? 1 : n < 6 ? 2 : 3; }
__device__ __forceinline__ int column_of(int n) {
  const int row = row_of(n);
  return n - row * (row + 1) / 2;
}

// A lane's part of S and of C, 16 channels by COLUMNS.
template <class M, bool TURNED> struct States {
  using Stored = typename M::Stored;
  struct alignas(2 * sizeof(Stored)) Two {
    Stored x, y;
  };
  Two S[STEPS][4], C[STEPS][4];

  static __device__ __forceinline__ Two two(const Stored* from, int row, int column) {
    const int lane = threadIdx.x & 31;
    if (!TURNED) return *reinterpret_cast<const Two*>(from + matrix_at(row, column) + 2 * lane);
    const Stored* matrix = from + matrix_at(column, row) + 2 * (lane & 3) * 8 + (lane >> 2);
    return {matrix[0], matrix[8]};
  }

  // Of 16 columns, the matrices from `row` and `column` on.
  __device__ __forceinline__ void load(int m, const Stored* S_from, const Stored* C_from, int row, int column) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      S[m][p] = two(S_from, row + (p & 1), column + (p >> 1));
      C[m][p] = two(C_from, row + (p & 1), column + (p >> 1));
    }
  }
};

template <typename P> struct Element;
template <typename E> struct Element<E*> {
  using type = E;
};

// The channels of a chunk that a block computes.
struct ChannelTile {
  int tile;  // of channels
  i64 c, h, b;
  Span span;
};

constexpr int HALF = SUBS / 2;  // sub-chunks of half a chunk

// Of the gates of a lane's channel in half a chunk: what passes them within their sub-chunk, and the lane's share of
// what does from other sub-chunks.
struct Passing {
  float2 dg[HALF];
  float share[HALF];
};

// Where gates grow: what a lane's tokens have of the pairs of their sub-chunks, in dq, dk and dg.
struct OfPairs {
  float2 dq[4], dk[4], dg[4];
};
template <class ReadOrder, class M, typename T, typename G, typename Stored>
__device__ __noinline__ void sum_one_by_one(OfPairs (&sums)[BLOCKS], const T* q, const T* k, const G* gates,
                                            const Stored* dA) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int at = 0; at < 8 * BLOCKS; ++at) {
    const int m = at / 8, p = at / 2 % 4, token = at % 2, channel = g + 8 * (p & 1), first = 16 * m + 8 * (p >> 1);
    const PairGradients x = gradients_of_pairs<ReadOrder>(
        2 * t + token, [&](int i) { return to_float(q[(first + i) * LD<T, TILE> + channel]); },
        [&](int j) { return to_float(k[(first + j) * LD<T, TILE> + channel]); },
        [&](int m) { return decay_of(to_float(gates[(first + m) * LD<G, TILE> + channel])); },
        [&](int i, int j) { return 1 / CUT_BOTH<M> * to_float(dA[(first + i) * LDA + first + j]); });
    const auto put = [&](float2& two, float one) { (token ? two.y : two.x) = one; };
    put(sums[m].dq[p], x.dq), put(sums[m].dk[p], x.dk), put(sums[m].dg[p], x.dg);
  }
}

// Of a lane's channel, whose tokens of a sub-chunk are this lane's pair and those of the three beside it: what passes
// the gates of its pair, a pair of tokens after the other.
template <class ReadOrder, typename Stored>
__device__ __noinline__ float2 passing_pairs(float2 q, float2 k, float2 gates, const Stored* dA) {
  const int lane = threadIdx.x & 31, first = 2 * (lane & 3), base = lane & ~3;
  const auto of_token = [&](float2 x, int token) {
    return __shfl_sync(0xffffffffu, token % 2 ? x.y : x.x, base + token / 2);
  };
  const float2 a = decays_of(gates);
  float2 sum = {0.f, 0.f};
#pragma unroll 1
  for (int i = 1; i < SUB; ++i) {
    const float query = of_token(q, i);
    const int last = ReadOrder::reads_before_write ? i - 1 : i;  // whose gate comes before it reads
    float decay = ReadOrder::reads_before_write ? 1.f : of_token(a, i);
#pragma unroll 1
    for (int j = i - 1; j >= 0; --j) {
      const float pair = to_float(dA[i * LDA + j]) * (decay * query * of_token(k, j));
      if (j < first && first <= last) sum.x += pair;
      if (j <= first && first < last) sum.y += pair;
      decay *= of_token(a, j);
    }
  }
  return sum;
}

// What a pair of columns decays by over the chunk.
template <class Columns>
__device__ __forceinline__ float2 decays_of_columns(const float* decays, int column, int width) {
  if (!Columns::gated) return {1.f, 1.f};
  return column < width ? *reinterpret_cast<const float2*>(decays + column) : float2{0.f, 0.f};
}

// Likewise a lane's share of sum_v S C, decayed before it is multiplied: S C alone may leave the range of float32.
template <class M, class Columns>
__device__ __noinline__ float2 decayed_states(const typename M::Stored* S, const typename M::Stored* C, int row,
                                              int parts, float2 decay, const float* decays, int width, int next_tile) {
  float2 sum = {0.f, 0.f};
#pragma unroll 1
  for (int n = 0; n < parts * STEPS; ++n) {
    States<M, Columns::turned> states;
    const int at = n * 16 / TILE * next_tile;
    states.load(0, S + at, C + at, row, n * 16 % TILE / 8);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const auto &x = states.S[0][p], &y = states.C[0][p];
      float& of = p & 1 ? sum.y : sum.x;
      const int column = 16 * n + 8 * (p >> 1) + 2 * (threadIdx.x & 3);
      const float2 by = (p & 1 ? decay.y : decay.x) * decays_of_columns<Columns>(decays, column, width);
      of = fmaf(by.x * to_float(x.x), to_float(y.x), fmaf(by.y * to_float(x.y), to_float(y.y), of));
    }
  }
  return sum;
}

// Where a chunk of gated columns grows: dq, dk and dg of a warp's channels, token by token, from the chunk's states.
template <bool TURNED, typename Stored, typename T, typename G, typename E>
__device__ __noinline__ void go_by_token(const Args<T, G, E>& args, const Stored* S_kept, const Stored* C_kept,
                                         int next_tile, const ChannelTile& place) {
  const int lane = threadIdx.x & 31, rows = int(place.span.stop - place.span.start);
  const int first = place.tile * TILE, channels = int(args.shape.K), columns = int(args.shape.V);
  const auto tokens_of = [&](const auto& x) { return tokens_at(x, place.b, place.h, place.span.start, 0); };
  const auto q = tokens_of(args.q), k = tokens_of(args.k), v = tokens_of(args.given_v), do_ = tokens_of(args.given_do);
  const auto g = tokens_of(args.g), gv = tokens_of(args.gv);
  const float scale = float(args.scale);
#pragma unroll 1
  for (int row = threadIdx.x >> 5; row < TILE && first + row < channels; row += WARPS) {
    const int channel = first + row;
    float dq[2] = {}, dk[2] = {}, dg[2] = {};  // of tokens lane and 32 + lane
    const auto sum = [&](float (&to)[2], int token, float x) {
#pragma unroll 1
      for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
      if (token % 32 == lane) (token < 32 ? to[0] : to[1]) += x;
    };
#pragma unroll 1
    for (int start = 0; start < columns; start += 32) {
      const int column = start + lane, across = column % TILE;
      const int at = column / TILE * next_tile + (TURNED ? matrix_at(across / 8, row / 8) + across % 8 * 8 + row % 8
                                                         : matrix_at(row / 8, across / 8) + row % 8 * 8 + across % 8);
      float S = column < columns ? to_float(S_kept[at]) : 0.f, C = column < columns ? to_float(C_kept[at]) : 0.f;
      float before[CHUNK];  // states that the tokens decay
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        before[i] = grown(S, g.at(i, channel, channels) + gv.at(i, column, columns));
        S = fmaf(k.at(i, channel, channels), v.at(i, column, columns), before[i]);
        sum(dq, i, scale * S * do_.at(i, column, columns));
      }
#pragma unroll 1
      for (int i = rows - 1; i >= 0; --i) {
        C = fmaf(scale * q.at(i, channel, channels), do_.at(i, column, columns), C);
        sum(dk, i, v.at(i, column, columns) * C);
        sum(dg, i, before[i] * C);
        C = grown(C, g.at(i, channel, channels) + gv.at(i, column, columns));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 token = place.span.start + 32 * half + lane;
      if (token >= place.span.stop) continue;
      if (!TURNED) args.dq.row(place.b, place.h, token)[channel] = from_float<T>(dq[half]);
      args.dk.row(place.b, place.h, token)[channel] = from_float<T>(dk[half]);
      args.dg.row(place.b, place.h, token)[channel] = from_float<G>(dg[half]);
    }
  }
}

template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns>
__global__ void __launch_bounds__(THREADS, 2) gated_backward_channels(
    const __grid_constant__ Args<T, G, typename Columns::template Type<T, typename Math<T, PRODUCTS>::Stored>> args) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  using E = typename Columns::template Type<T, Stored>;
  using Block = float[2][4];  // 16 channels by 16 tokens
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  // Products of split operands are so many instructions that unrolled loops take a second longer to compile, and run no
  // faster.
  constexpr int UNROLLED = M::SPLIT ? 1 : 2;
  // Whether the block's place is made anew where it is asked for, for want of registers. RWKV-6 in float32 spills more
  // by that.
  constexpr bool ANEW = SINCE_SM100 && !(M::SPLIT && BEFORE);
  auto& s = *reinterpret_cast<Shared<T, G, PRODUCTS, Columns>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, strip = 16 * warp;
  const int tiles = int((shape.K + TILE - 1) / TILE);
  const u32 NC = u32(shape.NC), heads = u32(args.heads);
  const auto channel_tile = [&](u32 block) -> ChannelTile {
    const u32 tile = block % tiles, chunk = block / tiles;
    const i64 c = chunk % NC, h = args.first + chunk / NC % heads, b = chunk / NC / heads;
    return {int(tile), c, h, b, chunk_tokens(shape, c)};
  };
  const ChannelTile place = channel_tile(blockIdx.x);
  const int tile = place.tile;
  const i64 c = place.c, h = place.h, b = place.b;
  const Span span = place.span;
  const float scale = float(args.scale);
  constexpr float CUT_STATES = CUT<M> * CUT<M, E>;  // of products with do and v
  const bool vectors = args.vectors;

  const i64 chunk = (b * heads + h - args.first) * shape.NC + c;
  const float* decays = args.decays + chunk * padded_width(shape.V);
  const i64 width = Columns::gated ? padded_width(shape.V) : shape.V;  // of v and do
  const auto fetch = [&](int n) {
    Values<E>& to = s.values[n & 1];
    const ChannelTile at = ANEW && M::SPLIT ? channel_tile(opaque(blockIdx.x)) : place;
    const i64 head = Columns::gated ? at.h - args.first : at.h, column = n * COLUMNS;
    const bool pieces = Columns::gated || vectors;
    fetch_rows<CHUNK, COLUMNS, LDV>(to.v, args.v, at.b, head, at.span.start, at.span.stop, column, width, pieces);
    fetch_rows<CHUNK, COLUMNS, LDV>(to.do_, args.do_, at.b, head, at.span.start, at.span.stop, column, width, pieces);
  };
  States<M, Columns::turned> states;  // those of columns at hand, then of the next ones
  Shape kept = shape;
  if (Columns::turned) kept.K = shape.V, kept.V = shape.K;
  const Stored* S_kept =
      static_cast<const Stored*>(args.kept) +
      tile_at(kept, heads, false, b, h - args.first, c, Columns::turned ? 0 : tile, Columns::turned ? tile : 0);
  const Stored* C_kept = S_kept + tile_at(kept, heads, true, 0, 0, 0, 0, 0);
  const int next_tile = TILE * TILE * (Columns::turned ? tiles : 1);
  const auto fetch_states = [&](int slot, int n, int m) {
    const int at = n * COLUMNS / TILE * next_tile, column = n * COLUMNS % TILE / 8 + 2 * m;
    states.load(slot, S_kept + at, C_kept + at, 2 * warp, column);
  };
  if constexpr (Columns::gated)
    if (args.row_growth[chunk] + args.column_growth[chunk] > BY_CHUNK)
      return go_by_token<Columns::turned>(args, S_kept, C_kept, next_tile, place);
  fetch(0);
  cp_async_commit();
#pragma unroll
  for (int m = 0; m < STEPS; ++m) fetch_states(m, 0, m);
  fetch_rows<CHUNK, TILE, LD<T, TILE>>(s.q, args.q, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);
  fetch_rows<CHUNK, TILE, LD<T, TILE>>(s.k, args.k, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);
  fetch_rows<CHUNK, TILE, LD<G, TILE>>(s.g, args.g, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);

  // S do and C v: channels by tokens; dA; and sum_v S C of channels g and g + 8, the lane's share
  Block dq[BLOCKS] = {}, dk[BLOCKS] = {}, dA[OWN] = {};
  float both[2] = {};
  const int parts = int((shape.V + COLUMNS - 1) / COLUMNS);
#pragma unroll 1
  for (int n = 0; n < parts; ++n) {
    if (n + 1 < parts) fetch(n + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // these columns have arrived
    const Values<E>& in = s.values[n & 1];
#pragma unroll UNROLLED
    for (int m = 0; m < STEPS; ++m) {
      Left<M> S, C;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 x = {to_float(states.S[0][p].x), to_float(states.S[0][p].y)};
        const float2 y = {to_float(states.C[0][p].x), to_float(states.C[0][p].y)};
        states.S[0][p] = states.S[1][p], states.C[0][p] = states.C[1][p];
        const float2 by = decays_of_columns<Columns>(decays, n * COLUMNS + 16 * m + 8 * (p >> 1) + 2 * t, int(width));
        both[p & 1] = fmaf(by.x * x.x, y.x, fmaf(by.y * x.y, y.y, both[p & 1]));
        S.take(p, x), C.take(p, y);
      }
      if (n + 1 < parts) fetch_states(1, n + 1, m);
#pragma unroll
      for (int x = 0; x < BLOCKS; ++x) {
        RightData<M, E> read[2], values[2];
        load_right<true>(read, in.do_ + 16 * x * LDV + 16 * m, LDV);
        load_right<true>(values, in.v + 16 * x * LDV + 16 * m, LDV);
        multiply(dq[x], S, read, dk[x], C, values);
      }
#pragma unroll
      for (int x = 0; x < OWN; ++x) {
        const int which = warp + WARPS * x;
        if (Columns::gated || which >= BLOCKS * (BLOCKS + 1) / 2) continue;  // the same for the whole warp
        LeftData<M, E> queries;
        RightData<M, E> keys[2];
        load_left<false>(queries, in.do_ + 16 * row_of(which) * LDV + 16 * m, LDV);
        load_right<true>(keys, in.v + 16 * column_of(which) * LDV + 16 * m, LDV);
        multiply(dA[x], queries, keys);
      }
    }
    __syncthreads();  // they are read
  }
  cp_async_wait<0>();
  if constexpr (Columns::gated) {
    constexpr int PIECE = 16 / sizeof(Stored);
    const Stored* pairs = static_cast<const Stored*>(args.pairs) + chunk * (CHUNK * CHUNK);
#pragma unroll 1
    for (int at = threadIdx.x * PIECE; at < CHUNK * CHUNK; at += THREADS * PIECE)
      cp_async<16>(s.pairs.dA + at / CHUNK * LDA + at % CHUNK, pairs + at, at % CHUNK <= at / CHUNK);
    if (threadIdx.x < CHUNK) s.pairs.own[threadIdx.x] = args.own[chunk * CHUNK + threadIdx.x];
    cp_async_commit();
    cp_async_wait<0>();
  }
#pragma unroll
  for (int x = 0; x < OWN; ++x) {
    const int which = warp + WARPS * x;
    if (Columns::gated || which >= BLOCKS * (BLOCKS + 1) / 2) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int lower = 0; lower < 2; ++lower) {
        const int i = 16 * row_of(which) + g + 8 * lower, j = 16 * column_of(which) + 8 * half + 2 * t;
        const float2 own = CUT_BOTH<M, E> * scale * float2{dA[x][half][2 * lower], dA[x][half][2 * lower + 1]};
        const float2 two = CUT_BOTH<M> * own;  // as it is multiplied
        put_pair(s.pairs.dA + i * LDA + j, float2{j < i ? two.x : 0.f, j + 1 < i ? two.y : 0.f});
        if (i == j) s.pairs.own[i] = own.x;
        if (i == j + 1) s.pairs.own[i] = own.y;
      }
  }
  __syncthreads();  // dA stands; so do q, k and g

  // A warp's channels, 16 tokens after the other: pair p is of row p % 2 and of sub-chunk 2 m + p / 2.
  const auto gates_of_block = [&](int m, auto f) {
    float2 gates[4];
    load_channels(gates, s.g + 16 * m * LD<G, TILE> + strip, LD<G, TILE>);
#pragma unroll
    for (int p = 0; p < 4; ++p) f(p, gates[p]);
  };
  const auto gates_of_pair = [&](int m, int p) {
    const G* gate = s.g + (16 * m + 8 * (p >> 1) + 2 * t) * LD<G, TILE> + strip + g + 8 * (p & 1);
    return float2{to_float(gate[0]), to_float(gate[LD<G, TILE>])};
  };
  float all[2][SUBS], most = 0.f;  // decays of whole sub-chunks; the largest gate
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m)
    gates_of_block(m, [&](int p, float2 gates) {
      all[p & 1][2 * m + (p >> 1)] = whole_decay(gates);
      most = at_least(gates.x, at_least(gates.y, most));
    });
  const bool grows = __any_sync(0xffffffffu, !(most <= GROWTH));  // then pairs do not meet in the middle
  OfPairs pairs_of[BLOCKS];
  if (grows) sum_one_by_one<ReadOrder, M>(pairs_of, s.q + strip, s.k + strip, s.g + strip, s.pairs.dA);

#pragma unroll
  for (int m = 0; m < BLOCKS; ++m) {
    float2 x[4];
    Held<M> half;
    load_channels(x, (m < BLOCKS / 2 ? s.k : s.q) + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
    gates_of_block(m, [&](int p, float2 gates) {
      const Decays<ReadOrder> decays(decays_of(gates));
      const int n = 2 * m + (p >> 1);
      const float far = m < BLOCKS / 2 ? product_of(all[p & 1], n + 1, HALF) : product_of(all[p & 1], HALF, n);
      half.set(p, far * (m < BLOCKS / 2 ? decays.end : decays.start) * x[p]);
    });
    s.pairs.halves[m][threadIdx.x] = half;
  }
  const auto decay_over = [&](int n, int row) -> float& { return s.pairs.decays[n][strip + g + 8 * row]; };
  if (t == 0) {
#pragma unroll
    for (int n = 0; n < SUBS; ++n) decay_over(n, 0) = all[0][n], decay_over(n, 1) = all[1][n];
  }
  __syncwarp();  // decays stand

  const float2 whole = {product_of(all[0], 0, SUBS), product_of(all[1], 0, SUBS)};
  both[0] *= whole.x, both[1] *= whole.y;
  if (grows || __any_sync(0xffffffffu, !(fabsf(both[0]) + fabsf(both[1]) <= MOST))) {
    const float2 sum =
        decayed_states<M, Columns>(S_kept, C_kept, 2 * warp, parts, whole, decays, int(width), next_tile);
    both[0] = sum.x, both[1] = sum.y;
  }
  s.pairs.all_pass[0][threadIdx.x] = both[0], s.pairs.all_pass[1][threadIdx.x] = both[1];
  // A lane's pair of a channel and sub-chunk: of a product, of the diagonal; to where results stand.
  const auto pair_of = [](const float (&d)[4], int row) { return float2{d[2 * row], d[2 * row + 1]}; };
  constexpr float one = Columns::gated ? 1 / NEAR : 1.f;  // by which sums of pairs of one sub-chunk become true
  const auto put_pairs = [](Block& d, const float2(&x)[4]) {
#pragma unroll
    for (int p = 0; p < 4; ++p) d[p >> 1][2 * (p & 1)] = x[p].x, d[p >> 1][2 * (p & 1) + 1] = x[p].y;
  };
  const auto own_of = [&](int n) { return *reinterpret_cast<const float2*>(s.pairs.own + 8 * n + 2 * t); };
  const auto put_tokens = [&](auto* tile, int n, int row, float2 x) {
    using E = typename Element<decltype(tile)>::type;
    E* to = tile + (8 * n + 2 * t) * LD<E, TILE> + strip + g + 8 * row;
    to[0] = from_float<E>(x.x), to[LD<E, TILE>] = from_float<E>(x.y);
  };
  const i64 channel = tile * TILE + strip + g;
  float u[2] = {1.f, 1.f};
  if (BEFORE) {
    float du[2] = {};
#pragma unroll 1
    for (int m = 0; m < BLOCKS; ++m) {
      float2 q[4], k[4];
      load_channels(q, s.q + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
      load_channels(k, s.k + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 weights = own_of(2 * m + (p >> 1)) * q[p] * k[p];
        du[p & 1] += weights.x + weights.y;
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const bool there = channel + 8 * row < shape.K;
      const float sum = sums(du[row]).all;
      if (there && t == 0) args.partial_du[((b * shape.NC + c) * shape.H + h) * shape.K + channel + 8 * row] = sum;
      u[row] = there ? args.u[h * shape.K + channel + 8 * row] : 0.f;
    }
  }

  // A half of the chunk after the other. What belongs to the half at hand stands first: dq and dk move up.
  float before[2] = {1.f, 1.f};                  // decays from the chunk's start to this half
  float beyond[2] = {};                          // the lane's share of what passes all gates of this half, but for S C
  float2 low[2][HALF] = {}, high[2][HALF] = {};  // dg
#pragma unroll UNROLLED
  for (int half = 0; half < 2; ++half) {
    float decays_here[2][HALF];  // over the sub-chunks of this half
#pragma unroll
    for (int n = 0; n < 2 * HALF; ++n) decays_here[n & 1][n >> 1] = decay_over(HALF * half + n / 2, n & 1);
    Passing passing[2];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int n = 0; n < HALF; ++n) passing[row].share[n] = s.pairs.all_pass[row][threadIdx.x] + beyond[row];
      beyond[row] = 0.f;  // from here on of the other half
    }
    Held<M> quarters[2];  // tokens as they meet those beyond the middle of this half
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int m = 2 * half + x;
      float2 y[4];
      load_channels(y, (x ? s.q : s.k) + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
      gates_of_block(m, [&](int p, float2 gates) {
        const Decays<ReadOrder> decays(decays_of(gates));
        const float far = x == 0 && p < 2 ? decays_here[p & 1][1] : x == 1 && p >= 2 ? decays_here[p & 1][2] : 1.f;
        quarters[x].set(p, far * (x ? decays.start : decays.end) * y[p]);
      });
    }
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      const int m = 2 * half + x;
      float2 q[4], k[4];
      load_channels(q, s.q + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
      load_channels(k, s.k + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);
      float2 start[4], end[4], query[4], key[4];
      Held<M> queries, keys, eights;
      gates_of_block(m, [&](int p, float2 gates) {
        const float2 a = decays_of(gates);
        const Decays<ReadOrder> decays(a);
        const Middle<ReadOrder> middle(a);
        start[p] = decays.start, end[p] = decays.end, query[p] = middle.queries, key[p] = middle.keys;
        queries.set(p, query[p] * q[p]);
        keys.set(p, key[p] * k[p]);
        eights.set(p, p < 2 ? end[p] * k[p] : start[p] * q[p]);
      });
      if (grows) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          query[p] = key[p] = {1.f, 1.f};
          queries.set(p, float2{0.f, 0.f}), keys.set(p, float2{0.f, 0.f});
        }
      }
      const Stored* dA = s.pairs.dA + 16 * m * LDA;
      float2 from_queries[4];  // what passes the gates of this sub-chunk from the queries' side
      float2 near_queries[4];  // of it, what meets in the middle
      {
        Block P = {}, P16 = {}, P32 = {};
        float P8[4] = {};
        Right<M> dAs[2];
        load_right<true>(dAs, dA + 16 * m, LDA);
        multiply_half(P[0], keys.left(), dAs[0], 0);
        multiply_half(P[1], keys.left(), dAs[1], 1);
        multiply_half(P8, eights.left(), dAs[1], 0);
        if (grows) put_pairs(P, pairs_of[m].dq);
        if (x) {
          load_right<true>(dAs, dA + 16 * (m - 1), LDA);
          multiply(P16, quarters[0].left(), dAs);
        }
#pragma unroll 1
        for (int other = 0; half && other < BLOCKS / 2; ++other) {
          load_right<true>(dAs, dA + 16 * other, LDA);
          multiply(P32, s.pairs.halves[other][threadIdx.x].left(), dAs);
        }
        __syncwarp();  // q is read, where dq comes
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const int row = p & 1, lower = p >> 1, at = 2 * x + lower, n = HALF * half + at;
          const float2 pairs = pair_of(P[lower], row), near = CUT<M> * one * (queries.get(p) * pairs);
          float2 sum = one * (query[p] * pairs), from = {0.f, 0.f};
          const auto passes = [&](float2 by, const float (&d)[4], int border) {  // of keys before the border
            const float2 part = by * pair_of(d, row), weight = q[p] * part;
            sum = sum + part, from = from + weight;
#pragma unroll
            for (int to = border; to < at; ++to) passing[row].share[to] += weight.x + weight.y;
            return weight.x + weight.y;
          };
          const float within = product_of(decays_here[row], 0, at);
          const float passed =
              passes(CUT_STATES * scale * product_of(decays_here[row], 0, at, before[row]) * start[p], dq[x][lower], 0);
          if (half) {
            beyond[row] += passed;
            passes(within * start[p], P32[lower], 0);
          }
          if (x) passes(product_of(decays_here[row], 2, at) * start[p], P16[lower], 2);
          if (lower) passes(start[p], P8, at);
          from_queries[p] = M::SPLIT ? from : from + near;
          near_queries[p] = near;
          put_tokens(s.q, n, row, sum + u[row] * own_of(n) * k[p]);
        }
      }
      {
        load_channels(k, s.k + 16 * m * LD<T, TILE> + strip, LD<T, TILE>);  // again: registers are few
        Block R = {}, R16 = {}, R32 = {};
        float R8[4] = {};
        Right<M> dAs[2];
        load_right<false>(dAs, dA + 16 * m, LDA);
        multiply_half(R[0], queries.left(), dAs[0], 0);
        multiply_half(R[1], queries.left(), dAs[1], 1);
        multiply_half(R8, eights.left(), dAs[0], 1);
        if (grows) put_pairs(R, pairs_of[m].dk);
        if (!x) {
          load_right<false>(dAs, dA + 16 * LDA + 16 * m, LDA);
          multiply(R16, quarters[1].left(), dAs);
        }
#pragma unroll 1
        for (int other = BLOCKS / 2; !half && other < BLOCKS; ++other) {
          load_right<false>(dAs, s.pairs.dA + 16 * other * LDA + 16 * m, LDA);
          multiply(R32, s.pairs.halves[other][threadIdx.x].left(), dAs);
        }
        __syncwarp();  // k is read, where dk comes
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const int row = p & 1, lower = p >> 1, at = 2 * x + lower, n = HALF * half + at;
          const float2 pairs = pair_of(R[lower], row), near = CUT<M> * one * (keys.get(p) * pairs);
          float2 sum = one * (key[p] * pairs), from = {0.f, 0.f};
          const auto passes = [&](float2 by, const float (&d)[4], int border) {  // of queries behind the border
            const float2 part = by * pair_of(d, row), weight = k[p] * part;
            sum = sum + part, from = from + weight;
#pragma unroll
            for (int to = at + 1; to < border; ++to) passing[row].share[to] += weight.x + weight.y;
            return weight.x + weight.y;
          };
          float to_end = product_of(decays_here[row], at + 1, HALF, CUT_STATES);
          if (!half) {
#pragma unroll
            for (int n = HALF; n < SUBS; ++n) to_end *= decay_over(n, row);
          }
          const float passed = passes(to_end * end[p], dk[x][lower], HALF);
          if (!half) {
            beyond[row] += passed;
            passes(product_of(decays_here[row], at + 1, HALF) * end[p], R32[lower], HALF);
          }
          if (!x) passes(product_of(decays_here[row], at + 1, 2) * end[p], R16[lower], 2);
          if (!lower) passes(end[p], R8, at + 1);
          put_tokens(s.k, n, row, sum + u[row] * own_of(n) * q[p]);
          // Of queries behind the gates, less what keys behind them have.
          const auto pass = [](float2 queries, float2 keys) -> float2 {
            const float2 later = queries + -1.f * keys;
            const float behind = sums(later.x + later.y).behind;
            if (BEFORE) return {later.y + behind - keys.x, behind - keys.y};
            return {later.x + later.y + behind, later.y + behind};
          };
          const float before = sums(from.x + from.y).before;
          float2& dg = passing[row].dg[at];
          if constexpr (M::SPLIT) {
            float2 pairs_pass = pass(near_queries[p], near);
            const float2 size = pass(size_of(near_queries[p]), -1.f * size_of(near));
            const bool x = fabsf(pairs_pass.x) < CANCELLED * size.x, y = fabsf(pairs_pass.y) < CANCELLED * size.y;
            if (__any_sync(0xffffffffu, x || y)) {
              const float2 one_by_one =
                  one * passing_pairs<ReadOrder>(q[p], k[p], gates_of_pair(m, p), dA + 8 * lower * (LDA + 1) + 16 * m);
              if (x) pairs_pass.x = one_by_one.x;
              if (y) pairs_pass.y = one_by_one.y;
            }
            dg = pass(from_queries[p], {0.f, 0.f}) + pairs_pass;
          } else {
            dg = pass(from_queries[p], near);
          }
          dg = dg + float2{before, from.x + before};
        }
      }
    }
#pragma unroll
    for (int row = 0; row < 2; ++row) {
#pragma unroll
      for (int n = 0; n < HALF; ++n) {
        float2 dg = passing[row].dg[n];
        if (grows) dg = dg + one * pairs_of[2 * half + n / 2].dg[n % 2 * 2 + row];
        const float others = sums(passing[row].share[n]).all;
        low[row][n] = high[row][n], high[row][n] = dg + float2{others, others};
      }
      before[row] = product_of(decays_here[row], 0, HALF);
    }
#pragma unroll
    for (int x = 0; x < BLOCKS / 2; ++x) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dq[x][n][i] = dq[2 + x][n][i], dk[x][n][i] = dk[2 + x][n][i];
      }
    }
  }
  __syncwarp();  // g is read, where dg comes
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const float others = sums(beyond[row]).all;
#pragma unroll
    for (int n = 0; n < HALF; ++n) {
      put_tokens(s.g, n, row, low[row][n] + float2{others, others});
      put_tokens(s.g, HALF + n, row, high[row][n]);
    }
  }
  __syncthreads();  // the results stand
  const ChannelTile end = ANEW ? channel_tile(opaque(blockIdx.x)) : place;
  const auto store = [&](const auto& to, const auto* tile) {
    using E = typename Element<decltype(tile)>::type;
    store_rows<CHUNK, TILE, LD<E, TILE>>(to, tile, end.b, end.h, end.span.start, end.span.stop, end.tile * TILE,
                                         shape.K, vectors);
  };
  if (!Columns::turned) store(args.dq, s.q);
  store(args.dk, s.k);
  store(args.dg, s.g);
}
