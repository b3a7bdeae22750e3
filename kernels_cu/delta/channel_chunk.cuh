// what      Steps of the kernels that prepare a chunk of 32 tokens of the delta rules with a gate for each channel:
//           lengths of tokens, decayed rows and columns, scores of pairs of tokens, products of matrices of tokens.
//           prepare.cu, for one gate a token, includes this file too, for the products only.
// math      A token's decay is e^g of its log gates g [K]. D_ij is the decay of each channel from after token j through
//           token i; a score is the sum over channels of D_ij x_i y_j, of a *row* x (a query, or another vector that
//           reads the state) and a *column* y (a key, or another vector along which is written to the state)
// shapes    a thread has 4 channels of a block of 4 tokens: BK / 4 threads have a block. A pair of two blocks is scored
//           by way of a border: that between the halves of 8, 16 or 32 tokens, level 0, 1 or 2. The row is in the later
//           half and decayed from the border, the column is in the earlier half and decayed to it. A tile is [BT, BK]
//           in shared memory, swizzled: place<BK>(tile, i, c) is the address of channel c of token i. float32 data are
//           of type `single`, so that operands of tensor cores are loaded alike; a product of these is three in tf32
//           (operands.cuh). In code g is lane / 4 and t lane % 4, but for a pointer g to log gates
// order     Steps of a kernel, with a barrier of the thread block between two lines:
//             set_lengths; sums of a block's own pairs (SumsOfPairs); block_decays
//             each_border with store_level; the kernel stores the sums of the block's own pairs
//             score_borders: pairs of two blocks
//             solve, put_transposed
//             multiply_triangles
// limits    BK of 64, 128, 256; a thread block of 2 BK threads: a warp for every 16 channels
// tests     test_delta_kernels; test_compile (no spills)
// numerics  Normalized tokens are divided by their lengths. Each token is then divided by a power of 2 that brings its
//           length to [1, 2), up to rounding. The square of the length is a sum over channels in float32. If it is 0,
//           or below float32's normal numbers, which kernels take as 0, the power is LITTLE, or 1 in RWKV-7, whose
//           gradients are divided by it; if it is infinite, 2^126 (1 if normalized): these do not bring the length
//           there. Pairs of one block are multiplied in float32; the kernels decay the column token by token, as the
//           recurrence does. Of 16-bit data, rows and columns of other pairs are rounded to float16, and so are keys
//           decayed to the chunk's end. A decay is a product of the decays of the tokens in between, so that any gate
//           is exact
#include "delta/chunk.cuh"

// From chunk.cuh and its includes:
//   BT = 32 tokens; place: an address in a tile; multiply_rows: products of 16 rows with 8 rows
//   Reader(row, piece): what address a lane gives to ldmatrix
//   Matrix: [32, 32] numbers, each the sum of NUMBERS: two for 16-bit data, REST apart. LDA: the distance of its rows;
//     LD: that of a float matrix. load(a, n, row, column, lane): number n of the left operand at (row, column).
//     put_split_pair: stores a pair so. Word, unpack_pair: two neighbouring numbers; word_of: two floats as a Word.
//     Accumulators: a warp's sums [BT, 16 channels]
//   copy_numbers: as copy_pieces, number by number, for rows that do not start on 16 bytes
//   decay_of(g): e^g, 0 for -inf. own_lane(): threadIdx.x & 31
//   LEAST_SQUARE = 1e-6 is added to the square of a length

constexpr int BLOCK = 4;              // tokens of a block
constexpr int PAIRS = BLOCK * BLOCK;  // of a block's tokens: those with j <= i, and those with j < i
constexpr int BLOCKS = BT / BLOCK, LEVELS = 3;
static_assert(BLOCKS == 1 << LEVELS, "the last level's border is in the middle of the chunk");

// A thread's work: block `block` of 4 tokens from token `first` of the chunk on, and 4 channels from c on. lane: the
// thread's number among the block's LANES threads, which are lanes of one warp, or, if BK is 256, of two.
template <int BK> struct BlockTask {
  static constexpr int LANES = BK / 4;
  static_assert(LANES == 16 || LANES == 32 || LANES == 64, "BK of 64, 128, 256");
  int lane = threadIdx.x & LANES - 1, block = threadIdx.x / u32(LANES), first = BLOCK * block, c = 4 * lane;

  // The address of token n of the block, channel c, in a tile of all tokens. Spot (gated/forward_tiles.cuh) takes the
  // row in a group of 8 tokens and the channel, the first of 4; its at() the tile, the group, and rows further down.
  template <typename X> __device__ __forceinline__ X* at(X* tile, int n) const {
    return Spot<BK, 4, X>(4 * (block & 1), c).at(tile, block >> 1, n);
  }
};

