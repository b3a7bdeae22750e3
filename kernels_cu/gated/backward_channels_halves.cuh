// what      dq, dk and dg of a warp's 16 channels of a chunk of 64 tokens, for gated/backward_channels.cu, from its
//           sums over V (S do, dS v, S dS, dA): one half of the chunk, 32 tokens, after the other
// math      start_i, end_j: decays from the chunk's start to query i, from key j to the chunk's end; decay_ij: between
//           them. dq_i = scale start_i (S do_i) + sum_j<i dA_ij decay_ij k_j + dA_ii u k_i;
//           dk_j = end_j (dS v_j) + sum_i>j dA_ij decay_ij q_i + dA_jj u q_j; u = 1 but for RWKV-6.
//           dg_t sums all terms that have token t's decay as a factor: q_i scale start_i (S do_i) of later
//           queries, k_j end_j (dS v_j) of earlier keys, S dS, and the pairs around it: j < t <= i (RWKV-6: j < t < i)
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
//           cancels up to float32's rounding. All other terms of dg are added, without a difference. With split
//           operands (Math::SPLIT) the pairs within a sub-chunk are added, too, pair by pair (gate_terms_of_pairs)
// order     of a half, by HalfChunk (finish_halves). What a step reads, and what it overwrites:
//             begin                    border16, from q, k and g of both blocks
//             for both blocks: load    a TokenBlock, from q, k, g
//               finish_queries         dq over the block's q
//               finish_keys            reads the block's k again; dk over it
//             finish_dg                dg of the half, in registers; over g after both halves
//           other_half: the second half's begin takes the first half's; finish_halves takes the second half's, last
// numerics  tf32 products cut low bits of their operands off, which TF32_CORRECTION makes up for on average. dA is
//           stored times STORED_SCORE, the correction of dA and of the operand that it is multiplied by. Which product
//           has which: `numerics` in backward_channels.cu
//
// Numbers: `half` of the chunk; `m`, a block of 16 tokens of the chunk, and `in_half`, of the half; `n`, a sub-chunk of
// the chunk, `subchunk`, of the half, and `in_block`, of the block. Of a block's 16 tokens and the warp's 16 channels a
// lane has, by index p from 0 to 3, tokens 2 (lane % 4) and the next of sub-chunk p / 2, as a float2, of the channel
// lane / 4 + 8 octet, octet = p % 2. Accumulators of a product [16 channels, 16 tokens]: [sub-chunk][2 octet + token of
// the lane's two]
//
// From backward_channels_storage.cuh
//   Columns              Ungated, or Gated, GatedTurned: columns of V have gates; Type: the type of v and do in memory
//   channels             the warp's: load(x, q or k, m): block m by index p; gates_of_block(m, f): calls f(p, log
//                        gates); gates_of_pair(m, p): those of one p; decay_over(n, octet); diagonal_of(n): dA_ii;
//                        put_tokens: stores the lane's two tokens of sub-chunk n
//   s.pairs              dA [64, 64], rows LDA apart; state_terms, border32: what this thread has stored, see there
//   BLOCKS, HALF         4 blocks of a chunk, 4 sub-chunks of a half
//   PairSums             (backward_channels_growth.cuh) dq, dk, dg of pairs within a block's sub-chunks, by index p
// From fragments.cuh. A product is D[16, 8] += A[16, 16] B[16, 8]
//   Math<T, PRODUCTS>    how data T are multiplied: 1 or 3 products for one (SPLIT: 3, an operand is two tf32 numbers);
//                        Stored: the type of operands in memory
//   Right                a lane's part of B; HeldLeft: of A; its left() makes the operand, and get(p) is its pair p as
//                        products read it
//   TF32_CORRECTION<M, E>  of an operand of type E in shared memory, M::Stored if E is left out
//   load_right           two B side by side: AS_STORED, [depth, column], or, TRANSPOSED, [column, depth]
//   multiply             d += A B for two B; multiply_half: for one B, over half of the depth
// From decays.cuh. a: the decays of a lane's two tokens; decays_of: of its log gates
//   PairDecays(a)        the decays from the sub-chunk's start (`start`) and to its end (`end`)
//   MiddleFactors(a)     the factors about the sub-chunk's middle
//   four_lane_sums(x)    over the lanes of a channel: `all`, those `before` this lane, those `after` it
//   product_over(x, first, end, factor) = factor times x[first ... end - 1]
// From others
//   ReadOrder            AfterWrite (GLA) or BeforeWrite (RWKV-6)
//   exchange_and_add_halves<N>(x, distance, upper): of 2 N numbers x of this lane, and of the lane whose number differs
//                        in the bit `distance`, N sums, in x[0] and on: the last N if `upper`, else the first N
#include "gated/backward_channels_growth.cuh"
#include "lanes.cuh"

