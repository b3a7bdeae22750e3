// what      A state in the registers of warps, and the products of a sub-chunk with it.
// shapes    a warp holds 16 rows, of one axis of the state, by N columns, of the other; rows 16 w... are warp w's
// numerics  X and Y say what the left and the right operand are (product.cuh)
#include "product.cuh"
#include "ptx.cuh"
#include "subchunk.cuh"

template <int N> using State = float[N / 8][4];  // as accumulators of 16 x 8

// Calls f(value, column, row of the block) for every value that this lane holds.
template <int N, class F> __device__ __forceinline__ void each(State<N>& S, F f) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3, row = 16 * (threadIdx.x >> 5);
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x) f(S[n][x], 8 * n + 2 * t + (x & 1), row + g + 8 * (x >> 1));
}

// o[16 tokens, 16] += x S^T, x [16, N], rows LDX apart. A lane's accumulators of S are already what the product wants
// of
// S^T, when the columns are taken in the order 2t, 2t + 1 instead of t, t + 4; x is read in that order too.
template <class X, class Y, int LDX, int N>
__device__ __forceinline__ void read_state(float (&o)[2][4], const State<N>& S, const float* s_x) {
  const int g = (threadIdx.x & 31) >> 2, t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    X a;
    Y b;
    const float* x = s_x + 8 * n + 2 * t;
    a.set(0, x[g * LDX]);
    a.set(1, x[(g + 8) * LDX]);
    a.set(2, x[g * LDX + 1]);
    a.set(3, x[(g + 8) * LDX + 1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      b.set(0, S[n][2 * half]);
      b.set(1, S[n][2 * half + 1]);
      multiply(o[half], a, b);
    }
  }
}

// S += x^T y for a sub-chunk's x [16, the warp's 16 rows], rows LDX apart, and y [16, N], rows LDY apart.
template <class X, class Y, int LDX, int LDY, int N>
__device__ __forceinline__ void write_state(State<N>& S, const float* s_x, const float* s_y) {
#pragma unroll
  for (int j = 0; j < SUB; j += 8) {
    X a;
    Y b;
    load_a_transposed(a, s_x + j * LDX, LDX);
#pragma unroll
    for (int n = 0; n < N / 8; ++n) {
      load_b(b, s_y + j * LDY + 8 * n, LDY);
      multiply(S[n], a, b);
    }
  }
}
