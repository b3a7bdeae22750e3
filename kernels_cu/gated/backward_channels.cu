// what      Backward pass of GLA and RWKV-6, the gradients with a channel axis: dq, dk and dg of one chunk of 64
//           tokens, and the chunk's term of du.
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
//           A sub-chunk is 8 tokens, a block of tokens 16, a half 32. decay_ij of a pair is the product of two factors,
//           the key's decay to a border and the query's from it:
//             pairs of the two halves       border32: the chunk's middle
//             of a half's two blocks        border16: the half's middle
//             of a block's two sub-chunks   border8: the block's middle
//             within a sub-chunk            both tokens' factors about its middle (decays.cuh), some of them inverse
//                                           decays. In them a log gate below -20 (RWKV-6: -16) counts as -20 (-16), so
//                                           that inverses are finite. A pair of a sub-chunk has at most seven (six)
//                                           gates between its tokens: beside a reset, a decay of 0, six (five) of up to
//                                           1 nat. So at most e^-14 (e^-11) of a token passes. If a log gate of a
//                                           block, in one of a warp's 16 channels, exceeds GROWTH (1 nat), the factors
//                                           could leave float32's range: pairs within the block's sub-chunks are then
//                                           summed one by one (growth.cuh)
//           dg_t of pairs within a sub-chunk is a difference: the terms of the queries i >= t with all keys, less those
//           of the keys j >= t with all queries. A pair with j >= t is in both sums, of the same rounded operands, and
//           cancels up to float32's rounding. All other terms of dg are added, without a difference. If operands are
//           split (Math::SPLIT), those of pairs within a sub-chunk are, too, pair by pair (gate_terms_of_pairs).
// shapes    q k g dq dk dg [B, H, T, K], v do [B, H, T, V], u [H, K] float32 (RWKV-6's factor of a token's own key),
//           partial_du [B, NC, H, K] float32 (the chunks' terms of du), NC the chunks of a batch row. chunk_states:
//           every chunk's S and dS, as backward_states.cu writes them (`state_tile_index`). Gated: v do [B, heads of
//           the launch, T, V padded to a multiple of 8]
// grid      a block for every (batch, head, chunk, tile of 64 channels); a warp for every 16 channels: see Layout
// smem      q, k, g of the chunk; two stages of 32 columns of v and do, later PairData
// barriers  of the block: | below. Its steps in time, and what they overwrite. After put_dA a warp reads and writes its
//           own 16 channels only, and all of dA:
//             (compute_token_by_token)   if gates of columns and channels grow too much; in place of all else
//             for every 32 columns of V
//               fetch_columns |          to a stage; then S do, dS v, S dS and, unless columns have gates, dA |
//             put_dA or copy_scores |    dA and its diagonal, over the stages; q, k and g have arrived
//             sum_pairs_one_by_one       pairs in blocks that grow, from q, k, g
//             put_border32, then others  the other members of PairData, from q, k, g; du
//             for half 0, then half 1, of a HalfChunk
//               begin                    border16, from q, k and g of both blocks
//               for both blocks: load    a TokenBlock, from q, k, g
//                 finish_queries         dq over the block's q
//                 finish_keys            reads the block's k again; dk over it
//               finish_dg                dg of the half, in registers
//             put_tokens |               dg over g of both halves
//             store                      dq, dk and dg to memory, by all threads
// numerics  matrix products as in fragments.cuh, with sums in float32. Scales and decays that are not part of an
//           operand multiply these sums. tf32 operands are truncated, which makes them smaller on average;
//           TF32_CORRECTION (fragments.cuh) multiplies that away, 1 for operands that are not truncated. Of S do and
//           dS v it is STATE_CORRECTION. put_dA corrects do . v, and dA below the diagonal beforehand for its products
//           with keys and queries. `near` corrects the query or key that it takes truncated, as products read it.
//           If columns of V have gates, too (Columns; GLA only), dA comes from value_gate/backward_scores.cu.
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// instances T and G are float32: PRODUCTS of 1 and 3. T has 16 bits and G is T or float32: PRODUCTS of 1, and of 3 if
//           it is GLA, Ungated and G is float32. Ungated: GLA and RWKV-6; Gated, GatedTurned: GLA
// tests     test_gradient_kernels; Gated, GatedTurned: test_value_gate; gates that grow: test_growth_gradients
//
// Layout. A warp has 16 channels, from warp_channel on. Of these and of 16 tokens, two sub-chunks, a lane has
//   channels      lane_channel + 8 octet, octet 0 or 1; lane_channel = lane / 4
//   tokens        2 lane_pair and the next of each sub-chunk, as a float2; lane_pair = lane % 4
//   index p       0 to 3: octet p % 2, sub-chunk p / 2
//   Accumulators  of a product [16 channels, 16 tokens]: [sub-chunk][2 octet + token of the lane's two]
//   Neighbours    of a state, with columns of V in the place of tokens
// Numbers: `half` of the chunk; `m`, a block of 16 tokens of the chunk, and `in_half`, of the half; `n`, a sub-chunk of
// the chunk, `subchunk`, of the half, and `in_block`, of the block
//
// From fragments.cuh. A product is D[16, 8] += A[16, 16] B[16, 8]
//   Math<T, PRODUCTS>    how data T are multiplied. Stored: the type of operands in memory; SPLIT: an operand is two
//                        tf32 numbers
//   Left, Right          a lane's pairs p of A, of B; LeftData, RightData: of data that were loaded, not computed: only
//                        float32 data need the split
//   HeldLeft             a Left in few registers: `left()` makes the operand; get(p): its pair p, as products read it
//   TF32_CORRECTION<M, E>  the factor of a product that makes up for the truncation of one operand, of type E in shared
//                        memory, Stored if E is left out; TF32_CORRECTION_OF_BOTH<M, E>: of two such operands
//   set, set_unrounded   store a pair, rounded (or split), or as it is, for products that truncate it
//   load_left            A from a tile of shared memory: [row, depth], or, TRANSPOSED, [depth, row]
//   load_right           two B side by side: [depth, column], or, TRANSPOSED, [column, depth]
//   load_channels        a tile [16 tokens, 16 channels] by index p
//   AS_STORED, TRANSPOSED  how a tile holds an operand: see load_left, load_right
//   multiply             d += A B for two B; with six arguments two such products, whose instructions take turns;
//                        multiply_half: for one B, over half of the depth
// From decays.cuh. a: the decays of a lane's two tokens; decays_of: of its log gates; decay_of: of one
//   PairDecays(a)        the decays from the sub-chunk's start (`start`) and to its end (`end`)
//   decay_over_subchunk(gates)  the decay of the lane's channel over all 8 tokens, from all four lanes' gates
//   MiddleFactors(a)     the factors about the sub-chunk's middle
//   four_lane_sums(x)    over the lanes of a channel: `all`, those `before` this lane, those `after` it
//   product_over(x, first, end, factor) = factor times x[first ... end - 1]
// From backward.cuh and others
//   ReadOrder            AfterWrite (GLA) or BeforeWrite (RWKV-6)
//   exchange_and_add_halves<N>(x, distance, upper): of 2 N numbers x of this lane, and of the lane whose number differs
//                        in the bit `distance`, N sums, in x[0] and on: the last N if `upper`, else the first N
//   tokens_at(x, b, h, t, channel): x from token t and this channel on; its .at(i, channel, channels): a number, 0 for
//                        channels from `channels` on
//   gradients_of_pairs(t, q, k, decay, dA): the terms of token t's pairs within its sub-chunk: PairGradients, of dq_t,
//                        dk_t and dg_t
//   state_tile_index(shape, heads, FORWARDS for S or BACKWARDS for dS, batch, head, chunk, tile of K, tile of V): where
//                        a tile [64, 64] of a state begins; matrix_index(row, column): its 8 x 8 matrix
//   LD<T, COLUMNS>       the distance of rows in a tile of shared memory
//   opaque(x)            x, computed again instead of held in a register; SINCE_SM100: cards whose compiler needs more
//                        registers; max_nan(x, y): the larger one, NaN if one is
//   fetch_rows, store_rows  copy rows of an array to a tile of shared memory, and back: of those rows and columns alone
//                        that exist; last argument: whether rows start on, and are multiples of, 16 bytes
//   put_pair             stores a lane's two neighbouring numbers
//   width_padded_to_8    the width of rows that value_gate's kernels store for this one
//   chunk_tokens(shape, c)  a Span: the first token of chunk c, and the one after its last
//   CHUNK = 64 and SUB_CHUNK = 8 tokens; NUM_SUBCHUNKS = 8 sub-chunks; TILE = 64 channels or columns; a block has
//   THREADS = 128 threads, in WARPS = 4
#include "backward.cuh"
#include "value_gate/by_token.cuh"
#include "cards.cuh"
#include "lanes.cuh"

