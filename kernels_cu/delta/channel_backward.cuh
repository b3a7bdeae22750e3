// what      The steps that the backward kernels of KDA and of RWKV-7 share: gradients of a chunk of 32 tokens and 64
//           channels, where every channel has a gate of its own. `caller`, below, is such a kernel in ten lines.
// math      S is the state before the chunk, dS the gradient of the state after it. A token reads the state along
//           vectors that are called *rows* (KDA: q and k; RWKV-7: q and a) and writes to it along *columns* (KDA: k;
//           RWKV-7: k and b). A *kind* is one of these arrays in one role: KDA has q, k | k, RWKV-7 q, a | k, b.
//           A token's decay is e^g of its log gates g [K]. D_ij [K] is the decay by the gates after column j up to row
//           i: through gate i, or, where the row is RWKV-7's a, which reads before its own gate, i - 1. pair_ij is the
//           gradient of the score row_i . D_ij column_j, a number for each row i and column j <= i (j < i of KDA's row
//           k and of RWKV-7's a). *Terms* are the summands of a kind's gradient:
//             row i:     sum_j pair_ij D_ij column_j, and (decay from the chunk's start to i) S (the gradient of what
//                        row i reads)
//             column j:  sum_i pair_ij D_ij row_i, and (decay from j to the chunk's end) dS (the value that column j
//                        writes)
//           The chunk has 4 blocks of 8 tokens. Pairs within a block are added up one by one. A pair of two blocks is
//           computed by way of the *border* between them: that after 16 tokens of the chunk, or after 8 of 16. The row
//           is decayed from the border, and the column up to it. Terms, too, are kept without the decay between their
//           token and a border: first the chunk's start or end, then nearer ones (table at add_pairs_of_blocks).
//           dg_t adds up, channel by channel, all that gate t multiplies:
//             sum_{i >= t} row_i (row i's term of S) + sum_{j < t} column_j (column j's term of dS)
//             + sum_{j < t <= i} row_i pair_ij D_ij column_j + (the chunk's decay) (the sum over V of S dS)
//           (RWKV-7's a: i > t in both sums over i). All gates of a block get the same sum from another block: from a
//           later one its row_sums, from an earlier one its column_sums. A pair of two blocks also counts for those
//           between. By the blocks of row and column these are (3, 0) and (3, 1) for block 2, (3, 0) and (2, 0) for
//           block 1. So block 2 gets end_sums[0], which is row_sums of block 3 with its pairs, and block 1 gets
//           end_sums[1], column_sums of block 0 with its pairs (add_terms_of_blocks).
// caller    kda_backward_chunks.cu and dplr_backward_chunks.cu; | is a barrier of the block:
//             fetch_states and fetch_rows start copying the first 64 columns of V, then the tokens; the caller copies g
//             each_columns, which has two barriers for every 64 columns of V, calls multiply_states, and the caller's
//             own products, which give pairs
//             store_terms, store_pairs_of_blocks, store_diagonals; load BlockTokens, store block_decays
//             | terms, pairs, state_product and block_decays are stored; all threads have read their tokens
//             add_pairs_of_blocks, which has four barriers
//             add pairs within the block; add_terms_of_blocks; store_block, for each gradient
// tests     test_delta_kernels; test_compile (no spills)
// smem      The caller's struct is derived from BlockSums. In comments S is the state; in the code it is the type of
//           this struct, `s`, which has besides:
//             tokens, g             the chunk's rows and columns, and its log gates, in tiles: place<TILE>(tile, i, c)
//             states[2]             64 columns of S and of dS
//             values[kind]          for a kind of rows the gradients of what the rows read, which S is multiplied with;
//                                   for a kind of columns the values that the columns write, for dS
//             terms[kind]           [BT, TILE] at term_place, in the memory of states and values, which are read no
//                                   more when each_columns has returned
//             decayed[2][NUMBERS]   [BT, TILE], in the memory of tokens: at the border after 16, [n] has the n-th kind
//                                   of rows, decayed from it, in the places of tokens 16 to 31, and the n-th kind of
//                                   columns, decayed to it, in those of tokens 0 to 15; then, at the borders after 8 of
//                                   16, likewise rows of blocks 1 and 3, and columns of blocks 0 and 2
// numerics  Pairs of two blocks, and their decayed rows and columns, are, for 16-bit data, the sum of two bfloat16
//           numbers: the rounded number and its rounding error. Of the four products of these, three are computed.
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