// x y, number by number; x . y; and sum += x . y.
__device__ __forceinline__ float4 times(float4 x, float4 y) { return {x.x * y.x, x.y * y.y, x.z * y.z, x.w * y.w}; }
__device__ __forceinline__ float4 times(float x, float4 y) { return {x * y.x, x * y.y, x * y.z, x * y.w}; }
__device__ __forceinline__ float product(float4 x, float4 y) {
  return fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, x.w * y.w)));
}
__device__ __forceinline__ void add_product(float& sum, float4 x, float4 y) {
  sum = fmaf(x.x, y.x, fmaf(x.y, y.y, fmaf(x.z, y.z, fmaf(x.w, y.w, sum))));
}

// Four neighbouring numbers as floats; x is aligned to all four. decays_at: exp of four log gates. put_four: stores
// them, rounded to T. store_four: to memory, by one instruction, of which the compiler often makes two in put_four.
__device__ __forceinline__ float4 unpack_four(const float* x) { return *reinterpret_cast<const float4*>(x); }
__device__ __forceinline__ float4 unpack_four(const single* x) { return unpack_four(&x->x); }
template <typename T> __device__ __forceinline__ float4 unpack_four(const T* x) {
  const uint2 pairs = *reinterpret_cast<const uint2*>(x);
  const float2 low = unpack(pairs.x, T{}), high = unpack(pairs.y, T{});
  return {low.x, low.y, high.x, high.y};
}
template <typename G> __device__ __forceinline__ float4 decays_at(const G* g) {
  const float4 x = unpack_four(g);
  return {decay_of(x.x), decay_of(x.y), decay_of(x.z), decay_of(x.w)};
}
__device__ __forceinline__ void put_four(single* to, float4 x) { *reinterpret_cast<float4*>(to) = x; }
template <typename T> __device__ __forceinline__ void put_four(T* to, float4 x) {
  *reinterpret_cast<uint2*>(to) = {pack<T>(x.x, x.y), pack<T>(x.z, x.w)};
}
template <typename T> __device__ __forceinline__ void store_four(T* to, float4 x) {
  if constexpr (sizeof(T) == 4) put_four(to, x);
  else *reinterpret_cast<u64*>(to) = u64(pack<T>(x.z, x.w)) << 32 | pack<T>(x.x, x.y);
}

// Starts to copy a chunk's rows, `stride` numbers apart, to a tile. They start on 16 bytes and are multiples of 16
// bytes long. Zeros from row `rows` and column `width` on.
template <int BK, int THREADS, typename T>
__device__ __forceinline__ void copy_pieces(T* tile, const T* from, i64 stride, int rows, int width) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = BK / PIECE, AT_ONCE = THREADS / ACROSS;
  static_assert(THREADS % ACROSS == 0 && BT % AT_ONCE == 0, "whole rows, and all of them");
  const int first = threadIdx.x / ACROSS, c = threadIdx.x % ACROSS * PIECE;
  from += first * stride + c;
  rows = c < width ? rows - first : 0;
#pragma unroll
  for (int down = 0; down < BT; down += AT_ONCE, from += AT_ONCE * stride)
    cp_async<16>(place<BK>(tile, first + down, c), from, down < rows);
}

// Starts copying a chunk's tokens: each(copy) calls copy(tile, array, head) for every array. chunk: a ChunkOfBlock
// (prepared.cuh); its row() is the array's row of the chunk's first token. Tiles get zeros after the chunk's last
// token, and from the array's channel K on. args.bytes: the most bytes that one copy may have, as all arrays' rows are
// aligned.
template <int BK, int THREADS, class Args, class Chunk, class Each>
__device__ __forceinline__ void fetch_tokens(const Args& args, const Chunk& chunk, Each each) {
  const int K = int(args.shape.K);
  if (int(args.bytes) == 16)
    each([&](auto* tile, const auto& from, u32 head) {
      copy_pieces<BK, THREADS>(tile, chunk.row(from, head), from.token_stride, chunk.rows, K);
    });
  else
    each([&](auto* tile, const auto& from, u32 head) {
      copy_numbers<BK, THREADS>(tile, chunk.row(from, head), from.token_stride, chunk.rows, K);
    });
  cp_async_commit();
}

