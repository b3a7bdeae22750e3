// what      What all softmax attention kernels share: the table of their tiles, which keys a query sees, a row's
//           maximum and sum.
#include "tensor.cuh"

// A tile of queries (or of keys) that a block computes, and the tiles of keys (or of queries: the other side) for it.
// The host makes a table of them, balanced over the blocks; an entry with `tiles` of 0 ends a block's list.
struct alignas(16) Work {
  i32 batch, head;
  i32 start, tokens;              // the tile's first token in its arrays, and its number of tokens
  i32 other_start, other_length;  // the other side's sequence: its first token in its arrays, how many tokens count
  i32 diagonal;           // the token of the other side's sequence that has the position of the tile's first one
  i32 first_tile, tiles;  // of the other side: the first tile, and how many
  i32 statistics_chunk;   // in `statistics`: the tile's first 64 queries, or those of the sequence
  i32 output_batch;       // the batch index of its results: `batch`, or, where keys are split, that of a part
  i32 ds_index;           // see DsEntry: of a tile of keys, ds_offsets of it; of a tile of queries, the number of the
                          // sequence's first tile of keys in ds_offsets
};

// Which tokens of the other side a row sees that meets the diagonal there: the first one, how many.
struct Seen {
  int from, count;
};
__device__ __forceinline__ Seen seen(int diagonal, int before, int behind, int length) {
  const int from = max(diagonal - before, 0);
  return {from, max(min(diagonal + behind + 1, length) - from, 0)};
}

// Whether some of ROWS rows, of which the first meets the diagonal at `diagonal`, do not see some of COLUMNS tokens of
// the other side from `column` on.
template <int ROWS, int COLUMNS>
__device__ __forceinline__ bool partly_seen(int column, int diagonal, int before, int behind, const i32& length) {
  if (column + COLUMNS > length) return true;
  return column + COLUMNS - 1 > diagonal + behind || column < diagonal + ROWS - 1 - before;
}

// Values of tokens that a row does not see become `unseen`. A lane has two rows of a product, of which the first meets
// the diagonal at `diagonal` and the second 8 tokens on; the product's columns are tokens from `column` on.
template <int EIGHTS>
__device__ __forceinline__ void mask_rows(float (&x)[EIGHTS][4], int column, int diagonal, int before, int behind,
                                          const i32& length, float unseen) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const Seen tokens = seen(diagonal + 8 * half, before, behind, length);
    const int from = column - tokens.from;
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        if (u32(from + 8 * n + 2 * int(threadIdx.x & 3) + i) >= u32(tokens.count)) x[n][2 * half + i] = unseen;
  }
}
template <int N>
__device__ __forceinline__ void mask_rows(float (&x)[N], int column, int diagonal, int before, int behind, int length,
                                          float unseen) {
  mask_rows(reinterpret_cast<float (&)[N / 4][4]>(x), column, diagonal, before, behind, length, unseen);
}

// The array `statistics` [B, H, chunks, 2, 64] has for every 64 queries of a sequence, a chunk, first L = log2 sum_j
// e^s_ij and then delta. L is infinite for a query that sees no key and behind the sequence's end: weights are then 0.
constexpr int CHUNK_QUERIES = 64;

__device__ __forceinline__ float minus_infinity() { return __uint_as_float(0xff800000u); }

// Of the four lanes that share a row.
__device__ __forceinline__ float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}
__device__ __forceinline__ float row_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// x + the dot product of two neighbouring elements of g and o.
template <typename T> __device__ __forceinline__ float add_dot(u32 g, u32 o, float x) {
  x = fmaf(to_float(T{u16(g)}), to_float(T{u16(o)}), x);
  return fmaf(to_float(T{u16(g >> 16)}), to_float(T{u16(o >> 16)}), x);
}

// The size of the scale, in base 2, above 0, so that it leaves -inf as it is.
__device__ __forceinline__ float size_of_scale(double scale) { return max(float(fabs(scale)) * LOG2E, 1e-37f); }

// tanh(x), to 2^-22 of 1.
__device__ __forceinline__ float tanh_of(float x) {
  return fmaf(-2.f, inverse(exp2_approx(2.f * LOG2E * x) + 1.f), 1.f);
}

// 1 - tanh^2 of a capped score, which its weight p = 2^(scale tanh - L) tells; `scale` is the cap in base 2.
__device__ __forceinline__ float slope_of_cap(float p, float L, float scale) {
  const float its = max((log2_approx(p) + L) * inverse(scale), -1.f);
  return fmaf(-its, its, 1.f);
}

// The largest score of a row so far: products x have weights 2^(factor x - shift). Rounding `shift` changes all weights
// of a row by one factor, which the division by their sum undoes; it is 2^4 at most for shifts up to MOST_ROUNDED.
// Beyond, it would overflow, and scores that differ in float32 differ by 2^3 or more: `factor` is then the power of two
// above the scale instead of the scale. Its products are exact.
struct RowMaximum {
  static constexpr float NONE = -3e38f;                 // finite, so that what is subtracted from -inf is not NaN
  static constexpr float MOST_ROUNDED = 1.34217728e8f;  // 2^27
  float factor, shift = NONE;

  static __device__ __forceinline__ float power_above(float scale) {
    return __uint_as_float((__float_as_uint(scale) + 0x7fffffu) & 0xff800000u);
  }
  // Takes the largest of some products, if it raises the maximum by more than `slack` in base 2; returns what earlier
  // weights are to be multiplied by. `scale` makes scores of products, in base 2. Selections, since branches cost more.
  __device__ __forceinline__ float raise(float largest, float scale, float slack) {
    const float before = shift;
    const bool raises = fmaf(factor, largest, -shift) > slack;
    const float by = fabsf(largest) > MOST_ROUNDED * inverse(scale) ? power_above(scale) : scale;
    factor = raises ? by : factor;
    shift = raises ? by * largest : shift;
    return exp2_approx(before - shift);
  }
  // The score to base 2 that a shift stands for; the limit is larger by the rounding of the one above.
  static __device__ __forceinline__ float score_of(float shift, float scale) {
    return fabsf(shift) > 1.000001f * MOST_ROUNDED ? scale * inverse(power_above(scale)) * shift : shift;
  }
};

// L of a query as `statistics` have it: infinite if the query sees no key, and if L is so large that its rounding would
// change weights by more than 2^2.
__device__ __forceinline__ float known_logarithm(float L) { return fabsf(L) > 0x1p24f ? -minus_infinity() : L; }

// What a row's sums become at the end: the factor of its output, and the logarithm of the sum of weights, base 2.
// `most` is what was subtracted, `sum` the sum of weights without the sink's, both logarithms in base 2.
struct RowEnd {
  float factor, logarithm;
};
__device__ __forceinline__ RowEnd row_end(float most, float sum, float sink) {
  const float top = max(max(most, sink), -3e38f);  // finite also where no key is seen
  const float kept = exp2_approx(most - top), all = fmaf(sum, kept, exp2_approx(sink - top));
  return {all > 0.f ? kept / all : 0.f, top + log2f(all)};
}
