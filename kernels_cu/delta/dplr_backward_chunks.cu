// what      RWKV-7's recurrence backward, a block for each chunk of 32 tokens and 64 channels: dq, dk, da, db and dg,
//           from what backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, dS the gradient of the state after it. u_t = S_{t-1}^T a_t is the
//           residual, du_t its gradient. A token's decay is e^g of its log gates g [K]. Decays over tokens: P_i from
//           the chunk's start through token i, E_i from after token i to the chunk's end, D_ij from after token j
//           through token i, D_(i-1)j the same without the gate of token i. Products of pairs: qk_ij = scale do_i . v_j
//           and qb_ij = scale do_i . u_j, j <= i; ak_ij = du_i . v_j and ab_ij = du_i . u_j, j < i
//           dq_i = scale P_i S do_i + sum_j D_ij (qk_ij k_j + qb_ij b_j)
//           da_i = P_{i-1} S du_i + sum_j D_(i-1)j (ak_ij k_j + ab_ij b_j)
//           dk_j = E_j dS v_j + sum_i (qk_ij D_ij q_i + ak_ij D_(i-1)j a_i)
//           db_j is dk_j with u in place of v, and qb and ab in place of qk and ak
//           dg_t adds up all terms that gate t multiplies: of S with rows q from token t on and rows a after it, of dS
//           with the columns (k and b) before token t, of pairs with t in between, and the chunk's decay times the sum
//           over V of S dS. No dg is a difference of two sums over tokens, whose rounding errors could exceed dg
// shapes    q a k b g dq da dk db dg [B, H, T, K], do v [B, H, T, V], du u: the same, columns padded with zeros to a
//           multiple of 64; S and dS: backward_storage.cuh
// grid      a block for every (batch, head, chunk, 64 channels), channels fastest; a warp for 16 channels
// smem      Shared: the chunk's q, a, k, b and gates; 64 columns of S, dS, do, du, v and u at a time
// barriers  two for every 64 columns of V: they have arrived | they have been read, and the tokens have arrived. Then:
//           terms of S and dS, and pairs, are stored; add_pairs_of_blocks has four more
// order     1 for every 64 columns of V: products with S and dS (multiply_states), products of pairs (multiply_values)
//           2 both are stored, as s.terms and, scaled, as pairs
//           3 add_pairs_of_blocks: pairs of two blocks. From here on a warp has a block of 8 tokens
//           4 the block's own pairs: by rows, which completes dq and da; by columns, which completes dk and db
//           5 add_terms_of_blocks completes dg
// numerics  products with S and dS, and of values, are of T, summed in float32. Pairs within a block of 8 tokens are
//           added up in float32. Pairs of two blocks are products of tensor cores; for 16-bit data their operands are
//           sums of two bfloat16 numbers (channel_backward.cuh). A decay is a product of the decays of the tokens in
//           between, so that any gate is exact
// source    Peng et al., 2025 (2503.14456), eq. 17
// limits    T of bfloat16, float16, single (float32: operands.cuh)
// tests     test_delta_kernels; test_compile (no spills)
#include "cards.cuh"
#include "delta/channel_backward.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   BT = 32 tokens in BLOCKS = 4 blocks of BLOCK = 8; TILE = 64 channels or columns; THREADS = 128
//   store_block: a thread stores 8 tokens' two channels
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p
//   LeftReader, RowsReader: operands of tensor cores from a tile
//   multiply_states: adds the products with 64 columns of S and dS; store_diagonals: the sum of S dS;
//     add_terms_of_blocks: dg's sums over other blocks; term_at: two channels of s.terms
//   SINCE_SM100: whether the kernel is translated for such cards, whose assembler needs more registers
//   blocks_with_room(n): the second launch bound: n blocks a multiprocessor, or fewer if its shared memory holds fewer

template <typename T, typename G> struct Args {
  // residual: u; dresidual: du. Warp n copies argument n, by Token, and argument 4 + n, by Value.
  StridedRows<const T> q, a, k, b, do_, dresidual, v, residual;
  StridedRows<const G> g;
  const T *chunk_states, *state_gradients;  // S and dS: each a direction of backward_storage.cuh
  StridedRows<T> dq, dk, da, db;
  StridedRows<G> dg;
  Shape shape;
  double scale;
  i64 bytes;  // 16, 8, 4 or 2: all rows of inputs and do start on multiples of it, and are multiples long
};

// The orders of arguments, of s.tokens, s.values and s.terms: Token n belongs to Value n. Rows (q, a) read the state:
// scale do and du are the gradients of what they read. Columns (k, b) write v and u to it.
enum Token { Q_ROW, A_ROW, K_COLUMN, B_COLUMN };
enum Value { DO, DU, V_, U };

