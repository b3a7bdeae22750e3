// what      The roles of warps in Hopper's kernels of the delta rule with one gate per token and head, or none: which
//           tokens a block walks over, a warp that copies their chunks of 32, what consumers share, and `run_roles`,
//           which gives the warps their roles. Consumers: a warpgroup for every 64 columns of V, with their state.
// math      X_j = v_j - key_start_j S^T k_j, of the state S before the chunk; S <- E_32 S + rows^T X, E_32 the decay
//           over the chunk. scalar_stage.cuh has the rest
// shapes    args, for move_chunks: k, k_rows, and but for SUMMARY q, q_rows; shape; group, how many value heads share a
//           head of q and k
// barriers  scalar_stage.cuh; here they are initialised
// limits    sm_90a; bfloat16 or float16
// tests     test_delta_on_hopper, in whose emulator a product is computed only when it is waited for, and whoever waits
//           at an mbarrier goes on as soon as its phase ends: a wait or an arrival in a wrong place changes results.
//           test_compile: no spills, no product that the assembler serialises
#include "delta/sm90/scalar_decays.cuh"
#include "delta/sm90/scalar_inverse.cuh"
#include "delta/sm90/scalar_operands.cuh"
#include "delta/segments.cuh"

// From the includes:
//   Tile<T, BV>: a chunk's rows [32, BV], in panels; WorkTile: the block's sequence, head and tokens
//   fetch_chunk, store_chunk: copy a chunk's rows of several arrays
//   Segment, segment_of: one of P parts of a sequence, and its states in memory (segments.cuh)
//   first_token(work, passed): the first token of a pass's next chunk; Registers: of a thread, by role
//   K_MAJOR: a product sums over a row of the tile, MN_MAJOR: over the rows. wgmma_fence_operand(d): d is not read
//     before
//   Values, Operand: a lane's part of [16 columns, 32 tokens], as sums and as operands; each_two: calls f for their
//     pairs
//   RingPosition: a chunk's stage, and the parity to wait for; registers_up, registers_down: set a warpgroup's
//     registers

// Has a block work on `tokens` tokens from `start` on, numbers that all lanes have. The shuffle tells the compiler so,
// which then needs no register of each lane for them. The previous `start` is whole chunks away.
__device__ __forceinline__ void set_tokens(WorkTile& work, int start, int tokens) {
  work.chunk_row += start / CHUNK - work.start / CHUNK;
  work.start = __shfl_sync(0xffffffffu, start, 0), work.tokens = __shfl_sync(0xffffffffu, tokens, 0);
}

// Has a block walk over the tokens of its segment, or of the whole sequence (is_whole), whose states' columns are
// `columns` from `column` on. work: of the segment, as work_tile returns it. The other arguments, and the result, which
// has the memory of the first and the last state: see segment_of; states [sequences, H, K, V].
template <bool BACKWARDS>
__device__ __forceinline__ Segment<float> start_of_walk(WorkTile& work, bool outputs, const Shape& shape, i64 P,
                                                        const float* given, float* starts, float* final, int column,
                                                        int columns) {
  const i64 state_size = shape.K * shape.V, of_heads = shape.H * state_size;
  const bool whole = outputs && is_whole<BACKWARDS>(shape, u32(P), work.sequence, work.head, starts, column, columns);
  const auto segment =
      segment_of<BACKWARDS, float>(outputs, shape, u32(P), work.sequence, work.head, {given, of_heads, state_size, 0},
                                   starts, {final, of_heads, state_size, 0}, whole);
  set_tokens(work, int(segment.tokens.start), int(segment.tokens.stop - segment.tokens.start));
  return segment;
}

// ---- a warp that copies chunks ------------------------------------------------------------------------------------

