// what      The delta rule's gradients on Hopper, with a gate for each token and head, or none; the first of two
//           kernels, backwards in time: dv, the gradient of the state after every chunk of 32 tokens, and dh0. Without
//           OUTPUTS it computes only what a segment of a sequence adds to the gradient of the state before it
// math      dS is the gradient of the state after a chunk; i and j are the chunk's tokens, 1 to 32. Decays are products
//           of e^g: D_ij of tokens j + 1 to i, E_i from the chunk's start to i, L_i from i + 1 to its end. Matrices:
//           M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  N = (I + diag(beta) M)^-1;  B = A N
//           Z_j = sum_i N_ij L_i k_i;  W_i = scale E_i q_i - sum_j B_ij beta_j E_j k_j
//           dv = beta (Z dS + B^T do);  Y_j = -beta_j E_j (Z dS)_j;  dS <- E_32 dS + W^T do + sum_j k_j Y_j^T
//           Without OUTPUTS the walk over a segment starts from zeros, or from dht if the segment is its sequence's
//           last in time. The dS that it ends with is stored in `starts` for the segment before, and join_segments.cu
//           adds what later segments give. A sequence's first segment in time has none before it: nothing is computed.
//           If a segment's first n chunks alone forget every gradient from behind them (remembered_chunks), the walk
//           starts from zeros at the end of chunk n
// shapes    q k [B, H, T, K], do dv [B, HV, T, V], g beta [B, HV, T] of any strides; dht, the gradient of the final
//           states, and dh0, that of the initial ones, [sequences, HV, K, V] float32; state_gradients: of every chunk,
//           at WorkTile::chunk_row, dS transposed, [V rounded up to whole blocks, BK]. With P > 1, sequences in `shape`
//           are segments of whole chunks, P of each sequence. starts [2, segments, HV, K, V]: the states that segments
//           start from, forwards and backwards in time; here index 1, gradients, is written without OUTPUTS and read
//           with them
// grid      delta_hopper.py launches a block for every (sequence, value head, BV columns of V), columns fastest,
//           sequence slowest
// roles     consumers: a warpgroup for every 64 columns, with their dS transposed in registers, computes Y, dv and dS,
//           and stores dS. Operands: a warpgroup makes A and M, then B, W and Z. In a last warpgroup warp 0 copies
//           chunks, warp 1 computes decays, and warps 2 and 3 invert I + diag(beta) M of even and odd chunks. All but
//           the consumers are functions of scalar_chunks.cuh
// smem      Stage (scalar_stage.cuh): a chunk's q, k and do, and its matrices; W overwrites q, and dv overwrites do
// barriers  by stage, in this order. full: queries and keys have arrived; values_full: do has; then complete in shared
//           memory: decays_ready: D and Gates; scores_ready: A and M; inverse_ready: N; operands_ready: B, W and Z;
//           outputs_ready: dv, and all of the stage has been read
// numerics  products of T are summed in float32. q, k and do are used undecayed; dS, W, Z, Y and dv are
//           rounded to T; A, B and N are the sums of two T each ("split"). N by substitution in float32 within 16
//           tokens, else by products of split matrices; a decay is a product of the decays of the tokens in between,
//           never a quotient
// source    Yang et al., 2024, "Gated Delta Networks", section 3.3; the gradient takes the same matrices, transposed
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/scalar_forgotten.cuh"

// From the includes:
//   wgmma_fence_operand(d): d is not read before it
//   Values, Operand: a lane's part of [the warp's 16 columns or channels, 32 tokens], as sums and as operands; each_two
//     calls f(i, c, m) for each pair of tokens, which Values have at [i] and [i + 1] and an Operand at [c][m]
//   start_of_walk: sets the tokens of `work` to its segment's and returns `from`, the gradient that the walk starts
//     from, null for zeros, `to`, the memory for the one that it ends with, null for none, and `last`, whether the walk
//     comes to this segment last: it is the sequence's first in time
//   remembered_chunks: how many of the segment's first chunks suffice to forget every gradient from behind them; below
//     0 if it does not forget them. set_tokens(work, start, tokens): has the block work on these tokens
//   Consumer: a lane of a consumer: its warp, warpgroup (0: the first 64 columns) and column; channel_offset: the byte
//     offset in a panel that load_transposed and store_transposed take, for the warp's 16 columns of 32 rows
//   Registers: of each role; its BLOCKS: blocks on a multiprocessor. ALL_THREADS, CONSUMERS: threads of a block, and of
//     the consumers. RingPosition: the stage, and the parity to wait for, of a chunk; next() is the next chunk's
//   Panel: 32 rows of 128 bytes, swizzled; a split matrix has rounded numbers in columns 0 to 31 and their errors in 32
//     to 63. left_operand_offset: the lane's byte offset in a panel for ldmatrix and stmatrix of [16 rows, 16 columns];
//     shifted_offset(offset, row, column): the same from this row and column on
//   each_transposed: calls f(number, its address in memory) for this lane's numbers of a state; tensor_store(map, box,
//     channel, column, ...): starts copying a box to memory and closes a group for tensor_store_wait
//   mn_major_tile, stage_descriptor, descriptor_offset: wgmma's descriptors of tiles; in.Z[p]: channels 64 p and on
//   start_state_product: S^T times rows [32 tokens, channels]; start_transposed_split_product: x times a split matrix;
//     after both the caller calls wgmma_commit. start_state_update: S += x rows, the same rows; it calls wgmma_commit
//   decay_state: S times the chunk's decay
//   Gates: factors of a chunk's tokens; Upcoming: decays and betas of later chunks
//   CHUNK = 32 tokens; first_token(work, 0): of the last chunk. WorkTile::chunk_row: see chunk_copies.cuh
//   make_operands, move_chunks: the work of the operands' warpgroup and of the copying warp; move_chunks stores dv,
//     too, and fences before that