constexpr int COLUMNS = 32;                           // columns of V in one stage of shared memory
constexpr int STEPS = COLUMNS / 16;                   // matrix products a stage: each contracts 16 columns
constexpr int BLOCKS = CHUNK / 16;                    // blocks of 16 tokens, two sub-chunks each
constexpr int DA_BLOCKS = BLOCKS * (BLOCKS + 1) / 2;  // blocks [16, 16] of dA on and below the diagonal
constexpr int BLOCKS_PER_WARP = (DA_BLOCKS + WARPS - 1) / WARPS;
constexpr float FLOAT32_MAX = 3.4028235e38f;  // the largest float32

// The template argument Columns. Type: that of v and do in memory, `Value` below. turned: see GatedTurned. Ungated:
// columns of V have no gates, and v and do are the caller's arrays, of type T.
struct Ungated {
  static constexpr bool gated = false, turned = false;
  template <typename T, typename Stored> using Type = T;
};
// Gated: columns of V have gates. v comes decayed to the chunk's end, do decayed from its start, both of the type
// `Stored` that products take.
struct Gated {
  static constexpr bool gated = true, turned = false;
  template <typename T, typename Stored> using Type = Stored;
};
// Gated, with keys and values exchanged, for dv and dgv. The kernel reads the transposes of S and dS. The members of
// Args, on the left, are here, on the right, in the names of the caller, who has log gates gv of the columns of V:
//   q, k, g                do, v, gv
//   given_do, given_v, gv  q, k, g
//   do_, v                 q decayed from the chunk's start, k decayed to its end
//   shape.K, shape.V       V, K
//   scores, diagonal       scale q_i . k_j with decays, in the place of dA
//   decays                 the product of each channel's decays over the chunk, of K
//   row_growth             the growth of the columns of V
//   column_growth          the growth of the channels of K
//   dq, dk, dg             null (nobody wants a gradient of do), dv, dgv
// chunk_states is the same array as for Gated, so that tiles are [column, channel] here; see the use of `turned`
struct GatedTurned : Gated {
  static constexpr bool turned = true;
};

template <typename T, typename G, typename Value> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const Value> v, do_;
  StridedRows<const G> g;
  StridedRows<T> dq, dk;
  StridedRows<G> dg;
  const float* u;            // null for GLA
  const void* chunk_states;  // of the type that products take (Math::Stored)
  float* partial_du;         // null for GLA
  Shape shape;
  i64 first, heads;  // this launch computes heads first ... first + heads - 1
  double scale;
  i64 vectors;  // whether all rows start on 16 bytes and are multiples of 16 bytes, which the host checks
  // The members from here on are used if Columns is gated. The host leaves them null otherwise.

  // dA [B, heads, NC, 64, 64], without its diagonal, times TF32_CORRECTION_OF_BOTH for the products that read it. Pairs
  // within a sub-chunk are also times NEAR_SCALE, 2^22, about e^15: the columns' decays may make such a number e^-20,
  // and factors of channels about the sub-chunk's middle are as small as e^-70. The product, e^-90, would be below
  // float32's normal numbers, which end at e^-87 (backward.cuh).
  const void* scores;
  const float* diagonal;       // dA's diagonal [B, heads, NC, 64]
  const float* decays;         // the product of each column's decays over the chunk [B, heads, NC, padded V]
  const float* row_growth;     // [B, heads, NC]: the largest of all channels' sums of positive log gates over the chunk
  const float* column_growth;  // [B, heads, NC]: the largest of all columns' sums of positive log gates
  StridedRows<const T> given_v, given_do;  // v and do as the caller gave them, without decays
  StridedRows<const G> gv;                 // log gates of columns [B, H, T, V]
};

// Distances of neighbouring tokens in v and do, and in dA. Values: a stage of v and do.
constexpr int LDV = COLUMNS + 8, LDA = CHUNK + 8;
template <typename T> struct alignas(16) Values {
  T v[CHUNK * LDV];    // [64 tokens, 32 columns]
  T do_[CHUNK * LDV];  // [64, 32]
};

// What pairs of tokens are computed from. Overwrites the stages of v and do, after all products with them.
template <class M> struct PairData {
  // [64, 64]: query i, key j < i, else zeros, in the ten blocks [16, 16] on and below the diagonal. The six others,
  // which no product reads, are undefined unless columns have gates.
  typename M::Stored dA[CHUNK * LDA];
  float diagonal[CHUNK];  // dA_ii
  // The thread's operands at the border between the halves, for each block of 16 tokens: keys of the first half decayed
  // to it, queries of the second half decayed from it.
  HeldLeft<M> border32[BLOCKS][THREADS];
  float decays[NUM_SUBCHUNKS][TILE];  // the product of each channel's decays over each sub-chunk
  float state_terms[2][THREADS];      // the thread's share of dg's term of S and dS, for its two channels (by octet)
};

