// what      Matrices of a chunk's 32 tokens in shared memory, in Hopper's kernels of the delta rule with one gate per
//           token and head, or none: how a warp loads, stores, splits and multiplies them.
// shapes    Fragments: a lane's part of operands and sums, g = lane / 4 and t = lane % 4. A u32 has two 16-bit numbers,
//           the first one in its low half
//           - x[4] of a product [16, 8]: x[2h + p] is row g + 8h, column 2t + p. x[2][4]: two of these side by side
//           - Values x, of a warp's 16 rows and 32 columns: x[4n + 2h + p] is row g + 8h, column 8n + 2t + p. A state
//             [16 columns of V, BK channels] is float[BK / 2], likewise
//           - u32 a[4], a left operand [16, 16]: a[m] is row g + 8 (m % 2), columns 8 (m / 2) + 2t and the next.
//             Operand x, of 32 columns: x[step] has those from 16 step on
//           - u32 b[4], two right operands [16, 8] side by side: b[2n] is column 8n + g, rows 2t and the next;
//             b[2n + 1] has the rows 8 later
//           A step of a product sums over 16 numbers, of which a panel's row has 64: of channels, step / 4 is the panel
// numerics  An element of a split matrix is the sum of two numbers of T. One beyond T's range (65504 in float16)
//           becomes NaN: infinity and a rounding error of -infinity
// limits    sm_90a; T is bf16 or f16
constexpr int CHUNK = 32;  // tokens; before warpgroup.cuh, which uses it
#include "warpgroup.cuh"
#include "fragments.cuh"
#include "ptx.cuh"

// From the includes:
//   swizzled_offset(row, piece): a piece's offset in a panel; at_byte_offset(array, offset): the address there
//   each_two(f): calls f(i, step, m) for each pair of a lane's tokens: Values have it at [i] and [i + 1], an Operand at
//     [step][m]. pack, unpack: two floats to two numbers of T in a u32, and back
//   k_major_tile(x): wgmma's descriptor of a tile whose rows are 64 channels of a token. K_MAJOR: the product sums over
//     a row, MN_MAJOR: over the rows

// 32 rows of 128 bytes, in the tensor cores' swizzle: row r has its 16-byte piece p in the place of piece p ^ r % 8;
// swizzled_offset(r, p) is that place in bytes. All arrays of rows of 128 bytes have this swizzle, float32 ones, too. A
// split matrix [32, 32] has its rounded elements in columns 0 to 31, and their rounding errors in columns 32 to 63.
template <typename T> using Panel = T[CHUNK][64];

// ldmatrix_x4 and stmatrix_x4 load and store a matrix [16, 16] of 16-bit numbers as four of [8, 8]; each lane gives
// them the address of a row of 8 numbers. This is its byte offset in a panel, for the matrix at (0, 0): for ldmatrix_x4
// of a left operand, stmatrix_x4 of a product, and ldmatrix_x4_trans of right operands that are stored by rows.
__device__ __forceinline__ int left_operand_offset(int lane) { return swizzled_offset(lane & 15, lane >> 4); }
// The same for ldmatrix_x4 of right operands that are stored by columns.
__device__ __forceinline__ int right_operand_offset(int lane) {
  return swizzled_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}
// left_operand_offset or right_operand_offset of the matrix at (row, column), multiples of 16; offset: of the matrix at
// (0, 0). Of a 16-byte piece at any other place: rows are multiples of 8.
__device__ __forceinline__ int shifted_offset(int offset, int row, int column) {
  return (offset ^ 2 * column) + 128 * row;
}

// The same for a transposed load or store of the first 16 tokens of the warp's 16 channels, in a panel [token,
// channel]: warp w of a warpgroup has channels 16 w to 16 w + 15. The next 16 tokens are 16 * 128 bytes on.
__device__ __forceinline__ int channel_operand_offset(int lane, int warp) {
  return swizzled_offset((lane & 7) + (lane >> 4) * 8, 2 * warp + (lane >> 3 & 1));
}
// Store and load the warp's channels of a panel, transposed: x is [channel, token]. offset: channel_operand_offset.
template <typename T> __device__ __forceinline__ void store_transposed(T (*to)[64], int offset, const Values& x) {
  Operand pairs;
  each_two([&](int i, int step, int m) { pairs[step][m] = pack<T>(x[i], x[i + 1]); });
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step)
    stmatrix_x4_trans(at_byte_offset(*to, offset + 16 * 128 * step), pairs[step]);
}
template <typename T> __device__ __forceinline__ void load_transposed(Operand& x, T (*from)[64], int offset) {
#pragma unroll
  for (int step = 0; step < CHUNK / 16; ++step)
    ldmatrix_x4_trans(x[step], at_byte_offset(*from, offset + 16 * 128 * step));
}

