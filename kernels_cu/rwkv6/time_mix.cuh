// what      A head's time mix of one token of RWKV-6 by 256 threads: decay, state, group norm, gate.
// math      w = exp(-exp(decay + tanh(low) up));  o = r^T (S + diag(u) k v^T);  S <- diag(w) S + k v^T
//           y = GroupNorm(o) gate;  S [N, N] has rows for channels of k, columns for those of v
// barriers  named barrier 1 of the 256 threads, five in time_mix_head: groups' sums of the decay, decay, groups' sums
//           of o, and in sum_of_threads the two sums of the group norm
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 18-19
// limits    N a multiple of 4, up to MAX_N; W up to MAX_W
#include "decode.cuh"

// From the includes:
//   read_and_step: adds a channel's terms to o, and returns its new state

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_N = 256, MAX_W = 512;

struct TimeMixScratch {
  float k[MAX_N], v[MAX_N], r[MAX_N], u[MAX_N], decay[MAX_N], low[MAX_W];
  float group_sums[4 * THREADS];  // [groups of threads, N]: terms of tanh(low) up, then of o
  float sum[WARPS], squares[WARPS];
};

// The barrier of the threads that compute; a block may have others.
__device__ __forceinline__ void sync() { named_barrier_sync(1, THREADS); }

// The sum over the threads, the same bits in each.
__device__ __forceinline__ float sum_of_threads(float x, float (&warp_sums)[WARPS], int tid) {
  x = warp_sum(x);
  if ((tid & 31) == 0) warp_sums[tid >> 5] = x;
  sync();  // the warps' sums are in shared memory
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < WARPS; ++n) sum += warp_sums[n];
  return sum;
}

// A thread's part of a state [N, N]: four columns, from `column` on, of every `groups`-th row, from row `group` on;
// threads with group >= groups have none. held: its first ROWS_HELD rows, loaded when the struct is made, if `busy`.
constexpr int ROWS_HELD = 4;
constexpr bool HOLDS_ROWS = true, HOLDS_NONE = false;  // values of `busy`
struct StatePart {
  int groups, group, column;
  float4 held[ROWS_HELD];

  template <typename S> __device__ __forceinline__ StatePart(const S* state, int N, int tid, bool busy) : held{} {
    const int quads = N / 4;
    groups = THREADS / quads, group = tid / quads, column = tid % quads * 4;
#pragma unroll
    for (int n = 0; n < ROWS_HELD; ++n) {
      const int c = group + n * groups;
      if (busy && group < groups && c < N) held[n] = load4(state + c * N + column);
    }
  }
};

// Computes S <- diag(decay) S + k v^T in memory, and each group's sum over its rows of o = r^T (S + diag(u) k v^T), S
// before.
template <typename S>
__device__ __forceinline__ void step_state(TimeMixScratch& s, const StatePart& part, S* state, int N) {
  const int groups = part.groups, group = part.group, column = part.column;
  if (group >= groups) return;
  const float4 v = load4(s.v + column);
  float4 o = {};
  const auto row = [&](int c, float4 old) {
    store4(state + c * N + column, read_and_step(o, old, v, s.k[c], s.r[c], s.decay[c], s.k[c] * s.u[c]));
  };
#pragma unroll
  for (int n = 0; n < ROWS_HELD; ++n)
    if (group + n * groups < N) row(group + n * groups, part.held[n]);
#pragma unroll 2
  for (int c = group + ROWS_HELD * groups; c < N; c += groups) row(c, load4(state + c * N + column));
  store4(s.group_sums + group * N + column, o);
}

// What thread n below N has of channel n of a head: the decay's base, silu of the gate, the group norm's gain and bias.
struct ChannelOfHead {
  float decay, gate, gain, bias;
};

// Computes y = GroupNorm(o) gate, and calls store(channel, y). k, v, r, u and, in s.group_sums, THREADS / N sums whose
// sum is tanh(low) up must have been stored in `s`; the first barrier here makes them visible.
template <typename S, typename Store>
__device__ __forceinline__ void time_mix_head(TimeMixScratch& s, const StatePart& part, S* state, int N, int tid,
                                              const ChannelOfHead& channel, float eps, const Store& store) {
  const float inverse_N = 1.f / N;
  sync();  // the sums of tanh(low) up are in shared memory
  if (tid < N) {
    float z = channel.decay;
    for (int n = 0; n < THREADS / N; ++n) z += s.group_sums[n * N + tid];
    s.decay[tid] = decay_of(-expf(z));
  }
  sync();  // the decay is in shared memory; s.group_sums has been read
  step_state(s, part, state, N);
  sync();  // the groups' sums of o are in shared memory

  float o = 0.f;
  if (tid < N)
    for (int n = 0; n < part.groups; ++n) o += s.group_sums[n * N + tid];
  const float mean = sum_of_threads(o, s.sum, tid) * inverse_N;
  const float centred = tid < N ? o - mean : 0.f;
  const float variance = sum_of_threads(centred * centred, s.squares, tid) * inverse_N;
  if (tid < N) {
    const float normed = fmaf(centred * inverse_root(variance + eps), channel.gain, channel.bias);
    store(tid, normed * channel.gate);
  }
}
