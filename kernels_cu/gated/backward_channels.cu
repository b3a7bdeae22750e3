// what      Backward pass of GLA and RWKV-6, the gradients with a channel axis: dq, dk and dg of one chunk of 64
//           tokens, and the chunk's term of du. Here are the sums over V and over whole chunks; then each warp computes
//           its channels in backward_channels_halves.cuh, and in backward_channels_growth.cuh if gates are large
// math      a_t = exp g_t, a decay for each channel. S [K, V] is the state before the chunk, dS [K, V] the gradient of
//           the state after it. dA_ij = scale do_i . v_j for j <= i.
//             start_i  = product of a_m from the chunk's first token through m = i        (RWKV-6: through m = i - 1)
//             end_j    = product of a_m from m = j + 1 through the chunk's last token
//             decay_ij = product of a_m from m = j + 1 through m = i, for j < i           (RWKV-6: through m = i - 1)
//             dq_i = scale start_i (S do_i) + sum_{j<i} dA_ij decay_ij k_j + dA_ii k_i    (RWKV-6: dA_ii u k_i)
//             dk_j = end_j (dS v_j) + sum_{i>j} dA_ij decay_ij q_i + dA_jj q_j             (RWKV-6: dA_jj u q_j)
//             du   = sum_i dA_ii q_i k_i                                                  (RWKV-6 only)
//           dg_t is the sum of all terms that have a_t as a factor:
//             q_i scale start_i (S do_i) of the queries i >= t                            (RWKV-6: i > t)
//             k_j end_j (dS v_j) of the keys j < t
//             sum over V of S dS, times the product of all a_m of the chunk
//             dA_ij q_i decay_ij k_j of the pairs j < t <= i                              (RWKV-6: j < t < i)
// shapes    q k g dq dk dg [B, H, T, K], v do [B, H, T, V], u [H, K] float32 (RWKV-6's factor of a token's own key),
//           partial_du [B, NC, H, K] float32 (the chunks' terms of du), NC the chunks of a batch row. chunk_states:
//           every chunk's S and dS, as backward_states.cu writes them (`state_tile_index`). Gated: v do [B, heads of
//           the launch, T, V padded to a multiple of 8]. Args (backward_channels_storage.cuh) has the other members
// grid      a block for every (batch, head, chunk, tile of 64 channels); a warp for every 16 channels
// smem      Shared (backward_channels_storage.cuh): q, k, g of the chunk, which dq, dk and dg overwrite; two stages of
//           32 columns of v and do, which PairData overwrites
// barriers  of the block: | below. Its steps in time:
//             (compute_token_by_token)   if gates of columns and channels grow too much; in place of all else
//             for every 32 columns of V
//               fetch_columns |          to a stage; then S do, dS v, S dS and, unless columns have gates, dA |
//             put_dA or copy_scores |    dA and its diagonal, over the stages; q, k and g have arrived
//             sum_pairs_one_by_one       pairs in blocks of tokens that grow, from q, k, g
//             put_border32 and on        border32, decays and state_terms of PairData, from q, k, g; du to memory
//             finish_halves |            dq, dk and dg over q, k and g
//             store                      dq, dk and dg to memory, by all threads
//           From put_dA to `store` a warp reads and writes its own 16 channels of q, k, g and of PairData, and reads
//           all of dA
// numerics  matrix products as in fragments.cuh, with sums in float32. Scales and decays that are not part of an
//           operand multiply these sums. tf32 operands are cut off, which makes them smaller on average: factors, 1 for
//           operands that are not cut off, multiply that away. They are
//             of S do, dS v             TF32_CORRECTION<M> of S, dS times TF32_CORRECTION<M, Value> of v, do:
//                                       HalfChunk, in backward_channels_halves.cuh, multiplies by STATE_CORRECTION
//             of do . v                 TF32_CORRECTION_OF_BOTH<M, Value>, in put_dA
//             of dA with keys, queries  STORED_SCORE<M>, that of dA times that of keys or queries: dA is stored times
//                                       it, but its diagonal is not. sum_pairs_one_by_one, which multiplies stored dA
//                                       in float32, divides by it
//             of a sub-chunk's terms    HalfChunk's `near`, a sum of such products times a query or key that is cut
//             of dg                     off as in products, in float32: TF32_CORRECTION<M>, of that query or key
//           If columns of V have gates, too (Columns; GLA only), dA comes from value_gate/backward_scores.cu.
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// instances T and G are float32: PRODUCTS of 1 and 3. T has 16 bits and G is T or float32: PRODUCTS of 1, and of 3 if
//           it is GLA, Ungated and G is float32: for a gate that all channels share, whose gradient is a sum of dg
//           (segments.portable_backward_cut). Then operands are stored in float32 and split, but not v and do, which
//           are tf32 numbers as they are. Ungated: GLA and RWKV-6; Gated, GatedTurned: GLA
// tests     test_gradient_kernels; Gated, GatedTurned: test_value_gate; gates that grow: test_growth_gradients
//
// From backward_channels_storage.cuh: Values, two stages of v and do, rows LDV apart; PairData, over them; States, a
// lane's numbers of S and dS; ChannelTile, what a block computes; WarpChannels, a warp's part of q, k and g: load(x, q
// or k, m): block m by index p; gates_of_block(m, f): calls f(p, log gates); decay_over(n, octet): the lane's decay
// over sub-chunk n, kept in shared memory; diagonal_of(n): dA_ii. row_of, column_of: of dA's DA_BLOCKS = 10 blocks [16,
// 16] on and below the diagonal, which a warp has by turns. HALF: 4 sub-chunks; STEPS = 2: of 16 columns in a stage.
// Ungated, Gated: whether columns of V have gates; GatedTurned: Gated with K and V, and so q and do, k and v exchanged
//
// From backward_channels_growth.cuh: sum_pairs_one_by_one sets PairSums, the terms of pairs within sub-chunks in dq, dk
// and dg; decays_of_columns: two columns' decays over the chunk, 1 if Ungated; decayed_state_terms: dg's term of S and
// dS; compute_token_by_token: all of a block's work. GROWTH (growth.cuh): 1 nat
//
// Numbers: `m`, a block of 16 tokens of the chunk, 0 to 3; `n`, a sub-chunk of 8 tokens of the chunk, 0 to 7. Of a
// warp's 16 channels a lane has two, by octet (0 or 1): lane_channel + 8 octet. Index p, 0 to 3, of a pair of a lane's
// numbers: octet p % 2 of tokens of sub-chunk p / 2 of a block, or, of a state, of columns 8 (p / 2) and on.
//
// From fragments.cuh. A product is D[16, 8] += A[16, 16] B[16, 8]
//   Math<T, PRODUCTS>    how data T are multiplied. Stored: the type of operands in memory; SPLIT: an operand is two
//                        tf32 numbers
//   Left, Right          a lane's pairs p of A, of B; LeftData, RightData: of data that were loaded, not computed: only
//                        float32 data need the split
//   HeldLeft             a Left, in as few registers as possible, of which a later product makes its operand
//   TF32_CORRECTION<M, E>  of an operand of type E in shared memory, Stored if E is left out; ..._OF_BOTH: its square
//   set, set_unrounded   store a pair, rounded (or split), or as it is, for products that cut it off
//   load_left            A from a tile of shared memory: AS_STORED, [row, depth], or, TRANSPOSED, [depth, row]
//   load_right           two B side by side: AS_STORED, [depth, column], or, TRANSPOSED, [column, depth]
//   multiply             d += A B for two B; with six arguments two such products, whose instructions take turns
// From decays.cuh. a: the decays of a lane's two tokens; decays_of: of its log gates
//   PairDecays(a)        the decays from the sub-chunk's start (`start`) and to its end (`end`)
//   decay_over_subchunk(gates)  the decay of the lane's channel over all 8 tokens, from all four lanes' gates
//   four_lane_sums(x).all  the sum over the four lanes of a channel
//   product_over(x, first, end) = x[first ... end - 1] multiplied
// From backward.cuh and others
//   state_tile_index(shape, heads, FORWARDS for S or BACKWARDS for dS, batch, head, chunk, tile of K, tile of V): where
//                        a tile [64, 64] of a state begins
//   opaque(x)            x, computed again instead of held in a register; SINCE_SM100: cards whose compiler needs more
//                        registers; max_nan(x, y): the larger one, NaN if one is
//   fetch_rows, store_rows  copy rows of an array to a tile of shared memory, and back: of those rows and columns alone
//                        that exist
//   put_pair             stores a lane's two neighbouring numbers
//   padded_width         the width of rows that value_gate's kernels store for this one
//   chunk_of_launch      the number of a chunk in such arrays
//   chunk_tokens(shape, c)  a Span: the first token of chunk c, and the one after its last
#include "gated/backward_channels_halves.cuh"
#include "cards.cuh"

