// what      What all softmax attention kernels share: the table of their tiles, masks, and the maximum and the sum of a
//           row of scores.
#include "lanes.cuh"
#include "tensor.cuh"

// A tile of queries (or of keys) that a block computes, and the tiles of keys (or of queries: the *other side*) for it.
// How many tokens a tile has is a constant of each kernel. The host makes a table of them, balanced over the blocks; an
// entry with `tiles` of 0 ends a block's list. WORK in backends/cupy/softmax_tiles.py has the same members in the same
// order: compilers compare their number alone.
struct alignas(16) Work {
  i32 batch, head;
  i32 start, tokens;              // the tile's first token in its arrays, and its number of tokens
  i32 other_start, other_length;  // the other side's sequence: its first token in its arrays, how many tokens count
  i32 diagonal;                   // the position of the tile's first token in the other side's sequence
  i32 first_tile, tiles;          // of the other side: the first tile, and how many
  i32 statistics_chunk;  // in `statistics`: of a tile of queries its first chunk, of keys their sequence's first
  i32 output_batch;      // the batch index of its results: `batch`, or another one for each part if keys are split
  i32 ds_index;          // see DsEntry: of a tile of keys, ds_offsets of it; of a tile of queries, the number of the
                         // sequence's first tile of keys in ds_offsets
};

// Tokens `from` ... `from` + `count` - 1 of a sequence.
struct TokenRange {
  int from, count;
};
// The tokens of the other side's sequence, of `length` tokens, that a row sees: from `before` tokens before position
// `diagonal`, which is the row's own, to `after` tokens after it.
__device__ __forceinline__ TokenRange visible_tokens(int diagonal, int before, int after, int length) {
  const int from = max(diagonal - before, 0);
  return {from, max(min(diagonal + after + 1, length) - from, 0)};
}

// Whether scores need a mask: some of ROWS rows, with positions from `diagonal` on, do not see some of COLUMNS tokens
// of the other side from `column` on. before, after: how many tokens before and after its position a row sees; for keys
// as rows these are the host's `right` and `left`.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool needs_mask(int column, int diagonal, int before, int after, const i32& length) {
  if (column + COLUMNS > length) return true;
  return column + COLUMNS - 1 > diagonal + after || column < diagonal + ROWS - 1 - before;
}

// Sets x to `hidden_value` for the tokens that a row does not see. A lane has two rows of a product, with the positions
// `diagonal` and `diagonal` + 8; the product's columns are the other side's tokens from `column` on, 8 of them in x[n].
// `length` is a reference, so that kernels with few registers load it where it is used.
template <int EIGHTS>
__device__ __forceinline__ void mask_rows(float (&x)[EIGHTS][4], int column, int diagonal, int before, int after,
                                          const i32& length, float hidden_value) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const TokenRange tokens = visible_tokens(diagonal + 8 * half, before, after, length);
    const int from = tokens.from - column - 2 * int(threadIdx.x & 3), stop = from + tokens.count;
    // Each limit in a loop of its own, since comparing with a constant takes no addition.
    const auto hide_where = [&](auto is_hidden) {
#pragma unroll
      for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          if (is_hidden(8 * n + i)) x[n][2 * half + i] = hidden_value;
    };
    hide_where([&](int j) { return j >= stop; });
    if (from > 0) hide_where([&](int j) { return j < from; });
  }
}
// The same for accumulators of wgmma.
template <int N>
__device__ __forceinline__ void mask_rows(float (&x)[N], int column, int diagonal, int before, int after, int length,
                                          float hidden_value) {
  mask_rows(reinterpret_cast<float (&)[N / 4][4]>(x), column, diagonal, before, after, length, hidden_value);
}

// The array `statistics` [B, H, chunks, 2, 64] has for every 64 queries of a sequence, a chunk, first L = log2 sum_j
// e^s_ij and then delta = do . o less the gradient of log sum_j e^s_ij. L is infinite for a query that sees no key, and
// after the sequence's end, where delta is 0: weights are then 0, and so are products with them.
constexpr int CHUNK_QUERIES = 64, CHUNK_STATISTICS = 2 * CHUNK_QUERIES;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// The maximum and the sum over the four lanes that share a row, neighbours whose numbers are equal but for the last two
// bits; each gets the result.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) { return sum_over_lanes<4>(x); }

