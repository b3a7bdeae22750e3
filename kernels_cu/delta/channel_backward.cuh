// what      What the gradients within a chunk of 32 tokens and 64 channels share where channels have gates of
//           their own.
#include "delta/backward_storage.cuh"
#include "delta/channel_chunk.cuh"

constexpr int THREADS = 2 * KEPT, WARPS = THREADS / 32, GROUP = 8;  // GROUP: tokens of a loop that is unrolled

// d [32 tokens, 16 channels of the warp] += rows [32 tokens, 64 columns] times the state's transpose.
template <typename T> __device__ __forceinline__ void multiply_states(Columns& d, const T* rows, const T* state) {
  const int lane = own_lane(), matrix = lane >> 3;
  const LeftReader<KEPT, T> reader(lane);
  const T* from = state + ((matrix & 1) * (KEPT / 8) + 2 * (threadIdx.x >> 5) + (matrix >> 1)) * 64 + (lane & 7) * 8;
#pragma unroll
  for (int c = 0; c < KEPT / 16; ++c) {
    u32 b[4];
    ldmatrix_x4_trans(b, from + 2 * c * (KEPT / 8) * 64);
#pragma unroll
    for (int m = 0; m < C / 16; ++m) {
      u32 a[4];
      ldmatrix_x4(a, reader.at(rows, 16 * m, 16 * c));
      multiply_halves(d[m][0], a, {b[0], b[1]}, T{});
      multiply_halves(d[m][1], a, {b[2], b[3]}, T{});
    }
  }
}

// The product of channel c of two states, over a half of 64 columns.
template <typename T>
__device__ __forceinline__ float multiply_halves_of_columns(const T* x, const T* y, int c, int half) {
  float dot = 0.f;
#pragma unroll 8
  for (int n = half * KEPT / 2; n < (half + 1) * KEPT / 2; ++n) {
    const int at = (n / 8 * (KEPT / 8) + c / 8) * 64 + n % 8 * 8 + c % 8;
    dot = fmaf(to_float(x[at]), to_float(y[at]), dot);
  }
  return dot;
}

template <int N> struct Constant {
  static constexpr int value = N;
};

// Calls f(group of 8 tokens, 1 if `token` is one of them or next to them, else 0) for the groups that begin up to
// `token`, or, FROM, that end from it on.
template <bool FROM, int N = 0, class F> __device__ __forceinline__ void each_group(int token, F f) {
  constexpr int FIRST = N * GROUP, LAST = FIRST + GROUP - 1;
  if (FROM ? FIRST > token : LAST + 2 <= token) f(Constant<N>{}, Constant<0>{});
  else if (FROM ? LAST >= token : FIRST <= token) f(Constant<N>{}, Constant<1>{});
  if constexpr (N + 1 < C / GROUP) each_group<FROM, N + 1>(token, f);
}
