// what      Products of the value gate's forward kernel: outputs from the state, outputs from the chunk's values, and
//           the update of the state.
// math      o = F * (q decayed) S + (A * F) v, with the columns' decays F from the chunk's start, or between two
//           tokens (the caller multiplies by scale); S <- diag(decay of channels) S diag(decay of columns) + (k decayed
//           to the chunk's end)^T (v decayed to it)
// shapes    a sub-chunk has SUB_CHUNK = 8 tokens, a chunk NUM_SUBCHUNKS of them: 4, or 2 if operands are floats. With g
//           = lane / 4 and t = lane % 4 a lane has columns g and g + 8 of a warp's 16:
//             outputs (transposed)     o[n / 2][n % 2][2h + i] is token 8n + 2t + i, column g + 8h
//             the state                S[n][2h + i] is channel 8n + 2t + i, column g + 8h
//             values or gates of 16    x[p], pair p of a left operand [column, token], is tokens 2t and 2t + 1 of
//             tokens                   sub-chunk p / 2, column g + 8 (p % 2)
//           A in memory is [query, key], 0 above the diagonal; products take it as right operands [key, query]
// barriers  none here: before a call, one of the caller's has passed since s.A, s.v, s.value_gates and the operands
//           were written. All lanes of a warp call these functions together
// numerics  sums in float32; the state is rounded to an operand, and so are decayed values. If gates grow, the values
//           of a sub-chunk of 8 tokens are added one by one. PRODUCTS: tf32 products for each product of float32 data,
//           1 or 3; Math, Left, Right, multiply, multiply_half, accumulate (multiply for sums over many tokens):
//           fragments.cuh
//
// From the includes:
//   CHUNK<T>: tokens of a chunk; State, Output: a lane's numbers of S and o
//   OperandOf<T>::Type: the type of operands in shared memory; `words`: a lane's operand as registers of two 16-bit
//     numbers; place: the address of a number in a tile
//   Readers load operands from tiles: RowsReader queries, RightReader keys; TransposedReader: the base of ColumnsReader
//   state_k: the chunk's keys, decayed for products with S; decays_of(gates): two tokens' decays; RightBf16, RightTf32:
//     right operands; own_lane: the lane's number, whose origin is hidden
//   product_over(x, first, end): the product of x[first ... end - 1]
//   Schedule: which launches and results there are; AfterWrite: queries read the state after their token's write
//   ScoreStorage: the part of Shared that has A, of rows LDA apart, in which a score is the sum of NUMBERS numbers
#include "decays.cuh"
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "growth.cuh"

// Loads 16 columns from `column` on of tiles with rows of COLS values. load: x[p], laid out as above, from the 16
// tokens from `row` on. at(tile, row, col): the lane's first address, `row` rows and `col` columns further on.
template <int COLS, typename X> struct ColumnsReader : TransposedReader<COLS, X> {
  __device__ __forceinline__ ColumnsReader(int column) : TransposedReader<COLS, X>(column) {}

  __device__ __forceinline__ void load(float2 (&x)[4], const X* tile, int row) const {
    if constexpr (sizeof(X) == 2) {
      u32 r[4];
      ldmatrix_x4_trans(r, this->at(tile, row, 0));
#pragma unroll
      for (int p = 0; p < 4; ++p) x[p] = unpack(r[p], X{});
    } else {
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int first = row + 8 * (p >> 1), right = 8 * (p & 1);
        // right ^ 4: a row further, the place of the same piece of 4 floats differs in bit 0
        x[p] = {*this->at(tile, first, right), *this->at(tile, first + 1, right ^ 4)};
      }
    }
  }
};

// Multiplies a lane's outputs d of 8 tokens by x in its first column, by y in its second one.
__device__ __forceinline__ void scale_columns(float (&d)[4], float x, float y) {
  d[0] *= x, d[1] *= x, d[2] *= y, d[3] *= y;
}

