// what      The type in which numbers of a storage type are computed: float64 in itself, all others in float32; and
//           functions that have the same names for both.
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T> struct RealOf {
  using type = float;
};
template <> struct RealOf<double> {
  using type = double;
};
template <typename T> using Real = typename RealOf<T>::type;

template <typename T> __device__ __forceinline__ Real<T> to_real(T x) { return to_float(x); }
template <> __device__ __forceinline__ double to_real(double x) { return x; }

template <typename T> __device__ __forceinline__ T from_real(Real<T> x) { return from_float<T>(x); }
template <> __device__ __forceinline__ double from_real<double>(double x) { return x; }

__device__ __forceinline__ float multiply_add(float a, float x, float b) { return fmaf(a, x, b); }
__device__ __forceinline__ double multiply_add(double a, double x, double b) { return fma(a, x, b); }

__device__ __forceinline__ double decay_of(double gate) { return exp(gate); }
__device__ __forceinline__ double inverse_root(double x) { return 1. / sqrt(x); }
