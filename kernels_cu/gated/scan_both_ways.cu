// what      Joins the segments of sequences for the backward passes: the state at each segment's start, and the
//           gradient of the state at each segment's end, from the segments' summaries: what each gives if it starts
//           from zero. The first two segments of either direction are complete already.
// math      of segments numbered from 0 in the direction, S_p the state or gradient with which segment p starts:
//           S_p = diag(decay_{p-1}) S_{p-1} + summary_{p-1}
// shapes    states [2, N, P, H, K, V] float32, first of S, then of the gradients, P in order of time: on entry S_0 and
//           S_1 at segments 0 and 1 of the direction, summary_{p-1} at segment p >= 2; on exit S_p.
//           decays [2, N, P, H, ceil(V / BV), K] float32: decay_p of BV columns at segment p. If columns of V have
//           gates, too: column_decays [2, N, P, H, V]; then both are logarithms, and decay_p is exp of their sum
// grid      a block for every (direction, sequence, head, TILE numbers of K x V), directions slowest; 256 threads, each
//           with COLUMNS of them. Of a small state the threads left over make groups, as in scan_segments.cu
// numerics  float32. 0 times an infinite decay, of gates above 0, counts as 0
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, sequentially
// limits    V and BV multiples of 4; P >= 2
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes: decay_of(g): e^g, 0 of -inf. dynamic_smem(): the block's shared memory

constexpr int AHEAD = 8;  // segments whose loads are issued together, since a load has a long latency
constexpr int COLUMNS = 4, TILE = 256 * COLUMNS;  // neighbouring numbers of a state: of a thread, and of a block

struct Args {
  float* states;
  const float *decays, *column_decays;  // column_decays null: ones
  i64 N, P, H, K, V, BV;
  i64 only_backwards;  // whether only the gradients are computed, as the states are known
};

// What the thread's share of the segments leaves from a state of zero, and the product of their decays.
struct Shared {
  float4 states[256], decays[256];
};

// The state behind a segment: S, decayed, and the segment's summary.
__device__ __forceinline__ float joined(float S, float decay, float summary) {
  return S == 0.f ? summary : fmaf(decay, S, summary);
}
__device__ __forceinline__ float4 joined(float4 S, float4 decay, float4 summary) {
  return {joined(S.x, decay.x, summary.x), joined(S.y, decay.y, summary.y), joined(S.z, decay.z, summary.z),
          joined(S.w, decay.w, summary.w)};
}

// GROUPED: whether the block's threads make groups, of a state for which 128 threads or fewer suffice.
template <bool GROUPED> __global__ void __launch_bounds__(256) gated_scan_both_ways(const Args args) {
  auto& s = *reinterpret_cast<Shared*>(dynamic_smem());
  const u32 size = u32(args.K * args.V), tiles = (size + TILE - 1) / TILE, H = u32(args.H), heads = u32(args.N) * H;
  const int P = int(args.P);
  const u32 threads = GROUPED ? size / COLUMNS : 256;  // of a group
  const int groups = GROUPED ? 256 / threads : 1, group = GROUPED ? threadIdx.x / threads : 0;
  // The thread's first number. 32 bits: 64-bit divisions would take longer than all else here.
  const u32 index = blockIdx.x % tiles * TILE + (threadIdx.x - group * threads) * COLUMNS;
  const u32 head = blockIdx.x / tiles % heads, n = head / H, h = head % H;
  const bool backwards = blockIdx.x / tiles >= heads;
  const u32 V = u32(args.V), BV = u32(args.BV), channel = index / V, column = index % V;
  if (backwards < args.only_backwards) return;
  const bool exists = index < size && group < groups;
  // The index [direction, n, segment, h] of the direction's first segment, and the distance to the next one's.
  const i64 first_segment = ((backwards * args.N + n) * P + (backwards ? P - 1 : 0)) * H + h,
            next = backwards ? -i64(H) : i64(H), blocks = (V + BV - 1) / BV;  // blocks: of BV columns
  // The thread's four numbers of the state of the direction's segment number `step`, and their decay over it.
  float* const states = args.states + first_segment * size + index;
  const float* const decays = args.decays + (first_segment * blocks + column / BV) * args.K + channel;
  const float* const column_decays = args.column_decays ? args.column_decays + first_segment * V + column : nullptr;
  const i64 next_state = next * size, next_decay = next * blocks * args.K, next_columns = next * V;
  const auto state = [&](int step) -> float4& { return *reinterpret_cast<float4*>(states + step * next_state); };
  const auto decay = [&](int step) { return decays[step * next_decay]; };
  // The group's segments, of those from number 2 on.
  const int share = (P - 2 + groups - 1) / groups, start = min(2 + group * share, P), stop = min(start + share, P);
  // Joins the summaries of the group's segments to S, which it stores if `stores`; `total` becomes the product of their
  // decays.
  const auto join = [&](float4& S, float4& total, bool stores) {
    for (int first = start; first < stop; first += AHEAD) {
      float4 summaries[AHEAD], of_columns[AHEAD];
      float summary_decays[AHEAD];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + i < stop) {
          summaries[i] = state(first + i), summary_decays[i] = decay(first + i - 1);
          if (column_decays)
            of_columns[i] = *reinterpret_cast<const float4*>(column_decays + (first + i - 1) * next_columns);
        }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + i < stop) {
          const float nats = summary_decays[i];  // the decay itself unless columns have gates
          const float4& x = of_columns[i];
          const float4 decays_of_numbers = column_decays ? float4{decay_of(nats + x.x), decay_of(nats + x.y),
                                                                  decay_of(nats + x.z), decay_of(nats + x.w)}
                                                         : float4{nats, nats, nats, nats};
          S = joined(S, decays_of_numbers, summaries[i]), total = joined(total, decays_of_numbers, float4{});
          if (stores) state(first + i) = S;
        }
    }
  };
  float4 S = {}, total = {1.f, 1.f, 1.f, 1.f};
  if constexpr (GROUPED) {
    if (exists) join(S, total, false);
    s.states[threadIdx.x] = S, s.decays[threadIdx.x] = total;
    __syncthreads();
  }
  if (!exists) return;
  // The state before the group's first segment: S_1, carried over the segments of all earlier groups.
  S = state(1);
  for (u32 earlier = threadIdx.x % threads; GROUPED && earlier + threads <= threadIdx.x; earlier += threads)
    S = joined(S, s.decays[earlier], s.states[earlier]);
  join(S, total, true);
}
