// what      GLA and RWKV-6 forward in one pass on Hopper: producer warps decay, consumer warpgroups multiply.
// math      per chunk of 32:  o = scale ((q decayed) S + A v),   S <- diag(decay) S + (k decayed)^T v
// shapes    q k g [B, H, T, K], v o [B, H, T, V], u [H, K], initial and final state [N, H, K, V] float32; where G is One,
//           a gate [B, H, T] float32 for all channels, of any strides
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; Resumed: first parts, then second.
//           Warps: four for every 64 columns consume; then two groups of producers, which take the chunks in turn
// smem      Shared: incoming q, k, g of every producer; what a group hands over; incoming v, outgoing o
// barriers  arrived[group]: q, k, g of its next chunk are there; values[warpgroup][slot]: so is v; full[slot]: a chunk's
//           operands stand; empty[slot]: the consumers, Joined both blocks', have read them; enum Named
// numerics  S in float32 accumulators; (q decayed) S and scores between tokens of different blocks in tf32; A and k in T.
//           No difference of cumulated gates anywhere but in chunks where it is harmless: see below
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// passes    Whole: everything. Resumed: the same of a sequence cut in two, where the second part's block goes through the
//           first's tokens too, for the state they leave behind. Joined: more than BK channels, by two blocks of a cluster.
//           Each has one group of producers, for BK of the channels, which hands what it makes to both blocks; and
//           consumers for all channels and BV columns. The two blocks' scores add up, each in two numbers of T.
//           Summary: only the state that tokens leave behind, and their decay, without q and o; for sequences cut into
//           segments and these into parts, whose states scan_segments.cu then joins; a launch for every BK channels.
//           Where a part's last 256 tokens decay every channel by e^-148, nobody who needs only the state behind them reads
//           those before: whatever finite state they leave, less than 2^-85 is left. Where they do not, Resumed's second
//           block either reads the first part too (for halves), or ends, and the first part's goes on (`alone`, for tails)
// limits    sm_90a; half data; K and V multiples of 8, K <= BK a launch; BK and BV of 64, 128; rows start on 16 bytes
//
// A producer warp has 8 tokens (BK = 64: twice 8), a lane 4 channels of them, so that no gate needs a shuffle. A chunk goes
// one of two ways, which its producers agree on:
//   mild_chunk  in bfloat16, where gates are mild: queries decayed from the chunk's start, keys by the inverse, all scores
//               one product; but never a sequence's first chunk. Under one gate in float16 and there too: its scores are
//               products of operands as they came, times what is between the tokens
//   any_chunk   any gates, reset or growth: decays are multiplied up in registers. Scores of two tokens
//     in the same block of 8     one product with the running decay for every pair, summed over the lanes
//     in the same half of 16     queries decayed from, keys decayed to the end of the first block
//     in different halves        queries decayed from, keys decayed to the end of the first half
//   so that no factor ever exceeds 1 where gates decay.
// The state stays in the consumers' registers, transposed. Shared memory's bandwidth is what comes next after memory's:
// every tile is laid out so that loads and stores lie in all banks.
#include "policy.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int CHUNK = 32, TOKENS = 8, BLOCKS = CHUNK / TOKENS;
constexpr int SLOTS = 2;        // chunks that are handed over at a time
constexpr float MILD = 17;      // nats: with so much in 8 tokens at most, factors and their inverses are far from float's ends
template <typename T> constexpr bool COARSE = false;    // whether T has fewer digits than scores in tf32
template <> constexpr bool COARSE<bf16> = true;
constexpr float LARGE = 1 << 20;    // neither do queries and keys up to here, multiplied by such factors
constexpr int PANEL = 64;       // columns of V a warpgroup; 16-bit values in a row of 128 bytes
constexpr int LOOK = 8;         // chunks at a part's end whose gates are looked at before it is summarised
constexpr float FORGOTTEN = 148;    // nats: decays that leave less than 2^-85 of any finite state

enum Named { VALUES = 1, PRODUCERS = 3 };   // named barriers: one of a warpgroup, one of a producer group

struct Whole {
  static constexpr bool reads = true, resumes = false;
  static constexpr int blocks = 1;              // of a cluster, which hand one another what they produce
};
struct Resumed {
  static constexpr bool reads = true, resumes = true;
  static constexpr int blocks = 1;
};
struct Joined {
  static constexpr bool reads = true, resumes = false;
  static constexpr int blocks = 2;
};
struct Summary {
  static constexpr bool reads = false, resumes = false;
  static constexpr int blocks = 1;
};
struct Earlier : Summary {};    // of Resumed, the tokens before its own

template <class Pass> constexpr bool TOTALS = false;    // whether somebody asks for the decay over all tokens
template <> constexpr bool TOTALS<Summary> = true;

// The type of a gate that all channels of a token share: float32, read without a tile of its own.
struct One {};
template <typename G> constexpr int WIDTH = 4;  // gates of a token that a producer with 4 channels of it has
template <> constexpr int WIDTH<One> = 1;

template <typename T, typename G> struct WarpgroupForwardArgs {
  TensorMap q, k, g;         // boxes of a chunk's tokens and BK channels
  TensorMap v, o_boxes;      // boxes of a chunk's tokens and PANEL columns, swizzled
  Rows<T> o;
  Rows<const float> one;     // the gate where it is One
  const float *u, *initial;  // [H, K] and [N, H, K, V]; null where there is none
  float* final;              // [N, H, K, V] or null
  Shape shape;
  double scale;
  float* decays;   // Summary: [N, H, GROUPS, K], the decay over a part's chunks, every group's share
  i64 channel;     // the first of this launch
  i64 of, needed;  // Summary: of every so many parts the first so many; nobody needs the others' state
  i64 alone;       // Resumed: whether a second part that would have to read all of the first is left to the first's block
};

// What producer groups hand to the consumers, RANKS of them BK channels each; rows of 128 bytes in the tensor cores' 128-byte
// swizzle.
template <typename T, int BK, int RANKS> struct alignas(1024) Handed {
  float q[RANKS][BK / 32][CHUNK][32];   // decayed from the chunk's start; 8 channels in the order 0 2 4 6 1 3 5 7, in every
                                        // second panel 1 3 5 7 0 2 4 6: so stores to two panels lie in all banks
  T k[RANKS][BK / 64][CHUNK][PANEL];    // decayed to the chunk's end
  T A[RANKS][CHUNK][PANEL];             // [query, key], the first 32 columns; then what rounding left over (put_two)
  float decay[RANKS][BK];               // the whole chunk's
};

// Joined: sends what a block has made to the other one, operands and scores of 16 queries by themselves, so that nobody waits
// for all; by one thread, after a barrier of those who made it.
constexpr int SENT = 5;         // copies a chunk
template <class Made> __device__ __forceinline__ void send_operands(const Made& made, int rank, Barrier& full) {
  copy_to_peer(made.q[rank], sizeof made.q[0], full);
  copy_to_peer(made.k[rank], sizeof made.k[0], full);
  copy_to_peer(made.decay[rank], sizeof made.decay[0], full);
}
template <class Made> __device__ __forceinline__ void send_scores(const Made& made, int rank, int half, Barrier& full) {
  copy_to_peer(made.A[rank][16 * half], sizeof made.A[0] / 2, full);
}

// A chunk as it comes from memory.
template <typename T, typename G, int BK> struct alignas(128) Incoming {
  T q[CHUNK][BK], k[CHUNK][BK];
  G g[CHUNK][BK];
};
template <typename T, int BK> struct alignas(128) Incoming<T, One, BK> {
  T q[CHUNK][BK], k[CHUNK][BK];
};

