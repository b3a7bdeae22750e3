// what      What Hopper's second backward pass keeps in shared memory, and its arguments.
// smem      ChannelStage: what a chunk's channels have, and results in place of it; ValueStage: likewise the columns of
//           V; Shared: what meets in the chunk, A, and C for dv
// barriers  full, arrived: a chunk's channels are there, and its columns; done: so are the results; pairs: dA stands,
//           and v for C; operands: so do the decayed queries and keys and C for dv, and C has read v; within: these
//           queries and keys have been read; scores: A stands
// limits    as backward_keys.cu
#include "gated/sm90/growth.cuh"
#include "gated/sm90/backward_lookups.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g, weight, dk, dv, dg;  // boxes of a chunk's tokens and 128 bytes, swizzled
  Rows<const T> q_rows, k_rows, v_rows, do_rows;
  Rows<const G> g_rows, weight_rows;
  Rows<T> dk_rows, dv_rows;
  Rows<G> dg_rows;
  const float *u, *dht;  // null where there is none
  const float *ends, *sums;
  float* kept;
  float* dh0;  // or null
  Shape shape;
  double scale;
  i64 P, joined;  // as backward_queries
  i64 adds;       // whether dk and dg add to what they are for other columns
  i64 adds_dv;    // whether dv adds to what it is for other channels
};

template <typename T, typename G, int BK> struct alignas(1024) ChannelStage {
  Tile<T, BK> q, k;       // q: half of the queries within, then dk; k: then what C has of them
  Tile<G, BK> g, weight;  // g: then the other half of the queries within, then dg
};
template <typename T, int BV> struct alignas(1024) ValueStage {
  Tile<T, BV> v, do_;  // v: then dv
  Pairs dA;            // RWKV-6: that of a token with itself is its own_at
};

// A byte of every warp.
template <int BK> struct WarpFlagsOf {
  using Type = u64;
};
template <> struct WarpFlagsOf<64> {
  using Type = u32;
};
template <int BK> using WarpFlags = typename WarpFlagsOf<BK>::Type;

// RWKV-6: tokens' scores with themselves, of two tokens what each lane of a warp with channels has of them. Where gates
// are float32, these lie where a warpgroup's second half of g was, which no queries take.
using OwnShares = float2[SUBCHUNKS][32];
template <typename G, int BK> struct OwnScores {
  OwnShares shares[BK / 16];

  template <class Stage> __device__ __forceinline__ OwnShares& of(Stage&, int warp) { return shares[warp]; }
};
template <int BK> struct OwnScores<float, BK> {
  template <class Stage> __device__ __forceinline__ OwnShares& of(Stage& in, int warp) {
    return reinterpret_cast<OwnShares&>(in.g[warp / 4 * 2 + 1][warp % 4 * (CHUNK / 4)]);
  }
};

template <typename T, typename G, int BK, int BV, class Schedule> struct Shared {
  static constexpr int STAGES = 2, VALUE_STAGES = sizeof(G) == 2 ? 3 : 2;  // as many as there is room for
  ChannelStage<T, G, BK> channels[STAGES];
  ValueStage<T, BV> values[VALUE_STAGES];
  T C[BK / 64][BV][64];         // [column of V, channel], swizzled
  ReadTile<BV> read;            // v of the next chunk, for products with C in tf32
  Tile<float, BK> keys_within;  // laid out by within_at, with channels 1 and 2 of four in each other's place
  Tile<T, BK> by8, by16;        // Across: queries and keys have different sub-chunks
  float A[CHUNK][CHUNK];        // [key, query], queries and keys by score_offset
  OwnScores<G, BK> own;
  float largest[2][BK / 16];  // of C, every warp's share; chunks take turns
  float sums[2][BK];          // of the chunk's queries, as the first pass leaves them; likewise
  WarpFlags<BK> growth[2];    // whether gates of its channels grow; likewise
  alignas(16) Lookups<LOOKUPS<G, BK>, BK> lookups;
  float keep[Schedule::in_turn ? BK / 16 : 1];          // for `forgets`; in turn each warp's
  WorkTile place;                                       // OneEach; here, since registers are scarce
  ChunkPlaces<Schedule, true, VALUE_STAGES> places[4];  // of each warp that moves chunks
  Barrier full[STAGES], done[STAGES], arrived[VALUE_STAGES], pairs[VALUE_STAGES], operands, within, scores;
};
