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
//           with COLUMNS of them
// numerics  float32. 0 times an infinite decay, of gates above 0, counts as 0
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, sequentially
// limits    V and BV multiples of 4
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int AHEAD = 8;  // segments whose loads are issued together, since a load has a long latency
constexpr int COLUMNS = 4, TILE = 256 * COLUMNS;  // neighbouring numbers of a state: of a thread, and of a block

struct Args {
  float* states;
  const float *decays, *column_decays;  // column_decays null: ones
  i64 N, P, H, K, V, BV;
  i64 only_backwards;  // whether only the gradients are computed, as the states are known
};

__global__ void __launch_bounds__(256) gated_scan_both_ways(const Args args) {
  const u32 size = u32(args.K * args.V), tiles = (size + TILE - 1) / TILE, H = u32(args.H), heads = u32(args.N) * H;
  // The thread's first number. 32 bits: 64-bit divisions would take longer than all else here.
  const u32 index = blockIdx.x % tiles * TILE + threadIdx.x * COLUMNS;
  const u32 head = blockIdx.x / tiles % heads, n = head / H, h = head % H;
  const bool backwards = blockIdx.x / tiles >= heads;
  const u32 V = u32(args.V), BV = u32(args.BV), channel = index / V, column = index % V;
  const int P = int(args.P);
  if (index >= size || backwards < args.only_backwards) return;
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
  float4 S = state(1);
  for (int first = 2; first < P; first += AHEAD) {
    float4 summaries[AHEAD], of_columns[AHEAD];
    float summary_decays[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < P) {
        summaries[i] = state(first + i), summary_decays[i] = decay(first + i - 1);
        if (column_decays)
          of_columns[i] = *reinterpret_cast<const float4*>(column_decays + (first + i - 1) * next_columns);
      }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i)
      if (first + i < P) {
        const float4 &x = summaries[i], &of_column = of_columns[i];
        const auto join = [&](float S, float summary, float of_column) {
          const float decay = column_decays ? decay_of(summary_decays[i] + of_column) : summary_decays[i];
          return S == 0.f ? summary : fmaf(decay, S, summary);
        };
        S = {join(S.x, x.x, of_column.x), join(S.y, x.y, of_column.y), join(S.z, x.z, of_column.z),
             join(S.w, x.w, of_column.w)};
        state(first + i) = S;
      }
  }
}
