// what      Kimi Delta Attention backward, a block for each chunk of 32 tokens and 64 channels: dq, dk, dbeta and dg,
//           from what backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, dS the gradient of the state after it. e_t is the residual: v_t
//           minus what k_t reads from the state. w_t is the gradient of beta_t e_t, the value that token t writes. A
//           token's decay is e^g of its log gates g [K]. Decays over tokens: P_i from the chunk's start through token
//           i, E_i from after token i to the chunk's end, D_ij from after token j through token i. Products of pairs:
//           a_ij = scale beta_j do_i . e_j, j <= i; m_ij = -beta_i beta_j w_i . e_j, j < i
//           dq_i = scale P_i S do_i + sum_j D_ij a_ij k_j;   dbeta_i = w_i . e_i
//           dk_i = E_i beta_i dS e_i - beta_i P_i S w_i + sum_j D_ij m_ij k_j + sum_j D_ji (a_ji q_j + m_ji k_j)
//           dg_t adds up all terms that gate t multiplies: of S with the rows (queries and keys) i >= t, of dS with the
//           keys j < t, of pairs j < t <= i, and the chunk's decay times the sum over V of S dS. No dg is a
//           difference of two sums over tokens, whose rounding errors could exceed dg
// shapes    q k [B, H, T, K], do [B, HV, T, V], e w: a row for each of [B, HV, T] (backward_states.cu), g dg
//           [B, HV, T, K], beta [B, HV, T], dbeta [B, HV, T] float32, dq dk [B, HV, T, K]; S and dS:
//           backward_storage.cuh. If heads of values share keys, or queries and keys are normalized, `parts` [2, B, HV,
//           T, K] float32 takes the place of dq and dk: the gradients with respect to the normalized queries and keys,
//           for sum_parts.cu
// grid      a block for every (batch, head of values, chunk, 64 channels), channels fastest; a warp for 16 channels
// smem      Shared: the chunk's q, k and gates; 64 columns of S, dS, do, w and e at a time
// barriers  two for every 64 columns of V: they have arrived (the first time also: weights and lengths are stored)
//           | they have been read, and q, k and g have arrived. Then: terms of S and dS, and pairs, are stored;
//           add_pairs_of_blocks has four more
// order     1 for every 64 columns of V: products with S and dS (multiply_states), products of pairs (multiply_values)
//           2 both are scaled and stored, as s.terms and as pairs
//           3 add_pairs_of_blocks: pairs of two blocks. From here on a warp has a block of 8 tokens
//           4 the block's own pairs: by rows, which completes dq; by columns, which completes dk
//           5 add_terms_of_blocks completes dg
// lengths   normalized tokens are q / |q|, k / |k|. The kernel takes q and k as they are, and multiplies what they are
//           multiplied with, pairs and terms, by 1 / |q| and 1 / |k|; so dq and dk are divided by them, until stored
// numerics  products with S and dS, and of values, are of T, summed in float32. For 16-bit data e is the sum of two T
//           in its products with do and w; dS e takes e rounded to T. Pairs within a block of 8 tokens are added up in
//           float32. Pairs of two blocks are products of tensor cores; for 16-bit data their operands are sums of two
//           bfloat16 numbers (channel_backward.cuh). A decay is a product of the decays of the tokens in between, so
//           that any gate is exact
// source    Kimi Team, 2025 (2510.26692), eq. 1
// limits    T of bfloat16, float16, single (float32: operands.cuh)
// tests     test_delta_kernels; test_compile (no spills but on sm_120)
#include "cards.cuh"
#include "delta/channel_backward.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   BT = 32 tokens in BLOCKS = 4 blocks of BLOCK = 8; TILE = 64 channels or columns; THREADS = 128
//   store_block: a thread stores 8 tokens' two channels; fetch_rows, copy_chunk: a warp, the block, starts copying a
//     chunk's rows; pair_at, put_pair: two neighbouring numbers; padded(n): n rounded up to a multiple of 64
//   times, plus, plus_times(sum, x, y): x y, x + y, sum + x y of two channels each
//   Word<T>: two neighbouring numbers of T, as operands of tensor cores have them
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   LeftReader, RowsReader: operands of tensor cores from a tile
//   multiply_states: adds the products with 64 columns of S and dS; store_diagonals: the sum of S dS;
//     add_terms_of_blocks: dg's sums over other blocks; term_at: two channels of s.terms
//   SINCE_SM100: whether the kernel is translated for such cards, whose assembler needs more registers
//   blocks_with_room(n): the second launch bound: n blocks a multiprocessor, or fewer if its shared memory holds fewer
//   LEAST_SQUARE = 1e-6 is added to the square of a length

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, do_;
  StridedRows<const T> dresidual, residual;  // w, e. A row of e: padded(V) numbers, then rounding errors of 16-bit ones
  StridedRows<const G> g, beta;              // a token's beta is a row of one number
  const T *chunk_states, *state_gradients;   // S and dS: each a direction of backward_storage.cuh
  float* parts;                              // null if dq and dk are stored
  StridedRows<T> dq, dk;                     // null if parts are stored
  StridedRows<G> dg;
  StridedRows<float> dbeta;
  Shape shape;  // H: heads of values
  i64 group;    // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;  // 16, 8, 4 or 2: all rows of q, k, g, do and gradients start on multiples of it, and are multiples long
};

