// what      The layout of tiles in shared memory of the forward kernel of every card, and how a warp loads operands of
//           its tensor cores from them.
// numerics  bfloat16 data: products in bfloat16. Other data: in tf32, for float32 data in PRODUCTS of them, 1 or 3
//           (fragments.cuh)
//
// A product sums over 16 values at a time. The tf32 instruction sums over 8, of which a lane has numbers t and t + 4, t
// = lane % 4: it is given value 2t as number t and value 2t + 1 as number t + 4, in both operands. With this order
// accumulators are operands without any move, and float tiles are read without bank conflicts. All lanes of a warp load
// together. In the readers below `tile`, `row` and `col` are a tile and the first row and column of what is loaded, in
// registers r or an operand a or b (Pairs in fragments.cuh).
#include "fragments.cuh"
#include "ptx.cuh"

// Piece p (16 bytes) of row r of a tile is stored in the place of piece p ^ row_swap<X>(r % 8): so the same piece of
// eight rows is in different banks. row_swap(a ^ b) is row_swap(a) ^ row_swap(b). delta/operands.cuh has another
// row_swap for a type of its own.
template <typename X> __device__ __forceinline__ constexpr int row_swap(int row) { return row; }

// The address in a tile of rows of COLS values.
template <int COLS, typename X> __device__ __forceinline__ X* place(X* tile, int row, int col) {
  constexpr int PIECE = 16 / sizeof(X);
  return tile + row * COLS + ((col / PIECE ^ row_swap<X>(row & 7)) * PIECE | col % PIECE);
}

// The type in shared memory of operands of data T: bfloat16, or float.
template <typename T> struct OperandOf {
  using Type = typename Math<T, 1>::Stored;
};

// x as it is stored in a tile of operands: rounded to tf32 if a single tf32 product will read it.
template <typename T, int PRODUCTS> __device__ __forceinline__ float operand_value(float x) {
  if constexpr (sizeof(typename OperandOf<T>::Type) == 2 || PRODUCTS == 3) return x;
  else return __uint_as_float(to_tf32(x));
}

using LeftBf16 = Pairs<UNSPLIT, bf16, 4>;
using RightBf16 = Pairs<UNSPLIT, bf16, 2>;
template <bool SPLIT> using LeftTf32 = Pairs<SPLIT, float, 4>;
template <bool SPLIT> using RightTf32 = Pairs<SPLIT, float, 2>;

// ---- operands from tiles --------------------------------------------------------------------------------------------

// A lane's first address in tiles with rows of COLS values: row `row`, its 16-byte piece `piece`, number `number` of
// that piece. at(): the address `row` rows (a multiple of 8) and `col` columns further on, both constants, by one
// addition and one XOR. Readers are made right before their use, since holding addresses takes too many registers.
template <int COLS, typename X> struct Reader {
  static constexpr int PIECE = 16, SWIZZLED = 8 * PIECE, SIZE = sizeof(X);  // bytes; SWIZZLED: that row_swap permutes
  int first_byte;

  __device__ __forceinline__ Reader(int row, int piece, int number = 0)
      : first_byte(row * COLS * SIZE + (row_swap<X>(row & 7) ^ piece) * PIECE + number * SIZE) {}
  __device__ __forceinline__ const X* at(const X* tile, int row, int col) const {
    const int bytes = col * SIZE;
    return reinterpret_cast<const X*>(reinterpret_cast<const char*>(tile) + (first_byte ^ bytes % SWIZZLED) +
                                      (row * COLS * SIZE + bytes / SWIZZLED * SWIZZLED));
  }
};
// This thread's lane, computed again at each call.
__device__ __forceinline__ int own_lane() { return opaque(threadIdx.x & 31); }

// Loads rows row + 0...15, columns col + 0...15 as a left operand, for a sum over columns. The columns of a float tile
// are in the order of `PairedSpot`, or the right operand comes from `RowsReader`, which has the same order.
template <int COLS, typename X> struct LeftReader : Reader<COLS, X> {
  __device__ __forceinline__ LeftReader(int lane = own_lane()) : Reader<COLS, X>(lane & 15, lane >> 4) {}

  __device__ __forceinline__ void load(u32 (&r)[4], const X* tile, int row, int col) const {
    ldmatrix_x4(r, this->at(tile, row, col));
  }
  __device__ __forceinline__ void load(LeftBf16& a, const bf16* tile, int row, int col) const {
    ldmatrix_x4(a.words, this->at(tile, row, col));
  }
  template <bool SPLIT>
  __device__ __forceinline__ void load(LeftTf32<SPLIT>& a, const float* tile, int row, int col) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 r[4];
      ldmatrix_x4(r, this->at(tile, row, col + 8 * half));
#pragma unroll
      for (int i = 0; i < 4; ++i) a.set_unrounded(left_register(half, i), __uint_as_float(r[i]));
    }
  }
};