// Schedule, Shared (inputs q, k, v of two stages, operands, scores A, decay of channels): gated/forward_storage.cuh.
template <class Schedule, typename T, typename G, int BK, int BV>
struct alignas(16) ValueShared : Shared<Schedule, T, G, BK, BV> {
  static_assert((BK == 64 || BK == 128) && (BV == 64 || BV == 128));
  G value_gates[CHUNK<T> * BV];  // [chunk, BV]
};

// Loads the scores of queries row ... row + 7 with 16 keys from `key` on as right operands that are contracted over
// keys. LDA: the distance of A's rows. bf16: each score is the sum of two numbers, which go to b[0] and b[1] and are
// `distance` numbers apart in A.
template <int LDA>
__device__ __forceinline__ void load_scores(RightBf16 (&b)[2], const bf16* A, int row, int key, int distance) {
  const int lane = own_lane();
  u32 r[4];
  ldmatrix_x4(r, A + (lane >> 4) * distance + (row + (lane & 7)) * LDA + key + (lane >> 3 & 1) * 8);
#pragma unroll
  for (int i = 0; i < 4; ++i) b[i / 2].words[i % 2] = r[i];
}
template <int LDA, bool SPLIT>
__device__ __forceinline__ void load_scores(RightTf32<SPLIT> (&b)[1], const float* A, int row, int key, int) {
  const int lane = own_lane();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 two =
        *reinterpret_cast<const float2*>(A + (row + (lane >> 2)) * LDA + key + 8 * half + 2 * (lane & 3));
    b[0].set_unrounded(2 * half, two.x);
    b[0].set_unrounded(2 * half + 1, two.y);
  }
}

// o += S^T (q decayed)^T, over all channels of the tile. q: the chunk's queries, decayed from its start by the
// channels' gates. One load brings right operands of N times 16 channels.
template <int PRODUCTS, typename T, int BK>
__device__ __forceinline__ void add_state_outputs_by_columns(Output<T>& o, const State<BK>& S,
                                                             const typename OperandOf<T>::Type* q) {
  constexpr int N = sizeof(typename OperandOf<T>::Type) == 2 ? 2 : 1;
  const RowsReader<BK, typename OperandOf<T>::Type> queries;
#pragma unroll
  for (int c = 0; c < BK / 16; c += N) {
    Left<Math<T, PRODUCTS>> a[N];
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int p = 0; p < 4; ++p) {  // S as a left operand [column, channel]: each pair is one already
        const float (&x)[4] = S[2 * (c + n) + (p >> 1)];
        a[n].set(p, float2{x[2 * (p & 1)], x[2 * (p & 1) + 1]});
      }
#pragma unroll
    for (int sub = 0; sub < CHUNK<T> / SUB_CHUNK; ++sub) {
      Right<Math<T, PRODUCTS>> b[N];
      queries.load(b, q, SUB_CHUNK * sub, 16 * c);
#pragma unroll
      for (int n = 0; n < N; ++n) multiply(o[sub / 2][sub % 2], a[n], b[n]);
    }
  }
}