// Operands of scores. Where gates are mild: the keys, laid out as the queries that are handed over, or under one gate both as
// they came, laid out as the keys that are handed over. Else those between blocks.
template <int BK> struct alignas(128) Operands {
  static constexpr int LD = BK + 8;             // two neighbours of 4 rows lie in all banks
  union {
    float all_keys[BK / 32][CHUNK][32];
    struct { u16 plain_queries[BK / 64][CHUNK][PANEL], plain_keys[BK / 64][CHUNK][PANEL]; };
    struct { float queries[2][16][LD], keys[2][16][LD]; };  // 0: between halves; 1: blocks 1, 3 and 0, 2
  };
};

// The last gates of a part, before anything else comes there, and the sums of every 16 tokens'.
template <typename G, int BK> struct Recent {
  G gates[LOOK][CHUNK][BK];
  float sums[2 * LOOK][BK];
};
template <int BK> struct Recent<One, BK> {
  float sums[2 * LOOK][1];
};

// Where this block works: a stretch of one sequence's tokens, and where its state lies.
struct Place {
  i32 sequence, batch, head, v_tile, start, tokens;
  i64 state;                 // where its state begins
  i32 before;                // Resumed: of these tokens, those of the part before, without those that are forgotten
  bool forgot, last;         // Resumed: whether some are, and whether this block comes to the sequence's end
};

template <typename T, typename G, int BK, int BV, int RANKS> struct Shared {
  static constexpr int AHEAD = sizeof(G) <= 2 ? 4 : 3;      // chunks of v under way or at hand
  static constexpr int GROUPS = SLOTS / RANKS;  // of producers
  union {
    struct {
      Handed<T, BK, RANKS> handed[SLOTS];
      T v[BV / PANEL][AHEAD][CHUNK][PANEL];     // then o
      Incoming<T, G, BK> incoming[GROUPS];
      Operands<BK> operands[GROUPS];
    };
    Recent<G, BK> recent;
  };
  float decays[GROUPS][BLOCKS][BK];             // of every block, or their base-2 logarithms
  float own[GROUPS][CHUNK], u[BK];              // RWKV-6: scores of a token with itself, the bonus. One: decays up to a token
  Place place;                                  // here, since registers are scarce
  i32 since[BK / 32];                           // by how many of the last chunks all is forgotten, of 32 channels
  u32 strong[GROUPS];                           // 1 + the group's last turn whose gates were not mild
  Barrier looked, arrived[GROUPS], values[BV / PANEL][AHEAD], full[SLOTS], empty[SLOTS];
};

template <int BV, int RANKS> __device__ __forceinline__ Place place_of(const Shape& shape, u32 block) {
  const u32 tiles = u32(shape.V + BV * RANKS - 1) / (BV * RANKS) * RANKS, H = u32(shape.H), count = u32(shape.count);
  const u32 pair = block / tiles, n = pair / H, h = pair % H;
  const Span span = tokens_of(shape, n % count);
  return {i32(n), i32(n / count), i32(h), i32(block % tiles * BV), i32(span.start), i32(span.stop - span.start),
          i64(pair) * shape.K * shape.V, 0, false, true};
}

// Which of its cluster this block is.
template <class Pass> __device__ __forceinline__ int rank_of() { return Pass::blocks > 1 ? blockIdx.x % Pass::blocks : 0; }

// The block that a block of Resumed stands for: the first parts of all sequences, then the second ones: tails start on
// what the others leave idle.
template <int BV> __device__ __forceinline__ u32 first_parts_first(const Shape& shape, u32 block) {
  const u32 tiles = u32(shape.V + BV - 1) / BV, H = u32(shape.H), sequences = u32(shape.B * shape.count) / 2;
  const u32 n = block / (tiles * H), second = n >= sequences;
  return (2 * (n - second * sequences) + second) * tiles * H + block % (tiles * H);
}

// The address of 16-byte piece `piece` of row `row` in a swizzled tile.
template <typename T> __device__ __forceinline__ T* swizzled(T* tile, int row, int piece) {
  return reinterpret_cast<T*>(reinterpret_cast<char*>(tile) + row * 128 + ((piece ^ row) & 7) * 16);
}

__device__ __forceinline__ u32 bits_of(float x) { return __float_as_uint(x); }
// Tensor cores drop the last 13 bits of a tf32 operand, which takes 2^-11 / (2 ln 2) of it on average: a product of two
// truncated operands is put right by this factor.
constexpr float TRUNCATED = 1.f + 2 * 3.522e-4f, LOG2_TRUNCATED = 1.01587e-3f;

// ---- producers --------------------------------------------------------------------------------------------

// 4 neighbours.
__device__ __forceinline__ void unpack(float (&x)[4], const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  x[0] = four.x, x[1] = four.y, x[2] = four.z, x[3] = four.w;
}
template <typename T> __device__ __forceinline__ void unpack(float (&x)[2], u32 two) {
  x[0] = to_float(T{u16(two)}), x[1] = to_float(T{u16(two >> 16)});
}
template <typename T> __device__ __forceinline__ void unpack(float (&x)[4], uint2 four) {
  x[0] = to_float(T{u16(four.x)}), x[1] = to_float(T{u16(four.x >> 16)});
  x[2] = to_float(T{u16(four.y)}), x[3] = to_float(T{u16(four.y >> 16)});
}
template <typename T> __device__ __forceinline__ void unpack(float (&x)[4], const T* from) {
  unpack<T>(x, *reinterpret_cast<const uint2*>(from));
}

// Each of 8 values summed over LANES lanes; lane l gets the sum of value l % 8.
template <int LANES> __device__ __forceinline__ float sum_each(float (&x)[8]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int n = 0; n < half; ++n) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[n] : x[n + half], half);
      x[n] = (upper ? x[n + half] : x[n]) + other;
    }
  }
  float sum = x[0];
#pragma unroll
  for (int distance = 8; distance < LANES; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
  return sum;
}

__device__ __forceinline__ float dot(const float (&x)[4], const float (&y)[4]) {
  return fmaf(x[3], y[3], fmaf(x[2], y[2], fmaf(x[1], y[1], x[0] * y[0])));
}

// The scores of column `j` of a block and the rows below: pairs[at] = q_{j+1} w, ...
template <class Policy, int W>
__device__ __forceinline__ void column_scores(float* pairs, int j, const float (&q)[TOKENS][4], const float (&k)[4],
                                              const float (&a)[TOKENS][W]) {
  float w[4] = {k[0], k[1], k[2], k[3]};
#pragma unroll
  for (int i = j + 1; i < TOKENS; ++i) {
    if (Policy::reads_before_write) pairs[i - j - 1] = dot(q[i], w);
#pragma unroll
    for (int c = 0; c < 4; ++c) w[c] *= a[i][c % W];
    if (!Policy::reads_before_write) pairs[i - j - 1] = dot(q[i], w);
  }
}

// The scores within a block of 8 tokens, by the lanes that have its channels: columns j and 7 - j have 7 pairs together,
// their two own scores make the rest. Lane l gets those that `each_block_score` names.
template <class Policy, int LANES, typename T, int W>
__device__ __forceinline__ void block_scores(float (&scores)[5], const float (&q)[TOKENS][4], const T* k, int ld,
                                             const float (&a)[TOKENS][W], const float (&u)[4]) {
  float own[8] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    float pairs[8], left[4], right[4];
    unpack(left, k + j * ld);
    unpack(right, k + (7 - j) * ld);
    column_scores<Policy>(pairs, j, q, left, a);
    column_scores<Policy>(pairs + 7 - j, 7 - j, q, right, a);
    if (Policy::reads_before_write)
#pragma unroll
      for (int c = 0; c < 4; ++c) left[c] *= u[c], right[c] *= u[c];
    pairs[7] = dot(q[j], left);
    own[j] = dot(q[7 - j], right);
    scores[j] = sum_each<LANES>(pairs);
  }
  scores[4] = sum_each<LANES>(own);
}

