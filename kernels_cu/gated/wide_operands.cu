// what      GLA and RWKV-6 forward with more than 128 channels: the operands of a chunk of 32 tokens for
//           wide_forward.cu, once for all columns of V: queries and keys times decays, scores A, and the chunk's decay
//           D.
// math      decays [K] are e^(sum of log gates g): D over all gates of the chunk, D_ij over gates j + 1 to i, E_i over
//           those up to i, L_j over those after j. RWKV-6: D_ij and E_i end with gate i - 1.
//           A_ij = q_i . D_ij k_j over all channels, j <= i (RWKV-6: A_ii = q_i . u k_i); E_i q_i, L_j k_j
// shapes    q k g [B, H, T, K], u [H, K]; operands, scores, decays: see wide_storage.cuh
// grid      a block for every (batch, head, chunk)
// smem      Shared: inputs of two tiles of 128 channels, operands of the current tile's scores, the scores. A warp has
//           a span of 4 tokens (its share), and one tile of scores (its task)
// barriers  two for every 128 channels: a tile has been copied and its decays computed | its operands are in shared
//           memory; then: all tiles have been read | a token's score with itself is in shared memory | all scores are
// numerics  as gated/forward.cu. Scores of tiles add up in float32 and may cancel: those in sub-chunks are products in
//           tf32
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    bfloat16
//
// From the includes:
//   WIDE = 128: channels of a tile; TILE_SIZE: its numbers, of CHUNK = 32 tokens; SCORES: numbers of a chunk's scores
//   Share (forward_operands.cuh): a warp's span of 4 tokens, of which a lane has LANE_CHANNELS channels from
//     coord.channel on; coord.row(i): its token i in the chunk
//   load_gates, compute_span_decay, store_decay: a lane's gates, the decay over their span, its place in shared memory;
//     any_gate_too_large: whether a gate is above GROWTH or NaN; make_operands: stores queries and keys, decayed
//   copy_rows, fetch_chunk_gates: start copies, of rows and of a thread's gates; copy_unaligned_rows: of rows that are
//     not multiples of 16 bytes
//   ScoreTask (forward_products.cuh): the 16 queries and 8 keys whose scores a warp computes; score_task computes them,
//     put_scores stores them in s.A
#include "read_order.cuh"
#include "gated/forward_copies.cuh"
#include "gated/forward_operands.cuh"
#include "gated/forward_products.cuh"
#include "gated/wide_storage.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const G> g;
  const float* u;  // [H, K]; null for GLA
  T *operands, *scores;
  float* decays;
  Shape shape;
  i64 bytes;  // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh; T: bfloat16; G: the type of g.
