// what      Shared by the kernels for heads of at most D channels and columns, D 8 or 16: copies of steps of tokens
//           between memory and a warp's tiles in shared memory. A warp has several heads, LANES lanes each. The rows of
//           neighbouring heads, or tokens, are neighbours in memory, and the warp reads them together.
// math      token by token, as the recurrence is written: a state is so small that float32 products outside of tensor
//           cores are as fast as memory
// smem      Tile; the lanes of a head copy its rows, and read them after cp_async_wait and __syncwarp. Before `store` a
//           __syncwarp has passed since the rows were written
// limits    D of 8, 16
#include "gated/forward_tiles.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   cp_async<BYTES>(to, from, exists): starts copying, or stores zeros if not `exists`; from_float<E>: rounds to E
//   decay_of(g): e^g, 0 of -inf; grown(x, g): x e^g, which is finite where e^g alone is not
//   shape.row_sequences: sequences, or segments, of a batch row

constexpr int STEP = 8;  // tokens of a step in shared memory, where a tile names no other number

// A tile [TOKENS tokens, HEADS heads of a warp, D channels or columns] of type E. A row, of one token and head, is
// PIECES pieces of 16 bytes, PIECE numbers each. A head has LANES lanes; each copies one piece of every ROWS_AT_ONCE-th
// token, LANE_PIECES in all: these are the lane's pieces. `place` swaps pieces so that rows of different heads are in
// different banks.
template <typename E, int D, int LANES, int TOKENS = STEP> struct alignas(16) Tile {
  static constexpr int HEADS = 32 / LANES, PIECE = 16 / sizeof(E), PIECES = D / PIECE;
  static constexpr int ROWS_AT_ONCE = LANES / PIECES, LANE_PIECES = TOKENS / ROWS_AT_ONCE;
  static constexpr int ROWS = TOKENS, ROW_STRIDE = HEADS * D;  // tokens; the distance of a head's rows in x
  static_assert(ROWS_AT_ONCE * PIECES == LANES && LANE_PIECES * ROWS_AT_ONCE == TOKENS, "lanes share pieces evenly");
  static_assert((HEADS - 1) * PIECES / 8 < PIECES, "`place` swaps pieces within a row");
  E x[TOKENS * HEADS * D];

  // The index of a number in x.
  __device__ __forceinline__ static int place(int token, int head, int column) {
    const int piece = column / PIECE ^ head * PIECES / 8;
    return ((token * HEADS + head) * PIECES + piece) * PIECE + column % PIECE;
  }
  // Loads N numbers of a row, from `column` on, as float32.
  template <int N> __device__ __forceinline__ void load_row(float (&to)[N], int token, int head, int column = 0) const {
    constexpr int W = N < PIECE ? N : PIECE;
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
  // Stores N numbers of a row, from `column` on.
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

// The base of a stage: its tile of gates of columns, if there are any.
template <class Tile, bool GATED> struct ColumnGates {
  Tile gv;
};
template <class Tile> struct ColumnGates<Tile, false> {};

// Which of the warp's 32 / LANES heads a lane has, and the lane's number among the LANES lanes of that head. In all
// functions below `head` and `lane` are these.
template <int LANES> struct LaneCoord {
  int head, lane;
  __device__ __forceinline__ LaneCoord(int thread = threadIdx.x) : head((thread & 31) / LANES), lane(thread % LANES) {}
};

// The work of a lane's head: `tokens` tokens of head h of batch row b, from token `start` of the row on.
struct Work {
  i64 n;  // the number of the sequence or segment, over the batch; -1: none
  int b, h, tokens;
  i64 start;
};
// The work with this number in a launch: head fastest, then sequence or segment. Of the `segments` segments of each
// sequence only the first `computed` are counted. No tokens if there is no such work.
__device__ __forceinline__ Work work_of(const Shape& shape, u32 number, u32 segments = 1, u32 computed = 1) {
  const u32 H = u32(shape.H), row_sequences = u32(shape.row_sequences);
  const u32 n = number / H / computed * segments + number / H % computed;
  if (n >= u32(shape.B) * row_sequences) return {-1, 0, 0, 0, 0};
  const Span span = tokens_of(shape, n % row_sequences);
  return {n, int(n / row_sequences), int(number % H), int(span.stop - span.start), span.start};
}
// The largest of the heads' numbers of tokens in a warp.
template <int LANES> __device__ __forceinline__ int largest_of_warp(int tokens) {
#pragma unroll
  for (int distance = LANES; distance < 32; distance *= 2) {
    const int other = __shfl_xor_sync(0xffffffffu, tokens, distance);
    tokens = other > tokens ? other : tokens;
  }
  return tokens;
}

// A lane's pieces in memory, of the step that starts at the head's first token: the address of the first piece, which
// is that of token lane / PIECES; and the distance of tokens.
template <typename E> struct LaneRows {
  E* first;
  i64 stride;
};
// The lane's pieces of x in memory, which it copies to or from such a tile.
template <class Tile, typename E>
__device__ __forceinline__ LaneRows<E> lane_rows(const Tile&, const StridedRows<E>& x, const Work& head, int lane) {
  E* row = x.row(head.b, head.h, head.start);
  return {row + lane / Tile::PIECES * x.token_stride + lane % Tile::PIECES * Tile::PIECE, x.token_stride};
}

// Calls f(token of the step, first column, index in the tile, address in memory) for a lane's pieces of the step that
// starts at `token`, counted from the head's first one.
template <class Tile, typename E, class F>
__device__ __forceinline__ void each_piece(LaneRows<E> rows, int head, int lane, int token, F f) {
  const int down = lane / Tile::PIECES, column = lane % Tile::PIECES * Tile::PIECE;
  E* address = rows.first + token * rows.stride;
#pragma unroll
  for (int n = 0; n < Tile::LANE_PIECES; ++n) {
    f(down + n * Tile::ROWS_AT_ONCE, column, Tile::place(down + n * Tile::ROWS_AT_ONCE, head, column), address);
    address += Tile::ROWS_AT_ONCE * rows.stride;
  }
}

// How the lanes of a head copy rows that are not multiples of 16 bytes: in words of W numbers of type E, of which
// lanes have neighbouring ones, which come in one access. ACROSS lanes share a row; DOWN rows, of tokens, are copied at
// a time; a lane has AT_ONCE words of a column under way.
template <class Tile, typename E, int BYTES> struct Words {
  static constexpr int W = BYTES / sizeof(E), D = Tile::PIECES * Tile::PIECE, LANES = 32 / Tile::HEADS;
  static constexpr int ACROSS = D / W < LANES ? D / W : LANES, DOWN = LANES / ACROSS;
  static constexpr int MOST = BYTES < 4 ? 2 : 4;  // numbers of 2 bytes pass through registers: more would spill
  static constexpr int AT_ONCE = Tile::ROWS / DOWN < MOST ? Tile::ROWS / DOWN : MOST;
  static_assert(DOWN <= Tile::ROWS && Tile::ROWS % (DOWN * AT_ONCE) == 0, "words cover the tile's rows");
};
// Calls f(token of the step, column, index in the tile, address in memory) for the first of every AT_ONCE words that a
// lane copies together; the token of each is DOWN tokens after that of the word before. rows: the lane's pieces.
template <class LaneWords, class Tile, typename E, class F>
__device__ __forceinline__ void each_word(const Tile&, LaneRows<E> rows, int head, int lane, int token, F f) {
  constexpr int ACROSS = LaneWords::ACROSS, W = LaneWords::W, TOGETHER = LaneWords::DOWN * LaneWords::AT_ONCE;
  const int down = lane / ACROSS;
  E* row = rows.first - lane % Tile::PIECES * Tile::PIECE + (token + down - lane / Tile::PIECES) * rows.stride;
#pragma unroll 1
  for (int first = down; first < Tile::ROWS; first += TOGETHER) {
#pragma unroll
    for (int n = 0; n < LaneWords::D / W; n += ACROSS) {
      const int column = (n + lane % ACROSS) * W;
      f(first, column, Tile::place(first, head, column), row + column);
    }
    row += TOGETHER * rows.stride;
  }
}
// `fetch` in words of BYTES bytes. cp.async takes 4 bytes at least: numbers of 2 bytes are loaded, then stored.
template <int BYTES, class Tile, typename E>
__device__ __forceinline__ void fetch_words(Tile& tile, LaneRows<const E> rows, int head, int lane, int token,
                                            int tokens_left, int width) {
  using LaneWords = Words<Tile, E, BYTES>;
  const i64 stride = LaneWords::DOWN * rows.stride;
  each_word<LaneWords>(tile, rows, head, lane, token, [&](int first, int column, int place, const E* from) {
    const int left = column < width ? tokens_left - first : 0;
    E* const to = tile.x + place;
    if constexpr (BYTES >= 4) {
#pragma unroll
      for (int n = 0; n < LaneWords::AT_ONCE; ++n)
        cp_async<BYTES>(to + n * LaneWords::DOWN * Tile::ROW_STRIDE, from + n * stride, n * LaneWords::DOWN < left);
    } else {
      E x[LaneWords::AT_ONCE];
#pragma unroll
      for (int n = 0; n < LaneWords::AT_ONCE; ++n)
        x[n] = n * LaneWords::DOWN < left ? from[n * stride] : from_float<E>(0.f);
#pragma unroll
      for (int n = 0; n < LaneWords::AT_ONCE; ++n) to[n * LaneWords::DOWN * Tile::ROW_STRIDE] = x[n];
    }
  });
}
// `fetch` for rows that are not multiples of 16 bytes. Not inlined, which keeps the code for 16 bytes short. Computes
// the caller's head and lane again.
template <class Tile, typename E>
__device__ __noinline__ void fetch_unaligned(Tile& tile, LaneRows<const E> rows, int token, int tokens_left, int width,
                                             int bytes) {
  const LaneCoord<32 / Tile::HEADS> coord;
  if (bytes == 8) fetch_words<8>(tile, rows, coord.head, coord.lane, token, tokens_left, width);
  else if (bytes == 4) fetch_words<4>(tile, rows, coord.head, coord.lane, token, tokens_left, width);
  else fetch_words<sizeof(E)>(tile, rows, coord.head, coord.lane, token, tokens_left, width);
}

// Starts copying the step that starts at `token`: its first tokens_left tokens and `width` columns, which exist; the
// rest of the tile becomes zero, gates too, so that tokens after the end have a decay of 1 and add nothing. bytes: the
// largest of 16, 8, 4 and 2 that divides the start and the length of all rows.
template <class Tile, typename E>
__device__ __forceinline__ void fetch(Tile& tile, LaneRows<const E> rows, int head, int lane, int token,
                                      int tokens_left, int width, int bytes) {
  if (bytes == 16) {
    each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, const E* from) {
      cp_async<16>(tile.x + place, from, down < tokens_left && column < width);
    });
  } else {
    fetch_unaligned(tile, rows, token, tokens_left, width, bytes);
  }
}