// From the includes:
//   BT = 32 tokens, TILE = 64
//   single: float32 data as a struct {float x}: so an overload for operands is not chosen for sums, which are float. A
//     product of `single` is three products of tf32. Matrix<T>::NUMBERS: how many T a value is stored as the sum of, 1
//     `single` or 2 of 16 bits
//   Word<T>: two neighbouring numbers; put_pair stores two floats as such; put_split_pair<T, REST> rounds them to T and
//     stores their rounding errors REST numbers later, or, where T is `single`, stores them as they are, and no errors
//   LeftReader: left operands from a tile. StateReader<TRANSPOSED>: right operands [16 columns of V, 8 channels] from
//     a state's tile, which has matrices [8 columns of V][8 channels], 64 numbers each: those of 8 columns in the order
//     of their channels, TILE / 8 of them, then those of the next 8 columns. TRANSPOSED: of each matrix loaded, rows
//     and columns are swapped, so that a word has two columns of V of one channel. first(n, lane): the lane's offset
//     for four matrices, of 16 columns and of the channels 8 n to 8 n + 15
//   own_lane(): threadIdx.x & 31, computed again at each call, so that no register keeps it
//   mma_m16n8k16(d, a, b, T{}): d += a b; T{} only gives the type
//   state_index: the place in chunk_states, and in state_gradients, of the 64 channels from `channel` on
//   padded(n): n rounded up to a multiple of 64; shape.NC: chunks of a batch row; chunk_tokens: a chunk's Span
//   place<TILE>(tile, i, c): the address of a number of a swizzled tile; cp_async<16>(to, from, exists): starts copying
//     16 bytes, or zeros if not `exists`; from_float<T>: rounds to T; decay_of(g): e^g
//   Accumulators: a warp's sums [32 tokens, 16 columns]; each_pair: calls f(token, column, m, across, down) for
//     each pair of a lane: sums[m][across][2 down], of this column of the block's 64, and the next number

constexpr int THREADS = 2 * TILE, HALF = BT / 2;  // HALF: tokens on a side of the border after 16
constexpr int BLOCK = 8, BLOCKS = BT / BLOCK;     // tokens of a block, blocks of the chunk
static_assert(BLOCKS == 4 && BLOCKS == THREADS / 32, "a warp has a block; borders are after 8 and 16 of 32 tokens");

// The chunk and the 64 channels of a block, in a grid [B, H, NC, padded(K) / TILE].
struct ChannelTile {
  u32 b, h, chunk;      // the batch row, the head of values, the chunk's number in the batch row
  int first, channels;  // the first channel; how many there are from it on, perhaps more than 64
  Span span;            // the chunk's tokens
  int rows;             // how many tokens

  __device__ __forceinline__ explicit ChannelTile(const Shape& shape) {
    const u32 tiles = u32(padded(shape.K)) / TILE, head_of_batch = blockIdx.x / tiles / u32(shape.NC);
    chunk = blockIdx.x / tiles % u32(shape.NC), h = head_of_batch % u32(shape.H), b = head_of_batch / u32(shape.H);
    first = blockIdx.x % tiles * TILE, channels = int(shape.K) - first;
    span = chunk_tokens(shape, chunk), rows = int(span.stop - span.start);
  }
};

