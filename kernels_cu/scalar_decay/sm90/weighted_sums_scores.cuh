// what      A chunk's decays and scores in weighted_sums.cu, for a recurrence with one gate per token and head on
//           Hopper: a warp that sums log gates, and a warpgroup that makes the scores A of a chunk's 64 tokens.
// math      A_ij = output_scale value_scale D_ij q_i . k_j for keys j <= i (backwards: j >= i), else 0. D_ij is the
//           decay over the gates after the earlier of both tokens, up to the later one. At the level at which the two
//           are in neighbouring groups of 2^level tokens it is 2^(to_token of the later + to_end of the earlier);
//           struct Gates has these sums
// shapes    The warpgroup's warp w has the queries of two blocks of 8 tokens, w and 7 - w. With g = lane / 4 and t =
//           lane % 4 a lane has query g of both, and keys 2t and 2t + 1 of every 8. A u32 has two neighbouring bfloat16
//           scores of a query, the first one in its low half
// barriers  gates: wait for done of the stage's previous chunk, arrive at full; scores: wait for full, arrive at
//           `scores`
// numerics  the exponent of each decay is a sum of gates, never a difference of sums; A is rounded to bfloat16
// limits    sm_90a; bfloat16
#include "scalar_decay/sm90/weighted_sums_storage.cuh"

// From the includes:
//   first_token_of: the first token of an iteration's chunk; gate_of: a token's log gate, 0 outside of the sequence
//   WorkTile: the block's sequence, head and tokens. SERVES_GATE_GRADIENT, ALL_BACKWARD, SOME_BACKWARD: of the pass
//   swizzled(rows, row, piece): the address of 16 bytes of a row; k_major_tile: wgmma's descriptor of rows that are
//     summed over. wgmma_fence_operand(d): d is not read before it
//   opaque(x): x, whose origin it hides from the compiler, which then holds no addresses computed from it in registers

// ---- a warp that sums gates ---------------------------------------------------------------------------------------

// Fills `gates` from the log gates gate0 and gate1 of tokens `lane` and 32 + lane. Groups of 1, 2, 4, ... tokens are
// joined in pairs: `to_token` sums the gates from the group's start through the token, `to_end` those from after the
// token to the group's end. Both are logarithms to base 2. gates.output_factors are E (backwards: L) times
// output_scale, gates.value_factors L (backwards: E) times value_scale.
__device__ __forceinline__ void sum_gates(Gates& gates, float gate0, float gate1, int lane, float output_scale,
                                          float value_scale, bool backwards) {
  float to_token[2] = {LOG2E * gate0, LOG2E * gate1}, to_end[2] = {0.f, 0.f};
#pragma unroll
  for (int level = 0; level < Gates::LEVELS; ++level) {
    const int size = 1 << level;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      gates.to_token[level][32 * half + lane] = to_token[half];
      if (level) gates.to_end[level - 1][32 * half + lane] = to_end[half];
      if (size == 32) continue;
      // The other group's sum, from its last lane.
      const float other = __shfl_sync(0xffffffffu, to_token[half], (lane ^ size) | (size - 1));
      to_token[half] += lane & size ? other : 0.f, to_end[half] += lane & size ? 0.f : other;
    }
  }
  // The sums over the first and the second 32 tokens.
  const float half0 = __shfl_sync(0xffffffffu, to_token[0], 31), half1 = __shfl_sync(0xffffffffu, to_token[1], 31);
  const float from_start[2] = {exp2_approx(to_token[0]), exp2_approx(half0 + to_token[1])};
  const float to_chunk_end[2] = {exp2_approx(to_end[0] + half1), exp2_approx(to_end[1])};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int token = 32 * half + lane;
    gates.output_factors[token] = output_scale * (backwards ? to_chunk_end[half] : from_start[half]);
    const float x = value_scale * (backwards ? from_start[half] : to_chunk_end[half]);
    const bf16 rounded = from_float<bf16>(x);
    // Of two neighbouring tokens: both factors rounded to bfloat16, then both remainders. Their sum has more bits.
    bf16* const pair = reinterpret_cast<bf16*>(&gates.value_factors[token / 2]) + token % 2;
    pair[0] = rounded;
    pair[2] = from_float<bf16>(fabsf(x) <= LARGEST_BF16 ? x - to_float(rounded) : 0.f);
  }
  if (lane == 31) gates.chunk_decay = from_start[1];
}

