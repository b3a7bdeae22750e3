// what      The type in which numbers of a storage type are computed: float64 in itself, all others in float32; and
//           functions that have the same names for both.
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T> constexpr bool IS_DOUBLE = false;
template <> constexpr bool IS_DOUBLE<double> = true;
template <typename T> using FloatOrDouble = Select<IS_DOUBLE<T>, double, float>;
// double if numbers of either type are computed in it, else float.
template <typename A, typename B> using Wider = Select<IS_DOUBLE<A> || IS_DOUBLE<B>, double, float>;

template <typename T> __device__ __forceinline__ FloatOrDouble<T> widened(T x) { return to_float(x); }
template <> __device__ __forceinline__ double widened(double x) { return x; }

template <typename T> __device__ __forceinline__ T narrowed(FloatOrDouble<T> x) { return from_float<T>(x); }
template <> __device__ __forceinline__ double narrowed<double>(double x) { return x; }

__device__ __forceinline__ float multiply_add(float a, float x, float b) { return fmaf(a, x, b); }
__device__ __forceinline__ double multiply_add(double a, double x, double b) { return fma(a, x, b); }

__device__ __forceinline__ double decay_of(double gate) { return exp(gate); }
__device__ __forceinline__ double inverse_root(double x) { return 1. / sqrt(x); }