// Stores border32: keys of the first half decayed to the chunk's middle, queries of the second decayed from it.
template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns>
__device__ __forceinline__ void put_border32(const WarpChannels<T, G, PRODUCTS, Columns>& channels,
                                             const float (&sub_decays)[2][NUM_SUBCHUNKS]) {
  auto& s = channels.s;
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m) {
    float2 x[4];
    HeldLeft<Math<T, PRODUCTS>> operand;
    channels.load(x, m < BLOCKS / 2 ? s.k : s.q, m);
    channels.gates_of_block(m, [&](int p, float2 gates) {
      const PairDecays<ReadOrder> decays(decays_of(gates));
      const int n = 2 * m + (p >> 1);
      const float between = m < BLOCKS / 2 ? product_over(sub_decays[p & 1], n + 1, HALF)
                                           : product_over(sub_decays[p & 1], HALF, n);  // of the sub-chunks between
      operand.set(p, between * (m < BLOCKS / 2 ? decays.end : decays.start) * x[p]);
    });
    s.pairs.border32[m][threadIdx.x] = operand;
  }
}

// Sets sub_decays[octet], the products of decays over each sub-chunk. Returns, to all lanes alike, in bit m whether a
// gate of block m exceeds GROWTH or is NaN, which max_nan keeps: then pairs within its sub-chunks are summed one by
// one, not by way of the sub-chunk's middle.
template <typename T, typename G, int PRODUCTS, class Columns>
__device__ __forceinline__ u32 growing_blocks(const WarpChannels<T, G, PRODUCTS, Columns>& channels,
                                              float (&sub_decays)[2][NUM_SUBCHUNKS]) {
  u32 growing = 0;
#pragma unroll
  for (int m = 0; m < BLOCKS; ++m) {
    float largest = 0.f;
    channels.gates_of_block(m, [&](int p, float2 gates) {
      sub_decays[p & 1][2 * m + (p >> 1)] = decay_over_subchunk(gates);
      largest = max_nan(gates.x, max_nan(gates.y, largest));
    });
    if (__any_sync(0xffffffffu, !(largest <= GROWTH))) growing |= 1u << m;
  }
  return growing;
}

