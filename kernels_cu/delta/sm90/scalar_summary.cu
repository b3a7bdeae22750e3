// what      What a segment of a sequence does to a state, on Hopper, under the delta rule with a gate for each token
//           and head, or none: from S to F S + G, or, if the segment forgets S, to G alone. Chunks of 32 tokens
// math      A walk over the segment's tokens as scalar_forward.cu's, without queries and outputs: S <- E_32 S + Z^T X,
//           X_j = v_j - E_j S^T k_j;  Z_j = beta_j sum_i N_ij L_i k_i, N = (I + diag(beta) M)^-1, M_ij = D_ij k_i . k_j
//           for j < i. Decays: E_j from the chunk's start through token j, L_i from after token i to the chunk's end,
//           D_ij from after token j through token i. G is the state after a walk from zeros (a first segment: from the
//           initial state); F is the state after a walk from the identity with values of 0. Token t multiplies a state
//           by at most e^g_t max(1, |1 - beta_t |k_t|^2|). A segment forgets if the product of these factors is at most
//           e^FORGOTTEN_NATS, e^-48, from some chunk on to the segment's end: then F counts as 0, and G's walk starts
//           from zeros at the last such chunk
// shapes    k [B, H, T, K], v [B, HV, T, V], g beta [B, HV, T]; segments are sequences in `shape`; initial state
//           [N, HV, K, V] float32; F [segments, HV, K, K rounded up to 4], rows padded with zeros; forgets [segments,
//           HV]; starts [2, segments, HV, K, V]: G is stored in starts[0], as the state of the next segment, until
//           join_segments.cu joins all. G of a sequence's last segment, and F of its first and last one, are not needed
//           and not computed
// grid      delta_hopper.py launches a block for every (segment, value head, BV columns of G), columns fastest, segment
//           slowest; then the same of F. Where segments forget, the last blocks are short
// roles     consumers: a warpgroup for every 64 columns, with their state transposed in registers, computes X and S.
//           Operands: a warpgroup makes M of chunk n + 2, and Z of chunk n. In a last warpgroup warp 0 copies chunks,
//           warp 1 computes decays, and warps 2 and 3 invert I + diag(beta) M of even and odd chunks
// smem      Stage (scalar_stage.cuh): a chunk of tokens and its matrices; sums of gates by warps
// barriers  __syncthreads while a block looks for the chunk from which it walks. By stage, in this order: full: keys
//           have arrived; values_full: values have arrived; then complete in shared memory: decays_ready: Gates and D;
//           scores_ready: M; inverse_ready: N diag(beta) times decays to the chunk's end; operands_ready: Z;
//           outputs_ready: all of the stage has been read
// numerics  products of T are summed in float32; k and v are used undecayed; S, X and Z are rounded to T, N is the sum
//           of two T, and comes from substitution in float32 within 16 tokens. A decay is a product of the decays of
//           the tokens in between, never a quotient
// source    Yang et al., 2024, "Gated Delta Networks", eq. 10, in segments
// limits    sm_90a; bfloat16, float16; K <= BK, K and V multiples of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/scalar_forgotten.cuh"

// From the includes:
//   shape.H: value heads
//   wgmma_fence_operand(d): d is not read before it
//   Values, Operand: a lane's part of [the warp's 16 columns or channels, 32 tokens], as sums and as operands
//   work_tile: the head and tokens of a segment; run_roles: calls the function of each warp's role; move_chunks: the
//     copying warp's, here of keys and values
//   start_of_walk: sets the block's tokens to its segment's, and returns the state that the walk starts from, and where
//     its last state goes; remembered_chunks: how many of the segment's last chunks remember nothing from before it
//   Consumer: a lane of a consumer, and its column
//   load_transposed, store_transposed: the warp's 16 columns of 32 rows
//   stage_descriptor, descriptor_offset: wgmma's descriptors of tiles of a stage; start_state_product: S^T rows;
//     start_state_update: S += x rows; start_split_product: with a split matrix; decay_state: S times the chunk's
//     decay; make_X: v less what keys read
//   Gates: factors of a chunk's tokens; Upcoming: decays and betas of later chunks
//   make_first_scores, start_scores, store_scores: M; OperandLane: a lane and its byte offsets; round_state: a state,
//     rounded, as operands
//   each_transposed: calls f(number, its address in memory) for this lane's numbers of a state
//   RingPosition: a chunk's stage, and the parity to wait for; set_tokens: has the block work on these tokens
//   CHUNK = 32 tokens; ALL_THREADS: of a block; Registers: of a thread, by role; warp_arrive: one lane arrives for its
//     warp