// Calls f(row, column, score) for the scores of a block that this lane has.
template <class F> __device__ __forceinline__ void each_block_score(const float (&scores)[5], int lane, F f) {
  if (lane >= 8) return;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const bool first = lane < 7 - j;
    f(lane == 7 ? j : lane + 1 + (first ? j : 0), lane == 7 || first ? j : 7 - j, scores[j]);
  }
  if (lane < 4) f(7 - lane, 7 - lane, scores[4]);
}

// A tile of scores between blocks: D[16, 8] = queries[16, K] keys[8, K]^T; the last 8 rows only where BOTH.
template <bool BOTH, int BK>
__device__ __forceinline__ void tile_scores(float (&d)[4], const float* queries, const float* keys, int lane) {
  constexpr int LD = Operands<BK>::LD;
  const int g = lane >> 2, t = lane & 3;
  float even[4] = {}, odd[4] = {};
#pragma unroll
  for (int c = 0; c < BK; c += 8) {
    const float2 upper = *reinterpret_cast<const float2*>(queries + g * LD + c + 2 * t);
    const float2 lower = BOTH ? *reinterpret_cast<const float2*>(queries + (g + 8) * LD + c + 2 * t) : float2{0.f, 0.f};
    const float2 key = *reinterpret_cast<const float2*>(keys + g * LD + c + 2 * t);
    const u32 a[4] = {bits_of(upper.x), bits_of(lower.x), bits_of(upper.y), bits_of(lower.y)};
    const u32 b[2] = {bits_of(key.x), bits_of(key.y)};
    mma_tf32(c % 16 ? odd : even, a, b);
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) d[x] = TRUNCATED * (even[x] + odd[x]);
}

// The four tiles of scores between blocks: two between the halves, one within each half.
template <int BK> __device__ __forceinline__ void scores_between(float (&d)[4], const Operands<BK>& s, int tile, int lane) {
  if (tile < 2)
    tile_scores<true, BK>(d, s.queries[0][0], s.keys[0][8 * tile], lane);
  else
    tile_scores<false, BK>(d, s.queries[1][8 * (tile - 2)], s.keys[1][8 * (tile - 2)], lane);
}

// Stores the scores of query i and two keys from 8n + 2t on; of several blocks also what rounding leaves over of them,
// 32 columns on, since scores that cancel between the blocks must not leave the rounding of both.
template <class Pass, typename T>
__device__ __forceinline__ void put_two(T (&A)[CHUNK][PANEL], int i, int n, int t, float x, float y) {
  const u32 two = pack<T>(x, y);
  reinterpret_cast<u32*>(swizzled(A[0], i, n))[t] = two;
  if constexpr (Pass::blocks > 1) {
    float rounded[2];
    unpack<T>(rounded, two);
    reinterpret_cast<u32*>(swizzled(A[0], i, n + 4))[t] = pack<T>(x - rounded[0], y - rounded[1]);
  }
}
template <class Pass, typename T> __device__ __forceinline__ void put_one(T (&A)[CHUNK][PANEL], int i, int n, int j, float x) {
  const T rounded = from_float<T>(x);
  T* const to = swizzled(A[0], i, n) + j;
  *to = rounded;
  if constexpr (Pass::blocks > 1) {             // the same place twice: each type lacks registers with the other's way
    T* const rest = COARSE<T> ? swizzled(A[0], i, n + 4) + j : reinterpret_cast<T*>(reinterpret_cast<u64>(to) ^ 64);
    *rest = from_float<T>(x - to_float(rounded));
  }
}

// Stores a tile where it belongs.
template <class Pass, typename T> __device__ __forceinline__ void put_tile(T (&A)[CHUNK][PANEL], const float (&d)[4], int tile, int lane) {
  const int g = lane >> 2, t = lane & 3, half = tile - 2;
  if (tile < 2) {
    put_two<Pass>(A, 16 + g, tile, t, d[0], d[1]);
    put_two<Pass>(A, 24 + g, tile, t, d[2], d[3]);
  } else {
    put_two<Pass>(A, 16 * half + 8 + g, 2 * half, t, d[0], d[1]);
  }
}

// Tokens of this lane's block behind the sequence's end, as if they were not: they write nothing and decay nothing.
template <class Pass, typename T, typename G, int BK>
__device__ __noinline__ void clear_beyond(Incoming<T, G, BK>& in, int first, int tokens, int channel) {
  for (int row = max(first, tokens); row < first + TOKENS; ++row)
    for (int c = channel; c < channel + 4; ++c) {
      if (Pass::reads) in.q[row][c] = from_float<T>(0.f);
      in.k[row][c] = from_float<T>(0.f);
      if constexpr (WIDTH<G> == 4) in.g[row][c] = from_float<G>(0.f);
    }
  fence_async();                                // the next chunk comes to the same place by another way
}

template <typename T> __device__ __forceinline__ void multiply_plain(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  if constexpr (COARSE<T>)
    mma_bf16(d, a, b);
  else
    mma_f16(d, a, b);
}

// The scores of a half's 16 queries and all keys before them, from operands that meet at the chunk's start.
template <class Policy, class Pass, int HALF, typename T, int BK>
__device__ __forceinline__ void mild_scores(Handed<T, BK, Pass::blocks>& out, int rank, float (&keys)[BK / 32][CHUNK][32], const float* own, int lane) {
  constexpr int QUERIES = 16 * HALF, TILES = 2 + 2 * HALF;
  // This lane's row of the 8x8 matrices (rows of 8, row, channels of 4, piece), and where it would be without piece.
  const int upper = lane & 7, rows = lane >> 3 & 1, pieces = lane >> 4, g = lane >> 2, t = lane & 3;
  float with_self[2];
  if (Policy::reads_before_write) with_self[0] = own[QUERIES + g], with_self[1] = own[QUERIES + g + 8];
  float d[TILES][4] = {};
#pragma unroll
  for (int c = 0; c < BK; c += 8) {
    u32 a[4], b[4];
    ldmatrix_x4(a, swizzled(out.q[rank][c / 32][QUERIES + 8 * rows], upper, c % 32 / 4 + pieces));
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      ldmatrix_x4(b, swizzled(keys[c / 32][8 * (n + pieces)], upper, c % 32 / 4 + rows));
      const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      mma_tf32(d[n], a, left);
      mma_tf32(d[n + 1], a, right);
    }
  }
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = QUERIES + g + 8 * half, j = 8 * n + 2 * t;
      const auto score = [&](int j, float x) {
        if (8 * n + 8 <= QUERIES) return TRUNCATED * x;
        return j < i ? TRUNCATED * x : j > i ? 0.f : Policy::reads_before_write ? with_self[half] : TRUNCATED * x;
      };
      put_two<Pass>(out.A[rank], i, n, t, score(j, d[n][2 * half]), score(j + 1, d[n][2 * half + 1]));
    }
}

// The same under one gate: operands that are not decayed, whose products are exact, and then the tokens' decays.
template <class Pass, int HALF, typename T, int BK>
__device__ __forceinline__ void plain_scores(T (&A)[CHUNK][PANEL], Operands<BK>& s, const float* decays, int lane) {
  constexpr int QUERIES = 16 * HALF, TILES = 2 + 2 * HALF;
  const int upper = lane & 7, rows = lane >> 3 & 1, pieces = lane >> 4, g = lane >> 2, t = lane & 3;
  float d[TILES][4] = {};
#pragma unroll
  for (int c = 0; c < BK; c += 16) {
    u32 a[4], b[4];
    ldmatrix_x4(a, swizzled(s.plain_queries[c / 64][QUERIES + 8 * rows], upper, c % 64 / 8 + pieces));
#pragma unroll
    for (int n = 0; n < TILES; n += 2) {
      ldmatrix_x4(b, swizzled(s.plain_keys[c / 64][8 * (n + pieces)], upper, c % 64 / 8 + rows));
      const u32 left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
      multiply_plain<T>(d[n], a, left);
      multiply_plain<T>(d[n + 1], a, right);
    }
  }
  const float decay[2] = {decays[QUERIES + g], decays[QUERIES + g + 8]};
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const int j = 8 * n + 2 * t;
    const float back[2] = {inverse(decays[j]), inverse(decays[j + 1])};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = QUERIES + g + 8 * half;
      const auto score = [&](int x) { return j + x <= i ? d[n][2 * half + x] * (decay[half] * back[x]) : 0.f; };
      put_two<Pass>(A, i, n, t, score(0), score(1));
    }
  }
}