// Adds to du, by octet, the terms dA_ii q_i k_i of this lane's tokens.
template <typename T, typename G, int PRODUCTS, class Columns>
__device__ __forceinline__ void add_du(float (&du)[2], const WarpChannels<T, G, PRODUCTS, Columns>& channels) {
#pragma unroll 1
  for (int m = 0; m < BLOCKS; ++m) {
    float2 q[4], k[4];
    channels.load(q, channels.s.q, m);
    channels.load(k, channels.s.k, m);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float2 terms = channels.diagonal_of(2 * m + (p >> 1)) * q[p] * k[p];
      du[p & 1] += terms.x + terms.y;
    }
  }
}

// Copies dA and its diagonal, of columns with gates, to shared memory. chunk: its number in `scores`. `scores` has all
// factors already (Args::scores), and zeros on the diagonal. A copy that starts above the diagonal stores zeros;
// `scores` has zeros where another one reaches beyond it.
template <class M, class Args>
__device__ __forceinline__ void copy_scores(PairData<M>& pairs, const Args& args, i64 chunk) {
  using Stored = typename M::Stored;
  constexpr int PIECE = 16 / sizeof(Stored);  // numbers that one copy moves
  static_assert(CHUNK % PIECE == 0 && LDA % PIECE == 0, "a copy is of one row, and starts on 16 bytes");
  const Stored* from = static_cast<const Stored*>(args.scores) + chunk * (CHUNK * CHUNK);
#pragma unroll 1
  for (int index = threadIdx.x * PIECE; index < CHUNK * CHUNK; index += THREADS * PIECE)
    cp_async<16>(pairs.dA + index / CHUNK * LDA + index % CHUNK, from + index, index % CHUNK <= index / CHUNK);
  if (threadIdx.x < CHUNK) pairs.diagonal[threadIdx.x] = args.diagonal[chunk * CHUNK + threadIdx.x];
  cp_async_commit();
  cp_async_wait<0>();
}

