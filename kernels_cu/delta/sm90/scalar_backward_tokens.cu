// what      The delta rule's gradients on Hopper, with a gate for each token and head, or none; the second of two
//           kernels, forwards in time: dq, dk, dbeta and dg, from what scalar_backward_states.cu has stored.
// math      S is the state before a chunk of 32 tokens, dS the gradient of the state after it; i and j are its tokens.
//           Decays are products of e^g: D_ij of tokens j + 1 to i, E_i from the chunk's start to i, L_i from i + 1 to
//           its end. M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  R = (I + M diag(beta))^-1
//           Z_j = sum_i R_ij beta_i L_i k_i;  X_j = v_j - E_j S^T k_j;  S <- E_32 S + Z^T X
//           e = R X: e_j is v_j minus what key j reads from the state just before token j
//           With F_ij = do_i . e_j and G_ij = -dv_i . e_j:
//           H_ij = scale D_ij beta_j F_ij, j <= i;  P_ij = D_ij beta_j G_ij, j < i
//           dq_i = scale E_i S do_i + sum_j H_ij k_j
//           dk_i = -E_i S dv_i + beta_i L_i dS e_i + sum_j (P_ij + P_ji) k_j + sum_j H_ji q_j
//           dbeta_j = L_j k_j . dS e_j + sum_i (A_ij F_ij + M_ij G_ij)
//           dg_t adds up all terms that gate t multiplies: of S with queries and keys i >= t, of dS with the keys
//           j < t, beta_j (A_ij F_ij + M_ij G_ij) of pairs j < t <= i, and <S, dS>, the sum of all S dS, times the
//           chunk's decay. No sum is a difference of two larger ones, nothing is divided by a decay or by beta
// shapes    q k dq dk [B, H, T, K], v do dv [B, HV, T, V], g beta dg dbeta [B, HV, T] of any strides; args.shape.H is
//           HV. state_gradients: dS [BV, BK], transposed, for every chunk (`WorkTile::chunk_row`) and head of v. If
//           heads of v share a head of q, `parts` [2, B, HV, T, K] float32 takes the place of dq and dk: each head's
//           gradients with respect to q and k, or to the normalized q and k if args.normalized; sum_parts.cu adds them.
//           With P > 1, sequences in `shape` are segments of whole chunks, P of each sequence
// grid      a block for every (sequence, head of v), sequence slowest
// roles     consumers: a warpgroup for every 64 columns, with their state transposed in registers, computes X, e and S.
//           Gradients: a warpgroup makes M of chunk n + 2, Z of chunk n + 1, and gradients of chunk n; warps 0 and 1
//           have the rows of queries, warps 2 and 3 those of keys. In a last warpgroup warp 0 copies chunks, warp 1
//           computes decays, and warps 2 and 3 invert I + M diag(beta) of even and odd chunks
// smem      GradientStage: a chunk's queries and keys, and its matrices. Shared: stages, v and e, do and dv, S and dS
// barriers  What is complete: who arrives -> who waits. By stage:
//             full: q and k have been copied: copies -> decays, gradients, consumers
//             decays_ready: D and gates: decays -> gradients, consumers
//             scores_ready: M: gradients -> inverses
//             inverse_ready: R, in `inverse` and `inverse_to_end`: inverses -> gradients
//             operands_ready: Z (and R, from which it is made): gradients -> consumers
//             outputs_ready: dq and dk; the stage, its gates and v's slot have been read: gradients -> copies, decays
//           By slot of v, two slots:
//             values_full: v has been copied: copies -> consumers
//             residuals_ready: e; Z and R have been read: consumers -> gradients
//           One place each, used by every chunk:
//             tokens_full: do and dv have been copied: copies -> gradients
//             state_gradient_full: dS has been copied: copies -> gradients
//             gradients_read: do, dv and dS have been read: gradients -> copies
//             states_ready: S: consumers -> gradients
//             states_read: S has been read: gradients -> consumers
//           One in is_whole, which start_of_walk calls: all threads learn whether a number of the states that segments
//           start from is not finite.
//           Named barrier 1 joins the gradients' warpgroup, twice a chunk: terms, H and P are in shared memory | all
//           products that read queries and keys have ended
// numerics  products of T are summed in float32. S, dS, X, Z, do and dv are of T. R, H and P are split: sums of two T,
//           a rounded value and its rounding error. e is split in products with do and dv, and rounded to T in the
//           product dS e. R's diagonal blocks of 16 tokens come from substitution in float32, its other block from
//           products of split matrices. A decay is a product of the decays of the tokens in between, never a quotient
// source    Yang et al., 2024, "Gated Delta Networks", section 3.3; the gradient takes the same matrices, transposed
// limits    sm_90a; bfloat16, float16; K <= BK, V <= BV; BK, BV of 64, 128; K and V multiples of 8, since tensor maps
//           describe rows of whole 16 bytes
// tests     test_delta_on_hopper, test_compile: see scalar_chunks.cuh
#include "delta/sm90/scalar_chunks.cuh"
#include "lanes.cuh"

