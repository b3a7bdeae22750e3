// what      The gradients of a chunk's 32 tokens, in the warpgroup of scalar_backward_tokens.cu that makes dq, dk,
//           dbeta and dg of the delta rule with a gate for each token and head, or none, on Hopper.
// math      S is the state before the chunk, dS the gradient of the state after it, E_i and L_i the decays from the
//           chunk's start to token i and from after it to the end, D_ij that of tokens j + 1 to i, e_j the residual of
//           token j: v_j minus what key j reads. With F_ij = do_i . e_j and G_ij = -dv_i . e_j:
//           dqk_ij = scale D_ij beta_j F_ij, the gradient of q_i . k_j, j <= i
//           dkk_ij = D_ij beta_j G_ij, the gradient of k_i . k_j, j < i
//           dq_i = scale E_i S do_i + sum_j dqk_ij k_j
//           dk_i = -E_i S dv_i + beta_i L_i dS e_i + sum_j (dkk_ij + dkk_ji) k_j + sum_j dqk_ji q_j
//           dbeta_j = write_terms_j + the sum of beta_terms_j;  dg_t = the sum of pair_terms_t + sum_{i >= t}
//           read_terms_i + sum_{j < t} beta_j write_terms_j + E_32 <S, dS>. scalar_backward_tokens.cu defines M, R and
//           Z, and what the terms add up to. Given args.lengths, q_i and k_i here are divided by their lengths. In
//           shared memory they are undivided: the factors of TokenGates, and D as it is stored, have 1 / |k| or 1 / |q|
// shapes    Fragments, g = lane / 4 and t = lane % 4: of its warp's 16 rows a lane has g and g + 8. Values x: x[4n + 2h
//           + p] is row g + 8h, column 8n + 2t + p of 32. d[panel], of dq or dk, likewise: of 64 channels. Rows of
//           warps 0 and 1 are queries, rows of warps 2 and 3 are keys
// barriers  the caller's: scalar_backward_tokens.cu lists who arrives at each. store_pairs: after residuals_ready. Then
//           make_Z and the consumers have read R, which dqk and dkk overwrite. store_token_gradients and
//           add_pair_products: behind a barrier of the warpgroup, after all its warps' store_pairs. store_gradients:
//           behind the next one, after all add_pair_products, since dq and dk overwrite q and k
// limits    sm_90a; T is bf16 or f16
// tests     those of scalar_chunks.cuh
#include "delta/sm90/scalar_chunks.cuh"
#include "lanes.cuh"

// From the includes:
//   Panel: 32 rows of 128 bytes, swizzled: row r has its 16-byte piece p in the place of piece p ^ r % 8. A split
//     matrix has rounded elements in columns 0 to 31 and their rounding errors in columns 32 to 63: store_split.
//     swizzled(array, row, piece): the piece's address
//   OperandLane: `warp` of the warpgroup, `lane`, and left_offset. This and right_operand_offset: a lane's byte offset
//     in a panel for ldmatrix and stmatrix of the matrix [16, 16] at (0, 0), shifted_offset: of the one at (row,
//     column); at_byte_offset(array, offset): the address there
//   wgmma_fence_operand(d): d is not read before it. k_major_tile: wgmma's descriptor of rows of 64 numbers. A product
//     MN_MAJOR takes the same one and sums over the rows. ACCUMULATE: it is added to d
//   sum_of_lower_lanes, sum_of_this_and_higher_lanes: of x over the warp's lanes, which are tokens here.
//     sum_and_share<8, 16, 4>(x): sums each of 8 numbers over the lanes of equal t; of these, lane g gets the sum of
//     number g, as x[0]
//   WorkTile: the block's sequence, head and tokens
//   Memory: `Shared` of scalar_backward_tokens.cu, which says what each of its arrays of terms has. Args: that file's.
//     `token`, an argument: the chunk's first token, from the first of the block's on

