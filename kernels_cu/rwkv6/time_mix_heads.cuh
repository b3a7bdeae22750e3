// what      Shared by the time mixes of heads of 64 channels: a warp has a sequence's state of one head. Lane l has its
//           columns 4 (l % 16) to 4 (l % 16) + 3, and every second channel, from l / 16 on.
// math      w = exp(-exp(decay + tanh(low) up));  y = GroupNorm_H(o) silu(gate).  low [W] is of a sequence, W the rank
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
#include "lanes.cuh"
#include "rwkv6/time_mix_arguments.cuh"

// From the includes:
//   load2: two neighbouring floats; decay_of(x) = e^x; inverse_root(x) = 1 / sqrt(x); sigmoid
//   warp_sum: the sum over the warp, in every lane
//   TimeMixArgs, for the kernels that include this file: what every time mix of one token takes

constexpr int N = 64;
constexpr int QUADS = N / 4, GROUPS = 32 / QUADS;  // lanes that share a channel, channels that a warp has at once
constexpr int ROWS = N / GROUPS;                   // rows of a state that a lane has

// Decays exp(-exp(exponent + tanh(low) up)) of two channels: `channel`, which is even, and the next one. exponent:
// their base, `decay` in the kernels' math; s_low [W]: tanh(low) of the sequence; s_up [W, N]: `up` of the head.
template <typename T>
__device__ __forceinline__ float2 decays_of_channels(float2 exponent, const float* s_low, const T* s_up, int W,
                                                     int channel) {
#pragma unroll 8
  for (int w = 0; w < W; ++w) {
    const float2 up = load2(s_up + w * N + channel);
    exponent = {fmaf(s_low[w], up.x, exponent.x), fmaf(s_low[w], up.y, exponent.y)};
  }
  return {decay_of(-expf(exponent.x)), decay_of(-expf(exponent.y))};
}

// Normalises o over the head. o: the lane's four columns, summed over the lane's own channels. The result: the same
// columns, summed over all channels and normalised, in both lanes that have them.
__device__ __forceinline__ float4 group_norm(float4 o, float eps) {
#pragma unroll
  for (int distance = QUADS; distance < 32; distance *= 2) {  // every lane gets the sum over all channels
    o = {o.x + __shfl_xor_sync(0xffffffffu, o.x, distance), o.y + __shfl_xor_sync(0xffffffffu, o.y, distance),
         o.z + __shfl_xor_sync(0xffffffffu, o.z, distance), o.w + __shfl_xor_sync(0xffffffffu, o.w, distance)};
  }
  constexpr float SHARE = 1.f / (N * GROUPS);  // each column is in GROUPS lanes
  const float mean = warp_sum((o.x + o.y) + (o.z + o.w)) * SHARE;
  o = {o.x - mean, o.y - mean, o.z - mean, o.w - mean};
  const float variance = warp_sum((o.x * o.x + o.y * o.y) + (o.z * o.z + o.w * o.w)) * SHARE;
  const float scale = inverse_root(variance + eps);
  return {o.x * scale, o.y * scale, o.z * scale, o.w * scale};
}

// (normed norm_weight + bias) silu(gate), of four columns.
__device__ __forceinline__ float4 gated(float4 normed, float4 norm_weight, float4 bias, float4 gate) {
  const auto gated_value = [](float normed, float gate) { return normed * gate * sigmoid(gate); };
  return {gated_value(fmaf(normed.x, norm_weight.x, bias.x), gate.x),
          gated_value(fmaf(normed.y, norm_weight.y, bias.y), gate.y),
          gated_value(fmaf(normed.z, norm_weight.z, bias.z), gate.z),
          gated_value(fmaf(normed.w, norm_weight.w, bias.w), gate.w)};
}