// From the includes:
//   shape.H: heads of values
//   wgmma_fence_operand(d): d is not read before it
//   Values, Operand: a lane's part of [the warp's 16 columns or channels, 32 tokens], as sums and as operands;
//     each_two: calls f for their pairs
//   start_of_walk: sets the block's tokens to its segment's, and returns `from`, the state that the walk starts from,
//     null for zeros, and `to`, where its last state goes, null for nowhere. Where states were not finite when
//     join_segments.cu had joined segments, the walk's first segment has all tokens, and the others have none
//   Consumer: a lane of a consumer, and its column
//   Panel: 32 rows of 128 bytes, swizzled; channel_operand_offset, left_operand_offset, right_operand_offset: byte
//     offsets in it for ldmatrix and stmatrix, shifted_offset: other rows and columns; load_transposed,
//     store_transposed: the warp's 16 columns of 32 rows
//   stage_descriptor, descriptor_offset: wgmma's descriptors of tiles of a stage; start_state_product: S^T times the
//     chunk's queries or keys; start_state_update: S += Z^T X; start_split_product, start_transposed_split_product:
//     with a split matrix, or its transpose; decay_state: S times the chunk's decay; make_X: X of `math`
//   Gates: factors of a chunk's tokens; Upcoming: decays and betas of later chunks
//   make_scores: M; start_scores: products of queries and keys with keys; round_state: S, rounded, as operands
//   each_transposed: calls f(number, its address in memory) for this lane's numbers of a state
//   RingPosition: a chunk's stage, and the parity to wait for; next() is the next chunk's
//   sum_of_lower_lanes, sum_of_this_and_higher_lanes: of x over the warp's lanes, which are tokens here
//   store_split: rounded numbers and errors
//   CHUNK = 32 tokens; ALL_THREADS: of a block, CONSUMERS, OPERAND_THREADS: of roles; BACKWARD_TOKENS: which of the
//     kernels with these roles this one is; k_major_tile, mn_major_tile: wgmma's descriptors of tiles

template <typename T> struct Args {
  TensorMap state_gradients;           // boxes of 64 columns of V and 64 channels, swizzled
  TensorMap q, k, v, do_, dv, dq, dk;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows, do_rows, dv_rows;
  StridedRows<T> dq_rows, dk_rows;
  StridedRows<const void> g, beta;  // no gate: null
  StridedRows<float> dbeta, dg;     // dg: null without gates
  const float* initial;             // S before each of N sequences, [N, HV, K, V]; null: zeros
  float* starts;                    // with P > 1: S before each segment, [N P, HV, K, V] (join_segments.cu)
  float* parts;                     // null if a head of queries has one head of values
  Shape shape;                      // H is the number of heads of v, HV; with P > 1, sequences are P segments of each
  i64 P;
  i64 group;                 // heads of v that share a head of q and k
  i64 state_k, state_v;      // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;  // whether g, and beta, are float32; otherwise they are of type T
  i64 normalized;            // whether queries and keys x are divided by sqrt(|x|^2 + 1e-6)
  double scale;
};

// A chunk of q and k, and its matrices. Rows have 128 bytes, in the tensor cores' swizzle: row r has its 16-byte piece
// p in the place of piece p ^ r % 8. A Panel is T[32][64]; a split one has rounded elements in columns 0 to 31 and
// their rounding errors in columns 32 to 63. Matrices in a union have the same place, one after the other in time: Z
// overwrites M after inverse_ready; H and P overwrite inverse_to_end and `inverse` after residuals_ready.
template <typename T, int BK> struct alignas(1024) GradientStage {
  using Element = T;
  T queries_keys[BK / 64][2 * CHUNK][64];  // rows 0 to 31: queries, overwritten by dq; rows 32 to 63: keys, by dk
  union {
    float minus_beta_M[CHUNK][32];  // blocks of -M diag(beta), as `store_scores` of scalar_chunks.cuh places them
    Panel<T> Z[BK / 64];
  };
  union {
    Panel<T> inverse_to_end;  // R_ij beta_i L_i / |k_i|, [j, i], split: for Z
    Panel<T> H;               // [query, key], split
  };
  union {
    Panel<T> inverse;  // R_ij, [j, i], split
    Panel<T> P;        // [later key, earlier key], split
  };
  float D[CHUNK][32];  // [i][j]: the decay from after token j through token i, times key j's factor; 0 if j > i
};