// Shared memory for pairs of two blocks and for sums over blocks. Number: the type of pairs, and of decayed rows and
// columns; NUMBERS: how many Numbers a value is the sum of, 2 of 16 bits or 1 of 32. Kinds are numbered: first the
// ROW_KINDS kinds of rows, then the COLUMN_KINDS kinds of columns.
template <int COLUMNS, typename X> struct BlockSums {
  using Number = X;
  static constexpr int NUMBERS = Matrix<Number>::NUMBERS;
  static constexpr int ROW_KINDS = 2, COLUMN_KINDS = COLUMNS;
  static_assert(COLUMN_KINDS <= ROW_KINDS, "`decayed` has a place for each kind of rows, which columns share");
  // pair_ij of each kind of rows with each kind of columns, rounded, and the rounding errors, in matrices [16 rows, 16
  // columns] at pair_place. [0], over the border after 16 tokens: rows of blocks 2 and 3, columns of blocks 0 and 1.
  // [1], over the two borders after 8 of 16: rows of blocks 1 and 3, columns of blocks 0 and 2; of these (1, 0) and (3,
  // 2) are pairs, and the other two quarters are 0.
  Number pairs_across[2][ROW_KINDS * COLUMN_KINDS][NUMBERS][HALF * HALF];
  float block_decays[BLOCKS][TILE];  // over each block; stored by the caller
  // Sums over a block of rows times their terms of S, and of columns times their terms of dS.
  float row_sums[BLOCKS][TILE], column_sums[BLOCKS][TILE];
  // Row sum of the last block, [0], and column sum of the first, [1], including pairs over the border after 16 tokens.
  float end_sums[2][TILE];
  float state_product[TILE];  // the sum over V of S dS
};

// The place of row i and column j in a matrix of `pairs_across`: columns are swapped so that banks differ.
__device__ __forceinline__ int pair_place(int i, int j) { return i * HALF + ((j / 8 ^ i >> 2 & 1) * 8 | j % 8); }

// The place of channels c and c + 1 of token i in terms [BT, TILE]; c is even.
__device__ __forceinline__ int term_place(int i, int c) { return i * TILE + (c ^ (i & 3) * 8); }

// x y, x + y and sum + x y of the two numbers of each argument.
__device__ __forceinline__ float2 times(float2 x, float2 y) { return {x.x * y.x, x.y * y.y}; }
__device__ __forceinline__ float2 plus(float2 x, float2 y) { return {x.x + y.x, x.y + y.y}; }
__device__ __forceinline__ float2 plus_times(float2 sum, float2 x, float2 y) {
  return {fmaf(x.x, y.x, sum.x), fmaf(x.y, y.y, sum.y)};
}
__device__ __forceinline__ float2 plus_times(float2 sum, float x, float2 y) { return plus_times(sum, {x, x}, y); }

// Two neighbouring numbers, as floats; x is aligned to the size of both.
__device__ __forceinline__ float2 pair_at(const float* x) { return *reinterpret_cast<const float2*>(x); }
template <typename T> __device__ __forceinline__ float2 pair_at(const T* x) { return unpack_pair(x); }

// Copies a chunk's 32 rows of 64 numbers from memory, where they are `stride` apart, to a tile, by one warp. Zeros fill
// rows from `rows` on, and columns from `width` on. bytes == 16: rows start on 16 bytes and `width` is a multiple of 16
// bytes; this only starts the copies. Otherwise it has copied all numbers, one by one, when it returns.
template <typename T>
__device__ __forceinline__ void fetch_rows(T* tile, const T* from, i64 stride, int rows, int width, int bytes) {
  constexpr int PIECE = 16 / sizeof(T), ACROSS = TILE / PIECE, AT_ONCE = 32 / ACROSS;
  const int lane = own_lane(), first = lane / ACROSS, c = lane % ACROSS * PIECE;
  const char* piece = reinterpret_cast<const char*>(from + first * stride + c);
  const i64 rows_at_once = AT_ONCE * stride * i64(sizeof(T));
  if (bytes == 16 && rows >= BT && width >= TILE) {
#pragma unroll
    for (int n = 0; n < BT; n += AT_ONCE, piece += rows_at_once) cp_async<16>(place<TILE>(tile, first + n, c), piece);
  } else if (bytes == 16) {
    rows = c < width ? rows - first : 0;  // from here on: those from the lane's first row on
#pragma unroll
    for (int n = 0; n < BT; n += AT_ONCE, piece += rows_at_once)
      cp_async<16>(place<TILE>(tile, first + n, c), piece, n < rows);
  } else {
#pragma unroll 1
    for (int index = lane; index < BT * TILE; index += 32) {
      const int row = index / TILE, column = index % TILE;
      *place<TILE>(tile, row, column) = row < rows && column < width ? from[row * stride + column] : from_float<T>(0.f);
    }
  }
}

