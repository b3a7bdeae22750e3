// what      The activations of RWKV's mixes: value(x) is y = f(x), slope(y) the derivative at x, computed from y, so
//           that a training step need not keep x. And how kernels apply them, forward and backward.
#include "training.cuh"

struct ReluSquared {
  // y is in units of UNIT_OF_SQUARES<T> (decode.cuh: float16 ends below 256^2); slope is the derivative of y in these
  // units.
  template <typename T> static __device__ __forceinline__ float value(float x) { return relu_squared<T>(x); }
  template <typename T> static __device__ __forceinline__ float slope(float y) {
    return 2.f * sqrtf(y * (1.f / UNIT_OF_SQUARES<T>));
  }
};

struct Tanh {
  template <typename T> static __device__ __forceinline__ float value(float x) { return tanhf(x); }
  template <typename T> static __device__ __forceinline__ float slope(float y) { return 1.f - y * y; }
};

struct Sigmoid {
  template <typename T> static __device__ __forceinline__ float value(float x) { return sigmoid(x); }
  template <typename T> static __device__ __forceinline__ float slope(float y) { return y * (1.f - y); }
};

// Applies F to number `index`: forward, where dy is null, y = F(x); backward dy <- dy F'(x), by the y that forward has
// left. x and y may be one array; backward x is not read.
template <class F, typename X, typename Y>
__device__ __forceinline__ void activate(const X* x, Y* y, Y* dy, i64 index) {
  if (dy) dy[index] = from_float<Y>(to_float(dy[index]) * F::template slope<Y>(to_float(y[index])));
  else y[index] = from_float<Y>(F::template value<Y>(to_float(x[index])));
}

// The same to the eight numbers from `index` on, which start on 16 bytes.
template <class F, typename X, typename Y>
__device__ __forceinline__ void activate8(const X* x, Y* y, Y* dy, i64 index) {
  EightFloats to = dy ? load8(dy + index) : load8(x + index);
  if (dy) {
    const EightFloats of = load8(y + index);
#pragma unroll
    for (int n = 0; n < 8; ++n) to.x[n] *= F::template slope<Y>(of.x[n]);
  } else {
#pragma unroll
    for (int n = 0; n < 8; ++n) to.x[n] = F::template value<Y>(to.x[n]);
  }
  store8((dy ? dy : y) + index, to);
}