template <class ReadOrder, typename T, typename G>
__global__ void __launch_bounds__(256, 2) gated_wide_operands(const Args<T, G> args) {
  constexpr int THREADS = 256, BT = CHUNK<T>, PRODUCTS = 1;
  using Share = WarpShare<T, WIDE, THREADS / 32>;
  static_assert(Share::SHARES_PER_WARP == 1 && Share::CHANNEL_PARTS == 1 && TASKS<T> == THREADS / 32);
  static_assert(IN_PLACE<T>, "decayed queries and keys replace s.q and s.k, from where they are stored");
  auto& s = *reinterpret_cast<Shared<SplitChannels, T, G, WIDE, 16>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 NC = u32(shape.NC), chunk = blockIdx.x, c = chunk % NC, h = chunk / NC % u32(shape.H);
  const u32 b = chunk / NC / u32(shape.H), tiles = u32(shape.K + WIDE - 1) / WIDE;
  const Span span = chunk_tokens(shape, c);
  const int rows = int(span.stop - span.start), bytes = int(args.bytes), warp = threadIdx.x >> 5;
  const T *q = args.q.row(b, h, span.start), *k = args.k.row(b, h, span.start);
  const G* g = args.g.row(b, h, span.start);

  // Start copying a tile of 128 channels of the chunk: `fetch` its queries and keys, fetch_gates_of the gates, of which
  // a thread copies those that it alone reads.
  const auto fetch = [&](int tile, int stage) {
    const int channel = tile * WIDE, channels = int(min(shape.K - channel, i64(WIDE)));
    if (bytes == 16) {  // asked once for both
      copy_rows<16, BT, WIDE, THREADS>(s.k[stage], k + channel, args.k.token_stride, rows, channels);
      copy_rows<16, BT, WIDE, THREADS>(s.q[stage], q + channel, args.q.token_stride, rows, channels);
    } else {
      copy_unaligned_rows<BT, WIDE, THREADS>(s.k[stage], k + channel, args.k.token_stride, rows, channels, bytes);
      copy_unaligned_rows<BT, WIDE, THREADS>(s.q[stage], q + channel, args.q.token_stride, rows, channels, bytes);
    }
  };
  const auto fetch_gates_of = [&](int tile) {
    const int channel = tile * WIDE, channels = int(min(shape.K - channel, i64(WIDE)));
    fetch_chunk_gates<Share, WIDE>(s.gates, args.g, b, h, span.start, rows, channel, channels, bytes);
  };

  clear_scores<Share, THREADS>(s);
  const ScoreTask<T> task(warp, warp < BT / SUB_CHUNK);
  float scores[4] = {}, self_score = 0.f;  // of this warp's task; of token threadIdx.x with itself
  bool grows = false;                      // whether a gate that this thread has read exceeds GROWTH
  fetch(0, 0);
  fetch_gates_of(0);
  cp_async_commit();
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    const int stage = tile & 1;
    const i64 index_of_tile = i64(chunk) * tiles + tile;
    cp_async_wait<0>();
    {
      const Share coord(0);
      Gates<Share::LANE_CHANNELS, G> gates;
      float decay[Share::LANE_CHANNELS];
      load_gates<WIDE>(gates, s.gates, coord);
      compute_span_decay<Share::LANE_CHANNELS>(decay, gates);
      store_decay(s.span_decays[coord.span], coord, decay);
      grows |= any_gate_too_large<Share::LANE_CHANNELS>(gates);
    }
    if (ReadOrder::reads_before_write && threadIdx.x < WIDE) {
      const i64 channel = tile * WIDE + threadIdx.x;
      s.u[threadIdx.x] = channel < shape.K ? args.u[h * shape.K + channel] : 0.f;
    }
    __syncthreads();  // the tile and its spans' decays are in shared memory; the previous operands have been read
    if (tile + 1 < tiles) fetch(tile + 1, stage ^ 1);
    // Stores all operands of the tile; decayed queries and keys for the state replace s.q[stage] and s.k[stage]. With
    // 128 channels `grows`, in which threads may differ, changes nothing there.
    TokenDecays<Share> decays;
    make_operands<ReadOrder, PRODUCTS>(s, stage, Share(0), decays, grows);
    if (tile + 1 < tiles) fetch_gates_of(tile + 1);
    cp_async_commit();
    __syncthreads();  // the operands are in shared memory
    float tile_scores[4];
    score_task<ReadOrder, PRODUCTS>(tile_scores, s, task);
#pragma unroll
    for (int x = 0; x < 4; ++x) scores[x] += tile_scores[x];
    if (threadIdx.x < BT) self_score += s.direct[0][0][threadIdx.x];
    const uint4 *queries = reinterpret_cast<const uint4*>(s.q[stage]),
                *keys = reinterpret_cast<const uint4*>(s.k[stage]);
    uint4* to = reinterpret_cast<uint4*>(args.operands + index_of_tile * 2 * TILE_SIZE);
    constexpr int PIECES = TILE_SIZE * sizeof(T) / 16;
#pragma unroll
    for (int index = threadIdx.x; index < PIECES; index += THREADS)
      to[index] = queries[index], to[PIECES + index] = keys[index];
    if (threadIdx.x < WIDE) args.decays[index_of_tile * WIDE + threadIdx.x] = s.decay[threadIdx.x];
  }
  const bool any_grows = __syncthreads_or(grows);  // all tiles have been read
  if (threadIdx.x < BT) s.direct[0][0][threadIdx.x] = self_score;
  __syncthreads();  // scores of tokens with themselves are in shared memory
  // Where gates grow, warps 0 to 3 compute the scores within a sub-chunk each, pair by pair, instead of their task's.
  if (any_grows && warp < BT / SUB_CHUNK)
    score_pairs_one_by_one<ReadOrder, PRODUCTS>(
        s, warp, q + SUB_CHUNK * warp * args.q.token_stride, k + SUB_CHUNK * warp * args.k.token_stride,
        g + SUB_CHUNK * warp * args.g.token_stride, args.q.token_stride, args.k.token_stride, args.g.token_stride,
        rows - SUB_CHUNK * warp, int(shape.K));
  else put_scores<PRODUCTS>(s, task, scores);
  __syncthreads();  // the scores are in shared memory
  for (int index = threadIdx.x; index < SCORES / 8; index += THREADS)
    reinterpret_cast<uint4*>(args.scores + i64(chunk) * SCORES)[index] = reinterpret_cast<const uint4*>(s.A)[index];
}
