// what      The delta rule's gradients on Hopper, with a gate for each token and head, or none; the second of two
//           kernels, forwards in time: dq, dk, dbeta and dg, from what scalar_backward_states.cu has stored.
// math      S is the state before a chunk of 32 tokens, dS the gradient of the state after it; i and j are its tokens.
//           Decays are products of e^g: D_ij of tokens j + 1 to i, E_i from the chunk's start to i, L_i from i + 1 to
//           its end. M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  R = (I + M diag(beta))^-1
//           Z_j = sum_i R_ij beta_i L_i k_i;  X_j = v_j - E_j S^T k_j;  S <- E_32 S + Z^T X
//           e = R X, the residuals: e_j is v_j minus what key j reads from the state just before token j
//           With F_ij = do_i . e_j and G_ij = -dv_i . e_j, the gradients of pairs of tokens are
//           dqk_ij = scale D_ij beta_j F_ij, of q_i . k_j, j <= i;  dkk_ij = D_ij beta_j G_ij, of k_i . k_j, j < i
//           dq_i = scale E_i S do_i + sum_j dqk_ij k_j
//           dk_i = -E_i S dv_i + beta_i L_i dS e_i + sum_j (dkk_ij + dkk_ji) k_j + sum_j dqk_ji q_j
//           dbeta_j = L_j k_j . dS e_j + sum_i (A_ij F_ij + M_ij G_ij)
//           dg_t adds up all terms that gate t multiplies: of S with queries and keys i >= t, of dS with the keys
//           j < t, beta_j (A_ij F_ij + M_ij G_ij) of pairs j < t <= i, and <S, dS>, the sum of all S dS, times the
//           chunk's decay. No sum is a difference of two larger ones, nothing is divided by a decay or by beta
// shapes    q k dq dk [B, H, T, K], v do dv [B, HV, T, V], g beta dg dbeta [B, HV, T] of any strides; args.shape.H is
//           HV. state_gradients: dS [BV, BK], transposed, for every chunk (`WorkTile::chunk_row`) and value head. If
//           value heads share a head of q, `parts` [2, B, HV, T, K] float32 takes the place of dq and dk: each head's
//           gradients with respect to q and k, or, given args.lengths, to the divided q and k; sum_parts.cu adds them.
//           With P > 1, sequences in `shape` are segments of whole chunks, P of each sequence
// grid      delta_hopper.py launches a block for every (sequence, value head), sequence slowest
// roles     Consumers: a warpgroup for every 64 columns, with their state transposed in registers, computes X, e, S and
//           <S, dS>. The first one also makes Z of chunk n + 1, the last one M of chunk n + 2. Gradients: a warpgroup
//           computes dq, dk, dbeta and dg of chunk n; warps 0 and 1 have the rows of queries, warps 2 and 3 those of
//           keys. In a last warpgroup warp 0 copies chunks, warp 1 computes decays, and warps 2 and 3 invert I + M
//           diag(beta) of even and odd chunks
// smem      GradientStage: a chunk's queries and keys, and its matrices. Shared: stages, v and e, do and dv, S and dS
// barriers  What is complete: who arrives -> who waits. By stage:
//             full: q and k have been copied: copies -> decays, gradients, consumers
//             decays_ready: D and gates: decays -> gradients, consumers
//             scores_ready: M: last consumers -> inverses
//             inverse_ready: R, in `inverse` and `inverse_to_end`: inverses -> first consumers
//             operands_ready: Z (and R, from which it is made): first consumers -> consumers
//             outputs_ready: dq and dk; the stage and its gates have been read: gradients -> copies, decays
//           By slot of v:
//             values_full: v has been copied: copies -> consumers
//             residuals_ready: e; Z and R have been read: consumers -> gradients
//           One place each, used by every chunk:
//             tokens_full: do and dv have been copied: copies -> gradients
//             state_gradient_full: dS has been copied: copies -> gradients, consumers
//             dots_ready: state_dots; dS has been read for them: consumers -> gradients
//             gradients_read: do, dv, dS and e have been read: gradients -> copies
//             states_ready: S: consumers -> gradients
//             states_read: S has been read: gradients -> consumers
//           One in is_whole, which start_of_walk calls: all threads learn whether a number of the states that segments
//           start from is not finite.
//           Named barrier 1 joins the gradients' warpgroup, twice a chunk: terms, dqk and dkk are in shared memory |
//           all products that read queries and keys have ended
// numerics  products of T are summed in float32. S, dS, X, Z, do and dv are of T. R, dqk and dkk are split: sums of two
//           T, a rounded value and its rounding error. e is split in products with do and dv, and rounded to T in the
//           product dS e. R's diagonal blocks of 16 tokens come from substitution in float32, its other block from
//           products of split matrices. A decay is a product of the decays of the tokens in between, never a quotient
// source    Yang et al., 2024, "Gated Delta Networks", section 3.3; the gradient takes the same matrices, transposed
// limits    sm_90a; bfloat16, float16; K <= BK, V <= BV; BK, BV of 64, 128; K and V multiples of 8, since tensor maps
//           describe rows of whole 16 bytes
// tests     test_delta_on_hopper, test_compile: see scalar_chunks.cuh
#include "delta/sm90/scalar_token_gradients.cuh"