// `store`: stores the tokens and columns of a step that exist; arguments as in `fetch`. store_unaligned: for rows that
// are not multiples of 16 bytes, number by number.
template <class Tile, typename E>
__device__ __noinline__ void store_unaligned(const Tile& tile, LaneRows<E> rows, int head, int lane, int token,
                                             int tokens_left, int width) {
  using LaneWords = Words<Tile, E, sizeof(E)>;
  const i64 stride = LaneWords::DOWN * rows.stride;
  each_word<LaneWords>(tile, rows, head, lane, token, [&](int first, int column, int place, E* to) {
    const int left = column < width ? tokens_left - first : 0;
#pragma unroll
    for (int n = 0; n < LaneWords::AT_ONCE; ++n)
      if (n * LaneWords::DOWN < left) to[n * stride] = tile.x[place + n * LaneWords::DOWN * Tile::ROW_STRIDE];
  });
}
template <class Tile, typename E>
__device__ __forceinline__ void store(const Tile& tile, LaneRows<E> rows, int head, int lane, int token,
                                      int tokens_left, int width, int bytes) {
  if (bytes == 16) {
    each_piece<Tile>(rows, head, lane, token, [&](int down, int column, int place, E* to) {
      if (down < tokens_left && column < width)
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(tile.x + place);
    });
  } else {
    store_unaligned(tile, rows, head, lane, token, tokens_left, width);
  }
}

