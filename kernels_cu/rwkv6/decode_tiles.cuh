// what      What a decoding step in one launch is made of: tiles of 16 rows of a product's weights [rows, K], a block's
//           share of them, and the words by which blocks exchange results. WARPS = 8 warps (time_mix.cuh) of THREADS =
//           256 threads compute: each multiplies its own columns of every tile. Weights come in stages: STAGE columns
//           of a tile at a time
#include "rwkv6/time_mix.cuh"

constexpr int ROWS = 16;  // of a tile
constexpr int STEPS = 2;  // of a warp along K in a stage
// Bytes of a row in a stage: 16 for each of 4 lanes of 8 warps, in STEPS steps.
constexpr int PIECE = STEPS * THREADS / 8 * 16;

// The type of the words by which blocks exchange results, for weights of type T.
template <typename T> struct WordOf {
  typedef u32 Type;
};
template <> struct WordOf<float> {
  typedef u64 Type;
};
template <typename T> using Handed = typename WordOf<T>::Type;

// A block's share of a phase's tiles of 16 rows: tiles first ... stop - 1, then later ... last - 1, whose results are
// needed later.
struct Tiles {
  int first, stop, later, last;

  // How many tiles, and the number of the n-th one.
  __device__ __forceinline__ int count() const { return stop - first + last - later; }
  __device__ __forceinline__ int operator[](int n) const {
    return n < stop - first ? first + n : n - stop + first + later;
  }
  // from: these tiles of a matrix whose first tile has number `begin`; then: these tiles, and later `more`.
  __device__ __forceinline__ Tiles from(int begin) const { return {first + begin, stop + begin, 0, 0}; }
  __device__ __forceinline__ Tiles then(const Tiles& more) const { return {first, stop, more.first, more.stop}; }
};

// Tiles of 16 rows that `rows` rows take.
__device__ __forceinline__ int tiles_of(i64 rows) { return int(rows + ROWS - 1) / ROWS; }

// The share of block number `block` of `blocks` in tiles 0 ... `tiles` - 1. Shares are equal, or one tile more for the
// first blocks (share_to_first) or the last blocks (share_to_last).
__device__ __forceinline__ Tiles share_to_first(int tiles, u32 block, u32 blocks) {
  const int each = tiles / int(blocks), more = tiles % int(blocks), first = int(block) * each + min(int(block), more);
  return {first, first + each + (int(block) < more), 0, 0};
}
__device__ __forceinline__ Tiles share_to_last(int tiles, u32 block, u32 blocks) {
  const Tiles mirrored = share_to_first(tiles, blocks - 1 - block, blocks);
  return {tiles - mirrored.stop, tiles - mirrored.first, 0, 0};
}

// Weights, and the scales of their rows (int8): a tile of 16 rows; or matrices of all layers, and a tile's place there.
template <typename T> struct TileRows {
  const T* weights;
  const float* scales;
};
template <typename T> struct PlaceOfTile {
  TileRows<T> of;
  i64 tile;
};

// A lane's columns of weights: EACH neighbours, 16 bytes of a row, in a step. Four lanes have a warp's STEP columns of
// a row; STRIDE: columns of all warps. start: a thread's first column.
template <typename T> struct Lane {
  static constexpr int EACH = 16 / sizeof(T), STEP = 4 * EACH, STRIDE = WARPS * STEP, STAGE = STEPS * STRIDE;
  static_assert(STAGE * sizeof(T) == PIECE);

  static __device__ __forceinline__ int start(int thread) { return (thread >> 5) * STEP + (thread & 3) * EACH; }
};

// Where the parameters of a norm and its mix are (ln: weight [D], then bias [D]), and the previous token's LN(x).
struct Norm {
  const float *ln, *maa = nullptr, *shift = nullptr;  // null: without a mix
};

// The sequence's row of the states of all layers.
template <typename Args> __device__ __forceinline__ i64 state_row(const Args& args, i64 layer) {
  return layer * args.P + (args.slots ? args.slots[0] : 0);
}

// By one warp, start copying to L2: a norm's parameters and its first `mixes` mixes, by block 0 for all blocks; the
// states of the block's heads; `rows` rows of `columns` numbers of a matrix, `pitch` numbers apart. A warp's bulk
// copies begin one after the other, 40 ns each, so short rows are loaded by lines.
__device__ __forceinline__ void prefetch_norm(const Norm& norm, int mixes, i64 D) {
  const int lane = threadIdx.x & 31, row = int(D * sizeof(float));
  if (blockIdx.x > 0) return;
  if (lane == 0) prefetch_l2(norm.ln, 2 * row);
  if (lane == 1 && norm.maa) prefetch_l2(norm.maa, mixes * row);
  if (lane == 2 && norm.shift) prefetch_l2(norm.shift, row);
}
template <typename Args> __device__ __forceinline__ void prefetch_states(const Args& args, i64 layer) {
  const i64 size = args.N * args.N, first = state_row(args, layer) * args.H;
  for (i64 h = blockIdx.x + i64(threadIdx.x & 31) * gridDim.x; h < args.H; h += 32 * gridDim.x)
    prefetch_l2(args.wkv + (first + h) * size, u32(size * sizeof(*args.wkv)));
}
template <typename T> __device__ __forceinline__ void prefetch_rows(const T* from, i64 rows, i64 pitch, i64 columns) {
  const int lines = int(columns * sizeof(T) + 127) / 128;
#pragma unroll 1
  for (int n = threadIdx.x & 31; n < rows * lines; n += 32)
    prefetch_line(from + n / lines * pitch + n % lines * 128 / sizeof(T));
}