// From the includes:
//   shape.H: value heads
//   wgmma_fence_operand(d): d is not read before it
//   Values, Operand: a lane's part of [the warp's 16 columns or channels, 32 tokens], as sums and as operands;
//     each_two: calls f for their pairs
//   start_of_walk: sets the block's tokens to its segment's, and returns `from`, the state that the walk starts from,
//     null for zeros, and `to`, where its last state goes, null for nowhere. Where states were not finite when
//     join_segments.cu had joined segments, the walk's first segment has all tokens, and the others have none
//   Consumer: a lane of a consumer, and its column
//   Panel: 32 rows of 128 bytes, swizzled; GradientLane: a lane's rows, and its byte offsets in a panel for ldmatrix
//     and stmatrix; left_operand_offset: such an offset, shifted_offset: the same of other rows and columns;
//     load_transposed, store_transposed: the warp's 16 columns of 32 rows
//   stage_descriptor, descriptor_offset: wgmma's descriptors of tiles of a stage; start_state_product: S^T times the
//     chunk's queries or keys; start_state_update: S += Z^T X; start_split_product, start_transposed_split_product:
//     with a split matrix, or its transpose; decay_state: S times the chunk's decay; make_X: X of `math`
//   TokenGates: factors of a chunk's tokens; Upcoming: decays and betas of later chunks
//   make_scores: M of the chunk in this stage; make_first_scores: of the first two; start_scores: products of queries
//     and keys with keys; round_state: S, rounded, as operands
//   each_transposed: calls f(number, its address in memory) for this lane's numbers of a state
//   RingPosition: a chunk's stage, and the parity to wait for; next() is the next chunk's
//   CHUNK = 32 tokens; ALL_THREADS: of a block, CONSUMERS, OPERAND_THREADS: of roles; BACKWARD_TOKENS: which of the
//     kernels with these roles this one is; k_major_tile, mn_major_tile: wgmma's descriptors of tiles
//   warp_arrive: one lane arrives for its warp. GradientStage: a chunk's q and k, and its matrices. store_pairs,
//     store_state_dot, scale_state_products and so on: steps of compute_gradients, in scalar_token_gradients.cuh

