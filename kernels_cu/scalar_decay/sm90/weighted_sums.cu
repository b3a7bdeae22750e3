// what      Outputs or gradients of a recurrence with one gate per token and head, in one pass on Hopper, by chunks of
//           64 tokens. q, k and v enter the products undecayed; decays multiply the scores and the products' results.
// math      per chunk, with decays e^(sum of log gates): E_i over its gates up to i, L_j over those after j, D_ij over
//           gates j + 1 to i:
//           o_i = scale (E_i S q_i + sum_{j<=i} A_ij v_j), A_ij = D_ij q_i . k_j;  S <- E_64 S + sum_j L_j v_j k_j^T
//           The code's A has the factor `scale`. Tokens beyond a sequence's end are read as zeros
//           Gradients are such sums (struct WeightedSum), too, of other arrays. Below, q, k, v, o, K and V are roles:
//             o   q   k   v   partner
//             dq  do  v   k   q        forward in time; here, and of dk, K is the layer's V, and V its K
//             dk  v   do  q   k        backward in time: dS in place of S, j >= i, E and L change places, and `scale`
//             dv  k   q   do           multiplies what tokens add to dS
//           dg_t = <S, dS> after the last token of t's stretch of 256 tokens + the sum of q_i . dq_i - k_i . dk_i over
//           i >= t in it. These products of a partner and o are without the terms of A_ii, which no gate multiplies.
//           Stretches bound the rounding errors that a longer sum would collect
// shapes    q k [B, H, T, K], v o [B, H, T, V], g [B, H, T] of any strides; initial and final state [N, H, K, V]
//           float32; token_sums [B, H, tiles, T] float32: q_i . dq_i, over each tile of BV columns of dq; dg
//           contiguous: [B, H, T] of g's type if dk has one tile, else [B, H, T, tiles] float32, from each block the
//           part of its BV columns of dk, for the host to add
// grid      a block for every (sequence, head, BV columns of V, WeightedSum), sequence slowest: a warpgroup for every
//           64 columns, which holds their state transposed in registers; a warpgroup that computes A; a warp that moves
//           chunks, one that sums gates, one that sums dg. GatedKeys with BK = BV = 128: the blocks of dk and dv form a
//           cluster and load their chunks at about the same time, so that the second one finds them in L2
// passes    Pass          SUMS  constants that are true                        results
//           Whole         1     HAS_OUTPUTS, SPLITS_STATE                      o, final states
//           Summary       1     none                                           final states, decays
//           Gradients     3     HAS_OUTPUTS                                    dq, dk, dv
//           Queries       1     HAS_OUTPUTS                                    dq
//           Keys          2     HAS_OUTPUTS, ALL_BACKWARD                      dk, dv
//           GatedQueries  1     HAS_OUTPUTS, SERVES_GATE_GRADIENT              dq, token_sums, stretch_states
//           GatedKeys     2     the same, ALL_BACKWARD, WRITES_GATE_GRADIENT   dk, dv, dg; reads the last two
//           SUMS: WeightedSums of a launch. weighted_sums_storage.cuh has these constants. stretch_states: of each
//           stretch, S before its last chunk. Summary takes each segment of a sequence for a sequence; scan_segments.cu
//           joins their states
// smem      weighted_sums_storage.cuh. Stage: a chunk's q, k, v, partner and A; Gates: its decays
// barriers  mbarriers of a stage. full: the chunk's tokens and gates are there; scores: A is stored; done: consumers
//           have read the inputs, and stored o over v and partner . o over the partner; summed: the warp that sums dg
//           has read partner . o
// numerics  products of bfloat16 numbers in float32. S is multiplied as the sum of two bfloat16 numbers in Whole,
//           rounded to one in gradients; A and the decayed v are rounded to one. The exponent of each decay is a sum of
//           gates, never a difference of sums, so no gate is too strong. In dg_t the terms of two tokens, neither of
//           them before t, cancel: up to float32's rounding if both are in one chunk, where dq and dk use the same
//           rounded A, else up to bfloat16's
// source    Yang et al., 2024, sections 4 and 4.4; Sun et al., 2023, "Retentive Network", section 2.2
// limits    sm_90a; bfloat16; of each sum K <= BK, and K and V multiples of 8; BK and BV 64 or 128; rows start on 16
//           bytes
// tests     test_family_kernels; test_distributed_halves (Summary); test_compile: no spills, no product that the
//           assembler serialises, no write to a running product's operand
//
// From warpgroup.cuh and wgmma.cuh
//   WorkTile            a block's head and sequence: `sequence`, `batch`, `head`; `start`, `tokens`: of the sequence;
//                       `sequence_head`: sequence * heads + head
//   Values, Operand     accumulators of an output; two bfloat16 numbers a register
//   each_two            calls f(i, ...) for each two tokens o[i], o[i + 1]
//   load_channels, store_values: move a warp's 16 columns of a panel
//   each_transposed(S, state, strides, size, ...): calls f for the lane's numbers of S and their addresses in `state`
//   wgmma_fence_operand keeps uses of a product's result behind the wait
//   read_state, write_state: start the product S tokens^T and the decay of S (READ_FIRST: the product with the S before
//                       the decay); start S += x tokens. multiply_pairs: starts the product with A [query, key]
//                       (BY_QUERY)
//   load_token_factors, decay_tokens: factors of a lane's tokens; tokens times factors. gate_of: a token's log gate
// From weighted_sums_storage.cuh
//   first_token_of      the first token of an iteration's chunk; ends_stretch: whether a chunk is its stretch's last
//   IN_CLUSTER          whether the blocks of dk and dv form a cluster
//   block_serves_gate_gradient(): SERVES_GATE_GRADIENT, and this block computes dq or dk
//   Registers           registers by role; TWO_BLOCKS: whether a multiprocessor holds two blocks
// From ptx.cuh: opaque and hide_origin keep the compiler from holding in registers what is computed from their argument
#include "lanes.cuh"
#include "scalar_decay/sm90/weighted_sums_storage.cuh"