template <typename T> struct Args {
  TensorMap k, v;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> k_rows, v_rows;
  StridedRows<const void> g, beta;   // no gate: null
  StridedRows<const float> lengths;  // inverse ones of keys, which are divided by them, after those of queries; or null
  Shape shape;                       // H is the number of value heads; segments are sequences
  const float* initial;              // null: zeros
  float *starts, *F;
  i64* forgets;              // [sequences, P, HV]: whether F is 0; written where F is
  i64 P;                     // segments of a sequence
  i64 group;                 // value heads that share a head of keys
  i64 state_k, state_v;      // the initial state's strides along K and V, in numbers
  i64 wide_gate, wide_beta;  // whether g, and beta, are float32; otherwise they are of type T
  double scale;              // of queries, which this kernel does not read
};

template <typename Element, int CHANNELS, int COLUMNS> struct Shared {
  using T = Element;
  static constexpr Pass PASS = SUMMARY;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 5;
  Stage<T, BK, BV> stages[STAGES];
  Gates gates[STAGES];
  Upcoming upcoming;
  float sums[ALL_THREADS<BV> / 32];  // of each warp's tokens, in remembered_chunks
  MBarrier full[STAGES], values_full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES],
      operands_ready[STAGES], outputs_ready[STAGES];
};

// The operands' warpgroup, all chunks. In each iteration: M of chunk + 2 (start_scores and store_scores, which also
// waits for decays), and Z of the chunk, the product of keys and inverse_to_end, which overwrites M.
template <class Memory> __device__ __forceinline__ void make_Z(Memory& s, int tokens) {
  using T = typename Memory::T;
  constexpr int PANELS = Memory::BK / 64;
  const OperandLane at;
  RingPosition<Memory::STAGES> ring, scores_ring;
  make_first_scores(s, scores_ring, tokens, at);
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < tokens; ++chunk, ring.next(), scores_ring.next()) {
    auto& in = s.stages[ring.stage];
    Operand keys[PANELS];
    Values z[PANELS], scores;
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      load_transposed(keys[panel], in.queries_keys[panel] + CHUNK, at.channel_offset);
    const bool has_scores = (chunk + 2) * CHUNK < tokens;
    if (has_scores) mbarrier_wait(s.full[scores_ring.stage], scores_ring.parity);
    wgmma_fence();
    // Without a branch: the last two chunks compute their own scores again, which are not used.
    start_scores(scores, s.stages[has_scores ? scores_ring.stage : ring.stage]);
    mbarrier_wait(s.inverse_ready[ring.stage], ring.parity);
    u64 inverse_to_end = k_major_tile(in.inverse_to_end);
    hide_origin(inverse_to_end);  // see stage_descriptor
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      start_split_product<T>(z[panel], keys[panel], inverse_to_end, OVERWRITE);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_fence_operand(scores);
#pragma unroll
    for (int panel = 0; panel < PANELS; ++panel)
      wgmma_fence_operand(z[panel]), store_transposed(in.Z[panel], at.channel_offset, z[panel]);
    fence_proxy_async();
    warp_arrive(s.operands_ready[ring.stage]);
    if (has_scores) store_scores(s, scores_ring, scores, at);
  }
}

// Where a block's state starts, and where it goes. is_F: the block computes F, else G. from: the state to start from;
// null: the identity if `is_identity`, else zeros. to: rows of `width` numbers.
struct Ends {
  bool is_F, is_identity;
  const float* from;
  float* to;
  int width;
};

// The strides and the size of a state in memory.
struct StateLayout {
  int state_k, state_v, K, V;
};