// Factors of a chunk's tokens. Of Gates (scalar_chunks.cuh), with |q| and |k| replaced by 1 if not args.normalized:
// query_factors = scale / |q|, key_factors = 1 / |k|; query_start_factors and key_start_factors: these times E_i;
// key_end_factors = beta_i L_i / |k|, which has no beta in the other passes; beta; chunk_decay = E_32.
struct alignas(16) TokenGates : Gates {
  float key_to_end[CHUNK];     // L_i / |k|
  float query_inverse[CHUNK];  // 1 / |q|; only if args.normalized
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr Pass PASS = BACKWARD_TOKENS;  // chooses among the matrices of scalar_chunks.cuh
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = 3;
  GradientStage<T, BK> stages[STAGES];
  T values[2][BV / 64][2 * CHUNK][64];  // two slots. Rows 32 to 63: v, overwritten by e; rows 0 to 31: errors of e
  T gradients[BV / 64][2 * CHUNK][64];  // rows 0 to 31: do; rows 32 to 63: dv
  T states[BK / 64][BV][64], state_gradient[BK / 64][BV][64];  // S and dS, transposed
  TokenGates gates[STAGES];
  Upcoming upcoming;           // decays and betas of the next chunks, for the warp that computes decays
  float pair_terms[4][CHUNK];  // by warp: terms of dg from the pairs of the warp's 16 rows
  float beta_terms[4][CHUNK];  // by warp: terms of dbeta from the same pairs
  float read_terms[2][CHUNK];  // q_i . (scale E_i S do_i), and k_i . (-E_i S dv_i)
  float write_terms[CHUNK];    // L_i k_i . dS e_i
  float state_dots[4];         // by warp: <S, dS> over the warp's columns
  MBarrier full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES], operands_ready[STAGES],
      outputs_ready[STAGES];
  MBarrier values_full[2], residuals_ready[2];
  MBarrier tokens_full, state_gradient_full, gradients_read, states_ready, states_read;
  const float* from;  // the state before the block's first token; null: zeros
};

// ---- a warp that copies chunks ------------------------------------------------------------------------------------

// Calls f(upper, lower, column) for each panel of `tile`: rows 0 to 31, rows 32 to 63, and the panel's first column of
// the array in memory. Each half has a chunk of its own array: of q and k, or of do and dv.
template <typename T, int PANELS, class F>
__device__ __forceinline__ void each_panel(T (&tile)[PANELS][2 * CHUNK][64], F f) {
  for (int panel = 0; panel < PANELS; ++panel) {
    auto& halves = *reinterpret_cast<Panel<T>(*)[2][1]>(&tile[panel]);
    f(halves[0], halves[1], 64 * panel);
  }
}

// Copies q and k to stages, v to `values`, do and dv to `gradients`, dS to `state_gradient`; stores dq and dk.
// fetch_chunk: all lanes arrive at the barrier, whose phase ends when the copies have arrived. store_chunk returns when
// the shared memory has been read, so that the next copies may overwrite it.
template <class S>
__device__ __forceinline__ void copy_chunks(S& s, const Args<typename S::T>& args, const WorkTile& work) {
  WorkTile keys = work;
  keys.head /= int(args.group);
  const auto fetch_keys = [&](int token, int stage) {
    if (token < work.tokens)
      fetch_chunk(s.full[stage], keys, token, [&](auto f) {
        each_panel(s.stages[stage].queries_keys, [&](auto& query, auto& key, int channel) {
          f(query, args.q, args.q_rows, args.shape.K, channel), f(key, args.k, args.k_rows, args.shape.K, channel);
        });
      });
  };
  const auto fetch_values = [&](int token) {
    const int slot = token / CHUNK & 1;
    if (token < work.tokens)
      fetch_chunk(s.values_full[slot], work, token, [&](auto f) {
        each_panel(s.values[slot],
                   [&](auto&, auto& value, int column) { f(value, args.v, args.v_rows, args.shape.V, column); });
      });
  };
  const auto fetch_gradients = [&](int token) {
    if (token >= work.tokens) return;
    fetch_chunk(s.tokens_full, work, token, [&](auto f) {
      each_panel(s.gradients, [&](auto& do_, auto& dv, int column) {
        f(do_, args.do_, args.do_rows, args.shape.V, column), f(dv, args.dv, args.dv_rows, args.shape.V, column);
      });
    });
    if ((threadIdx.x & 31) == 0) {
      mbarrier_arrive_and_expect(s.state_gradient_full, sizeof s.state_gradient);
      for (int panel = 0; panel < S::BK / 64; ++panel)
        for (int column = 0; column < S::BV; column += 64)
          tensor_load(s.state_gradient[panel][column], args.state_gradients, s.state_gradient_full, 64 * panel,
                      i32(work.chunk_row + token / CHUNK) * S::BV + column, 0, 0);
    }
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  };
  for (int stage = 0; stage < S::STAGES; ++stage) fetch_keys(stage * CHUNK, stage);
  fetch_values(0), fetch_values(CHUNK), fetch_gradients(0);
  RingPosition<S::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    mbarrier_wait(s.gradients_read, token / CHUNK & 1);
    fetch_gradients(token + CHUNK);
    mbarrier_wait(s.outputs_ready[ring.stage], ring.parity);
    fence_proxy_async();  // orders what other warps have read and written before the copies that overwrite it
    if (!args.parts)
      store_chunk(work, token, [&](auto f) {
        each_panel(s.stages[ring.stage].queries_keys, [&](auto& dq, auto& dk, int channel) {
          f(dq, args.dq, args.dq_rows, args.shape.K, channel), f(dk, args.dk, args.dk_rows, args.shape.K, channel);
        });
      });
    fetch_keys(token + S::STAGES * CHUNK, ring.stage), fetch_values(token + 2 * CHUNK);
  }
}

