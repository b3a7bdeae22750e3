// what      Steps of a walk over the states of a delta rule, from one prepared chunk of 32 tokens (prepared.cuh) to the
//           next: products of a warp's 16 columns. State<BK>, Accumulators and Readers: chunk.cuh and its includes.
//           What tokens read is computed transposed [columns, tokens], since such accumulators are operands of the next
//           product without any move.
// shapes    a warp has 16 columns of V and BK channels of a state, transposed: S[n] is [16 columns, channels 8n...8n +
//           7]. With g = lane / 4 and t = lane % 4 a lane has S[n][2h + p]: column g + 8h, channel 8n + 2t + p. So of
//           `y`, what 32 tokens read, transposed: y[n][2h + p] is column g + 8h, token 8n + 2t + p. A Word has two
//           neighbouring numbers of T. Operands x[BT / 16][4]: of the warp's columns and 16 tokens each, x[n][m] has
//           column g + 8 (m % 2), tokens 16 n + 8 (m / 2) + 2t and the next
#include "cards.cuh"
#include "delta/chunk.cuh"
#include "delta/segments.cuh"

// From chunk.cuh and its includes:
//   LeftReader: left operands, whose rows are a tile's rows
//   TransposedReader: left operands, whose rows are a tile's columns
//   RightReader: right operands, whose rows are a tile's rows
//   RowsReader: right operands, whose columns are a tile's rows
//   LowerMatrix<T>: a lower triangle [32, 32], each number the sum of NUMBERS numbers
//   State<BK>: float[BK / 8][4]

// How many times 16 columns a warp of a walk has: two without outputs, if registers hold two states, so that products
// read shared memory half as often.
template <typename T, int BK> constexpr int tiles_of_warp(bool outputs) {
  return outputs || sizeof(T) == 4 || BK > 128 ? 1 : 2;
}

// How many blocks of BV columns a multiprocessor's registers are for: so many that they have 8 warps together.
template <class Shared, typename T, int BK, int BV> constexpr int blocks_of_walk(bool outputs) {
  const int tiles = tiles_of_warp<T, BK>(outputs);
  return tiles == 1 ? 128 / BV : blocks_with_room<Shared>(128 * tiles / BV);
}

// What a block of a walk computes: BV columns of the state, or of its gradient, or, without outputs, of F. Its walk
// goes through one segment, in one direction of time.
template <bool BACKWARDS, bool OUTPUTS, int BK, int BV> struct BlockOfWalk {
  u32 n, h, b;             // the segment's number, through all batch rows; the head of values; the batch row
  bool computes_F;         // the walk starts from the identity, and all values are 0
  int first_column;        // the block's, of V or of F
  i64 width;               // numbers of a row of the state in memory; F's are padded with zeros
  int columns;             // of the block's BV those below `width`
  Segment<float> segment;  // its tokens, chunks, and the states that the walk starts from and ends with (segments.cuh)
  int tokens;

  // block: its number; of a head's `tiles` blocks the first value_tiles have columns of V, the others columns of F.
  // given, starts, final: those of segment_of. All threads call this; it has the barrier of is_whole.
  __device__ __forceinline__ BlockOfWalk(const Shape& shape, u32 P, u32 block, u32 value_tiles, u32 tiles,
                                         const StridedRows<const float>& given, float* starts,
                                         const StridedRows<float>& final) {
    const u32 sequence_head = block / tiles, tile = block % tiles, H = u32(shape.H);
    const u32 row_sequences = u32(shape.row_sequences);
    n = sequence_head / H, h = sequence_head % H, b = n / row_sequences;
    computes_F = !OUTPUTS && !BACKWARDS && tile >= value_tiles;
    first_column = (computes_F ? tile - value_tiles : tile) * BV;
    const bool whole = OUTPUTS && is_whole<BACKWARDS>(shape, P, n, h, starts, first_column, BV);
    segment = segment_of<BACKWARDS>(OUTPUTS, shape, P, n, h, given, starts, final, whole);
    width = computes_F ? padded_to_4(shape.K) : shape.V, columns = int(min(width - first_column, i64(BV)));
    tokens = int(segment.tokens.stop - segment.tokens.start);
  }
  // Whether join_segments.cu, or the caller, needs the result.
  __device__ __forceinline__ bool is_needed() const {
    return OUTPUTS || !(segment.last || (computes_F && segment.first));
  }
  // The number of the segment's first prepared chunk.
  __device__ __forceinline__ i64 first_prepared(const Shape& shape) const {
    return (i64(b) * u32(shape.H) + h) * shape.NC + segment.chunks.start;
  }

  // Calls f(number, its index in the state in memory, whether it exists) for a lane's numbers of its warp's N times 16
  // columns.
  template <int N, class F> __device__ __forceinline__ void each(State<BK> (&S)[N], const Shape& shape, F f) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      // each_number adds 16 times the warp's number to the column that it is given. The warp's i-th 16 columns begin at
      // 16 (N warp + i): `moved` is that, less 16 warp.
      const int warp = int(threadIdx.x) / 32, moved = warp * 16 * N + 16 * i - warp * 16;
      each_number<BK>(S[i], 0, width, first_column + moved, int(shape.K), columns - moved, f);
    }
  }
  // Sets S to the state from which the walk starts.
  template <int N> __device__ __forceinline__ void load(State<BK> (&S)[N], const Shape& shape) const {
    each(S, shape, [&](float& x, i64 index, bool inside) {
      // The identity: row * width + column is a multiple of width + 1 on the diagonal only.
      x = !inside ? 0.f : computes_F ? u32(index) % u32(width + 1) == 0 : segment.from ? segment.from[index] : 0.f;
    });
  }
  // Stores S, with which the walk ends, in F, or where the segment's last state goes, if it is wanted.
  template <int N> __device__ __forceinline__ void store(State<BK> (&S)[N], const Shape& shape, float* F) const {
    float* const to = computes_F ? F + (i64(n) * u32(shape.H) + h) * shape.K * width : segment.to;
    if (!to) return;
    each(S, shape, [&](float& x, i64 index, bool inside) {
      if (inside) to[index] = x;
    });
  }
};