// Fragments. With g = lane / 4 and t = lane % 4, here and below, a lane has of sums [16 rows of a warp, columns]
// x[4n + 2h + p]: row g + 8h, column 8n + 2t + p. Rows and columns are, of an output o (Values), columns of V and
// tokens; of the state S, columns of V and channels of K; of scores d, queries and keys. A u32 has two neighbouring
// bfloat16 numbers of a row, the first one in its low half.

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
template <typename G, class S>
__device__ __forceinline__ void sum_gates_of_chunks(S& s, const WeightedSum& sum, const StridedRows<const G>& gates,
                                                    const WorkTile& work, bool backwards) {
  constexpr int STAGES = S::STAGES;
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

// ---- a warp that sums dg --------------------------------------------------------------------------------------------

// Returns partner_i . o_i of the chunk's tokens i = 2 lane and 2 lane + 1 over the block's columns: the sum of what
// each consumer warp's store_dot_products has stored in the partner's place.
template <int PANELS> __device__ __forceinline__ float2 partner_dots(bf16 (&partner)[PANELS][CHUNK][64], int lane) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < 4 * PANELS; ++warp) {
    const float2 dots = *reinterpret_cast<const float2*>(swizzled(partner[warp / 4][0], lane, 2 * (warp % 4)));
    sum.x += dots.x, sum.y += dots.y;
  }
  return sum;
}

// GatedQueries: writes q_i . dq_i of each token, over the BV columns of this block, to token_sums, for GatedKeys.
// `tile`: the number of this block's tile of columns, of args.dq_tiles.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_queries(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WorkTile& work,
                                            int tile) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const int lane = threadIdx.x & 31;
  const i64 row = (i64(work.batch) * args.shape.H + work.head) * args.dq_tiles + tile;
  float* to = args.token_sums + row * args.shape.T + work.start + 2 * lane;
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration, to += CHUNK) {
    mbarrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);
    const float2 dots = partner_dots(s.stages[iteration % STAGES].partner, lane);
    mbarrier_arrive(s.summed[iteration % STAGES]);
    const int tokens_left = work.tokens - iteration * CHUNK - 2 * lane;
    if (tokens_left > 0) to[0] = dots.x;
    if (tokens_left > 1) to[1] = dots.y;
  }
}

// The address in `stretch_states` of the state of the stretch that `token` is in: S before the stretch's last chunk.
// Stretches are counted from each sequence's start; the last one may be short. A sequence's first slot is its start in
// the batch row divided by STRETCH, rounded down, plus its number in the row. No two sequences share one: n tokens have
// floor((n - 1) / STRETCH) + 1 slots, and the next sequence's first slot is at least floor(n / STRETCH) + 1 further on.
template <int BK, class Args>
__device__ __forceinline__ uint4* stretch_state(const Args& args, const WorkTile& work, int token) {
  const i64 first_slot = (i64(work.batch) * args.shape.H + work.head) * (args.shape.T / STRETCH + args.shape.count);
  const int sequence_in_batch = work.sequence - work.batch * i32(args.shape.count);
  const i64 slot = first_slot + work.start / STRETCH + sequence_in_batch + token / STRETCH;
  return args.stretch_states + slot * (BK / 16) * (BK / 16) * 32;
}