// Fills each stage with a chunk's q (but for SUMMARY) and k, then, if has_values, its v or do; before those, stores o
// or dv of the stage's previous chunk, if the pass has outputs. values(f, tile), outputs(f, tile): call f(tile, tensor
// map, rows, width, first column) for the array that the tile is copied from, or to (fetch_chunk).
template <class Memory, class Args, class Inputs, class Outputs>
__device__ __forceinline__ void move_chunks(Memory& s, const Args& args, const WorkTile& work, Inputs values,
                                            Outputs outputs, bool has_values = true) {
  constexpr bool HAS_OUTPUTS = Memory::PASS == FORWARD || Memory::PASS == BACKWARD_STATES;
  WorkTile keys = work;  // its head is that of q and k
  keys.head /= int(args.group);
  RingPosition<Memory::STAGES> ring;
  // With outputs it goes on for STAGES chunks after the last one, to store theirs. fetch_chunk: all lanes arrive at the
  // barrier, whose phase ends when the copies have arrived. store_chunk returns when the shared memory has been read.
#pragma unroll 1
  for (int token = 0; token - HAS_OUTPUTS * Memory::STAGES * CHUNK < work.tokens; token += CHUNK, ring.next()) {
    auto& stage = s.stages[ring.stage];
    const int stored_token = token - Memory::STAGES * CHUNK;
    if (stored_token >= 0) {
      mbarrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
      // Orders the consumers' accesses before the copies from and to the stage. This warp does it as it has the time.
      fence_proxy_async();
    }
    if (token < work.tokens)
      fetch_chunk(s.full[ring.stage], keys, first_token<Memory>(work, token), [&](auto f) {
        for (int panel = 0; panel < Memory::BK / 64; ++panel) {
          // The panel's 64 rows as two tiles: 32 queries, 32 keys.
          auto& q_and_k = *reinterpret_cast<Panel<typename Memory::T>(*)[2][1]>(&stage.queries_keys[panel]);
          if constexpr (Memory::PASS != SUMMARY) f(q_and_k[0], args.q, args.q_rows, args.shape.K, 64 * panel);
          f(q_and_k[1], args.k, args.k_rows, args.shape.K, 64 * panel);
        }
      });
    if constexpr (HAS_OUTPUTS)
      if (stored_token >= 0)
        store_chunk(work, first_token<Memory>(work, stored_token), [&](auto f) { outputs(f, stage.values); });
    if (has_values && token < work.tokens)
      fetch_chunk(s.values_full[ring.stage], work, first_token<Memory>(work, token),
                  [&](auto f) { values(f, stage.values); });
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  }
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// A lane of a consumer. Of its warp's 16 columns it has `column` and the 8th after it; its part of the state is
// transposed in registers (see each_transposed in warpgroup.cuh). first_column: the block's.
struct Consumer {
  int warp, warpgroup, lane, column, channel_offset;

  __device__ __forceinline__ explicit Consumer(int first_column) {
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x & 31;
    column = first_column + 16 * warp + lane / 4, channel_offset = channel_operand_offset(lane, warp % 4);
  }
};

// Rounds this lane's numbers of a transposed state to T: left operands [16 columns of V, 16 channels] each.
template <typename T, int BK>
__device__ __forceinline__ void round_state(u32 (&rounded)[BK / 16][4], const float (&state)[BK / 2]) {
#pragma unroll
  for (int step = 0; step < BK / 16; ++step)
#pragma unroll
    for (int m = 0; m < 4; ++m) rounded[step][m] = pack<T>(state[8 * step + 2 * m], state[8 * step + 2 * m + 1]);
  wgmma_fence_operand(rounded);
}

// Issues y[column of V, row] = S^T x of 2 N rows x, for a state S as round_state leaves it; tile_of(panel): the
// descriptor of the rows' channels from 64 panel on. The caller calls wgmma_commit and waits.
template <typename T, int N, int STEPS, class F>
__device__ __forceinline__ void start_state_product(float (&y)[N], const u32 (&state)[STEPS][4], F tile_of) {
#pragma unroll
  for (int step = 0; step < STEPS; ++step)
    wgmma<T, 2 * N, K_MAJOR>(y, state[step], tile_of(step / 4) + step % 4 * 2, step > 0);
}

// state <- E_32 state: lets it decay over the chunk.
template <int N> __device__ __forceinline__ void decay_state(float (&state)[N], float chunk_decay) {
  if (chunk_decay != 1.f)  // the branch keeps the compiler from moving this after the wait for the products
#pragma unroll
    for (float& value : state) value *= chunk_decay;
}

// X_j = v_j - E_j S^T k_j, rounded to T. S_k: S^T k without E.
template <typename T>
__device__ __forceinline__ void make_X(Operand& X, const Operand& v, const Values& S_k, const Gates& gates, int lane) {
  each_two([&](int i, int step, int m) {
    const float2 from_start = load_float2(gates.key_start_factors + i / 4 * 8 + 2 * (lane & 3)),
                 values = unpack(v[step][m], T{});
    X[step][m] = pack<T>(fmaf(-from_start.x, S_k[i], values.x), fmaf(-from_start.y, S_k[i + 1], values.y));
  });
}

// Issues state += x rows, a sum over 32 tokens, x [columns of V, tokens]; `rows`: the descriptor of rows [32, BK].
template <typename T, int BK>
__device__ __forceinline__ void start_state_update(float (&state)[BK / 2], const Operand& x, u64 rows) {
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step)
    wgmma<T, BK, MN_MAJOR>(state, x[step], rows + step * (16 * 128 / 16), ACCUMULATE);
  wgmma_commit();
}

// ---- the roles of a block -------------------------------------------------------------------------------------------

// Initialises the barriers of stages and of values, then has each warp do its part: consume() by a warpgroup for every
// 64 columns, compute_operands() by a warpgroup, copy_chunks() by a warp. Before the call one thread must have
// initialised the kernel's other barriers.
template <class Memory, class Args, class Consume, class Operands, class Copy>
__device__ __forceinline__ void run_roles(Memory& s, const Args& args, const WorkTile& work, Consume consume,
                                          Operands compute_operands, Copy copy_chunks) {
  using InRole = Registers<Memory::PASS, Memory::BK, Memory::BV>;
  constexpr auto ROLES = InRole::ROLES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < Memory::STAGES; ++stage) {
      mbarrier_init(s.full[stage], 32);  // lanes of the copying warp; below, of those that compute and invert
      mbarrier_init(s.decays_ready[stage], 32), mbarrier_init(s.inverse_ready[stage], 32);
      mbarrier_init(s.scores_ready[stage], OPERAND_THREADS);
      mbarrier_init(s.outputs_ready[stage], Memory::PASS == BACKWARD_TOKENS ? OPERAND_THREADS : CONSUMERS<Memory::BV>);
      mbarrier_init(s.operands_ready[stage], OPERAND_THREADS / 32);  // warps: of each one lane, by warp_arrive
    }
    for (MBarrier& full : s.values_full) mbarrier_init(full, 32);
  }
  fence_proxy_async();
  __syncthreads();  // the barriers are initialised
  if (threadIdx.x < CONSUMERS<Memory::BV>) {
    registers_up<ROLES.consumer>();
    consume();
  } else if (threadIdx.x < CONSUMERS<Memory::BV> + OPERAND_THREADS) {
    if constexpr (ROLES.operands > InRole::AT_FIRST) registers_up<ROLES.operands>();
    else registers_down<ROLES.operands>();
    compute_operands();
  } else {
    registers_down<ROLES.other>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) copy_chunks();
    else if (warp == 1) compute_decays(s, args, work);
    else invert(s, work.tokens, warp - 2);
  }
}
