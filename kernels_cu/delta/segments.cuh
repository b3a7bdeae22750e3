// what      A segment of a sequence in a walk over the states of a delta rule: its tokens, where its first state comes
//           from, and where its last one belongs.
#include "tensor.cuh"

template <typename R> __device__ __forceinline__ bool is_finite(R x) { return x - x == R(0); }

// One of P segments of a sequence, in the direction of a walk.
template <typename R> struct Segment {
  bool first, last;
  Span tokens, chunks;
  const R* from;  // the state before it, or null: zeros
  R* to;          // where the state behind it belongs, or null
};

// Segment n % P of sequence n / P. `given` and `final`: states of sequences. `starts`: where segments start from; there
// a walk without outputs leaves its state for the next segment, and starts from zeros itself unless one is given.
// `whole`: the first segment has all tokens, the others have none.
template <bool BACKWARDS, typename R>
__device__ __forceinline__ Segment<R> segment_of(bool outputs, const Shape& shape, u32 P, u32 n, u32 h,
                                                 const Rows<const R>& given, R* starts, const Rows<R>& final,
                                                 bool whole) {
  const u32 p = n % P, s = n % u32(shape.count), left = s - p;
  const i64 states = shape.H * shape.K * shape.V;  // numbers of all heads
  R* start = starts + (BACKWARDS * shape.B * shape.count + n) * states + h * shape.K * shape.V;
  Segment<R> x = {p == (BACKWARDS ? P - 1 : 0), p == (BACKWARDS ? 0 : P - 1), tokens_of(shape, s), chunks_of(shape, s)};
  if (whole && x.first) {
    x.last = true;
    x.tokens = {tokens_of(shape, left).start, tokens_of(shape, left + P - 1).stop};
    x.chunks = {chunks_of(shape, left).start, chunks_of(shape, left + P - 1).stop};
  } else if (whole) {
    x.last = false;
    x.tokens = x.chunks = {};
  }
  if (!x.first && outputs) x.from = start;
  else if (x.first && given.p) x.from = given.row(n / P, h, 0);
  if (!outputs) x.to = start + (BACKWARDS ? -states : states);
  else if (x.last && final.p) x.to = final.row(n / P, h, 0);
  return x;
}

// Whether a walk with outputs must take sequence n / P whole, in `columns` columns from `column` on, at most one a
// thread: because what a segment does to states, or a state, was out of range as segments were joined. A number that is
// not finite makes all channels of its column so in the next segment; in the last one join_segments.cu says it in the
// first channel.
template <bool BACKWARDS, typename R>
__device__ __forceinline__ bool is_whole(const Shape& shape, u32 P, u32 n, u32 h, const R* starts, int column,
                                         int columns) {
  if (P == 1) return false;
  const i64 last = BACKWARDS * shape.B * shape.count + n / P * P + (BACKWARDS ? 0 : P - 1);
  const R* row = starts + (last * shape.H + h) * shape.K * shape.V + column;
  return __syncthreads_or(int(threadIdx.x) < min(columns, int(shape.V) - column) && !is_finite(row[threadIdx.x]));
}