// GatedKeys: writes dg or, if dk has several tiles of BV columns, the part of this block's tile `tile`, of `tiles`.
// Chunks come backward in time. The sum over the later tokens of a stretch is carried from chunk to chunk. A lane has
// the chunk's tokens 2 lane, its first, and 2 lane + 1, its second.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_gradients(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WorkTile& work,
                                              int tile, int tiles) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const int lane = threadIdx.x & 31, T = int(args.shape.T);
  const int query_tiles = tile ? 0 : int(args.dq_tiles);  // tile 0 alone adds q . dq
  int first = first_token_of(0, work, BACKWARDS);         // the chunk's first token
  const i64 head = i64(work.batch) * args.shape.H + work.head, token = work.start + first + 2 * lane;
  const float* from = args.token_sums + head * args.dq_tiles * T + token;
  i64 to = (head * T + token) * tiles + tile;
  // Stores dg, or, if dk has several tiles, the part of this one.
  const auto store = [&](i64 index, float x) {
    if (tiles == 1) static_cast<G*>(args.dg)[index] = from_float<G>(x);
    else static_cast<float*>(args.dg)[index] = x;
  };
  float later_chunks = 0.f;                         // the sum over the stretch's chunks after this one
  float first_dots[BK / 64], second_dots[BK / 64];  // q . dq of the lane's tokens, by tile of dq
  // Loads token_sums of the chunk that begins with `first`, if there is one, of up to BK / 64 tiles of dq.
  const auto load = [&](int first) {
#pragma unroll
    for (int p = 0; p < BK / 64; ++p) {
      const bool exists = p < query_tiles && first >= 0;
      first_dots[p] = exists && first + 2 * lane < work.tokens ? from[p * i64(T)] : 0.f;
      second_dots[p] = exists && first + 2 * lane + 1 < work.tokens ? from[p * i64(T) + 1] : 0.f;
    }
    from -= CHUNK;
  };
  load(first);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration) {
    // The consumers load the previous stretch's state in at most STRETCH / CHUNK iterations. From DRAM that would take
    // as long as a chunk.
    if (lane == 0 && ends_stretch(first, work) && first >= STRETCH)
      prefetch_l2(stretch_state<BK>(args, work, first - STRETCH) + tile * (BV / 16) * (BK / 16 * 32),
                  BV * BK * sizeof(bf16));
    const bool has_first = first + 2 * lane < work.tokens, has_second = first + 2 * lane + 1 < work.tokens;
    mbarrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);
    const float2 key_dots = partner_dots(s.stages[iteration % STAGES].partner, lane);
    mbarrier_arrive(s.summed[iteration % STAGES]);
    float first_term = -key_dots.x, second_term = -key_dots.y;
#pragma unroll
    for (int p = 0; p < BK / 64; ++p) first_term += first_dots[p], second_term += second_dots[p];
    load(first - CHUNK);                           // early, to hide the loads' latency
    float later_lanes = first_term + second_term;  // then the sum over this lane and those after it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_sync(0xffffffffu, later_lanes, lane + distance & 31);
      if (lane + distance < 32) later_lanes += other;
    }
    const float next = __shfl_sync(0xffffffffu, later_lanes, lane + 1 & 31),
                whole_chunk = __shfl_sync(0xffffffffu, later_lanes, 0);
    second_term += later_chunks + (lane < 31 ? next : 0.f);
    if (has_first) store(to, first_term + second_term);
    if (has_second) store(to + tiles, second_term);
    later_chunks = first % STRETCH ? later_chunks + whole_chunk : 0.f;
    first -= CHUNK, to -= CHUNK * tiles;
  }
}

// ---- a warp that moves chunks -------------------------------------------------------------------------------------

