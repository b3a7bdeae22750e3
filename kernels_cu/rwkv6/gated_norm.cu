// what      The steps between the recurrence and its output product: group norm over each head, bonus, and gate.
// math      y = GroupNorm_H(o) silu(gate); with BONUS (RWKV-7) y = (GroupNorm_H(o) + (sum_N r k bonus) v) gate
// shapes    o r k v gate y [T, H, N], weight bias bonus [H, N]; r k v and bonus only with BONUS; y may be o
// grid      64 / WIDTH lanes a (token, head), a lane GROUPS groups of WIDTH neighbouring channels; 128 threads. If the
//           grid does not have all tokens, blocks go on with later ones (LaneOfHead)
// numerics  float32, rounded once; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 19; Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N a multiple of WIDTH, up to 64 GROUPS; for WIDTH 8 arrays start on 16 bytes
#include "rwkv6/lanes_of_heads.cuh"

// From the includes:
//   LaneOfHead<WIDTH>: token_head, this lane's head of a token, among those of all tokens, and `channel`, its first;
//     some_head_is_below(n): whether the warp's first head is below n; go_on: to the same head of a later token
//   load_group, store_group: WIDTH neighbours as floats; a lane's GROUPS groups are CHANNELS_APART = 64 channels apart
//   sum_over_lanes<N>: over a head's lanes; inverse_root: 1 / sqrt(x); silu(x): x / (1 + e^-x)
//   launch_next, wait_for_previous: the next kernel may begin; the previous one has ended

template <typename X> struct Args {
  const X* o;
  const X* r;
  const X* k;
  const X* v;
  const X* gate;
  const float* weight;
  const float* bias;
  const float* bonus;
  X* y;
  i64 rows, H, N;  // rows: T H
  double eps;
};

template <typename X, int WIDTH, int GROUPS, bool BONUS>
__global__ void __launch_bounds__(THREADS) rwkv6_gated_norm(const Args<X> args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  LaneOfHead<WIDTH> lane;
  const int N = int(args.N);
  const i64 first_channel = lane.token_head % args.H * N + lane.channel;  // of [H, N]
  struct Parameters {
    float weight[WIDTH], bias[WIDTH], bonus[WIDTH];
  };
  // Those of a group of channels; 0 beyond N.
  const auto load_parameters = [&](int n) {
    Parameters to = {};
    if (const int j = CHANNELS_APART * n; lane.channel + j < N) {
      load_group(to.weight, args.weight + first_channel + j);
      load_group(to.bias, args.bias + first_channel + j);
      if constexpr (BONUS) load_group(to.bonus, args.bonus + first_channel + j);
    }
    return to;
  };
  const Parameters of_first_group = load_parameters(0);  // those of other groups would take too many registers
  const float inverse_N = 1.f / N;
#pragma unroll 1
  for (; lane.some_head_is_below(args.rows); lane.go_on()) {
    const i64 first = lane.token_head * N + lane.channel;  // of [T, H, N]
    const int channels = lane.token_head < args.rows ? N - lane.channel : 0;
    // All loads come first, so that the reductions wait for memory once.
    float x[GROUPS][WIDTH], v[GROUPS][WIDTH], gate[GROUPS][WIDTH];
    Parameters parameters[GROUPS];
    float sum = 0.f, bonus_score = 0.f, squares = 0.f;
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int j = CHANNELS_APART * n;
      if (j >= channels) continue;
      load_group(x[n], args.o + first + j);
      load_group(gate[n], args.gate + first + j);
      parameters[n] = n == 0 ? of_first_group : load_parameters(n);
      float r[WIDTH], k[WIDTH];
      if constexpr (BONUS) {
        load_group(r, args.r + first + j);
        load_group(k, args.k + first + j);
        load_group(v[n], args.v + first + j);
      }
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        sum += x[n][i];
        if constexpr (BONUS) bonus_score += r[i] * k[i] * parameters[n].bonus[i];
      }
    }
    const float mean = sum_over_lanes<lane.LANES>(sum) * inverse_N;
    if constexpr (BONUS) bonus_score = sum_over_lanes<lane.LANES>(bonus_score);
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      if (CHANNELS_APART * n >= channels) continue;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        x[n][i] -= mean;
        squares += x[n][i] * x[n][i];
      }
    }
    const float scale = inverse_root(sum_over_lanes<lane.LANES>(squares) * inverse_N + float(args.eps));
#pragma unroll
    for (int n = 0; n < GROUPS; ++n) {
      const int j = CHANNELS_APART * n;
      if (j >= channels) continue;
#pragma unroll
      for (int i = 0; i < WIDTH; ++i) {
        const float normed = fmaf(x[n][i] * scale, parameters[n].weight[i], parameters[n].bias[i]), g = gate[n][i];
        x[n][i] = BONUS ? fmaf(bonus_score, v[n][i], normed) * g : normed * silu(g);
      }
      store_group(args.y + first + j, x[n]);
    }
  }
}