// A *row* reads the state (q, and k as it reads), a *column* writes to it (k as it writes).
// The three sums that dq and dk consist of: dq; dk of k as a row; dk of k as a column.
enum Term { Q_ROW, K_ROW, K_COLUMN };
// Each token's vectors of V numbers in s.values. Times s.weights DO is the gradient of what row q reads, W that of what
// row k reads, E what column k writes. E is rounded to T; E_ERROR, for 16-bit data only, is its rounding error.
enum Value { DO, W, E, E_ERROR };
static_assert(E_ERROR == E + 1 && E_ERROR < THREADS / 32, "a warp copies each, and errors follow what is rounded");
enum Token { TOKEN_Q, TOKEN_K };  // arrays of tokens: in s.tokens, s.lengths and args.parts

// BlockSums (channel_backward.cuh) has what products of two blocks need: pairs_across, block_decays, row_sums,
// column_sums, end_sums, state_product. Its arguments: 1, the number of kinds of columns (k alone); Operand<T, bf16>,
// the type of decayed tokens: `single` for float32 data, else bf16, of which NUMBERS = 2 make a number.
template <typename T, typename G> struct alignas(16) Shared : BlockSums<1, Operand<T, bf16>> {
  union {
    // Until step 3, in tiles, here and below: place<TILE>(tile, i, c) is channel c of token i.
    T tokens[2][BT * TILE];  // q, k
    // From step 3 on: tokens decayed to a border between blocks. [0]: rows q after the border, and
    // columns k before it; [1]: rows k after the border. A number is the sum of NUMBERS numbers.
    Operand<T, bf16> decayed[2][Shared::NUMBERS][BT * TILE];
  };
  G g[BT * TILE];
  union {
    struct {                     // of step 1
      T states[2][TILE * TILE];  // S, dS
      T values[E + Matrix<T>::NUMBERS][BT * TILE];
    };
    // By Term, from step 2 on: summands of dq and dk that come from S or dS, then also those from other blocks.
    // term_place(i, c) is the index of token i, channels c and c + 1.
    float terms[3][BT * TILE];
  };
  float2 pairs[BLOCKS][BLOCK][BLOCK];  // (a_ij, m_ij) of pairs within a block: [block][i][j], read for j <= i
  float lengths[2][BT];                // by Token: |q_i|, |k_i|; 1 if not normalized
  // By Term: scale / |q_i|, -beta_i / |k_i|, beta_i / |k_i|.
  float weights[3][BT];
};

// Starts copying 64 columns of V, from `column` on: of S and dS in the block's channels (fetch_states, all warps), and
// of s.values. Warp n copies values[n] (Value). Rows of w and e have V columns padded with zeros to a multiple of 64;
// those of do have V.
template <typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, G>& s, const Args<T, G>& args, const ChannelTile& tile,
                                              int column) {
  const int warp = threadIdx.x >> 5, V = int(args.shape.V);
  fetch_states(s, args.chunk_states, args.state_gradients, args.shape, tile, column);
  const StridedRows<const T>& rows = warp == DO ? args.do_ : warp == W ? args.dresidual : args.residual;
  if (warp < E + Matrix<T>::NUMBERS)
    fetch_rows(s.values[warp], rows.row(tile.b, tile.h, tile.span.start) + (warp == E_ERROR ? padded(V) : 0) + column,
               rows.token_stride, tile.rows, (warp == DO ? V : padded(V)) - column, warp == DO ? int(args.bytes) : 16);
  cp_async_commit();
}