// Stores one of dA's blocks [16, 16], from its accumulators, the sums of do . v without `scale`.
template <class M, typename Value>
__device__ __forceinline__ void put_dA(PairData<M>& pairs, const float (&products)[2][4], int block, float scale) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int right = 0; right < 2; ++right)  // the block's left 8 columns, then its right ones
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {  // its upper 8 rows, then its lower ones
      const int i = 16 * row_of(block) + (lane >> 2) + 8 * lower,
                j = 16 * column_of(block) + 8 * right + 2 * (lane & 3);
      // dA_ij and dA_i(j+1), and the same as operands
      const float2 exact = TF32_CORRECTION_OF_BOTH<M, Value> * scale *
                           float2{products[right][2 * lower], products[right][2 * lower + 1]};
      const float2 operand = STORED_SCORE<M> * exact;
      put_pair(pairs.dA + i * LDA + j, float2{j < i ? operand.x : 0.f, j + 1 < i ? operand.y : 0.f});
      if (i == j) pairs.diagonal[i] = exact.x;
      if (i == j + 1) pairs.diagonal[i] = exact.y;
    }
}

// T: the type of q, k and the caller's v, do; G: that of g and dg. PRODUCTS: tf32 products for each product of float32
// operands, 1 or 3. Columns: Ungated, Gated or GatedTurned, which say in backward_channels_storage.cuh what Args has.
template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns>
__global__ void __launch_bounds__(THREADS, 2) gated_backward_channels(
    const __grid_constant__ Args<T, G, typename Columns::template Type<T, typename Math<T, PRODUCTS>::Stored>> args) {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  using Value = typename Columns::template Type<T, Stored>;
  using Accumulators = float[2][4];
  constexpr bool RWKV6 = ReadOrder::reads_before_write;
  static_assert(!(Columns::gated && RWKV6), "columns have gates in GLA only");
  // Products of split operands are many instructions: unrolled loops compile a second longer, and run no faster.
  constexpr int UNROLLED = M::SPLIT ? 1 : 2;
  // Whether `work` is computed again from blockIdx where it is needed, which frees registers: at the end, and, if
  // operands are split, in the loop over V, too, where they take the most registers. RWKV-6 with split operands is
  // excluded: it spills more registers with this than without (test_compile fails where more is spilled).
  constexpr bool RECOMPUTES_WORK = SINCE_SM100 && !(M::SPLIT && RWKV6);
  auto& s = *reinterpret_cast<Shared<T, G, PRODUCTS, Columns>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int lane_channel = lane >> 2, lane_pair = lane & 3, warp_channel = 16 * warp;
  const int tiles = int((shape.K + TILE - 1) / TILE);
  const u32 NC = u32(shape.NC), heads = u32(args.heads);
  // Tiles of channels are fastest in the grid, then chunks of a batch row, heads of this launch, batches.
  const auto work_of = [&](u32 block) -> ChannelTile {
    const u32 tile = block % tiles, chunk = block / tiles;
    const i64 c = chunk % NC, h = args.first + chunk / NC % heads, b = chunk / NC / heads;
    return {int(tile), c, h, b, chunk_tokens(shape, c)};
  };
  const ChannelTile work = work_of(blockIdx.x);
  const int tile = work.tile;
  const i64 c = work.c, h = work.h, b = work.b;
  const Span span = work.span;
  const float scale = float(args.scale);

  const i64 chunk = chunk_of_launch(shape, heads, b, h - args.first, c);
  const float* all_column_decays = args.decays + chunk * padded_width(shape.V);  // of this chunk; read if gated
  const i64 width = Columns::gated ? padded_width(shape.V) : shape.V;            // columns of v and do in memory
  // Starts the copies of columns 32 stage ... 32 stage + 31 of v and do to s.values[stage % 2].
  const auto fetch_columns = [&](int stage) {
    Values<Value>& to = s.values[stage & 1];
    const ChannelTile current = RECOMPUTES_WORK && M::SPLIT ? work_of(opaque(blockIdx.x)) : work;
    const i64 head = Columns::gated ? current.h - args.first : current.h, column = stage * COLUMNS;
    fetch_rows<CHUNK, COLUMNS, Value, LDV>(to.v, args.v, current.b, head, current.span.start, current.span.stop, column,
                                           width);
    fetch_rows<CHUNK, COLUMNS, Value, LDV>(to.do_, args.do_, current.b, head, current.span.start, current.span.stop,
                                           column, width);
  };
  // A queue of two: index 0 has the 16 columns that are multiplied next, index 1 the following 16. Each step moves
  // index 1 to index 0 and loads index 1.
  static_assert(STEPS == 2);
  States<M, Columns::turned> states;
  Shape states_shape = shape;
  if (Columns::turned) states_shape.K = shape.V, states_shape.V = shape.K;
  const Stored* S_tiles = static_cast<const Stored*>(args.chunk_states) +
                          state_tile_index(states_shape, heads, FORWARDS, b, h - args.first, c,
                                           Columns::turned ? 0 : tile, Columns::turned ? tile : 0);
  const i64 from_S_to_dS = state_tile_index(states_shape, heads, BACKWARDS, 0, 0, 0, 0, 0);  // the first tile of all dS
  const Stored* dS_tiles = S_tiles + from_S_to_dS;
  // The distance in memory from a tile of columns to the next one.
  const int next_tile = TILE * TILE * (Columns::turned ? tiles : 1);
  // Loads the columns of step `step` of a stage to index `slot` of the queue. States::load counts 8 x 8 matrices of a
  // tile: from 2 warp on are the warp's channels, from `column` on the step's columns.
  const auto fetch_states = [&](int slot, int stage, int step) {
    const int offset = stage * COLUMNS / TILE * next_tile, column = stage * COLUMNS % TILE / 8 + 2 * step;
    states.load(slot, S_tiles + offset, dS_tiles + offset, 2 * warp, column);
  };
  if constexpr (Columns::gated) {
    // Products are used if no channel and column together grow by more than BY_CHUNK, 16 nats, over the chunk: decays
    // below e^-87 are lost in products, and growth may multiply what was lost (by_token.cuh). All threads agree, so
    // that none waits at a barrier for one that has left. No copy has been started yet.
    if (args.row_growth[chunk] + args.column_growth[chunk] > BY_CHUNK)
      return compute_token_by_token<Columns::turned>(args, S_tiles, dS_tiles, next_tile, work);
  }
  fetch_columns(0);
  cp_async_commit();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) fetch_states(step, 0, step);
  // q, k and g belong to the next group of copies: the loop's first wait leaves them under way, and they are read after
  // the loop only.
  fetch_rows<CHUNK, TILE>(s.q, args.q, b, h, span.start, span.stop, tile * TILE, shape.K);
  fetch_rows<CHUNK, TILE>(s.k, args.k, b, h, span.start, span.stop, tile * TILE, shape.K);
  fetch_rows<CHUNK, TILE>(s.g, args.g, b, h, span.start, span.stop, tile * TILE, shape.K);

  // Sums over V. dq: S do, dk: dS v, [16 channels, 64 tokens], without decays so far; dA_blocks: this warp's blocks of
  // dA, [16 tokens, 16 tokens]; state_terms: this lane's share of the sum of S dS, by octet.
  Accumulators dq[BLOCKS] = {}, dk[BLOCKS] = {}, dA_blocks[BLOCKS_PER_WARP] = {};
  float state_terms[2] = {};
  const int column_stages = int((shape.V + COLUMNS - 1) / COLUMNS);