// Starts copying 32 columns of V by the block's 64 channels, of S (warps 0 and 1) or of dS (warps 2 and 3): the first
// 32 columns from `column` on by warps 0 and 2, the next 32 by warps 1 and 3. They lie in memory as they do in
// s.states: [8][8] matrices of 8 columns by 8 channels. They need no bound: V is padded with zeros to a multiple of 64.
template <typename T, class S>
__device__ __forceinline__ void fetch_states(S& s, const T* chunk_states, const T* state_gradients, const Shape& shape,
                                             const ChannelTile& tile, int column) {
  constexpr int PIECE = 16 / sizeof(T), SIZE = TILE * TILE / 2;
  const int warp = threadIdx.x >> 5, state = warp / 2, first = warp % 2 * SIZE + own_lane() * PIECE;
  const T* from = (state ? state_gradients : chunk_states) +
                  state_index(shape, tile.b, tile.h, tile.chunk, tile.first) + i64(column) * TILE + first;
#pragma unroll
  for (int n = 0; n < SIZE; n += 32 * PIECE) cp_async<16>(s.states[state] + first + n, from + n);
}

// Adds S dS, summed over 16 columns of V, for the warp's 16 channels: the diagonal of S dS^T, which tensor cores
// compute, in two blocks of 8 channels. StateReader has loaded S and dS, transposed. With g = lane / 4 and t = lane % 4
// a lane has, of S dS^T, in d[p] channels (g, 2t + p) and in d[2 + p] channels (8 + g, 8 + 2t + p): the diagonal is
// where g = 2t + p.
template <typename T>
__device__ __forceinline__ void multiply_diagonals(float (&d)[4], const Word<T> (&state)[4],
                                                   const Word<T> (&gradient)[4]) {
  // StateReader's words are in a right operand's order: a left operand has the middle two the other way round.
  const Word<T> left[4] = {state[0], state[2], state[1], state[3]};
  float product[2][4] = {{d[0], d[1]}, {0.f, 0.f, d[2], d[3]}};
#pragma unroll
  for (int n = 0; n < 2; ++n) mma_m16n8k16(product[n], left, {gradient[2 * n], gradient[2 * n + 1]}, T{});
  d[0] = product[0][0], d[1] = product[0][1], d[2] = product[1][2], d[3] = product[1][3];
}

// Stores the diagonal that multiply_diagonals left in the lanes' d: to[channel] for the warp's 16 channels, from
// channel 16 * warp on.
__device__ __forceinline__ void store_diagonals(float (&to)[TILE], const float (&d)[4]) {
  const int g = own_lane() >> 2, odd = g & 1, channel = threadIdx.x / 32 * 16 + g;
  if (g / 2 == (own_lane() & 3)) { to[channel] = odd ? d[1] : d[0], to[channel + 8] = odd ? d[3] : d[2]; }
}

// terms[kind] += s.values[kind] S^T for kinds of rows, s.values[kind] dS^T for kinds of columns, over 64 columns of V,
// for all 32 tokens and the warp's 16 channels (Accumulators: chunk.cuh). diagonals += the sum over these columns of S
// dS, as multiply_diagonals has it.
template <typename T, int KINDS, class S>
__device__ __forceinline__ void multiply_states(Accumulators (&terms)[KINDS], float (&diagonals)[4], const S& s) {
  using States = StateReader<TRANSPOSED, T>;
  const int lane = own_lane();
  const LeftReader<TILE, T> reader(lane);
  const int first = States::first(2 * (threadIdx.x >> 5), lane);
#pragma unroll 1
  for (int c = 0; c < TILE / 16; ++c) {  // 16 columns of V
    Word<T> states[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) States::load(states[n], s.states[n] + first + 2 * c * (TILE / 8) * 64);
#pragma unroll
    for (int kind = 0; kind < KINDS; ++kind)
#pragma unroll
      for (int m = 0; m < BT / 16; ++m) {
        const Word<T>(&state)[4] = states[kind / S::ROW_KINDS];
        Word<T> values[4];
        reader.load(values, s.values[kind], 16 * m, 16 * c);
        mma_m16n8k16(terms[kind][m][0], values, {state[0], state[1]}, T{});
        mma_m16n8k16(terms[kind][m][1], values, {state[2], state[3]}, T{});
      }
    multiply_diagonals<T>(diagonals, states[0], states[1]);
  }
}