// Where a producer works: its block of a chunk's tokens and its 4 channels.
template <int BK> struct Part {
  static constexpr int LANES = BK / 4, THREADS = BLOCKS * LANES;
  int group, thread, block, first, channel;
  __device__ __forceinline__ Part(u32 producer)
      : group(producer / THREADS), thread(producer % THREADS), block(producer % THREADS / LANES), first(block * TOKENS),
        channel(producer % LANES * 4) {}
  // The places in row i of the block of channels 0 and 2, or 1 and 3, of the thread's, which are queries of the state.
  __device__ __forceinline__ float2* pair(float (&tile)[BK / 32][CHUNK][32], int i, int odd) const {
    const u32 c = channel, place = c / 32 * sizeof tile[0] + first * 128 + c % 32 / 8 * 32 + c % 8 * 2;
    return reinterpret_cast<float2*>(reinterpret_cast<char*>(tile) + (place ^ (i ^ odd ^ (c / 32 & 1)) * 16) + i * 128);
  }
  template <typename T> __device__ __forceinline__ uint2* four(T (&tile)[BK / 64][CHUNK][PANEL], int i) const {
    const u32 c = channel, place = c / 64 * sizeof tile[0] + first * 128 + c % 64 * 2;
    return reinterpret_cast<uint2*>(reinterpret_cast<char*>(tile) + (place ^ i * 16) + i * 128);
  }
};

// The gates of a block's token i: those of a producer's channels, or the one, which the block's lane i has.
template <typename T, int BK>
__device__ __forceinline__ void gates_of(float (&g)[1], const Incoming<T, One, BK>&, const Part<BK>&, float one, int i) {
  g[0] = __shfl_sync(0xffffffffu, one, (threadIdx.x & 31) / Part<BK>::LANES * Part<BK>::LANES + i);
}
template <typename T, typename G, int BK>
__device__ __forceinline__ void gates_of(float (&g)[4], const Incoming<T, G, BK>& in, const Part<BK>& me, float, int i) {
  unpack(g, in.g[me.first + i] + me.channel);
}

// What a block says of its gates, for the group's other blocks.
template <int BK>
__device__ __forceinline__ void put_block(float (&decays)[BLOCKS][BK], const Part<BK>& me, const float (&x)[4]) {
  *reinterpret_cast<float4*>(&decays[me.block][me.channel]) = {x[0], x[1], x[2], x[3]};
}
template <int BK>
__device__ __forceinline__ void put_block(float (&decays)[BLOCKS][BK], const Part<BK>& me, const float (&x)[1]) {
  if (me.channel == 0) decays[me.block][0] = x[0];
}
template <int BK>
__device__ __forceinline__ void get_block(float (&x)[4], const float (&decays)[BLOCKS][BK], const Part<BK>& me, int block) {
  unpack(x, &decays[block][me.channel]);
}
template <int BK>
__device__ __forceinline__ void get_block(float (&x)[1], const float (&decays)[BLOCKS][BK], const Part<BK>&, int block) {
  x[0] = decays[block][0];
}

// A chunk of mild gates: queries decayed from its start, keys by the inverse. `refill` is called when the incoming tokens
// have been read, `room` before anything is handed over. Where gates are not mild false, and neither is.
template <class Policy, class Pass, typename T, typename G, int BK, int BV, class Refill, class Room>
__device__ __forceinline__ bool mild_chunk(Shared<T, G, BK, BV, Pass::blocks>& s, Handed<T, BK, Pass::blocks>& out, int rank, Barrier& full, const Part<BK>& me, u32 turn, float one,
                                           Refill refill, Room room) {
  using P = Part<BK>;
  constexpr int W = WIDTH<G>;
  const Incoming<T, G, BK>& in = s.incoming[me.group];
  float (&all_keys)[BK / 32][CHUNK][32] = s.operands[me.group].all_keys;
  float sums[TOKENS][W], sum[W] = {}, size[W] = {};
  uint2 queries[TOKENS], keys[TOKENS];
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    float g[W];
    gates_of(g, in, me, one, i);
    queries[i] = *reinterpret_cast<const uint2*>(in.q[me.first + i] + me.channel);
    keys[i] = *reinterpret_cast<const uint2*>(in.k[me.first + i] + me.channel);
    if (W == 4) largest = larger(larger(largest, larger(queries[i].x, queries[i].y)), larger(keys[i].x, keys[i].y));
#pragma unroll
    for (int c = 0; c < W; ++c) {
      size[c] += fabsf(g[c]);
      sums[i][c] = sum[c] = fmaf(g[c], LOG2E, sum[c]);
    }
  }
  float two[2];
  unpack<T>(two, largest);
  if (!(size[0] <= MILD && size[1 % W] <= MILD && size[2 % W] <= MILD && size[3 % W] <= MILD && fabsf(two[0]) <= LARGE && fabsf(two[1]) <= LARGE)) s.strong[me.group] = turn + 1;
  put_block(s.decays[me.group], me, sum);
  barrier_sync(PRODUCERS + me.group, P::THREADS);   // every block's sums stand, the incoming tokens have been read
  if (s.strong[me.group] == turn + 1) return false;
  constexpr bool SOON = BK + BV < 256 || !Policy::reads_before_write;  // else registers are short: queries are read again
  if constexpr (SOON) refill();

  float before[W], whole[W];                    // up to the block, a logarithm; the whole chunk's decay
  {
    const float b0 = me.block > 0 ? 1.f : 0.f, b1 = me.block > 1 ? 1.f : 0.f, b2 = me.block > 2 ? 1.f : 0.f;
    float four[BLOCKS][W];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) get_block(four[block], s.decays[me.group], me, block);
#pragma unroll
    for (int c = 0; c < W; ++c) {
      before[c] = LOG2_TRUNCATED + fmaf(b0, four[0][c], fmaf(b1, four[1][c], b2 * four[2][c]));
      whole[c] = exp2_approx(four[0][c] + four[1][c] + (four[2][c] + four[3][c]));
    }
  }
  room();
  if (me.block == BLOCKS - 1)
    *reinterpret_cast<float4*>(&out.decay[rank][me.channel]) = {whole[0], whole[1 % W], whole[2 % W], whole[3 % W]};
#pragma unroll
  for (int c = 0; c < W; ++c) whole[c] *= TRUNCATED;
  float own[TOKENS], without[W], u[4];
  unpack(u, &s.u[me.channel]);
