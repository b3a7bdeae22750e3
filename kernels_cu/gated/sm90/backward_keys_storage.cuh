// what      The arguments and the shared memory of backward_keys.cu, the second pass of Hopper's backward of GLA and
//           RWKV-6. Its symbols: dS, the gradient of the state; A, the scores of a chunk's queries and keys; dA, their
//           gradient, scale do_i . v_j of query i and key j <= i. A chunk has 32 tokens in four sub-chunks of 8.
// smem      ChannelStage: a chunk's arrays of K channels, copied by the copying warps, read by consumers, which
//           overwrite q by dk and g by dg; ValueStage: likewise its arrays of V columns, v is overwritten by dv;
//           Shared: the decayed queries and keys of the chunk and dS for dv, written by consumers and read by the warps
//           that make A and dv; A
// barriers  mbarriers. full: a ChannelStage has been copied; arrived: a ValueStage has; done: the chunk's results
//           are stored; dA_stored: dA is stored, and so is v in float32; operands: the decayed queries and keys and the
//           copy of dS for dv are stored, and the product of dS and v has ended (makers of A wait for it, and makers of
//           float_v for that of the chunk before); within: the queries and keys within sub-chunks have been read;
//           scores: A is stored. Queries and keys "within sub-chunks" are those times their decays from the middle of
//           their sub-chunk, for pairs in one sub-chunk
// limits    sm_90a; T of bfloat16, float16; BK and BV of 64, 128
//
// Names. Tile<X, D> (chunk_copies.cuh): D numbers of type X of each of the chunk's tokens, swizzled; FloatTile: a Tile
// of float32 numbers in the order that tf32 products take; Pairs (decays.cuh): numbers of pairs of tokens
#include "gated/sm90/backward_schedules.cuh"
#include "gated/sm90/growth.cuh"
#include "gated/sm90/backward_lookups.cuh"

template <typename T, typename G> struct Args {
  TensorMap q, k, v, do_, g, query_share, dk, dv, dg;    // boxes: a chunk's tokens, 128 bytes each, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows, do_rows;  // the same arrays, for chunks that boxes cannot copy
  StridedRows<const G> g_rows, query_share_rows;
  StridedRows<T> dk_rows, dv_rows;
  StridedRows<G> dg_rows;
  const float *u, *dht;  // the bonus and the final state's gradient, or null
  const float *ends, *query_sums;
  float* checkpoints;
  float* dh0;  // or null
  Shape shape;
  double scale;
  i64 P;        // segments of a sequence
  i64 joined;   // P = 3: whether one block computes segments 0 and 1, another one 2 (Segment)
  i64 adds;     // whether dk and dg are added to what they hold, of a launch for other columns of V
  i64 adds_dv;  // whether dv is added to what it holds, of a launch for other channels of K
};

template <typename T, typename G, int BK> struct alignas(1024) ChannelStage {
  // queries_within (backward_scores.cuh) counts on this order of q, k and g, as Shared asserts.
  Tile<T, BK> q, k;  // q: then half of the queries within sub-chunks, then dk; k: then keys decayed to the chunk's end
  Tile<G, BK> g, query_share;  // g: then the other half of the queries within sub-chunks, then dg
  static_assert(sizeof(Tile<T, BK>) + sizeof(Tile<G, BK>) >= sizeof(Tile<float, BK>), "queries within sub-chunks");
};
template <typename T, int BV> struct alignas(1024) ValueStage {
  Tile<T, BV> v, do_;  // v: then dv
  // Behind do_, since multiply_rows (backward_scores.cuh) reads up to 512 bytes behind it, whose products are not used.
  static_assert(sizeof(Pairs) >= 512);
  Pairs dA;  // dA_ij is at pair_at(dA, i, j) (decays.cuh). RWKV-6: scale do_i . v_i of token i: self_weight_at(dA, i)
};

// A byte for every consumer warp, from backward_queries.cu: see FLAGS in query_share.cuh.
template <int BK> using WarpFlags = Select<BK == 64, u32, u64>;
static_assert(sizeof(WarpFlags<64>) == 64 / 16 && sizeof(WarpFlags<128>) == 128 / 16, "a warp has 16 channels");