// ---- a warpgroup that makes M and Z, and computes gradients ---------------------------------------------------------

// Adds each x[n] over the 8 lanes that have the same lane % 4. Lane l returns the sum of x[l / 4].
__device__ __forceinline__ float sum_of_rows(float (&x)[8], int lane) {
#pragma unroll
  for (int count = 4; count; count /= 2) {
    const bool upper = lane & 4 * count;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + count], 4 * count);
      x[i] = (upper ? x[i + count] : x[i]) + other;
    }
  }
  return x[0];
}

// Starts the product d[64 rows, 64 channels] = tokens[64 rows, BV] states[BV, 64]. tokens: do above dv, or rounding
// errors of e above e, in panels of 64 columns of V; states: 64 channels of S or dS, transposed: a row of 64 channels
// for each column of V. The caller calls wgmma_commit and waits.
template <typename T, int PANELS>
__device__ __forceinline__ void start_gradient_product(float (&d)[32], T (&tokens)[PANELS][2 * CHUNK][64],
                                                       T (&states)[64 * PANELS][64]) {
  u64 rows = k_major_tile(tokens), columns = k_major_tile(states);
#pragma unroll
  for (int c = 0; c < 4 * PANELS; ++c)
    wgmma<T, 64, MN_MAJOR>(d, rows + c / 4 * (sizeof tokens[0] / 16) + c % 4 * 2, columns + c * (16 * 128 / 16), c > 0);
}

// Calls f(i, x, h) for pairs of this lane's numbers of d [64 rows, 64 channels], a product of the warpgroup: d[i] and
// d[i + 1], of row lane / 4 + 8 h of the warp's 16 rows; x: the same two numbers of `panel`. offset:
// left_operand_offset of the warp's rows.
template <typename T, class F>
__device__ __forceinline__ void each_of_panel(T (&panel)[2 * CHUNK][64], int offset, F f) {
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    u32 x[4];
    ldmatrix_x4(x, at_byte_offset(panel, shifted_offset(offset, 0, 16 * c)));
#pragma unroll
    for (int m = 0; m < 4; ++m) f(4 * (2 * c + m / 2) + 2 * (m % 2), unpack(x[m], T{}), m % 2);
  }
}

// Makes Z of a chunk: Z_j = sum_i inverse_to_end[j, i] k_i, in the warp's 16 channels of every 64. It waits for
// inverse_ready and arrives at operands_ready. channel_offset: what the lane gives to load_transposed and
// store_transposed (channel_operand_offset, scalar_chunks.cuh).
template <class S>
__device__ __forceinline__ void make_Z(S& s, const RingPosition<S::STAGES>& ring, int channel_offset) {
  using T = typename S::T;
  auto& in = s.stages[ring.stage];
  mbarrier_wait(s.inverse_ready[ring.stage], ring.parity);
#pragma unroll
  for (int p = 0; p < S::BK / 64; ++p) {
    Operand keys;
    Values z;
    load_transposed(keys, in.queries_keys[p] + CHUNK, channel_offset);
    wgmma_fence();
    start_split_product<T>(z, keys, k_major_tile(in.inverse_to_end), OVERWRITE);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(z);
    store_transposed(in.Z[p], channel_offset, z);  // overwrites M
  }
  fence_proxy_async();
  warp_arrive(s.operands_ready[ring.stage]);
}