// BlockSums (channel_backward.cuh) has what products of two blocks need: pairs_across, block_decays, row_sums,
// column_sums, end_sums, state_product. 2: the kinds of columns; Operand<T, bf16>: the type of decayed tokens, `single`
// for float32 data, else bf16, of which NUMBERS = 2 make a number.
template <typename T, typename G> struct alignas(16) Shared : BlockSums<2, Operand<T, bf16>> {
  union {
    // Until step 3, in tiles, here and below: place<TILE>(tile, i, c) is channel c of token i.
    T tokens[4][BT * TILE];  // q, a, k, b
    // From step 3 on: tokens decayed to a border between blocks. [0]: rows q after the border, and
    // columns k before it; [1]: rows a, and columns b. A number is the sum of NUMBERS numbers.
    Operand<T, bf16> decayed[2][Shared::NUMBERS][BT * TILE];
  };
  G g[BT * TILE];
  union {
    struct {                     // of step 1
      T states[2][TILE * TILE];  // S, dS
      T values[4][BT * TILE];
    };
    // By Token, from step 2 on: summands of dq, da, dk and db that come from S or dS, then also those from other
    // blocks. term_place(i, c) is the index of token i, channels c and c + 1.
    float terms[4][BT * TILE];
  };
  float4 pairs[BLOCKS][BLOCK][BLOCK];  // (qk, qb, ak, ab)_ij of pairs within a block: [block][i][j], read for j <= i
};

// Starts copying 64 columns of V, from `column` on: of S and dS in the block's channels (fetch_states, all warps), and
// of s.values. Warp n copies values[n] (Value).
template <typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, G>& s, const Args<T, G>& args, const ChannelTile& tile,
                                              int column) {
  const int warp = threadIdx.x >> 5, V = int(args.shape.V);
  fetch_states(s, args.chunk_states, args.state_gradients, args.shape, tile, column);
  const StridedRows<const T>& rows = (&args.do_)[warp];
  static_assert(DU % 2 && U % 2 && DO % 2 == 0 && V_ % 2 == 0);
  const bool is_padded = warp % 2;  // rows of du and u have V columns padded with zeros to a multiple of 64
  fetch_rows(s.values[warp], rows.row(tile.b, tile.h, tile.span.start) + column, rows.token_stride, tile.rows,
             (is_padded ? padded(V) : V) - column, is_padded ? 16 : int(args.bytes));
  cp_async_commit();
}

// d += x y^T over 64 columns of V, for tokens i (of x) and j (of y) of the chunk, in blocks of 16 i by 8 j that have
// pairs with j <= i: d[0] and d[1] are i < 16 with j of block 0 and 1, d[2] to d[5] i >= 16 with j of blocks 0 to 3.
// With g = lane / 4 and t = lane % 4 a lane has, in a block's [2 down + p], row 8 down + g and column 2t + p.
template <typename T> __device__ __forceinline__ void multiply_values(float (&d)[6][4], const T* x, const T* y) {
  const RowsReader<TILE, T> right;
  const LeftReader<TILE, T> left;
#pragma unroll
  for (int c = 0; c < TILE; c += 32) {  // columns of V
    Word<T> a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int n = 0; n < 2; ++n) left.load(a[m][n], x, 16 * m, c + 16 * n);
#pragma unroll
    for (int j = 0; j < BLOCKS; ++j) {
      Word<T> b[4];
      right.load(b, y, 8 * j, c);
#pragma unroll
      for (int m = j / 2; m < 2; ++m)
#pragma unroll
        for (int n = 0; n < 2; ++n) mma_m16n8k16(d[2 * m + j], a[m][n], {b[2 * n], b[2 * n + 1]}, T{});
    }
  }
}

// Stores the products d (multiply_values) times `factor`; warp 0 has qk, 1 qb, 2 ak, 3 ab: the orders of `pairs` and
// of pairs_across. store_pairs_of_blocks puts those of two blocks in s.pairs_across, and calls the lambda for those
// within a block: (i, j) and (i, j + 1) of its tokens.
template <typename T, typename G>
__device__ __forceinline__ void store_pairs(Shared<T, G>& s, const float (&d)[6][4], float factor) {
  // `opaque` hides where the number comes from: addresses are computed here, and take no registers before.
  const int kind = opaque(threadIdx.x >> 5);
#pragma unroll
  for (int n = 0; n < 6; ++n)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int row = (n < 2 ? 0 : 2) + down, column = n < 2 ? n : n - 2;  // blocks of 8 tokens
      const float x = factor * d[n][2 * down], y = factor * d[n][2 * down + 1];
      store_pairs_of_blocks(s, kind, row, column, x, y, [&](int i, int j) {
        reinterpret_cast<float*>(&s.pairs[row][i][j])[kind] = x;
        reinterpret_cast<float*>(&s.pairs[row][i][j + 1])[kind] = y;
      });
    }
}