// RWKV-6: for every consumer warp, sub-chunk and lane, the sums over the lane's two channels of q_i u k_i, of the
// lane's two tokens i. If gates are float32, the sums overwrite the second half of a warpgroup's g, which queries
// within sub-chunks do not need.
using SelfScoreParts = float2[NUM_SUBCHUNKS][32];
template <typename G, int BK> struct SelfScores {
  SelfScoreParts parts[BK / 16];

  template <class Stage> __device__ __forceinline__ SelfScoreParts& parts_of(Stage&, int warp) { return parts[warp]; }
};
template <int BK> struct SelfScores<float, BK> {
  static_assert(sizeof(SelfScoreParts) == CHUNK / 4 * 128, "a warp has a quarter of a panel's rows of 128 bytes");
  template <class Stage> __device__ __forceinline__ SelfScoreParts& parts_of(Stage& in, int warp) {
    return reinterpret_cast<SelfScoreParts&>(in.g[warp / 4 * 2 + 1][warp % 4 * (CHUNK / 4)]);
  }
};

template <typename T, typename G, int BK, int BV, class Schedule> struct Shared {
  static constexpr int STAGES = 2, VALUE_STAGES = sizeof(G) == 2 ? 3 : 2;  // as many as fit
  using Channels = ChannelStage<T, G, BK>;
  using Columns = ValueStage<T, BV>;
  static_assert(OFFSET_OF(Channels, q) == 0 && OFFSET_OF(Channels, g) == 2 * sizeof(Tile<T, BK>), "queries_within");
  static_assert(OFFSET_OF(Columns, dA) == OFFSET_OF(Columns, do_) + sizeof(Tile<T, BV>), "multiply_rows");
  Channels channels[STAGES];
  Columns values[VALUE_STAGES];
  T dS[BK / 64][BV][64];  // [column of V, channel], swizzled; of a chunk token by token the parts of dv
  static_assert(sizeof(T) * BK * BV >= sizeof(float) * SUB_CHUNK * (BK / 16) * BV, "parts (compute_keys_by_token)");
  FloatTile<BV> float_v;  // v of the next chunk, for products with dS in tf32
  // Keys within sub-chunks [token, channel], at within_offset (backward_scores.cuh). Of every four channels the middle
  // two are swapped.
  Tile<float, BK> keys_within;
  // [token, channel]: decayed queries or keys of pairs in different sub-chunks (Across in decays.cuh). by8: queries in
  // the rows of sub-chunks 1 and 3, keys in those of 0 and 2; by16: queries in those of 2 and 3, keys in those of 0, 1.
  Tile<T, BK> by8, by16;
  float A[CHUNK][CHUNK];  // [key, query], at score_offset (backward_scores.cuh)
  // [iteration % 2]: the largest magnitude of each warp's part of dS. Consumers write a row again two iterations later,
  // after they have waited for `within`, at which the row's readers have arrived. Aligned to 16 bytes, since the
  // assembler joins loads into pieces of 16 bytes: unaligned pieces would include a number of the other row.
  alignas(16) float largest[2][BK / 16];
  SelfScores<G, BK> self_scores;
  float query_sums[2][BK];  // [iteration % 2]: the chunk's sums, from backward_queries.cu
  WarpFlags<BK> flags[2];   // [iteration % 2]: the chunk's bytes, from there, too
  alignas(16) Lookups<LOOKUPS<G, BK>, BK> lookups;
  float kept_ratio[Schedule::in_turn ? BK / 16 : 1];         // an argument of `is_forgotten`; with InTurn, of each warp
  WorkTile segment;                                          // OneEach: the block's; here, since registers are scarce
  ChunkPlaces<Schedule, BACKWARDS, VALUE_STAGES> places[4];  // InTurn: of each warp that copies chunks
  MBarrier full[STAGES], done[STAGES], arrived[VALUE_STAGES], dA_stored[VALUE_STAGES], operands, within, scores;
};
