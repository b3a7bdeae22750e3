// what      A warpgroup that makes a chunk's scores A and M, and its operands B, W and Z, in Hopper's kernels of the
//           delta rule with one gate per token and head, or none.
// math      Of the chunk's 32 tokens i and j, with `inverse` and the factors of tokens (struct Gates) that the pass of
//           the including kernel has (scalar_stage.cuh):
//           M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  B = A inverse;
//           W_i = query_start_i q_i - sum_j B_ij key_start_j k_j;  Z_j = sum_i inverse_ij key_end_i k_i
// shapes    For make_operands the including kernel's shared memory has Panel<T> minus_BE[2], of even and of odd chunks:
//           -B_ij key_start_j. Two, since a warp may store the next chunk's while others multiply with this one's.
//           SUMMARY and BACKWARD_TOKENS call the functions of scores alone
// barriers  scores wait for full and decays_ready, and each thread arrives at scores_ready; operands wait for
//           inverse_ready, and a lane of each warp arrives at operands_ready. Named barrier 1, once a chunk: minus_BE
//           is written, and what W, B and Z overwrite has been read
// limits    sm_90a; T is bf16 or f16
// tests     those of scalar_chunks.cuh
#include "delta/sm90/scalar_stage.cuh"

// From the includes:
//   Panel: 32 rows of 128 bytes, swizzled; a split matrix has rounded elements in columns 0 to 31, rounding errors in
//     32 to 63: split, store_split; multiply_split(d, a, b): d += a b. left_operand_offset, right_operand_offset: a
//     lane's byte offset for ldmatrix and stmatrix of the matrix [16, 16] at (0, 0), shifted_offset: of the one at
//     (row, column)
//   channel_operand_offset: the offset that load_transposed and store_transposed take, for a warp's 16 of 64 channels
//   stage_descriptor, descriptor_offset: wgmma's descriptors of a stage's tiles; start_split_product: with a split
//     matrix
//   Values, Operand: a lane's part of [16 rows, 32 columns], as sums and as a left operand
//   wgmma_fence_operand(d): the compiler reads no register of d before it. OVERWRITE, ACCUMULATE: d = a b, d += a b
//   RingPosition: a chunk's stage, and the parity to wait for. INVERSE_HAS_BETA: FORWARD or SUMMARY, where `inverse` is
//     times beta
//   warp_arrive: one lane arrives for its warp. fence_proxy_async: orders stores before what wgmma and copies read
//     later

// A lane of the operands' warpgroup, and the byte offsets in a panel that it gives to ldmatrix and stmatrix:
// left_offset for a left operand, or a product, at (0, 0); channel_offset for the warp's 16 of 64 channels.
struct OperandLane {
  int warp, lane, left_offset, channel_offset;  // warp: 0 to 3, of the warpgroup

  __device__ __forceinline__ OperandLane(int warp, int lane)
      : warp(warp),
        lane(lane),
        left_offset(left_operand_offset(lane)),
        channel_offset(channel_operand_offset(lane, warp)) {}
  __device__ __forceinline__ OperandLane()
      : OperandLane(__shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), threadIdx.x & 31) {}
};

// Issues d = [q; k] k^T, a product [64, 32]: rows of queries, then of keys. A step sums over 16 channels, 32 bytes of
// each row. K_MAJOR: the right tile has a row for each column of d.
template <class Stage> __device__ __forceinline__ void start_scores(Values& d, Stage& in) {
  // The offset of the first panel's keys in the stage is also their distance from the panel's queries, in every panel.
  // (As a constant, it costs registers in scalar_backward_tokens.cu.)
  static_assert(OFFSET_OF(Stage, queries_keys) == 0);
  const u64 descriptor = stage_descriptor(in);
#pragma unroll
  for (int step = 0; step < 4 * int(sizeof in.queries_keys / sizeof in.queries_keys[0]); ++step) {
    const u64 rows = descriptor + (descriptor_offset(in, in.queries_keys[step / 4]) + step % 4 * 2);
    wgmma<typename Stage::Element, CHUNK, K_MAJOR>(d, rows, rows + descriptor_offset(in, in.queries_keys[0] + CHUNK),
                                                   step > 0);
  }
  wgmma_commit();
}

