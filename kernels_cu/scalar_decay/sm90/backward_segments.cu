// what      Backward on Hopper with one gate per token and head, for sequences cut into segments: of each segment the
//           state S after it and, in the other direction, the gradient dS of the state before it.
// math      per chunk of 32 tokens, E_i the decay from its start through token i, L_j from after token j to its end:
//           S <- E_32 S + sum_j L_j k_j v_j^T;  backwards dS <- E_32 dS + scale sum_i E_i q_i do_i^T
// shapes    q k [B, H, T, K], v do [B, H, T, V], g [B, H, T] float32 of any strides; of N segments states [2, N, H, K,
//           V] float32, the S and, second, the dS with which each starts, and decays [2, N, H, K]. A sequence's first
//           segment in a direction starts with initial or dht [N / P, H, K, V], others from zero. A segment's result is
//           stored as the state of the next one in its direction, and scan_both_ways.cu joins them; the last one has
//           none. Below, S is dS in blocks that go backwards
// grid      segments.py launches a block for every (direction, segment, head, 64 channels), directions slowest. A block
//           has 64 channels only, because sequences are cut where heads are few: blocks with all channels would then
//           leave half of the card idle. Its threads: a warpgroup (consumers), and a warp that copies chunks and
//           computes their decays
// smem      Stage: a chunk's tokens
// barriers  full: the tokens have been copied, and the decays are stored; done: they have been read
// numerics  products of bfloat16 numbers, summed in float32; a decayed key or query is the sum of two bfloat16 numbers
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    sm_90a; bfloat16; K and V multiples of 8, V <= BV; BV of 64, 128; rows start on 16 bytes
//
// From warpgroup.cuh and its includes
//   WorkTile            what a block computes, here a segment: its `tokens`, its number `sequence`; work_tile makes it
//                       of the number of segment and head
//   Operand             a lane's keys of a chunk, [channel, token], two bfloat16 numbers a register: x[s][m], also
//                       written u32[2][4]
//   each_two            calls f(index, s, m) for each of these registers: of 8n + 2t and the next token, t = lane % 4,
//                       and channel h of the lane's two, with index = 4n + 2h
//   load_token_factors  loads a number for each of the lane's tokens, of 8n + 2t + p at 2n + p
//   gate_of             a token's log gate; each_pair_of_state: calls f for each two neighbours of S and their address
//   load_and_store_initial_state, state_index_of, is_last_segment (backward_tokens.cuh): of a sequence's first segment
//                       in a direction, its state; the index of a segment's state; whether it is the last one
//   low, high           the two numbers of a register; remainder_of: their rounding errors
//   wgmma_fence_operand keeps uses of a product's result, and of its operands' registers, behind the wait
constexpr int CHUNK = 32, CHANNELS = 64;  // tokens of a chunk, which the include needs; channels of a block
#include "backward_tokens.cuh"
static_assert(CHUNK == 32, "a lane of the copying warp has the decay of a token");

struct Args {
  TensorMap q, k, v, do_;  // boxes of a chunk's tokens and 128 bytes, swizzled
  StridedRows<const bf16> q_rows, k_rows, v_rows, do_rows;
  StridedRows<const float> g;
  const float *initial, *dht;  // null: zero
  float *states, *decays;
  Shape shape;
  double scale;
  i64 P;  // segments a sequence
};

template <int BV> struct alignas(1024) Stage {
  Tile<bf16, CHANNELS> keys;  // k, or q for dS
  Tile<bf16, BV> values;      // v, or do for dS
  float decays[CHUNK];        // L, or scale E for dS
  float chunk_decay;          // E_32
};

constexpr int STAGES = 4, CONSUMERS = 128;  // chunks in shared memory at a time; threads of the consumer warpgroup
template <int BV> struct Shared {
  static_assert(BV == 64 || BV == 128);
  Stage<BV> stages[STAGES];
  MBarrier full[STAGES], done[STAGES];
};

