// what      A segment of a sequence in a walk over the states of a delta rule: its tokens, where its first state comes
//           from, and where the walk stores its last one.
#include "tensor.cuh"

// From tensor.cuh:
//   shape.H: heads of values
//   tokens_of, chunks_of: those of a sequence

// n rounded up to a multiple of 4: channels of a row of F, and of a kept state, of which the last ones are zeros.
template <typename N> __device__ __forceinline__ constexpr N padded_to_4(N n) { return (n + 3) / 4 * 4; }

// Whether x is neither infinite nor NaN.
template <typename R> __device__ __forceinline__ bool is_finite(R x) { return x - x == R(0); }

// One of P segments of a sequence, as a walk of one direction has it. first, last: whether the walk comes to it first,
// or last: of a walk backwards, `first` is the last one in time. chunks: among those of the batch row.
template <typename R> struct Segment {
  bool first, last;
  Span tokens, chunks;
  const R* from;  // the state that the walk starts from; null: zeros
  R* to;          // the memory for the state that the walk ends with; null: not wanted
};

// Segment n % P of sequence n / P; in `shape` segments take the place of sequences. `given` [sequence, head, K V]: the
// states that sequences start from, or null; `final`: the memory for those they end with, or null. `starts` [direction,
// segment, head, K, V]: the states that segments start from; direction 1 is backwards.
// `outputs`: the walk computes outputs; it starts from `starts`, or, in the first segment, from `given`. A walk without
// outputs starts from `given` or zeros, and stores its last state in `starts` for the next segment. `whole`, only of
// walks with outputs: the first segment has all tokens of the sequence and stores the last state; the others have no
// tokens and store nothing. h: the head.
constexpr bool WITH_OUTPUTS = true, WITHOUT_OUTPUTS = false;
template <bool BACKWARDS, typename R>
__device__ __forceinline__ Segment<R> segment_of(bool outputs, const Shape& shape, u32 P, u32 n, u32 h,
                                                 const StridedRows<const R>& given, R* starts,
                                                 const StridedRows<R>& final, bool whole) {
  const u32 p = n % P, in_row = n % u32(shape.row_sequences), first = in_row - p;
  const i64 states = shape.H * shape.K * shape.V;  // numbers of all heads
  R* start = starts + (BACKWARDS * shape.B * shape.row_sequences + n) * states + h * shape.K * shape.V;
  Segment<R> segment = {p == (BACKWARDS ? P - 1 : 0), p == (BACKWARDS ? 0 : P - 1), tokens_of(shape, in_row),
                        chunks_of(shape, in_row)};
  if (whole && segment.first) {
    segment.last = true;
    segment.tokens = {tokens_of(shape, first).start, tokens_of(shape, first + P - 1).stop};
    segment.chunks = {chunks_of(shape, first).start, chunks_of(shape, first + P - 1).stop};
  } else if (whole) {
    segment.last = false;
    segment.tokens = segment.chunks = {};
  }
  if (!segment.first && outputs) segment.from = start;
  else if (segment.first && given.p) segment.from = given.row(n / P, h, 0);
  if (!outputs) segment.to = start + (BACKWARDS ? -states : states);
  else if (segment.last && final.p) segment.to = final.row(n / P, h, 0);
  return segment;
}

// Whether a walk with outputs must take the sequence of segment n whole, in `columns` columns of the state from
// `column` on: because numbers grew out of range when segments were joined. join_segments.cu then stores NaN in the
// first channel of the state from which the walk's last segment starts, in these columns. All threads of the block call
// this: at least `columns` of them, each of which reads one number; it is a barrier, and all get the same answer.
template <bool BACKWARDS, typename R>
__device__ __forceinline__ bool is_whole(const Shape& shape, u32 P, u32 n, u32 h, const R* starts, int column,
                                         int columns) {
  if (P == 1) return false;
  const i64 last = BACKWARDS * shape.B * shape.row_sequences + n / P * P + (BACKWARDS ? 0 : P - 1);
  const R* row = starts + (last * shape.H + h) * shape.K * shape.V + column;
  return __syncthreads_or(int(threadIdx.x) < min(columns, int(shape.V) - column) && !is_finite(row[threadIdx.x]));
}
