// what      Feature maps of linear attention, and their derivatives.
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int PIECE = 8;  // numbers that a thread moves at once: 16 bytes of 16-bit numbers, more of others

// N neighbouring numbers, on 16 bytes if there are several.
template <typename T, int N> struct alignas(N == 1 ? sizeof(T) : 16) Piece {
  T x[N];
};

// e^x.
__device__ __forceinline__ float exp_of(float x) { return exp2_approx(x * LOG2E); }
__device__ __forceinline__ double exp_of(double x) { return exp(x); }

// The maps: value(x) is y = phi(x), slope(x) its derivative.
struct Identity {
  template <typename R> static __device__ __forceinline__ R value(R x) { return x; }
  template <typename R> static __device__ __forceinline__ R slope(R) { return 1; }
};
struct Elu {
  template <typename R> static __device__ __forceinline__ R value(R x) { return x > 0 ? x + 1 : exp_of(x); }
  template <typename R> static __device__ __forceinline__ R slope(R x) { return x > 0 ? 1 : exp_of(x); }
};
struct Relu {
  template <typename R> static __device__ __forceinline__ R value(R x) { return x <= 0 ? 0 : x; }
  template <typename R> static __device__ __forceinline__ R slope(R x) { return x > 0 ? 1 : 0; }
};
struct Exp {
  template <typename R> static __device__ __forceinline__ R value(R x) { return exp_of(x); }
  template <typename R> static __device__ __forceinline__ R slope(R x) { return exp_of(x); }
};