// Stores a warp's 16 rows of H (warps 0 and 1, rows are queries) or P (warps 2 and 3, rows are keys), and the terms of
// dg and dbeta that these rows' pairs have for each token. products: F or -G; scores: q . k or k . k, without decays.
// With g = lane / 4 and t = lane % 4, products[4n + 2h + p] and scores[4n + 2h + p] are of row g + 8h of the warp's 16
// rows and key 8n + 2t + p (x in the code is p). left_offset: left_operand_offset of scalar_chunks.cuh, by which the
// warp stores.
template <class S>
__device__ __forceinline__ void store_pairs(S& s, int stage, const Values& products, const Values& scores, int lane,
                                            int warp, int left_offset) {
  using T = typename S::T;
  const bool has_keys = warp >= 2;
  const int first_row = 16 * (warp & 1), g = lane / 4, t = lane % 4;
  auto& in = s.stages[stage];
  const TokenGates& gates = s.gates[stage];
  const float (&row_factors)[CHUNK] = has_keys ? gates.key_factors : gates.query_factors;
  float matrix[4][4], pair_terms[8] = {}, beta_terms[8] = {};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = first_row + g + 8 * h;
    const float factor = row_factors[i];
    float earlier_keys = 0.f;  // the sum of terms of the row's keys before the n-th 8 keys
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const int j = 8 * n + 2 * t;
      const float2 decays = *reinterpret_cast<const float2*>(swizzled(in.D[0], i, j / 4) + j % 4),
                   betas = load_float2(gates.beta + j);
      float dg_terms[2];  // of the pairs of the row with this lane's two keys, j and j + 1
#pragma unroll
      for (int x = 0; x < 2; ++x) {
        const float decay = (x ? decays.y : decays.x) * factor, beta = x ? betas.y : betas.x;
        const float product = has_keys ? -products[4 * n + 2 * h + x] : products[4 * n + 2 * h + x];
        const bool is_earlier = j + x < i, is_pair = has_keys ? is_earlier : j + x <= i;
        const float dscore = is_pair ? decay * product : 0.f, term = dscore * scores[4 * n + 2 * h + x];
        // +0, not -0, where there is no pair: compute_gradients ORs P with P^T.
        matrix[n][2 * h + x] = is_pair ? beta * dscore : 0.f;
        beta_terms[2 * n + x] += term;
        dg_terms[x] = is_earlier ? beta * term : 0.f;
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
  store_split<T, 2>(has_keys ? in.P : in.H, shifted_offset(left_offset, first_row, 0), matrix);
  const int token = g / 2 * 8 + 2 * t + g % 2;  // the one whose sums sum_of_rows returns to this lane
  s.pair_terms[warp][token] = sum_of_rows(pair_terms, lane);
  s.beta_terms[warp][token] = sum_of_rows(beta_terms, lane);
}

// Stores dbeta (warp 0) and dg (warp 1) of a chunk.
template <class S>
__device__ __forceinline__ void store_token_gradients(const S& s, const Args<typename S::T>& args, const WorkTile& work,
                                                      int token, const TokenGates& gates, int lane, int warp) {
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
  const float dot = (s.state_dots[0] + s.state_dots[1]) + (s.state_dots[2] + s.state_dots[3]);
  if (inside) *args.dg.row(work.batch, work.head, work.start + token + lane) = fmaf(gates.chunk_decay, dot, sum);
}

// Stores d, a warp's 16 rows of dq (warps 0 and 1) or of dk (warps 2 and 3): to shared memory, over q and k, or to
// `parts`. If args.normalized, d is the gradient with respect to x / |x|, x a query or key, divided by |x|: the
// gradient with respect to x is d without its component along x. `parts` get the gradient with respect to x / |x|,
// since sum_parts.cu divides by |x| and removes that component after it has summed.
template <class S>
__device__ __forceinline__ void store_gradients(S& s, const Args<typename S::T>& args, const WorkTile& work, int token,
                                                int stage, float (&d)[S::BK / 64][32], int lane, int warp,
                                                int own_offset) {
  using T = typename S::T;
  constexpr int PANELS = S::BK / 64;
  auto& rows = s.stages[stage].queries_keys;
  const int first_row = 16 * (warp & 1) + lane / 4;  // this lane has this row and the 8th after it
  if (args.normalized) {
    const float* const inverses = (warp < 2 ? s.gates[stage].query_inverse : s.gates[stage].key_factors) + first_row;
    const float inverse[2] = {inverses[0], inverses[8]};
    if (args.parts) {
      const float length[2] = {1.f / inverse[0], 1.f / inverse[1]};
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
#pragma unroll
        for (int i = 0; i < 32; ++i) d[p][i] *= length[i / 2 % 2];
    } else {  // removes each row's component along x
      float dots[2] = {};
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        each_of_panel(rows[p], own_offset,
                      [&](int i, float2 x, int h) { dots[h] = fmaf(x.x, d[p][i], fmaf(x.y, d[p][i + 1], dots[h])); });
#pragma unroll
      for (int h = 0; h < 2; ++h) dots[h] = inverse[h] * inverse[h] * sum_over_lanes<4>(dots[h]);
#pragma unroll
      for (int p = 0; p < PANELS; ++p)
        each_of_panel(rows[p], own_offset, [&](int i, float2 x, int h) {
          d[p][i] = fmaf(-dots[h], x.x, d[p][i]), d[p][i + 1] = fmaf(-dots[h], x.y, d[p][i + 1]);
        });
    }
  }
  if (args.parts) {
    // The row of `parts` that has this head's token 0, of gradients of q or of k.
    const i64 head_row = ((warp / 2 * args.shape.B + work.batch) * args.shape.H + work.head) * args.shape.T;
    const int channel = 2 * (lane % 4);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = token + first_row + 8 * h;
      float* const to = args.parts + (head_row + work.start + row) * args.shape.K;
      if (row < work.tokens)
#pragma unroll
        for (int p = 0; p < PANELS; ++p)
#pragma unroll
          for (int n = 0; n < 8; ++n)
            if (64 * p + 8 * n < args.shape.K)  // K is a multiple of 8
              *reinterpret_cast<float2*>(to + 64 * p + 8 * n + channel) = {d[p][4 * n + 2 * h],
                                                                           d[p][4 * n + 2 * h + 1]};
    }
    return;
  }
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      u32 packed[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) packed[m] = pack<T>(d[p][8 * c + 2 * m], d[p][8 * c + 2 * m + 1]);
      stmatrix_x4(at_byte_offset(rows[p], shifted_offset(own_offset, 0, 16 * c)), packed);
    }
}