#pragma unroll
  for (int c = 0; c < W; ++c) without[c] = exp2_approx(before[c]);
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    float q[4], k[4];
    unpack<T>(q, SOON ? queries[i] : *reinterpret_cast<const uint2*>(in.q[me.first + i] + me.channel));
    unpack<T>(k, keys[i]);
    if (Policy::reads_before_write) {
      const float weighed[4] = {u[0] * k[0], u[1] * k[1], u[2] * k[2], u[3] * k[3]};
      own[i] = dot(q, weighed);
    }
    if constexpr (W == 1) {
      const float with = exp2_approx(before[0] + sums[i][0]), back = inverse(with) * whole[0];
#pragma unroll
      for (int c = 0; c < 4; ++c) q[c] *= with;
      *me.four(s.operands[me.group].plain_queries, i) = queries[i];
      *me.four(s.operands[me.group].plain_keys, i) = keys[i];
      *me.four(out.k[rank], i) = {pack<T>(k[0] * back, k[1] * back), pack<T>(k[2] * back, k[3] * back)};
      if (me.thread % P::LANES == i) s.own[me.group][me.first + i] = with;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float with = exp2_approx(before[c] + sums[i][c]);
        q[c] *= Policy::reads_before_write ? without[c] : with;
        k[c] *= inverse(with);
        without[c] = with;
      }
      *me.pair(all_keys, i, 0) = {k[0], k[2]};
      *me.pair(all_keys, i, 1) = {k[1], k[3]};
      *me.four(out.k[rank], i) = {pack<T>(k[0] * whole[0], k[1] * whole[1]), pack<T>(k[2] * whole[2], k[3] * whole[3])};
    }
    *me.pair(out.q[rank], i, 0) = {q[0], q[2]};
    *me.pair(out.q[rank], i, 1) = {q[1], q[3]};
  }
  if (Policy::reads_before_write) {
    const float score = sum_each<P::LANES>(own);
    if (me.thread % P::LANES < TOKENS) s.own[me.group][me.first + me.thread % P::LANES] = score;
  }
  if constexpr (Pass::blocks > 1) fence_async();
  barrier_sync(PRODUCERS + me.group, P::THREADS);   // the operands of the scores stand
  if constexpr (!SOON) refill();
  if (Pass::blocks > 1 && me.thread == 0) send_operands(out, rank, full);
  constexpr int WARPS = P::THREADS / 32;
  const u32 part = (me.thread / 32 + turn) % WARPS;      // in turn, since every warp has its own tensor core
  if constexpr (W == 1) {
    if (part == 0) plain_scores<Pass, 0>(out.A[rank], s.operands[me.group], s.own[me.group], me.thread % 32);
    if (part == 1) plain_scores<Pass, 1>(out.A[rank], s.operands[me.group], s.own[me.group], me.thread % 32);
  } else {
    if (part == 0) mild_scores<Policy, Pass, 0>(out, rank, all_keys, s.own[me.group], me.thread % 32);
    if (part == 1) mild_scores<Policy, Pass, 1>(out, rank, all_keys, s.own[me.group], me.thread % 32);
  }
  if constexpr (Pass::blocks > 1)
    if (part < 2) {
      fence_async();
      __syncwarp();
      if (me.thread % 32 == 0) send_scores(out, rank, part, full);
    }
  return true;
}

// A chunk of any gates: scores within blocks pair by pair, between them from operands that meet at a block's border.
template <class Policy, class Pass, typename T, typename G, int BK, int BV, class Refill, class Room>
__device__ __forceinline__ void any_chunk(Shared<T, G, BK, BV, Pass::blocks>& s, Handed<T, BK, Pass::blocks>& out, int rank, Barrier& full, const Part<BK>& me, float one, float (&total)[4],
                                          Refill refill, Room room) {
  using P = Part<BK>;
  constexpr int W = WIDTH<G>;
  const Incoming<T, G, BK>& in = s.incoming[me.group];
  Operands<BK>& operands = s.operands[me.group];
  float a[TOKENS][W], q[TOKENS][4], k[TOKENS][4];
#pragma unroll
  for (int i = 0; i < TOKENS; ++i) {
    gates_of(a[i], in, me, one, i);
    if constexpr (Pass::reads) unpack(q[i], in.q[me.first + i] + me.channel);
#pragma unroll
    for (int c = 0; c < W; ++c) a[i][c] = decay_of(a[i][c]);
  }
  float scores[5];
  if constexpr (Pass::reads) {
    float u[4];
    unpack(u, &s.u[me.channel]);
    block_scores<Policy, P::LANES>(scores, q, in.k[me.first] + me.channel, BK, a, u);
  }

  float decay[W];
#pragma unroll
  for (int c = 0; c < W; ++c) decay[c] = 1.f;
#pragma unroll
  for (int i = 0; i < TOKENS; ++i)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if constexpr (Pass::reads && Policy::reads_before_write) q[i][c] *= decay[c % W];
      if (c < W) decay[c % W] *= a[i][c % W];
      if constexpr (Pass::reads && !Policy::reads_before_write) q[i][c] *= decay[c % W];
    }
  __syncwarp();                                 // else products are made early, and there are no registers for that
  put_block(s.decays[me.group], me, decay);
  float suffix[W];
#pragma unroll
  for (int c = 0; c < W; ++c) suffix[c] = 1.f;
#pragma unroll
  for (int i = TOKENS - 1; i >= 0; --i) {
    unpack(k[i], in.k[me.first + i] + me.channel);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      k[i][c] *= suffix[c % W];
      if (c >= 4 - W) suffix[c % W] *= a[i][c % W];
    }
    __syncwarp();
  }
  barrier_sync(PRODUCERS + me.group, P::THREADS);   // every block's decay stands, the incoming tokens have been read
  constexpr bool SOON = BK + BV < 256;        // the largest tile has registers for it only later
  if constexpr (SOON) refill();

  float before[W], after[W], near[W];
#pragma unroll
  for (int c = 0; c < W; ++c) before[c] = after[c] = near[c] = 1.f;
#pragma unroll
  for (int other = 0; other < BLOCKS; ++other) {
    float four[W];
    get_block(four, s.decays[me.group], me, other);
#pragma unroll
    for (int c = 0; c < W; ++c) {
      if (other < me.block) before[c] *= four[c];
      if (other > me.block) after[c] *= four[c];
      if ((me.block == 0 && other == 1) || (me.block == 3 && other == 2)) near[c] = four[c];
    }
  }
  if constexpr (Pass::reads) {
    const bool late = me.block & 1, second = me.block >> 1;
    const auto put_rows = [&](float* to, const float(&x)[TOKENS][4], const float(&by)[W]) {
#pragma unroll
      for (int i = 0; i < TOKENS; ++i)
        *reinterpret_cast<float4*>(to + i * Operands<BK>::LD + me.channel) = {x[i][0] * by[0], x[i][1] * by[1 % W], x[i][2] * by[2 % W], x[i][3] * by[3 % W]};
    };
    float same[W];
#pragma unroll
    for (int c = 0; c < W; ++c) same[c] = 1.f;
    if (late) put_rows(operands.queries[1][8 * second], q, same);
    else put_rows(operands.keys[1][8 * second], k, same);
    if (second) put_rows(operands.queries[0][8 * late], q, near);
    else put_rows(operands.keys[0][8 * late], k, near);
  }
  if constexpr (!SOON) refill();
  room();
#pragma unroll
  for (int i = 0; i < TOKENS; ++i)
    *me.four(out.k[rank], i) = {pack<T>(k[i][0] * after[0], k[i][1] * after[1 % W]), pack<T>(k[i][2] * after[2 % W], k[i][3] * after[3 % W])};
  if (me.block == BLOCKS - 1) {
    float own[W];
#pragma unroll
    for (int c = 0; c < W; ++c) own[c] = decay[c];
    if (!COARSE<T>) get_block(own, s.decays[me.group], me, me.block);     // read again: registers are short
    const float whole[4] = {before[0] * own[0], before[1 % W] * own[1 % W], before[2 % W] * own[2 % W], before[3 % W] * own[3 % W]};
    *reinterpret_cast<float4*>(&out.decay[rank][me.channel]) = {whole[0], whole[1], whole[2], whole[3]};
    if constexpr (TOTALS<Pass>)
#pragma unroll
      for (int c = 0; c < 4; ++c) total[c] *= whole[c];
  }
  if constexpr (Pass::reads) {
    each_block_score(scores, me.thread % P::LANES, [&](int i, int j, float x) {
      put_one<Pass>(out.A[rank], me.first + i, me.block, j, x);
    });
#pragma unroll
    for (int c = 0; c < W; ++c) before[c] *= TRUNCATED;
#pragma unroll
    for (int i = 0; i < TOKENS; ++i) {
      *me.pair(out.q[rank], i, 0) = {q[i][0] * before[0], q[i][2] * before[2 % W]};
      *me.pair(out.q[rank], i, 1) = {q[i][1] * before[1 % W], q[i][3] * before[3 % W]};
    }
    barrier_sync(PRODUCERS + me.group, P::THREADS);   // the operands of the scores between blocks stand
    for (int tile = me.thread / 32; tile < BLOCKS; tile += P::THREADS / 32) {
      float d[4];
      scores_between(d, operands, tile, me.thread % 32);
      put_tile<Pass>(out.A[rank], d, tile, me.thread % 32);
    }
  }
  if constexpr (Pass::blocks > 1) {
    fence_async();
    barrier_sync(PRODUCERS + me.group, P::THREADS);   // all of it stands
    if (me.thread == 0) {
      send_operands(out, rank, full);
      for (int half = 0; half < 2; ++half) send_scores(out, rank, half, full);
    }
  }
}