// The 8 tokens of a thread's block in its channels c and c + 1: BlockTokens (channel_backward.cuh) has copied q, a, k,
// b and their decays to registers.
template <typename T> struct RowsAndColumns : BlockTokens<T, 4> {
  using Tokens = BlockTokens<T, 4>;
  using Tokens::token, Tokens::Tokens;

  // add_pairs_of_blocks calls these. They call f(Token, n, x) for token n of the block, x being a row decayed from the
  // block's start (q through token n, a through the token before it), or a column decayed from after token n to the
  // block's end, times `decay`.
  template <class F> __device__ __forceinline__ void each_row(float2 decay, F f) const {
#pragma unroll
    for (int n = 0; n < BLOCK; ++n) {
      f(A_ROW, n, times(decay, token(A_ROW, n)));
      decay = times(decay, Tokens::decays[n]);
      f(Q_ROW, n, times(decay, token(Q_ROW, n)));
    }
  }
  template <class F> __device__ __forceinline__ void each_column(float2 decay, F f) const {
#pragma unroll
    for (int n = BLOCK - 1; n >= 0; --n) {
      f(K_COLUMN, n, times(decay, token(K_COLUMN, n)));
      f(B_COLUMN, n, times(decay, token(B_COLUMN, n)));
      decay = times(decay, Tokens::decays[n]);
    }
  }
};

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS, blocks_with_room<Shared<T, G>>(SINCE_SM100 ? 2 : 3))
    delta_dplr_backward_chunks(const Args<T, G> args) {
  auto& s = *reinterpret_cast<Shared<T, G>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const ChannelTile tile(shape);
  const int bytes = int(args.bytes);
  const float scale = float(args.scale);

  const int warp = threadIdx.x >> 5;
  using Arguments = Args<T, G>;
  constexpr int ROWS = sizeof args.q;
  static_assert(OFFSET_OF(Arguments, q) == Q_ROW * ROWS && OFFSET_OF(Arguments, a) == A_ROW * ROWS &&
                OFFSET_OF(Arguments, k) == K_COLUMN * ROWS && OFFSET_OF(Arguments, b) == B_COLUMN * ROWS);
  static_assert(OFFSET_OF(Arguments, do_) == (4 + DO) * ROWS && OFFSET_OF(Arguments, dresidual) == (4 + DU) * ROWS &&
                OFFSET_OF(Arguments, v) == (4 + V_) * ROWS && OFFSET_OF(Arguments, residual) == (4 + U) * ROWS);
  fetch_columns(s, args, tile, 0);
  const auto& x = (&args.q)[warp];
  fetch_rows(s.tokens[warp], x.row(tile.b, tile.h, tile.span.start) + tile.first, x.token_stride, tile.rows,
             tile.channels, bytes);
  copy_chunk<TILE, THREADS>(s.g, args.g.row(tile.b, tile.h, tile.span.start) + tile.first, args.g.token_stride,
                            tile.rows, tile.channels, bytes);
  cp_async_commit();

  Accumulators terms[4] = {};  // by Token: S do, S du, dS v, dS u, in the warp's 16 channels
  // pairs: the warp's products of values (multiply_values); diagonals: a lane's terms of the sum over V of S dS, which
  // store_diagonals stores.
  float pairs[6][4] = {}, diagonals[4] = {};
  each_columns(
      shape.V, [&](int column) { fetch_columns(s, args, tile, column); },
      [&] {
        static_assert(DU == DO + 1 && U == V_ + 1);
        multiply_values(pairs, s.values[DO + warp / 2], s.values[V_ + warp % 2]);
        multiply_states<T>(terms, diagonals, s);
      });
  // The products with S and dS, without decays so far, by Token, or its Value.
  store_terms(s, terms, [&](int n, int) { return n == DO ? scale : 1.f; });
  store_pairs(s, pairs, warp < 2 ? scale : 1.f);
  store_diagonals(s.state_product, diagonals);
  // From here on a warp has a block of 8 tokens, a thread its channels c and c + 1.
  const int block = warp, c = 2 * own_lane(), start = block * BLOCK;
  const RowsAndColumns<T> tokens(s, block, c);
  put_pair(&s.block_decays[block][c], tokens.decay());
  __syncthreads();  // terms, pairs and decays of blocks are in shared memory; tokens have been read
  // Adds to s.terms the pairs of two blocks. Afterwards a row's terms lack only the decay from its block's start, a
  // column's that to its block's end. s.decayed has overwritten s.tokens; the registers of `tokens` have them still.
  add_pairs_of_blocks(s, tokens, block, c);
  const float2 one = {1.f, 1.f};
  const auto term = [&](int kind, int n) -> float2& { return term_at(s, kind, start + n, c); };
  float2 dg[BLOCK] = {};  // the terms of pairs within the block; then also of S with the block's rows
  // Row i: adds pairs within the block, and completes dq and da. dg[j + 1] gets row i times the sums over columns up to
  // j: all pairs of row i that gate j + 1 lies between. pair.x, y, z, w: qk, qb, ak, ab.
  {
    float2 k[BLOCK], b_vectors[BLOCK], row_terms[BLOCK] = {}, since_start = one;  // k, b_vectors: decayed to token i
#pragma unroll
    for (int i = 0; i < BLOCK; ++i) {
      const float2 q_i = tokens.token(Q_ROW, i), a_i = tokens.token(A_ROW, i), decay = tokens.decays[i];
      k[i] = tokens.token(K_COLUMN, i), b_vectors[i] = tokens.token(B_COLUMN, i);
      float2 dq = {}, da = {};  // sums over the columns up to j
#pragma unroll
      for (int j = 0; j <= i; ++j) {
        const float4 pair = s.pairs[block][i][j];
        if (j < i) {
          da = plus_times(plus_times(da, pair.w, b_vectors[j]), pair.z, k[j]);
          if (j < i - 1) dg[j + 1] = plus_times(dg[j + 1], a_i, da);
          k[j] = times(decay, k[j]), b_vectors[j] = times(decay, b_vectors[j]);
        }
        dq = plus_times(plus_times(dq, pair.y, b_vectors[j]), pair.x, k[j]);
        if (j < i) dg[j + 1] = plus_times(dg[j + 1], q_i, dq);
      }
      const float2 state_a = times(since_start, term(A_ROW, i));
      since_start = times(since_start, decay);
      const float2 state_q = times(since_start, term(Q_ROW, i));
      row_terms[i] = times(q_i, state_q);
      if (i) row_terms[i - 1] = plus_times(row_terms[i - 1], a_i, state_a);  // `a` reads the state before its own gate
      term(Q_ROW, i) = plus(dq, state_q), term(A_ROW, i) = plus(da, state_a);
    }
    float2 sum = {};
#pragma unroll
    for (int i = BLOCK - 1; i >= 0; --i) sum = plus(sum, row_terms[i]), dg[i] = plus(dg[i], sum);
  }
  // Column j: adds pairs within the block with rows i >= j, and completes dk and db.
  float2 column_terms[BLOCK];  // products of columns with their terms of later blocks and of dS
  {
    float2 q[BLOCK], a[BLOCK], to_end = one;  // q, a: decayed from token j
#pragma unroll
    for (int j = BLOCK - 1; j >= 0; --j) {
      const float2 k_j = tokens.token(K_COLUMN, j), b_j = tokens.token(B_COLUMN, j), decay = tokens.decays[j];
      q[j] = tokens.token(Q_ROW, j);
      float2 dk = {}, db = {};  // sums over the rows from i on
#pragma unroll
      for (int i = BLOCK - 1; i >= j; --i) {
        const float4 pair = s.pairs[block][i][j];
        dk = plus_times(dk, pair.x, q[i]), db = plus_times(db, pair.y, q[i]);
        q[i] = times(decay, q[i]);
        if (i == j) continue;
        dk = plus_times(dk, pair.z, a[i]), db = plus_times(db, pair.w, a[i]);
        a[i] = times(decay, a[i]);
      }
      a[j] = tokens.token(A_ROW, j);
      const float2 state_k = times(to_end, term(K_COLUMN, j)), state_b = times(to_end, term(B_COLUMN, j));
      to_end = times(to_end, decay);
      column_terms[j] = plus_times(times(k_j, state_k), b_j, state_b);
      term(K_COLUMN, j) = plus(dk, state_k), term(B_COLUMN, j) = plus(db, state_b);
    }
  }
  // Adds to dg what other blocks, the block's own columns and S dS give; dg is complete then.
  add_terms_of_blocks(dg, column_terms, s, block, c);
  const auto store = [&](const auto& to, auto value) {
    store_block(to.row(tile.b, tile.h, tile.span.start + start) + tile.first + c, to.token_stride, tile.rows - start,
                tile.channels - c, bytes, value);
  };
  store(args.dg, [&](int n) { return dg[n]; });
  store(args.dq, [&](int n) { return term(Q_ROW, n); });
  store(args.da, [&](int n) { return term(A_ROW, n); });
  store(args.dk, [&](int n) { return term(K_COLUMN, n); });
  store(args.db, [&](int n) { return term(B_COLUMN, n); });
}