// Stores <S, dS> over the warp's columns: the diagonals of products [16 columns of S, 8 columns of dS] over channels.
template <class S>
__device__ __forceinline__ void store_state_dot(S& s, int lane, int warp, int left_offset, int right_offset) {
  using T = typename S::T;
  float dots[2][4] = {};
#pragma unroll 1
  for (int column = 16 * warp; column < S::BV; column += 64)
#pragma unroll
    for (int c = 0; c < S::BK / 16; ++c) {
      u32 a[4], b[4];
      ldmatrix_x4(a, at_byte_offset(s.states[c / 4], shifted_offset(left_offset, column, c % 4 * 16)));
      ldmatrix_x4(b, at_byte_offset(s.state_gradient[c / 4], shifted_offset(right_offset, column, c % 4 * 16)));
      mma_m16n8k16(dots[0], a, {b[0], b[1]}, T{}), mma_m16n8k16(dots[1], a, {b[2], b[3]}, T{});
    }
  const int g = lane / 4;  // of diagonals a lane with t = g / 2 has column g % 2 of its two, in rows g and g + 8
  const float diagonal = g % 2 ? dots[0][1] + dots[1][3] : dots[0][0] + dots[1][2];
  const float sum = warp_sum(lane % 4 == g / 2 ? diagonal : 0.f);
  if (lane == 0) s.state_dots[warp] = sum;
}

// Makes the warp's rows d of S do and S dv the first terms of dq and dk, and stores read_terms: their products with the
// same rows of q and k.
template <class S>
__device__ __forceinline__ void scale_state_products(S& s, float (&d)[S::BK / 64][32], int stage, int lane, int warp,
                                                     int own_offset) {
  const TokenGates& gates = s.gates[stage];
  const bool has_keys = warp >= 2;
  const int row = 16 * (warp & 1) + lane / 4;
  const float* const factors = has_keys ? gates.key_start_factors : gates.query_start_factors;
  const float factor[2] = {has_keys ? -factors[row] : factors[row], has_keys ? -factors[row + 8] : factors[row + 8]};
  float terms[2] = {};
#pragma unroll
  for (int p = 0; p < S::BK / 64; ++p)
    each_of_panel(s.stages[stage].queries_keys[p], own_offset, [&](int i, float2 x, int h) {
      d[p][i] *= factor[h], d[p][i + 1] *= factor[h];
      terms[h] = fmaf(x.x, d[p][i], fmaf(x.y, d[p][i + 1], terms[h]));
    });
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    terms[h] = sum_over_lanes<4>(terms[h]);
    if (lane % 4 == 0) s.read_terms[has_keys][row + 8 * h] = terms[h];
  }
}

// Adds to d, the warp's rows of dq or dk, the products of H and P with queries and keys; returns when they have ended.
// Called by the whole warpgroup, once all its warps have stored H and P.
template <class Stage, int PANELS>
__device__ __forceinline__ void add_pair_products(float (&d)[PANELS][32], Stage& in, int lane, int warp,
                                                  int left_offset, int right_offset) {
  using T = typename Stage::Element;
  const bool has_keys = warp >= 2;
  const int first_row = 16 * (warp & 1);
  // Left operands. Warps of queries multiply keys by H. Warps of keys multiply keys by P + P^T, and queries by H^T;
  // warps of queries multiply queries by 0. Indices: [tokens from 0 or from 16 on][rounded elements, or errors].
  u32 for_keys[2][2][4], for_queries[2][2][4];
#pragma unroll
  for (int c = 0; c < 2; ++c)
#pragma unroll
    for (int errors = 0; errors < 2; ++errors) {
      auto& left = has_keys ? in.P : in.H;
      ldmatrix_x4(for_keys[c][errors],
                  at_byte_offset(left, shifted_offset(left_offset, first_row, 16 * c + 32 * errors)));
      u32 transposed_P[4];
      ldmatrix_x4_trans(transposed_P,
                        at_byte_offset(in.P, shifted_offset(right_offset, 16 * c, first_row + 32 * errors)));
      ldmatrix_x4_trans(for_queries[c][errors],
                        at_byte_offset(in.H, shifted_offset(right_offset, 16 * c, first_row + 32 * errors)));
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        for_keys[c][errors][m] |= has_keys ? transposed_P[m] : 0;  // P_ij or P_ji is +0
        for_queries[c][errors][m] = has_keys ? for_queries[c][errors][m] : 0;
      }
    }
  const u64 rows = k_major_tile(in.queries_keys);
  wgmma_fence();
#pragma unroll
  for (int p = 0; p < PANELS; ++p)
#pragma unroll
    for (int errors = 1; errors >= 0; --errors)  // the small products first
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const u64 queries = rows + p * (sizeof in.queries_keys[0] / 16) + c * (16 * 128 / 16);
        wgmma<T, 64, MN_MAJOR>(d[p], for_keys[c][errors], queries + CHUNK * 128 / 16, ACCUMULATE);
        wgmma<T, 64, MN_MAJOR>(d[p], for_queries[c][errors], queries, ACCUMULATE);
      }
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int p = 0; p < PANELS; ++p) wgmma_fence_operand(d[p]);
}