// Loads the transpose of rows row + 0...7 as right operands, for a sum over 32 columns of bfloat16, or 16 of floats.
template <int COLS, typename X> struct RowsReader : Reader<COLS, X> {
  __device__ __forceinline__ RowsReader(int lane = own_lane()) : Reader<COLS, X>(lane & 7, lane >> 3) {}

  __device__ __forceinline__ void load(u32 (&r)[4], const X* tile, int row, int col) const {
    ldmatrix_x4(r, this->at(tile, row, col));
  }
  __device__ __forceinline__ void load(RightBf16 (&b)[2], const bf16* tile, int row, int col) const {
    u32 r[4];
    ldmatrix_x4(r, this->at(tile, row, col));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].words[i % 2] = r[i];
  }
  template <bool SPLIT>
  __device__ __forceinline__ void load(RightTf32<SPLIT> (&b)[1], const float* tile, int row, int col) const {
    u32 r[4];
    ldmatrix_x4(r, this->at(tile, row, col));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[0].set_unrounded(i, __uint_as_float(r[i]));
  }
};

// Loads the transpose of rows row + 0...15 and 16 columns from `column` on as a left operand, for a sum over rows.
template <int COLS, typename X> struct TransposedReader : Reader<COLS, X> {  // of types of 2 bytes
  __device__ __forceinline__ TransposedReader(int column, int lane = own_lane())
      : Reader<COLS, X>((lane & 7) + (lane >> 4) * 8, column / 8 + (lane >> 3 & 1)) {}

  __device__ __forceinline__ void load(u32 (&r)[4], const X* tile, int row, int col) const {
    ldmatrix_x4_trans(r, this->at(tile, row, col));
  }
  __device__ __forceinline__ void load(LeftBf16& a, const bf16* tile, int row) const {
    ldmatrix_x4_trans(a.words, this->at(tile, row, 0));
  }
  __device__ __forceinline__ void load(LeftTf32<UNSPLIT>& a, const f16* tile, int row) const {
    u32 r[4];
    ldmatrix_x4_trans(r, this->at(tile, row, 0));
#pragma unroll
    for (int i = 0; i < 4; ++i) a.set(i, r[i], f16{});
  }
};
template <int COLS> struct TransposedReader<COLS, float> : Reader<COLS, float> {
  __device__ __forceinline__ TransposedReader(int column, int lane = own_lane())
      : Reader<COLS, float>((lane & 3) * 2, column / 4 + (lane >> 4), lane >> 2 & 3) {}

  template <bool SPLIT> __device__ __forceinline__ void load(LeftTf32<SPLIT>& a, const float* tile, int row) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int i = 0; i < 4; ++i)  // one row down the place of the piece changes, too
        a.set(left_register(half, i), *this->at(tile, row + 8 * half + (i >> 1), 8 * (i & 1) ^ 4 * (i >> 1)));
  }
};

// Loads rows row + 0...15, columns col + 0...7 and col + 8...15 from `column` on as two right operands, for a sum over
// rows. INPUTS: the tile holds data that are not rounded to tf32 yet.
constexpr bool INPUTS = true;
template <int COLS, typename X, bool INPUTS = false> struct RightReader : Reader<COLS, X> {
  __device__ __forceinline__ RightReader(int column = 0, int lane = own_lane())
      : Reader<COLS, X>(lane & 15, column * int(sizeof(X)) / 16 + (lane >> 4)) {}

  __device__ __forceinline__ void load(u32 (&r)[4], const X* tile, int row, int col) const {
    ldmatrix_x4_trans(r, this->at(tile, row, col));
  }
  __device__ __forceinline__ void load(RightBf16 (&b)[2], const bf16* tile, int row, int col) const {
    u32 r[4];
    ldmatrix_x4_trans(r, this->at(tile, row, col));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].words[i % 2] = r[i];
  }
  __device__ __forceinline__ void load(RightTf32<UNSPLIT> (&b)[2], const f16* tile, int row, int col) const {
    u32 r[4];
    ldmatrix_x4_trans(r, this->at(tile, row, col));
#pragma unroll
    for (int i = 0; i < 4; ++i) b[i / 2].set(i % 2, r[i], f16{});
  }
};
template <int COLS, bool INPUTS> struct RightReader<COLS, float, INPUTS> : Reader<COLS, float> {
  __device__ __forceinline__ RightReader(int column = 0, int lane = own_lane())
      : Reader<COLS, float>((lane & 3) * 2, column / 4 + (lane >> 4), lane >> 2 & 3) {}

  template <bool SPLIT>
  __device__ __forceinline__ void load(RightTf32<SPLIT> (&b)[2], const float* tile, int row, int col) const {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float x = *this->at(tile, row + 8 * (i / 2) + i % 2, (col + 8 * n) ^ 4 * (i % 2));
        if (INPUTS) b[n].set(i, x);
        else b[n].set_unrounded(i, x);
      }
  }
};