// d += x e^T over 64 columns of V, x being do or w (kind DO or W), e the sum of E and E_ERROR: of the 16 tokens i of
// `half` with all 32 tokens j. d[n] has tokens j = 8n ... 8n + 7; blocks in which all j > i are left out. With g = lane
// / 4 and t = lane % 4 a lane has, in d[n][2 down + p], i = 16 half + 8 down + g and j = 8n + 2t + p.
template <typename T, typename G>
__device__ __forceinline__ void multiply_values(float (&d)[BLOCKS][4], const Shared<T, G>& s, int kind, int half) {
  const RowsReader<TILE, T> right;
  const LeftReader<TILE, T> left;
#pragma unroll
  for (int c = 0; c < TILE; c += 32) {  // columns of V
    Word<T> a[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) left.load(a[n], s.values[kind] + 16 * half * TILE, 0, c + 16 * n);
#pragma unroll
    for (int number = 0; number < Matrix<T>::NUMBERS; ++number)
#pragma unroll
      for (int j = 0; j < BLOCKS; ++j) {
        if (j / 2 > half) break;
        Word<T> b[4];
        right.load(b, s.values[E + number], 8 * j, c);
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_m16n8k16(d[j], a[n], {b[2 * n], b[2 * n + 1]}, T{});
      }
  }
}

// Sets s.weights and s.lengths. It reads all channels of q and k from global memory, since the block's tiles have 64 of
// them. Tokens past the end count as zeros. A warp has one token at a time.
template <typename T, typename G>
__device__ __forceinline__ void set_weights(Shared<T, G>& s, const Args<T, G>& args, const ChannelTile& tile,
                                            u32 head) {
  // For token i, q and k: the lengths, and 1 divided by these.
  const auto set = [&](int i, float2 lengths, float2 inverse_lengths) {
    const float beta = i < tile.rows ? to_float(*args.beta.row(tile.b, tile.h, tile.span.start + i)) : 0.f;
    s.weights[Q_ROW][i] = float(args.scale) * inverse_lengths.x;
    s.weights[K_ROW][i] = -beta * inverse_lengths.y, s.weights[K_COLUMN][i] = beta * inverse_lengths.y;
    s.lengths[TOKEN_Q][i] = lengths.x, s.lengths[TOKEN_K][i] = lengths.y;
  };
  if (!args.normalized) {
    if (threadIdx.x < BT) set(threadIdx.x, {1.f, 1.f}, {1.f, 1.f});
    return;
  }
  const int lane = own_lane(), channels = int(args.shape.K);
#pragma unroll 4
  for (int i = threadIdx.x >> 5; i < BT; i += THREADS / 32) {
    float2 squares = {};
    if (i < tile.rows)
      for (int c = lane; c < channels; c += 32) {
        const float query = to_float(args.q.row(tile.b, head, tile.span.start + i)[c]);
        const float key = to_float(args.k.row(tile.b, head, tile.span.start + i)[c]);
        squares = {fmaf(query, query, squares.x), fmaf(key, key, squares.y)};
      }
    squares = {warp_sum(squares.x) + float(LEAST_SQUARE), warp_sum(squares.y) + float(LEAST_SQUARE)};
    const float2 inverse = {inverse_root(squares.x), inverse_root(squares.y)};
    if (lane == 0) set(i, times(squares, inverse), inverse);
  }
}