// ---- lengths --------------------------------------------------------------------------------------------------------

// The largest power of 2 that is not above the root of `squares`; 1 if that is 0. Where the root is a power of 2, up to
// rounding, it may be the one above or below: any power of about this size serves.
__device__ __forceinline__ float power_below(float squares) {
  if (squares == 0.f) return 1.f;
  const int exponent = int(floorf(0.5f * log2_approx(squares)));
  return __uint_as_float(u32(127 + min(max(exponent, -126), 126)) << 23);
}

// The power of 2 by which a token is divided whose numbers are all below 2^-63, so that no square is a normal number:
// they are then below 8, also of float16 if they grow (growing_chunk.cuh), and normal numbers of it from 2^-80 on.
constexpr float LITTLE = 0x1p-66f;

// The largest x of the warp's lanes; each gets it.
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}

// Powers of 2 that bring the chunk's tokens x_i to ordinary lengths: factor[i] x_i has a length in [1, 2), and power[i]
// factor[i] x_i is x_i or, if tokens are normalized, x_i / |x_i|.
struct Lengths {
  float factor[BT], power[BT];

  // `squares`: of the length of token i. of_zero: its power if that is 0.
  __device__ __forceinline__ void set(int i, float squares, bool normalized, float of_zero) {
    const float inverse_length = normalized ? inverse_root(squares + float(LEAST_SQUARE)) : 1.f;
    const float below = squares == 0.f ? of_zero : power_below(inverse_length * inverse_length * squares);
    power[i] = below,
    factor[i] = inverse_length * __uint_as_float(0x7f000000u - __float_as_uint(below));  // inverse_length / below
  }
};

// The squared lengths of 8 rows, as products of the rows with themselves: of rows row + 0...7 of `tile`, or, if ROWS is
// 4, of rows row + 0...3 of it and then of `next`. `row` is a multiple of ROWS. Lane 4 g + g / 2 returns that of the
// 8 rows' row g.
template <int COLS, int ROWS, typename T>
__device__ __forceinline__ float squares_of_rows(const T* tile, const T* next, int row) {
  const int lane = own_lane(), loaded = sizeof(T) == 4 ? lane >> 2 : lane & 7;
  const bool odd = lane >> 2 & 1;
  const T* from = ROWS == 4 && loaded & 4 ? next : tile;
  const int row_in_group = ROWS == 4 ? row & 4 | loaded & 3 : loaded;
  // d[0] + d[1] are sums of every other 8 numbers (`single`: 16). A left operand has 16 rows: those whose products are
  // not used may be any.
  float d[2][4] = {};
  if constexpr (sizeof(T) == 4) {
    const Reader<COLS, T> reader(row_in_group, lane >> 1 & 1, 2 * (lane & 1));
#pragma unroll
    for (int c = 0; c < COLS; c += 16) {
      const Word<T> r[2] = {unpack_pair(reader.at(from, row & ~7, c)), unpack_pair(reader.at(from, row & ~7, c + 8))};
      mma_m16n8k16(d[c / 16 % 2], {r[0], r[0], r[1], r[1]}, {r[0], r[1]}, T{});
    }
    return odd ? d[0][1] + d[1][1] : d[0][0] + d[1][0];
  } else {
    const Reader<COLS, T> reader(row_in_group, lane >> 3);
#pragma unroll
    for (int c = 0; c < COLS; c += 32) {
      u32 r[4];  // four pieces of the 8 rows
      ldmatrix_x4(r, reader.at(from, row & ~7, c));
      // Even pieces are the left operand's first 8 rows, odd ones its last.
#pragma unroll
      for (int n = 0; n < 4; ++n) mma_m16n8k8(d[n % 2], {r[n & 2], r[n & 2 | 1]}, r[n], T{});
    }
    return odd ? d[0][1] + d[1][3] : d[0][0] + d[1][2];
  }
}