// Copies chunks to the stages STAGES iterations ahead, and results back to memory. fetch_chunk and store_chunk
// (warpgroup.cuh) copy rows of a chunk for each f(tile, tensor map, rows, width, first column, whether results are
// added to what is there). All lanes arrive at the barrier of fetch_chunk, whose phase ends when the bytes are there;
// store_chunk returns when the tile may be overwritten.
template <class Pass, int BK, int BV>
__device__ __forceinline__ void move_chunks(Shared<Pass, BK, BV>& s, const WeightedSum& sum, const WorkTile& work,
                                            int column, bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
#pragma unroll 1
  for (int iteration = -STAGES; iteration * CHUNK < work.tokens; ++iteration) {
    // The compiler computes addresses from it again, which is cheaper than registers that hold them.
    hide_origin(column);
    const int next = iteration + STAGES;
    auto& stage = s.stages[next % STAGES];
    if (iteration >= 0) {
      mbarrier_wait((block_serves_gate_gradient<Pass>() ? s.summed : s.done)[iteration % STAGES],
                    iteration / STAGES & 1);
      // Orders what the consumers have read and written, as the barrier says, before the copies from and to the stage.
      // The consumers could do it, too, but have less time.
      fence_proxy_async();
      if constexpr (Pass::HAS_OUTPUTS)
        store_chunk(work, first_token_of(iteration, work, backwards),
                    [&](auto f) { f(stage.v, sum.o, sum.o_rows, sum.V, column, sum.adds_to_o); });
    }
    if (next * CHUNK >= work.tokens) continue;
    if constexpr (IN_CLUSTER<Pass, BK, BV>) {
      // Wait until the other block has requested the chunk CLUSTER_LEAD before this one, then tell it of this request.
      const int earlier = next - CLUSTER_LEAD;
      if (earlier >= 0) mbarrier_wait(s.requested[earlier % (2 * CLUSTER_LEAD)], earlier / (2 * CLUSTER_LEAD) & 1);
      __syncwarp();  // all lanes have passed the wait, whose barrier the other block may then use again
      if ((threadIdx.x & 31) == 0) mbarrier_arrive_at_other_block(s.requested[next % (2 * CLUSTER_LEAD)]);
    }
    fetch_chunk(s.full[next % STAGES], work, first_token_of(next, work, backwards), [&](auto f) {
      if constexpr (Pass::HAS_OUTPUTS) f(stage.q, sum.q, sum.q_rows, sum.K, 0);
      f(stage.k, sum.k, sum.k_rows, sum.K, 0);
      f(stage.v, sum.v, sum.v_rows, sum.V, column);
      if constexpr (Pass::SERVES_GATE_GRADIENT)
        if (block_serves_gate_gradient<Pass>()) f(stage.partner, sum.partner, sum.partner_rows, sum.V, column);
    });
    __syncwarp();  // the copying lanes rejoin the warp
  }
}

// ---- a warpgroup that multiplies queries by keys --------------------------------------------------------------------

// The two blocks of 8 queries that a warp has, one in each half of the chunk: blocks w and 7 - w for warp w. Block n
// needs the scores of n + 1 blocks of 8 keys (BACKWARDS: 8 - n), so that each warp has 9.
//   block of queries         0   1   2   3   4   5   6   7
//   warp                     0   1   2   3   3   2   1   0
//   blocks of keys, forward  1   2   3   4   5   6   7   8
__device__ __forceinline__ constexpr int block_of(int warp, int half) { return half ? CHUNK / 8 - 1 - warp : warp; }

// Stores a warp's scores A_ij = scale D_ij q_i . k_j, from products d of queries and keys: a lane has query g of both
// blocks and keys 2t and 2t + 1 of every 8. Scores of later keys (BACKWARDS: earlier keys) are 0. SEPARATE_SELF: a
// token's score with itself goes to gates.self_scores, and is 0 in A. All warps run the same code, and so compute some
// scores that are then replaced by 0: code for each warp would be four times as large. The decay between two tokens is
// 2^(to_token of the later + to_end of the earlier), at the level at which the two are in neighbouring groups of
// 2^level tokens.
template <bool BACKWARDS, bool SEPARATE_SELF>
__device__ __forceinline__ void store_scores(bf16 (&A)[CHUNK][64], float (&d)[CHUNK / 2], float scale, Gates& gates,
                                             int warp) {
  // m counts blocks of 8 keys in a half of the chunk, n in the chunk; d[4n + 2 half + p]: of the query of
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
    // i: the lane's query; upper: whether the block is in the later 16 tokens of its half.
    const int block = block_of(warp, half), i = 8 * block + g, upper = block >> 1 & 1;
    const auto decayed = [&](int n, int level) {  // the query's scores with the lane's two keys of the n-th 8
      const float query = query_gates[level * CHUNK + i];
      const float2 keys = *reinterpret_cast<const float2*>(&key_gates[level * CHUNK + 2 * t + 8 * n]);
      return pack<bf16>(d[4 * n + 2 * half] * (scale * exp2_approx(query + keys.x)),
                        d[4 * n + 2 * half + 1] * (scale * exp2_approx(query + keys.y)));
    };
    float diagonal[2];  // products of the block [8, 8] on the diagonal
#pragma unroll
    for (int m = 0; m < HALF_BLOCKS; ++m) {
      const int n = HALF_BLOCKS * half + m;
      if (m == 0 || n == block) diagonal[0] = d[4 * n + 2 * half], diagonal[1] = d[4 * n + 2 * half + 1];
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
        pair = decayed(n, m / 2 ? 4 - upper : 3 + upper);  // groups of 8 tokens if they are in the same 16, else of 16
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
    for (int c = 0; c < BK / 16; ++c)
      ldmatrix_x4(q[c],
                  swizzled(in.q[c / 4][0], 8 * block_of(warp, lane >> 3 & 1) + (lane & 7), c % 4 * 2 + (lane >> 4)));
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < BK / 16; ++c)  // 16 numbers are 32 bytes; descriptors count by 16 bytes
      wgmma<bf16, CHUNK, K_MAJOR>(d, q[c], k_major_tile(in.k[c / 4]) + c % 4 * 32 / 16, c > 0);
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

// ---- warpgroups with 64 columns of V each --------------------------------------------------------------------------

// Calls f(c, x) for every 16 channels of S: x is their left operand [the warp's 16 columns, channels 16 c and on],
// rounded to bfloat16. x[m] is column g + 8 (m % 2), channels 16 c + 8 (m / 2) + 2t and the next.
template <int BK, class F> __device__ __forceinline__ void each_operand(const float (&S)[BK / 2], F f) {
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    u32 rounded[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) rounded[m] = pack<bf16>(S[8 * c + 2 * m], S[8 * c + 2 * m + 1]);
    f(c, rounded);
  }
}