template <typename T> struct Args {
  TensorMap state_gradients;           // boxes of 64 columns of V and 64 channels, swizzled
  TensorMap q, k, v, do_, dv, dq, dk;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> q_rows, k_rows, v_rows, do_rows, dv_rows;
  StridedRows<T> dq_rows, dk_rows;
  StridedRows<const void> g, beta;   // no gate: null
  StridedRows<const float> lengths;  // inverse ones of queries and keys, which are divided by them; or null
  StridedRows<float> dbeta, dg;      // dg: null without gates
  const float* initial;              // S before each of N sequences, [N, HV, K, V]; null: zeros
  float* starts;                     // with P > 1: S before each segment, [N P, HV, K, V] (join_segments.cu)
  float* parts;                      // null if no value heads share a head of q
  Shape shape;                       // H is the number of value heads, HV; with P > 1, sequences are P segments of each
  i64 P;
  i64 group;                 // value heads that share a head of q and k
  i64 state_k, state_v;      // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;  // whether g, and beta, are float32; otherwise they are of type T
  double scale;
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr Pass PASS = BACKWARD_TOKENS;  // chooses among the matrices of scalar_stage.cuh
  // SLOTS: of v; one where two blocks share a multiprocessor, which has no memory for more.
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = 3, SLOTS = Registers<PASS, BK, BV>::BLOCKS == 2 ? 1 : 2;
  GradientStage<T, BK> stages[STAGES];
  T values[SLOTS][BV / 64][2 * CHUNK][64];  // rows 32 to 63: v, overwritten by e; rows 0 to 31: errors of e
  T gradients[BV / 64][2 * CHUNK][64];      // rows 0 to 31: do; rows 32 to 63: dv
  T states[BK / 64][BV][64], state_gradient[BK / 64][BV][64];  // S and dS, transposed
  TokenGates gates[STAGES];
  Upcoming upcoming;             // decays and betas of the next chunks, for the warp that computes decays
  float pair_terms[4][CHUNK];    // by warp: terms of dg from the pairs of the warp's 16 rows
  float beta_terms[4][CHUNK];    // by warp: terms of dbeta from the same pairs
  float read_terms[2][CHUNK];    // q_i . (scale E_i S do_i), and k_i . (-E_i S dv_i)
  float write_terms[CHUNK];      // L_i k_i . dS e_i
  float state_dots[2][BV / 16];  // of even and odd chunks, by the consumers' warps: <S, dS> over the warp's columns
  MBarrier full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES], operands_ready[STAGES],
      outputs_ready[STAGES];
  MBarrier values_full[SLOTS], residuals_ready[SLOTS];
  MBarrier tokens_full, state_gradient_full, gradients_read, states_ready, states_read, dots_ready;
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
template <class Memory>
__device__ __forceinline__ void copy_chunks(Memory& s, const Args<typename Memory::T>& args, const WorkTile& work) {
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
    const int slot = token / CHUNK % Memory::SLOTS;
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
      for (int panel = 0; panel < Memory::BK / 64; ++panel)
        for (int column = 0; column < Memory::BV; column += 64)
          tensor_load(s.state_gradient[panel][column], args.state_gradients, s.state_gradient_full, 64 * panel,
                      i32(work.chunk_row + token / CHUNK) * Memory::BV + column, 0, 0);
    }
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  };
  for (int stage = 0; stage < Memory::STAGES; ++stage) fetch_keys(stage * CHUNK, stage);
  for (int slot = 0; slot < Memory::SLOTS; ++slot) fetch_values(slot * CHUNK);
  fetch_gradients(0);
  RingPosition<Memory::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    mbarrier_wait(s.gradients_read, token / CHUNK & 1);
    fetch_gradients(token + CHUNK), fetch_values(token + Memory::SLOTS * CHUNK);
    mbarrier_wait(s.outputs_ready[ring.stage], ring.parity);
    fence_proxy_async();  // orders what other warps have read and written before the copies that overwrite it
    if (!args.parts)
      store_chunk(work, token, [&](auto f) {
        each_panel(s.stages[ring.stage].queries_keys, [&](auto& dq, auto& dk, int channel) {
          f(dq, args.dq, args.dq_rows, args.shape.K, channel), f(dk, args.dk, args.dk_rows, args.shape.K, channel);
        });
      });
    fetch_keys(token + Memory::STAGES * CHUNK, ring.stage);
  }
}

// ---- a warpgroup that computes gradients ----------------------------------------------------------------------------

