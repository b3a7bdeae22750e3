// what      Arrays and sequences as kernels see them: strided rows, token spans, 64-bit addresses throughout.
#include "ptx.cuh"

constexpr float LOG2E = 1.4426950408889634f;

// Select<CONDITION, X, Y>: the type X if CONDITION, else Y.
template <bool CONDITION, typename X, typename Y> struct Selection {
  using type = X;
};
template <typename X, typename Y> struct Selection<false, X, Y> {
  using type = Y;
};
template <bool CONDITION, typename X, typename Y> using Select = typename Selection<CONDITION, X, Y>::type;

// exp of a gate, which is a natural logarithm: 0 for -inf, and if the result is below float32's normal numbers.
__device__ __forceinline__ float decay_of(float gate) { return exp2_approx(gate * LOG2E); }

// The smaller of x and `most`; NaN stays NaN, of which fminf would make `most`.
__device__ __forceinline__ float at_most(float x, float most) { return x > most ? most : x; }

// x e^sum, as two factors of e^(sum / 2): e^sum may leave float32's range although the result does not.
__device__ __forceinline__ float grown(float x, float sum) {
  const float half = exp2_approx(at_most(sum * (0.5f * LOG2E), 127.f));
  return x * half * half;
}

// A state counts as forgotten once the later log gates of each of its channels sum to this or less. e^-48 = 1.4e-21 of
// it remains: less than float32's rounding (6e-8) of what later tokens have written, unless it was 4e13 times as large.
constexpr float FORGOTTEN_NATS = -48.f;

constexpr float LARGEST_FLOAT = 0x1.fffffep127f;

// Whether `kept`, a number of a state, hides what is forgotten, which would add `decay` times an earlier number of the
// state: an earlier number of 1 would add at most 5e-7 of `kept`. Later gates, also those above 0, multiply both alike,
// so that it stays hidden. NaN hides all.
__device__ __forceinline__ bool hides_forgotten(float kept, float decay) { return !(fabsf(kept) < 0x1p21f * decay); }
// Whether `number` is large enough that a token whose key and value have such numbers alone writes what hides a decay
// of e^FORGOTTEN_NATS: the square of 2^-24 is 2^21 times that decay.
__device__ __forceinline__ bool writes_enough(float number) { return !(fabsf(number) < 0x1p-24f); }

// An array [B, H, T, width], the last axis contiguous. Strides are in elements; the host (row_words in
// backends/cupy/arguments.py) writes them in this order.
template <typename T> struct StridedRows {
  T* p;
  i64 batch_stride, head_stride, token_stride;

  __device__ T* row(i64 batch, i64 head, i64 token) const {
    return p + batch * batch_stride + head * head_stride + token * token_stride;
  }
};

// The sizes of a problem, an argument of most kernels. The pointers are null for dense batches, in which every row of
// the batch is one sequence. The host has the same members in the same order (SHAPE in backends/cupy/plan.py), and the
// compiler compares them.
struct Shape {
  i64 B, H, T, K, V;
  i64 row_sequences;        // sequences, or segments, of a batch row: of dense sequences 1, of packed ones N
  const i64* bounds;        // [row_sequences + 1]; sequence s has the tokens bounds[s] to bounds[s + 1] - 1
  i64 chunk;                // tokens of a chunk
  i64 NC;                   // chunks in a row of the batch
  const i64* chunks;        // [NC, 2], each chunk's first token and the token after its last
  const i64* chunk_bounds;  // [row_sequences + 1]; sequence s has the chunks chunk_bounds[s] to chunk_bounds[s + 1] - 1
};

constexpr bool FORWARDS = false, BACKWARDS = true;  // the direction of a walk over tokens, or segments

// Tokens, or chunks, `start` ... `stop` - 1 of a row of the batch.
struct Span {
  i64 start, stop;
};

// The tokens, and the chunks, of sequence s of a row of the batch.
__device__ __forceinline__ Span tokens_of(const Shape& x, i64 s) {
  if (x.bounds) return {x.bounds[s], x.bounds[s + 1]};
  return {0, x.T};
}
__device__ __forceinline__ Span chunks_of(const Shape& x, i64 s) {
  if (x.chunk_bounds) return {x.chunk_bounds[s], x.chunk_bounds[s + 1]};
  return {0, x.NC};
}

// The tokens of chunk c of a row of the batch.
__device__ __forceinline__ Span chunk_tokens(const Shape& x, i64 c) {
  if (x.chunks) return {x.chunks[2 * c], x.chunks[2 * c + 1]};
  const i64 start = c * x.chunk;
  return {start, start + x.chunk < x.T ? start + x.chunk : x.T};
}

// Fills s [ROWS, COLS] in shared memory, rows LD numbers apart, with the tokens from `first` on and the columns from
// `column` on of x's (batch, head), as floats. Tokens from `stop` on and columns from `width` on become zeros. All
// threads of the block call this, and synchronise before they read s. A thread has up to eight loads under way.
template <int ROWS, int COLS, int LD, int THREADS, typename T>
__device__ __forceinline__ void load_tile(float* s, const StridedRows<const T>& x, i64 batch, i64 head, i64 first,
                                          i64 stop, i64 column, i64 width) {
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
        from += DOWN * x.token_stride;
      }
#pragma unroll
      for (int m = 0; m < AT_ONCE; ++m) s[(row + (n + m) * DOWN) * LD + col] = r[m];
    }
  }
}

// A thread's place in a ring of N buffers that have mbarriers: `stage`, the current buffer, and the parity that a wait
// for its mbarrier takes: 0 in the first round of the ring, then 1, and so on. A wait with parity ^ 1 is for the end of
// the round before, and returns at once in the first round.
template <int N> struct RingPosition {
  int stage = 0;
  u32 parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == N) stage = 0, parity ^= 1;
  }
};
