// what      The parts of weighted_sums.cu that compute dg, the gradient of one gate per token and head, on Hopper: the
//           passes GatedQueries, forward in time with dq, and then GatedKeys, backward in time with dk and dv.
// math      dg_t = <S, dS> after the last token of t's stretch of 256 tokens + the sum of q_i . dq_i - k_i . dk_i over
//           i >= t in it: sums over i of partner_i . o_i, where o is dq or dk, and the partner q or k. These leave out
//           the terms of A_ii, which no gate multiplies: add_self_scores adds them to o behind store_dot_products.
//           Stretches bound the rounding errors that a longer sum would collect
// numerics  the terms of two tokens, neither of them before t, cancel in dg_t: up to float32's rounding if both are in
//           one chunk, where dq and dk use the same rounded A, else up to bfloat16's
// shapes    K and V are the widths of a sum's q and o (WeightedSum): of dq and dk, K is the layer's V, and V its K.
//           BV: columns of V of a block; BK >= K. Fragments: with g = lane / 4 and t = lane % 4 a lane has of sums
//           [16 rows of a warp, columns] x[4n + 2h + p]: row g + 8h, column 8n + 2t + p. Rows and columns are, of an
//           output o (Values), columns of V and tokens; of the state S, columns of V and channels of K. A u32 has two
//           neighbouring bfloat16 numbers of a row, the first one in its low half
// barriers  the warp that sums waits for done, and arrives at summed: partner . o, which the consumers have stored in
//           the partner's place, has been read
// limits    sm_90a; bfloat16
#include "lanes.cuh"
#include "scalar_decay/sm90/weighted_sums_storage.cuh"

// From the includes:
//   first_token_of: the first token of an iteration's chunk; ends_stretch: whether a chunk is its stretch's last
//   WorkTile: the block's sequence, head and tokens
//   swizzled(rows, row, piece): the address of 16 bytes of a row. low, high: the numbers of a u32
//   ldmatrix_row(panel, row): the address that a lane gives to ldmatrix, for the warp's 16 columns of 16 tokens from
//     `row` on
//   exchange_and_add_halves<N>(x, distance, upper): of 2 N numbers x of this lane, and of the lane whose number differs
//     in the bit `distance`, N sums, in x[0] and on: the last N if `upper`, else the first N
//   opaque(x): x, whose origin it hides from the compiler, which then holds no addresses computed from it in registers

// ---- a warp that sums dg --------------------------------------------------------------------------------------------

// Where a consumer warp's sums of partner . o are, of tokens 2 lane and 2 lane + 1: in row `lane` of the partner's
// place, in the warp's own 16 of the 64 columns of its panel, which no other warp reads or writes.
__device__ __forceinline__ float2& dots_at(bf16 (&panel)[CHUNK][64], int lane, int warp) {
  return *reinterpret_cast<float2*>(swizzled(panel[0], lane, 2 * (warp % 4)));
}

// Returns partner_i . o_i of the chunk's tokens i = 2 lane and 2 lane + 1 over the block's columns: the sum of what
// each consumer warp's store_dot_products has stored.
template <int PANELS> __device__ __forceinline__ float2 partner_dots(bf16 (&partner)[PANELS][CHUNK][64], int lane) {
  float2 sum = {0.f, 0.f};
#pragma unroll
  for (int warp = 0; warp < 4 * PANELS; ++warp) {
    const float2 dots = dots_at(partner[warp / 4], lane, warp);
    sum.x += dots.x, sum.y += dots.y;
  }
  return sum;
}

// GatedQueries: writes q_i . dq_i of each token, over the BV columns of this block, to token_sums, for GatedKeys.
// `tile`: the number of this block's tile of columns, of the args.dq_tiles tiles that dq has.
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

// A lane's part of a stored state [BK, 16 columns]: the operands of each_operand, one after the other.
template <int BK> using StretchState = uint4[BK / 16];
// The uint4s of 16 columns of a stored state, and of a slot of `stretch_states`: BK columns, of which the first V
// count.
template <int BK> constexpr int TILE_PIECES = 32 * sizeof(StretchState<BK>) / sizeof(uint4);
template <int BK> constexpr int STATE_PIECES = BK / 16 * TILE_PIECES<BK>;
static_assert(STATE_PIECES<128> * sizeof(uint4) == 128 * 128 * sizeof(bf16), "arrays_for_gate in scalar_decay.py");

// The address in `stretch_states` of the state of the stretch that `token`, counted from the sequence's start, is in: S
// before the stretch's last chunk.
// Stretches are counted from each sequence's start; the last one may be short. A sequence's first slot is its start in
// the batch row divided by STRETCH, rounded down, plus its number in the row. No two sequences share one: n tokens have
// floor((n - 1) / STRETCH) + 1 slots, and the next sequence's first slot is at least floor(n / STRETCH) + 1 further on.
template <int BK, class Args>
__device__ __forceinline__ uint4* stretch_state(const Args& args, const WorkTile& work, int token) {
  const i64 first_slot =
      (i64(work.batch) * args.shape.H + work.head) * (args.shape.T / STRETCH + args.shape.row_sequences);
  const int sequence_in_batch = work.sequence - work.batch * i32(args.shape.row_sequences);
  const i64 slot = first_slot + work.start / STRETCH + sequence_in_batch + token / STRETCH;
  return args.stretch_states + slot * STATE_PIECES<BK>;
}

