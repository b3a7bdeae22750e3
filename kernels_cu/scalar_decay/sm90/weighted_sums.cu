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
//           i >= t in it, without the terms of A_ii: weighted_sums_gate_gradient.cuh
// shapes    q k [B, H, T, K], v o [B, H, T, V], g [B, H, T] of any strides, of q, k, v and the partner maybe fewer
//           heads, each of which several heads of o share; initial and final state [N, H, K, V]
//           float32; token_sums [B, H, tiles, T] float32: q_i . dq_i, over each tile of BV columns of dq; dg
//           contiguous: [B, H, T] of g's type if dk has one tile, else [B, H, T, tiles] float32, from each block the
//           part of its BV columns of dk, for the host to add
// grid      scalar_decay.py and segments.py launch a block for every (sequence, head, BV columns of V, WeightedSum),
//           sequence slowest: a warpgroup for every 64 columns, which holds their state transposed in registers; a
//           warpgroup that computes A; a warp that moves chunks, one that sums gates, one that sums dg. GatedKeys with
//           BK = BV = 128: the blocks of dk and dv form a cluster and load their chunks at about the same time, so that
//           the second one finds them in L2
// passes    Pass          SUMS  constants that are true                        results
//           Whole         1     HAS_OUTPUTS, SPLITS_STATE                      o, final states
//           Summary       1     none                                           final states, decays
//           BothSummaries 2     HANDS_STATES_ON                                the same, forward and backward in time
//           Gradients     3     HAS_OUTPUTS                                    dq, dk, dv
//           Queries       1     HAS_OUTPUTS                                    dq
//           Keys          2     HAS_OUTPUTS, ALL_BACKWARD                      dk, dv
//           GatedQueries  1     HAS_OUTPUTS, SERVES_GATE_GRADIENT              dq, token_sums, stretch_states
//           GatedKeys     2     the same, ALL_BACKWARD, WRITES_GATE_GRADIENT   dk, dv, dg; reads the last two
//           SUMS: WeightedSums of a launch. weighted_sums_storage.cuh has these constants. stretch_states: of each
//           stretch, S before its last chunk. Summaries take each segment of a sequence for a sequence, and start it
//           from 0. Those of Summary are joined by scan_segments.cu, those of BothSummaries by scan_both_ways.cu. The
//           latter are for gradients: one sum is S, of k and v, the other dS, of q and do in their places. A segment
//           hands its state on: `final` [N, H, K, V] of a sum has the state with which each of the N segments starts in
//           the sum's direction, of a sequence's first one `initial`, or 0, of the others the result of the one before
// smem      weighted_sums_storage.cuh. Stage: a chunk's q, k, v, partner and A; Gates: its decays
// barriers  mbarriers of a stage. full: the chunk's tokens and gates are there; scores: A is stored; done: consumers
//           have read the inputs, and stored o over v and partner . o over the partner; summed: the warp that sums dg
//           has read partner . o
// numerics  products of bfloat16 numbers in float32. S is multiplied as the sum of two bfloat16 numbers in Whole,
//           rounded to one in gradients; A and the decayed v are rounded to one. The exponent of each decay is a sum of
//           gates, never a difference of sums, so no gate is too strong
// source    Yang et al., 2024, sections 4 and 4.4; Sun et al., 2023, "Retentive Network", section 2.2
// limits    sm_90a; bfloat16; of each sum K <= BK, and K and V multiples of 8; BK and BV 64 or 128; rows start on 16
//           bytes
// tests     test_family_kernels; test_distributed_halves (Summary); test_compile: no spills, no product that the
//           assembler serialises, no write to a running product's operand
//
// From warpgroup.cuh and its includes
//   WorkTile            a block's head and sequence: `sequence`, `batch`, `head`; `start`, `tokens`: of the sequence;
//                       `sequence_head`: sequence * heads + head
//   Values o            accumulators of an output: o[4n + 2h + p] is column lane / 4 + 8h of the warp's 16, token 8n +
//                       2 (lane % 4) + p. each_two: calls f(i, ...) for each two tokens o[i], o[i + 1]
//   Operand             the same columns and tokens as a left operand, two bfloat16 numbers a register
//   load_channels, store_values: move a warp's 16 columns of a panel
//   each_transposed(S, state, strides, size, ...): calls f for the lane's numbers of S and their addresses in `state`
//   wgmma_fence_operand keeps uses of a product's result behind the wait
//   read_state, write_state: start the product S tokens^T, then decay S; start S += x tokens. add_pair_products: starts
//                       the product with A [query, key]
//   load_token_factors, decay_tokens: factors of a lane's tokens; tokens times factors
// From weighted_sums_storage.cuh
//   first_token_of      the first token of an iteration's chunk; ends_stretch: whether a chunk is its stretch's last
//   IN_CLUSTER          whether the blocks of dk and dv form a cluster
//   block_serves_gate_gradient(): SERVES_GATE_GRADIENT, and this block computes dq or dk
//   Registers           registers by role; TWO_BLOCKS: whether a multiprocessor holds two blocks
// From weighted_sums_scores.cuh: sum_gates_of_chunks, compute_scores, the work of two roles
// From weighted_sums_gate_gradient.cuh: sum_queries and sum_gradients, the work of the warp that sums dg; of consumers:
//   stretch_state       the address of a stretch's stored state, of STATE_PIECES uint4s, TILE_PIECES for 16 columns;
//                       StretchState: a lane's part of it
//   each_operand, each_token_pair: call f for bfloat16 numbers of S, and of two tokens of a panel
//   dot_with_state, store_dot_products, add_self_scores: <S, stored state>; partner . o; o += A_ii v_i
// From ptx.cuh: opaque and hide_origin keep the compiler from holding in registers what is computed from their argument
#include "scalar_decay/sm90/weighted_sums_gate_gradient.cuh"
#include "scalar_decay/sm90/weighted_sums_scores.cuh"