// Calls f(token, column, four log gates from this column on) for the lane's pieces of the tile `gates`.
template <class Gates, class F>
__device__ __forceinline__ void each_four_gates(const Gates& gates, int head, int lane, F f) {
  constexpr int PIECE = Gates::PIECE;
  const int down = lane / Gates::PIECES, column = lane % Gates::PIECES * PIECE;
#pragma unroll
  for (int n = 0; n < Gates::LANE_PIECES; ++n) {
    const int token = down + n * Gates::ROWS_AT_ONCE;
    float x[PIECE];
    gates.load_row(x, token, head, column);
#pragma unroll
    for (int i = 0; i < PIECE; i += 4) f(token, column + i, float4{x[i], x[i + 1], x[i + 2], x[i + 3]});
  }
}
// Stores in `decays` exp of the log gates in the tile `gates`, or the gates themselves if `as_gates`: those of the
// lane's pieces.
template <class Gates, class Decays>
__device__ __forceinline__ void put_decays(Decays& decays, const Gates& gates, int head, int lane,
                                           bool as_gates = false) {
  each_four_gates(gates, head, lane, [&](int token, int column, float4 x) {
    if (!as_gates) x = {decay_of(x.x), decay_of(x.y), decay_of(x.z), decay_of(x.w)};
    const float four[4] = {x.x, x.y, x.z, x.w};
    decays.put(four, token, head, column);
  });
}
// Whether a gate of a warp's step is above 0, of channels or of columns; only if GATED. All lanes call it together.
template <bool GATED, class Stage> __device__ __forceinline__ bool grows(const Stage& step, int head, int lane) {
  bool above = false;
  if constexpr (GATED) {
    const auto look = [&](int, int, float4 x) { above = above || fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)) > 0.f; };
    each_four_gates(step.g, head, lane, look), each_four_gates(step.gv, head, lane, look);
    above = __any_sync(0xffffffffu, above);
  }
  return above;
}
// Calls f(next). next(x, a, b, kv): a number of a state after a token, from the number x before it, the decays of its
// channel and of its column (unless GATED there is no b), and k v. If `growing` a and b are gates: e^ of their sum may
// be in float32's range, and e^ of each alone not.
template <bool GATED, class F> __device__ __forceinline__ void with_next_number(bool growing, F f) {
  if (GATED && growing) f([](float x, float g, float gv, float kv) { return grown(x, g + gv) + kv; });
  else f([](float x, float a, float b, float kv) { return fmaf(GATED ? a * b : a, x, kv); });
}
