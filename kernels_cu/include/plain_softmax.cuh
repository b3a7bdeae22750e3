// what      Softmax attention without tensor cores, for any dtype and size: a warp has a query, or a key, and meets the
//           tokens it is paired with 32 at a time, one a lane.
// shapes    q k [B, H, T, K], v o do [B, H, T, V]; L and delta [B, H, T] of Real<T>
// grid      a block for every (sequence, head, tile of 128 columns, 4 tokens), in the order of `WorkTile`
#include "real.cuh"
#include "tensor.cuh"

constexpr int WARPS = 4, WIDTH = 128, EACH = WIDTH / 32;  // tokens a block; columns a warp, and a lane, has sums of

// A warp's token, and its columns from `column` on.
struct WorkTile {
  i64 b, h, t, column;
  Span span;

  __device__ WorkTile(const Shape& shape, i64 tiles) {
    const i64 rows = (shape.chunk + WARPS - 1) / WARPS, block = blockIdx.x / rows / tiles, c = block % shape.NC;
    column = blockIdx.x / rows % tiles * WIDTH + threadIdx.x % 32;
    h = block / shape.NC % shape.H, b = block / shape.NC / shape.H;
    const Span chunk = chunk_tokens(shape, c);
    t = chunk.start + blockIdx.x % rows * WARPS + threadIdx.x / 32;
    if (t >= chunk.stop) t = -1;  // there is none
    i64 sequence = 0, last = shape.count - 1;
    while (shape.chunk_bounds && sequence < last) {
      const i64 middle = (sequence + last + 1) / 2;
      if (shape.chunk_bounds[middle] <= c) sequence = middle;
      else last = middle - 1;
    }
    span = tokens_of(shape, sequence);
  }
};

template <typename T> __device__ __forceinline__ Real<T> dot(const T* x, const T* y, i64 size) {
  Real<T> sum = 0;
  for (i64 c = 0; c < size; ++c) sum = fma(to_real(x[c]), to_real(y[c]), sum);
  return sum;
}

// sums += weight rows[column...], of each of `count` lanes its weight and row.
template <typename R, typename T>
__device__ __forceinline__ void add_rows(R (&sums)[EACH], R weight, const T* row, i64 stride, int count, i64 column,
                                         i64 width) {
  for (int lane = 0; lane < count; ++lane, row += stride) {
    const R x = __shfl_sync(0xffffffffu, weight, lane);
#pragma unroll
    for (int n = 0; n < EACH; ++n)
      if (column + 32 * n < width) sums[n] = fma(x, to_real(row[column + 32 * n]), sums[n]);
  }
}

template <typename T, typename R>
__device__ __forceinline__ void put_row(T* row, const R (&sums)[EACH], i64 column, i64 width) {
#pragma unroll
  for (int n = 0; n < EACH; ++n)
    if (column + 32 * n < width) row[column + 32 * n] = from_real<T>(sums[n]);
}
