// what      Feature maps of linear attention, and their derivatives.
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int PIECE = 8;  // numbers that a thread moves at once

template <typename T, int N> struct alignas(N == 1 ? sizeof(T) : 16) Piece {
  T x[N];
};

__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * LOG2E); }

struct Identity {
  static __device__ __forceinline__ float of(float x) { return x; }
  static __device__ __forceinline__ float slope(float) { return 1.f; }
};
struct Elu {
  static __device__ __forceinline__ float of(float x) { return x > 0.f ? x + 1.f : exp_of(x); }
  static __device__ __forceinline__ float slope(float x) { return x > 0.f ? 1.f : exp_of(x); }
};
struct Relu {
  static __device__ __forceinline__ float of(float x) { return x > 0.f ? x : 0.f; }
  static __device__ __forceinline__ float slope(float x) { return x > 0.f ? 1.f : 0.f; }
};
struct Exp {
  static __device__ __forceinline__ float of(float x) { return exp_of(x); }
  static __device__ __forceinline__ float slope(float x) { return exp_of(x); }
};