// Waits for the chunk of step `step` of a walk, which is in `stage` of a ring of STAGES, and starts copying that of
// STAGES - 1 steps later: fetch(step, stage) does so, and commits a group, also behind the last chunk. All threads call
// this; it has one barrier, two if STAGES is 1.
template <int STAGES, class Fetch> __device__ __forceinline__ void take_chunk(int step, int stage, Fetch fetch) {
  if constexpr (STAGES > 1) cp_async_wait<STAGES - 2>();
  __syncthreads();  // the chunk is in shared memory, unless STAGES is 1; the previous chunk has been read
  fetch(step + STAGES - 1, stage ? stage - 1 : STAGES - 1);  // to the previous chunk's stage
  if constexpr (STAGES == 1) {
    cp_async_wait<0>();
    __syncthreads();  // the chunk is in shared memory
  }
}

// Starts to copy bytes FROM ... STOP - 1 of a prepared chunk from global to shared memory, by all THREADS threads.
template <int FROM, int STOP, int THREADS> __device__ __forceinline__ void copy_prepared(void* to, const void* from) {
  static_assert(FROM % 16 == 0 && STOP % 16 == 0);
  // `opaque` hides where the number comes from: the compiler computes addresses anew for each chunk, and keeps none.
  const int first = FROM + 16 * opaque(threadIdx.x);
#pragma unroll
  for (int offset = 0; offset < STOP - FROM; offset += THREADS * 16)
    if (offset + THREADS * 16 <= STOP - FROM || first + offset < STOP)
      cp_async<16>(static_cast<char*>(to) + first + offset, static_cast<const char*>(from) + first + offset);
}

// Rounds channels 16 c ... 16 c + 15 of S to T: s is a left operand [columns, channels]; s[0], s[2] and s[1], s[3] are
// right operands of 8 columns each.
template <typename T, int BK> __device__ __forceinline__ void pack_state(Word<T> (&s)[4], const State<BK>& S, int c) {
  const float (&low)[4] = S[2 * c], (&high)[4] = S[2 * c + 1];
  s[0] = word_of<T>(low[0], low[1]), s[1] = word_of<T>(low[2], low[3]);
  s[2] = word_of<T>(high[0], high[1]), s[3] = word_of<T>(high[2], high[3]);
}

// y (transposed, see shapes) += read_rows S, for all tokens and the warp's columns; with OUTPUTS also o += output_rows
// S, o being Accumulators [tokens, columns]. read_rows, output_rows: tiles [BT, BK] in shared memory, a row for each
// token. S is rounded to T.
template <int BK, bool OUTPUTS = false, typename T>
__device__ __forceinline__ void read_transposed(float (&y)[BT / 8][4], const State<BK>& S, const T* read_rows,
                                                Accumulators* o = nullptr, const T* output_rows = nullptr) {
  const RowsReader<BK, T> right;
  const LeftReader<BK, T> left;
#pragma unroll
  for (int c = 0; c < BK / 32; ++c) {  // 32 channels
    Word<T> e[BT / 8][4], s[2][4];
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) right.load(e[n], read_rows, 8 * n, 32 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      pack_state<T, BK>(s[half], S, 2 * c + half);
#pragma unroll
      for (int n = 0; n < BT / 8; ++n) mma_m16n8k16(y[n], s[half], {e[n][2 * half], e[n][2 * half + 1]}, T{});
    }
    if constexpr (OUTPUTS) {
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int m = 0; m < BT / 16; ++m) {
          Word<T> w[4];
          left.load(w, output_rows, 16 * m, 32 * c + 16 * half);
          mma_m16n8k16((*o)[m][0], w, {s[half][0], s[half][2]}, T{});
          mma_m16n8k16((*o)[m][1], w, {s[half][1], s[half][3]}, T{});
        }
    }
  }
}