// Calls multiply() for every 64 of the V columns, once they have arrived; `fetch(column)` starts copying those from
// `column` on, and commits them as a group. Before the call two groups are under way: the first columns, then the
// tokens, which have arrived when it returns. The columns have been read then: terms may overwrite them.
template <class Fetch, class Multiply>
__device__ __forceinline__ void each_columns(i64 V, Fetch fetch, Multiply multiply) {
  cp_async_wait<1>();  // the first columns; tokens and gates may still be on their way
#pragma unroll 1
  for (int column = 0;; column += TILE) {
    __syncthreads();  // the columns have arrived; the first time also: what the caller has stored is in shared memory
    multiply();
    cp_async_wait<0>();
    __syncthreads();  // the columns have been read: others, or terms, may overwrite them; tokens have arrived
    if (column + TILE >= V) break;
    fetch(column + TILE);
    cp_async_wait<0>();
  }
}

// Stores terms[kind] of multiply_states, times factor(kind, token), in s.terms.
template <int KINDS, class S, class Factor>
__device__ __forceinline__ void store_terms(S& s, const Accumulators (&terms)[KINDS], Factor factor) {
#pragma unroll
  for (int kind = 0; kind < KINDS; ++kind)
    each_pair([&](int i, int c, int m, int across, int down) {
      const float *x = terms[kind][m][across] + 2 * down, weight = factor(kind, i);
      put_pair(s.terms[kind] + term_place(i, c), {weight * x[0], weight * x[1]});
    });
}

// Stores a lane's pairs x and y: of row g of block `row` with columns 2t and 2t + 1 of block `column`, where g = lane /
// 4 and t = lane % 4. kind_pair: (the row's kind) COLUMN_KINDS + (the column's number among the kinds of columns). For
// pairs within a block calls `store_within(g, 2t)`, which stores them where the caller keeps these. The calls for (0,
// 1) and (2, 3), where no pair is, store zeros in the unused quarters of pairs_across[1]; every caller must make them.
// Precondition: row / 2 >= column / 2. A call for a later half of columns, such as (0, 2), would overwrite pairs by
// zeros.
template <class S, class F>
__device__ __forceinline__ void store_pairs_of_blocks(S& s, int kind_pair, int row, int column, float x, float y,
                                                      F store_within) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const auto store_across = [&](int border, int i, int j, float x, float y) {
    put_split_pair<typename S::Number, HALF * HALF>(
        s.pairs_across[border][kind_pair][0] + pair_place(8 * i + g, 8 * j + 2 * t), x, y);
  };
  if (row == column) store_within(g, 2 * t);
  else if (row < column) store_across(1, row / 2, 1 - column / 2, 0.f, 0.f);
  else if (row >= 2 && column < 2) store_across(0, row - 2, column, x, y);
  else store_across(1, row / 2, column / 2, x, y);
}