// A lane's part of the bfloat16 state [BK, the warp's 16 columns] that GatedQueries stores for each stretch: the
// operands of each_operand, one after the other.
template <int BK> using StretchState = uint4[BK / 16];

// This lane's share of <S, stored>, the sum of elementwise products over the warp's columns: the trace of S^T stored.
// Tensor cores compute this product with fewer instructions, though only its diagonal is used.
template <int BK>
__device__ __forceinline__ float dot_with_state(const float (&S)[BK / 2], const StretchState<BK>& stored) {
  float columns0[2][4] = {}, columns8[2][4] = {};  // columns 0 to 7, 8 to 15; two sums each, for latency
  each_operand<BK>(S, [&](int c, const u32(&state)[4]) {
    mma_bf16(columns0[c % 2], state, {stored[c].x, stored[c].z});
    mma_bf16(columns8[c % 2], state, {stored[c].y, stored[c].w});
  });
  const int lane = threadIdx.x & 31, g = lane >> 2;
  const float odd = columns0[0][1] + columns0[1][1] + (columns8[0][3] + columns8[1][3]);
  const float even = columns0[0][0] + columns0[1][0] + (columns8[0][2] + columns8[1][2]);
  return (lane & 3) != g / 2 ? 0.f : g & 1 ? odd : even;
}

// Calls f(i, pair) for this lane's numbers of the warp's 16 columns of a panel [token, column]: `pair` has two bfloat16
// numbers of neighbouring tokens in a column, those that an output has at o[i] and o[i + 1].
template <class F> __device__ __forceinline__ void each_token_pair(bf16 (&panel)[CHUNK][64], F f) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) {
    u32 pairs[4];
    ldmatrix_x4_trans(pairs, ldmatrix_row(panel[0], 16 * s));
#pragma unroll
    for (int m = 0; m < 4; ++m) f(8 * s + m / 2 * 4 + m % 2 * 2, pairs[m]);
  }
}

// Replaces the warp's 16 columns of `partner` (q for dq, k for dk) by the products partner_i . o_i over these columns,
// one number for each token i: row r of the panel gets those of tokens 2r and 2r + 1. The sum of `last_token_term` over
// lanes is added to the chunk's last token.
__device__ __forceinline__ void store_dot_products(bf16 (&partner)[CHUNK][64], const Values& o, float last_token_term) {
  const int thread = opaque(threadIdx.x), lane = thread & 31, g = lane >> 2;
  float x[CHUNK / 4] = {};  // x[2n + p] is of token 8n + 2t + p
  each_token_pair(partner, [&](int i, u32 pair) {
    float &even = x[i / 4 * 2], &odd = x[i / 4 * 2 + 1];  // of tokens with even and odd numbers
    even = fmaf(low(pair), o[i], even), odd = fmaf(high(pair), o[i + 1], odd);
  });
  last_token_term = warp_sum(last_token_term);
  // Over the 8 lanes with the same lane % 4. Afterwards x[p] is of token 8g + 2t + p.
  exchange_and_add_halves<8>(x, 16, g & 4), exchange_and_add_halves<4>(x, 8, g & 2),
      exchange_and_add_halves<2>(x, 4, g & 1);
  if (lane == 31) x[1] += last_token_term;
  __syncwarp();  // all lanes have read the partner, whose place the sums take
  *reinterpret_cast<float2*>(swizzled(partner[0], lane, thread / 32 % 4 * 2)) = {x[0], x[1]};
}

