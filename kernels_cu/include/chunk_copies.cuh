// what      For Hopper's kernels in which one warp copies chunks of tokens between memory and shared memory: a block's
//           work, and these copies. All lanes of the warp call a function that copies. The including kernel defines
//           CHUNK, the tokens of a chunk, before it includes this file.
// limits    sm_90a; tiles start on 1024 bytes, as the swizzle does; rows of all arrays are multiples of 16 bytes
#include "swizzled.cuh"
#include "tensor.cuh"

// From the includes:
//   TensorMap: the driver's description of an array, by which tensor_load and tensor_store copy boxes of it
//   add_piece: starts adding 16 bytes to memory, in a group that commit_adds closes
//   swizzled_offset(row, piece): the byte offset of 16 bytes of a row; at_byte_offset: the address there

static_assert(CHUNK == 32 || CHUNK == 64);

// A chunk's rows of an array, D numbers wide, in shared memory: a panel has 128 bytes of every row, in the tensor
// cores' 128-byte swizzle (swizzled.cuh).
template <typename X> constexpr int PANEL = 128 / sizeof(X);
template <typename X, int D> using Tile = X[D / PANEL<X>][CHUNK][PANEL<X>];

// A block's work: one head of one sequence. `sequence` is its number among those of all batch rows. Where the host
// cuts sequences into segments, each segment is such a sequence.
struct WorkTile {
  i32 sequence, batch, head;
  i32 start, tokens;  // the sequence's first token in the batch row, and its number of tokens
  i32 T;              // tokens of a batch row
  i64 sequence_head;  // sequence * heads + head
  i64 chunk_row;      // in arrays with a row for each chunk: the row of this head and sequence's first chunk
};

// A head has T / CHUNK + row_sequences rows for chunks, enough since each sequence may end within a chunk. A sequence's
// first row is its start / CHUNK, rounded down, plus its number in the batch row: so no two sequences share a row. With
// P segments for each sequence, row_sequences counts segments; each but the last of a sequence has whole chunks. Rows
// are then numbered by whole sequences: a batch row has row_sequences / P of them, and segment s of the row is part of
// the row's sequence s / P.
__device__ __forceinline__ WorkTile work_tile(const Shape& shape, u32 block, u32 P = 1) {
  const u32 H = u32(shape.H), row_sequences = u32(shape.row_sequences), sequence = block / H, head = block % H;
  const Span span = tokens_of(shape, sequence % row_sequences);
  return {i32(sequence),
          i32(sequence / row_sequences),
          i32(head),
          i32(span.start),
          i32(span.stop - span.start),
          i32(shape.T),
          i64(block),
          (i64(sequence / row_sequences) * H + head) * (shape.T / CHUNK + row_sequences / P) + span.start / CHUNK +
              sequence % row_sequences / P};
}

// The number of columns of one panel of a tile.
template <typename X, int PANELS> __device__ __forceinline__ constexpr u32 columns_of(X (&)[PANELS][CHUNK][PANEL<X>]) {
  return PANEL<X>;
}

// Calls f(shared, global, inside) for this lane's pieces of 16 bytes of a tile: their address in shared memory, their
// address in memory (Number: the type of its numbers), and whether they lie within the first `rows` rows and `columns`
// columns. `columns` is a multiple of a piece's numbers. A warp has 4 rows at a time; the piece of the 4th row after
// has its offset 512 bytes on, with bit 6 flipped by the swizzle. `memory`: the address of the tile's first element;
// its rows are `stride` elements apart. The loop is not unrolled, which keeps the code short.
template <typename X, int PANELS, typename Number, class F>
__device__ __forceinline__ void each_piece(X (&tile)[PANELS][CHUNK][PANEL<X>], Number* memory, i64 stride, int rows,
                                           int columns, F f) {
  const int lane_row = threadIdx.x >> 3 & 3, piece = threadIdx.x & 7;
#pragma unroll 1
  for (int panel = 0; panel < PANELS; ++panel) {
    const int column = panel * PANEL<X> + piece * (PANEL<X> / 8), valid_rows = column < columns ? rows : 0;
    int offset = swizzled_offset(lane_row, piece);
    Number* address = memory + lane_row * stride + column;
#pragma unroll 1
    for (int row = lane_row; row < CHUNK; row += 4, address += 4 * stride, offset = (offset + 4 * 128) ^ 64)
      f(reinterpret_cast<uint4*>(at_byte_offset(tile[panel], offset)), address, row < valid_rows);
  }
}