#pragma unroll 1
  for (int stage = 0; stage < column_stages; ++stage) {
    if (stage + 1 < column_stages) fetch_columns(stage + 1);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // this stage's columns have been copied by all threads
    const Values<Value>& in = s.values[stage & 1];
#pragma unroll UNROLLED
    for (int step = 0; step < STEPS; ++step) {
      Left<M> S, dS;
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const float2 S_pair = {to_float(states.S[0][p].x), to_float(states.S[0][p].y)};
        const float2 dS_pair = {to_float(states.dS[0][p].x), to_float(states.dS[0][p].y)};
        states.S[0][p] = states.S[1][p], states.dS[0][p] = states.dS[1][p];
        const float2 column_decays = decays_of_columns<Columns>(
            all_column_decays, stage * COLUMNS + 16 * step + 8 * (p >> 1) + 2 * lane_pair, int(width));
        state_terms[p & 1] = fmaf(column_decays.x * S_pair.x, dS_pair.x,
                                  fmaf(column_decays.y * S_pair.y, dS_pair.y, state_terms[p & 1]));
        S.set_unrounded(p, S_pair), dS.set_unrounded(p, dS_pair);
      }
      if (stage + 1 < column_stages) fetch_states(1, stage + 1, step);
#pragma unroll
      for (int m = 0; m < BLOCKS; ++m) {  // TRANSPOSED: a row of the tile has the columns that are summed over
        RightData<M, Value> do_operand[2], v_operand[2];
        load_right<TRANSPOSED>(do_operand, in.do_ + 16 * m * LDV + 16 * step, LDV);
        load_right<TRANSPOSED>(v_operand, in.v + 16 * m * LDV + 16 * step, LDV);
        multiply(dq[m], S, do_operand, dk[m], dS, v_operand);
      }
#pragma unroll
      for (int x = 0; x < BLOCKS_PER_WARP; ++x) {
        const int block = warp + WARPS * x;
        if (Columns::gated || block >= DA_BLOCKS) continue;  // the same for the whole warp
        LeftData<M, Value> do_rows;
        RightData<M, Value> v_rows[2];
        load_left<AS_STORED>(do_rows, in.do_ + 16 * row_of(block) * LDV + 16 * step, LDV);
        load_right<TRANSPOSED>(v_rows, in.v + 16 * column_of(block) * LDV + 16 * step, LDV);
        multiply(dA_blocks[x], do_rows, v_rows);
      }
    }
    __syncthreads();  // all warps have read this stage, which the next iteration's copies overwrite
  }
  cp_async_wait<0>();
  // dA is stored over the stages: all warps have passed the loop's last barrier, and no copy to a stage is under way.
  if constexpr (Columns::gated) { copy_scores(s.pairs, args, chunk); }