// A chunk of q and k, and its matrices. Those in a union have the same place, one after the other in time: Z overwrites
// M after inverse_ready, when R has been made of M; dqk and dkk overwrite inverse_to_end and `inverse` after
// residuals_ready. scalar_inverse.cuh makes `inverse` and inverse_to_end, scalar_decays.cuh makes D.
template <typename T, int BK> struct alignas(1024) GradientStage {
  using Element = T;
  T queries_keys[BK / 64][2 * CHUNK][64];  // rows 0 to 31: queries, overwritten by dq; rows 32 to 63: keys, by dk
  union {
    float weighted_M[CHUNK][32];  // blocks of -M diag(beta): table in scalar_inverse.cuh
    Panel<T> Z[BK / 64];
  };
  union {
    Panel<T> inverse_to_end;  // R_ij beta_i L_i / |k_i|, [j, i], split: Z is its product with k
    Panel<T> dqk;             // [query, key], split
  };
  union {
    Panel<T> inverse;  // R_ij, [j, i], split
    Panel<T> dkk;      // [later key, earlier key], split
  };
  float D[CHUNK][32];  // [i][j], swizzled as a Panel: D_ij times key_factors[j]; 0 if j > i
  static_assert(BK == 64 || BK == 128);
  static_assert(sizeof weighted_M == sizeof(Panel<T>) && sizeof D == sizeof(Panel<T>), "swizzled alike");
};

// Factors of a chunk's tokens; without args.lengths, |q| and |k| in them are 1. Members of Gates (scalar_stage.cuh):
// query_factors = scale / |q|, key_factors = 1 / |k|. query_start_factors and key_start_factors are these times E_i.
// key_end_factors = beta_i L_i / |k|; in other kernels, other PASSes of Gates, it has no beta. chunk_decay = E_32.
struct alignas(16) TokenGates : Gates {
  float key_to_end[CHUNK];     // L_i / |k|: key_end_factors without beta
  float query_inverse[CHUNK];  // 1 / |q|; only with args.lengths
};

// A lane of the gradients' warpgroup. Warps 0 and 1 have 16 rows of queries each, warps 2 and 3 (has_keys) of keys.
struct GradientLane : OperandLane {
  bool has_keys = warp >= 2;
  int first_row = 16 * (warp & 1), row = first_row + lane / 4;  // first_row: the warp's; the lane has `row` and row + 8
  // Byte offsets for ldmatrix. right_offset: of right operands; own_offset: of the warp's 16 rows of queries or keys.
  int right_offset = right_operand_offset(lane), own_offset = shifted_offset(left_offset, 16 * warp, 0);
};

// Calls f(i, x, h) for pairs of this lane's numbers of d [64 rows, 64 channels], a product of the warpgroup: d[i] and
// d[i + 1], of row lane / 4 + 8 h of the warp's 16 rows; x: the same two numbers of `panel`. offset:
// `own_offset`.
template <typename T, class F>
__device__ __forceinline__ void each_of_panel(T (&panel)[2 * CHUNK][64], int offset, F f) {
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    u32 x[4];
    ldmatrix_x4(x, at_byte_offset(panel, shifted_offset(offset, 0, 16 * step)));
#pragma unroll
    for (int m = 0; m < 4; ++m) f(4 * (2 * step + m / 2) + 2 * (m % 2), unpack(x[m], T{}), m % 2);
  }
}