// x + the dot product of two neighbouring elements of do and o.
template <typename T> __device__ __forceinline__ float add_dot(u32 do_, u32 o, float x) {
  x = fmaf(to_float(T{u16(do_)}), to_float(T{u16(o)}), x);
  return fmaf(to_float(T{u16(do_ >> 16)}), to_float(T{u16(o >> 16)}), x);
}

// |scale| log2 e, and above 0: the product with a masked score, -inf, is not NaN.
__device__ __forceinline__ float size_of_scale(double scale) { return max(float(fabs(scale)) * LOG2E, 1e-37f); }

// tanh(x), with an error of at most 2^-22.
__device__ __forceinline__ float tanh_of(float x) {
  return fmaf(-2.f, inverse(exp2_approx(2.f * LOG2E * x) + 1.f), 1.f);
}

// 1 - tanh^2 of a capped score, computed from its weight p = 2^(scale tanh - L); `scale` is the cap times log2 e.
// 0 if p is 0, for any L: the maximum of NaN and -1 is -1.
__device__ __forceinline__ float slope_of_cap(float p, float L, float scale) {
  const float capped = max((log2_approx(p) + L) * inverse(scale), -1.f);
  return fmaf(-capped, capped, 1.f);
}

// The largest score of a row so far, `shift`, to base 2. A product x = q . k (or its tanh) has the weight 2^(factor x -
// shift). Rounding `shift` multiplies all weights of a row by one number, which the division by their sum undoes. That
// number is at most 2^4 for shifts up to MOST_ROUNDED. For larger shifts it could overflow, and scores that differ in
// float32 differ by 2^3 or more: there `factor` is the power of two above the scale, whose products are exact, instead
// of the scale.
struct RowMaximum {
  static constexpr float NONE = -3e38f;                 // before the first score; finite: -inf - shift is not NaN
  static constexpr float MOST_ROUNDED = 1.34217728e8f;  // 2^27
  float factor, shift = NONE;

  // The least power of two that is not below `scale`.
  static __device__ __forceinline__ float power_above(float scale) {
    return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u);
  }
  // Raises the maximum to the score of `largest`, the largest of some products, if it grows by more than `slack`.
  // Returns the factor for earlier weights, 1 if the maximum stays. `scale` and `slack` are in base 2. Selections,
  // since branches cost more.
  __device__ __forceinline__ float raise(float largest, float scale, float slack) {
    const float before = shift;
    const bool raises = fmaf(factor, largest, -shift) > slack;
    const float new_factor = fabsf(largest) > MOST_ROUNDED * inverse(scale) ? power_above(scale) : scale;
    factor = raises ? new_factor : factor;
    shift = raises ? new_factor * largest : shift;
    return exp2_approx(before - shift);
  }
  // The score in base 2 that was the maximum when `shift` was set. The limit is MOST_ROUNDED, as in `raise`, and what
  // rounding may add to it.
  static __device__ __forceinline__ float score_of(float shift, float scale) {
    return fabsf(shift) > 1.000001f * MOST_ROUNDED ? scale * inverse(power_above(scale)) * shift : shift;
  }
};

// L of a query for `statistics`: infinite, so that weights are 0, if the query sees no key or if |L| is above 2^24: the
// roundings of lse, of log2(e) and of their product then add up to about 2, which is a factor of 2^2 of a weight.
__device__ __forceinline__ float logarithm_or_infinity(float L) { return fabsf(L) > 0x1p24f ? -minus_infinity() : L; }

// A row's results: the factor for its sums of weighted values, and log2 of the sum of all weights. `maximum` is the
// score that was subtracted, in base 2, `sum` the sum of weights without the sink's, `sink` the sink's score in base 2.
struct RowEnd {
  float factor, logarithm;
};
__device__ __forceinline__ RowEnd row_end(float maximum, float sum, float sink) {
  const float top = max(max(maximum, sink), -3e38f);  // finite even if no key is seen
  const float rescale = exp2_approx(maximum - top), total = fmaf(sum, rescale, exp2_approx(sink - top));
  return {total == 0.f ? 0.f : rescale / total, top + log2f(total)};
}