// Sets the lengths of the tokens of the warp's blocks in each of the tiles. of_zero: as in Lengths::set.
template <int BK, int TILES, typename T>
__device__ __forceinline__ void set_lengths(Lengths (&lengths)[TILES], const T* const (&tiles)[TILES], bool normalized,
                                            float of_zero) {
  const BlockTask<BK> task;
  constexpr int ROWS = task.LANES == 32 ? BLOCK : 2 * BLOCK, TOGETHER = 8 / ROWS, SETS = TILES / TOGETHER;
  static_assert(TILES % TOGETHER == 0 && SETS <= 4, "sets of 8 rows, and a lane for each row of each");
  // Lane 4 g + t sets the length of row g of set own_set = t XOR g / 2. The lane that has its sum, 4 g + g / 2, is
  // own_set away by XOR, so that the shuffle of that set brings it.
  const int lane = own_lane(), g = lane >> 2, own_set = (lane & 3) ^ g >> 1, row = task.first & ~(ROWS - 1);
  float squares = 0.f;
#pragma unroll
  for (int n = 0; n < SETS; ++n) {
    const float sum = squares_of_rows<BK, ROWS>(tiles[TOGETHER * n], tiles[TOGETHER * (n + 1) - 1], row);
    const float own = __shfl_xor_sync(0xffffffffu, sum, n);
    if (n == own_set) squares = own;
  }
  // A warp with one block sets that block's; of two warps with the same block the first one does.
  const int i = row + g % ROWS;
  if (own_set < SETS && task.lane < 32 && (task.LANES < 32 || i / BLOCK == task.block))
    lengths[TOGETHER * own_set + g / ROWS].set(i, squares, normalized, of_zero);
  if (task.LANES > 32) __syncthreads();
  else __syncwarp();  // the lengths of the warp's blocks are in shared memory
}

// The sums over LANES neighbouring lanes, 16 or all 32, of each of PAIRS numbers, which `add` gets one after the other;
// all lanes of a warp call it together; of a block's 64 lanes each warp has its own sums. After the last one lane l
// holds `sum` of number l % 16. Two numbers that have taken the same steps take the next one together: of two lanes
// each keeps one number, and adds the other lane's share of it.
template <int LANES> struct SumsOfPairs {
  static_assert(PAIRS == 1 << 4, "four steps");
  float waiting[4], sum;  // waiting[s]: a number that has taken s steps, and waits for another one
  int count = 0;

  __device__ __forceinline__ void add(float x) {
    const int number = count++;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      if (!(number >> step & 1)) {
        waiting[step] = x;
        return;
      }
      const bool upper = threadIdx.x >> step & 1;
      const float before = waiting[step];
      x = (upper ? x : before) + __shfl_xor_sync(0xffffffffu, upper ? before : x, 1 << step);
    }
    sum = LANES >= 32 ? x + __shfl_xor_sync(0xffffffffu, x, 16) : x;
  }
};

// The pair (i, j) of a block's tokens with number n of PAIRS: for each i, for each j <= i, that pair and, if j < i, the
// same as a strict one: (0, 0) | (1, 0), strict (1, 0), (1, 1) | (2, 0), ... Those of i begin with number i^2. A strict
// pair's row is of a kind that reads the state before its own token is written: keys, or a in dplr_prepare.cu.
struct PairOfBlock {
  bool strict;
  int i, j;
  __device__ __forceinline__ PairOfBlock(int n) {
    i = (n >= 1) + (n >= 4) + (n >= 9), n -= i * i;
    strict = n & 1, j = n / 2;
  }
};

// ---- decays ---------------------------------------------------------------------------------------------------------

// The blocks before (c: columns) and after (r: rows) the borders of each level, which are at `|`:
//   block      0   1   2   3   4   5   6   7
//   level 0    c | r   c | r   c | r   c | r
//   level 1    c   c | r   r   c   c | r   r
//   level 2    c   c   c   c | r   r   r   r
// For the thread's block and channels: at each level calls rows(level, decays from the border to the block's start) if
// the block is after the level's border, else columns(level, decays from the block's end to the border). Sets `before`
// and `after` to the decays from the chunk's start to the block's start, and from its end to the chunk's end.
// block_decays: over each block.
template <int BK, class Rows, class Columns>
__device__ __forceinline__ void each_border(const float (&block_decays)[BLOCKS][BK], const BlockTask<BK>& task,
                                            float4& before, float4& after, Rows rows, Columns columns) {
  before = after = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    // The decay over the blocks on the border's other side.
    const float* first_block = block_decays[(task.block >> level ^ 1) << level] + task.c;
    float4 other_side = unpack_four(first_block);
#pragma unroll
    for (int n = 1; n < 1 << level; ++n) other_side = times(other_side, unpack_four(first_block + n * BK));
    if (task.block >> level & 1) rows(level, before), before = times(before, other_side);
    else columns(level, after), after = times(after, other_side);
  }
}

