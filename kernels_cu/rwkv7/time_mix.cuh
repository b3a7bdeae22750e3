// what      A head's time mix of one token of RWKV-7 by 256 threads: keys, state, group norm, bonus, gate.
// math      kappa = k removal / |k removal|,  key = k (1 + (rate - 1) replacement),  e = S^T kappa
//           S <- diag(decay) S - (kappa rate) e^T + key v^T,  o = S^T r of the new S
//           The state is read once: o is computed from S before: o = S^T (decay r) - (r . kappa rate) e + (r . key) v
//           y = (GroupNorm(o) + (r . key bonus) v) gate;  S [N, N] has rows for channels of k, columns for those of v
// barriers  named barrier 1 of the threads, four: the token and its sums are in shared memory | groups' sums of e and o
//           | the first sum of the group norm, and e | its second sum. The last two are in sum_of_threads
// numerics  float32; the state of type S is rounded when it is stored
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N a multiple of 4, up to MAX_N = 256: a thread for each channel; 256 threads, all of which call
//           time_mix_head
#include "rwkv6/time_mix.cuh"
#include "rwkv7/time_mix_sums.cuh"

// From the includes:
//   THREADS = 256, WARPS = 8; LEAST_NORM = 1e-12; sync: named barrier 1; sum_of_threads: over the threads, by one
//     barrier
//   add_scaled(x, f, y) = x + f y, of four numbers; StatePart: see time_mix_head

struct Scratch {
  // Of the token: removed is k removal, kappa before it is normed; written is removed times rate; read is r decay.
  float v[MAX_N], key[MAX_N], removed[MAX_N], written[MAX_N], decay[MAX_N], read[MAX_N];
  float erased[MAX_N];  // e, divided by |k removal| once more
  float4 dots[WARPS];
  float sum[WARPS], squares[WARPS];
  float group_sums[2][4 * THREADS];  // [groups of threads, N]: of e and of o
};

// What thread n below N has of channel n of a head: parameters (gain and bias: of the group norm), and the token, with
// decay = exp of its log. Other threads pass anything.
struct KeyParameters {
  float removal, replacement, bonus, gain, bias;
};
struct Token {
  float k, v, r, decay, rate, gate;
};

// Computes S in place and y; calls store(tid, y) for each channel. state: the head's S [N, N]. part
// (rwkv6/time_mix.cuh): a thread's four columns and every part.groups-th row of S, of which part.held has the first
// ROWS_HELD, loaded before the call.
template <typename S, typename Store>
__device__ __forceinline__ void time_mix_head(Scratch& s, const StatePart& part, S* state, int N, int tid,
                                              const KeyParameters& own, const Token& token, float eps,
                                              const Store& store) {
  const bool busy = tid < N;
  float4 dots = {};  // |removed|^2, r . written, r . key, r . key bonus
  if (busy) {
    const auto [k, v, r, decay, rate, gate] = token;
    const float removed = k * own.removal, key = k * fmaf(rate - 1.f, own.replacement, 1.f);
    s.v[tid] = v, s.key[tid] = key, s.removed[tid] = removed, s.written[tid] = removed * rate;
    s.decay[tid] = decay, s.read[tid] = r * decay;
    dots = {removed * removed, r * removed * rate, r * key, r * key * own.bonus};
  }
  dots = {warp_sum(dots.x), warp_sum(dots.y), warp_sum(dots.z), warp_sum(dots.w)};
  if ((tid & 31) == 0) s.dots[tid >> 5] = dots;
  sync();  // the token and the warps' dots are in shared memory
  dots = {};
#pragma unroll
  for (int n = 0; n < WARPS; ++n) dots = add_scaled(dots, 1.f, s.dots[n]);
  const float inverse = 1.f / fmaxf(sqrtf(dots.x), LEAST_NORM);

  const int groups = part.groups, group = part.group, column = part.column;
  // Calls row(channel of the key, the thread's four columns of S) for the thread's rows.
  const auto each_row = [&](const auto& row) {
    if (group >= groups) return;
#pragma unroll
    for (int n = 0; n < ROWS_HELD; ++n)
      if (group + n * groups < N) row(group + n * groups, part.held[n]);
#pragma unroll 2
    for (int c = group + ROWS_HELD * groups; c < N; c += groups) row(c, load4(state + c * N + column));
  };
  float4 e_of_columns = {}, o_of_columns = {};
  each_row([&](int c, float4 old) {
    e_of_columns = add_scaled(e_of_columns, s.removed[c], old), o_of_columns = add_scaled(o_of_columns, s.read[c], old);
  });
  if (group < groups) {
    store4(s.group_sums[0] + group * N + column, e_of_columns);
    store4(s.group_sums[1] + group * N + column, o_of_columns);
  }
  sync();  // the groups' sums of e and of o are in shared memory

  float o = 0.f;
  if (busy) {
    float e = 0.f;
    for (int n = 0; n < groups; ++n) e += s.group_sums[0][n * N + tid], o += s.group_sums[1][n * N + tid];
    e *= inverse * inverse;  // one factor is that of the kappa which is written
    s.erased[tid] = e;
    o = fmaf(dots.z, token.v, fmaf(-dots.y, e, o));
  }
  const float inverse_N = 1.f / N, mean = sum_of_threads(o, s.sum, tid) * inverse_N;
  if (group < groups) {
    const float4 values = load4(s.v + column), erased = load4(s.erased + column);
    each_row([&](int c, float4 old) {
      const float decay = s.decay[c];
      const float4 kept = {decay * old.x, decay * old.y, decay * old.z, decay * old.w};
      store4(state + c * N + column, add_scaled(add_scaled(kept, -s.written[c], erased), s.key[c], values));
    });
  }
  const float centred = busy ? o - mean : 0.f;
  const float variance = sum_of_threads(centred * centred, s.squares, tid) * inverse_N;
  if (!busy) return;
  const float normed = fmaf(centred * inverse_root(variance + eps), own.gain, own.bias);
  store(tid, fmaf(dots.w, token.v, normed) * token.gate);
}