template <typename T> struct Args {
  TensorMap q, k, do_, dv;  // boxes of a chunk's tokens and 64 columns, swizzled
  StridedRows<const T> q_rows, k_rows, do_rows;
  StridedRows<T> dv_rows;
  TensorMap state_gradients;         // boxes of 16 columns of V and 64 channels, swizzled
  StridedRows<const void> g, beta;   // no gate: null
  StridedRows<const float> lengths;  // inverse ones of queries and keys, which are divided by them; or null
  Shape shape;                       // H is the number of value heads
  const float* dht;                  // null: zeros
  float* dh0;                        // null: not wanted
  float* starts;                     // with P > 1: see `shapes`
  i64 P;                             // segments of a sequence; in `shape` segments are sequences
  i64 group;                         // value heads that share a head of queries and keys
  i64 state_k, state_v;              // the states' strides along K and V, in numbers
  i64 wide_gate, wide_beta;          // whether g, and beta, are float32; otherwise they are of type T
  double scale;
};

template <typename Element, int CHANNELS, int COLUMNS, bool OUTPUTS> struct Shared {
  using T = Element;
  static constexpr Pass PASS = OUTPUTS ? BACKWARD_STATES : BACKWARD_SUMMARY;
  static constexpr int BK = CHANNELS, BV = COLUMNS, STAGES = BK + BV == 128 ? 3 : 4;
  Stage<T, BK, BV> stages[STAGES];
  Panel<T> minus_BE[2];  // -B_ij beta_j E_j, [query, key], split: for W; of even and of odd chunks
  alignas(1024) T rounded[CONSUMERS<BV> / 32][BK / 64][16][64];  // dS, a warp's 16 columns, on their way to memory
  Gates gates[STAGES];
  Upcoming upcoming;
  const float* from;                 // the gradient that the walk starts from; null: zeros
  float* to;                         // the memory for the one that it ends with; null: not wanted
  float sums[ALL_THREADS<BV> / 32];  // of each warp's tokens, in remembered_chunks
  MBarrier full[STAGES], values_full[STAGES], decays_ready[STAGES], scores_ready[STAGES], inverse_ready[STAGES],
      operands_ready[STAGES], outputs_ready[STAGES];
};