// The same for N times 16 columns of a warp, without outputs. Their states share the operands of `rows`.
template <int BK, int N, typename T>
__device__ __forceinline__ void read_transposed(float (&y)[N][BT / 8][4], const State<BK> (&S)[N], const T* rows) {
  const RowsReader<BK, T> right;
#pragma unroll
  for (int c = 0; c < BK / 32; ++c) {  // 32 channels
    Word<T> e[BT / 8][4];
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) right.load(e[n], rows, 8 * n, 32 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < N; ++i) {
        Word<T> s[4];
        pack_state<T, BK>(s, S[i], 2 * c + half);
#pragma unroll
        for (int n = 0; n < BT / 8; ++n) mma_m16n8k16(y[i][n], s, {e[n][2 * half], e[n][2 * half + 1]}, T{});
      }
  }
}

// y[i] (transposed) += rows[i] S, for both i: S is rounded once for two products.
template <int BK, typename T>
__device__ __forceinline__ void read_twice(float (&y)[2][BT / 8][4], const State<BK>& S, const T (&rows)[2][BT * BK]) {
  const RowsReader<BK, T> right;
#pragma unroll
  for (int c = 0; c < BK / 32; ++c) {  // 32 channels
    Word<T> s[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) pack_state<T, BK>(s[half], S, 2 * c + half);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int n = 0; n < BT / 8; ++n) {
        Word<T> e[4];
        right.load(e, rows[i], 8 * n, 32 * c);
#pragma unroll
        for (int half = 0; half < 2; ++half) mma_m16n8k16(y[i][n], s[half], {e[2 * half], e[2 * half + 1]}, T{});
      }
  }
}

// S <- diag(decay) S. decay: of the BK channels, in shared memory.
template <int BK> __device__ __forceinline__ void decay_state(State<BK>& S, const float* decay) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int c = 0; c < BK / 8; ++c) {
    const float2 two = *reinterpret_cast<const float2*>(decay + 8 * c + 2 * t);
    S[c][0] *= two.x, S[c][1] *= two.y, S[c][2] *= two.x, S[c][3] *= two.y;
  }
}

// S += rows^T x, for N times 16 columns of a warp. rows: a tile [BT, BK] in shared memory; x: left operands [16
// columns, 16 tokens], as load_packed and pack_tokens set them.
template <int BK, int N, typename T>
__device__ __forceinline__ void write_rows(State<BK> (&S)[N], const T* rows, const Word<T> (&x)[N][BT / 16][4]) {
  const RightReader<BK, T> reader;
#pragma unroll
  for (int n = 0; n < BT / 16; ++n)
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      Word<T> b[4];
      reader.load(b, rows, 16 * n, 16 * c);
#pragma unroll
      for (int i = 0; i < N; ++i) {
        mma_m16n8k16(S[i][2 * c], x[i][n], {b[0], b[1]}, T{});
        mma_m16n8k16(S[i][2 * c + 1], x[i][n], {b[2], b[3]}, T{});
      }
    }
}

// Loads the warp's 16 columns of a chunk's tokens, from `column` on, from a tile [BT, BV], as operands (see shapes).
template <int BV, typename T>
__device__ __forceinline__ void load_packed(Word<T> (&x)[BT / 16][4], const T* tile, int column) {
  const TransposedReader<BV, T> reader(column);
#pragma unroll
  for (int m = 0; m < BT / 16; ++m) reader.load(x[m], tile, 16 * m, 0);
}

// y (transposed) += x, which load_packed has loaded.
template <typename T>
__device__ __forceinline__ void add_packed(float (&y)[BT / 8][4], const Word<T> (&x)[BT / 16][4]) {
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      float* two = y[2 * m + part / 2] + part % 2 * 2;
      const float2 value = unpack(x[m][part], T{});
      two[0] += value.x, two[1] += value.y;
    }
}

// Rounds x (transposed), times factors of tokens, to operands: factors_at(i) returns the factors of tokens i + 2t and
// i + 2t + 1, t = lane % 4.
template <typename T, class Factors>
__device__ __forceinline__ void pack_tokens(Word<T> (&packed)[BT / 16][4], const float (&x)[BT / 8][4],
                                            Factors factors_at) {
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float2 factors = factors_at(16 * m + part / 2 * 8);
      const float* two = x[2 * m + part / 2] + part % 2 * 2;
      packed[m][part] = word_of<T>(factors.x * two[0], factors.y * two[1]);
    }
}
template <typename T>
__device__ __forceinline__ void pack_tokens(Word<T> (&packed)[BT / 16][4], const float (&x)[BT / 8][4]) {
  pack_tokens<T>(packed, x, [](int) { return float2{1.f, 1.f}; });
}