template <class Policy, class Pass, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void produce(Shared<T, G, BK, BV, Pass::blocks>& s, const WarpgroupForwardArgs<T, G>& args, int thread) {
  using P = Part<BK>;
  constexpr int GROUPS = Shared<T, G, BK, BV, Pass::blocks>::GROUPS;
  const Place& at = s.place;
  const int group = thread / P::THREADS, tokens = at.tokens, rank = rank_of<Pass>(), K = int(args.shape.K - args.channel);
  const i32 channel = i32(args.channel) + rank * BK;
  Incoming<T, G, BK>& in = s.incoming[group];
  const auto fetch = [&](auto pass, int token) {            // by one thread of the group
    if (token >= tokens || thread % P::THREADS) return;
    const i32 row = at.start + token, h = at.head, b = at.batch;
    Barrier& arrived = s.arrived[group];
    const bool reads = Pass::reads && (decltype(pass)::reads || token >= at.before);
    barrier_expect(arrived, reads ? sizeof in : sizeof in - sizeof in.q);
    if constexpr (WIDTH<G> == 4) tensor_load(in.g, args.g, arrived, channel, row, h, b);
    if (reads) tensor_load(in.q, args.q, arrived, channel, row, h, b);
    tensor_load(in.k, args.k, arrived, channel, row, h, b);
  };

  // One: the gate of a token of the block, which its lanes share out; none beyond the end.
  const auto gate_of = [&](int token) {
    const int row = token + P(thread).first + thread % TOKENS;
    return WIDTH<G> == 1 && row < tokens ? *args.one.row(at.batch, at.head, at.start + row) : 0.f;
  };

  fetch(Earlier{}, group * CHUNK);
  float one = gate_of(group * CHUNK);
  float total[4] = {1.f, 1.f, 1.f, 1.f};        // Summary: the decay of this group's chunks
  u32 turn = 0;
  const auto make = [&](auto pass, int token) {
    using Of = decltype(pass);
    forget(thread);                             // addresses are cheaper made anew than held in registers
    const P me{GROUPS > 1 ? u32(thread) : u32(thread) % P::THREADS};      // of one group, which the compiler then knows
    const float gate = one;
    const auto refill = [&] {
      fetch(pass, token + GROUPS * CHUNK);
      one = gate_of(token + GROUPS * CHUNK);
    };
    const u32 slot = Pass::blocks > 1 ? turn % SLOTS : group, used = Pass::blocks > 1 ? turn / SLOTS : turn;
    auto& out = s.handed[Pass::blocks > 1 ? slot : me.group];         // two names of it: with one, registers are lacking
    const auto room = [&] {
      if (used) barrier_wait(s.empty[slot], used - 1 & 1);
    };
    barrier_wait(s.arrived[group], turn & 1);
    if (token + CHUNK > at.tokens)              // the same place twice: each type lacks registers with the other's way
      clear_beyond<Pass>(COARSE<T> ? s.incoming[me.group] : in, me.first, at.tokens - token, me.channel);
    bool mild = false;
    if constexpr (Of::reads && (COARSE<T> || WIDTH<G> == 1)) mild = mild_chunk<Policy, Of>(s, out, rank, s.full[slot], me, turn, gate, refill, room);
    if (!mild) any_chunk<Policy, Of>(s, out, rank, s.full[slot], me, gate, total, refill, room);
    if constexpr (!Of::reads) barrier_sync(PRODUCERS + group, P::THREADS);     // the blocks' decays have been read
    fence_async();
    barrier_arrive(s.full[slot]);
    ++turn;
  };
  int token = group * CHUNK;
  for (; token < tokens; token += GROUPS * CHUNK) {
    if constexpr (Pass::resumes)
      if (token < at.before) {
        make(Earlier{}, token);
        continue;
      }
    make(Pass{}, token);
  }
  if constexpr (!Pass::reads) {
    const P me{u32(thread)};
    if (me.block == BLOCKS - 1 && at.v_tile == 0)
#pragma unroll
      for (int c = 0; c < 4; ++c)
        if (me.channel + c < K)
          args.decays[((i64(at.sequence) * args.shape.H + at.head) * GROUPS + group) * args.shape.K + args.channel + me.channel + c] = total[c];
  }
}

// ---- consumers --------------------------------------------------------------------------------------------

// Calls f(value, pointer to it) for every value of the transposed state that this lane holds and that exists.
template <int BK, typename P, class F>
__device__ __forceinline__ void each(float (&S)[BK / 2], P* state, const Shape& shape, i64 channel, i64 column, F f) {
  const int t = threadIdx.x & 3;
  column += 16 * int(threadIdx.x / 32 % 4) + (threadIdx.x >> 2 & 7);
  P* row = state + (channel + 2 * t) * shape.V + column;
#pragma unroll
  for (int n = 0; n < BK / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x)
      if (channel + 8 * n + 2 * t + (x & 1) < shape.K && column + 8 * (x >> 1) < shape.V)
        f(S[4 * n + x], row + (x & 1) * shape.V + 8 * (x >> 1));
    row += 8 * shape.V;
    __syncwarp();                               // else all addresses are made at once, and there are no registers for that
  }
}

template <int N> __device__ __forceinline__ void decay_state(float (&S)[N], const float* decays) {
#pragma unroll
  for (int n = 0; n < N / 4; ++n) {
    const float2 decay = *reinterpret_cast<const float2*>(&decays[8 * n + 2 * (threadIdx.x & 3)]);
    S[4 * n] *= decay.x, S[4 * n + 1] *= decay.y, S[4 * n + 2] *= decay.x, S[4 * n + 3] *= decay.y;
  }
}

// o = A v, or o += A v, under way.
template <typename T, int BK, int RANKS>
__device__ __forceinline__ void read_scores(float (&o)[16], const u32 (&v)[2][4], const Handed<T, BK, RANKS>& in, bool accumulate) {
#pragma unroll
  for (int rank = 0; rank < RANKS; ++rank) {
    const u64 A = wgmma_tile(in.A[rank], 16, 1024);
#pragma unroll
    for (int piece = 0; piece < 2 * RANKS; ++piece)         // of several blocks, what rounding left over too
      wgmma<T, CHUNK, false>(o, v[piece % 2], A + piece * 32 / 16, accumulate || rank + piece > 0);
  }
}