template <typename T, typename G, int PRODUCTS, class Columns> struct alignas(16) Shared {
  T q[CHUNK * LD<T, TILE>];  // [64 tokens, 64 channels], overwritten by dq
  T k[CHUNK * LD<T, TILE>];  // overwritten by dk
  G g[CHUNK * LD<G, TILE>];  // overwritten by dg
  union {
    Values<typename Columns::template Type<T, typename Math<T, PRODUCTS>::Stored>> values[2];  // two stages
    PairData<Math<T, PRODUCTS>> pairs;
  };
};

// The row and the column, in blocks of 16 tokens, of a block on or below dA's diagonal. Blocks count row by row.
__device__ __forceinline__ int row_of(int block) { return block < 1 ? 0 : block < 3 ? 1 : block < 6 ? 2 : 3; }
__device__ __forceinline__ int column_of(int block) {
  const int row = row_of(block);
  return block - row * (row + 1) / 2;
}

// This lane's numbers of S and of dS, of 16 channels by COLUMNS columns: [slot][p], a slot for 16 columns, p as in
// Layout with columns in the place of tokens.
template <class M, bool TURNED> struct States {
  using Stored = typename M::Stored;
  struct alignas(2 * sizeof(Stored)) Neighbours {  // of one channel, in two neighbouring columns
    Stored x, y;
  };
  Neighbours S[STEPS][4], dS[STEPS][4];

  // A tile [64 channels, 64 columns] of a state is stored as 8 x 8 matrices (matrix_index, backward.cuh). `row` and
  // `column` count these matrices; if TURNED, the tile in memory is [column, channel]. Returns the lane's pair of one
  // matrix: channel lane / 4, columns 2 (lane % 4) and the next.
  static __device__ __forceinline__ Neighbours load_pair(const Stored* tile, int row, int column) {
    const int lane = threadIdx.x & 31;
    if (!TURNED) return *reinterpret_cast<const Neighbours*>(tile + matrix_index(row, column) + 2 * lane);
    const Stored* matrix = tile + matrix_index(column, row) + 2 * (lane & 3) * 8 + (lane >> 2);
    return {matrix[0], matrix[8]};
  }

  // Fills a slot from 2 x 2 of the 8 x 8 matrices of the tiles of S and dS, from (row, column) on.
  __device__ __forceinline__ void load(int slot, const Stored* S_tile, const Stored* dS_tile, int row, int column) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      S[slot][p] = load_pair(S_tile, row + (p & 1), column + (p >> 1));
      dS[slot][p] = load_pair(dS_tile, row + (p & 1), column + (p >> 1));
    }
  }
};

// What a block computes: 64 channels of a chunk.
struct ChannelTile {
  int tile;     // the tile's number: channels 64 tile ... 64 tile + 63
  i64 c, h, b;  // chunk, head, batch
  Span span;    // the chunk's tokens
};

constexpr int HALF = NUM_SUBCHUNKS / 2;  // sub-chunks of half a chunk: 4, of 8 tokens
static_assert(BLOCKS == 4 && HALF == 4, "row_of, and the borders of HalfChunk, are written for these");

// Terms of dg of one channel of this lane, for each sub-chunk of half a chunk. `within`: for the gates of this lane's
// two tokens, the terms whose query or key is in the gates' own sub-chunk. `across`: the terms that all gates of that
// sub-chunk have: of pairs with the key before it and the query after it, of S with queries after it, of dS with keys
// before it, and of S dS. `within` is complete. Of `across` this lane has only the terms of its own queries and keys,
// and its share of S dS, so that the sum over four lanes is still to be taken.
struct GateTerms {
  float2 within[HALF];
  float across[HALF];
};

// For blocks whose gates exceed GROWTH: the terms of the pairs within sub-chunks in dq, dk and dg of 16 tokens, by
// index p.
struct GradientsWithin {
  float2 dq[4], dk[4], dg[4];
};
// Sets `sums` of each block m of 16 tokens whose bit m of `blocks` is set. q, k and gates: 64 tokens, from the warp's
// first channel on. dA: 64 x 64.
template <class ReadOrder, class M, typename T, typename G, typename Stored>
__device__ __noinline__ void sum_pairs_one_by_one(GradientsWithin (&sums)[BLOCKS], const T* q, const T* k,
                                                  const G* gates, const Stored* dA, u32 blocks) {
  const int lane = threadIdx.x & 31, lane_channel = lane >> 2, lane_pair = lane & 3;
#pragma unroll 1
  for (int index = 0; index < 8 * BLOCKS; ++index) {
    const int m = index / 8, p = index / 2 % 4, token = index % 2;
    if (!(blocks >> m & 1)) continue;
    const int channel = lane_channel + 8 * (p & 1), first_token = 16 * m + 8 * (p >> 1);  // of the sub-chunk
    const PairGradients x = gradients_of_pairs<ReadOrder>(
        2 * lane_pair + token, [&](int i) { return to_float(q[(first_token + i) * LD<T, TILE> + channel]); },
        [&](int j) { return to_float(k[(first_token + j) * LD<T, TILE> + channel]); },
        [&](int i) { return decay_of(to_float(gates[(first_token + i) * LD<G, TILE> + channel])); },
        [&](int i, int j) {
          return 1 / TF32_CORRECTION_OF_BOTH<M> * to_float(dA[(first_token + i) * LDA + first_token + j]);
        });
    const auto set_token = [&](float2& pair, float value) { (token ? pair.y : pair.x) = value; };
    set_token(sums[m].dq[p], x.dq), set_token(sums[m].dk[p], x.dk), set_token(sums[m].dg[p], x.dg);
  }
}

// Numbers of this lane's two tokens of a sub-chunk, by octet.
struct BothOctets {
  float2 of[2];
};
// Returns dg's terms of the pairs within a sub-chunk: for each gate the sum of the pairs j < t <= i, without a
// difference. q, k and gates are the lane's two tokens; the other six are in the three lanes with the same lane / 4.
// dA: 8 x 8, zeros for keys j >= i. A lane computes the pairs of the queries lane_pair and 7 - lane_pair, seven
// together. For split operands only, whose TF32_CORRECTION is 1: dA needs no division by it.
template <class ReadOrder>
__device__ __noinline__ BothOctets gate_terms_of_pairs(BothOctets q, BothOctets k, BothOctets gates, const float* dA) {
  const int lane = threadIdx.x & 31, lane_pair = lane & 3;
  const auto of_pair = [&](float x, int pair) { return __shfl_sync(0xffffffffu, x, (lane & ~3) + pair); };
  float keys[2][SUB_CHUNK], decays[2][SUB_CHUNK], sums[2][SUB_CHUNK] = {};
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
    const float2 a = decays_of(gates.of[octet]), key = k.of[octet];
#pragma unroll
    for (int t = 0; t < SUB_CHUNK; ++t)
      keys[octet][t] = of_pair(t % 2 ? key.y : key.x, t / 2), decays[octet][t] = of_pair(t % 2 ? a.y : a.x, t / 2);
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int i = half ? SUB_CHUNK - 1 - lane_pair : lane_pair;
    // The state that query i reads is decayed through token `last` (reads_before_write: RWKV-6).
    const int last = ReadOrder::reads_before_write ? i - 1 : i;
    float pairs[2][SUB_CHUNK - 1], decayed[2], sum[2] = {};
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      const float first_of_pair = of_pair(q.of[octet].x, i / 2), second_of_pair = of_pair(q.of[octet].y, i / 2);
      decayed[octet] = i % 2 ? second_of_pair : first_of_pair;
    }