// For the border after TOKENS = 16 tokens, or the two borders after TOKENS = 8 of 16: moves the terms of the rows after
// it, or, OF_COLUMNS, of the columns before it, from their former border to this one, by a product with the decay
// between both (table at add_pairs_of_blocks). Then adds the terms of the pairs over it. A warp has 16 channels.
// For example OF_ROWS, over the border after 16 tokens: the terms of tokens 16 to 31, so far without the decay from the
// chunk's start, are multiplied by the decay over blocks 0 and 1, and the pairs with columns 0 to 15 are added.
// s.decayed has the rows and columns decayed from and to their border. "Own" kinds are those whose terms are computed,
// "other" kinds those on the border's other side. A lane has of d[kind], a product [16 tokens, 16 channels]:
// d[kind][across][2 down + p] is token lane / 4 + 8 down, channel 8 across + 2 (lane % 4) + p. Before the terms are
// stored it calls next(), which does the same for the other side: loads and products of both then overlap.
enum Side { OF_ROWS, OF_COLUMNS };
template <int TOKENS, Side SIDE, class S, class Next>
__device__ __forceinline__ void add_pairs_across(S& s, Next next) {
  constexpr bool FOR_COLUMNS = SIDE == OF_COLUMNS;
  static_assert(TOKENS == HALF || TOKENS == BLOCK);
  constexpr int OWN = FOR_COLUMNS ? S::COLUMN_KINDS : S::ROW_KINDS,
                OTHER = FOR_COLUMNS ? S::ROW_KINDS : S::COLUMN_KINDS;  // kinds
  using Number = typename S::Number;
  constexpr int FIRST = FOR_COLUMNS ? S::ROW_KINDS : 0, own_start = FOR_COLUMNS ? 0 : TOKENS,
                other_start = TOKENS - own_start;
  const int lane = own_lane(), g = lane >> 2, t = lane & 3, channel = threadIdx.x / 32 * 16;
  // Token n of the 16 that are before a border; that of the other side is TOKENS later.
  const auto token_before = [](int n) { return TOKENS == BLOCK ? n + (n & 8) : n; };
  float d[OWN][2][4];
  // Calls f(two sums, the kind's terms, token, channel, 0 or 1: rows 0 to 7 or 8 to 15 of d) for all sums of this lane.
  const auto each_pair_of_channels = [&](auto f) {
#pragma unroll
    for (int n = 0; n < OWN; ++n)
#pragma unroll
      for (int across = 0; across < 2; ++across)
#pragma unroll
        for (int down = 0; down < 2; ++down)
          f(d[n][across] + 2 * down, s.terms[FIRST + n], token_before(g + 8 * down) + own_start,
            channel + 8 * across + 2 * t, down);
  };
  each_pair_of_channels([&](float* to, const float* terms, int i, int c, int down) {
    const auto block_decay = [&](int n) { return pair_at(&s.block_decays[n][c]); };
    // The decay over the 8 tokens (block 0 or 2 for rows, 1 or 3 for columns), or the 16 tokens (blocks 0 and 1 for
    // rows, 2 and 3 for columns), from the former border to this one.
    float2 decay = block_decay(TOKENS == BLOCK ? 2 * down + FOR_COLUMNS : 2 * FOR_COLUMNS);
    if (TOKENS > BLOCK) decay = times(decay, block_decay(2 * FOR_COLUMNS + 1));
    const float2 x = times(decay, pair_at(terms + term_place(i, c)));
    to[0] = x.x, to[1] = x.y;
  });
#pragma unroll(sizeof(Number) == 4 ? 1 : OTHER)  // for float32 registers are few
  for (int m = 0; m < OTHER; ++m) {
    // Right operands [16 tokens on the other side, 8 channels] for the warp's first and last 8 channels; of 16-bit data
    // first of the rounded numbers, then of the errors.
    Word<Number> b[S::NUMBERS][4];
    if constexpr (sizeof(Number) == 4) {
#pragma unroll
      for (int fragment = 0; fragment < 4; ++fragment) {
        const auto at = [&](int i) {
          return place<TILE>(s.decayed[m][0], token_before(2 * t + fragment % 2 * 8) + i + other_start,
                             channel + g + fragment / 2 * 8)
              ->x;
        };
        b[0][fragment] = {at(0), at(1)};
      }
    } else {
#pragma unroll
      for (int summand = 0; summand < 2; ++summand)
        ldmatrix_x4_trans(b[summand], place<TILE>(s.decayed[m][summand], token_before(lane & 15) + other_start,
                                                  channel + (lane >> 4) * 8));
    }
#pragma unroll
    for (int n = 0; n < OWN; ++n)
#pragma unroll
      for (int summand = 0; summand < S::NUMBERS; ++summand) {
        const int row = FOR_COLUMNS ? m : n, column = FOR_COLUMNS ? n : m;  // kinds
        const Number* matrix = s.pairs_across[TOKENS == BLOCK][row * S::COLUMN_KINDS + column][summand];
        Word<Number> a[4];  // left operand [16 own tokens, 16 others]: the pairs, or FOR_COLUMNS their transpose
        if constexpr (sizeof(Number) == 4) {
#pragma unroll
          for (int fragment = 0; fragment < 4; ++fragment) {
            const int down = fragment % 2 * 8, right = fragment / 2 * 8;
            if (FOR_COLUMNS)
              a[fragment] = {matrix[pair_place(2 * t + right, g + down)].x,
                             matrix[pair_place(2 * t + 1 + right, g + down)].x};
            else a[fragment] = unpack_pair(matrix + pair_place(g + down, 2 * t + right));
          }
        } else if (FOR_COLUMNS) {
          ldmatrix_x4_trans(a, matrix + pair_place((lane & 7) + (lane >> 4) * 8, (lane >> 3 & 1) * 8));
        } else {
          ldmatrix_x4(a, matrix + pair_place(lane & 15, (lane >> 4) * 8));
        }
#pragma unroll
        for (int across = 0; across < 2; ++across) {
          mma_m16n8k16(d[n][across], a, {b[0][2 * across], b[0][2 * across + 1]}, Number{});
          if constexpr (sizeof(Number) == 2)
            if (summand == 0) mma_m16n8k16(d[n][across], a, {b[1][2 * across], b[1][2 * across + 1]}, Number{});
        }
      }
  }
  next();
  each_pair_of_channels(
      [&](float* from, float* terms, int i, int c, int) { put_pair(terms + term_place(i, c), {from[0], from[1]}); });
}