// o_i += A_ii v_i for each token, where self_scores[i] is A_ii as the sum of two bfloat16 numbers: products of v with
// diagonal matrices [8, 8], one for the high part of self_scores, one for the low part. In these operands a lane has
// one element of the diagonal, as its first or second number, or none: byte_perm moves it there, or gives 0.
__device__ __forceinline__ void add_self_scores(Values& o, bf16 (&panel)[CHUNK][64], const u32 (&self_scores)[CHUNK]) {
  const int lane = opaque(threadIdx.x) & 31, g = lane >> 2;
  const bool on_diagonal = (lane & 3) == g / 2;
  const u32 high_part = on_diagonal ? g & 1 ? 0x3244 : 0x4432 : 0x4444;
  const u32 low_part = on_diagonal ? g & 1 ? 0x1044 : 0x4410 : 0x4444;
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) {
    u32 v[4];
    ldmatrix_x4_trans(v, ldmatrix_row(panel[0], 16 * s));
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      auto& sums = *reinterpret_cast<float (*)[4]>(o + 8 * s + 4 * m);
      const u32 self_score = self_scores[16 * s + 8 * m + g];
      mma_bf16(sums, v[2 * m], v[2 * m + 1], __byte_perm(self_score, 0, high_part));
      mma_bf16(sums, v[2 * m], v[2 * m + 1], __byte_perm(self_score, 0, low_part));
    }
  }
}

// A warpgroup with 64 columns of V: carries their state over all chunks, and computes their outputs. tile_column: the
// block's first column. A chunk's products, in the order in which they start:
//   o = S q          of the S before the chunk; waited for before o is scaled
//   S += v k^T       runs while o is scaled and the scores are waited for
//   o += v A^T       both are waited for before o overwrites v, and the partner's place
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void consume(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WeightedSum& sum,
                                        const WorkTile& work, int tile_column, bool backwards) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  // How many blocks of 16 channels of S are converted to bfloat16 for one group of products: all if registers suffice,
  // as they do for one number each (not SPLITS_STATE) if one warpgroup of consumers has 128 channels (BK > BV).
  constexpr int CONVERTED = !Pass::SPLITS_STATE && BK > BV ? BK / 16 : BK / 64;
  const int warpgroup = threadIdx.x / 128, column = tile_column + threadIdx.x / 32 * 16 + (threadIdx.x >> 2 & 7);
  const i64 state = work.sequence_head * sum.K * sum.V;  // of this sequence and head in `initial`
  float S[BK / 2] = {}, total_decay = 1.f;
  if (sum.initial)
    each_transposed<BK>(S, sum.initial + state, sum, sum, column,
                        [](float& value, const float* from) { value = *from; });

  // The address of this lane's part of the stored state of a token's stretch; null if its warp's columns are beyond V.
  const auto state_address = [&](int token) {
    const int tile = (tile_column + opaque(threadIdx.x) / 2) / 16;  // a warp has 16 columns
    return 16 * tile < sum.V ? stretch_state<BK>(args, work, token) + tile * (BK / 16 * 32) + (threadIdx.x & 31)
                             : nullptr;
  };
  constexpr bool READS_STRETCH_STATES = WRITES_GATE_GRADIENT<Pass>;
  constexpr bool PREFETCHES =
      READS_STRETCH_STATES && !Registers<BK, BV>::TWO_BLOCKS;  // loads these states a chunk ahead, if registers suffice
  StretchState<BK> prefetched = {};
  const uint4* next_state = nullptr;  // what load_stretch_state loads next; the stretches come backward in time
  if constexpr (READS_STRETCH_STATES)
    if (block_serves_gate_gradient<Pass>() && work.tokens)
      next_state = state_address(first_token_of(0, work, backwards));  // the sequence's end ends a stretch
  // Loads the lane's part of the stored state at next_state, and moves on to the stretch before.
  const auto load_stretch_state = [&](StretchState<BK>& to) {
    if (!next_state) return;
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) to[c] = next_state[32 * c];
    next_state -= BK / 16 * (BK / 16) * 32;
  };
  if constexpr (PREFETCHES)
    if (block_serves_gate_gradient<Pass>() && work.tokens) load_stretch_state(prefetched);