// Whether a chunk, whose first token is the sequence's token `token`, can be copied as whole boxes of CHUNK tokens, by
// tensor maps: either all these tokens are the sequence's, or the sequence ends where the batch row ends. Beyond the
// row's end such copies read zeros and write nothing.
__device__ __forceinline__ bool fills_boxes(const WorkTile& work, int token) {
  return work.tokens - token >= CHUNK || work.start + work.tokens == work.T;
}

// Whether an array has a negative stride of tokens, which tensor maps do not allow. each_array: each_input or
// each_output of the functions below, which say what it calls.
template <class Arrays> __device__ __forceinline__ bool runs_backwards(Arrays each_array) {
  bool found = false;
  each_array([&](auto&, const TensorMap&, auto rows, i64, i32 = 0, i64 = 0) { found |= rows.token_stride < 0; });
  return found;
}

// Starts to copy a chunk to shared memory; `token`: the chunk's first token, counted from the sequence's. each_input(f)
// calls f(tile, tensor map, rows, width, first column, group) for every array: its tile in shared memory; its tensor
// map and its rows in memory, which are `width` numbers wide; and which of a row's numbers the tile's first column is,
// by default 0; and how many heads share a head of the array, by default 1.
// `full` must be initialised for 32 arrivals: all lanes arrive, lane 0 by mbarrier_arrive_and_expect, which also adds
// the bytes of the copies; the phase ends when all bytes are there. Tokens after the sequence's end are zeros.
template <class Inputs>
__device__ __forceinline__ void fetch_chunk(MBarrier& full, const WorkTile& work, int token, Inputs each_input) {
  if (fills_boxes(work, token) && !runs_backwards(each_input)) {
    if (threadIdx.x & 31) return mbarrier_arrive(full);
    u32 bytes = 0;
    each_input([&](auto& tile, const TensorMap&, auto, i64, i32 = 0, i64 = 1) { bytes += sizeof tile; });
    mbarrier_arrive_and_expect(full, bytes);
    each_input([&](auto& tile, const TensorMap& map, auto, i64, i32 first_column = 0, i64 group = 1) {
      for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel)
        tensor_load(tile[panel], map, full, first_column + i32(panel * columns_of(tile)), work.start + token,
                    work.head / i32(group), work.batch);
    });
    return;
  }
  each_input([&](auto& tile, const TensorMap&, auto from, i64 width, i32 first_column = 0, i64 group = 1) {
    const auto* const start = from.row(work.batch, work.head / i32(group), work.start + token) + first_column;
    each_piece(
        tile, start, from.token_stride, work.tokens - token, int(width) - first_column,
        [](uint4* to, const auto* from, bool inside) { cp_async<16>(to, from, inside); });  // zeros if not inside
  });
  cp_async_commit();
  cp_async_wait<0>();
  fence_proxy_async();  // wgmma reads shared memory by the asynchronous proxy
  mbarrier_arrive(full);
}

// Copies a chunk's results from shared memory to memory, and returns when the shared memory may be overwritten. The
// threads that wrote the tile, or the caller, have called fence_proxy_async since. each_output is as each_input above;
// its f may take one more argument, `adds`: whether results are added to what the array holds, by default not.
template <class Outputs>
__device__ __forceinline__ void store_chunk(const WorkTile& work, int token, Outputs each_output) {
  if (fills_boxes(work, token) && !runs_backwards(each_output)) {
    if ((threadIdx.x & 31) == 0) {
      each_output([&](auto& tile, const TensorMap& map, auto, i64, i32 first_column = 0, bool adds = false) {
        for (u32 panel = 0; panel < sizeof tile / sizeof tile[0]; ++panel) {
          const i32 column = first_column + i32(panel * columns_of(tile));
          tensor_store_or_add(map, tile[panel][0], column, work.start + token, work.head, work.batch, adds);
        }
      });
      tensor_store_wait();
    }
  } else {
    each_output([&](auto& tile, const TensorMap&, auto to, i64 width, i32 first_column = 0, bool adds = false) {
      auto* const start = to.row(work.batch, work.head, work.start + token) + first_column;
      each_piece(tile, start, to.token_stride, work.tokens - token, int(width) - first_column,
                 [&](auto* from, auto* to, bool inside) {
                   if (!inside) return;
                   if (adds) add_piece(to, reinterpret_cast<decltype(to)>(from));
                   else *reinterpret_cast<uint4*>(to) = *from;
                 });
    });
    commit_adds();        // add_piece has started asynchronous additions to memory, of which this is a group
    tensor_store_wait();  // until they have read shared memory
    // Orders this lane's plain loads of the tile before later asynchronous copies to it. The box copies above read it
    // by the asynchronous proxy themselves, so that their branch needs no fence.
    fence_proxy_async();
  }
  __syncwarp();  // no lane overwrites the tile before all copies have read it
}
