// what      Copies several arrays in one launch. A copy is contiguous; its axes may be longer than its source's, which
//           zeros then fill, or shorter.
// math      to[b, h, t, c] = from[b, h, t, c] where the source has such a number, else 0
// shapes    from [size_b, size_h, size_t, size_c] in any strides; to [B, H, T, C], contiguous, of `count` numbers
// grid      the arrays' blocks follow each other, an array's from its `first_block` on; a thread copies AT_ONCE pieces
//           of 16 bytes
// smem      none
// barriers  none
// numerics  bits are copied. A number has 2, 4, 8 or 16 bytes: neighbours that are always copied together count as one
// source    none
// limits    as many arrays as COPIES; `to` starts on 16 bytes
#include "ptx.cuh"

constexpr int COPIES = 8, THREADS = 256, AT_ONCE = 4;

struct Copy {
  const char* from_;
  char* to;
  i64 stride_b, stride_h, stride_t, stride_c;  // of from_, in numbers
  i64 H, T, C;                                 // of `to`
  i64 size_b, size_h, size_t, size_c;          // of from_
  i64 count, bytes;                            // numbers of `to`; bytes of a number: 2, 4, 8 or 16
  i64 first_block;
};
struct Args {
  Copy copies[COPIES];
};

struct alignas(16) Wide {
  u32 words[4];
};
struct alignas(8) Pair {
  u32 words[2];
};

// The source of the row of `to` that is `down` rows after row (b, h, t); null if from_ has no such row.
template <typename E> __device__ __forceinline__ const E* row_at(const Copy& x, i64 b, u32 h, u32 t, u32 down) {
  t += down, h += t / u32(x.T), t %= u32(x.T), b += h / u32(x.H), h %= u32(x.H);
  const bool there = b < x.size_b && h < x.size_h && t < x.size_t;
  return there ? reinterpret_cast<const E*>(x.from_) + b * x.stride_b + h * x.stride_h + t * x.stride_t : nullptr;
}

// Copies a block's share of an array of elements E, in pieces of 16 bytes of `to`. The share begins in row `row` of
// `to`, of the rows of all b, h and t, after `before` of its numbers; `head` is the number of the row's (b, h). `down`:
// rows after that row.
template <typename E> __device__ __forceinline__ void copy_pieces(const Copy& x, i64 block) {
  constexpr int N = 16 / sizeof(E);
  const i64 start = block * (THREADS * AT_ONCE * N), row = start / x.C, head = row / x.T;
  const u32 width = u32(x.C), before = u32(start - row * x.C), t = u32(row - head * x.T), h = u32(head % x.H);
  const i64 b = head / x.H;
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const u32 index = (n * THREADS + threadIdx.x) * N;
    if (start + index >= x.count) return;
    const u32 down = (before + index) / width, column = (before + index) % width;
    struct alignas(16) {
      E x[N];
    } piece;
    if (width >= N) {  // a piece has parts of two rows at most
      const E* rows[2] = {row_at<E>(x, b, h, t, down)};
      if (column + N > width) rows[1] = row_at<E>(x, b, h, t, down + 1);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        const bool next = column + i >= width;
        const u32 c = column + i - (next ? width : 0);
        const E* from = next ? rows[1] : rows[0];
        piece.x[i] = from && c < x.size_c ? from[c * x.stride_c] : E{};
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        const E* from = row_at<E>(x, b, h, t, (before + index + i) / width);
        const u32 c = (before + index + i) % width;
        piece.x[i] = from && c < x.size_c ? from[c * x.stride_c] : E{};
      }
    }
    E* to = reinterpret_cast<E*>(x.to) + start + index;
    if (start + index + N <= x.count) {
      *reinterpret_cast<Wide*>(to) = *reinterpret_cast<const Wide*>(&piece);
    } else {
      for (int i = 0; i < N && start + index + i < x.count; ++i) to[i] = piece.x[i];
    }
  }
}

__global__ void __launch_bounds__(THREADS) elementwise_copy_rows(const Args args) {
  int which = 0;
#pragma unroll
  for (int n = 1; n < COPIES; ++n)
    if (blockIdx.x >= args.copies[n].first_block) which = n;
  const Copy& x = args.copies[which];
  const i64 block = blockIdx.x - x.first_block;
  if (x.bytes == 2) copy_pieces<u16>(x, block);
  else if (x.bytes == 4) copy_pieces<u32>(x, block);
  else if (x.bytes == 8) copy_pieces<Pair>(x, block);
  else copy_pieces<Wide>(x, block);
}