// b = the transpose of rows 8n + 0...7 of two accumulators x and y, [16, 8] each, side by side, as a right operand.
template <class R> __device__ __forceinline__ void pack_right(R& b, const float (&x)[4], const float (&y)[4], int n) {
  b.set(0, float2{x[2 * n], x[2 * n + 1]});
  b.set(1, float2{y[2 * n], y[2 * n + 1]});
}

// ---- values of a row ------------------------------------------------------------------------------------------------

// W neighbouring values of a row, in 32-bit words.
template <int W, typename X> struct Piece {
  static constexpr int WORDS = W * sizeof(X) / 4;
  u32 words[WORDS];

  __device__ __forceinline__ float get(int i) const {
    if constexpr (sizeof(X) == 4) return __uint_as_float(words[i]);
    else return to_float(X{u16(words[i / 2] >> 16 * (i % 2))});
  }
  __device__ __forceinline__ void set(const float (&x)[W]) {
#pragma unroll
    for (int i = 0; i < WORDS; ++i) {
      if constexpr (sizeof(X) == 4) words[i] = __float_as_uint(x[i]);
      else words[i] = pack<X>(x[2 * i], x[2 * i + 1]);
    }
  }
  __device__ __forceinline__ void load(const void* from) {
    if constexpr (WORDS == 4) {
      const uint4 x = *static_cast<const uint4*>(from);
      words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if constexpr (WORDS == 2) {
      const uint2 x = *static_cast<const uint2*>(from);
      words[0] = x.x, words[1] = x.y;
    } else {
      words[0] = *static_cast<const u32*>(from);
    }
  }
  __device__ __forceinline__ void store(void* to) const {
    if constexpr (WORDS == 4) *static_cast<uint4*>(to) = {words[0], words[1], words[2], words[3]};
    else if constexpr (WORDS == 2) *static_cast<uint2*>(to) = {words[0], words[1]};
    else *static_cast<u32*>(to) = words[0];
  }
};

// A Spot is the address of a lane's W neighbouring values in tiles with rows of COLS values: row `row` modulo 8, column
// `col`; `get` loads them and `put` stores them.
// Other groups of 8 rows, and constant numbers of rows in a group, are reached by one addition and one XOR.
template <int COLS, int W, typename X> struct Spot {
  static constexpr int PIECE = 16, SIZE = sizeof(X);
  int first_byte;

  __device__ __forceinline__ Spot(int row, int col)
      : first_byte((row & 7) * COLS * SIZE +
                   ((col * SIZE / PIECE ^ row_swap<X>(row & 7)) * PIECE | col * SIZE % PIECE)) {}
  // In group row_group of 8 rows, `row` rows below the spot's own row, with which `row` shares no bit.
  __device__ __forceinline__ X* at(const X* tile, int row_group, int row) const {
    return reinterpret_cast<X*>(const_cast<char*>(reinterpret_cast<const char*>(tile + row_group * 8 * COLS)) +
                                (first_byte ^ row_swap<X>(row) * PIECE) + row * COLS * SIZE);
  }
  __device__ __forceinline__ void get(Piece<W, X>& x, const X* tile, int row_group, int row) const {
    x.load(at(tile, row_group, row));
  }
  __device__ __forceinline__ void put(X* tile, int row_group, int row, const float (&x)[W]) const {
    Piece<W, X> piece;
    piece.set(x);
    piece.store(at(tile, row_group, row));
  }
};

// A Spot in tiles that LeftReader loads for products with accumulators: each 8 floats of a row are in the order
// 0 2 4 6 1 3 5 7. If X has 16 bits, the order is the usual one.
template <int COLS, int W, typename X> struct PairedSpot : Spot<COLS, W, X> {
  __device__ __forceinline__ PairedSpot(int row, int col) : Spot<COLS, W, X>(row, col) {}
};
template <int COLS, int W> struct PairedSpot<COLS, W, float> {
  Spot<COLS, W / 2, float> even;
  __device__ __forceinline__ PairedSpot(int row, int col) : even(row, (col & ~7) + (col & 7) / 2) {}
  __device__ __forceinline__ void put(float* tile, int row_group, int row, const float (&x)[W]) const {
#pragma unroll
    for (int odd = 0; odd < 2; ++odd) {
      Piece<W / 2, float> half;
      float values[W / 2];
#pragma unroll
      for (int i = 0; i < W / 2; ++i) values[i] = x[2 * i + odd];
      half.set(values);
      Spot<COLS, W / 2, float> spot = even;
      spot.first_byte ^= 16 * odd;
      half.store(spot.at(tile, row_group, row));
    }
  }
};