// Stores the 4 tokens x of the thread's block, rows or columns of a level, times `decay`. A tile has the 16 tokens of
// one side of the level's borders, in their order: 8 tokens of kind 0, the same 8 tokens of kind 1, and so on for KINDS
// kinds; then the other 8 tokens likewise. For example the rows of level 1, of two kinds:
//   tile      0 ... 7      8 ... 15     16 ... 23    24 ... 31
//   blocks    2, 3         2, 3         6, 7         6, 7
//   kind      0            1            0            1
// block_in_tile: the block's number among the side's four; here 0 for block 2, 3 for block 7.
template <int KINDS, int BK, typename X>
__device__ __forceinline__ void store_level(X* tile, int level, int kind, const BlockTask<BK>& task,
                                            const float4 (&x)[BLOCK], float4 decay) {
  const int block_in_tile = task.block >> (level + 1) << level | task.block & (1 << level) - 1;
  const Spot<BK, 4, X> spot(4 * (block_in_tile & 1), task.c);
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) put_four(spot.at(tile, (block_in_tile >> 1) * KINDS + kind, n), times(decay, x[n]));
}

// Stores zeros in the rows of a block's tokens, without the gaps between rows, by the block's threads. A row is
// ROW_PIECES pieces of 16 bytes: 32 floats, or twice 32 numbers of 16 bits.
constexpr int ROW_PIECES = 8;
template <int BK, typename X> __device__ __forceinline__ void clear_rows(Matrix<X>& M, const BlockTask<BK>& task) {
  constexpr int PIECE = 16 / sizeof(X), ACROSS = BT / PIECE, PIECES = BLOCK * ROW_PIECES;
  static_assert(ACROSS * Matrix<X>::NUMBERS == ROW_PIECES);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece += task.LANES) {
    const int n = piece + task.lane;
    if (task.LANES > PIECES && n >= PIECES) break;
    *reinterpret_cast<uint4*>(M.at(task.first + n / ROW_PIECES, n % ACROSS * PIECE) + n / ACROSS % M.NUMBERS * M.REST) =
        uint4{};
  }
}
template <int BK> __device__ __forceinline__ void clear_rows(float (&M)[BT][LD], const BlockTask<BK>& task) {
  constexpr int PIECES = BLOCK * ROW_PIECES;
  static_assert(BT == 4 * ROW_PIECES);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece += task.LANES) {
    const int n = piece + task.lane;
    if (task.LANES > PIECES && n >= PIECES) break;
    *reinterpret_cast<uint4*>(&M[task.first + n / ROW_PIECES][n % ROW_PIECES * 4]) = uint4{};
  }
}

// Where a block's second warp, if BK is 256, leaves its sum of pair l % PAIRS to lane l of the first one, behind a
// barrier of the thread block: in the gaps between the rows of M, which clear_rows and stores of scores leave as they
// are. Of LD = BT + 4 numbers of a row the last 4 are the gap.
template <int BK> __device__ __forceinline__ float& in_gap(float (&M)[BT][LD], const BlockTask<BK>& task) {
  static_assert(LD == BT + 4 && PAIRS == 4 * BLOCK);
  const int n = task.lane % PAIRS;
  return M[task.first + n / 4][BT + n % 4];
}

