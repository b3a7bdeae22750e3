// what      A segment of a sequence in a walk over the states of a delta rule: where its first state comes from, and
//           where its last one belongs.
#include "tensor.cuh"

// One of P segments of a sequence, in the direction of a walk.
template <typename R> struct Segment {
  bool first, last;
  const R* from;  // the state before it, or null: zeros
  R* to;          // where the state behind it belongs, or null
};

// Segment n % P of sequence n / P. `given` and `final`: states of sequences. `starts`: where segments start from; there
// a walk without outputs leaves its state for the next segment, and starts from zeros itself unless one is given.
template <bool BACKWARDS, typename R>
__device__ __forceinline__ Segment<R> segment_of(bool outputs, const Shape& shape, u32 P, u32 n, u32 h,
                                                 const Rows<const R>& given, R* starts, const Rows<R>& final) {
  const u32 p = n % P;
  const i64 states = shape.H * shape.K * shape.V;  // numbers of all heads
  R* start = starts + (BACKWARDS * shape.B * shape.count + n) * states + h * shape.K * shape.V;
  Segment<R> x = {p == (BACKWARDS ? P - 1 : 0), p == (BACKWARDS ? 0 : P - 1), nullptr, nullptr};
  if (!x.first && outputs) x.from = start;
  else if (x.first && given.p) x.from = given.row(n / P, h, 0);
  if (!outputs) x.to = start + (BACKWARDS ? -states : states);
  else if (x.last && final.p) x.to = final.row(n / P, h, 0);
  return x;
}