// Copies the segment's chunks to their stages, and stores their decays; for one warp.
template <int BV>
__device__ __forceinline__ void copy_chunks(Shared<BV>& s, const Args& args, const WorkTile& work, int first_channel,
                                            bool backwards) {
  const i64 K = args.shape.K, V = args.shape.V;
  const int last = (work.tokens - 1) / CHUNK, lane = threadIdx.x & 31;
  const auto first_token_of = [&](int iteration) { return (backwards ? last - iteration : iteration) * CHUNK; };
  float gates[STAGES];  // loaded STAGES chunks ahead: a load takes longer than a chunk
#pragma unroll
  for (int iteration = 0; iteration < STAGES; ++iteration)
    gates[iteration] = gate_of(args.g, work, first_token_of(iteration) + lane);
#pragma unroll 1
  for (int first_of_round = 0; first_of_round * CHUNK < work.tokens; first_of_round += STAGES)
#pragma unroll
    for (int stage = 0; stage < STAGES; ++stage) {
      const int iteration = first_of_round + stage;
      if (iteration * CHUNK >= work.tokens) break;
      Stage<BV>& in = s.stages[stage];
      if (first_of_round) {
        mbarrier_wait(s.done[stage], first_of_round / STAGES - 1 & 1);
        fence_proxy_async();  // orders consumers' reads before the copies that overwrite the stage
      }
      // For each f(tile, tensor map, rows, width, first column), copies the chunk by the tensor map, or from `rows`
      // where a box would reach into another sequence or tokens have a negative stride; all lanes arrive.
      fetch_chunk(s.full[stage], work, first_token_of(iteration), [&](auto f) {
        f(in.keys, backwards ? args.q : args.k, backwards ? args.q_rows : args.k_rows, K, first_channel);
        f(in.values, backwards ? args.do_ : args.v, backwards ? args.do_rows : args.v_rows, V);
      });
      __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together: sums are shuffled next
      // The logarithm to base 2 of the decay over the gates up to this token's (backwards), or from this token's on.
      float sum = LOG2E * gates[stage];
#pragma unroll
      for (int distance = 1; distance < CHUNK; distance *= 2) {
        const int other = backwards ? lane - distance : lane + distance;
        const float other_sum = __shfl_sync(0xffffffffu, sum, other & 31);
        if (other >= 0 && other < CHUNK) sum += other_sum;
      }
      const float later = __shfl_sync(0xffffffffu, sum, lane + 1 & 31);
      in.decays[lane] = backwards ? float(args.scale) * exp2_approx(sum) : lane == CHUNK - 1 ? 1.f : exp2_approx(later);
      if (lane == (backwards ? CHUNK - 1 : 0)) in.chunk_decay = exp2_approx(sum);
      mbarrier_arrive(s.full[stage]);
      gates[stage] = gate_of(args.g, work, first_token_of(iteration + STAGES) + lane);
    }
}

// Multiplies x by decays of tokens; the product is x + remainder, two bfloat16 numbers.
__device__ __forceinline__ void decay_tokens(Operand& x, Operand& remainder, const float (&decays)[8]) {
  each_two([&](int index, int s, int m) {
    const float first = low(x[s][m]) * decays[index / 4 * 2], second = high(x[s][m]) * decays[index / 4 * 2 + 1];
    x[s][m] = pack<bf16>(first, second);
    remainder[s][m] = remainder_of(x[s][m], first, second);
  });
}