// o = A v + (q decayed) S, under way; S <- diag(decay) S. The state is read in parts: a part is copied, decayed, and its copy
// multiplied, while the next part is copied; two parts' copies are all that there are registers for. load_values(v) reads v.
template <int W, typename T, int BK, int RANKS, class Load>
__device__ __forceinline__ void read_scores_and_state(float (&o)[16], float (&S)[RANKS * BK / 2], u32 (&v)[2][4],
                                                      const Handed<T, BK, RANKS>& in, Load load_values) {
  constexpr bool SCORES_FIRST = RANKS == 1 && BK == 128;    // there 1 to 3 % faster, elsewhere slower, or lacking registers
  constexpr int PART = BK / (64 * RANKS), PARTS = RANKS * BK / 8 / PART;
  const int t = threadIdx.x & 3;
  const float one = in.decay[0][0];
  u32 a[2][PART][4];
  const auto copy = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n, panel = tile / 4;
      float* x = S + 4 * tile;
      u32(&to)[4] = a[part & 1][n];
      to[0 + panel % 2 * 2] = copy_of(x[0]), to[1 + panel % 2 * 2] = copy_of(x[2]);
      to[2 - panel % 2 * 2] = copy_of(x[1]), to[3 - panel % 2 * 2] = copy_of(x[3]);
      if constexpr (RANKS > 1) continue;        // there are no registers for decays either
      const float2 decay = W == 1 ? float2{one, one} : *reinterpret_cast<const float2*>(&in.decay[0][8 * tile + 2 * t]);
      x[0] *= decay.x, x[1] *= decay.y, x[2] *= decay.x, x[3] *= decay.y;
    }
  };
  const auto multiply = [&](int part) {
#pragma unroll
    for (int n = 0; n < PART; ++n) {
      const int tile = part * PART + n;
      wgmma<tf32, CHUNK, false>(o, a[part & 1][n], wgmma_tile(in.q[0][tile / 4], 16, 1024) + tile % 4 * 32 / 16, SCORES_FIRST || tile > 0);
    }
    wgmma_commit();
  };
  copy(0);
  copy(1);
  wgmma_fence();
  if constexpr (SCORES_FIRST) read_scores(o, v, in, false);
  multiply(0);
  multiply(1);
#pragma unroll
  for (int part = 2; part < PARTS; ++part) {
    wgmma_wait<1>();
    copy(part);
    wgmma_fence();
    multiply(part);
  }
  load_values();                                // again, if first: rather than hold them in registers until here
  if constexpr (!SCORES_FIRST) {
    wgmma_fence();
    read_scores(o, v, in, true);
    wgmma_commit();
  }
  if constexpr (RANKS > 1) decay_state(S, in.decay[0]);
}

template <class Pass, typename T, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<T, G, BK, BV, Pass::blocks>& s, const WarpgroupForwardArgs<T, G>& args) {
  constexpr int RANKS = Pass::blocks, AHEAD = Shared<T, G, BK, BV, RANKS>::AHEAD;
  const int warpgroup = threadIdx.x / 128;
  int thread = threadIdx.x % 128;
  const Place& at = s.place;
  const i32 first = at.v_tile + warpgroup * PANEL;
  const int tokens = at.tokens;
  const float scale = float(args.scale);

  float S[RANKS * BK / 2] = {};
  if (args.initial && !at.forgot) each<RANKS * BK>(S, args.initial + at.state, args.shape, args.channel, first, [](float& x, const float* from) { x = *from; });

  // Calls f(row of the chunk, piece of the row) for the 16-byte pieces of v and o that this thread moves.
  const auto each_piece = [&](auto f) {
#pragma unroll
    for (int lower = 0; lower < CHUNK; lower += 16) f(thread / 8 + lower, thread % 8);
  };
  const auto fetch = [&](int turn) {            // by one thread of the warpgroup
    const int slot = turn % AHEAD;
    Barrier& arrived = s.values[warpgroup][slot];
    barrier_expect(arrived, sizeof s.v[0][0]);
    tensor_load(s.v[warpgroup][slot], args.v, arrived, first, at.start + turn * CHUNK, at.head, at.batch);
  };
  // Where this lane's row begins of the four 8x8 matrices that are 16 tokens of this warp's 16 columns.
  const auto matrix_row = [&](T* tile, int token) {
    return swizzled(tile, token + (thread & 7) + (thread >> 4 & 1) * 8, thread / 32 * 2 + (thread >> 3 & 1));
  };

  if (thread == 0)
    for (int turn = 0; turn < AHEAD && turn * CHUNK < tokens; ++turn) fetch(turn);
  const auto take = [&](auto pass, int turn) {
    using Of = decltype(pass);
    const int token = turn * CHUNK, slot = turn % SLOTS;
    const bool partial = token + CHUNK > tokens;
    auto& in = s.handed[slot];
    forget(thread);                             // addresses are cheaper made anew than held in registers
    float o[16];
    barrier_wait(s.values[warpgroup][turn % AHEAD], turn / AHEAD & 1);
    u32 v[2][4];
    T* const tile = s.v[warpgroup][turn % AHEAD][0];
    if (partial) {                              // tokens behind the end may be anything, and 0 times that NaN
      each_piece([&](int row, int piece) {
        if (token + row >= tokens) *reinterpret_cast<uint4*>(swizzled(tile, row, piece)) = {0, 0, 0, 0};
      });
      barrier_sync(VALUES + warpgroup, 128);
    }
    const auto load_values = [&] {
      forget(thread);
      ldmatrix_x4_trans(v[0], matrix_row(tile, 0));
      ldmatrix_x4_trans(v[1], matrix_row(tile, 16));
    };
    load_values();
    barrier_wait(s.full[slot], turn / SLOTS & 1);
    forget(thread);

    if constexpr (Of::reads)
      read_scores_and_state<WIDTH<G>>(o, S, v, in, load_values);
    else
      decay_state(S, in.decay[0]);
    wgmma_keep(S);
    wgmma_fence();
    const u64 k = wgmma_tile(in.k, CHUNK * 128, 1024);
    wgmma<T, RANKS * BK, true>(S, v[0], k, true);
    wgmma<T, RANKS * BK, true>(S, v[1], k + 16 * 128 / 16, true);
    wgmma_commit();

    if constexpr (!Of::reads) barrier_sync(VALUES + warpgroup, 128);      // every warp has read v
    if (thread == 0 && turn && token + (AHEAD - 1) * CHUNK < tokens) {  // meanwhile v takes the place of the last o
      tensor_store_wait();
      fetch(turn + AHEAD - 1);
    }
    __syncwarp();
    if constexpr (Of::reads) {                  // o takes the place of v
      wgmma_wait<1>();
      wgmma_keep(o);
      forget(thread);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* x = o + 8 * half;
        const u32 rows[4] = {pack<T>(scale * x[0], scale * x[1]), pack<T>(scale * x[2], scale * x[3]),
                             pack<T>(scale * x[4], scale * x[5]), pack<T>(scale * x[6], scale * x[7])};
        stmatrix_x4_trans(matrix_row(tile, 16 * half), rows);
      }
    }
    wgmma_wait<0>();
    wgmma_keep(S);
    if (thread % 32 == 0) {
      barrier_arrive(s.empty[slot]);
      if constexpr (RANKS > 1) arrive_at_peer(s.empty[slot]);
    }
    if constexpr (Of::reads) {
      fence_async();
      barrier_sync(VALUES + warpgroup, 128);    // o stands
      if (partial) {
        T* const to = args.o.row(at.batch, at.head, at.start + token) + first;
        const i64 columns = args.shape.V - first;
        each_piece([&](int row, int piece) {
          if (token + row < tokens && 8 * piece < columns)
            *reinterpret_cast<uint4*>(to + row * args.o.t + 8 * piece) = *reinterpret_cast<const uint4*>(swizzled(tile, row, piece));
        });
      } else if (thread == 0) {
        tensor_store(args.o_boxes, tile, first, at.start + token, at.head, at.batch);
      }
    }
  };
  int turn = 0;
  if constexpr (Pass::resumes)
    for (; turn * CHUNK < at.before; ++turn) take(Earlier{}, turn);
  for (; turn * CHUNK < tokens; ++turn) take(Pass{}, turn);
  tensor_store_wait();
  if (args.final && at.last) each<RANKS * BK>(S, args.final + at.state, args.shape, args.channel, first, [](float& x, float* to) { *to = x; });
}