// A consumer: X and the state S, G or F, of each chunk. first_column: the block's.
template <class Memory>
__device__ __forceinline__ void consume(Memory& s, const Args<typename Memory::T>& args, const WorkTile& work,
                                        const Ends& ends, int first_column) {
  using T = typename Memory::T;
  constexpr int BK = Memory::BK;
  const Consumer at(first_column);
  const int lane = at.lane, column = at.column;
  float state[BK / 2] = {};
  if (ends.is_identity) {
#pragma unroll
    for (int n = 0; n < BK / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) state[4 * n + i] = 8 * n + 2 * (lane & 3) + (i & 1) == column + 8 * (i >> 1);
  } else if (ends.from) {
    each_transposed<BK>(state, ends.from, args, args.shape, column, [](float& x, const float* from) { x = *from; });
  }
  RingPosition<Memory::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    auto& in = s.stages[ring.stage];
    const Gates& gates = s.gates[ring.stage];
    u32 rounded_state[BK / 16][4];
    Operand v = {}, X;
    Values S_k;  // S^T k
    round_state<T, BK>(rounded_state, state);
    mbarrier_wait(s.full[ring.stage], ring.parity);
    const u64 descriptor = stage_descriptor(in);
    wgmma_fence();
    start_state_product<T>(S_k, rounded_state, [&](int panel) {
      return descriptor + descriptor_offset(in, in.queries_keys[panel] + CHUNK);
    });
    wgmma_commit();
    mbarrier_wait(s.decays_ready[ring.stage], ring.parity);
    decay_state(state, gates.chunk_decay);
    if (!ends.is_F) {
      mbarrier_wait(s.values_full[ring.stage], ring.parity);
      load_transposed(v, in.values[at.warpgroup], at.channel_offset);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(S_k);
    // X = v - E S^T k; then S += X Z.
    make_X<T>(X, v, S_k, gates, lane);
    mbarrier_wait(s.operands_ready[ring.stage], ring.parity);
    wgmma_fence();
    start_state_update<T, BK>(state, X, mn_major_tile(in.Z, sizeof in.Z[0]));
    wgmma_wait<0>();
    wgmma_fence_operand(state);
    mbarrier_arrive(s.outputs_ready[ring.stage]);
  }
  const StateLayout layout = {ends.width, 1, int(args.shape.K), ends.width};
  each_transposed<BK>(state, ends.to, layout, layout, column, [](float& x, float* to) { *to = x; });
}

template <typename T, int BK, int BV>
__global__ void __launch_bounds__(ALL_THREADS<BV>, Registers<SUMMARY, BK, BV>::BLOCKS)
    delta_sm90_scalar_summary(const __grid_constant__ Args<T> args) {
  auto& s = *reinterpret_cast<Shared<T, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles_of_G = u32(shape.V + BV - 1) / BV, tiles_of_F = u32(shape.K + BV - 1) / BV;
  const u32 blocks_of_G = gridDim.x / (tiles_of_G + tiles_of_F) * tiles_of_G;
  const bool is_F = blockIdx.x >= blocks_of_G;
  const u32 block = is_F ? blockIdx.x - blocks_of_G : blockIdx.x, tiles = is_F ? tiles_of_F : tiles_of_G;
  const int column = int(block % tiles) * BV;
  WorkTile work = work_tile(shape, block / tiles);
  const auto segment =
      start_of_walk<FORWARDS>(work, WITHOUT_OUTPUTS, shape, args.P, args.initial, args.starts, nullptr, column, BV);
  if (segment.last || (is_F && segment.first)) return;
  Ends ends = {is_F, is_F, is_F ? nullptr : segment.from, segment.to, int(shape.V)};
  if (is_F) {
    ends.width = padded_to_4(int(shape.K));
    ends.to = args.F + work.sequence_head * shape.K * ends.width;
  }
  const int chunks = remembered_chunks<FORWARDS>(s, args, work);
  const bool forgets = chunks >= 0;
  if (is_F && column == 0 && threadIdx.x == 0) args.forgets[work.sequence_head] = forgets;
  if (forgets) ends.from = nullptr, ends.is_identity = false;
  const int skipped = forgets ? (all_chunks(work) - chunks) * CHUNK : 0;  // tokens before the walk
  set_tokens(work, work.start + skipped, forgets && is_F ? 0 : work.tokens - skipped);
  run_roles(
      s, args, work, [&] { consume(s, args, work, ends, column); }, [&] { make_Z(s, work.tokens); },
      [&] {
        const auto values = [&](auto f, auto& v) { f(v, args.v, args.v_rows, shape.V, column); };
        const bool has_values = !is_F;
        move_chunks(s, args, work, values, [](auto, auto&) {}, has_values);
      });
}