// S <- diag(decay) S diag(decay) + (k decayed)^T (v decayed), with the decays of channels and columns over the chunk.
// sub_chunk_decays: those of the lane's two columns over each sub-chunk. Keys come decayed to the chunk's end; values
// are decayed here, by PairDecays(...).end from after each token to its sub-chunk's end, for which all lanes of the
// warp are needed, and by later_decay from there.
template <int PRODUCTS, int BV, class Schedule, typename T, typename G, int BK, int NUM_SUBCHUNKS>
__device__ __forceinline__ void write_state_by_columns(State<BK>& S, ValueShared<Schedule, T, G, BK, BV>& s, int stage,
                                                       const ColumnsReader<BV, G>& gates,
                                                       const ColumnsReader<BV, T>& values,
                                                       const float (&sub_chunk_decays)[2][NUM_SUBCHUNKS]) {
  static_assert(NUM_SUBCHUNKS == CHUNK<T> / SUB_CHUNK);
  const int t = opaque(threadIdx.x & 3);  // opaque: computed again, not held in a register
  const RightReader<BK, typename OperandOf<T>::Type> keys;
  const float chunk_decays[2] = {product_over(sub_chunk_decays[0], 0, NUM_SUBCHUNKS),
                                 product_over(sub_chunk_decays[1], 0, NUM_SUBCHUNKS)};  // of the lane's columns
#pragma unroll
  for (int n = 0; n < NUM_SUBCHUNKS / 2; ++n) {
    float2 x[4], log_gates[4];
    Left<Math<T, PRODUCTS>> a;
    gates.load(log_gates, s.value_gates, 16 * n);
    values.load(x, s.v[stage], 16 * n);
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      const float later_decay =
          product_over(sub_chunk_decays[p & 1], 2 * n + (p >> 1) + 1, NUM_SUBCHUNKS);  // over later sub-chunks
      a.set(p, later_decay * (PairDecays<AfterWrite>(decays_of(log_gates[p])).end * x[p]));
    }
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      Right<Math<T, PRODUCTS>> b[2];
      keys.load(b, state_k(s, stage), 16 * n, 16 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&x)[4] = S[2 * c + half];
        if (n == 0) {
          const float2 decay = *reinterpret_cast<const float2*>(s.decay + 16 * c + 8 * half + 2 * t);  // of channels
          x[0] *= chunk_decays[0] * decay.x, x[1] *= chunk_decays[0] * decay.y;
          x[2] *= chunk_decays[1] * decay.x, x[3] *= chunk_decays[1] * decay.y;
        }
        accumulate(x, a, b[half]);
      }
    }
  }
}

// If gates grow: the terms of the outputs of 16 tokens that come from values of their own sub-chunks, added one by one.
// first: the first of these tokens; column: the first of the warp's 16. x[sub] is laid out as an output's numbers of
// sub-chunk `sub` are. Returned as a struct, so that callers have no array in memory.
struct WithinSubChunks {
  float x[2][4];
};
template <int BV, class Schedule, typename T, typename G, int BK>
__device__ __noinline__ WithinSubChunks sum_one_by_one(ValueShared<Schedule, T, G, BK, BV>& s, int stage, int first,
                                                       int column) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  WithinSubChunks within;
#pragma unroll 1
  for (int index = 0; index < 8; ++index) {
    const int sub = index / 4, x = index % 4, i = first + SUB_CHUNK * sub + 2 * t + (x & 1),
              col = column + g + 8 * (x >> 1);
    float sum = 0.f, decay = 1.f;
#pragma unroll 1
    for (int j = i; j >= first + SUB_CHUNK * sub; --j) {
      float score = 0.f;
#pragma unroll
      for (int n = 0; n < Storage::NUMBERS; ++n) score += to_float(s.A[n * Storage::DISTANCE + i * Storage::LDA + j]);
      sum = fmaf(score, decay * to_float(*place<BV>(s.v[stage], j, col)), sum);
      decay *= decay_of(to_float(*place<BV>(s.value_gates, j, col)));
    }
    within.x[sub][x] = sum;
  }
  return within;
}

// Completes the outputs of the chunk: o holds (q decayed) S without the columns' decays, and goes from border to border
// in time, so the order of the steps matters. grows: whether a gate of the warp's columns is above GROWTH; it is equal
// for all lanes, since MiddleFactors shuffles. multiply_half(d, a, b, half): only the keys of sub-chunk `half` of the
// 16 count.
template <int PRODUCTS, int BV, class Schedule, typename T, typename G, int BK, int NUM_SUBCHUNKS>
__device__ __forceinline__ void add_score_outputs_by_columns(Output<T>& o, ValueShared<Schedule, T, G, BK, BV>& s,
                                                             int stage, const ColumnsReader<BV, G>& gates,
                                                             const ColumnsReader<BV, T>& values,
                                                             const float (&sub_chunk_decays)[2][NUM_SUBCHUNKS],
                                                             bool grows) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  constexpr int NUMBERS = Storage::NUMBERS, LDA = Storage::LDA, DISTANCE = Storage::DISTANCE;
  Right<Math<T, PRODUCTS>> scores[NUMBERS];