// Fills s.gates for each chunk of the sequence, each time after the consumers have finished the stage's previous chunk.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_gates_of_chunks(Shared<Pass, BK, BV>& s, const WeightedSum& sum,
                                                    const StridedRows<const G>& gates, const WorkTile& work,
                                                    bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const float output_scale = float(sum.output_scale), value_scale = float(sum.value_scale);
  const int lane = threadIdx.x & 31;
  G gate0, gate1;
  // Loads the lane's two gates of the chunk of an iteration.
  const auto load = [&](int iteration) {
    const int token = first_token_of(iteration, work, backwards) + lane;
    gate0 = gate_of(gates, work, token), gate1 = gate_of(gates, work, token + 32);
  };
  load(0);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration) {
    if (iteration >= STAGES) mbarrier_wait(s.done[iteration % STAGES], iteration / STAGES - 1 & 1);
    sum_gates(s.gates[iteration % STAGES], to_float(gate0), to_float(gate1), lane, output_scale, value_scale,
              backwards);
    mbarrier_arrive(s.full[iteration % STAGES]);
    load(iteration + 1);  // early, to hide the loads' latency
  }
}

// ---- a warpgroup that multiplies queries by keys --------------------------------------------------------------------

// The two blocks of 8 queries that a warp has, one in each half of the chunk: blocks w and 7 - w for warp w. Block n
// needs the scores of n + 1 blocks of 8 keys (BACKWARDS: 8 - n), so that each warp has 9.
//   block of queries         0   1   2   3   4   5   6   7
//   warp                     0   1   2   3   3   2   1   0
//   blocks of keys, forward  1   2   3   4   5   6   7   8
__device__ __forceinline__ constexpr int block_of(int warp, int half) { return half ? CHUNK / 8 - 1 - warp : warp; }