// Stores a warp's 16 rows of dqk (warps 0 and 1, rows are queries) or dkk (warps 2 and 3, rows are keys), and the terms
// of dg and dbeta that these rows' pairs have for each token. products: F or -G; scores: q . k or k . k, undivided and
// without decays. A pair (i, j) has a term of dg for each token m with j < m <= i: of row i, token m gets the sum over
// the keys before m, unless m > i.
template <class Memory>
__device__ __forceinline__ void store_pairs(Memory& s, int stage, const Values& products, const Values& scores,
                                            const GradientLane& at) {
  using T = typename Memory::T;
  const bool has_keys = at.has_keys;
  const int lane = at.lane, g = lane / 4, t = lane % 4;
  auto& in = s.stages[stage];
  const TokenGates& gates = s.gates[stage];
  const float (&row_factors)[CHUNK] = has_keys ? gates.key_factors : gates.query_factors;
  float pair_gradients[4][4], pair_terms[8] = {}, beta_terms[8] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = at.row + 8 * h;
    const float factor = row_factors[i];
    float earlier_keys = 0.f;  // the sum of terms of the row's keys before the n-th 8 keys
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int j = 8 * n + 2 * t;
      const float2 decays = *reinterpret_cast<const float2*>(swizzled(in.D[0], i, j / 4) + j % 4),
                   betas = load_float2(gates.beta + j);
      float dg_terms[2];  // of the pairs of the row with this lane's two keys, j and j + 1
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        // decay: D_ij times scale / |q_i| or 1 / |k_i|, and times 1 / |k_j|.
        const float decay = (p ? decays.y : decays.x) * factor, beta = p ? betas.y : betas.x;
        const float product = has_keys ? -products[4 * n + 2 * h + p] : products[4 * n + 2 * h + p];
        const bool is_earlier = j + p < i, is_pair = has_keys ? is_earlier : j + p <= i;
        const float without_beta = is_pair ? decay * product : 0.f, term = without_beta * scores[4 * n + 2 * h + p];
        // +0, not -0 nor a NaN of D, where there is no pair: add_pair_products ORs dkk with its transpose.
        pair_gradients[n][2 * h + p] = is_pair ? beta * without_beta : 0.f;
        beta_terms[2 * n + p] += term;
        dg_terms[p] = is_earlier ? beta * term : 0.f;
      }
      const float both = dg_terms[0] + dg_terms[1];
      float lower_lanes = __shfl_up_sync(0xffffffffu, both, 1);  // becomes the sum over lanes of lower t
      lower_lanes = t > 0 ? lower_lanes : 0.f;
      const float second = __shfl_up_sync(0xffffffffu, both, 2), third = __shfl_up_sync(0xffffffffu, both, 3);
      lower_lanes += (t > 1 ? second : 0.f) + (t > 2 ? third : 0.f);
      const float sum = earlier_keys + lower_lanes;
      pair_terms[2 * n] += j <= i ? sum : 0.f;
      pair_terms[2 * n + 1] += j < i ? sum + dg_terms[0] : 0.f;
      earlier_keys += __shfl_sync(0xffffffffu, lower_lanes + both, lane | 3);
    }
  }
  store_split<T, 2>(has_keys ? in.dkk : in.dqk, shifted_offset(at.left_offset, at.first_row, 0), pair_gradients);
  sum_and_share<8, 16, 4>(pair_terms), sum_and_share<8, 16, 4>(beta_terms);
  const int token = g / 2 * 8 + 2 * t + g % 2;  // of the sums that this lane has, number g = 2n + p: key 8n + 2t + p
  s.pair_terms[at.warp][token] = pair_terms[0], s.beta_terms[at.warp][token] = beta_terms[0];
}

// Stores dbeta (warp 0) and dg (warp 1) of a chunk, a token in each lane. Without gates, args.dg is null. state_dots:
// the parts of <S, dS>.
template <class Memory, class Args, int N>
__device__ __forceinline__ void store_token_gradients(const Memory& s, const Args& args, const WorkTile& work,
                                                      int token, const TokenGates& gates, const float (&state_dots)[N],
                                                      int lane, int warp) {
  if (warp > 1 || warp == 1 && !args.dg.p) return;
  const bool inside = token + lane < work.tokens;
  const float (&terms)[4][CHUNK] = warp == 0 ? s.beta_terms : s.pair_terms;
  float sum = (terms[0][lane] + terms[1][lane]) + (terms[2][lane] + terms[3][lane]);
  const float written = s.write_terms[lane];
  if (warp == 0) {
    if (inside) *args.dbeta.row(work.batch, work.head, work.start + token + lane) = sum + written;
    return;
  }
  sum += sum_of_this_and_higher_lanes(s.read_terms[0][lane] + s.read_terms[1][lane], lane);
  sum += sum_of_lower_lanes(gates.beta[lane] * written, lane);
  float dot = 0.f;
#pragma unroll
  for (float part : state_dots) dot += part;
  if (inside) *args.dg.row(work.batch, work.head, work.start + token + lane) = fmaf(gates.chunk_decay, dot, sum);
}