#pragma unroll
  for (int m = 0; m < NUM_SUBCHUNKS / 2; ++m) {
    float2 x[4], decays[4];
    values.load(x, s.v[stage], 16 * m);
    gates.load(decays, s.value_gates, 16 * m);
#pragma unroll
    for (int p = 0; p < 4; ++p) decays[p] = decays_of(decays[p]);
    {
      Left<Math<T, PRODUCTS>> border;
#pragma unroll
      for (int p = 0; p < 4; ++p) border.set(p, PairDecays<AfterWrite>(decays[p]).end * x[p]);
      // The second sub-chunk's outputs go on by the first one's decay, and read its values, decayed to its end.
      scale_columns(o[m][1], sub_chunk_decays[0][2 * m], sub_chunk_decays[1][2 * m]);
      load_scores<LDA>(scores, s.A, 16 * m + SUB_CHUNK, 16 * m, DISTANCE);
#pragma unroll
      for (int n = 0; n < NUMBERS; ++n) multiply_half(o[m][1], border, scores[n], 0);
    }
    // Outputs of the second 16 tokens, o[1], go on by the decay of the first 16, and read their values, decayed to
    // token 16.
    if (NUM_SUBCHUNKS == 4 && m == 0) {
      Left<Math<T, PRODUCTS>> border;
#pragma unroll
      for (int p = 0; p < 4; ++p)
        border.set(p, (p < 2 ? sub_chunk_decays[p & 1][1] : 1.f) * (PairDecays<AfterWrite>(decays[p]).end * x[p]));
#pragma unroll
      for (int sub = 0; sub < 2; ++sub) {
        scale_columns(o[NUM_SUBCHUNKS / 2 - 1][sub], sub_chunk_decays[0][0] * sub_chunk_decays[0][1],
                      sub_chunk_decays[1][0] * sub_chunk_decays[1][1]);
        load_scores<LDA>(scores, s.A, 16 + SUB_CHUNK * sub, 0, DISTANCE);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) multiply(o[NUM_SUBCHUNKS / 2 - 1][sub], border, scores[n]);
      }
    }
    // Last, outputs read the values of their own sub-chunk. within: sums of scores times these values, which have their
    // factors to the sub-chunk's middle (MiddleFactors.keys), but not the outputs' from it (.queries); if `grows`, with
    // all decays, added one by one. WITH_OWN_PAIR: a token's own value takes both factors, too. So they must be inverse
    // to each other and finite: a gate below -16 counts as -16.
    float within[2][4] = {};
    if (grows) {
      const WithinSubChunks sums = sum_one_by_one(s, stage, 16 * m, threadIdx.x >> 5 << 4);  // the warp's first column
#pragma unroll
      for (int n = 0; n < 8; ++n) within[n / 4][n % 4] = sums.x[n / 4][n % 4];
    } else {
      Left<Math<T, PRODUCTS>> middle;
#pragma unroll
      for (int p = 0; p < 4; ++p) middle.set(p, MiddleFactors<AfterWrite, WITH_OWN_PAIR>(decays[p]).keys * x[p]);
#pragma unroll
      for (int sub = 0; sub < 2; ++sub) {
        load_scores<LDA>(scores, s.A, 16 * m + SUB_CHUNK * sub, 16 * m, DISTANCE);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) multiply_half(within[sub], middle, scores[n], sub);
      }
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
      float (&to)[4] = o[m][p >> 1];
      const int n = 2 * (p & 1);  // to[n] and to[n + 1]: the lane's two tokens in column g + 8 (p % 2)
      const float2 start = PairDecays<AfterWrite>(decays[p]).start,
                   factor = grows ? float2{1.f, 1.f} : MiddleFactors<AfterWrite, WITH_OWN_PAIR>(decays[p]).queries;
      to[n] = start.x * to[n] + factor.x * within[p >> 1][n];
      to[n + 1] = start.y * to[n + 1] + factor.y * within[p >> 1][n + 1];
    }
  }
}