// The gradients' warpgroup. For each chunk n it makes M of chunk n + 2, Z of chunk n + 1, and dq, dk, dbeta and dg of
// chunk n. Warps 0 and 1 have 16 queries each, warps 2 and 3 have 16 keys each.
template <class S>
__device__ __forceinline__ void compute_gradients(S& s, const Args<typename S::T>& args, const WorkTile& work) {
  using T = typename S::T;
  constexpr int PANELS = S::BK / 64, V_PANELS = S::BV / 64;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0), lane = threadIdx.x & 31;
  // Byte offsets in a swizzled panel that this lane gives to ldmatrix and stmatrix: for 16 channels of tokens, for a
  // left and for a right operand. own_offset: for the warp's 16 of the 64 rows of q and k.
  const int channel_offset = channel_operand_offset(lane, warp), left_offset = left_operand_offset(lane),
            right_offset = right_operand_offset(lane), own_offset = shifted_offset(left_offset, 16 * warp, 0);
  const bool has_keys = warp >= 2;
  const int first_row = 16 * (warp & 1), row = first_row + lane / 4;  // the lane has `row` and row + 8
  RingPosition<S::STAGES> ring, Z_ring, scores_ring;
  RingPosition<2> values_ring;
  // make_scores waits for full and decays_ready of its chunk: two iterations later the loop reads the chunk's q, k, D
  // and gates without waiting.
  for (int chunk = 0; chunk < 2 && chunk * CHUNK < work.tokens; ++chunk, scores_ring.next())
    make_scores(s, scores_ring, lane, warp, left_offset);
  if (work.tokens > 0) make_Z(s, Z_ring, channel_offset);
  Z_ring.next();
#pragma unroll 1
  for (int token = 0; token < work.tokens;
       token += CHUNK, ring.next(), Z_ring.next(), scores_ring.next(), values_ring.next()) {
    const u32 parity = token / CHUNK & 1;
    auto& in = s.stages[ring.stage];
    auto& values = s.values[values_ring.stage];
    const TokenGates& gates = s.gates[ring.stage];
    float d[PANELS][32];  // the warp's rows of dq or dk; at first S do or S dv
    mbarrier_wait(s.tokens_full, parity);
    mbarrier_wait(s.states_ready, parity);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) start_gradient_product(d[p], s.gradients, s.states[p]);
    wgmma_commit();
    mbarrier_wait(s.state_gradient_full, parity);
    if (args.dg.p) store_state_dot(s, lane, warp, left_offset, right_offset);
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_fence_operand(d[p]);
    warp_arrive(s.states_read);
    scale_state_products(s, d, ring.stage, lane, warp, own_offset);
    if (token + CHUNK < work.tokens) make_Z(s, Z_ring, channel_offset);

    mbarrier_wait(s.residuals_ready[values_ring.stage], values_ring.parity);
    {
      Values products, scores;
      u64 rows = k_major_tile(s.gradients), residuals = k_major_tile(values);
      wgmma_fence();
      start_scores(scores, in);  // [q; k] k^T
#pragma unroll
      for (int rounded = 0; rounded < 2; ++rounded)  // rounding errors of e (rows 0 to 31), then e rounded
#pragma unroll
        for (int c = 0; c < 4 * V_PANELS; ++c) {
          const int offset = c / 4 * int(sizeof values[0] / 16) + c % 4 * 2;
          wgmma<T, CHUNK, K_MAJOR>(products, rows + offset, residuals + offset + rounded * (CHUNK * 128 / 16),
                                   rounded || c);
        }
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(products), wgmma_fence_operand(scores);
      store_pairs(s, ring.stage, products, scores, lane, warp, left_offset);
    }
    float terms[2] = {};