// Multiplies x, which load_packed has loaded, by factors of tokens, as in pack_tokens. Of 16-bit data the product is a
// sum of two numbers.
template <typename T, class Factors>
__device__ __forceinline__ void weigh_tokens(Word<T> (&product)[LowerMatrix<T>::NUMBERS][BT / 16][4],
                                             const Word<T> (&x)[BT / 16][4], Factors factors_at) {
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int part = 0; part < 4; ++part) {
      const float2 factors = factors_at(16 * m + part / 2 * 8), two = unpack(x[m][part], T{});
      float2 rest = {factors.x * two.x, factors.y * two.y};
#pragma unroll
      for (auto& number : product) {
        number[m][part] = word_of<T>(rest.x, rest.y);
        const float2 rounded = unpack(number[m][part], T{});
        rest.x -= rounded.x, rest.y -= rounded.y;
      }
    }
}

// d [tokens, the warp's columns] += M x; x: as in write_rows.
template <typename T>
__device__ __forceinline__ void multiply_packed(Accumulators& d, const LowerMatrix<T>& M,
                                                const Word<T> (&x)[BT / 16][4]) {
  const int lane = own_lane();
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int before = 0; before <= m; ++before)
#pragma unroll
      for (int number = 0; number < M.NUMBERS; ++number) {
        Word<T> a[4];
        M.load(a, number, 16 * m, 16 * before, lane);
        mma_m16n8k16(d[m][0], a, {x[before][0], x[before][2]}, T{});
        mma_m16n8k16(d[m][1], a, {x[before][1], x[before][3]}, T{});
      }
}

// y (transposed) += scale M^T x; x: as in write_rows.
template <typename T>
__device__ __forceinline__ void add_tokens(float (&y)[BT / 8][4], const Word<T> (&x)[BT / 16][4],
                                           const LowerMatrix<T>& M, float scale) {
  const int lane = own_lane();
  float sums[BT / 8][4] = {};
#pragma unroll
  for (int n = 0; n < BT / 16; ++n)
#pragma unroll
    for (int from = n; from < BT / 16; ++from)
#pragma unroll
      for (int number = 0; number < M.NUMBERS; ++number) {
        Word<T> b[4];  // tokens 16 from + 0...15 of M's rows, columns 16 n + 0...15
        M.template load<TRANSPOSED>(b, number, 16 * from, 16 * n, lane);
        mma_m16n8k16(sums[2 * n], x[from], {b[0], b[1]}, T{});
        mma_m16n8k16(sums[2 * n + 1], x[from], {b[2], b[3]}, T{});
      }
#pragma unroll
  for (int n = 0; n < BT / 8; ++n)
#pragma unroll
    for (int m = 0; m < 4; ++m) y[n][m] = fmaf(scale, sums[n][m], y[n][m]);
}

// Stores the warp's 16 columns, from `column` on, of a chunk's `rows` tokens. pair_at(i, across) returns this lane's
// pair of neighbouring columns of token i + g, columns `across` + 2t and the next, `across` being 0 or 8; i is a
// multiple of 8. Rows have `width` numbers from `to` on; they start on multiples of `bytes` bytes and are multiples
// long.
template <typename T, class Pair>
__device__ __forceinline__ void store_tokens(T* to, i64 stride, Pair pair_at, int rows, int column, int width,
                                             int bytes) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
  to += g * stride + column + 2 * t;
  if (rows >= BT && bytes >= int(sizeof(Word<T>)) && column + 16 <= width) {
#pragma unroll
    for (int i = 0; i < BT; i += 8, to += 8 * stride)
#pragma unroll
      for (int across = 0; across < 16; across += 8) *reinterpret_cast<Word<T>*>(to + across) = pair_at(i, across);
  } else {
#pragma unroll
    for (int i = 0; i < BT; i += 8, to += 8 * stride)
#pragma unroll
      for (int across = 0; across < 16; across += 8) {
        const Word<T> pair = pair_at(i, across);
        const int c = column + across + 2 * t;
        if (i + g >= rows) continue;
        if (bytes >= int(sizeof(Word<T>))) {
          if (c < width) *reinterpret_cast<Word<T>*>(to + across) = pair;
        } else {
          const float2 x = unpack(pair, T{});
          if (c < width) to[across] = from_float<T>(x.x);
          if (c + 1 < width) to[across + 1] = from_float<T>(x.y);
        }
      }
  }
}