#pragma unroll
  for (int x = 0; x < BLOCKS_PER_WARP; ++x) {
    const int block = warp + WARPS * x;
    if (!Columns::gated && block < DA_BLOCKS) put_dA<M, Value>(s.pairs, dA_blocks[x], block, scale);
  }
  __syncthreads();  // dA is in shared memory, and q, k and g have arrived for all warps

  // From here on a warp needs its own 16 channels only.
  const WarpChannels<T, G, PRODUCTS, Columns> channels{s, warp_channel, lane_channel, lane_pair};
  float sub_decays[2][NUM_SUBCHUNKS];  // by octet: the product of decays over each sub-chunk
  const u32 growing = growing_blocks(channels, sub_decays);
  PairSums pair_sums[BLOCKS];  // set only for blocks that grow
  if (growing)
    sum_pairs_one_by_one<ReadOrder, M>(pair_sums, s.q + warp_channel, s.k + warp_channel, s.g + warp_channel,
                                       s.pairs.dA, growing);

  put_border32<ReadOrder>(channels, sub_decays);
  if (lane_pair == 0) {
#pragma unroll
    for (int n = 0; n < NUM_SUBCHUNKS; ++n)
      channels.decay_over(n, 0) = sub_decays[0][n], channels.decay_over(n, 1) = sub_decays[1][n];
  }
  __syncwarp();  // one lane in four has written the decays that all four read

  const float2 chunk_decay = {product_over(sub_decays[0], 0, NUM_SUBCHUNKS),
                              product_over(sub_decays[1], 0, NUM_SUBCHUNKS)};  // by octet
  state_terms[0] *= chunk_decay.x, state_terms[1] *= chunk_decay.y;
  // Computed again, with another order of multiplications, if S dS or a decay may exceed float32's range.
  if (growing || __any_sync(0xffffffffu, !(fabsf(state_terms[0]) + fabsf(state_terms[1]) <= LARGEST_FLOAT))) {
    const float2 sum = decayed_state_terms<M, Columns>(S_tiles, dS_tiles, 2 * warp, column_stages, chunk_decay,
                                                       all_column_decays, int(width), next_tile);
    state_terms[0] = sum.x, state_terms[1] = sum.y;
  }
  s.pairs.state_terms[0][threadIdx.x] = state_terms[0], s.pairs.state_terms[1][threadIdx.x] = state_terms[1];
  const i64 channel = tile * TILE + warp_channel + lane_channel;
  float u[2] = {1.f, 1.f};  // by octet: RWKV-6's bonus, 1 for GLA
  if (RWKV6) {
    float du[2] = {};
    add_du(du, channels);
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const bool exists = channel + 8 * octet < shape.K;
      const float sum = four_lane_sums(du[octet]).all;  // over the four lanes of the channel
      if (exists && lane_pair == 0)
        args.partial_du[((b * shape.NC + c) * shape.H + h) * shape.K + channel + 8 * octet] = sum;
      u[octet] = exists ? args.u[h * shape.K + channel + 8 * octet] : 0.f;
    }
  }

  finish_halves<ReadOrder>(channels, growing, pair_sums, scale, u, dq, dk);
  __syncthreads();  // dq, dk and dg are in shared memory, written by all warps
  const ChannelTile stored = RECOMPUTES_WORK ? work_of(opaque(blockIdx.x)) : work;
  // Stores the tokens and channels of a tile that exist; for all threads of the block.
  const auto store = [&](const auto& to, const auto* tile) {
    store_rows<CHUNK, TILE>(to, tile, stored.b, stored.h, stored.span.start, stored.span.stop, stored.tile * TILE,
                            shape.K);
  };
  if (!Columns::turned) store(args.dq, s.q);  // turned: q is do, whose gradient nobody wants
  store(args.dk, s.k);
  store(args.dg, s.g);
}