// Stores value(n), two channels, in rows n = 0 ... 7 that are below `rows`; `stride`: between rows, in numbers.
// `columns`: how many columns exist, from the first of the two on; `bytes`: rows start on multiples of it, and their
// length is a multiple of it.
template <typename T, class F>
__device__ __forceinline__ void store_block(T* to, i64 stride, int rows, int columns, int bytes, F value) {
  if (columns <= 0) return;
  if (rows >= BLOCK && bytes >= int(2 * sizeof(T))) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n, to += stride) put_pair(to, value(n));
  } else if (bytes >= int(2 * sizeof(T))) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n, to += stride)
      if (n < rows) put_pair(to, value(n));
  } else {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n, to += stride) {
      if (n < rows) to[0] = from_float<T>(value(n).x);
      if (n < rows && columns > 1) to[1] = from_float<T>(value(n).y);
    }
  }
}

// The 8 tokens of block `block` in channels c and c + 1, copied from the arrays s.tokens to registers, and their decays
// exp g from s.g. KDA has two arrays, q and k, for its three kinds, RWKV-7 four. token(array, n): token n of an array
// as floats; decay(): the product of all 8.
template <typename T, int ARRAYS> struct BlockTokens {
  Word<T> tokens[ARRAYS][BLOCK];
  float2 decays[BLOCK];

  template <class S> __device__ __forceinline__ BlockTokens(const S& s, int block, int c) {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      const int i = block * BLOCK + n;
      const float2 gates = pair_at(place<TILE>(s.g, i, c));
      decays[n] = {decay_of(gates.x), decay_of(gates.y)};
#pragma unroll
      for (int array = 0; array < ARRAYS; ++array)
        tokens[array][n] = *reinterpret_cast<const Word<T>*>(place<TILE>(s.tokens[array], i, c));
    }
  }
  __device__ __forceinline__ float2 token(int array, int n) const { return unpack(tokens[array][n], T{}); }
  __device__ __forceinline__ float2 decay() const {
    float2 all = decays[0];
#pragma unroll
    for (int n = 1; n < BLOCK; ++n) all = times(all, decays[n]);
    return all;
  }
};

// The terms of a kind, of token i of the chunk in channels c and c + 1; c is even.
template <class S> __device__ __forceinline__ float2& term_at(S& s, int kind, int i, int c) {
  return *reinterpret_cast<float2*>(s.terms[kind] + term_place(i, c));
}

