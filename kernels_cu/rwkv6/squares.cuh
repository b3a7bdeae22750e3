// what      Stores relu squared of the sums of products by wgmma, in half precision, in units of UNIT_OF_SQUARES.
#include "decode.cuh"

// x[i] of lane n among four neighbours becomes x[n] of lane i.
__device__ __forceinline__ void transpose(u32 (&x)[4]) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const bool upper = threadIdx.x & distance;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & distance) continue;
      const u32 from_other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + distance], distance);
      (upper ? x[i] : x[i + distance]) = from_other;
    }
  }
}

// Stores y [.., M]: relu(sums)^2, of rows from `row` on, of vectors b and b + 8 below B. Of every eight rows a lane has
// two neighbours, of two vectors (wgmma.cuh). Four lanes exchange numbers of 32 rows, so that each stores eight
// neighbours at once.
template <int ROWS, typename T>
__device__ __forceinline__ void store_squares(T* y, i64 M, int row, int b, int B, const float (&sums)[ROWS / 2]) {
  row += 8 * (threadIdx.x & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int first = 0; first < ROWS / 8; first += 4) {
      u32 x[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (const int n = first + i; n < ROWS / 8)
          x[i] = pack<T>(relu_squared<T>(sums[4 * n + 2 * half]), relu_squared<T>(sums[4 * n + 2 * half + 1]));
      transpose(x);
      if (b + 8 * half < B && first + (threadIdx.x & 3) < ROWS / 8 && row + 8 * first < M)
        *reinterpret_cast<uint4*>(y + (b + 8 * half) * M + row + 8 * first) = {x[0], x[1], x[2], x[3]};
    }
}