#pragma unroll
    for (int j = SUB_CHUNK - 2; j >= 0; --j)
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        if (j + 1 <= last) decayed[octet] *= decays[octet][j + 1];
        pairs[octet][j] = dA[i * LDA + j] * (decayed[octet] * keys[octet][j]);
      }
#pragma unroll
    for (int t = 1; t < SUB_CHUNK; ++t)
#pragma unroll
      for (int octet = 0; octet < 2; ++octet) {
        sum[octet] += pairs[octet][t - 1];
        if (t <= last) sums[octet][t] += sum[octet];
      }
  }
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
    exchange_and_add_halves<4>(sums[octet], 2, lane_pair & 2);
    exchange_and_add_halves<2>(sums[octet], 1, lane_pair & 1);
  }
  return {float2{sums[0][0], sums[0][1]}, float2{sums[1][0], sums[1][1]}};
}

// The products of the decays of columns `column` and `column` + 1 over the chunk, from `chunk_decays` [width]: 1 if
// columns have no gates, 0 for columns from `width` on.
template <class Columns>
__device__ __forceinline__ float2 decays_of_columns(const float* chunk_decays, int column, int width) {
  if (!Columns::gated) return {1.f, 1.f};
  return column < width ? *reinterpret_cast<const float2*>(chunk_decays + column) : float2{0.f, 0.f};
}

// Returns this lane's share of dg's term of S and dS: the sum over V of decay S dS, for channels lane / 4 (x) and
// lane / 4 + 8 (y). S is multiplied by the decay before it is multiplied by dS, since S dS alone may overflow. S, dS:
// the tiles of the first columns in memory. `decay`: of the two channels over the chunk; `column_decays` [width]: of
// the columns; `row`: the warp's first channel, in 8 x 8 matrices; `column_stages`: stages of COLUMNS columns in V;
// `next_tile`: the distance of tiles of columns in memory.
template <class M, class Columns>
__device__ __noinline__ float2 decayed_state_terms(const typename M::Stored* S, const typename M::Stored* dS, int row,
                                                   int column_stages, float2 decay, const float* column_decays,
                                                   int width, int next_tile) {
  float2 sum = {0.f, 0.f};
#pragma unroll 1
  for (int step = 0; step < column_stages * STEPS; ++step) {
    States<M, Columns::turned> states;
    const int offset = step * 16 / TILE * next_tile;
    states.load(0, S + offset, dS + offset, row, step * 16 % TILE / 8);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const auto &S_pair = states.S[0][p], &dS_pair = states.dS[0][p];
      float& channel_sum = p & 1 ? sum.y : sum.x;
      const int column = 16 * step + 8 * (p >> 1) + 2 * (threadIdx.x & 3);
      const float2 both_decays = (p & 1 ? decay.y : decay.x) * decays_of_columns<Columns>(column_decays, column, width);
      channel_sum = fmaf(both_decays.x * to_float(S_pair.x), to_float(dS_pair.x),
                         fmaf(both_decays.y * to_float(S_pair.y), to_float(dS_pair.y), channel_sum));
    }
  }
  return sum;
}