// ---- split matrices: each element is a rounded number and its rounding error ---------------------------------------

// The rounding errors of x and y, as two numbers of T; `rounded` has x and y rounded to T.
template <typename T> __device__ __forceinline__ u32 rounding_errors(u32 rounded, float x, float y) {
  const float2 values = unpack(rounded, T{});
  return pack<T>(x - values.x, y - values.y);
}

// Splits this lane's accumulators of a block [16, 16]: x[0] and x[1] are those of its left and of its right 8 columns.
template <typename T> __device__ __forceinline__ void split(u32 (&rounded)[4], u32 (&errors)[4], const float (*x)[4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* two = &x[m / 2][m % 2 * 2];
    rounded[m] = pack<T>(two[0], two[1]), errors[m] = rounding_errors<T>(rounded[m], two[0], two[1]);
  }
}

// Stores accumulators [16, 16 N] split at byte `offset`: rounded elements, and rounding errors 32 columns later.
template <typename T, int N>
__device__ __forceinline__ void store_split(Panel<T>& to, int offset, const float (&x)[2 * N][4]) {
#pragma unroll
  for (int step = 0; step < N; ++step) {
    u32 rounded[4], errors[4];
    split<T>(rounded, errors, &x[2 * step]);
    stmatrix_x4(at_byte_offset(to, shifted_offset(offset, 0, 16 * step)), rounded);
    stmatrix_x4(at_byte_offset(to, shifted_offset(offset, 0, 16 * step + 32)), errors);
  }
}

// d[16, 16] += a[16, 16] b[16, 16] of split matrices: [0] rounded elements, [1] rounding errors. The product of both
// errors is too small to matter; that of the rounded elements is added last, so that the sum of the small products is
// not rounded away.
template <typename T>
__device__ __forceinline__ void multiply_split(float (&d)[2][4], const u32 (&a)[2][4], const u32 (&b)[2][4]) {
#pragma unroll
  for (int product = 0; product < 3; ++product)  // errors x rounded, rounded x errors, rounded x rounded
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 right[2] = {b[product == 1][2 * m], b[product == 1][2 * m + 1]};
      mma_m16n8k16(d[m], a[product == 0], right, T{});
    }
}

// ---- products by wgmma ----------------------------------------------------------------------------------------------

// wgmma's descriptor of the stage's first byte, for tiles of rows of 128 bytes: an address in units of 16 bytes, with
// the swizzle's parameters (wgmma.cuh). Adding descriptor_offset(stage, tile) gives the descriptor of a tile in the
// stage. hide_origin hides where the descriptor comes from: else the compiler holds each tile's in registers of its
// own.
template <class Stage> __device__ __forceinline__ u64 stage_descriptor(Stage& stage) {
  u64 descriptor = k_major_tile(&stage);
  hide_origin(descriptor);
  return descriptor;
}
template <class Stage> __device__ __forceinline__ int descriptor_offset(Stage& stage, const void* tile) {
  return int(static_cast<const char*>(tile) - reinterpret_cast<const char*>(&stage)) / 16;
}

// Issues y[channel, i] = sum_j x[channel, j] matrix[i, j], or += if `accumulate`, of a split matrix, given by its
// descriptor. Order of the four steps: columns 0 to 15 of the rounded elements, columns 16 to 31, then the same of the
// rounding errors. The caller calls wgmma_commit and waits.
template <typename T>
__device__ __forceinline__ void start_split_product(Values& y, const Operand& x, u64 matrix, bool accumulate) {
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma<T, CHUNK, K_MAJOR>(y, x[step % 2], matrix + 2 * step, accumulate || step);
}

// Issues y[channel, j] = sum_i x[channel, i] matrix[i, j]; the caller calls wgmma_commit and waits. Order of the four
// steps: rows 0 to 15 of the rounded elements, rows 16 to 31 of them, then the same rows of the rounding errors.
template <typename T>
__device__ __forceinline__ void start_transposed_split_product(Values& y, const Operand& x, u64 matrix) {
#pragma unroll
  for (int step = 0; step < 4; ++step)
    wgmma<T, CHUNK, MN_MAJOR>(y, x[step % 2], matrix + step % 2 * (16 * 128 / 16) + step / 2 * (64 / 16), step > 0);
}
