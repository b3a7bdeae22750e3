// what      What RWKV-7's time mixes share: kappa = x / max(|x|, LEAST_NORM), x = k removal; the largest decay; a + x b
//           of four numbers; and what keys.cu and chunk_keys.cuh compute for one channel of a token.
#include "decode.cuh"

constexpr float LEAST_NORM = 1e-12f;                // the least |k removal| by which kappa is divided
constexpr float DECAY_SCALE = 0.6065306597126334f;  // exp(-1/2): a token's log decay is -DECAY_SCALE to 0

__device__ __forceinline__ float4 add_scaled(float4 a, float x, float4 b) {
  return {fmaf(x, b.x, a.x), fmaf(x, b.y, a.y), fmaf(x, b.z, a.z), fmaf(x, b.w, a.w)};
}

// A channel of a token: w, its log decay; icl, its in-context learning rate; k removal; and the key. The math is in
// keys.cu. X: the type of the results.
struct ChannelOfKey {
  float w, icl, removed, key;
};
template <typename X>
__device__ __forceinline__ ChannelOfKey channel_of_key(float k, float decay, float icl_logit, float removal,
                                                       float replacement) {
  const float icl = sigmoid_for<X>(icl_logit);
  return {-DECAY_SCALE * sigmoid_for<X>(decay), icl, k * removal, k * fmaf(icl - 1.f, replacement, 1.f)};
}
// The value, of which the sigmoid of `share` is that of the first layer.
template <typename X> __device__ __forceinline__ float mixed_value(float v, float first_v, float share) {
  return fmaf(first_v - v, sigmoid_for<X>(share), v);
}
