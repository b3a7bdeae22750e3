// what      The activations of RWKV-6's mixes, and their slopes from their values, so that no argument is kept.
#include "training.cuh"

struct ReluSquared {
  static __device__ __forceinline__ float value(float x) { return x > 0.f ? x * x : x != x ? x : 0.f; }
  static __device__ __forceinline__ float slope(float y) { return 2.f * sqrtf(y); }
};

struct Tanh {
  static __device__ __forceinline__ float value(float x) { return tanhf(x); }
  static __device__ __forceinline__ float slope(float y) { return 1.f - y * y; }
};