// Calls f(i, j, scores of the first kind of rows, scores of the second kind) for this lane's scores of token i with
// tokens j and j + 1 that are computed by way of borders. rows, columns: by level as store_level has stored them, of
// two kinds of rows and of one of columns. In 8 tasks, which the warps share: products of 8 tokens of two kinds of rows
// (`left`: the first or last 8 of the tile's 16) with 8 columns (`right`), of levels 0 and 1 two each, of level 2 four.
// Of d a lane has row lane / 4 of each kind, and columns 2 (lane % 4) and the next.
template <int BK, int THREADS, typename X, class F>
__device__ __forceinline__ void score_borders(const X (&rows)[LEVELS][BT * BK], const X (&columns)[LEVELS][BT / 2 * BK],
                                              F f) {
  const int lane = own_lane();
#pragma unroll
  for (int n = 0; n < 8; n += THREADS / 32) {
    const int task = n + int(threadIdx.x >> 5), level = n >= 4 ? LEVELS - 1 : min(task / 2, LEVELS - 1);
    if (THREADS / 32 > 8 && task >= 8) break;
    const int right = task % 2, left = level == LEVELS - 1 ? task / 2 % 2 : right;
    float d[2][4] = {};
    multiply_rows<BK>(d, rows[level], columns[level], 16 * left, 8 * right);
    // A tile has every other run of `half` tokens: rows those after a border, columns those before it. So number `row`
    // of the 16 rows is token 2 row - row % half + half: at level 1 (half 8) row 9 is token 25, the second of block 6.
    const int half = BLOCK << level, row = 8 * left + (lane >> 2), column = 8 * right + 2 * (lane & 3);
    if ((row ^ column) < half)  // row / half == column / half: otherwise they belong to different borders
      // multiply_rows leaves each score as the sum of d[0] and d[1].
      f(2 * row - (row & half - 1) + half, 2 * column - (column & half - 1),
        float2{d[0][0] + d[1][0], d[0][1] + d[1][1]}, float2{d[0][2] + d[1][2], d[0][3] + d[1][3]});
  }
}

// ---- matrices of tokens times tokens --------------------------------------------------------------------------------

// A lower triangle X [BT, BT], of which a warp has two blocks [16, 16] on the diagonal and the one below. diagonal[i]
// is number (16 (lane / 16) + i, lane). below: of the block's transpose, as products leave it: with g = lane / 4 and t
// = lane % 4 below[across][2 down + p] is number (16 + 8 across + 2t + p, g + 8 down).
struct Triangle {
  float diagonal[16], below[2][4];
};
__device__ __forceinline__ Triangle identity() {
  Triangle x = {};
#pragma unroll
  for (int i = 0; i < 16; ++i) x.diagonal[i] = i == (own_lane() & 15);
  return x;
}

// x <- X = N x, N = (I - diag(weight) M)^-1, where of M only numbers below the diagonal are read; for one warp. Of
// blocks such as X21 (rows 2, columns 1), 1 is the first 16 tokens, 2 the others. X11 and X22 come from forward
// substitution, in float32; X21 is N22 (x21 + diag(weight) M21 X11), products of `single`. For these products two
// blocks are stored transposed: X11 in `room`, where the caller may store the result afterwards, and N22 above M's
// diagonal, where the caller has nothing. M stays until all warps that read N22 have met at a barrier: the callers'
// next one of the thread block. inverts: x is the identity, so that X22 is N22; else another warp stores N22. `wait`
// waits until both are stored: __syncwarp if the warp inverts alone, else a named barrier of the warps that share M.
constexpr bool INVERTS = true;
template <typename T, class Wait>
__device__ __forceinline__ void solve(Triangle& x, float (&M)[BT][LD], const float (&weight)[BT], Matrix<T>& room,
                                      bool inverts, Wait wait) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3, block = lane & 16;
  static_assert(sizeof(room) >= 16 * LD * sizeof(float));
  float *const X11 = reinterpret_cast<float*>(&room), *const N22 = &M[0][16];
  const float *const rows = &M[block][block], *const weights = weight + block;
#pragma unroll
  for (int i = 1; i < 16; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j + 1 < i; j += 4) {
      if (j + 4 < i) {
        const float4 row = unpack_four(rows + i * LD + j);
        sums[0] = fmaf(row.y, x.diagonal[j + 1], fmaf(row.x, x.diagonal[j], sums[0]));
        sums[1] = fmaf(row.w, x.diagonal[j + 3], fmaf(row.z, x.diagonal[j + 2], sums[1]));
      } else {
#pragma unroll
        for (int n = j; n + 1 < i; ++n) sums[n % 2] = fmaf(rows[i * LD + n], x.diagonal[n], sums[n % 2]);
      }
    }
    const float sum = fmaf(weights[i], sums[0] + sums[1], x.diagonal[i]);
    // The last product waits for the row before.
    x.diagonal[i] = fmaf(weights[i] * rows[i * LD + i - 1], x.diagonal[i - 1], sum);
  }
  if (block == 0 || inverts)
