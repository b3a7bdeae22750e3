// what      Tokens of heads of at most 16 channels and columns: a warp has several heads, whose rows of a token stand
//           side by side, so that what it reads of neighbouring heads, or of neighbouring tokens, is one piece of
//           memory.
// math      token by token, as the equations stand: a state is so small that float32 outside of tensor cores keeps up
//           with memory
// limits    D of 8, 16
#include "gated/forward_tiles.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int STEP = 8;  // tokens that are there at once

// [STEP, heads of a warp, D], of which a lane copies some pieces of its own head's rows. Whatever heads read at once
// touches every bank as few times as can be.
template <typename E, int D, int LANES> struct alignas(16) Tile {
  static constexpr int HEADS = 32 / LANES, PER = 16 / sizeof(E), PIECES = D / PER;
  static constexpr int APART = LANES / PIECES, EACH = STEP / APART;  // tokens between a lane's pieces; their number
  E x[STEP * HEADS * D];

  __device__ __forceinline__ static int place(int token, int head, int column) {
    const int piece = column / PER ^ head * PIECES / 8;
    return ((token * HEADS + head) * PIECES + piece) * PER + column % PER;
  }
  // Of the lane's head: a row from the column on.
  template <int N> __device__ __forceinline__ void row(float (&to)[N], int token, int head, int column = 0) const {
    constexpr int W = N < PER ? N : PER;
#pragma unroll
    for (int c = 0; c < N; c += W) {
      const E* from = x + place(token, head, column + c);
      if constexpr (W == 1) {
        to[c] = to_float(*from);
      } else {
        Piece<W, E> piece;
        piece.load(from);
#pragma unroll
        for (int i = 0; i < W; ++i) to[c + i] = piece.get(i);
      }
    }
  }
  template <int N> __device__ __forceinline__ void put(const float (&from)[N], int token, int head, int column) {
    E* to = x + place(token, head, column);
    if constexpr (N == 1) {
      *to = from_float<E>(from[0]);
    } else {
      Piece<N, E> piece;
      piece.set(from);
      piece.store(to);
    }
  }
};

// Which head of a warp a lane has, and which lane of it it is.
template <int LANES> struct LaneOf {
  int head, lane;
  __device__ __forceinline__ LaneOf(int thread = threadIdx.x) : head((thread & 31) / LANES), lane(thread % LANES) {}
};

// Where the tokens of a lane's head are.
struct Head {
  i64 n;  // sequence or segment
  int b, h, tokens;
  i64 start;
};
// The head that is the `at`-th of all, of `of` sequences or segments in turn the first `needed`; without tokens beyond.
__device__ __forceinline__ Head head_of(const Shape& shape, u32 at, u32 of = 1, u32 needed = 1) {
  const u32 H = u32(shape.H), count = u32(shape.count), n = at / H / needed * of + at / H % needed;
  if (n >= u32(shape.B) * count) return {-1, 0, 0, 0, 0};
  const Span span = tokens_of(shape, n % count);
  return {n, int(n / count), int(at % H), int(span.stop - span.start), span.start};
}
// The most tokens of a warp's heads.
template <int LANES> __device__ __forceinline__ int most_tokens(int tokens) {
#pragma unroll
  for (int distance = LANES; distance < 32; distance *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, tokens, distance);
    tokens = other > tokens ? other : tokens;
  }
  return tokens;
}

// A lane's pieces of rows in memory, from its first token's on.
template <typename E> struct Pieces {
  E* first;
  i64 stride;
};
// As the tile has them.
template <class Tile, typename E>
__device__ __forceinline__ Pieces<E> pieces_of(const Tile&, const Rows<E>& x, const Head& head, int lane) {
  E* row = x.row(head.b, head.h, head.start);
  return {row + lane / Tile::PIECES * x.t + lane % Tile::PIECES * Tile::PER, x.t};
}

// f(token of the step, column, its place in the tile, its place in memory) for a lane's pieces of the step at `token`.
template <class Tile, typename E, class F>
__device__ __forceinline__ void each_piece(Pieces<E> rows, int head, int lane, int token, F f) {
  const int down = lane / Tile::PIECES, column = lane % Tile::PIECES * Tile::PER;
  E* at = rows.first + token * rows.stride;
#pragma unroll
  for (int n = 0; n < Tile::EACH; ++n) {
    f(down + n * Tile::APART, column, Tile::place(down + n * Tile::APART, head, column), at);
    at += Tile::APART * rows.stride;
  }
}

// Pieces of rows that are whole pieces of 8, 4 or 2 bytes, out of the way of those of 16.
template <int BYTES, class Tile, typename E>
__device__ __forceinline__ void copy_parts(E* to, const E* from, int columns) {
  constexpr int W = BYTES / sizeof(E);
#pragma unroll 1
  for (int i = 0; i < Tile::PER; i += W) {
    if constexpr (BYTES >= 4) cp_async<BYTES>(to + i, from + i, i < columns);
    else to[i] = i < columns ? from[i] : from_float<E>(0.f);
  }
}
template <class Tile, typename E>
__device__ __noinline__ void fetch_slowly(Tile& tile, Pieces<const E> rows, int head, int lane, int token, int left,
                                          int width, int bytes) {
  each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, const E* from) {
    const int columns = down < left ? width - column : 0;
    if (bytes == 8) copy_parts<8, Tile>(tile.x + place, from, columns);
    else if (bytes == 4) copy_parts<4, Tile>(tile.x + place, from, columns);
    else copy_parts<sizeof(E), Tile>(tile.x + place, from, columns);
  });
}

// Starts to copy the step at `token`, of which `left` tokens are there: zeros behind them and `width`.
template <class Tile, typename E>
__device__ __forceinline__ void fetch(Tile& tile, Pieces<const E> rows, int head, int lane, int token, int left,
                                      int width, int bytes) {
  if (bytes == 16) {
    each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, const E* from) {
      cp_async<16>(tile.x + place, from, down < left && column < width);
    });
  } else {
    fetch_slowly(tile, rows, head, lane, token, left, width, bytes);
  }
}

template <class Tile, typename E>
__device__ __noinline__ void store_slowly(const Tile& tile, Pieces<E> rows, int head, int lane, int token, int left,
                                          int width) {
  each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, E* to) {
#pragma unroll 1
    for (int i = 0; i < Tile::PER; ++i)
      if (down < left && column + i < width) to[i] = tile.x[place + i];
  });
}
template <class Tile, typename E>
__device__ __forceinline__ void store(const Tile& tile, Pieces<E> rows, int head, int lane, int token, int left,
                                      int width, int bytes) {
  if (bytes == 16) {
    each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, E* to) {
      if (down < left && column < width)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile.x + place);
    });
  } else {
    store_slowly(tile, rows, head, lane, token, left, width);
  }
}

// Decays of the gates that the lane has copied.
template <class Gates, class Decays>
__device__ __forceinline__ void put_decays(Decays& decays, const Gates& gates, int head, int lane) {
  constexpr int PER = Gates::PER;
  const int down = lane / Gates::PIECES, column = lane % Gates::PIECES * PER;
#pragma unroll
  for (int n = 0; n < Gates::EACH; ++n) {
    const int token = down + n * Gates::APART;
    float x[PER];
    gates.row(x, token, head, column);
#pragma unroll
    for (int i = 0; i < PER; i += 4) {
      const float four[4] = {decay_of(x[i]), decay_of(x[i + 1]), decay_of(x[i + 2]), decay_of(x[i + 3])};
      decays.put(four, token, head, column + i);
    }
  }
}
