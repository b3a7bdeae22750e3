// what      Copies several arrays in one launch. A copy is contiguous; its axes may be longer than its source's, which
//           zeros then fill, or shorter.
// math      to[b, h, t, c] = from[b, h, t, c] where the source has such a number, else 0
// shapes    from [size_b, size_h, size_t, size_c] in any strides; to [B, H, T, C], contiguous, of `count` numbers
// grid      the arrays' blocks follow each other, an array's from its `first_block` on; a thread copies AT_ONCE pieces
//           of 16 bytes of `to`. Where the numbers of a source's row are neighbours, it loads the two aligned pieces of
//           16 bytes that have the source's 16 bytes, wherever these start, and shifts them; else number by number
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
  i64 below, above;  // bytes that may be read: from `below` before from_, exclusively to `above` after it
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
__device__ __forceinline__ const char* row_start(const Copy& x, i64 b, u32 h, u32 t, u32 down) {
  t += down, h += t / u32(x.T), t %= u32(x.T), b += h / u32(x.H), h %= u32(x.H);
  const bool there = b < x.size_b && h < x.size_h && t < x.size_t;
  return there ? x.from_ + x.bytes * (b * x.stride_b + h * x.stride_h + t * x.stride_t) : nullptr;
}

// The 16 bytes from `at` on, a multiple of 2. Bytes outside [low, high) are arbitrary.
__device__ __forceinline__ Wide load_anywhere(const char* at, const char* low, const char* high) {
  const u32 offset = u32(reinterpret_cast<u64>(at) % 16);
  u32 words[8] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const char* const piece = at - offset + 16 * half;
    if (half && !offset) continue;
    if (low <= piece && piece + 16 <= high) {
      const Wide loaded = *reinterpret_cast<const Wide*>(piece);
#pragma unroll
      for (int n = 0; n < 4; ++n) words[4 * half + n] = loaded.words[n];
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const char* const number = piece + 2 * n;
        if (low <= number && number < high)
          words[4 * half + n / 2] |= u32(*reinterpret_cast<const u16*>(number)) << n % 2 * 16;
      }
    }
  }
  // The bytes wanted start `offset` bytes into `words`.
#pragma unroll
  for (int n = 0; n < 6; ++n) words[n] = offset & 8 ? words[n + 2] : words[n];
#pragma unroll
  for (int n = 0; n < 5; ++n) words[n] = offset & 4 ? words[n + 1] : words[n];
#pragma unroll
  for (int n = 0; n < 4; ++n) words[n] = offset & 2 ? words[n] >> 16 | words[n + 1] << 16 : words[n];
  return {{words[0], words[1], words[2], words[3]}};
}
// Adds to `piece` bytes first ... stop - 1 of `bytes`, both multiples of 2; of `piece` these are 0.
__device__ __forceinline__ void add_bytes(Wide& piece, const Wide& bytes, int first, int stop) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const u32 low = first <= 4 * n && 4 * n < stop ? 0xffffu : 0u;
    const u32 high = first <= 4 * n + 2 && 4 * n + 2 < stop ? 0xffff0000u : 0u;
    piece.words[n] |= bytes.words[n] & (low | high);
  }
}

// Copies a block's share, as copy_pieces does, if the numbers of a row of the source are neighbours and rows of `to`
// have 16 bytes or more: a piece then has parts of two rows at most.
__device__ __forceinline__ void copy_neighbours(const Copy& x, i64 block) {
  const i64 size = x.bytes, row_bytes = x.C * size, total = x.count * size;
  const i64 start = block * (THREADS * AT_ONCE * 16), row = start / row_bytes, head = row / x.T;
  const u32 width = u32(row_bytes), before = u32(start - row * row_bytes), t = u32(row - head * x.T);
  const u32 h = u32(head % x.H);
  const i64 b = head / x.H;
  const int source_width = int(x.size_c * size);
  const char *const low = x.from_ - x.below, *const high = x.from_ + x.above;
  // All pieces are loaded before one is stored: for the compiler, a store may change what is loaded after it.
  Wide pieces[AT_ONCE] = {};
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const u32 index = (n * THREADS + threadIdx.x) * 16;
    if (start + index >= total) break;
    const u32 down = (before + index) / width, column = (before + index) % width;
    // Adds bytes first ... stop - 1 of the piece from a row of the source, whose first byte is that of the piece at
    // `at`, maybe before its start.
    const auto add = [&](u32 down, int at, int first, int stop) {
      stop = min(stop, at + source_width);
      const char* from = stop > first ? row_start(x, b, h, t, down) : nullptr;
      if (from) add_bytes(pieces[n], load_anywhere(from - at, low, high), first, stop);
    };
    const int rest = int(min(width - column, 16u));  // bytes of the piece in the first row
    add(down, -int(column), 0, rest);
    if (rest < 16) add(down + 1, rest, rest, 16);
  }
#pragma unroll
  for (int n = 0; n < AT_ONCE; ++n) {
    const u32 index = (n * THREADS + threadIdx.x) * 16;
    if (start + index >= total) break;
    char* const to = x.to + start + index;
    if (start + index + 16 <= total) {
      *reinterpret_cast<Wide*>(to) = pieces[n];
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (start + index + 2 * i < total) reinterpret_cast<u16*>(to)[i] = u16(pieces[n].words[i / 2] >> i % 2 * 16);
    }
  }
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
      const E* rows[2] = {reinterpret_cast<const E*>(row_start(x, b, h, t, down))};
      if (column + N > width) rows[1] = reinterpret_cast<const E*>(row_start(x, b, h, t, down + 1));
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
        const E* from = reinterpret_cast<const E*>(row_start(x, b, h, t, (before + index + i) / width));
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
  if (x.stride_c == 1 && x.C * x.bytes >= 16) copy_neighbours(x, block);
  else if (x.bytes == 2) copy_pieces<u16>(x, block);
  else if (x.bytes == 4) copy_pieces<u32>(x, block);
  else if (x.bytes == 8) copy_pieces<Pair>(x, block);
  else copy_pieces<Wide>(x, block);
}