// Stores a warp's scores A_ij = scale D_ij q_i . k_j, from the products of queries and keys. Scores of later keys
// (BACKWARDS: earlier keys) are 0; those in the other half of the chunk `initialise` has set to 0. SEPARATE_SELF: a
// token's score with itself goes to gates.self_scores, and is 0 in A. All warps run the same code, and so compute some
// scores that are then replaced by 0: code for each warp would be four times as large.
template <bool BACKWARDS, bool SEPARATE_SELF>
__device__ __forceinline__ void store_scores(bf16 (&A)[CHUNK][64], float (&products)[CHUNK / 2], float scale,
                                             Gates& gates, int warp) {
  // m counts blocks of 8 keys in a half of the chunk, n in the chunk; products[4n + 2 half + p]: of query g of
  // block_of(warp, half) and key 2t + p of block n.
  constexpr int HALF_BLOCKS = CHUNK / 16;  // blocks of 8 tokens in half a chunk
  const float *const to_token = gates.to_token[0], *const to_end = gates.to_end[0] - CHUNK;  // level 0 has none
  // The query's and the key's term of the decay's logarithm: of the later of both to_token, of the earlier to_end.
  const float *const query_gates = BACKWARDS ? to_end : to_token, *const key_gates = BACKWARDS ? to_token : to_end;
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2, t = lane & 3;
  // Scores of a query block with keys in the other half of the chunk, and with keys in the queries' half.
  u32 other_half[HALF_BLOCKS], same_half[2][HALF_BLOCKS];
  float self_score[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    // i: the lane's query; upper: 1 if the block is in the later 16 tokens of its half, else 0.
    const int block = block_of(warp, half), i = 8 * block + g, upper = block >> 1 & 1;
    const auto decayed = [&](int n, int level) {  // the query's two scores with the lane's keys of block n
      const float query = query_gates[level * CHUNK + i];
      const float2 keys = *reinterpret_cast<const float2*>(&key_gates[level * CHUNK + 2 * t + 8 * n]);
      return pack<bf16>(products[4 * n + 2 * half] * (scale * exp2_approx(query + keys.x)),
                        products[4 * n + 2 * half + 1] * (scale * exp2_approx(query + keys.y)));
    };
    float diagonal[2];  // products of the block [8, 8] on the diagonal
#pragma unroll
    for (int m = 0; m < HALF_BLOCKS; ++m) {
      const int n = HALF_BLOCKS * half + m;
      if (m == 0 || n == block) diagonal[0] = products[4 * n + 2 * half], diagonal[1] = products[4 * n + 2 * half + 1];
      if (BACKWARDS != (half == 1)) other_half[m] = decayed(n ^ HALF_BLOCKS, 5 /* 32 tokens */);
    }
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const int key = 2 * t + p, difference = g ^ key, level = difference > 3 ? 2 : difference > 1,
                later = BACKWARDS ? 8 * block + key : i;
      const int earlier = BACKWARDS ? i : 8 * block + key;
      const float decay = exp2_approx(to_token[level * CHUNK + later] +
                                      (level ? to_end[level * CHUNK + earlier] : 0.f));  // level 0: adjacent tokens
      float& x = diagonal[p];
      x *= scale;
      if (key == g) self_score[half] = x;
      x = (BACKWARDS ? key < g : key > g) || SEPARATE_SELF && key == g ? 0.f : key == g ? x : x * decay;
    }
#pragma unroll
    for (int m = 0; m < HALF_BLOCKS; ++m) {
      const int n = HALF_BLOCKS * half + m;
      u32 pair = 0;
      // No query of the half is after its last 8 keys (BACKWARDS: before its first 8): their scores are 0, apart from
      // those of the block on the diagonal, which replace `pair` below.
      if (m != (BACKWARDS ? 0 : HALF_BLOCKS - 1)) {
        // Level 3, groups of 8 tokens, if the key, in 16 tokens m / 2 of the half, is in the query's 16; else level 4.
        pair = decayed(n, m / 2 ? 4 - upper : 3 + upper);
        if (BACKWARDS ? n < block : n > block) pair = 0;
      }
      same_half[half][m] = n == block ? pack<bf16>(diagonal[0], diagonal[1]) : pair;
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {  // not above: the compiler would load gates again after each store to A
    const int block = block_of(warp, half), row = 8 * block + lane % 8, piece = lane / 8;
    stmatrix_x4(swizzled(A[0], row, HALF_BLOCKS * half + piece), same_half[half]);
    if (BACKWARDS != (half == 1)) stmatrix_x4(swizzled(A[0], row, HALF_BLOCKS * (1 - half) + piece), other_half);
    if (SEPARATE_SELF && t == g / 2)
      gates.self_scores[8 * block + g] =
          pack<bf16>(self_score[half] - to_float(from_float<bf16>(self_score[half])), self_score[half]);
  }
}

// The scores' warpgroup: fills A of each chunk. A warp's rows of the product are the queries of its two blocks.
template <class Pass, int BK, int BV>
__device__ __forceinline__ void compute_scores(Shared<Pass, BK, BV>& s, int tokens, float scale, bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < tokens; ++iteration) {
    const int thread = opaque(threadIdx.x), lane = thread & 31, warp = thread / 32 % 4;  // addresses are not held
    auto& in = s.stages[iteration % STAGES];
    mbarrier_wait(s.full[iteration % STAGES], iteration / STAGES & 1);
    u32 q[BK / 16][4];
    float d[CHUNK / 2];
#pragma unroll
    for (int step = 0; step < BK / 16; ++step)
      ldmatrix_x4(q[step], swizzled(in.q[step / 4][0], 8 * block_of(warp, lane >> 3 & 1) + (lane & 7),
                                    step % 4 * 2 + (lane >> 4)));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BK / 16; ++step)  // 16 numbers are 32 bytes; descriptors count by 16 bytes
      wgmma<bf16, CHUNK, K_MAJOR>(d, q[step], k_major_tile(in.k[step / 4]) + step % 4 * 32 / 16, step > 0);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(d);
    Gates& gates = s.gates[iteration % STAGES];
    if (ALL_BACKWARD<Pass> || SOME_BACKWARD<Pass> && backwards)
      store_scores<BACKWARDS, Pass::SERVES_GATE_GRADIENT>(in.A, d, scale, gates, warp);
    else store_scores<FORWARDS, Pass::SERVES_GATE_GRADIENT>(in.A, d, scale, gates, warp);
    fence_proxy_async();  // A has been written by plain stores, and is read by wgmma
    mbarrier_arrive(s.scores[iteration % STAGES]);
  }
}