// All threads call this together; it has four barriers. Adds the pairs of two blocks to the terms, and stores row_sums,
// column_sums and end_sums. Terms lack the decay between their token and a border; after the return the caller
// multiplies them by it. That border is
//                            for rows of block          for columns of block
//                            0      1      2      3     0      1      2      3
//   on entry                 start  start  start  start end    end    end    end     (of the chunk)
//   with pairs over 16       start  start  16     16    16     16     end    end
//   on return, over 8, too   start  8      16     24    8      16     24     end     (the block's own start or end)
// A thread has channels c and c + 1 of a block. Tokens: the caller's struct, derived from BlockTokens, which has
// besides each_row(decay, f) and each_column(decay, f). They call f(kind, n, x) for the rows decayed from the block's
// start and for the columns decayed to its end, times `decay`. Terms of S and dS, pairs and block_decays must be in
// shared memory, and all threads must have read their tokens, since `decayed` may overwrite them.
template <class S, class Tokens>
__device__ __forceinline__ void add_pairs_of_blocks(S& s, const Tokens& tokens, int block, int c) {
  const int start = block * BLOCK;
  const auto block_decay = [&](int n) { return pair_at(s.block_decays[n] + c); };
  // kind % ROW_KINDS: the number among the kinds of rows, or, as COLUMN_KINDS <= ROW_KINDS, among those of columns.
  const auto store_decayed = [&](int kind, int n, float2 x) {
    put_split_pair<typename S::Number, BT * TILE>(place<TILE>(s.decayed[kind % S::ROW_KINDS][0], start + n, c), x.x,
                                                  x.y);
  };
  const auto sum_rows = [&](float (&to)[TILE], float2 decay) {
    float2 sum = {};
    tokens.each_row(decay,
                    [&](int kind, int n, float2 x) { sum = plus_times(sum, x, term_at(s, kind, start + n, c)); });
    put_pair(to + c, sum);
  };
  const auto sum_columns = [&](float (&to)[TILE], float2 decay) {
    float2 sum = {};
    tokens.each_column(decay,
                       [&](int kind, int n, float2 x) { sum = plus_times(sum, x, term_at(s, kind, start + n, c)); });
    put_pair(to + c, sum);
  };
  const float2 one = {1.f, 1.f};
  float2 from_start = one, to_end = one;  // decays from the chunk's start to the block, and from it to the chunk's end
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n < block) from_start = times(from_start, block_decay(n));
    else if (n > block) to_end = times(block_decay(n), to_end);
  sum_rows(s.row_sums[block], from_start), sum_columns(s.column_sums[block], to_end);
  if (block < 2) tokens.each_column(block == 0 ? block_decay(1) : one, store_decayed);
  else tokens.each_row(block == 3 ? block_decay(2) : one, store_decayed);
  __syncthreads();  // rows and columns decayed to the border after 16 are in shared memory, and terms have been read
  add_pairs_across<HALF, OF_ROWS>(s, [&] { add_pairs_across<HALF, OF_COLUMNS>(s, [] {}); });
  __syncthreads();  // terms include the products; decayed rows and columns have been read: others may overwrite them
  if (block == 3) sum_rows(s.end_sums[0], block_decay(2));
  if (block == 0) sum_columns(s.end_sums[1], block_decay(1));
  if (block % 2) tokens.each_row(one, store_decayed);
  else tokens.each_column(one, store_decayed);
  __syncthreads();  // rows and columns decayed to borders after 8 are in shared memory, and terms have been read
  add_pairs_across<BLOCK, OF_ROWS>(s, [&] { add_pairs_across<BLOCK, OF_COLUMNS>(s, [] {}); });
  __syncthreads();  // terms include the products
}

// Completes dg of a block. The caller has added what the block's own rows and the pairs within the block give. Added
// here to the gate of token t are
//   S dS                                  times the chunk's decay
//   row_sums of each later block          rows times their terms of S
//   column_sums of each earlier block     columns times their terms of dS
//   column_terms[n] of own tokens n < t   column n times its terms of dS and of pairs with later blocks
// Pairs of two other blocks count if this block is between them: so end_sums, which include them, take the place of
// block 3's row_sums for block 2, and of block 0's column_sums for block 1.
template <class S>
__device__ __forceinline__ void add_terms_of_blocks(float2 (&dg)[BLOCK], const float2 (&column_terms)[BLOCK], S& s,
                                                    int block, int c) {
  const auto block_decay = [&](int n) { return pair_at(s.block_decays[n] + c); };
  float2 sum = times(times(times(block_decay(0), block_decay(1)), times(block_decay(2), block_decay(3))),
                     pair_at(s.state_product + c));
#pragma unroll
  for (int n = 0; n < BLOCKS; ++n)
    if (n > block) sum = plus(sum, pair_at((block == 2 ? s.end_sums[0] : s.row_sums[n]) + c));
    else if (n < block) sum = plus(sum, pair_at((block == 1 ? s.end_sums[1] : s.column_sums[n]) + c));
#pragma unroll
  for (int n = 0; n < BLOCK; ++n) {
    dg[n] = plus(dg[n], sum);
    sum = plus(sum, column_terms[n]);
  }
}
