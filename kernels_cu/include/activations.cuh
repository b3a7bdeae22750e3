// what      The activations of RWKV's mixes: value(x) is y = f(x), slope(y) the derivative at x, computed from y, so
//           that a training step need not keep x.
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