#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration) {
    auto& in = s.stages[iteration % STAGES];
    const Gates& gates = s.gates[iteration % STAGES];
    const u32 phase = iteration / STAGES & 1;
    const bool is_stretch_end =
        block_serves_gate_gradient<Pass>() && ends_stretch(first_token_of(iteration, work, backwards), work);
    // GatedKeys: becomes this lane's share of -<X, dS> after the stretch's last token, with X the layer's state, k and
    // v the layer's. The variable S is dS, as the sum goes backward in time. GatedQueries has stored X', the state
    // before the stretch's last chunk: X = E_64 X' + sum_j L_j v_j k_j^T. So <X, dS> has two terms: E_64 <X', dS>,
    // computed here, and the sum of k_j . (L_j dS v_j), added below, where L_j dS v_j is the part of dk_j that comes
    // from dS.
    float end_term = 0.f;
    if constexpr (Pass::SERVES_GATE_GRADIENT) {
      if (is_stretch_end) {
        if constexpr (PREFETCHES) end_term = -dot_with_state<BK>(S, prefetched);
        else if constexpr (READS_STRETCH_STATES) {
          StretchState<BK> loaded = {};
          load_stretch_state(loaded);
          end_term = -dot_with_state<BK>(S, loaded);
        } else if (uint4* const to =  // GatedQueries: stores S before the stretch's last chunk
                   state_address(first_token_of(iteration, work, backwards)))
          each_operand<BK>(S, [&](int c, const u32(&x)[4]) { to[32 * c] = {x[0], x[1], x[2], x[3]}; });
      }
    }
    mbarrier_wait(s.full[iteration % STAGES], phase);
    // read_state multiplies a lane's two columns by decays of their own; here one decay is for all columns.
    const float chunk_decay = gates.chunk_decay, decays[2] = {chunk_decay, chunk_decay};
    Values o;
    if constexpr (Pass::HAS_OUTPUTS) {
      // READ_FIRST: o = S q of the state before the chunk, then S *= decays. CONVERTED blocks of 16 channels of S are
      // rounded at a time. SPLITS_STATE: S is the sum of two numbers, with which the callback, empty here, is called.
      read_state<BK, READ_FIRST, CONVERTED, Pass::SPLITS_STATE>(o, S, decays, in.q,
                                                                [](int, const u32(&)[4], const u32(&)[4]) {});
    } else {
      for (float& value : S) value *= chunk_decay;
      total_decay *= chunk_decay;
    }
    // The warp's 16 columns of v as a left operand [column, token], times L (backward: E).
    Operand v;
    float factors[CHUNK / 4];
    load_channels(v, in.v[warpgroup]);
    decay_tokens(v, gates.value_factors);
    wgmma_fence_operand(S);
    wgmma_fence();
    write_state<BK>(S, v, in.k);  // starts S += v k^T
    wgmma_commit();
    if constexpr (Pass::HAS_OUTPUTS) {
      wgmma_wait<1>();
      wgmma_fence_operand(o);
      load_token_factors(factors, gates.output_factors);
      each_two([&](int i, int, int) { o[i] *= factors[i / 4 * 2], o[i + 1] *= factors[i / 4 * 2 + 1]; });
      if constexpr (READS_STRETCH_STATES)
        if (is_stretch_end) {  // o is as yet the part of dk that comes from dS
          end_term *= chunk_decay;
          each_token_pair(in.partner[warpgroup],
                          [&](int i, u32 pair) { end_term -= low(pair) * o[i] + high(pair) * o[i + 1]; });
        }
      if constexpr (PREFETCHES) {
        const int next = first_token_of(iteration + 1, work, backwards);
        if (block_serves_gate_gradient<Pass>() && next >= 0 && ends_stretch(next, work)) load_stretch_state(prefetched);
      }
      // write_state's product may still run and read the first v. The second one has registers of its own in PTX, as
      // tests/under_way.py checks, and the assembler keeps a product's registers until it is waited for.
      load_channels(v, in.v[warpgroup]);
      mbarrier_wait(s.scores[iteration % STAGES], phase);
      wgmma_fence();
      multiply_pairs<BY_QUERY>(o, v, in.A, ACCUMULATE);  // starts o += v A^T
      wgmma_commit();
    }
    wgmma_wait<0>();
    wgmma_fence_operand(S);
    if constexpr (Pass::HAS_OUTPUTS) {
      wgmma_fence_operand(o);
      if constexpr (Pass::SERVES_GATE_GRADIENT) {
        if (block_serves_gate_gradient<Pass>()) store_dot_products(in.partner[warpgroup], o, end_term);
        add_self_scores(o, in.v[warpgroup], gates.self_scores);
      }
      __syncwarp();  // all lanes have read v, whose place o takes
      store_values(&in.v[warpgroup], o);
    }
    mbarrier_arrive(s.done[iteration % STAGES]);
  }
  // SUMS > 1: dk and dv. The caller's sequences are cut into args.segments segments each, 1 if they are not cut. Only
  // the first segment's last dS is stored, as the gradient of the initial state.
  const bool first_segment_only = Pass::SUMS > 1;
  if (sum.final && !(first_segment_only && work.sequence % args.segments)) {
    const i64 state_index =
        first_segment_only ? work.sequence / args.segments * args.shape.H + work.head : work.sequence_head;
    each_transposed<BK>(S, sum.final + state_index * sum.K * sum.V, sum, sum, column,
                        [](float& value, float* to) { *to = value; });
  }
  if constexpr (!Pass::HAS_OUTPUTS)
    // A channel's decay is the product of two rows in scan_segments.cu: the second row is 1.
    for (i64 c = threadIdx.x; tile_column == 0 && c < sum.K; c += CONSUMERS<BV>) {
      float* const to = args.decays + work.sequence_head * 2 * sum.K + c;
      to[0] = total_decay, to[sum.K] = 1.f;
    }
}