// ---- a warp that moves chunks -------------------------------------------------------------------------------------

// Copies chunks to the stages STAGES iterations ahead, and results back to memory. fetch_chunk and store_chunk
// (chunk_copies.cuh) copy rows of a chunk for each f(tile, tensor map, rows, width, first column, whether results are
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
      if constexpr (Pass::HAS_OUTPUTS) f(stage.q, sum.q, sum.q_rows, sum.K, 0, sum.q_group);
      f(stage.k, sum.k, sum.k_rows, sum.K, 0, sum.k_group);
      f(stage.v, sum.v, sum.v_rows, sum.V, column, sum.v_group);
      if constexpr (Pass::SERVES_GATE_GRADIENT)
        if (block_serves_gate_gradient<Pass>())
          f(stage.partner, sum.partner, sum.partner_rows, sum.V, column, sum.partner_group);
    });
    __syncwarp();  // the copying lanes rejoin the warp
  }
}

// ---- warpgroups with 64 columns of V each --------------------------------------------------------------------------

// Sets S to the state before the first chunk.
template <class Pass, typename G, int BK>
__device__ __forceinline__ void load_initial_state(float (&S)[BK / 2], const Args<Pass, G>& args,
                                                   const WeightedSum& sum, const WorkTile& work, int column,
                                                   bool backwards) {
  constexpr bool HANDS_ON = HANDS_STATES_ON<Pass>;
  if (HANDS_ON && step_of(work, args, backwards)) return;  // joined later to the state after the segment before
  const i64 size = sum.K * sum.V,
            sequence_head = HANDS_ON ? work.sequence / args.segments * args.shape.H + work.head : work.sequence_head;
  if (sum.initial)
    each_transposed<BK>(S, sum.initial + sequence_head * size, sum, sum, column,
                        [](float& value, const float* from) { value = *from; });
  if (HANDS_ON)
    each_transposed<BK>(S, sum.final + work.sequence_head * size, sum, sum, column,
                        [](float& value, float* to) { *to = value; });
}