// Stores the scores of a chunk, from products = [q; k] k^T: warps 0 and 1 have the rows of A, warps 2 and 3 those of M.
// A is stored split; BACKWARD_TOKENS stores none. M is stored as weighted_M, by the factors in scalar_inverse.cuh's
// table: diagonal blocks [16, 16] in float32, and M21, which warp 3 has, split where M12 = 0 would be: rounded elements
// in the 16-bit columns 32 to 47 of rows 0 to 15, their errors in columns 48 to 63.
template <class Memory>
__device__ __forceinline__ void store_scores(Memory& s, const RingPosition<Memory::STAGES>& ring, Values& products,
                                             const OperandLane& at) {
  using T = typename Memory::T;
  const auto [warp, lane, left_offset, channel_offset] = at;
  // The lane has row `row` and the 8th after it. pair_offset: of two floats of `row`, at column 2 (lane % 4).
  const int row = 16 * (warp & 1) + lane / 4,
            pair_offset = 128 * 16 * (warp & 1) + swizzled_offset(lane / 4, lane / 2 & 1) + lane % 2 * 8;
  const bool has_queries = warp < 2, has_M21 = warp == 3;  // M21 is in columns 0 to 15 of this warp's rows of M
  auto& in = s.stages[ring.stage];
  if constexpr (Memory::PASS == SUMMARY) {
    if (has_queries) return mbarrier_arrive(s.scores_ready[ring.stage]);
  }
  mbarrier_wait(s.decays_ready[ring.stage], ring.parity);
  const auto& gates = s.gates[ring.stage];
  const float (&row_factors)[CHUNK] = has_queries ? gates.query_factors : gates.key_factors;
  const float factors[2] = {row_factors[row], row_factors[row + 8]};
  const float beta_factors[2] = {has_queries ? factors[0] : -gates.beta[row] * factors[0],
                                 has_queries ? factors[1] : -gates.beta[row + 8] * factors[1]};
  float scores[4][4];
  // The two elements from column 8 n + 2 (lane % 4) on, in row `row` + 8 h.
  const auto pair_at = [&](float (&matrix)[CHUNK][32], int n, int h) {
    return reinterpret_cast<float2*>(at_byte_offset(matrix, (pair_offset ^ 32 * n) + 8 * 128 * h));
  };
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 decay = *pair_at(in.D, n, h);
      float2 factor = {beta_factors[h], beta_factors[h]};
      if (INVERSE_HAS_BETA<Memory> && has_M21 && n < 2) factor = {-factors[h], -factors[h]};
      if (Memory::PASS == BACKWARD_TOKENS) {
        const float2 beta = load_float2(gates.beta + 8 * n + 2 * (lane & 3));
        factor = {-factors[h] * beta.x, -factors[h] * beta.y};
      }
      scores[n][2 * h] = products[4 * n + 2 * h] * (decay.x * factor.x);
      scores[n][2 * h + 1] = products[4 * n + 2 * h + 1] * (decay.y * factor.y);
    }
  if (has_queries) {
    if constexpr (Memory::PASS != BACKWARD_TOKENS)
      store_split<T, 2>(in.A, shifted_offset(left_offset, 16 * warp, 0), scores);
  } else if (!has_M21) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *pair_at(in.weighted_M, n, h) = {scores[n][2 * h], scores[n][2 * h + 1]};
  } else {
#pragma unroll
    for (int n = 2; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *pair_at(in.weighted_M, n, h) = {scores[n][2 * h], scores[n][2 * h + 1]};
    u32 rounded[4], errors[4];
    split<T>(rounded, errors, scores);
    stmatrix_x4(at_byte_offset(in.weighted_M, shifted_offset(left_offset, 0, 32)), rounded);
    stmatrix_x4(at_byte_offset(in.weighted_M, shifted_offset(left_offset, 0, 48)), errors);
  }
  mbarrier_arrive(s.scores_ready[ring.stage]);
}

// Computes the scores of a chunk, and stores them; for a warpgroup.
template <class Memory>
__device__ __forceinline__ void make_scores(Memory& s, const RingPosition<Memory::STAGES>& ring,
                                            const OperandLane& at) {
  Values d;
  mbarrier_wait(s.full[ring.stage], ring.parity);
  wgmma_fence();
  start_scores(d, s.stages[ring.stage]);
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_scores(s, ring, d, at);
}
// The same for the first two chunks. Afterwards `ring` is at the third one, whose scores the caller makes while it has
// the first chunk, and so on.
template <class Memory>
__device__ __forceinline__ void make_first_scores(Memory& s, RingPosition<Memory::STAGES>& ring, int tokens,
                                                  const OperandLane& at) {
  static_assert(Memory::STAGES >= 3, "chunk, chunk + 1 and chunk + 2 have a stage each");
#pragma unroll 1
  for (int chunk = 0; chunk < 2 && chunk * CHUNK < tokens; ++chunk, ring.next()) make_scores(s, ring, at);
}

