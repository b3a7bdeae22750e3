// what      Arrays and sequences as kernels see them: strided rows, token spans, 64-bit addresses throughout.
#include "ptx.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// exp of a gate: 0 for -inf, and if the result is below float32's normal numbers.
__device__ __forceinline__ float decay_of(float gate) { return exp2_approx(gate * LOG2E); }

// x e^sum, in two steps: e^sum may leave float32's range although the result does not.
__device__ __forceinline__ float grown(float x, float sum) {
  const float half = exp2_approx(fminf(sum * (0.5f * LOG2E), 127.f));
  return x * half * half;
}

// A state counts as forgotten if later gates add up to this: e^-48 of it (1.4e-21) changes no state of similar size.
constexpr float FORGOTTEN_NATS = -48.f;

// [B, H, T, last]: strides in elements, the last axis contiguous.
template <typename T> struct Rows {
  T* p;
  i64 b, h, t;

  __device__ T* row(i64 batch, i64 head, i64 token) const { return p + batch * b + head * h + token * t; }
};

// The sizes of a problem, an argument of every kernel; `bounds` and `chunks` are null for dense batches.
struct Shape {
  i64 B, H, T, K, V;
  i64 count;                // sequences in a row of the batch: 1 when dense, N when packed
  const i64* bounds;        // [count + 1], token range of each packed sequence
  i64 chunk;                // tokens a chunk
  i64 NC;                   // chunks in a row of the batch
  const i64* chunks;        // [NC, 2], token range of each chunk
  const i64* chunk_bounds;  // [count + 1], chunk range of each packed sequence
};

// Tokens, or chunks, `start` ... `stop` - 1 of a row of the batch.
struct Span {
  i64 start, stop;
};

// Sequence s of a row, in tokens and in chunks.
__device__ __forceinline__ Span tokens_of(const Shape& x, i64 s) {
  if (x.bounds) return {x.bounds[s], x.bounds[s + 1]};
  return {0, x.T};
}
__device__ __forceinline__ Span chunks_of(const Shape& x, i64 s) {
  if (x.chunk_bounds) return {x.chunk_bounds[s], x.chunk_bounds[s + 1]};
  return {0, x.NC};
}

// Chunk c of a row, in tokens.
__device__ __forceinline__ Span chunk_tokens(const Shape& x, i64 c) {
  if (x.chunks) return {x.chunks[2 * c], x.chunks[2 * c + 1]};
  const i64 start = c * x.chunk;
  return {start, start + x.chunk < x.T ? start + x.chunk : x.T};
}

// Fills s [ROWS, COLS] in shared memory, rows LD apart, with rows from `first` on and columns from `column` on of
// (batch, head), as floats; zeros from row `stop` and column `width` on. All threads of the block call this, and
// synchronise before they read s. Eight loads of a thread are under way at a time.
template <int ROWS, int COLS, int LD, int THREADS, typename T>
__device__ __forceinline__ void load_tile(float* s, const Rows<const T>& x, i64 batch, i64 head, i64 first, i64 stop,
                                          i64 column, i64 width) {
  constexpr int ACROSS = COLS < THREADS ? COLS : THREADS, DOWN = THREADS / ACROSS, ROWS_PER_THREAD = ROWS / DOWN;
  constexpr int AT_ONCE = ROWS_PER_THREAD < 8 ? ROWS_PER_THREAD : 8;
  static_assert(THREADS % ACROSS == 0 && COLS % ACROSS == 0 && ROWS % DOWN == 0 && ROWS_PER_THREAD % AT_ONCE == 0);
  const int row = threadIdx.x / ACROSS, rows = stop - first < ROWS ? int(stop - first) : ROWS;
#pragma unroll 1
  for (int col = threadIdx.x % ACROSS; col < COLS; col += ACROSS) {
    const T* from = x.row(batch, head, first + row) + column + col;
    const bool inside = column + col < width;
#pragma unroll 1
    for (int n = 0; n < ROWS_PER_THREAD; n += AT_ONCE) {
      float r[AT_ONCE];
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m) {
        r[m] = inside && row + (n + m) * DOWN < rows ? to_float(*from) : 0.f;
        from += DOWN * x.t;
      }
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m) s[(row + (n + m) * DOWN) * LD + col] = r[m];
    }
  }
}

// The current stage of a ring of N buffers, and the parity of the phase that a wait for its barriers is for.
template <int N> struct Ring {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == N) stage = 0, parity ^= 1;
  }
};