#pragma unroll
    for (int p = 0; p < PANELS; ++p) {
      float dS_e[32];  // rows 32 to 63: dS e
      wgmma_fence();
      start_gradient_product(dS_e, values, s.state_gradient[p]);
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_fence_operand(dS_e);
      if (has_keys) {
        const float factor[2] = {gates.key_end_factors[row], gates.key_end_factors[row + 8]};
        each_of_panel(in.queries_keys[p], own_offset, [&](int i, float2 x, int h) {
          terms[h] = fmaf(x.x, dS_e[i], fmaf(x.y, dS_e[i + 1], terms[h]));
          d[p][i] = fmaf(factor[h], dS_e[i], d[p][i]), d[p][i + 1] = fmaf(factor[h], dS_e[i + 1], d[p][i + 1]);
        });
      }
    }
    fence_proxy_async();  // orders reads of dS before the copies that overwrite it
    warp_arrive(s.gradients_read);
    if (has_keys)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        terms[h] = sum_over_lanes<4>(terms[h]);
        if (lane % 4 == 0) s.write_terms[row + 8 * h] = gates.key_to_end[row + 8 * h] * terms[h];
      }
    if (token + 2 * CHUNK < work.tokens) make_scores(s, scores_ring, lane, warp, left_offset);
    named_barrier_sync(1, OPERAND_THREADS);  // terms, H and P are in shared memory
    store_token_gradients(s, args, work, token, gates, lane, warp);
    add_pair_products(d, in, lane, warp, left_offset, right_offset);
    named_barrier_sync(1, OPERAND_THREADS);  // all products that read queries and keys have ended; terms have been read
    store_gradients(s, args, work, token, ring.stage, d, lane, warp, own_offset);
    fence_proxy_async();
    mbarrier_arrive(s.outputs_ready[ring.stage]);
  }
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// A consumer: X, e and S of each chunk.
template <class S>
__device__ __forceinline__ void consume(S& s, const Args<typename S::T>& args, const WorkTile& work) {
  using T = typename S::T;
  constexpr int BK = S::BK;
  const Consumer at(0);
  const int channel_offset = at.channel_offset,
            own_offset = shifted_offset(left_operand_offset(at.lane), 16 * at.warp, 0);
  float state[BK / 2] = {};
  if (s.from)
    each_transposed<BK>(state, s.from, args, args.shape, at.column, [](float& x, const float* from) { x = *from; });
  RingPosition<S::STAGES> ring;
  RingPosition<2> values_ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next(), values_ring.next()) {
    auto& in = s.stages[ring.stage];
    auto& values = s.values[values_ring.stage][at.warpgroup];
    const TokenGates& gates = s.gates[ring.stage];
    u32 rounded_state[BK / 16][4];
    Operand v, X;
    Values S_k, e;
    round_state<T, BK>(rounded_state, state);
    mbarrier_wait(s.full[ring.stage], ring.parity);
    const u64 descriptor = stage_descriptor(in);
    wgmma_fence();
    start_state_product<T>(S_k, rounded_state,
                           [&](int p) { return descriptor + descriptor_offset(in, in.queries_keys[p] + CHUNK); });
    wgmma_commit();
    mbarrier_wait(s.states_read, (token / CHUNK & 1) ^ 1);
#pragma unroll
    for (int c = 0; c < BK / 16; ++c)
      stmatrix_x4(at_byte_offset(s.states[c / 4], shifted_offset(own_offset, 0, c % 4 * 16)), rounded_state[c]);
    fence_proxy_async();
    warp_arrive(s.states_ready);
    mbarrier_wait(s.values_full[values_ring.stage], values_ring.parity);
    load_transposed(v, values + CHUNK, channel_offset);
    mbarrier_wait(s.decays_ready[ring.stage], ring.parity);
    decay_state(state, gates.chunk_decay);
    wgmma_wait<0>();
    wgmma_fence_operand(S_k), wgmma_fence_operand(rounded_state);
    make_X<T>(X, v, S_k, gates, at.lane);
    mbarrier_wait(s.operands_ready[ring.stage], ring.parity);
    wgmma_fence();
    start_transposed_split_product<T>(e, X, descriptor + descriptor_offset(in, in.inverse));
    wgmma_commit();
    start_state_update<T, BK>(state, X, mn_major_tile(in.Z, sizeof in.Z[0]));
    wgmma_wait<1>();
    wgmma_fence_operand(e);
    store_transposed(values + CHUNK, channel_offset, e);
    each_two([&](int i, int, int) {
      const float2 rounded = unpack(pack<T>(e[i], e[i + 1]), T{});
      e[i] -= rounded.x, e[i + 1] -= rounded.y;
    });
    store_transposed(values, channel_offset, e);
    fence_proxy_async();
    wgmma_wait<0>();
    wgmma_fence_operand(state);
    mbarrier_arrive(s.residuals_ready[values_ring.stage]);
  }
}

template <typename T, int BK, int BV>
__global__ void __launch_bounds__(ALL_THREADS<BV>, 1)
    delta_sm90_scalar_backward_tokens(const __grid_constant__ Args<T> args) {
  auto& s = *reinterpret_cast<Shared<T, BK, BV>*>(dynamic_smem());
  WorkTile work = work_tile(args.shape, blockIdx.x, u32(args.P));
  const auto segment =
      start_of_walk<FORWARDS>(work, WITH_OUTPUTS, args.shape, args.P, args.initial, args.starts, nullptr, 0, BV);
  if (threadIdx.x == 0) {
    s.from = segment.from;  // consumers read it after the barrier of run_roles
    // run_roles initialises the barriers of stages, and values_full
    for (MBarrier& ready : s.residuals_ready) mbarrier_init(ready, CONSUMERS<BV>);
    mbarrier_init(s.tokens_full, 32), mbarrier_init(s.state_gradient_full, 1);
    mbarrier_init(s.states_ready, CONSUMERS<BV> / 32), mbarrier_init(s.states_read, OPERAND_THREADS / 32);  // warps
    mbarrier_init(s.gradients_read, OPERAND_THREADS / 32);
  }
  run_roles(
      s, args, work, [&] { consume(s, args, work); }, [&] { compute_gradients(s, args, work); },
      [&] { copy_chunks(s, args, work); });
}