// The 8 tokens of a thread's block in its channels c and c + 1: BlockTokens (channel_backward.cuh) has copied q, k and
// their decays to registers.
template <typename T> struct KdaTokens : BlockTokens<T, 2> {
  using Tokens = BlockTokens<T, 2>;
  using Tokens::Tokens, Tokens::tokens, Tokens::token;

  // Keeps the compiler from holding both the tokens and these as floats in registers.
  __device__ __forceinline__ void hide() {
    if constexpr (sizeof(T) == 2)
      for (int array = 0; array < 2; ++array)
        for (int n = 0; n < BLOCK; ++n) tokens[array][n] = opaque(tokens[array][n]);
  }

  // add_pairs_of_blocks calls these. They call f(Term, n, x) for token n of the block, x being row q or k decayed from
  // the block's start through the token, or column k decayed from after the token to the block's end, times `decay`.
  template <class F> __device__ __forceinline__ void each_row(float2 decay, F f) const {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      decay = times(decay, Tokens::decays[n]);
      f(Q_ROW, n, times(decay, token(TOKEN_Q, n)));
      f(K_ROW, n, times(decay, token(TOKEN_K, n)));
    }
  }
  template <class F> __device__ __forceinline__ void each_column(float2 decay, F f) const {
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      f(K_COLUMN, n, times(decay, token(TOKEN_K, n)));
      decay = times(decay, Tokens::decays[n]);
    }
  }
};

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, blocks_with_room<Shared<T, G>>(SINCE_SM100 ? 2 : 3))
    delta_kda_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const ChannelTile tile(shape);
  const u32 head = tile.h / u32(args.group);
  const int bytes = int(args.bytes);

  const int warp = threadIdx.x >> 5;
  fetch_columns(s, args, tile, 0);
  if (warp < 2) {
    const auto& x = warp ? args.k : args.q;
    fetch_rows(s.tokens[warp], x.row(tile.b, head, tile.span.start) + tile.first, x.token_stride, tile.rows,
               tile.channels, bytes);
  }
  copy_chunk<TILE, THREADS>(s.g, args.g.row(tile.b, tile.h, tile.span.start) + tile.first, args.g.token_stride,
                            tile.rows, tile.channels, bytes);
  cp_async_commit();
  set_weights(s, args, tile, head);

  // The warp computes products of pairs: with do (kind 0, for a) or with w (kind 1, for m), of 16 tokens i.
  const int kind = warp % 2, half = warp / 2;
  Accumulators terms[3] = {};  // by Term: S do, S w, dS e, in the warp's 16 channels
  // pairs: products of multiply_values; diagonals: the sum over V of S dS, as multiply_diagonals (channel_backward.cuh)
  // lays it out.
  float pairs[BLOCKS][4] = {}, diagonals[4] = {};
  each_columns(
      shape.V, [&](int column) { fetch_columns(s, args, tile, column); },
      [&] {
        multiply_values(pairs, s, kind, half);
        multiply_states<T>(terms, diagonals, s);
      });
  // The products with S and dS, without decays so far, by Term.
  store_terms(s, terms, [&](int n, int i) { return s.weights[n][i]; });
  // Stores the scaled pairs a_ij or m_ij of block `row` with block j of 8 tokens. store_pairs_of_blocks puts those of
  // two blocks in s.pairs_across and calls the lambda for those within a block; there w_i . e_i is dbeta_i.