// Computes and stores dq, dk and dg of a chunk token by token, for columns with gates whose log gates are so large that
// products of decays may overflow. A warp has one channel at a time, a lane one column at a time. Starts from the
// chunk's S and dS, at S_tiles and dS_tiles, and reads v and do without decays (given_v, given_do).
template <bool TURNED, typename Stored, typename T, typename G, typename Value>
__device__ __noinline__ void compute_token_by_token(const Args<T, G, Value>& args, const Stored* S_tiles,
                                                    const Stored* dS_tiles, int next_tile, const ChannelTile& work) {
  const int lane = threadIdx.x & 31, tokens = int(work.span.stop - work.span.start);
  const int first_channel = work.tile * TILE, channels = int(args.shape.K), columns = int(args.shape.V);
  const auto chunk_of = [&](const auto& x) { return tokens_at(x, work.b, work.h, work.span.start, 0); };
  const auto q = chunk_of(args.q), k = chunk_of(args.k), v = chunk_of(args.given_v), do_ = chunk_of(args.given_do);
  const auto g = chunk_of(args.g), gv = chunk_of(args.gv);
  const float scale = float(args.scale);
#pragma unroll 1
  for (int row = threadIdx.x >> 5; row < TILE && first_channel + row < channels; row += WARPS) {
    const int channel = first_channel + row;
    float dq[2] = {}, dk[2] = {}, dg[2] = {};  // of tokens `lane` and 32 + `lane`
    // Adds the sum of x over the warp to `to` in the lane that has the token.
    const auto add_over_warp = [&](float (&to)[2], int token, float x) {
#pragma unroll 1
      for (int distance = 1; distance < 32; distance *= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
      if (token % 32 == lane) (token < 32 ? to[0] : to[1]) += x;
    };
#pragma unroll 1
    for (int start = 0; start < columns; start += 32) {
      const int column = start + lane, in_tile = column % TILE;
      const int index =
          column / TILE * next_tile + (TURNED ? matrix_index(in_tile / 8, row / 8) + in_tile % 8 * 8 + row % 8
                                              : matrix_index(row / 8, in_tile / 8) + row % 8 * 8 + in_tile % 8);
      float S = column < columns ? to_float(S_tiles[index]) : 0.f,
            dS = column < columns ? to_float(dS_tiles[index]) : 0.f;
      // [i]: the state after token i's decay, before its key and value are added. grown(x, sum) of tensor.cuh is
      // x exp(sum), finite also if exp(sum) alone overflows.
      float decayed[CHUNK];
#pragma unroll 1
      for (int i = 0; i < tokens; ++i) {
        decayed[i] = grown(S, g.at(i, channel, channels) + gv.at(i, column, columns));
        S = fmaf(k.at(i, channel, channels), v.at(i, column, columns), decayed[i]);
        add_over_warp(dq, i, scale * S * do_.at(i, column, columns));
      }
#pragma unroll 1
      for (int i = tokens - 1; i >= 0; --i) {
        dS = fmaf(scale * q.at(i, channel, channels), do_.at(i, column, columns), dS);
        add_over_warp(dk, i, v.at(i, column, columns) * dS);
        add_over_warp(dg, i, decayed[i] * dS);
        dS = grown(dS, g.at(i, channel, channels) + gv.at(i, column, columns));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 token = work.span.start + 32 * half + lane;
      if (token >= work.span.stop) continue;
      if (!TURNED) args.dq.row(work.b, work.h, token)[channel] = from_float<T>(dq[half]);
      args.dk.row(work.b, work.h, token)[channel] = from_float<T>(dk[half]);
      args.dg.row(work.b, work.h, token)[channel] = from_float<G>(dg[half]);
    }
  }
}

// A warp's 16 channels of the chunk in shared memory, as a lane reads and writes them; see Layout.
template <typename T, typename G, int PRODUCTS, class Columns> struct WarpChannels {
  using M = Math<T, PRODUCTS>;
  Shared<T, G, PRODUCTS, Columns>& s;
  const int warp_channel, lane_channel, lane_pair;

  // Loads block m of 16 tokens of q or k by index p.
  __device__ __forceinline__ void load(float2 (&x)[4], const T* tile, int m) const {
    load_channels(x, tile + 16 * m * LD<T, TILE> + warp_channel, LD<T, TILE>);
  }
  // Calls f(p, log gates of this lane's two tokens) for each index p of block m.
  template <class F> __device__ __forceinline__ void gates_of_block(int m, F f) const {
    float2 gates[4];
    load_channels(gates, s.g + 16 * m * LD<G, TILE> + warp_channel, LD<G, TILE>);
#pragma unroll
    for (int p = 0; p < 4; ++p) f(p, gates[p]);
  }
  __device__ __forceinline__ float2 gates_of_pair(int m, int p) const {  // the same for one p
    const G* gate =
        s.g + (16 * m + 8 * (p >> 1) + 2 * lane_pair) * LD<G, TILE> + warp_channel + lane_channel + 8 * (p & 1);
    return float2{to_float(gate[0]), to_float(gate[LD<G, TILE>])};
  }
  // The decay of the lane's channel over sub-chunk n, in shared memory.
  __device__ __forceinline__ float& decay_over(int n, int octet) const {
    return s.pairs.decays[n][warp_channel + lane_channel + 8 * octet];
  }
  // The diagonal of dA at this lane's two tokens of sub-chunk n.
  __device__ __forceinline__ float2 diagonal_of(int n) const {
    return *reinterpret_cast<const float2*>(s.pairs.diagonal + 8 * n + 2 * lane_pair);
  }
  // Stores x of this lane's two tokens of sub-chunk n in a tile [64 tokens, 64 channels] of shared memory.
  template <typename X> __device__ __forceinline__ void put_tokens(X* tile, int n, int octet, float2 x) const {
    X* to = tile + (8 * n + 2 * lane_pair) * LD<X, TILE> + warp_channel + lane_channel + 8 * octet;
    to[0] = from_float<X>(x.x), to[LD<X, TILE>] = from_float<X>(x.y);
  }
};

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

// Copies dA and its diagonal, of columns with gates, to shared memory. chunk: its number in `scores`.
template <class M, class Args>
__device__ __forceinline__ void copy_scores(PairData<M>& pairs, const Args& args, i64 chunk) {
  using Stored = typename M::Stored;
  // Numbers that one copy moves. A copy that starts above the diagonal stores zeros; `scores` has zeros where another
  // one reaches beyond it.
  constexpr int PIECE = 16 / sizeof(Stored);
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
      // dA_ij and dA_i(j+1). `exact` undoes the truncation of v and do. Below the diagonal dA is an operand of products
      // that truncate it and their other operand: `operand` also has the correction of both. The diagonal is multiplied
      // in float32.
      const float2 exact = TF32_CORRECTION_OF_BOTH<M, Value> * scale *
                           float2{products[right][2 * lower], products[right][2 * lower + 1]};
      const float2 operand = TF32_CORRECTION_OF_BOTH<M> * exact;
      put_pair(pairs.dA + i * LDA + j, float2{j < i ? operand.x : 0.f, j + 1 < i ? operand.y : 0.f});
      if (i == j) pairs.diagonal[i] = exact.x;
      if (i == j + 1) pairs.diagonal[i] = exact.y;
    }
}

// For each t of this lane's two tokens: the sum of query_terms (TokenBlock) over the queries i >= t (RWKV-6: i > t) of
// the sub-chunk, less the sum of key_terms over its keys j >= t.
template <class ReadOrder> __device__ __forceinline__ float2 terms_from(float2 query_terms, float2 key_terms) {
  const float2 difference = query_terms + -1.f * key_terms;
  const float later_lanes = four_lane_sums(difference.x + difference.y).after;
  if (ReadOrder::reads_before_write) return {difference.y + later_lanes - key_terms.x, later_lanes - key_terms.y};
  return {difference.x + difference.y + later_lanes, difference.y + later_lanes};
}

// The numbers of this lane's two tokens in a product [16 channels, 8 tokens], by octet.
__device__ __forceinline__ float2 lane_tokens(const float (&d)[4], int octet) {
  return {d[2 * octet], d[2 * octet + 1]};
}
// Sets this lane's accumulators of a product [16 channels, 16 tokens] from numbers by index p.
__device__ __forceinline__ void put_pairs(float (&d)[2][4], const float2 (&x)[4]) {
#pragma unroll
  for (int p = 0; p < 4; ++p) d[p >> 1][2 * (p & 1)] = x[p].x, d[p >> 1][2 * (p & 1) + 1] = x[p].y;
}

// A block of 16 tokens, by index p, and operands made of it.
template <class M> struct TokenBlock {
  float2 q[4], k[4];
  // Decays from the sub-chunk's start to the states that the queries read, and from the keys to its end; factors of
  // queries and of keys about its middle.
  float2 from_start[4], to_end[4], query_factor[4], key_factor[4];
  // Operands: queries and keys times these factors; border8: at the border of the block's two sub-chunks, keys of the
  // first one decayed to it and queries of the second one decayed from it.
  HeldLeft<M> queries, keys, border8;
  // q times dq without the diagonal's term, of which dg is made: the part of S and of the keys of earlier sub-chunks,
  // and, unless operands are split, that of the keys in the query's own sub-chunk.
  float2 query_terms[4];
};

// dq, dk and dg of the first half of a warp's chunk, then of the second. For each half begin(half), and for each of its
// blocks in_half = 0, 1: load, finish_queries, finish_keys; then finish_dg. test_gradient_kernels fails in any other
// order: see `barriers`. finish_keys also takes what load and finish_queries have set in `tokens`.
template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns> struct HalfChunk {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  using Accumulators = float[2][4];
  using Tokens = TokenBlock<M>;
  // If columns have gates, dA of pairs within a sub-chunk comes times NEAR_SCALE (see Args::scores): sums over such
  // pairs are multiplied by UNDO_NEAR_SCALE.
  static constexpr float UNDO_NEAR_SCALE = Columns::gated ? 1 / NEAR_SCALE : 1.f;
  // Corrects the truncation of both operands of S do and of dS v.
  static constexpr float STATE_CORRECTION =
      TF32_CORRECTION<M> * TF32_CORRECTION<M, typename Columns::template Type<T, Stored>>;

  Shared<T, G, PRODUCTS, Columns>& s;
  const WarpChannels<T, G, PRODUCTS, Columns>& channels;
  const u32 growing;                           // bit m: block m grows, see the kernel
  const GradientsWithin (&pair_sums)[BLOCKS];  // set only for blocks that grow
  const float scale, (&u)[2];                  // u: by octet
  int half;
  float decay_to_half[2] = {1.f, 1.f};  // by octet: the product of decays from the chunk's start to this half
  float half_decays[2][HALF];           // by octet: products of decays over the sub-chunks of this half
  // By octet, this lane's share of the terms of dg that every gate of the other half has: a state's term of a token has
  // as factors all decays between the token and the chunk's end (a key with dS) or start (a query with S). So the first
  // half sums its keys' terms here, for the second half, and the second half its queries', for the first.
  float other_half[2] = {};
  GateTerms gate_terms[2];  // by octet
  // Operands at the half's middle: keys of the half's first block decayed to this border, queries of its second block
  // decayed from it.
  HeldLeft<M> border16[2];

  __device__ __forceinline__ void begin(int number) {
    half = number;
#pragma unroll
    for (int subchunk = 0; subchunk < HALF; ++subchunk)
#pragma unroll
      for (int octet = 0; octet < 2; ++octet)
        half_decays[octet][subchunk] = channels.decay_over(HALF * half + subchunk, octet);
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
      for (int subchunk = 0; subchunk < HALF; ++subchunk)
        gate_terms[octet].across[subchunk] = s.pairs.state_terms[octet][threadIdx.x] + other_half[octet];
      other_half[octet] = 0.f;
    }
#pragma unroll
    for (int in_half = 0; in_half < 2; ++in_half) {  // the number of a block in this half
      const int m = 2 * half + in_half;
      float2 y[4];
      channels.load(y, in_half ? s.q : s.k, m);
      channels.gates_of_block(m, [&](int p, float2 gates) {
        const PairDecays<ReadOrder> decays(decays_of(gates));
        const float between = in_half == 0 && p < 2    ? half_decays[p & 1][1]
                              : in_half == 1 && p >= 2 ? half_decays[p & 1][2]
                                                       : 1.f;
        border16[in_half].set(p, between * (in_half ? decays.start : decays.end) * y[p]);
      });
    }
  }

  __device__ __forceinline__ void load(Tokens& tokens, int in_half) const {
    const int m = 2 * half + in_half;
    channels.load(tokens.q, s.q, m);
    channels.load(tokens.k, s.k, m);
    channels.gates_of_block(m, [&](int p, float2 gates) {
      const float2 a = decays_of(gates);
      const PairDecays<ReadOrder> decays(a);
      const MiddleFactors<ReadOrder> middle(a);
      tokens.from_start[p] = decays.start, tokens.to_end[p] = decays.end;
      tokens.query_factor[p] = middle.queries, tokens.key_factor[p] = middle.keys;
      tokens.queries.set(p, tokens.query_factor[p] * tokens.q[p]);
      tokens.keys.set(p, tokens.key_factor[p] * tokens.k[p]);
      tokens.border8.set(p, p < 2 ? tokens.to_end[p] * tokens.k[p] : tokens.from_start[p] * tokens.q[p]);
    });
    if (growing >> m & 1) {  // the products about the middle become 0; pair_sums, of pairs one by one, replace them
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        tokens.query_factor[p] = tokens.key_factor[p] = {1.f, 1.f};
        tokens.queries.set(p, float2{0.f, 0.f}), tokens.keys.set(p, float2{0.f, 0.f});
      }
    }
  }

  // Stores dq of a block over q, and sets its query_terms; from_S: the sums S do, without decays.
  __device__ __forceinline__ void finish_queries(Tokens& tokens, int in_half, const Accumulators& from_S) {
    const int m = 2 * half + in_half;
    const Stored* dA = s.pairs.dA + 16 * m * LDA;
    // dA times keys, [16 channels, 16 queries], without the queries' factors: sums over keys of the same sub-chunk,
    // and over keys at the borders of 8, 16 and 32 tokens.
    Accumulators over_keys = {}, over_keys16 = {}, over_keys32 = {};
    float over_keys8[4] = {};
    // dAs: right operands [16 keys, 8 queries] for the block's first and second sub-chunk of queries. The last
    // argument of multiply_half: which sub-chunk of keys, 0 or 1, the product sums over.
    Right<M> dAs[2];
    load_right<TRANSPOSED>(dAs, dA + 16 * m, LDA);
    multiply_half(over_keys[0], tokens.keys.left(), dAs[0], 0);
    multiply_half(over_keys[1], tokens.keys.left(), dAs[1], 1);
    multiply_half(over_keys8, tokens.border8.left(), dAs[1], 0);
    if (growing >> m & 1) put_pairs(over_keys, pair_sums[m].dq);
    if (in_half) {
      load_right<TRANSPOSED>(dAs, dA + 16 * (m - 1), LDA);
      multiply(over_keys16, border16[0].left(), dAs);
    }
#pragma unroll 1
    for (int other = 0; half && other < BLOCKS / 2; ++other) {
      load_right<TRANSPOSED>(dAs, dA + 16 * other, LDA);
      multiply(over_keys32, s.pairs.border32[other][threadIdx.x].left(), dAs);
    }
    __syncwarp();  // all lanes have read q of this block, which dq overwrites
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      // The sub-chunk's number in the block, in this half (subchunk) and in the chunk (n).
      const int octet = p & 1, in_block = p >> 1, subchunk = 2 * in_half + in_block, n = HALF * half + subchunk;
      const float2 within = lane_tokens(over_keys[in_block], octet);
      // sum: dq of the lane's two tokens, without the diagonal's term. It starts with the keys of this sub-chunk;
      // add_part adds the other parts, and adds q times these to `terms`.
      float2 sum = UNDO_NEAR_SCALE * (tokens.query_factor[p] * within), terms = {0.f, 0.f};
      // Adds factor * sums, of keys before the half's sub-chunk `border`, to dq and to the terms of dg: the gates
      // of the sub-chunks from `border` to the one before this one lie between key and query, and so get the terms.
      // Returns the lane's sum of the terms.
      const auto add_part = [&](float2 factor, const float (&sums)[4], int border) {
        const float2 part = factor * lane_tokens(sums, octet), term = tokens.q[p] * part;
        sum = sum + part, terms = terms + term;
#pragma unroll
        for (int to = border; to < subchunk; ++to) gate_terms[octet].across[to] += term.x + term.y;
        return term.x + term.y;
      };
      // The decay from this half's start to the sub-chunk's.
      const float from_half = product_over(half_decays[octet], 0, subchunk);
      // The lane's terms of S, summed over its two tokens.
      const float state_term =
          add_part(STATE_CORRECTION * scale * product_over(half_decays[octet], 0, subchunk, decay_to_half[octet]) *
                       tokens.from_start[p],
                   from_S[in_block], 0);
      if (half) {
        other_half[octet] += state_term;
        add_part(from_half * tokens.from_start[p], over_keys32[in_block], 0);
      }
      if (in_half)
        add_part(product_over(half_decays[octet], 2, subchunk) * tokens.from_start[p], over_keys16[in_block], 2);
      if (in_block) add_part(tokens.from_start[p], over_keys8, subchunk);
      const float2 near = TF32_CORRECTION<M> * UNDO_NEAR_SCALE * (tokens.queries.get(p) * within);
      tokens.query_terms[p] = M::SPLIT ? terms : terms + near;
      channels.put_tokens(s.q, n, octet, sum + u[octet] * channels.diagonal_of(n) * tokens.k[p]);
    }
  }

  // Stores dk of a block over k, and sets its gate_terms `within`; from_dS: the sums dS v, without decays.
  __device__ __forceinline__ void finish_keys(Tokens& tokens, int in_half, const Accumulators& from_dS) {
    const int m = 2 * half + in_half;
    const Stored* dA = s.pairs.dA + 16 * m * LDA;
    // Loaded again, so that the code between needs no registers for it.
    channels.load(tokens.k, s.k, m);
    // dA^T times queries, [16 channels, 16 keys], without the keys' factors: sums over queries of the same
    // sub-chunk, and over queries at the borders of 8, 16 and 32 tokens.
    Accumulators over_queries = {}, over_queries16 = {}, over_queries32 = {};
    float over_queries8[4] = {};
    Right<M> dAs[2];  // right operands [16 queries, 8 keys]
    load_right<AS_STORED>(dAs, dA + 16 * m, LDA);
    multiply_half(over_queries[0], tokens.queries.left(), dAs[0], 0);
    multiply_half(over_queries[1], tokens.queries.left(), dAs[1], 1);
    multiply_half(over_queries8, tokens.border8.left(), dAs[0], 1);
    if (growing >> m & 1) put_pairs(over_queries, pair_sums[m].dk);
    if (!in_half) {
      load_right<AS_STORED>(dAs, dA + 16 * LDA + 16 * m, LDA);
      multiply(over_queries16, border16[1].left(), dAs);
    }
#pragma unroll 1
    for (int other = BLOCKS / 2; !half && other < BLOCKS; ++other) {
      load_right<AS_STORED>(dAs, s.pairs.dA + 16 * other * LDA + 16 * m, LDA);
      multiply(over_queries32, s.pairs.border32[other][threadIdx.x].left(), dAs);
    }
    __syncwarp();  // all lanes have read k of this block, which dk overwrites
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const int octet = p & 1, in_block = p >> 1, subchunk = 2 * in_half + in_block, n = HALF * half + subchunk;
      const float2 within = lane_tokens(over_queries[in_block], octet);
      // sum: dk of the lane's two tokens, without the diagonal's term. It starts with the queries of this
      // sub-chunk; add_part adds the other parts, and adds k times these to `terms`.
      float2 sum = UNDO_NEAR_SCALE * (tokens.key_factor[p] * within), terms = {0.f, 0.f};
      // Adds factor * sums, of queries from the half's sub-chunk `border` on, to dk and to the terms of dg: the
      // gates of the sub-chunks after this one and before `border` lie between key and query, and so get the terms.
      // Returns the lane's sum of the terms.
      const auto add_part = [&](float2 factor, const float (&sums)[4], int border) {
        const float2 part = factor * lane_tokens(sums, octet), term = tokens.k[p] * part;
        sum = sum + part, terms = terms + term;
#pragma unroll
        for (int to = subchunk + 1; to < border; ++to) gate_terms[octet].across[to] += term.x + term.y;
        return term.x + term.y;
      };
      // The decay from this sub-chunk's end to the chunk's end, times STATE_CORRECTION.
      float to_chunk_end = product_over(half_decays[octet], subchunk + 1, HALF, STATE_CORRECTION);
      if (!half) {
#pragma unroll
        for (int later = HALF; later < NUM_SUBCHUNKS; ++later) to_chunk_end *= channels.decay_over(later, octet);
      }
      // The lane's terms of dS, summed over its two tokens.
      const float state_term = add_part(to_chunk_end * tokens.to_end[p], from_dS[in_block], HALF);
      if (!half) {
        other_half[octet] += state_term;
        add_part(product_over(half_decays[octet], subchunk + 1, HALF) * tokens.to_end[p], over_queries32[in_block],
                 HALF);
      }
      if (!in_half)
        add_part(product_over(half_decays[octet], subchunk + 1, 2) * tokens.to_end[p], over_queries16[in_block], 2);
      if (!in_block) add_part(tokens.to_end[p], over_queries8, subchunk + 1);
      channels.put_tokens(s.k, n, octet, sum + u[octet] * channels.diagonal_of(n) * tokens.q[p]);
      // The terms of the sub-chunk's keys before this lane's two.
      const float earlier_keys = four_lane_sums(terms.x + terms.y).before;
      const float2 near = TF32_CORRECTION<M> * UNDO_NEAR_SCALE * (tokens.keys.get(p) * within);
      float2& dg = gate_terms[octet].within[subchunk];
      dg = terms_from<ReadOrder>(tokens.query_terms[p], M::SPLIT ? float2{0.f, 0.f} : near) +
           float2{earlier_keys, terms.x + earlier_keys};
    }
    if constexpr (M::SPLIT) {
      if (growing >> m & 1) return;
#pragma unroll
      for (int in_block = 0; in_block < 2; ++in_block) {
        const int p = 2 * in_block;
        const BothOctets terms = gate_terms_of_pairs<ReadOrder>(
            {tokens.q[p], tokens.q[p + 1]}, {tokens.k[p], tokens.k[p + 1]},
            {channels.gates_of_pair(m, p), channels.gates_of_pair(m, p + 1)}, dA + 8 * in_block * (LDA + 1) + 16 * m);
#pragma unroll
        for (int octet = 0; octet < 2; ++octet) {
          float2& dg = gate_terms[octet].within[2 * in_half + in_block];
          dg = dg + UNDO_NEAR_SCALE * terms.of[octet];
        }
      }
    }
  }

  // Sets dg of the half's tokens, by octet and sub-chunk, but for the terms of other_half; moves on to the next half.
  __device__ __forceinline__ void finish_dg(float2 (&half_dg)[2][HALF]) {
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
#pragma unroll
      for (int subchunk = 0; subchunk < HALF; ++subchunk) {
        const int m = 2 * half + subchunk / 2;
        float2 dg = gate_terms[octet].within[subchunk];
        if (growing >> m & 1) dg = dg + UNDO_NEAR_SCALE * pair_sums[m].dg[subchunk % 2 * 2 + octet];
        const float across = four_lane_sums(gate_terms[octet].across[subchunk]).all;
        half_dg[octet][subchunk] = dg + float2{across, across};
      }
      decay_to_half[octet] = product_over(half_decays[octet], 0, HALF);
    }
  }
};

