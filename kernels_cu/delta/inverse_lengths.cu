// what      The factors by which queries and keys are divided by their lengths.
// math      1 / |x|, |x| the square root of the sum of squares and 10^-6
// shapes    q k [B, H, T, K]; lengths [B, H, T, 2]: of the token's query, and of its key
// grid      `lanes` neighbouring threads for every token and head, a power of 2 up to 32, with PIECE channels each
// numerics  float32
// source    Yang et al., 2024 (2412.06464), section 3.4
// limits    bfloat16, float16; rows start on 16 bytes, and are pieces of 16 bytes
#include "delta/lengths.cuh"
#include "fragments.cuh"
#include "lanes.cuh"
#include "tensor.cuh"

// From the includes:
//   unpack: two numbers of a word as floats; LEAST_SQUARE = 1e-6

constexpr int PIECE = 8;  // numbers of a lane

template <typename T> struct Args {
  StridedRows<const T> q, k;
  float* lengths;
  i64 B, H, T_, K;  // T_: tokens of a batch row
  i64 lanes;
};

// The sum of the squares of PIECE numbers.
template <typename T> __device__ __forceinline__ float squares_of(const uint4& piece) {
  const u32 words[4] = {piece.x, piece.y, piece.z, piece.w};
  float sum = 0.f;
#pragma unroll
  for (const u32 two : words) {
    const float2 x = unpack(two, T{});
    sum = fmaf(x.x, x.x, fmaf(x.y, x.y, sum));
  }
  return sum;
}

template <typename T> __global__ void __launch_bounds__(256) delta_inverse_lengths(const Args<T> args) {
  static_assert(PIECE * sizeof(T) == sizeof(uint4));
  const u32 lanes = u32(args.lanes), lane = threadIdx.x % lanes;
  const i64 row = (i64(blockIdx.x) * blockDim.x + threadIdx.x) / lanes, head = row / args.T_, t = row - head * args.T_;
  const i64 b = head / args.H, h = head - b * args.H;
  float2 squares = {0.f, 0.f};
  if (b < args.B && PIECE * lane < args.K) {
    const uint4 q = *reinterpret_cast<const uint4*>(args.q.row(b, h, t) + PIECE * lane),
                k = *reinterpret_cast<const uint4*>(args.k.row(b, h, t) + PIECE * lane);
    squares = {squares_of<T>(q), squares_of<T>(k)};
  }
  for (u32 distance = lanes / 2; distance > 0; distance /= 2)
    squares.x += __shfl_xor_sync(0xffffffffu, squares.x, distance),
        squares.y += __shfl_xor_sync(0xffffffffu, squares.y, distance);
  if (b < args.B && lane == 0)
    reinterpret_cast<float2*>(args.lengths)[row] = {inverse_root(squares.x + float(LEAST_SQUARE)),
                                                    inverse_root(squares.y + float(LEAST_SQUARE))};
}