// Starts the product d[64 rows, 64 channels] = tokens[64 rows, BV] states[BV, 64]. tokens: do above dv, or rounding
// errors of e above e, in panels of 64 columns of V; states: 64 channels of S or dS, transposed: a row of 64 channels
// for each column of V. The caller calls wgmma_commit and waits.
template <typename T, int PANELS>
__device__ __forceinline__ void start_gradient_product(float (&d)[32], T (&tokens)[PANELS][2 * CHUNK][64],
                                                       T (&states)[64 * PANELS][64]) {
  u64 rows = k_major_tile(tokens), columns = k_major_tile(states);
#pragma unroll
  for (int step = 0; step < 4 * PANELS; ++step)
    wgmma<T, 64, MN_MAJOR>(d, rows + step / 4 * (sizeof tokens[0] / 16) + step % 4 * 2,
                           columns + step * (16 * 128 / 16), step > 0);
}

// Starts products[64 rows, 32] = [do; dv] e^T, where e is split: first with its rounding errors (rows 0 to 31 of
// `values`), then with e rounded. The caller commits and waits.
template <typename T, int PANELS>
__device__ __forceinline__ void start_residual_products(Values& products, T (&gradients)[PANELS][2 * CHUNK][64],
                                                        T (&values)[PANELS][2 * CHUNK][64]) {
  const u64 rows = k_major_tile(gradients), residuals = k_major_tile(values);
#pragma unroll
  for (int rounded = 0; rounded < 2; ++rounded)
#pragma unroll
    for (int step = 0; step < 4 * PANELS; ++step) {
      const int offset = step / 4 * int(sizeof values[0] / 16) + step % 4 * 2;
      wgmma<T, CHUNK, K_MAJOR>(products, rows + offset, residuals + offset + rounded * (CHUNK * 128 / 16),
                               rounded || step);
    }
}

// A warp with keys adds beta_i L_i dS e_i to its rows d of dk, in one panel of channels, and k_i . dS e_i over these to
// `terms`. queries_keys: the panel.
template <typename T>
__device__ __forceinline__ void add_write_gradients(float (&d)[32], float (&terms)[2], const float (&dS_e)[32],
                                                    T (&queries_keys)[2 * CHUNK][64], const TokenGates& gates,
                                                    const GradientLane& at) {
  if (!at.has_keys) return;
  const float factor[2] = {gates.key_end_factors[at.row], gates.key_end_factors[at.row + 8]};
  each_of_panel(queries_keys, at.own_offset, [&](int i, float2 x, int h) {
    terms[h] = fmaf(x.x, dS_e[i], fmaf(x.y, dS_e[i + 1], terms[h]));
    d[i] = fmaf(factor[h], dS_e[i], d[i]), d[i + 1] = fmaf(factor[h], dS_e[i + 1], d[i + 1]);
  });
}

// Stores write_terms of a warp with keys: L_i times `terms`, k_i . dS e_i, of which each lane has a part.
template <class Memory>
__device__ __forceinline__ void store_write_terms(Memory& s, float (&terms)[2], const TokenGates& gates,
                                                  const GradientLane& at) {
  if (at.has_keys)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      terms[h] = sum_over_lanes<4>(terms[h]);
      if (at.lane % 4 == 0) s.write_terms[at.row + 8 * h] = gates.key_to_end[at.row + 8 * h] * terms[h];
    }
}