#pragma unroll
    for (int i = 0; i < 16; i += 4)
      *reinterpret_cast<float4*>((block ? N22 : X11) + (lane & 15) * LD + i) = unpack_four(x.diagonal + i);
  wait();
  float2 a[4], b[2];
#pragma unroll
  for (int m = 0; m < 4; ++m) a[m] = *reinterpret_cast<const float2*>(X11 + (g + m % 2 * 8) * LD + m / 2 * 8 + 2 * t);
#pragma unroll
  for (int across = 0; across < 2; ++across) {
    const int i = 16 + 8 * across + g;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float2 pair = *reinterpret_cast<const float2*>(&M[i][8 * m + 2 * t]);
      b[m] = {weight[i] * pair.x, weight[i] * pair.y};
    }
    mma_m16n8k16(x.below[across], a, b, single{});
  }
#pragma unroll
  for (int m = 0; m < 4; ++m) a[m] = {x.below[m / 2][m % 2 * 2], x.below[m / 2][m % 2 * 2 + 1]};
#pragma unroll
  for (int across = 0; across < 2; ++across) {
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float* column = N22 + (8 * m + 2 * t) * LD + 8 * across + g;
      b[m] = {column[0], column[LD]};
    }
#pragma unroll
    for (float& sum : x.below[across]) sum = 0.f;
    mma_m16n8k16(x.below[across], a, b, single{});
  }
  __syncwarp();  // all lanes have read X11
}

// Stores x^T, times `factor`, for 16-bit data as sums of two numbers.
template <typename T>
__device__ __forceinline__ void put_transposed(Matrix<T>& to, const Triangle& x, float factor = 1.f) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3, block = lane & 16;
  T* const row = to.at(lane, block);
#pragma unroll
  for (int i = 0; i < 16; i += 8) {
    const float* eight = x.diagonal + i;
    if constexpr (sizeof(T) == 4) {
      put_four(row + i, times(factor, unpack_four(eight))),
          put_four(row + i + 4, times(factor, unpack_four(eight + 4)));
    } else {
      u32 high[4], low[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float one = factor * eight[2 * n], next = factor * eight[2 * n + 1];
        high[n] = pack<T>(one, next);
        const float2 rounded = unpack(high[n], T{});
        low[n] = pack<T>(one - rounded.x, next - rounded.y);
      }
      *reinterpret_cast<uint4*>(row + i) = {high[0], high[1], high[2], high[3]};
      *reinterpret_cast<uint4*>(row + to.REST + i) = {low[0], low[1], low[2], low[3]};
    }
  }
  if (block)  // below the transpose's diagonal
#pragma unroll
    for (int n = 0; n < to.NUMBERS; ++n)
#pragma unroll
      for (int i = 0; i < 16; i += 16 / int(sizeof(T)))
        *reinterpret_cast<uint4*>(to.at(lane, i) + n * to.REST) = uint4{};
#pragma unroll
  for (int across = 0; across < 2; ++across)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const float* two = x.below[across] + 2 * down;
      put_split_pair(to.at(g + 8 * down, 16 + 8 * across + 2 * t), factor * two[0], factor * two[1]);
    }
}

// Loads rows row + 0...15, columns column + 0...15 as left operands, whose sum is the matrix.
template <typename T, int NUMBERS>
__device__ __forceinline__ void load_left(Word<T> (&a)[NUMBERS][4], const Matrix<T>& x, int row, int column) {
  const int lane = own_lane();
#pragma unroll
  for (int n = 0; n < NUMBERS; ++n) x.load(a[n], n, row, column, lane);
}
// The same, of the part below the diagonal of a float matrix.
template <typename T, int NUMBERS>
__device__ __forceinline__ void load_left(Word<T> (&a)[NUMBERS][4], const float (&x)[BT][LD], int row, int column) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = row + g + n % 2 * 8, j = column + 2 * t + n / 2 * 8;
    const float one = j < i ? x[i][j] : 0.f, next = j + 1 < i ? x[i][j + 1] : 0.f;
    a[0][n] = word_of<T>(one, next);
    if constexpr (NUMBERS == 2) {
      const float2 rounded = unpack(a[0][n], T{});
      a[1][n] = pack<T>(one - rounded.x, next - rounded.y);
    }
  }
}