#pragma unroll
  for (int j = 0; j < BLOCKS; ++j) {
    if (j / 2 > half) break;
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = 2 * half + down, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3, i = 8 * row + g;
      const float2 columns = pair_at(s.weights[K_COLUMN] + 8 * j + 2 * t);
      const float factor = s.weights[kind][i], x = pairs[j][2 * down], y = pairs[j][2 * down + 1];
      store_pairs_of_blocks(
          s, kind, row, j, factor * columns.x * x, factor * columns.y * y, [&](int row_in_block, int column_in_block) {
            const bool x_on_diagonal = row_in_block == column_in_block,
                       y_on_diagonal = row_in_block == column_in_block + 1;
            reinterpret_cast<float*>(&s.pairs[row][row_in_block][column_in_block])[kind] = factor * columns.x * x;
            reinterpret_cast<float*>(&s.pairs[row][row_in_block][column_in_block + 1])[kind] = factor * columns.y * y;
            if (kind && tile.first == 0 && (x_on_diagonal || y_on_diagonal) && i < tile.rows)
              *args.dbeta.row(tile.b, tile.h, tile.span.start + i) = x_on_diagonal ? x : y;
          });
    }
  }
  store_diagonals(s.state_product, diagonals);
  // From here on a warp has a block of 8 tokens, a thread its channels c and c + 1.
  const int block = warp, c = 2 * own_lane(), start = block * BLOCK;
  KdaTokens<T> tokens(s, block, c);
  put_pair(&s.block_decays[block][c], tokens.decay());
  __syncthreads();  // terms, pairs and decays of blocks are in shared memory; tokens have been read
  // Adds to s.terms the pairs of two blocks. Afterwards a row's terms lack only the decay from its block's start, a
  // column's that to its block's end. s.decayed has overwritten s.tokens; the registers of `tokens` have them still.
  add_pairs_of_blocks(s, tokens, block, c);
  const float2 one = {1.f, 1.f};
  const auto term = [&](int kind, int n) -> float2& { return term_at(s, kind, start + n, c); };
  float2 dg[BLOCK] = {};  // the terms of pairs within the block; then also of S with the block's rows
  // Row i: adds pairs within the block, and completes dq (in Q_ROW) and dk of k as a row (in K_ROW). dg[j + 1] gets row
  // i times the sums over columns up to j: all pairs of row i that gate j + 1 lies between.
  {
    float2 keys[BLOCK], row_terms[BLOCK], since_start = one;  // keys: decayed to token i
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const float2 q_i = tokens.token(TOKEN_Q, i), k_i = tokens.token(TOKEN_K, i), decay = tokens.decays[i];
      keys[i] = k_i;
      float2 dq = {}, dk = {};  // sums over the keys up to j
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        const float2 pair = s.pairs[block][i][j];
        if (j < i) keys[j] = times(decay, keys[j]);
        dq = plus_times(dq, pair.x, keys[j]);
        if (j == i) continue;
        dk = plus_times(dk, pair.y, keys[j]);
        dg[j + 1] = plus_times(plus_times(dg[j + 1], q_i, dq), k_i, dk);
      }
      since_start = times(since_start, decay);
      const float2 state_q = times(since_start, term(Q_ROW, i)), state_k = times(since_start, term(K_ROW, i));
      row_terms[i] = plus_times(times(q_i, state_q), k_i, state_k);
      term(Q_ROW, i) = plus(dq, state_q), term(K_ROW, i) = plus(dk, state_k);
    }
    float2 sum = {};
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) sum = plus(sum, row_terms[i]), dg[i] = plus(dg[i], sum);
  }
  // Column j: likewise dk of pairs with rows i >= j. dg gains nothing here: the rows' loop has added what pairs give.
  // Both parts of dk are then in K_COLUMN.
  tokens.hide();
  float2 column_terms[BLOCK];  // products of columns with their terms of later blocks and of dS
  {
    float2 q[BLOCK], k[BLOCK], to_end = one;  // q, k: decayed from token j
#pragma unroll
    for (int j = BLOCK - 1; j >= 0; --j) {
      const float2 k_j = tokens.token(TOKEN_K, j), decay = tokens.decays[j];
      q[j] = tokens.token(TOKEN_Q, j);
      float2 dk = {};  // sums over the rows from i on
#pragma unroll
      for (int i = BLOCK - 1; i >= j; --i) {
        const float2 pair = s.pairs[block][i][j];
        dk = plus_times(dk, pair.x, q[i]), q[i] = times(decay, q[i]);
        if (i > j) dk = plus_times(dk, pair.y, k[i]), k[i] = times(decay, k[i]);
      }
      k[j] = times(decay, k_j);
      const float2 state = times(to_end, term(K_COLUMN, j));
      to_end = times(to_end, decay);
      column_terms[j] = times(k_j, state);
      term(K_COLUMN, j) = plus(plus(dk, state), term(K_ROW, j));  // all of dk
    }
  }
  // Adds to dg what other blocks, the block's own columns and S dS give; dg is complete then.
  add_terms_of_blocks(dg, column_terms, s, block, c);
  const i64 token = tile.span.start + start;
  store_block(args.dg.row(tile.b, tile.h, token) + tile.first + c, args.dg.token_stride, tile.rows - start,
              tile.channels - c, bytes, [&](int n) { return dg[n]; });
#pragma unroll
  for (int kind = 0; kind < 2; ++kind) {  // a Token: dq, then dk
    const auto value = [&](int n) { return term(kind == TOKEN_Q ? Q_ROW : K_COLUMN, n); };
    if (args.parts) {
      float* to =
          args.parts + (((kind * shape.B + tile.b) * shape.H + tile.h) * shape.T + token) * shape.K + tile.first + c;
      store_block(to, shape.K, tile.rows - start, tile.channels - c, shape.K % 2 ? 4 : 8,
                  [&](int n) { return times({s.lengths[kind][start + n], s.lengths[kind][start + n]}, value(n)); });
    } else {
      const StridedRows<T>& to = kind == TOKEN_Q ? args.dq : args.dk;
      // `opaque`: computed again, since registers are few.
      const u32 head = u32(opaque(tile.h)) / u32(args.group);
      store_block(to.row(tile.b, head, token) + tile.first + c, to.token_stride, tile.rows - start, tile.channels - c,
                  bytes, value);
    }
  }
}