// T: the type of q, k, v, do; G: that of g and dg. PRODUCTS: tf32 products for each product of float32, 1 or 3.
// Columns: whether columns of V have gates, see above.
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
  // excluded: it spills more registers with this than without.
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
  const bool vectors = args.vectors;

  const i64 chunk = (b * heads + h - args.first) * shape.NC + c;                      // among the chunks of this launch
  const float* all_column_decays = args.decays + chunk * width_padded_to_8(shape.V);  // of this chunk; read if gated
  const i64 width = Columns::gated ? width_padded_to_8(shape.V) : shape.V;            // columns of v and do in memory
  // Starts the copies of columns 32 stage ... 32 stage + 31 of v and do to s.values[stage % 2].
  const auto fetch_columns = [&](int stage) {
    Values<Value>& to = s.values[stage & 1];
    const ChannelTile current = RECOMPUTES_WORK && M::SPLIT ? work_of(opaque(blockIdx.x)) : work;
    const i64 head = Columns::gated ? current.h - args.first : current.h, column = stage * COLUMNS;
    const bool aligned = Columns::gated || vectors;
    fetch_rows<CHUNK, COLUMNS, Value, LDV>(to.v, args.v, current.b, head, current.span.start, current.span.stop, column,
                                           width, aligned);
    fetch_rows<CHUNK, COLUMNS, Value, LDV>(to.do_, args.do_, current.b, head, current.span.start, current.span.stop,
                                           column, width, aligned);
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
  // Loads the columns of step `step` of a stage to index `slot` of the queue.
  const auto fetch_states = [&](int slot, int stage, int step) {
    const int offset = stage * COLUMNS / TILE * next_tile, column = stage * COLUMNS % TILE / 8 + 2 * step;
    states.load(slot, S_tiles + offset, dS_tiles + offset, 2 * warp, column);
  };
  if constexpr (Columns::gated) {
    // Products are used if no channel and column together grow by more than BY_CHUNK, 16 nats, over the chunk: decays
    // below e^-87 are lost in products, and growth may multiply what was lost (by_token.cuh). All threads agree, so
    // that none waits at a barrier for one that has left.
    if (args.row_growth[chunk] + args.column_growth[chunk] > BY_CHUNK)
      return compute_token_by_token<Columns::turned>(args, S_tiles, dS_tiles, next_tile, work);
  }
  fetch_columns(0);
  cp_async_commit();
#pragma unroll
  for (int step = 0; step < STEPS; ++step) fetch_states(step, 0, step);
  // q, k and g belong to the next group of copies, and are read after the loop only.
  fetch_rows<CHUNK, TILE>(s.q, args.q, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);
  fetch_rows<CHUNK, TILE>(s.k, args.k, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);
  fetch_rows<CHUNK, TILE>(s.g, args.g, b, h, span.start, span.stop, tile * TILE, shape.K, vectors);

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
  // Bit m: whether a gate of block m exceeds GROWTH. Then pairs within its sub-chunks are summed one by one, not by way
  // of the sub-chunk's middle. Set for NaN, too, which max_nan keeps.
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
  GradientsWithin pair_sums[BLOCKS];  // set only for blocks that grow
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
  if (growing || __any_sync(0xffffffffu, !(fabsf(state_terms[0]) + fabsf(state_terms[1]) <= FLOAT32_MAX))) {
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

  // The first half of the chunk, then the second. The indices dq[0], dq[1], dk[0], dk[1] are the half's two blocks: the
  // end of each iteration moves the other half's numbers there. first_half_dg, half_dg: dg of the lane's two tokens of
  // each sub-chunk, by octet, of the half before and of the half computed last.
  HalfChunk<ReadOrder, T, G, PRODUCTS, Columns> half_chunk{s, channels, growing, pair_sums, scale, u};
  float2 first_half_dg[2][HALF] = {}, half_dg[2][HALF] = {};
#pragma unroll UNROLLED
  for (int half = 0; half < 2; ++half) {
    half_chunk.begin(half);
#pragma unroll
    for (int in_half = 0; in_half < 2; ++in_half) {
      TokenBlock<M> tokens;
      half_chunk.load(tokens, in_half);
      half_chunk.finish_queries(tokens, in_half, dq[in_half]);
      half_chunk.finish_keys(tokens, in_half, dk[in_half]);
    }
#pragma unroll
    for (int octet = 0; octet < 2; ++octet)
#pragma unroll
      for (int subchunk = 0; subchunk < HALF; ++subchunk) first_half_dg[octet][subchunk] = half_dg[octet][subchunk];
    half_chunk.finish_dg(half_dg);
#pragma unroll
    for (int in_half = 0; in_half < BLOCKS / 2; ++in_half) {
#pragma unroll
      for (int in_block = 0; in_block < 2; ++in_block) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          dq[in_half][in_block][i] = dq[2 + in_half][in_block][i];
          dk[in_half][in_block][i] = dk[2 + in_half][in_block][i];
        }
      }
    }
  }
  __syncwarp();  // all lanes have read g, which dg overwrites
#pragma unroll
  for (int octet = 0; octet < 2; ++octet) {
    // The second half's queries with S: every gate of the first half has these terms.
    const float from_second_half = four_lane_sums(half_chunk.other_half[octet]).all;
#pragma unroll
    for (int subchunk = 0; subchunk < HALF; ++subchunk) {
      channels.put_tokens(s.g, subchunk, octet,
                          first_half_dg[octet][subchunk] + float2{from_second_half, from_second_half});
      channels.put_tokens(s.g, HALF + subchunk, octet, half_dg[octet][subchunk]);
    }
  }
  __syncthreads();  // dq, dk and dg are in shared memory, written by all warps
  const ChannelTile stored = RECOMPUTES_WORK ? work_of(opaque(blockIdx.x)) : work;
  // Stores the tokens and channels of a tile that exist; for all threads of the block.
  const auto store = [&](const auto& to, const auto* tile) {
    store_rows<CHUNK, TILE>(to, tile, stored.b, stored.h, stored.span.start, stored.span.stop, stored.tile * TILE,
                            shape.K, vectors);
  };
  if (!Columns::turned) store(args.dq, s.q);  // turned: dq would be the gradient of do
  store(args.dk, s.k);
  store(args.dg, s.g);
}
