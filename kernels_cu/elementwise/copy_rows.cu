// what      Arrays to contiguous memory with longer or shorter rows, several in one launch: what lies behind a row's
//           end, or behind the last row, becomes zeros.
// math      to[b, h, t, c] = from[b, h, t, c] where there is such a number, else 0
// shapes    from: rows of so many numbers in any strides; to [B, H, T, width], contiguous
// grid      blocks one array after the other, from `first` on; of an array a thread for every 16 bytes of `to`, AT_ONCE
//           of them one after the other
// smem      none
// barriers  none
// numerics  numbers are moved as they are, of 2, 4, 8 or 16 bytes: neighbours that always move together count as one
// source    none
// limits    as many arrays as COPIES; `to` starts on 16 bytes
#include "ptx.cuh"

constexpr int COPIES = 8, THREADS = 256, AT_ONCE = 4;

struct Copy {
  const char* from_;
  char* to;
  i64 b, h, t, c;                   // strides of `from`, in numbers
  i64 H, T, width;                  // of `to`
  i64 rows_b, rows_h, rows_t, row;  // of `from`: how many of each axis there are
  i64 numbers, size;                // of `to`; bytes of a number
  i64 first;                        // block
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

// A row of `from`, or null where there is none, `down` rows of `to` behind row (b, h, t) of it.
template <typename E> __device__ __forceinline__ const E* row_at(const Copy& x, i64 b, u32 h, u32 t, u32 down) {
  t += down, h += t / u32(x.T), t %= u32(x.T), b += h / u32(x.H), h %= u32(x.H);
  const bool there = b < x.rows_b && h < x.rows_h && t < x.rows_t;
  return there ? reinterpret_cast<const E*>(x.from_) + b * x.b + h * x.h + t * x.t : nullptr;
}

template <typename E> __device__ __forceinline__ void copy_pieces(const Copy& x, i64 block) {
  constexpr int N = 16 / sizeof(E);
  const i64 start = block * (THREADS * AT_ONCE * N), row = start / x.width, head = row / x.T;
  const u32 width = u32(x.width), before = u32(start - row * x.width), t = u32(row - head * x.T), h = u32(head % x.H);
  const i64 b = head / x.H;
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const u32 at = (n * THREADS + threadIdx.x) * N;
    if (start + at >= x.numbers) return;
    const u32 down = (before + at) / width, column = (before + at) % width;
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
        piece.x[i] = from && c < x.row ? from[c * x.c] : E{};
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < N; ++i) {
        const E* from = row_at<E>(x, b, h, t, (before + at + i) / width);
        const u32 c = (before + at + i) % width;
        piece.x[i] = from && c < x.row ? from[c * x.c] : E{};
      }
    }
    E* to = reinterpret_cast<E*>(x.to) + start + at;
    if (start + at + N <= x.numbers) {
      *reinterpret_cast<Wide*>(to) = *reinterpret_cast<const Wide*>(&piece);
    } else {
      for (int i = 0; i < N && start + at + i < x.numbers; ++i) to[i] = piece.x[i];
    }
  }
}

__global__ void __launch_bounds__(THREADS) elementwise_copy_rows(const Args args) {
  int which = 0;
#pragma unroll
  for (int n = 1; n < COPIES; ++n)
    if (blockIdx.x >= args.copies[n].first) which = n;
  const Copy& x = args.copies[which];
  const i64 block = blockIdx.x - x.first;
  if (x.size == 2) copy_pieces<u16>(x, block);
  else if (x.size == 4) copy_pieces<u32>(x, block);
  else if (x.size == 8) copy_pieces<Pair>(x, block);
  else copy_pieces<Wide>(x, block);
}