// Computes S, or dS, chunk by chunk, with 16 channels of it in each warp's registers.
template <int BV>
__device__ __forceinline__ void consume(Shared<BV>& s, const Args& args, const WorkTile& work, int first_channel,
                                        u32 tiles, bool backwards) {
  const int lane = threadIdx.x & 31, channel = first_channel + threadIdx.x / 32 * 16 + (lane >> 2);
  float S[BV / 2] = {}, total_decay = 1.f;
  load_and_store_initial_state<BV>(S, backwards ? args.dht : args.initial, args.states, args.shape, work, args.P,
                                   backwards, channel, tiles);
  // Waits for a chunk, and sets keys + remainder to its keys times their decays, for this warp's 16 channels.
  const auto load = [&](u32(&keys)[2][4], u32(&remainder)[2][4], int iteration) {
    Stage<BV>& in = s.stages[iteration % STAGES];
    mbarrier_wait(s.full[iteration % STAGES], iteration / STAGES & 1);
    float decays[8];
    load_channels(keys, in.keys[0]);
    load_token_factors(decays, in.decays);
    decay_tokens(keys, remainder, decays);
  };
  // Decayed keys, of this chunk and of the next one.
  u32 keys[2][4], remainder[2][4], next_keys[2][4], next_remainder[2][4];
  if (work.tokens > 0) load(keys, remainder, 0);
#pragma unroll 1
  for (int iteration = 0; iteration * CHUNK < work.tokens; ++iteration) {
    Stage<BV>& in = s.stages[iteration % STAGES];
    const float decay = in.chunk_decay;
    total_decay *= decay;
#pragma unroll
    for (int i = 0; i < BV / 2; ++i) S[i] *= decay;
    wgmma_fence();
    write_state<BV>(S, keys, in.values);  // starts S[channel, column] += sum over tokens of keys values (warpgroup.cuh)
    write_state<BV>(S, remainder, in.values);
    wgmma_commit();  // one group of both
    if ((iteration + 1) * CHUNK < work.tokens)
      load(next_keys, next_remainder, iteration + 1);  // while tensor cores multiply
    wgmma_wait<0>();
    wgmma_fence_operand(S);
    wgmma_fence_operand(keys), wgmma_fence_operand(remainder);
    mbarrier_arrive(s.done[iteration % STAGES]);  // loads of the stage are complete, too: products have used them
#pragma unroll
    for (int i = 0; i < 8; ++i)
      keys[i / 4][i % 4] = next_keys[i / 4][i % 4], remainder[i / 4][i % 4] = next_remainder[i / 4][i % 4];
  }
  const i64 slot = state_index_of(work, backwards, tiles), K = args.shape.K,
            next = slot + (backwards ? -args.shape.H : args.shape.H);
  each_pair_of_state<BV>(S, args.states + next * K * args.shape.V, args.shape, channel,
                         [](float& x, float& y, float* to) { *reinterpret_cast<float2*>(to) = {x, y}; });
  for (int h = 0; h < 2; ++h)
    if ((lane & 3) == 0 && channel + 8 * h < K) args.decays[slot * K + channel + 8 * h] = total_decay;
}

template <int BV>
__global__ void __launch_bounds__(CONSUMERS + 32, BV == 64 ? 3 : 2)
    scalar_decay_sm90_backward_segments(const __grid_constant__ Args args) {
  Shared<BV>& s = *reinterpret_cast<Shared<BV>*>(dynamic_smem());
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      mbarrier_init(s.full[stage], 2 * 32);  // the tokens, then the decays
      mbarrier_init(s.done[stage], CONSUMERS);
    }
  fence_proxy_async();
  __syncthreads();  // the barriers are initialised, and tensor copies see them
  const bool backwards = blockIdx.x >= gridDim.x / 2;
  const u32 block = blockIdx.x - backwards * (gridDim.x / 2), tiles = u32(args.shape.K + CHANNELS - 1) / CHANNELS;
  const WorkTile work = work_tile(args.shape, block / tiles);
  const int first_channel = block % tiles * CHANNELS;
  if (is_last_segment(work, args.P, backwards)) return;
  if (threadIdx.x >= CONSUMERS) copy_chunks(s, args, work, first_channel, backwards);
  else consume(s, args, work, first_channel, tiles, backwards);
}