// The gradients' warpgroup: dq, dk, dbeta and dg of each chunk. Warps 0 and 1 have 16 queries each, warps 2 and 3 have
// 16 keys each.
template <class Memory>
__device__ __forceinline__ void compute_gradients(Memory& s, const Args<typename Memory::T>& args,
                                                  const WorkTile& work) {
  constexpr int PANELS = Memory::BK / 64;
  const GradientLane at;
  RingPosition<Memory::STAGES> ring;
  RingPosition<Memory::SLOTS> values_ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next(), values_ring.next()) {
    const u32 parity = token / CHUNK & 1;
    auto& in = s.stages[ring.stage];
    auto& values = s.values[values_ring.stage];
    const TokenGates& gates = s.gates[ring.stage];
    float d[PANELS][32];     // the warp's rows of dq or dk; at first S do or S dv
    float dS_e[PANELS][32];  // rows 32 to 63: dS e
    Values products, scores;

    // do e^T and dv e^T; [q; k] k^T; then S do and S dv
    mbarrier_wait(s.full[ring.stage], ring.parity);
    mbarrier_wait(s.tokens_full, parity);
    mbarrier_wait(s.residuals_ready[values_ring.stage], values_ring.parity);
    wgmma_fence();
    start_residual_products(products, s.gradients, values);
    start_scores(scores, in);
    mbarrier_wait(s.states_ready, parity);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) start_gradient_product(d[panel], s.gradients, s.states[panel]);
    wgmma_commit();

    // dqk and dkk, while S do and S dv are computed
    mbarrier_wait(s.decays_ready[ring.stage], ring.parity);
    wgmma_wait<1>();
    wgmma_fence_operand(products), wgmma_fence_operand(scores);
    store_pairs(s, ring.stage, products, scores, at);
    wgmma_wait<0>();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) wgmma_fence_operand(d[panel]);
    warp_arrive(s.states_read);

    // dS e: each panel's is computed while the warp adds up what it has
    const auto start_dS_e = [&](int panel) {
      wgmma_fence();
      start_gradient_product(dS_e[panel], values, s.state_gradient[panel]);
      wgmma_commit();
    };
    mbarrier_wait(s.state_gradient_full, parity);
    start_dS_e(0);
    scale_state_products(s, d, ring.stage, at);
    float terms[2] = {};
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel) {
      wgmma_wait<0>();
      wgmma_fence_operand(dS_e[panel]);
      if (panel + 1 < PANELS) start_dS_e(panel + 1);
      add_write_gradients(d[panel], terms, dS_e[panel], in.queries_keys[panel], gates, at);
    }
    mbarrier_wait(s.dots_ready, parity);
    fence_proxy_async();  // orders reads before the copies that overwrite what was read
    warp_arrive(s.gradients_read);
    store_write_terms(s, terms, gates, at);

    named_barrier_sync(1, OPERAND_THREADS);  // terms, dqk and dkk are in shared memory
    store_token_gradients(s, args, work, token, gates, s.state_dots[parity], at.lane, at.warp);
    add_pair_products(d, in, at);
    named_barrier_sync(1, OPERAND_THREADS);  // all products that read queries and keys have ended; terms have been read
    store_gradients(s, args, work, token, ring.stage, d, at);
    fence_proxy_async();
    mbarrier_arrive(s.outputs_ready[ring.stage]);
  }
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// Makes Z of a chunk: Z_j = sum_i inverse_to_end[j, i] k_i, in the warp's 16 channels of every 64. It waits for
// inverse_ready and arrives at operands_ready. channel_offset: that of OperandLane.
template <class Memory>
__device__ __forceinline__ void make_Z(Memory& s, const RingPosition<Memory::STAGES>& ring, int channel_offset) {
  using T = typename Memory::T;
  constexpr int PANELS = Memory::BK / 64;
  auto& in = s.stages[ring.stage];
  Operand keys[PANELS];
  Values z[PANELS];
  mbarrier_wait(s.inverse_ready[ring.stage], ring.parity);
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    load_transposed(keys[panel], in.queries_keys[panel] + CHUNK, channel_offset);
  wgmma_fence();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    start_split_product<T>(z[panel], keys[panel], k_major_tile(in.inverse_to_end), OVERWRITE);
  wgmma_commit();
  wgmma_wait<0>();
#pragma unroll
  for (int panel = 0; panel < PANELS; ++panel)
    wgmma_fence_operand(z[panel]), store_transposed(in.Z[panel], channel_offset, z[panel]);  // overwrites M
  fence_proxy_async();
  warp_arrive(s.operands_ready[ring.stage]);
}