// Stores the state after the last chunk, if it is wanted, and without outputs the decay over all chunks.
template <class Pass, typename G, int BK, int BV>
__device__ __forceinline__ void store_final_state(float (&S)[BK / 2], float total_decay, const Args<Pass, G>& args,
                                                  const WeightedSum& sum, const WorkTile& work, int tile_column,
                                                  int column, bool backwards) {
  // Outputs of several sums: dk and dv. The caller's sequences are cut into args.segments segments each, 1 if they are
  // not cut. Only the first segment's last dS is stored, as the gradient of the initial state.
  constexpr bool HANDS_ON = HANDS_STATES_ON<Pass>, FIRST_SEGMENT_ONLY = Pass::HAS_OUTPUTS && Pass::SUMS > 1;
  const i64 next = backwards ? -args.shape.H : args.shape.H;  // from a segment's head to that of the next segment
  if (sum.final && !(FIRST_SEGMENT_ONLY && work.sequence % args.segments)) {
    const i64 sequence_head = FIRST_SEGMENT_ONLY ? work.sequence / args.segments * args.shape.H + work.head
                                                 : work.sequence_head + (HANDS_ON ? next : 0);
    each_transposed<BK>(S, sum.final + sequence_head * sum.K * sum.V, sum, sum, column,
                        [](float& value, float* to) { *to = value; });
  }
  if constexpr (!Pass::HAS_OUTPUTS) {
    const Shape& shape = args.shape;
    const i64 row = HANDS_ON ? work.sequence_head + (backwards ? shape.B * shape.row_sequences * shape.H : 0)
                             : 2 * work.sequence_head;
    for (i64 c = threadIdx.x; tile_column == 0 && c < sum.K; c += CONSUMERS<BV>) {
      float* const to = args.decays + row * sum.K + c;
      to[0] = total_decay;
      if (!HANDS_ON) to[sum.K] = 1.f;  // in scan_segments.cu a channel's decay is the product of two rows
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
  float S[BK / 2] = {}, total_decay = 1.f;
  load_initial_state<Pass, G, BK>(S, args, sum, work, column, backwards);

  // The address of this lane's part of the stored state of a token's stretch; null if its warp's columns are beyond V.
  const auto state_address = [&](int token) {
    const int tile = (tile_column + opaque(threadIdx.x) / 2) / 16;  // a warp has 16 columns
    return 16 * tile < sum.V ? stretch_state<BK>(args, work, token) + tile * TILE_PIECES<BK> + (threadIdx.x & 31)
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
    for (int step = 0; step < BK / 16; ++step) to[step] = next_state[32 * step];
    next_state -= STATE_PIECES<BK>;
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
          each_operand<BK>(S, [&](int step, const u32(&x)[4]) { to[32 * step] = {x[0], x[1], x[2], x[3]}; });
      }
    }
    mbarrier_wait(s.full[iteration % STAGES], phase);
    const float chunk_decay = gates.chunk_decay;
    Values o;
    if constexpr (Pass::HAS_OUTPUTS) {
      // o = S q of the state before the chunk, then S *= chunk_decay. CONVERTED times 16 channels of S are rounded at a
      // time. SPLITS_STATE: S is multiplied as the sum of two numbers.
      read_state<BK, CONVERTED, Pass::SPLITS_STATE>(o, S, chunk_decay, in.q);
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
      add_pair_products(o, v, in.A);  // starts o += v A^T
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
  store_final_state<Pass, G, BK, BV>(S, total_decay, args, sum, work, tile_column, column, backwards);
}

// Initialises the barriers, and A to zeros; all threads call this, and of a cluster both blocks.
template <class Pass, int BK, int BV> __device__ __forceinline__ void initialise(Shared<Pass, BK, BV>& s) {
  constexpr int STAGES = Shared<Pass, BK, BV>::STAGES;
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
}

// Pass: see the head; G: the type of g; BK and BV: K rounded up to 64 or 128, and the columns of V of a block.
template <class Pass, typename G, int BK, int BV>
__global__ void __cluster_dims__(IN_CLUSTER<Pass, BK, BV> ? 2 : 1)
    __launch_bounds__(ALL_THREADS<BV>, Registers<BK, BV>::BLOCKS)
        scalar_decay_sm90_weighted_sums(const __grid_constant__ Args<Pass, G> args) {
  auto& s = *reinterpret_cast<Shared<Pass, BK, BV>*>(dynamic_smem());
  const WeightedSum& sum = args.sums[blockIdx.x % Pass::SUMS];
  // Sums of one launch may differ in V: all have as many blocks as the widest, and blocks without columns return.
  const i64 widest = Pass::HAS_OUTPUTS && Pass::SUMS > 1 && sum.K > sum.V ? sum.K : sum.V;
  // GatedKeys takes blocks in reverse: the heads that GatedQueries read last are still in L2.
  const u32 tiles = tiles_of(widest, BV),
            reversed = WRITES_GATE_GRADIENT<Pass> ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
  const u32 block = reversed / Pass::SUMS;
  const WorkTile work = work_tile(args.shape, block / tiles);
  const int column = block % tiles * BV;
  const bool backwards = ALL_BACKWARD<Pass> || SOME_BACKWARD<Pass> && sum.backwards;
  // Summaries: a sequence of the caller is cut into args.segments segments. Scans read the states of the first
  // args.computed segments of each; the others are not computed. Of a cluster no block may return here: BV = 128
  // columns are all, so that none has a column beyond V.
  if (column >= sum.V || !Pass::HAS_OUTPUTS && step_of(work, args, backwards) >= args.computed) return;
  // A sequence without tokens has no outputs; its last state, if it is wanted, is that of the launch's last sum. The
  // blocks of a cluster have the same sequence.
  if (Pass::HAS_OUTPUTS && !work.tokens && !args.sums[Pass::SUMS - 1].final) return;
  initialise(s);
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