// ---- before the roles part ------------------------------------------------------------------------------------------

template <int BV> constexpr int CONSUMER_THREADS = BV * 2;
template <class Pass, int BK, int BV> constexpr int ALL_THREADS = BV * 2 + SLOTS / Pass::blocks * Part<BK>::THREADS;

// How many of a part's tokens nothing is left of at its end: its last chunks' gates tell whether a state that the part
// has before them is forgotten after. Where they do not, none; they are few, and looking at all would take longer.
template <class Pass, typename T, typename G, int BK, int BV>
__device__ __forceinline__ int forgotten(Shared<T, G, BK, BV, Pass::blocks>& s, const WarpgroupForwardArgs<T, G>& args, int start,
                                         int tokens) {
  constexpr int ACROSS = WIDTH<G> == 4 ? BK / 4 : 1, PARTS = 2 * LOOK;
  const Place& at = s.place;
  const int first = (tokens + CHUNK - 1) / CHUNK - LOOK, lane = threadIdx.x % ACROSS;
  if (first <= 0) return 0;
  if constexpr (WIDTH<G> == 4) {
    if (threadIdx.x == 0) {
      barrier_expect(s.looked, sizeof s.recent.gates);
      for (int chunk = 0; chunk < LOOK; ++chunk)
        tensor_load(s.recent.gates[chunk], args.g, s.looked, i32(args.channel), start + (first + chunk) * CHUNK, at.head, at.batch);
    }
    barrier_wait(s.looked, 0);
  }
  for (int part = threadIdx.x / ACROSS; part < PARTS; part += ALL_THREADS<Pass, BK, BV> / ACROSS) {
    float sum[WIDTH<G>] = {};
#pragma unroll
    for (int row = 16 * part; row < 16 * part + 16; ++row) {
      const int token = first * CHUNK + row;
      if (token >= tokens) break;
      float g[WIDTH<G>];
      if constexpr (WIDTH<G> == 4) unpack(g, s.recent.gates[0][row] + 4 * lane);
      else g[0] = *args.one.row(at.batch, at.head, start + token);
#pragma unroll
      for (int c = 0; c < WIDTH<G>; ++c) sum[c] += g[c];
    }
#pragma unroll
    for (int c = 0; c < WIDTH<G>; ++c) s.recent.sums[part][WIDTH<G> * lane + c] = sum[c];
  }
  __syncthreads();
  if (threadIdx.x < BK) {
    const int c = WIDTH<G> == 4 ? threadIdx.x : 0;
    int since = LOOK;
    for (float sum = 0; args.channel + c < args.shape.K && !(sum <= -FORGOTTEN); sum += s.recent.sums[2 * since][c] + s.recent.sums[2 * since + 1][c])
      if (--since < 0) break;
    for (int distance = 16; distance > 0; distance /= 2) since = min(since, __shfl_xor_sync(0xffffffffu, since, distance));
    if (threadIdx.x % 32 == 0) s.since[threadIdx.x / 32] = since;
  }
  __syncthreads();
  int since = LOOK;
  for (int of : s.since) since = min(since, of);
  return since < 0 ? 0 : (first + since) * CHUNK;
}

// Of a sequence cut in two: the tokens of this block, whose state is the sequence's. Whether there are any.
template <class Pass, typename T, typename G, int BK, int BV>
__device__ __forceinline__ bool share(Shared<T, G, BK, BV, Pass::blocks>& s, const WarpgroupForwardArgs<T, G>& args, Place& at) {
  const i32 part = at.sequence % i32(args.shape.count), second = part % 2;
  const i64* const bounds = args.shape.bounds + (part - second);
  const i32 start = i32(bounds[0]), first = i32(bounds[1]) - start, both = i32(bounds[2]) - start;
  const int skipped = second || args.alone ? forgotten<Pass>(s, args, start, first) : 0;
  const bool alone = args.alone && !skipped;
  at.state = (i64(at.sequence / 2) * args.shape.H + at.head) * args.shape.K * args.shape.V;
  at.last = second || alone;
  if (second) at.start = start + skipped, at.before = first - skipped, at.forgot = skipped > 0;
  at.tokens = (at.last ? both : first) - (at.start - start);
  return !(second && alone);
}

template <class Policy, class Pass, typename T, typename G, int BK, int BV>
__global__ void __cluster_dims__(Pass::blocks) __launch_bounds__(ALL_THREADS<Pass, BK, BV>, BK + BV == 128 ? 2 : 1)
warpgroup_forward(const __grid_constant__ WarpgroupForwardArgs<T, G> args) {
  using S = Shared<T, G, BK, BV, Pass::blocks>;
  S& s = *reinterpret_cast<S*>(dynamic_smem());
  Place place = place_of<BV, Pass::blocks>(args.shape, Pass::resumes ? first_parts_first<BV>(args.shape, blockIdx.x) : blockIdx.x);
  if (!Pass::reads && place.sequence % i32(args.of) >= args.needed) return;
  if (threadIdx.x == 0) s.place = place;
  if (threadIdx.x == 0) {
    for (int group = 0; group < S::GROUPS; ++group) barrier_init(s.arrived[group], 1);
    for (int slot = 0; slot < SLOTS; ++slot) {
      barrier_init(s.full[slot], Part<BK>::THREADS + (Pass::blocks - 1) * SENT);
      barrier_init(s.empty[slot], CONSUMER_THREADS<BV> / 32 * Pass::blocks);
    }
  }
  if (threadIdx.x == 0)
    for (int slot = 0; slot < BV / PANEL * S::AHEAD; ++slot) barrier_init(s.values[0][slot], 1);
  // A sequence's first rows may be one score alone, which is to be exact: its first chunk does not count as mild.
  if (threadIdx.x < S::GROUPS) s.strong[threadIdx.x] = WIDTH<G> == 4 && threadIdx.x == 0;
  if (Pass::reads && Policy::reads_before_write)
    for (int c = threadIdx.x; c < BK; c += ALL_THREADS<Pass, BK, BV>) {
      const i64 channel = rank_of<Pass>() * BK + c;
      s.u[c] = channel < args.shape.K ? args.u[place.head * args.shape.K + channel] : 0.f;
    }
  if constexpr (!Pass::reads || Pass::resumes) {
    if (threadIdx.x == 0) barrier_init(s.looked, 1);
    fence_async();
    __syncthreads();
    if constexpr (Pass::resumes) {
      if (!share<Pass>(s, args, place)) return;
    } else {
      const int skipped = forgotten<Pass>(s, args, place.start, place.tokens);
      place.start += skipped, place.tokens -= skipped;
    }
    if (threadIdx.x == 0) s.place = place;
  }
  for (int i = threadIdx.x; i < SLOTS * CHUNK * PANEL; i += ALL_THREADS<Pass, BK, BV>)
    s.handed[i / (CHUNK * PANEL)].A[rank_of<Pass>()][i / PANEL % CHUNK][i % PANEL] = from_float<T>(0.f);    // no key after its query
  fence_async();
  if constexpr (Pass::blocks > 1) cluster_sync();
  else __syncthreads();
  // Where registers are scarce, consumers get some of the producers'.
  constexpr int THREADS = ALL_THREADS<Pass, BK, BV>, CONSUMERS = CONSUMER_THREADS<BV>;
  constexpr int UP = THREADS == 512 ? 144 : THREADS == 384 && Pass::blocks > 1 ? 192 : 0;
  constexpr int DOWN = UP == 144 ? 112 : 120;
  if (threadIdx.x < CONSUMERS) {
    if constexpr (UP) registers_up<UP>();
    consume<Pass>(s, args);
  } else {
    if constexpr (UP) registers_down<DOWN>();
    produce<Policy, Pass>(s, args, threadIdx.x - CONSUMERS);
  }
  if constexpr (Pass::blocks > 1) cluster_sync();           // nobody leaves while others copy to it or arrive
}