// Terms of dg of one channel of this lane, for each sub-chunk of half a chunk. `within`: for the gates of this lane's
// two tokens, the terms whose query or key is in the gates' own sub-chunk. `across`: the terms that all gates of that
// sub-chunk have: of pairs with the key before it and the query after it, of S with queries after it, of dS with keys
// before it, and of S dS. `within` is complete. Of `across` this lane has only the terms of its own queries and keys,
// and its share of S dS, so that the sum over four lanes is still to be taken.
struct GateTerms {
  float2 within[HALF];
  float across[HALF];
};

// Numbers of this lane's two tokens of a sub-chunk, by octet.
struct BothOctets {
  float2 of[2];
};
// Returns dg's terms of the pairs within a sub-chunk: for each gate the sum of the pairs j < t <= i, without a
// difference. q, k and gates are the lane's two tokens; the other six are in the three lanes with the same lane / 4.
// dA: 8 x 8, zeros for keys j >= i. A lane computes the pairs of the queries lane_pair and 7 - lane_pair, seven
// together.
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
  for (int number = 0; number < 2; ++number) {  // of the lane's two queries
    const int i = number ? SUB_CHUNK - 1 - lane_pair : lane_pair;
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

// dq, dk and dg of the first half of a warp's chunk, then of the second, in the order that finish_halves has.
// finish_keys also takes what load and finish_queries have set in `tokens`.
template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns> struct HalfChunk {
  using M = Math<T, PRODUCTS>;
  using Stored = typename M::Stored;
  using Accumulators = float[2][4];
  using Tokens = TokenBlock<M>;
  // If columns have gates, dA of pairs within a sub-chunk comes times NEAR_SCALE, which keeps small scores in float32's
  // range (Args::scores, backward.cuh), and so do pair_sums: sums over such pairs are multiplied by UNDO_NEAR_SCALE.
  static constexpr float UNDO_NEAR_SCALE = Columns::gated ? 1 / NEAR_SCALE : 1.f;
  // The correction of the sums S do and dS v: that of S or dS times that of do or v.
  static constexpr float STATE_CORRECTION =
      TF32_CORRECTION<M> * TF32_CORRECTION<M, typename Columns::template Type<T, Stored>>;

  const WarpChannels<T, G, PRODUCTS, Columns>& channels;
  const u32 growing;                    // bit m: block m grows, see the kernel
  const PairSums (&pair_sums)[BLOCKS];  // set only for blocks that grow
  const float scale, (&u)[2];           // u: by octet
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
        gate_terms[octet].across[subchunk] = channels.s.pairs.state_terms[octet][threadIdx.x] + other_half[octet];
      other_half[octet] = 0.f;
    }
#pragma unroll
    for (int in_half = 0; in_half < 2; ++in_half) {  // the number of a block in this half
      const int m = 2 * half + in_half;
      float2 y[4];
      channels.load(y, in_half ? channels.s.q : channels.s.k, m);
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
    channels.load(tokens.q, channels.s.q, m);
    channels.load(tokens.k, channels.s.k, m);
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
    // In a block that grows the operands about the middle, and so their products and `near`, become 0. pair_sums
    // replaces these, times factors of 1: dq in finish_queries, dk in finish_keys, dg in finish_dg.
    if (growing >> m & 1) {
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
    const Stored* dA = channels.s.pairs.dA + 16 * m * LDA;
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
      multiply(over_keys32, channels.s.pairs.border32[other][threadIdx.x].left(), dAs);
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
      // The query cut off, as the product of finish_keys reads it, so that pairs that both sums have cancel
      // (terms_from): hence the correction. `sum` needs none, as query_factor is float32.
      const float2 near = TF32_CORRECTION<M> * UNDO_NEAR_SCALE * (tokens.queries.get(p) * within);
      tokens.query_terms[p] = M::SPLIT ? terms : terms + near;
      channels.put_tokens(channels.s.q, n, octet, sum + u[octet] * channels.diagonal_of(n) * tokens.k[p]);
    }
  }

  // Stores dk of a block over k, and sets its gate_terms `within`; from_dS: the sums dS v, without decays.
  __device__ __forceinline__ void finish_keys(Tokens& tokens, int in_half, const Accumulators& from_dS) {
    const int m = 2 * half + in_half;
    const Stored* dA = channels.s.pairs.dA + 16 * m * LDA;
    // Loaded again, so that the code between needs no registers for it. q is not: dq is over it.
    channels.load(tokens.k, channels.s.k, m);
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
      load_right<AS_STORED>(dAs, channels.s.pairs.dA + 16 * other * LDA + 16 * m, LDA);
      multiply(over_queries32, channels.s.pairs.border32[other][threadIdx.x].left(), dAs);
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
      channels.put_tokens(channels.s.k, n, octet, sum + u[octet] * channels.diagonal_of(n) * tokens.q[p]);
      // The terms of the sub-chunk's keys before this lane's two.
      const float earlier_keys = four_lane_sums(terms.x + terms.y).before;
      const float2 near = TF32_CORRECTION<M> * UNDO_NEAR_SCALE * (tokens.keys.get(p) * within);  // as in finish_queries
      float2& dg = gate_terms[octet].within[subchunk];
      dg = terms_from<ReadOrder>(tokens.query_terms[p], M::SPLIT ? float2{0.f, 0.f} : near) +
           float2{earlier_keys, terms.x + earlier_keys};
    }
    if constexpr (M::SPLIT) {
      static_assert(STORED_SCORE<M> == 1.f, "gate_terms_of_pairs takes dA without a factor");
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

  // Sets dg of the half's tokens, by octet and sub-chunk, the first half's without the second half's other_half; and
  // decay_to_half of the second half.
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

// Stores dq, dk and dg of the warp's channels over q, k and g in shared memory. dq, dk: the sums S do and dS v of the
// four blocks of 16 tokens, without decays; the function overwrites them.
template <class ReadOrder, typename T, typename G, int PRODUCTS, class Columns>
__device__ __forceinline__ void finish_halves(const WarpChannels<T, G, PRODUCTS, Columns>& channels, u32 growing,
                                              const PairSums (&pair_sums)[BLOCKS], float scale, const float (&u)[2],
                                              float (&dq)[BLOCKS][2][4], float (&dk)[BLOCKS][2][4]) {
  using M = Math<T, PRODUCTS>;
  // The first half of the chunk, then the second. The indices dq[0], dq[1], dk[0], dk[1] are the half's two blocks: the
  // end of each iteration moves the other half's numbers there. first_half_dg, half_dg: dg of the lane's two tokens of
  // each sub-chunk, by octet, of the half before and of the half computed last.
  HalfChunk<ReadOrder, T, G, PRODUCTS, Columns> half_chunk{channels, growing, pair_sums, scale, u};
  float2 first_half_dg[2][HALF] = {}, half_dg[2][HALF] = {};
#pragma unroll M::SPLIT ? 1 : 2
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
      channels.put_tokens(channels.s.g, subchunk, octet,
                          first_half_dg[octet][subchunk] + float2{from_second_half, from_second_half});
      channels.put_tokens(channels.s.g, HALF + subchunk, octet, half_dg[octet][subchunk]);
    }
  }
}