// A consumer: Y, dv and dS of each chunk. first_column: the block's first of V; all_columns: BV times the blocks of a
// head.
template <class Memory>
__device__ __forceinline__ void consume(Memory& s, const Args<typename Memory::T>& args, const WorkTile& work,
                                        int first_column, int all_columns) {
  using T = typename Memory::T;
  constexpr int BK = Memory::BK;
  constexpr bool OUTPUTS = Memory::PASS == BACKWARD_STATES;
  const Consumer at(first_column);
  const int warp = at.warp, lane = at.lane, left_offset = left_operand_offset(lane);
  float dS[BK / 2] = {};  // columns `at.column` + 8h, channels 8n + 2 (lane % 4) + p at dS[4n + 2h + p]
  if (s.from)
    each_transposed<BK>(dS, s.from, args, args.shape, at.column, [](float& x, const float* from) { x = *from; });
  RingPosition<Memory::STAGES> ring;
#pragma unroll 1
  for (int token = first_token<Memory>(work, 0); token >= 0; token -= CHUNK, ring.next()) {
    auto& in = s.stages[ring.stage];
    const Gates& gates = s.gates[ring.stage];
    u32 rounded_dS[BK / 16][4];
    Operand do_, Y;
    Values Z_dS, from_do;  // from_do: B^T do
    round_state<T, BK>(rounded_dS, dS);
    mbarrier_wait(s.values_full[ring.stage], ring.parity);
    load_transposed(do_, in.values[at.warpgroup], at.channel_offset);
    mbarrier_wait(s.full[ring.stage], ring.parity);
    mbarrier_wait(s.operands_ready[ring.stage], ring.parity);
    const u64 descriptor = stage_descriptor(in);
    wgmma_fence();
    start_state_product<T>(Z_dS, rounded_dS,
                           [&](int panel) { return descriptor + descriptor_offset(in, in.Z[panel]); });
    if constexpr (OUTPUTS) start_transposed_split_product<T>(from_do, do_, descriptor + descriptor_offset(in, in.B));
    wgmma_commit();
    if constexpr (OUTPUTS) {
      if (token != first_token<Memory>(work, 0)) {
        if (lane == 0) tensor_store_wait();
        __syncwarp();  // the previous dS has been read from `rounded`
      }
#pragma unroll
      for (int step = 0; step < BK / 16; ++step)
        stmatrix_x4(at_byte_offset(s.rounded[warp][step / 4], shifted_offset(left_offset, 0, step % 4 * 16)),
                    rounded_dS[step]);
      fence_proxy_async();
      __syncwarp();  // all lanes have written to `rounded`
      if (lane == 0)
#pragma unroll
        for (int panel = 0; panel < BK / 64; ++panel)
          tensor_store(args.state_gradients, s.rounded[warp][panel], 64 * panel,
                       i32(work.chunk_row + token / CHUNK) * all_columns + first_column + 16 * warp, 0, 0);
    }
    decay_state(dS, gates.chunk_decay);
    wgmma_fence();
    const u64 rows = mn_major_tile(in.queries_keys, sizeof in.queries_keys[0]);  // of W, then of keys
    start_state_update<T, BK>(dS, do_, rows);                                    // dS += W^T do
    wgmma_wait<1>();  // Z_dS and from_do are complete; the update may still run
    wgmma_fence_operand(Z_dS), wgmma_fence_operand(rounded_dS);
    if constexpr (OUTPUTS) wgmma_fence_operand(from_do);
    each_two([&](int i, int step, int m) {
      // In this pass key_start_factors have beta: beta_j E_j, divided by |k_j| if normalized.
      const float2 from_start = load_float2(gates.key_start_factors + i / 4 * 8 + 2 * (lane & 3));
      Y[step][m] = pack<T>(-from_start.x * Z_dS[i], -from_start.y * Z_dS[i + 1]);
    });
    wgmma_fence();
    start_state_update<T, BK>(dS, Y, rows + CHUNK * (128 / 16));  // dS += sum_j k_j Y_j: keys are CHUNK rows after W
    if constexpr (OUTPUTS) {
      each_two([&](int i, int, int) {
        const float2 beta = load_float2(gates.beta + i / 4 * 8 + 2 * (lane & 3));
        from_do[i] = beta.x * (Z_dS[i] + from_do[i]), from_do[i + 1] = beta.y * (Z_dS[i + 1] + from_do[i + 1]);
      });
      store_transposed(in.values[at.warpgroup], at.channel_offset, from_do);
    }
    wgmma_wait<0>();
    wgmma_fence_operand(dS);
    mbarrier_arrive(s.outputs_ready[ring.stage]);
  }
  if (s.to) each_transposed<BK>(dS, s.to, args, args.shape, at.column, [](float& x, float* to) { *to = x; });
  if (OUTPUTS && lane == 0) tensor_store_wait();  // the block's shared memory lasts until then
}

template <typename T, int BK, int BV, bool OUTPUTS>
__global__ void __launch_bounds__(ALL_THREADS<BV>,
                                  Registers<OUTPUTS ? BACKWARD_STATES : BACKWARD_SUMMARY, BK, BV>::BLOCKS)
    delta_sm90_scalar_backward_states(const __grid_constant__ Args<T> args) {
  auto& s = *reinterpret_cast<Shared<T, BK, BV, OUTPUTS>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV;
  const int column = blockIdx.x % tiles * BV;
  WorkTile work = work_tile(shape, blockIdx.x / tiles, u32(args.P));
  const auto segment =
      start_of_walk<BACKWARDS>(work, OUTPUTS, shape, args.P, args.dht, args.starts, args.dh0, column, BV);
  if (threadIdx.x == 0) s.from = segment.from, s.to = segment.to;  // for consumers, behind the barrier of run_roles
  if constexpr (!OUTPUTS) {
    if (segment.last) return;  // no segment before it in time needs the result
    const int chunks = remembered_chunks<BACKWARDS>(s, args, work);
    if (chunks >= 0) {
      if (threadIdx.x == 0) s.from = nullptr;
      set_tokens(work, work.start, min(work.tokens, chunks * CHUNK));
    }
  }
  run_roles(
      s, args, work, [&] { consume(s, args, work, column, tiles * BV); }, [&] { make_operands(s, work.tokens); },
      [&] {
        move_chunks(
            s, args, work, [&](auto f, auto& do_) { f(do_, args.do_, args.do_rows, shape.V, column); },
            [&](auto f, auto& dv) { f(dv, args.dv, args.dv_rows, shape.V, column); });
      });
}