// Computes a warp's block [16, 16] of B at (row, column), and stores -B_ij key_start_j to minus_BE, for W. part 0:
// rounded elements, 1: rounding errors.
template <typename T, class Stage>
__device__ __forceinline__ void compute_B(float (&B)[2][4], Panel<T>& minus_BE, Stage& in, const Gates& gates, int row,
                                          int column, int lane, int left_offset) {
  const int right_offset = right_operand_offset(lane);
#pragma unroll
  for (int step = 0; step < 2; ++step)
    if (16 * step <= row && 16 * step >= column) {  // A and N are lower triangles
      u32 A[2][4], inverse[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(A[part], at_byte_offset(in.A, shifted_offset(left_offset, row, 16 * step + 32 * part)));
        ldmatrix_x4(inverse[part],
                    at_byte_offset(in.inverse, shifted_offset(right_offset, column, 16 * step + 32 * part)));
      }
      multiply_split<T>(B, A, inverse);
    }
  float x[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 from_start = load_float2(gates.key_start_factors + column + 8 * m + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[m][i] = -B[m][i] * (i % 2 ? from_start.y : from_start.x);
  }
  store_split<T, 1>(minus_BE, shifted_offset(left_offset, row, column), x);
}

// Makes the operands of all chunks; for a warpgroup. Each lane's part of `keys`, z and w: the warp's 16 channels of
// every 64, all 32 tokens. In each iteration: A and M of chunk + 2; Z, the product of keys and inverse_to_end; B; W,
// the queries times their factors + the product of keys and minus_BE. W overwrites the queries, B overwrites
// inverse_to_end, Z overwrites M and (BK = 128) A.
template <class Memory> __device__ __forceinline__ void make_operands(Memory& s, int tokens) {
  using T = typename Memory::T;
  constexpr int PANELS = Memory::BK / 64;
  // Scores of chunk + 2 are computed while the product for W runs, with BK = 128. With 64 they come after it: two
  // blocks of 64 channels and columns share a multiprocessor's registers, which do not suffice.
  constexpr bool SCORES_DURING_W = PANELS == 2;
  const OperandLane at;
  const auto [warp, lane, left_offset, channel_offset] = at;
  const int row = 16 * (warp & 1), column = 16 * (warp >> 1);  // of the warp's block of B
  RingPosition<Memory::STAGES> ring, scores_ring;
  make_first_scores(s, scores_ring, tokens, at);
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < tokens; ++chunk, ring.next(), scores_ring.next()) {
    auto& in = s.stages[ring.stage];
    const auto& gates = s.gates[ring.stage];
    Operand keys[PANELS];
    Values z[PANELS], w[PANELS], d;
    float B[2][4] = {};
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      load_transposed(keys[panel], in.queries_keys[panel] + CHUNK, channel_offset);
    const bool has_scores = (chunk + 2) * CHUNK < tokens;
    if (SCORES_DURING_W) {
      if (has_scores) mbarrier_wait(s.full[scores_ring.stage], scores_ring.parity);
      wgmma_fence();
      // Without a branch: the last two chunks compute their own scores again, which are not used.
      start_scores(d, s.stages[has_scores ? scores_ring.stage : ring.stage]);
    }
    mbarrier_wait(s.inverse_ready[ring.stage], ring.parity);
    u64 inverse_to_end = k_major_tile(in.inverse_to_end), minus_BE = k_major_tile(s.minus_BE[chunk & 1]);
    hide_origin(inverse_to_end), hide_origin(minus_BE);  // see stage_descriptor
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      start_split_product<T>(z[panel], keys[panel], inverse_to_end, OVERWRITE);
    wgmma_commit();
    compute_B(B, s.minus_BE[chunk & 1], in, gates, row, column, lane, left_offset);
    fence_proxy_async();
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) wgmma_fence_operand(z[panel]);
    if (SCORES_DURING_W) wgmma_fence_operand(d);
    store_transposed(in.Z[0], channel_offset, z[0]);  // overwrites M
#pragma unroll
    for (int step = 0; step < CHUNK / 16; ++step) {
      const float2 factors[2] = {load_float2(gates.query_start_factors + 16 * step + 2 * (lane % 4)),
                                 load_float2(gates.query_start_factors + 16 * step + 8 + 2 * (lane % 4))};
#pragma unroll
      for (int panel = 0; panel < PANELS; ++panel) {
        u32 q[4];
        ldmatrix_x4_trans(q, at_byte_offset(in.queries_keys[panel], channel_offset + 16 * 128 * step));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * (2 * step + m / 2) + m % 2 * 2;
          const float2 pair = unpack(q[m], T{});
          w[panel][i] = pair.x * factors[m / 2].x, w[panel][i + 1] = pair.y * factors[m / 2].y;
        }
      }
    }
    // All warps have written minus_BE, and read A, the queries and inverse_to_end.
    named_barrier_sync(1, OPERAND_THREADS);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) start_split_product<T>(w[panel], keys[panel], minus_BE, ACCUMULATE);
    wgmma_commit();
    if constexpr (PANELS == 2) store_transposed(in.Z[1], channel_offset, z[1]);  // overwrites A
    store_split<T, 1>(in.B, shifted_offset(left_offset, row, column), B);
    if (SCORES_DURING_W && has_scores)  // while the product for W runs. `opaque` has offsets computed again
      store_scores(s, scores_ring, d, OperandLane(warp, opaque(threadIdx.x) & 31));
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      wgmma_fence_operand(w[panel]), store_transposed(in.queries_keys[panel], channel_offset, w[panel]);
    fence_proxy_async();
    warp_arrive(s.operands_ready[ring.stage]);
    if (!SCORES_DURING_W && has_scores) make_scores(s, scores_ring, at);
  }
}