// Calls f(i, j, {(X Y)_ij, (X Y)_i(j + 1)} for each Y) for all elements of the products [BT, BT], also above the
// diagonal, where they are 0; j is even. X and all Y are lower triangles; `transposed`: the transposes of Y. T: the
// type of operands; a float matrix X is split here. At least four warps; a warp's tasks are 16 rows by 8 columns each.
// Of the four products of two sums of two, that of both errors is left out.
template <int THREADS, typename T, class X, class F, class... Y>
__device__ __forceinline__ void multiply_triangles(const X& x, F f, const Y&... transposed) {
  constexpr int WARPS = THREADS / 32, TOGETHER = WARPS < 8 ? 8 / WARPS : 1;  // tasks of the same columns
  // With 4 warps, each has both tasks of its columns, rows 0 and 16; with 8, each has one; of more, 8 have one.
  static_assert(WARPS == 4 || WARPS >= 8, "warps of the same columns have the tasks of both rows");
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int task = threadIdx.x >> 5; task < 8; task += WARPS * TOGETHER) {
    const int column = task % 4 * 8;
    // The lane's row of ldmatrix in a transposed Y: of rounded numbers, then of errors; of 8 tokens, then the next 8.
    const int from = (lane >> 4) * Matrix<T>::REST + (column + (lane & 7)) * Matrix<T>::LDA + (lane >> 3 & 1) * 8;
#pragma unroll
    for (int n = 0; n < TOGETHER; ++n) {
      const int row = TOGETHER > 1 ? 16 * n : task / 4 * 16;
      float d[sizeof...(Y)][4] = {};
#pragma unroll
      for (int token = 0; token < BT; token += 16) {
        if (token > row || token + 15 < column) continue;
        Word<T> a[Matrix<T>::NUMBERS][4];
        load_left<T>(a, x, row, token);
        int n = 0;  // the number of Y, not of the warp's task
        const auto multiply = [&](const Matrix<T>& y) {
          if constexpr (sizeof(T) == 4) {
            const T* pair = y.x + (column + g) * y.LDA + token + 2 * t;
            mma_m16n8k16(d[n], a[0], {unpack_pair(pair), unpack_pair(pair + 8)}, T{});
          } else {
            u32 b[4];
            ldmatrix_x4(b, y.x + from + token);
            mma_m16n8k16(d[n], a[1], {b[0], b[1]}, T{});
            mma_m16n8k16(d[n], a[0], {b[2], b[3]}, T{});
            mma_m16n8k16(d[n], a[0], {b[0], b[1]}, T{});
          }
          ++n;
        };
        (multiply(transposed), ...);
      }
#pragma unroll
      for (int down = 0; down < 2; ++down) {
        float2 sums[sizeof...(Y)];
#pragma unroll
        for (int n = 0; n < int(sizeof...(Y)); ++n) sums[n] = {d[n][2 * down], d[n][2 * down + 1]};
        f(row + g + 8 * down, column + 2 * t, sums);
      }
    }
  }
}

// f(i) of the lane's four rows i in Accumulators: x[m][down] is that of row 16 m + 8 down + lane / 4.
struct RowNumbers {
  float x[BT / 16][2];
  template <class F> __device__ __forceinline__ explicit RowNumbers(F f) {
    const int g = own_lane() >> 2;
#pragma unroll
    for (int n = 0; n < BT / 8; ++n) x[n / 2][n % 2] = f(8 * n + g);
  }
};

// Copies a warp's 16 channels of `tile`, which its lanes have just written, to `to` in global memory, which has the
// layout of a tile too: place<BK>(to, i, c).
template <int BK, typename T> __device__ __forceinline__ void store_channels(T* to, const T* tile) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = 16 / PIECE;
  const int lane = own_lane(), c = int(threadIdx.x) / 32 * 16 + lane % ACROSS * PIECE;
  __syncwarp();  // the warp's channels of `tile` are in shared memory
#pragma unroll
  for (int n = 0; n < BT; n += 32 / ACROSS) {
    const int row = n + lane / ACROSS;
    *reinterpret_cast<uint4*>(place<BK>(to, row, c)) = *reinterpret_cast<const uint4*>(place<BK>(tile, row, c));
  }
}