// Pass: see the head; G: the type of g; BK and BV: K rounded up to 64 or 128, and the columns of V of a block.
template <class Pass, typename G, int BK, int BV>
__global__ void __cluster_dims__(IN_CLUSTER<Pass, BK, BV> ? 2 : 1)
    __launch_bounds__(ALL_THREADS<BV>, Registers<BK, BV>::BLOCKS)
        scalar_decay_sm90_weighted_sums(const __grid_constant__ Args<Pass, G> args) {
  auto& s = *reinterpret_cast<Shared<Pass, BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const WeightedSum& sum = args.sums[blockIdx.x % Pass::SUMS];
  // Sums of one launch may differ in V: all have as many blocks as the widest, and blocks without columns return.
  const i64 widest = Pass::SUMS > 1 && sum.K > sum.V ? sum.K : sum.V;
  // GatedKeys takes blocks in reverse: the heads that GatedQueries read last are still in L2.
  const u32 tiles = tiles_of(widest, BV),
            reversed = WRITES_GATE_GRADIENT<Pass> ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 block = reversed / Pass::SUMS;
  const WorkTile work = work_tile(args.shape, block / tiles);
  const int column = block % tiles * BV;
  const bool backwards = ALL_BACKWARD<Pass> || SOME_BACKWARD<Pass> && sum.backwards;
  // Summary: a sequence of the caller is cut into args.segments segments. scan_segments.cu reads the states of the
  // first args.computed segments of each; the others are not computed.
  if (column >= sum.V || !Pass::HAS_OUTPUTS && work.sequence % args.segments >= args.computed) return;
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.full[stage], 2 * 32);  // all lanes that move chunks and that sum gates
      mbarrier_init(s.scores[stage], 128);
      mbarrier_init(s.done[stage], CONSUMERS<BV>);
      mbarrier_init(s.summed[stage], 32);
    }
  if constexpr (IN_CLUSTER<Pass, BK, BV>)
    if (threadIdx.x == 0)
      for (MBarrier& requested : s.requested) mbarrier_init(requested, 1);
  // Zeros for the scores of later keys (backwards: of earlier keys) that store_scores never writes.
  for (int i = threadIdx.x; i < STAGES * CHUNK * 32; i += ALL_THREADS<BV>)
    reinterpret_cast<u32*>(s.stages[i / (CHUNK * 32)].A)[i % (CHUNK * 32)] = 0;
  fence_proxy_async();  // makes the barriers visible to the copy engine, and A to wgmma
  // The barriers are initialised and A is zero, in a cluster in both blocks: there a block arrives at the other's.
  if constexpr (IN_CLUSTER<Pass, BK, BV>) cluster_sync();
  else __syncthreads();
  using RoleRegisters = Registers<BK, BV>;
  if (threadIdx.x < CONSUMERS<BV>) {
    registers_up<RoleRegisters::CONSUMER>();
    consume<Pass, G, BK, BV>(s, args, sum, work, column, backwards);
  } else if (threadIdx.x < CONSUMERS<BV> + 128) {
    registers_down<RoleRegisters::SCORES>();
    if constexpr (Pass::HAS_OUTPUTS)
      compute_scores<Pass, BK, BV>(s, work.tokens, float(sum.output_scale * sum.value_scale), backwards);
  } else {
    registers_down<RoleRegisters::OTHERS>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) {
      // Constant indices into args take fewer registers.
      if (block_serves_gate_gradient<Pass>())
        move_chunks(s, args.sums[0], work, column, backwards);  // dq or dk, the first sum; GatedKeys' dv is the last
      else
        move_chunks(s, args.sums[Pass::SERVES_GATE_GRADIENT ? Pass::SUMS - 1 : blockIdx.x % Pass::SUMS], work, column,
                    backwards);
    } else if (warp == 1) sum_gates_of_chunks(s, sum, args.g, work, backwards);
    else if constexpr (Pass::SERVES_GATE_GRADIENT)
      if (warp == 2 && block_serves_gate_gradient<Pass>()) {
        if constexpr (Pass::SUMS == 1) sum_queries(s, args, work, column / BV);
        else if constexpr (BK == BV) sum_gradients(s, args, work, 0, 1);  // constant tiles take fewer registers
        else sum_gradients(s, args, work, column / BV, tiles_of(sum.V, BV));
      }
  }
  // A block must not end before the other's last arrival at its barriers.
  if constexpr (IN_CLUSTER<Pass, BK, BV>) cluster_sync();
}
