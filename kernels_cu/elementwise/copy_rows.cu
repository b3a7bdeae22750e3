// what      Copies several arrays in one launch. A copy is contiguous; its axes may be longer than its source's, which
//           zeros then fill, or shorter.
// math      to[b, h, t, c] = from[b, h, t, c] where the source has such a number, else 0
// shapes    from [size_b, size_h, size_t, size_c] in any strides; to [B, H, T, C], contiguous, of `count` numbers
// grid      the arrays' blocks follow each other, an array's from its `first_block` on; a thread copies AT_ONCE pieces
//           of 16 bytes of `to`. Where the numbers of a source's row are neighbours, it loads the five words of 4 bytes
//           that have the source's 16 bytes, wherever these start; else, and at the array's ends, 2 bytes at a time
// numerics  bits are copied. A number has 2, 4, 8 or 16 bytes: neighbours that are always copied together count as one
// limits    as many arrays as COPIES; `to` starts on 16 bytes
//
// The program is short on purpose, so it loops over pieces and rows: multiprocessors waited longer for 10,000
// instructions than for the numbers.
#include "ptx.cuh"

constexpr int COPIES = 8, THREADS = 256;

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

// The source of the row of `to` that is `down` rows after row (b, h, t); null if from_ has no such row.
__device__ __forceinline__ const char* row_start(const Copy& x, u32 b, u32 h, u32 t, u32 down) {
  t += down;
  if (t >= u32(x.T)) {
    h += t / u32(x.T), t %= u32(x.T);
    if (h >= u32(x.H)) b += h / u32(x.H), h %= u32(x.H);
  }
  const bool there = b < u32(x.size_b) && h < u32(x.size_h) && t < u32(x.size_t);
  return there ? x.from_ + x.bytes * (b * x.stride_b + h * x.stride_h + t * x.stride_t) : nullptr;
}

// The 16 bytes at `from`, an even address. It may read 2 bytes before them, or 4 bytes after them.
__device__ __forceinline__ Wide load_words(const char* from) {
  const u32 before = u32(reinterpret_cast<u64>(from)) & 2, selector = before ? 0x5432 : 0x3210;
  const u32* const words = reinterpret_cast<const u32*>(from - before);
  const u32 loaded[5] = {words[0], words[1], words[2], words[3], words[4]};
  Wide piece;
#pragma unroll
  for (int n = 0; n < 4; ++n) piece.words[n] = __byte_perm(loaded[n], loaded[n + 1], selector);
  return piece;
}
// Bytes first ... stop - 1 of a piece, of which byte i is byte i - `at` of a row, 2 bytes at a time. Others are 0.
__device__ __forceinline__ Wide load_halves(const Copy& x, const char* row, int at, int first, int stop) {
  Wide piece = {};
#pragma unroll 4
  for (int i = 14; i >= 0; i -= 2) {
    const int byte = i - at, of_number = byte & int(x.bytes - 1);
    const char* const from = row + (byte - of_number) * x.stride_c + of_number;
    const u32 half = first <= i && i < stop ? *reinterpret_cast<const u16*>(from) : 0;
#pragma unroll
    for (int n = 3; n >= 0; --n) piece.words[n] = piece.words[n] << 16 | (n ? piece.words[n - 1] >> 16 : half);
  }
  return piece;
}
// Stores the bytes of a piece that are before `end`, 2 bytes at a time.
__device__ __forceinline__ void store_halves(char* to, const char* end, Wide piece) {
#pragma unroll 1
  for (; to < end; to += 2) {
    *reinterpret_cast<u16*>(to) = u16(piece.words[0]);
#pragma unroll
    for (int n = 0; n < 4; ++n) piece.words[n] = piece.words[n] >> 16 | (n < 3 ? piece.words[n + 1] << 16 : 0);
  }
}

// Adds to `piece` bytes first ... stop - 1 of `bytes`, both even; of `piece` these are 0.
__device__ __forceinline__ void add_bytes(Wide& piece, const Wide& bytes, int first, int stop) {
  const u32 halves = (1u << stop / 2) - (1u << first / 2);  // a bit for each
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const u32 of_word = halves >> 2 * n;
    piece.words[n] |= bytes.words[n] & ((of_word & 1) | (of_word << 15 & 0x10000)) * 0xffff;
  }
}

// AT_ONCE: 4, or 1 where blocks are few: a piece takes a microsecond or two, whose loads wait for each other.
template <int AT_ONCE> __global__ void __launch_bounds__(THREADS) elementwise_copy_rows(const Args args) {
  int which = 0;
#pragma unroll
  for (int n = 1; n < COPIES; ++n)
    if (blockIdx.x >= args.copies[n].first_block) which = n;
  const Copy& x = args.copies[which];
  const i64 row_bytes = x.C * x.bytes, start = (blockIdx.x - x.first_block) * (THREADS * AT_ONCE * 16);
  const i64 row = start / row_bytes, head = row / x.T;
  const u32 t = u32(row - head * x.T), b = u32(head / x.H), h = u32(head - b * x.H);
  const u32 width = u32(row_bytes), before = u32(start - row * row_bytes) + threadIdx.x * 16;
  const u32 columns_on = THREADS * 16 % width, rows_on = THREADS * 16 / width;  // from a piece to the thread's next one
  const int copied = int(min(row_bytes, x.size_c * x.bytes));                   // bytes of a row
  const int rows = width % 16 ? 1 + int((14 + width - 1) / width) : 1;          // that a piece has bytes of, at most
  const char *const low = x.from_ - x.below + 2, *const high = x.from_ + x.above - 20;  // `load_words` may read there
  char *to = x.to + start + threadIdx.x * 16, *const end = x.to + x.count * x.bytes;
  u32 down = before / width, column = before % width;  // `to` is in the row that is `down` rows after row (b, h, t)
#pragma unroll 1
  for (int n = 0; n < AT_ONCE; ++n, to += THREADS * 16) {
    Wide piece = {};
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const int at = int(r * width) - int(column);  // where the row starts in the piece
      const int first = max(at, 0), stop = min(at + copied, 16);
      const char* const from = first < stop ? row_start(x, b, h, t, down + r) : nullptr;
      if (!from) continue;
      const bool neighbours = x.stride_c == 1 && low <= from - at && from - at <= high;
      add_bytes(piece, neighbours ? load_words(from - at) : load_halves(x, from, at, first, stop), first, stop);
    }
    if (to + 16 <= end) *reinterpret_cast<Wide*>(to) = piece;
    else store_halves(to, end, piece);
    column += columns_on, down += rows_on;
    if (column >= width) column -= width, ++down;
  }
}