// Makes of d the gradients with respect to queries and keys x before they were divided by their lengths |x|: only if
// given args.lengths. d is the gradient with respect to x / |x|, divided by |x|; less its component along x it is that
// with respect to x. `parts`: each value head's gradients, float32 [2 (q, k), B, H, T, K], if value heads share a head
// of q and k; else null. They get the gradient with respect to x / |x|: sum_parts.cu sums it over these heads, then
// divides by |x| and removes that component.
template <class Memory, class Args>
__device__ __forceinline__ void undo_normalization(Memory& s, const Args& args, int stage,
                                                   float (&d)[Memory::BK / 64][32], const GradientLane& at) {
  constexpr int PANELS = Memory::BK / 64;
  const float* const inverses = (at.has_keys ? s.gates[stage].key_factors : s.gates[stage].query_inverse) + at.row;
  const float inverse[2] = {inverses[0], inverses[8]};
  if (args.parts) {
    const float length[2] = {1.f / inverse[0], 1.f / inverse[1]};
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
      for (int i = 0; i < 32; ++i) d[panel][i] *= length[i / 2 % 2];
    return;
  }
  auto& rows = s.stages[stage].queries_keys;
  float dots[2] = {};
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    each_of_panel(rows[panel], at.own_offset, [&](int i, float2 x, int h) {
      dots[h] = fmaf(x.x, d[panel][i], fmaf(x.y, d[panel][i + 1], dots[h]));
    });
#pragma unroll
  for (int h = 0; h < 2; ++h) dots[h] = inverse[h] * inverse[h] * sum_over_lanes<4>(dots[h]);
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    each_of_panel(rows[panel], at.own_offset, [&](int i, float2 x, int h) {
      d[panel][i] = fmaf(-dots[h], x.x, d[panel][i]), d[panel][i + 1] = fmaf(-dots[h], x.y, d[panel][i + 1]);
    });
}

// Stores d, a warp's 16 rows of dq (warps 0 and 1) or of dk (warps 2 and 3): to shared memory, over q and k, or to
// `parts`.
template <class Memory, class Args>
__device__ __forceinline__ void store_gradients(Memory& s, const Args& args, const WorkTile& work, int token, int stage,
                                                float (&d)[Memory::BK / 64][32], const GradientLane& at) {
  using T = typename Memory::T;
  constexpr int PANELS = Memory::BK / 64;
  if (args.lengths.p) undo_normalization(s, args, stage, d, at);
  if (args.parts) {
    // The row of `parts` that has this head's token 0, of gradients of q or of k.
    const i64 head_row = ((at.warp / 2 * args.shape.B + work.batch) * args.shape.H + work.head) * args.shape.T;
    const int channel = 2 * (at.lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = token + at.row + 8 * h;
      float* const to = args.parts + (head_row + work.start + row) * args.shape.K;
      if (row < work.tokens)
#pragma unroll
        for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
          for (int n = 0; n < 8; ++n)
            if (64 * panel + 8 * n < args.shape.K)  // K is a multiple of 8
              *reinterpret_cast<float2*>(to + 64 * panel + 8 * n + channel) = {d[panel][4 * n + 2 * h],
                                                                               d[panel][4 * n + 2 * h + 1]};
    }
    return;
  }
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      u32 packed[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) packed[m] = pack<T>(d[panel][8 * step + 2 * m], d[panel][8 * step + 2 * m + 1]);
      stmatrix_x4(at_byte_offset(s.stages[stage].queries_keys[panel], shifted_offset(at.own_offset, 0, 16 * step)),
                  packed);
    }
}

// Stores <S, dS> over a warp's 16 columns of V from `column` on: the diagonals of products [16 columns of S, 8 columns
// of dS] over channels. s.states and s.state_gradient have a row of channels for each column, in panels of 64 channels.
// left_offset: the lane's byte offset for ldmatrix of the columns of S.
template <class Memory>
__device__ __forceinline__ void store_state_dot(Memory& s, float& dot, int left_offset, int column, int lane) {
  using T = typename Memory::T;
  const int right_offset = shifted_offset(right_operand_offset(lane), column, 0);
  float dots[2][4] = {};
#pragma unroll
  for (int step = 0; step < Memory::BK / 16; ++step) {
    u32 a[4], b[4];
    ldmatrix_x4(a, at_byte_offset(s.states[step / 4], shifted_offset(left_offset, 0, step % 4 * 16)));
    ldmatrix_x4(b, at_byte_offset(s.state_gradient[step / 4], shifted_offset(right_offset, 0, step % 4 * 16)));
    mma_m16n8k16(dots[0], a, {b[0], b[1]}, T{}), mma_m16n8k16(dots[1], a, {b[2], b[3]}, T{});
  }
  const int g = lane / 4;  // of diagonals a lane with t = g / 2 has column g % 2 of its two, in rows g and g + 8
  const float diagonal = g % 2 ? dots[0][1] + dots[1][3] : dots[0][0] + dots[1][2];
  const float sum = warp_sum(lane % 4 == g / 2 ? diagonal : 0.f);
  if (lane == 0) dot = sum;
}