// Stores a warp's 16 columns of S, rounded, for the gradients. own_offset: the lane's byte offset for stmatrix there.
template <class Memory, int STEPS>
__device__ __forceinline__ void store_rounded_state(Memory& s, const u32 (&rounded_state)[STEPS][4], int own_offset) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    stmatrix_x4(at_byte_offset(s.states[step / 4], shifted_offset(own_offset, 0, step % 4 * 16)), rounded_state[step]);
}

// Stores e of a warp's 16 columns over v, rounded, and its rounding errors (which it leaves in e) in rows 0 to 31.
template <typename T>
__device__ __forceinline__ void store_residuals(T (&values)[2 * CHUNK][64], Values& e, int channel_offset) {
  store_transposed(values + CHUNK, channel_offset, e);
  each_two([&](int i, int, int) {
    const float2 rounded = unpack(pack<T>(e[i], e[i + 1]), T{});
    e[i] -= rounded.x, e[i + 1] -= rounded.y;
  });
  store_transposed(values, channel_offset, e);
}

// A consumer: X, e, S and <S, dS> of each chunk n; in the first warpgroup Z of chunk n + 1, in the last one M of chunk
// n + 2.
template <class Memory>
__device__ __forceinline__ void consume(Memory& s, const Args<typename Memory::T>& args, const WorkTile& work) {
  using T = typename Memory::T;
  constexpr int BK = Memory::BK;
  const Consumer at(0);
  const int channel_offset = at.channel_offset,
            own_offset = shifted_offset(left_operand_offset(at.lane), 16 * at.warp, 0);
  const bool makes_Z = at.warpgroup == 0, makes_scores = at.warpgroup == Memory::BV / 64 - 1;
  const OperandLane operand(at.warp % 4, at.lane);
  float state[BK / 2] = {};
  if (s.from)
    each_transposed<BK>(state, s.from, args, args.shape, at.column, [](float& x, const float* from) { x = *from; });
  RingPosition<Memory::STAGES> ring;
  RingPosition<Memory::SLOTS> values_ring;
  if (makes_scores) {
    RingPosition<Memory::STAGES> first;
    make_first_scores(s, first, work.tokens, operand);
  }
  if (makes_Z && work.tokens > 0) make_Z(s, ring, channel_offset);
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, values_ring.next()) {
    const u32 parity = token / CHUNK & 1;
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
    start_state_product<T>(S_k, rounded_state, [&](int panel) {
      return descriptor + descriptor_offset(in, in.queries_keys[panel] + CHUNK);
    });
    wgmma_commit();
    mbarrier_wait(s.states_read, parity ^ 1);
    store_rounded_state(s, rounded_state, own_offset);
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
    store_residuals(values, e, channel_offset);
    fence_proxy_async();
    wgmma_wait<0>();
    wgmma_fence_operand(state);
    mbarrier_arrive(s.residuals_ready[values_ring.stage]);
    ring.next();
    if (makes_Z && token + CHUNK < work.tokens) make_Z(s, ring, channel_offset);
    mbarrier_wait(s.state_gradient_full, parity);
    if (args.dg.p) store_state_dot(s, s.state_dots[parity][at.warp], own_offset, 16 * at.warp, at.lane);
    fence_proxy_async();  // orders reads of dS before the copies that overwrite it
    warp_arrive(s.dots_ready);
    if (makes_scores && token + 2 * CHUNK < work.tokens) {
      RingPosition<Memory::STAGES> later = ring;
      later.next();
      make_scores(s, later, operand);
    }
  }
}

template <typename T, int BK, int BV>
__global__ void __launch_bounds__(ALL_THREADS<BV>, Registers<BACKWARD_TOKENS, BK, BV>::BLOCKS)
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
    mbarrier_init(s.gradients_read, OPERAND_THREADS / 32), mbarrier_init(s.dots_ready, CONSUMERS<BV> / 32);
  }
  run_roles(
      s, args, work, [&] { consume(s, args, work); }, [&] { compute_gradients(s, args, work); },
      [&] { copy_chunks(s, args, work); });
}
