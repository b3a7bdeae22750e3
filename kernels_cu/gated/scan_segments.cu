// what      Joins the P segments of a sequence, each of R parts: the state at the start of each segment, from the
//           summaries of all parts: the state that a part's tokens leave if it starts from zero, and their decay.
// math      S_0 = initial;  S_{i+1} = diag(decay_i) S_i + states_i for part i;  starts_p = S_{R p};  final = S_{P R}
// shapes    float32. states [N, P, R, H, K, V]; decays [N, P, R, H, ceil(V / BV), 2, K]: the product of both rows is
//           decay_i of BV columns. If columns of V have gates, too: column_decays [N, P, R, H, V]; then both are
//           logarithms, and decay_i is exp of the sum of both rows and of the column's. starts [N, P, H, K, V];
//           initial, final [N, H, K, V]
// grid      a block for every (sequence, head, 256 WIDTH values of K x V), sequence slowest; a thread has WIDTH values.
//           Of a small state the threads left over make groups: each joins a share of many parts from zero, then, once
//           all have, again from the state that the groups before it leave
// numerics  float32. If `final` is null, the summaries of the last segment are not read
// source    Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, here one part after the other
// limits    WIDTH of 1, or of 4 if V and BV are multiples of 4
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes: decay_of(g): e^g, 0 of -inf. dynamic_smem(): the block's shared memory

constexpr int AHEAD = 8;  // parts whose summaries are loaded at once, so that their latencies overlap

struct Args {
  const float *states, *decays, *column_decays, *initial;  // column_decays null: ones; initial null: zeros
  float *starts, *final;                                   // final null: not computed
  i64 P, R, H, K, V, BV;
};

// The state behind a part: S, decayed, and what the part's tokens leave. A state of 0 stays 0, also if gates above 0
// make the decay infinite.
__device__ __forceinline__ float joined(float S, float decay, float state) {
  return S == 0.f ? state : fmaf(decay, S, state);
}

// A thread's WIDTH neighbouring columns of one channel of a state, loaded at once.
template <int WIDTH> struct alignas(4 * WIDTH) Values {
  float x[WIDTH];
};

// What the thread's share of the parts leaves from a state of zero, and the product of their decays.
template <int WIDTH> struct Shared {
  Values<WIDTH> states[256], decays[256];
};

// GROUPED: whether the block's threads make groups, of a state for which 128 threads or fewer suffice.
template <int WIDTH, bool GROUPED> __global__ void __launch_bounds__(256) gated_scan_segments(const Args args) {
  constexpr u32 TILE = 256 * WIDTH;
  auto& s = *reinterpret_cast<Shared<WIDTH>*>(dynamic_smem());
  const u32 size = u32(args.K * args.V), tiles = (size + TILE - 1) / TILE, H = u32(args.H),
            sequence_head = blockIdx.x / tiles;
  // segments: how many are joined. Without `final` the last one is not, as no segment starts from what it leaves.
  const int P = int(args.P), R = int(args.R), segments = args.final ? P : P - 1;
  const u32 threads = GROUPED ? (size + WIDTH - 1) / WIDTH : 256;  // of a group
  const int groups = GROUPED ? 256 / threads : 1, group = GROUPED ? threadIdx.x / threads : 0;
  // The thread's first number of the state [K, V]. 32 bits: 64-bit divisions would take longer than all else here.
  const u32 index = blockIdx.x % tiles * TILE + (threadIdx.x - group * threads) * WIDTH;
  const u32 V = u32(args.V), BV = u32(args.BV), channel = index / V, column = index % V;
  const i64 h = sequence_head % H, n = sequence_head / H, blocks = (V + BV - 1) / BV;  // blocks: of BV columns
  const bool exists = index < size && group < groups;
  const int share = (segments + groups - 1) / groups;  // segments of a group
  const int first_segment = min(group * share, segments), last_segment = min(first_segment + share, segments);
  // Joins the parts of the group's segments to S; `total` becomes the product of their decays, and each segment's
  // start is stored if `stores`.
  const auto join = [&](Values<WIDTH>& S, Values<WIDTH>& total, bool stores) {
    const i64 first_part = (n * P + first_segment) * R;
    const float* state = args.states + (first_part * args.H + h) * size + index;
    const float* decays = args.decays + ((first_part * args.H + h) * blocks + column / BV) * 2 * args.K + channel;
    const float* column_decays =
        args.column_decays ? args.column_decays + (first_part * args.H + h) * args.V + column : nullptr;
    float* start = args.starts + ((n * P + first_segment) * args.H + h) * size + index;
    const int parts = (last_segment - first_segment) * R;
    int part_in_segment = 0;  // the number of the next part in its segment
    for (int first = 0; first < parts; first += AHEAD) {
      // All are asked for before one is used: a thread waits where it uses a number that has not come.
      Values<WIDTH> states[AHEAD], of_columns[AHEAD];
      float of_rows[AHEAD][2];
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + i < parts) {
          states[i] = *reinterpret_cast<const Values<WIDTH>*>(state);
          of_rows[i][0] = decays[0], of_rows[i][1] = decays[args.K];
          state += args.H * size, decays += args.H * blocks * 2 * args.K;
          if (!column_decays) continue;
          for (int x = 0; x < WIDTH; ++x) of_columns[i].x[x] = column_decays[x];
          column_decays += args.H * args.V;
        }
#pragma unroll
      for (int i = 0; i < AHEAD; ++i)
        if (first + i < parts) {
          if (stores && part_in_segment == 0) *reinterpret_cast<Values<WIDTH>*>(start) = S, start += args.H * size;
          if (++part_in_segment == R) part_in_segment = 0;
          const float *const rows = of_rows[i], *const columns = of_columns[i].x;
          for (int x = 0; x < WIDTH; ++x) {
            const float decay = column_decays ? decay_of(rows[0] + rows[1] + columns[x]) : rows[0] * rows[1];
            S.x[x] = joined(S.x[x], decay, states[i].x[x]), total.x[x] = joined(total.x[x], decay, 0.f);
          }
        }
    }
  };
  Values<WIDTH> S = {}, total;
  for (int x = 0; x < WIDTH; ++x) total.x[x] = 1.f;
  if constexpr (GROUPED) {
    if (exists) join(S, total, false);
    s.states[threadIdx.x] = S, s.decays[threadIdx.x] = total;
    __syncthreads();
  }
  if (!exists) return;
  S = {};
  if (args.initial) {  // the caller's array, which may start on any 4 bytes
    const float* from = args.initial + (n * args.H + h) * size + index;
    for (int i = 0; i < WIDTH; ++i) S.x[i] = from[i];
  }
  // What earlier groups leave, in order: their threads with the same numbers of the state.
  for (u32 earlier = threadIdx.x % threads; GROUPED && earlier + threads <= threadIdx.x; earlier += threads)
    for (int x = 0; x < WIDTH; ++x) S.x[x] = joined(S.x[x], s.decays[earlier].x[x], s.states[earlier].x[x]);
  join(S, total, true);
  // The last group that has segments stores the state after them; group 0 does so if there are none.
  if (last_segment < segments || first_segment == last_segment && group) return;
  float* const last =
      args.final ? args.final + (n * args.H + h) * size : args.starts + ((n * P + P - 1) * args.H + h) * size;
  *reinterpret_cast<Values<WIDTH>*>(last + index) = S;
}