// Makes the warp's rows d of S do and S dv the first terms of dq and dk, and stores read_terms, [0] of queries, [1] of
// keys: the terms' products with the same rows of q and k.
template <class Memory>
__device__ __forceinline__ void scale_state_products(Memory& s, float (&d)[Memory::BK / 64][32], int stage,
                                                     const GradientLane& at) {
  const TokenGates& gates = s.gates[stage];
  const bool has_keys = at.has_keys;
  const int row = at.row;
  const float* const factors = has_keys ? gates.key_start_factors : gates.query_start_factors;
  const float factor[2] = {has_keys ? -factors[row] : factors[row], has_keys ? -factors[row + 8] : factors[row + 8]};
  float terms[2] = {};
#pragma unroll
  for (int panel = 0; panel < Memory::BK / 64; ++panel)
    each_of_panel(s.stages[stage].queries_keys[panel], at.own_offset, [&](int i, float2 x, int h) {
      d[panel][i] *= factor[h], d[panel][i + 1] *= factor[h];
      terms[h] = fmaf(x.x, d[panel][i], fmaf(x.y, d[panel][i + 1], terms[h]));
    });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    terms[h] = sum_over_lanes<4>(terms[h]);
    if (at.lane % 4 == 0) s.read_terms[has_keys][row + 8 * h] = terms[h];
  }
}

// Adds to d, the warp's rows of dq or dk, the products of dqk and dkk with queries and keys; returns when they have
// ended. Called by the whole warpgroup, once all its warps have stored dqk and dkk. These come by ldmatrix into
// registers, so that wgmma needs no proxy fence for them.
template <class Stage, int PANELS>
__device__ __forceinline__ void add_pair_products(float (&d)[PANELS][32], Stage& in, const GradientLane& at) {
  using T = typename Stage::Element;
  const bool has_keys = at.has_keys;
  const int first_row = at.first_row;
  // Left operands. Warps of queries multiply keys by dqk. Warps of keys multiply keys by dkk + dkk^T, and queries by
  // dqk^T; warps of queries multiply queries by 0. Indices: [tokens from 0 or from 16 on][rounded elements, or errors].
  u32 for_keys[2][2][4], for_queries[2][2][4];
#pragma unroll
  for (int step = 0; step < 2; ++step)
#pragma unroll
    for (int errors = 0; errors < 2; ++errors) {
      auto& left = has_keys ? in.dkk : in.dqk;
      ldmatrix_x4(for_keys[step][errors],
                  at_byte_offset(left, shifted_offset(at.left_offset, first_row, 16 * step + 32 * errors)));
      u32 transposed_dkk[4];
      ldmatrix_x4_trans(transposed_dkk,
                        at_byte_offset(in.dkk, shifted_offset(at.right_offset, 16 * step, first_row + 32 * errors)));
      ldmatrix_x4_trans(for_queries[step][errors],
                        at_byte_offset(in.dqk, shifted_offset(at.right_offset, 16 * step, first_row + 32 * errors)));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        for_keys[step][errors][m] |= has_keys ? transposed_dkk[m] : 0;  // dkk_ij or dkk_ji is +0, and both for i = j
        for_queries[step][errors][m] = has_keys ? for_queries[step][errors][m] : 0;
      }
    }
  // Descriptors count 16 bytes: 16 * 128 / 16 is 16 tokens on, CHUNK * 128 / 16 from queries to keys. Queries and keys
  // have come by copies that mbarrier `full` orders.
  const u64 rows = k_major_tile(in.queries_keys);
  wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int errors = 1; errors >= 0; --errors)  // the small products first
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        const u64 queries = rows + panel * (sizeof in.queries_keys[0] / 16) + step * (16 * 128 / 16);
        wgmma<T, 64, MN_MAJOR>(d[panel], for_keys[step][errors], queries + CHUNK * 128 / 16, ACCUMULATE);
        wgmma<T, 64, MN_MAJOR>(d[panel], for_queries[step][errors], queries, ACCUMULATE);
      }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel) wgmma_fence_operand(d[panel]);
}