// GatedKeys: writes dg or, if dk has several tiles of BV columns, the part of this block's tile `tile`, of `tiles`.
// Chunks come backward in time. The sum over the later tokens of a stretch is carried from chunk to chunk. A lane has
// the chunk's tokens 2 lane, its first, and 2 lane + 1, its second. first_in_row: its first one, in the batch row.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void sum_gradients(Shared<Pass, BK, BV>& s, const Args<Pass, G>& args, const WorkTile& work,
                                              int tile, int tiles) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
  const int lane = threadIdx.x & 31, T = int(args.shape.T);
  const int query_tiles = tile ? 0 : int(args.dq_tiles);  // tile 0 alone adds q . dq
  int chunk_start = first_token_of(0, work, BACKWARDS);   // the chunk's first token
  const i64 head = i64(work.batch) * args.shape.H + work.head, first_in_row = work.start + chunk_start + 2 * lane;
  const float* from = args.token_sums + head * args.dq_tiles * T + first_in_row;
  i64 to = (head * T + first_in_row) * tiles + tile;
  // Stores dg, or, if dk has several tiles, the part of this one.
  const auto store = [&](i64 index, float x) {
    if (tiles == 1) static_cast<G*>(args.dg)[index] = from_float<G>(x);
    else static_cast<float*>(args.dg)[index] = x;
  };
  float later_chunks = 0.f;                         // the sum over the stretch's chunks after this one
  float first_dots[BK / 64], second_dots[BK / 64];  // q . dq of the lane's tokens, by tile of dq
  // Loads token_sums of the chunk from `start` on, unless it is below 0, of query_tiles tiles. Each call takes the
  // chunk before that of the last call: `from` goes back.
  const auto load = [&](int start) {
#pragma unroll
    for (int dq_tile = 0; dq_tile < BK / 64; ++dq_tile) {
      const bool exists = dq_tile < query_tiles && start >= 0;
      first_dots[dq_tile] = exists && start + 2 * lane < work.tokens ? from[dq_tile * i64(T)] : 0.f;
      second_dots[dq_tile] = exists && start + 2 * lane + 1 < work.tokens ? from[dq_tile * i64(T) + 1] : 0.f;
    }
    from -= CHUNK;
  };
  load(chunk_start);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration) {
    // The consumers load the previous stretch's state in at most STRETCH / CHUNK iterations. From DRAM that would take
    // as long as a chunk.
    if (lane == 0 && ends_stretch(chunk_start, work) && chunk_start >= STRETCH)
      prefetch_l2(stretch_state<BK>(args, work, chunk_start - STRETCH) + tile * (BV / 16) * TILE_PIECES<BK>,
                  BV / 16 * TILE_PIECES<BK> * sizeof(uint4));
    const bool has_first = chunk_start + 2 * lane < work.tokens, has_second = chunk_start + 2 * lane + 1 < work.tokens;
    mbarrier_wait(s.done[iteration % STAGES], iteration / STAGES & 1);
    const float2 key_dots = partner_dots(s.stages[iteration % STAGES].partner, lane);
    mbarrier_arrive(s.summed[iteration % STAGES]);
    float first_term = -key_dots.x, second_term = -key_dots.y;
#pragma unroll
    for (int dq_tile = 0; dq_tile < BK / 64; ++dq_tile)
      first_term += first_dots[dq_tile], second_term += second_dots[dq_tile];
    load(chunk_start - CHUNK);                     // early, to hide the loads' latency
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
    later_chunks = chunk_start % STRETCH ? later_chunks + whole_chunk : 0.f;
    chunk_start -= CHUNK, to -= CHUNK * tiles;
  }
}

// ---- consumers: dot products of the partner and o, and of states ---------------------------------------------------

// Calls f(step, x) for every 16 channels of S: x is their left operand [the warp's 16 columns, channels 16 step and
// on], rounded to bfloat16. x[m] is column g + 8 (m % 2), channels 16 step + 8 (m / 2) + 2t and the next.
template <int BK, class F> __device__ __forceinline__ void each_operand(const float (&S)[BK / 2], F f) {
#pragma unroll
  for (int step = 0; step < BK / 16; ++step) {
    u32 rounded[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) rounded[m] = pack<bf16>(S[8 * step + 2 * m], S[8 * step + 2 * m + 1]);
    f(step, rounded);
  }
}

// This lane's share of <S, stored>, the sum of elementwise products over the warp's columns: the trace of S^T stored.
// Tensor cores compute this product with fewer instructions, though only its diagonal is used.
template <int BK>
__device__ __forceinline__ float dot_with_state(const float (&S)[BK / 2], const StretchState<BK>& stored) {
  float columns0[2][4] = {}, columns8[2][4] = {};  // columns 0 to 7, 8 to 15; two sums each, for latency
  each_operand<BK>(S, [&](int step, const u32(&state)[4]) {
    mma_m16n8k16(columns0[step % 2], state, {stored[step].x, stored[step].z}, bf16{});
    mma_m16n8k16(columns8[step % 2], state, {stored[step].y, stored[step].w}, bf16{});
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
// lanes is added to number 63, which all of the chunk's dg_t include, also if the chunk has fewer tokens. GatedKeys
// passes shares of -<S, dS> in a stretch's last chunk, as sum_gradients subtracts these numbers; else the term is 0.
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
  dots_at(partner, lane, thread / 32) = {x[0], x[1]};
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
      mma_m16n8k8(sums, {v[2 * m], v[2 * m + 1]}, __byte_perm(self_score, 0, high_part), bf16{});
      mma_m16n8k8(sums, {v[2 * m], v[2 * m + 1]}, __byte_perm(self_score, 0, low_part), bf16{});
    }
  }
}
