// what      The delta rule backward, a block for each chunk of 32 tokens: dq, dk, dbeta and dg, from what
//           backward_states.cu has computed from chunk to chunk.
// math      S is the state [K, V] before the chunk, dS the gradient of the state after it; i and j are the chunk's
//           tokens. e_t is the residual: e_t = v_t - (a_t S_(t-1))^T k_t, with a_t = e^(g_t). w_t is the gradient
//           of beta_t e_t, the value that token t writes.
//           Decays: D_ij from after token j through token i, D_i from the chunk's start through i, E_i from after i to
//           the chunk's end.
//           M_ij = D_ij k_i . k_j, j < i; A_ij = D_ij q_i . k_j, j <= i; dbeta_i = w_i . e_i
//           dA_ij = scale beta_j do_i . e_j, j <= i;   dM_ij = -beta_i beta_j w_i . e_j, j < i
//           dq_i = scale D_i S do_i + sum_j dA_ij D_ij k_j
//           dk_i = E_i beta_i dS e_i - beta_i D_i S w_i + sum_j (dM_ij D_ij + dM_ji D_ji) k_j + sum_j dA_ji D_ji q_j,
//           where dA_ij and dM_ij are 0 for other i, j than above: of dM_ij and dM_ji at most one is not
//           dg_t adds up all terms that gate t multiplies: of rows i >= t, q_i . dq_i + k_i . dk_i of their terms with
//           S alone; of keys j < t, k_j . dk_j of its term with dS; of pairs j < t <= i, A dA + M dM; and <S, dS>, the
//           sum of all S dS, times the chunk's decay. No dg is a difference of two sums over tokens, whose rounding
//           errors could exceed dg
// shapes    q k dq dk [B, H, T, K], do [B, HV, T, V], e w: a row for each of [B, HV, T] (backward_states.cu), g beta
//           dbeta dg [B, HV, T], the last two float32; S and dS: backward_storage.cuh. If heads of values share a head
//           of queries, `parts` [2, B, HV, T, K] float32 takes the place of dq and dk: the gradients of a head of
//           values with respect to the q and k that products take (q / |q| and k / |k| if normalized), which
//           sum_parts.cu adds up
// grid      a block for every (batch, head of values, chunk); a warp for every 16 channels
// smem      Shared: the chunk's q and k; 64 columns of S, dS, do, e and w at a time
// barriers  in this order (names: struct Shared). q, k and decays are in shared memory. Two for every 64 columns: the
//           columns have arrived (the first time also: inverse lengths are in shared memory) | they have been read.
//           Then: gate_terms, dq_from_k, dk_from_k, dk_from_q and `pairs` are in shared memory | pair_terms are. Three
//           more if args.normalized, without args.parts: gate_terms have been read | dot products of a warp's channels
//           are in shared memory | `parallel` is
// numerics  products of T (operands.cuh) are summed in float32. With 16-bit T, e (in dA and dM) and the matrices of
//           tokens that multiply q and k are each kept as the sum of two T; dS e takes e rounded to T, as dS is. No
//           division by a decay or by beta
// source    Yang et al., 2024 (2412.06464), section 3.3, has A and M; dA and dM are their gradients, which dk takes
//           transposed, too
// limits    T of bfloat16, float16, single (float32: operands.cuh); K <= BK; BK of 64, 128, 256; `parts` if args.group
//           > 1, else dq and dk; tokens and columns past the end are zeros in shared memory
// tests     test_delta_kernels; test_compile (no spills but those that it names)
#include "cards.cuh"
#include "delta/backward_storage.cuh"
#include "delta/chunk.cuh"

// From the includes:
//   shape.H: heads of values; shape.NC: chunks of a batch row
//   BT = 32 tokens, TILE = 64; LD: the distance of rows of a float matrix [BT, BT], so that rows are in different banks
//   own_lane(): the lane, computed again at each use, which saves a register
//   place<COLS>(tile, i, c): the address of number c of row i of a tile; LeftReader and StateReader load operands of
//     tensor cores
//   Word<T>: two neighbouring numbers, which unpack_pair and put_pair load and store as floats
//   Accumulators x: a warp's sums [32 tokens, 16 columns]; with g = lane / 4 and t = lane % 4, x[m][across][2 down + p]
//     is token 16 m + 8 down + g, column 8 across + 2t + p. each_pair(f): calls f(i, c, m, across, down) for the lane's
//     pairs: columns c and c + 1 of token i, c counted from channel 0 on, not from the warp's first. sum_over_lanes<4>:
//     over lanes of one g
//   padded(V): V rounded up to 64
//   Matrix: [32, 32] numbers, with 16-bit T each the sum of two; at(i, j): its place. put_split: stores it there.
//     multiply_tokens: adds the product of a Matrix with a tile. TokenFactors: decays, betas, inverse lengths of the
//     chunk's tokens (the latter by set_inverse_lengths)
//   TokenNumbers: the decay and beta of a lane's token
//   state_index: where chunk_states has a chunk's state
//   blocks_with_room(n): the second launch bound: n blocks a multiprocessor, or fewer if its shared memory holds fewer

// T: the type of arrays; G: that of g and beta.
template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, do_;
  StridedRows<const T> residual, dresidual;  // e, w. A row of e: padded(V) numbers, then rounding errors of 16-bit ones
  StridedRows<const G> g, beta;              // of each token a row of one number
  const T *chunk_states, *state_gradients;   // S and dS: backward_storage.cuh
  StridedRows<T> dq, dk;
  float* parts;                  // null if a head of queries has one head of values
  StridedRows<float> dbeta, dg;  // of each token a row of one number; dg.p is null without gates
  Shape shape;                   // H: heads of values
  i64 group;                     // heads of values that share a head of queries and keys
  double scale;
  i64 normalized;  // whether queries and keys are divided by their lengths
  i64 bytes;       // 16, 8, 4 or 2: all rows of q, k, do, dq and dk start on multiples of it, and are multiples long
};

constexpr int COLUMNS = TILE;  // columns of V that are in shared memory at a time: 64

template <typename T, int BK> struct alignas(16) Shared {
  static constexpr int WARPS = BK / 16;
  static constexpr int ERRORS = sizeof(T) == 2 ? BT * COLUMNS : 16 / sizeof(T);  // float has none: a placeholder
  T q[BT * BK], k[BT * BK];  // tiles: place<BK>(q, i, c) is the address of channel c of token i
  // Of this union and of the next, the loop over columns uses the first member, what follows the loop the second. The
  // barrier at the loop's end ("the columns have been read") is between them.
  union {
    T states[2][COLUMNS * BK];  // S, dS: [BK / 64, COLUMNS / 8, 8] matrices, each of 8 columns by 8 channels
    struct {
      // [BT, BT]: dq += dq_from_k k, dk += dk_from_k k + dk_from_q q.
      Matrix<T> dq_from_k, dk_from_k, dk_from_q;
      float pair_terms[WARPS][BT];  // the sums of dg over pairs of a warp's rows
    };
  };
  union {
    struct {
      T do_[BT * COLUMNS], e[BT * COLUMNS], e_error[ERRORS], w[BT * COLUMNS];  // tiles of COLUMNS
    };
    float pairs[BT][LD];  // A_ij dA_ij + M_ij dM_ij, read for j < i
  };
  TokenFactors factors;               // inverse_length: of k_i at i, of q_i at BT + i, as in dots and parallel
  union {                             // between these two: the barrier "gate_terms have been read"
    float gate_terms[WARPS][2 * BT];  // over a warp's channels: row i's terms with S, at i; key j's with dS, at BT + j
    float dots[WARPS][2 * BT];        // over a warp's channels: k . dk, then q . dq
  };
  float state_dots[2];     // <S, dS>, of the first and of the second half of every 64 columns
  float parallel[2 * BT];  // k . dk / |k|^2, then q . dq / |q|^2
};

// Starts loading into L2 the 64 columns from `column` on that fetch_columns will copy. A thread loads 64 numbers of S
// or dS, and 64 of a row: 32 threads each have do (kind 0), e (1), the rounding errors of e (2) and w (3); other kinds
// have no row.
template <int BK, typename T, typename G>
__device__ __forceinline__ void prefetch_columns(const Args<T, G>& args, i64 b, i64 h, const Span& span, i64 chunk,
                                                 int column) {
  static_assert(2 * BK >= 4 * BT, "a thread for every row of do, e, its errors and w");
  constexpr int TILES = BK / TILE;
  const int tile = threadIdx.x / TILE, kind = threadIdx.x / BT;
  const i64 token = span.start + threadIdx.x % BT;
  const T* states = tile < TILES ? args.chunk_states : args.state_gradients;
  const i64 state = state_index(args.shape, b, h, chunk, tile % TILES * TILE);
  const auto prefetch = [](const T* numbers) {
#pragma unroll
    for (int n = 0; n < TILE; n += 128 / sizeof(T)) prefetch_line(numbers + n);
  };
  if (tile % TILES * TILE < args.shape.K) prefetch(states + state + i64(column + threadIdx.x % TILE) * TILE);
  if (kind < 4 && (sizeof(T) == 2 || kind != 2) && token < span.stop) {
    const StridedRows<const T>& rows = kind == 0 ? args.do_ : kind == 3 ? args.dresidual : args.residual;
    prefetch(rows.row(b, h, token) + column + (kind == 2 ? padded(args.shape.V) : 0));
  }
}

// Starts copying 64 columns from `column` on of S, dS, do, e and w. Tiles of S and dS whose channels are all past the
// end become 0: backward_states.cu has not written them. It has written zeros to the columns of S, dS, e and w from V
// up to padded(V).
template <int BK, typename T, typename G>
__device__ __forceinline__ void fetch_columns(Shared<T, BK>& s, const Args<T, G>& args, i64 b, i64 h, const Span& span,
                                              i64 chunk, int column) {
  constexpr int THREADS = 2 * BK, PIECE = 16 / sizeof(T);
  const int rows = int(span.stop - span.start), padded_columns = padded(args.shape.V) - column;
#pragma unroll
  for (int backwards = 0; backwards < 2; ++backwards)
#pragma unroll
    for (int tile = 0; tile < BK / TILE; ++tile) {
      const T* from = (backwards ? args.state_gradients : args.chunk_states) +
                      state_index(args.shape, b, h, chunk, tile * TILE) + i64(column) * TILE;
      for (int i = threadIdx.x * PIECE; i < COLUMNS * TILE; i += THREADS * PIECE)
        cp_async<16>(s.states[backwards] + tile * COLUMNS * TILE + i, from + i, tile * TILE < args.shape.K);
    }
  copy_chunk<COLUMNS, THREADS>(s.do_, args.do_.row(b, h, span.start) + column, args.do_.token_stride, rows,
                               int(args.shape.V) - column, int(args.bytes));
  copy_chunk<COLUMNS, THREADS>(s.e, args.residual.row(b, h, span.start) + column, args.residual.token_stride, rows,
                               padded_columns, 16);
  if constexpr (sizeof(T) == 2)
    copy_chunk<COLUMNS, THREADS>(s.e_error, args.residual.row(b, h, span.start) + padded(args.shape.V) + column,
                                 args.residual.token_stride, rows, padded_columns, 16);
  copy_chunk<COLUMNS, THREADS>(s.w, args.dresidual.row(b, h, span.start) + column, args.dresidual.token_stride, rows,
                               padded_columns, 16);
  cp_async_commit();
}

// Adds the products of 64 columns [32 tokens, 16 channels of the warp]: do S^T, w S^T and e dS^T. A tile of a state is
// [COLUMNS / 8][8] matrices of 8 columns by 8 channels: matrix 8 (column / 8) + channel / 8, 64 numbers each. One load
// gives 16 columns by 16 channels, four matrices. States::first(m): the offset in the tile at which this lane loads, if
// the upper left one of the four is matrix m. So `2 * c * TILE * 8` is 16 columns further. mma_m16n8k16: d[16, 8] +=
// a[16, 16] b[16, 8].
template <int BK, typename T>
__device__ __forceinline__ void multiply_states(Accumulators& S_do, Accumulators& S_w, Accumulators& dS_e,
                                                const Shared<T, BK>& s) {
  using States = StateReader<TRANSPOSED, T>;  // transposed: a right operand is [column, channel]
  const int lane = own_lane(), warp = threadIdx.x >> 5;
  const LeftReader<COLUMNS, T> reader(lane);
  const int first = warp / 4 * COLUMNS * TILE + States::first(2 * (warp % 4), lane);
#pragma unroll
  for (int c = 0; c < COLUMNS / 16; ++c) {  // 16 columns of V
    Word<T> state[4];
    const auto add = [&](Accumulators& sums, const T* rows) {
#pragma unroll
      for (int m = 0; m < BT / 16; ++m) {
        Word<T> a[4];
        reader.load(a, rows, 16 * m, 16 * c);
        // The channels of [0] and [1] are the first 8. Not so in AS_STORED order (add_state_dots).
        mma_m16n8k16(sums[m][0], a, {state[0], state[1]}, T{});
        mma_m16n8k16(sums[m][1], a, {state[2], state[3]}, T{});
      }
    };
    States::load(state, s.states[0] + first + 2 * c * TILE * 8);
    add(S_do, s.do_), add(S_w, s.w);
    States::load(state, s.states[1] + first + 2 * c * TILE * 8);
    add(dS_e, s.e);
  }
}

// Adds <S, dS> over 32 of the 64 columns, from `column` on. It is the sum of the diagonals of two matrices [8 columns
// of S, 8 columns of dS], of which a lane has row g = lane / 4, columns 2 (lane % 4) + p: in dot[p] of the first, in
// dot[2 + p] of the second matrix. Other numbers are not used.
// A load has 16 columns of 16 channels. a[0] and a[2] are columns 0 to 7 with the first and the last 8 channels, a[1]
// and a[3] columns 8 to 15; b likewise. The first product has columns 0 to 7 as the left operand's rows 0 to 7, the
// second columns 8 to 15 as its rows 8 to 15; the operand's other rows are 0, so that neither adds to the other's
// matrix. Step n: the n / 8-th tile of 64 channels, in it channels 16 (n % 4) on, and the first or second 16 of the 32
// columns by n / 4 % 2.
template <int BK, typename T>
__device__ __forceinline__ void add_state_dots(float (&dot)[4], const T* S, const T* dS, int column) {
  using States = StateReader<AS_STORED, T>;  // as stored: rows are columns of V
  const int first = States::first(column / 8 * (TILE / 8), own_lane());
#pragma unroll 4
  for (int n = 0; n < BK / 8; ++n) {
    const int offset = first + n / 8 * COLUMNS * TILE + n / 4 % 2 * 2 * TILE * 8 + n % 4 * 128;
    Word<T> a[4], b[4];
    States::load(a, S + offset);
    States::load(b, dS + offset);
    mma_m16n8k16(dot, {a[0], Word<T>{}, a[2], Word<T>{}}, {b[0], b[2]}, T{});
    mma_m16n8k16(dot, {Word<T>{}, a[1], Word<T>{}, a[3]}, {b[1], b[3]}, T{});
  }
}

// A task of a warp beside the products of rows with states. Tasks 0 to 5: dA and dM of the 16 tokens i from `row` on
// and the 8 keys j from `key` on. No task has a block without a pair j <= i; dk_from_k, which is read whole, gets such
// blocks from their mirror images. Tasks 6 and 7: <S, dS> over the 32 of 64 columns from `column` on.
struct Task {
  static constexpr int COUNT = 8;
  bool has_pairs;
  int row, key, column;
  __device__ __forceinline__ constexpr explicit Task(int task)
      : has_pairs(task < 6), row(task < 2 ? 0 : 16), key(8 * (task < 2 ? task : task - 2)), column(32 * (task - 6)) {}

  // How many tasks have the pair of tokens (i, j).
  __device__ static constexpr int having(int i, int j) {
    int tasks = 0;
    for (int n = 0; n < COUNT; ++n)
      tasks += Task(n).has_pairs && Task(n).row == i / 16 * 16 && Task(n).key == j / 8 * 8;
    return tasks;
  }
  // Whether each pair j <= i is in one task.
  __device__ static constexpr bool have_all_pairs() {
    for (int i = 0; i < BT; ++i)
      for (int j = 0; j <= i; ++j)
        if (having(i, j) != 1) return false;
    return true;
  }
};

// This thread's place in its warp's products: of 8 x 8 numbers it has row g, columns 2t and 2t + 1. channel: the warp's
// first of 16.
struct Place {
  int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, channel = 16 * warp;
};

// Makes the warp's products S do and S w terms of dq and dk, and adds that of dS e to dk. Stores gate_terms: products
// of these terms with q and k, summed over the warp's channels.
template <int BK, typename T>
__device__ __forceinline__ void scale_state_products(Accumulators& dq, Accumulators& dk, const Accumulators& dS_e,
                                                     Shared<T, BK>& s, const Place& at, float scale) {
  const TokenFactors& factors = s.factors;
  const auto [warp, lane, g, t, channel] = at;
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = 16 * m + g + 8 * down;
      const float q_factor = scale * factors.decay_from_start[i],
                  k_factor = -factors.decay_from_start[i] * factors.beta[i],
                  end_factor = factors.decay_to_end[i] * factors.beta[i];
      float S_term = 0.f, dS_term = 0.f;
#pragma unroll
      for (int across = 0; across < 2; ++across) {
        const float2 q = unpack_pair(place<BK>(s.q, i, channel + 8 * across + 2 * t));
        const float2 k = unpack_pair(place<BK>(s.k, i, channel + 8 * across + 2 * t));
        float *dq_pair = dq[m][across] + 2 * down, *dk_pair = dk[m][across] + 2 * down;
        const float* dS_e_pair = dS_e[m][across] + 2 * down;
        const float k_inverse = factors.inverse_length[i], q_inverse = factors.inverse_length[BT + i];
#pragma unroll
        for (int x = 0; x < 2; ++x) {
          const float dk_end = end_factor * dS_e_pair[x], k_x = x ? k.y : k.x, q_x = x ? q.y : q.x;
          dq_pair[x] *= q_factor, dk_pair[x] *= k_factor;
          S_term = fmaf(q_inverse * q_x, dq_pair[x], fmaf(k_inverse * k_x, dk_pair[x], S_term));
          dS_term = fmaf(k_inverse * k_x, dk_end, dS_term);
          dk_pair[x] += dk_end;
        }
      }
      S_term = sum_over_lanes<4>(S_term), dS_term = sum_over_lanes<4>(dS_term);
      if (t == 0) s.gate_terms[warp][i] = S_term, s.gate_terms[warp][BT + i] = dS_term;
    }
}

// Stores what the pairs of a task give, of which do . e and w . e are known: the three matrices, A dA + M dM, dbeta.
// Called for every block of pairs that has one with j <= i.
template <int BK, typename T, typename G>
__device__ __forceinline__ void store_pairs(Shared<T, BK>& s, const Args<T, G>& args, const Place& at, const Task& task,
                                            const float (&products)[2][4], float scale, i64 b, i64 h,
                                            const Span& span) {
  const TokenFactors& factors = s.factors;
  const int g = at.g, t = at.t, rows = int(span.stop - span.start);
  // q . k and k . k, each in two sums, as multiply_rows leaves them. Number x of a product is of tokens i and j
  // below.
  float q_k[2][4] = {}, k_k[2][4] = {};
  multiply_rows<BK>(q_k, s.q, s.k, task.row, task.key);
  multiply_rows<BK>(k_k, s.k, s.k, task.row, task.key);
#pragma unroll
  for (int x = 0; x < 4; ++x) {
    const int i = task.row + g + x / 2 * 8, j = task.key + 2 * t + x % 2;
    const float k_inverse = factors.inverse_length[i], q_inverse = factors.inverse_length[BT + i];
    // D is 0 for j > i: set_decays has stored it there, too. So matrices get zeros above, or below, their diagonals.
    const float D = factors.decay_between[i][j], D_k = D * factors.inverse_length[j];
    const float do_e = products[0][x], w_e = products[1][x];
    const float dA = j <= i ? scale * factors.beta[j] * do_e : 0.f;
    const float dM = j < i ? -factors.beta[i] * factors.beta[j] * w_e : 0.f;
    put_split(s.dq_from_k.at(i, j), dA * D_k);
    put_split(s.dk_from_q.at(j, i), dA * D * q_inverse);
    if (j <= i) {
      put_split(s.dk_from_k.at(i, j), dM * D_k);
      put_split(s.dk_from_k.at(j, i), dM * D * k_inverse);
    }
    const float A = q_inverse * D_k * (q_k[0][x] + q_k[1][x]), M = k_inverse * D_k * (k_k[0][x] + k_k[1][x]);
    s.pairs[i][j] = fmaf(A, dA, M * dM);
    if (i == j && i < rows) *args.dbeta.row(b, h, span.start + i) = w_e;
  }
}

// Stores `dots`: k . dk and q . dq of each token, over the warp's channels.
template <int BK, typename T>
__device__ __forceinline__ void store_dots(Shared<T, BK>& s, const Place& at, const Accumulators& dq,
                                           const Accumulators& dk) {
  const auto [warp, lane, g, t, channel] = at;
#pragma unroll
  for (int m = 0; m < BT / 16; ++m)
#pragma unroll
    for (int down = 0; down < 2; ++down) {
      const int i = 16 * m + g + 8 * down;
      float q_dot = 0.f, k_dot = 0.f;
#pragma unroll
      for (int across = 0; across < 2; ++across) {
        const float2 q = unpack_pair(place<BK>(s.q, i, channel + 8 * across + 2 * t));
        const float2 k = unpack_pair(place<BK>(s.k, i, channel + 8 * across + 2 * t));
        const float *dq_pair = dq[m][across] + 2 * down, *dk_pair = dk[m][across] + 2 * down;
        q_dot = fmaf(q.x, dq_pair[0], fmaf(q.y, dq_pair[1], q_dot));
        k_dot = fmaf(k.x, dk_pair[0], fmaf(k.y, dk_pair[1], k_dot));
      }
      q_dot = sum_over_lanes<4>(q_dot), k_dot = sum_over_lanes<4>(k_dot);
      if (t == 0) s.dots[warp][i] = k_dot, s.dots[warp][BT + i] = q_dot;
    }
}

enum Kind { OF_Q, OF_K };  // also the order of `parts`

// Stores dx, the warp's channels of dq or dk: unchanged in `parts`, or by way of x, the tile of q or k, which it
// overwrites. If `divided`, removes the part of dx along x and divides the rest by the length of x. each_pair calls its
// function for a lane's pairs of channels c, c + 1 of token i. Since the barrier after store_pairs only this warp reads
// its channels of q and k.
template <int BK, typename T, typename G>
__device__ __forceinline__ void store_gradient(Shared<T, BK>& s, const Args<T, G>& args, const Place& at,
                                               const Accumulators& dx, Kind kind, bool divided, i64 b, i64 h, i64 head,
                                               const Span& span) {
  T* const x = kind == OF_Q ? s.q : s.k;
  const StridedRows<T>& to = kind == OF_Q ? args.dq : args.dk;
  const TokenFactors& factors = s.factors;
  const Shape& shape = args.shape;
  const int lane = at.lane, channel = at.channel, rows = int(span.stop - span.start), channels = int(shape.K),
            bytes = int(args.bytes);
  if (args.parts) {
    each_pair([&](int i, int c, int m, int across, int down) {
      if (i >= rows) return;
      float* row = args.parts + (((kind * shape.B + b) * shape.H + h) * shape.T + span.start + i) * shape.K;
      if (c < channels) row[c] = dx[m][across][2 * down];
      if (c + 1 < channels) row[c + 1] = dx[m][across][2 * down + 1];
    });
    return;
  }
  each_pair([&](int i, int c, int m, int across, int down) {
    float2 dx_pair = {dx[m][across][2 * down], dx[m][across][2 * down + 1]};
    T* pair = place<BK>(x, i, c);
    if (divided) {
      const int row = (kind == OF_K ? 0 : BT) + i;
      const float2 x_pair = unpack_pair(pair);
      const float inverse = factors.inverse_length[row], parallel = s.parallel[row];
      dx_pair = {inverse * fmaf(-parallel, x_pair.x, dx_pair.x), inverse * fmaf(-parallel, x_pair.y, dx_pair.y)};
    }
    put_pair(pair, dx_pair);
  });
  __syncwarp();  // the warp's channels of the gradient are in shared memory
  T* const first = to.row(b, head, span.start);
  if (bytes == 16) {
    constexpr int PIECE = 16 / sizeof(T), ACROSS = 16 / PIECE;  // ACROSS: pieces of the warp's channels of a token
#pragma unroll
    for (int n = 0; n < BT; n += 32 / ACROSS) {
      const int i = n + lane / ACROSS, c = channel + lane % ACROSS * PIECE;
      if (i < rows && c < channels)
        *reinterpret_cast<uint4*>(first + i * to.token_stride + c) =
            *reinterpret_cast<const uint4*>(place<BK>(x, i, c));
    }
  } else {
#pragma unroll 1
    for (int n = lane; n < BT * 16; n += 32) {
      const int i = n / 16, c = channel + n % 16;
      if (i < rows && c < channels) first[i * to.token_stride + c] = *place<BK>(x, i, c);
    }
  }
}

template <typename T, typename G, int BK>
__global__ void __launch_bounds__(2 * BK, blocks_with_room<Shared<T, BK>>(2))
    delta_backward_chunks(const Args<T, G> args) {
  constexpr int THREADS = 2 * BK, WARPS = THREADS / 32, TASKS = (Task::COUNT + WARPS - 1) / WARPS;  // TASKS: of a warp
  static_assert(BT == 32, "a lane has a token");
  static_assert(Task::have_all_pairs() && COLUMNS == 64, "tasks have all pairs, and all columns of S and dS");
  auto& s = *reinterpret_cast<Shared<T, BK>*>(dynamic_smem());
  TokenFactors& factors = s.factors;
  const Shape& shape = args.shape;
  const u32 chunk = blockIdx.x % u32(shape.NC), batch_head = blockIdx.x / u32(shape.NC);
  const u32 h = batch_head % u32(shape.H), b = batch_head / u32(shape.H), head = h / u32(args.group);
  const Span span = chunk_tokens(shape, chunk);
  const int rows = int(span.stop - span.start), bytes = int(args.bytes), channels = int(shape.K);
  const Place at;
  const auto [warp, lane, g, t, channel] = at;
  const float scale = float(args.scale);

  // copy_chunk starts to copy a tile; rows and channels past the end become 0.
  copy_chunk<BK, THREADS>(s.k, args.k.row(b, head, span.start), args.k.token_stride, rows, channels, bytes);
  copy_chunk<BK, THREADS>(s.q, args.q.row(b, head, span.start), args.q.token_stride, rows, channels, bytes);
  cp_async_commit();
  // `opaque` hides where b and h come from: the compiler then computes addresses anew in the loop below, instead of
  // keeping them in registers.
  fetch_columns<BK>(s, args, opaque(b), opaque(h), span, chunk, 0);
  for (int column = COLUMNS; column < shape.V; column += COLUMNS)
    prefetch_columns<BK>(args, opaque(b), opaque(h), span, chunk, column);
  // Lane i has the decay and beta of token i; past the end they are 1 and 0.
  const TokenNumbers numbers(args.g, args.beta, b, h, span.start, rows);
  set_decays<WARPS>(factors, numbers.decay);  // D_ij, D_i and E_i: decay_between, decay_from_start, decay_to_end
  if (warp == 0) factors.beta[lane] = numbers.beta;
  cp_async_wait<1>();
  __syncthreads();  // q and k have arrived; decays are in shared memory
  set_inverse_lengths<BK, WARPS>(factors, s.q, s.k, args.normalized);  // 1 / |k_i|, 1 / |q_i|; or ones

  Accumulators dq = {}, dk = {}, dS_e = {};  // dq and dk begin as S do and S w
  float products[TASKS][2][4] = {};          // of the warp's tasks: [0] do . e and [1] w . e; or [0] <S, dS>
#pragma unroll 1
  for (int column = 0;; column += COLUMNS) {
    cp_async_wait<0>();
    __syncthreads();  // the columns have arrived; inverse lengths are in shared memory
    multiply_states(dq, dk, dS_e, s);
#pragma unroll
    for (int n = 0; n < TASKS; ++n) {
      const Task task(warp + n * WARPS);
      if (WARPS > Task::COUNT && warp >= Task::COUNT) continue;  // more warps than tasks
      if (!task.has_pairs) {
        if (args.dg.p) add_state_dots<BK>(products[n][0], s.states[0], s.states[1], task.column);
        continue;
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        // multiply_rows adds the products [16 rows, 8 rows] to two sums in turn, so that fewer wait for each other.
        float sums[2][4] = {};
        multiply_rows<COLUMNS>(sums, m ? s.w : s.do_, s.e, task.row, task.key);
        if constexpr (sizeof(T) == 2) multiply_rows<COLUMNS>(sums, m ? s.w : s.do_, s.e_error, task.row, task.key);
#pragma unroll
        for (int x = 0; x < 4; ++x) products[n][m][x] += sums[0][x] + sums[1][x];
      }
    }
    __syncthreads();  // the columns have been read: the next ones, or matrices and pairs, may overwrite them
    if (column + COLUMNS >= shape.V) break;
    fetch_columns<BK>(s, args, opaque(b), opaque(h), span, chunk, column + COLUMNS);
  }
  scale_state_products(dq, dk, dS_e, s, at, scale);
#pragma unroll
  for (int n = 0; n < TASKS; ++n) {
    const Task task(warp + n * WARPS);
    if (WARPS > Task::COUNT && warp >= Task::COUNT) continue;
    if (!task.has_pairs) {
      const float (&dot)[4] = products[n][0];
      const float sum = warp_sum(t == g / 2 ? (g % 2 ? dot[1] + dot[3] : dot[0] + dot[2]) : 0.f);
      if (lane == 0) s.state_dots[task.column != 0] = sum;
    } else {
      store_pairs(s, args, at, task, products[n], scale, b, h, span);
    }
  }
  __syncthreads();  // gate_terms, the matrices that multiply q and k, and pairs are in shared memory
  if (args.dg.p) {
    float dg = 0.f;  // gate `lane`: the sum of pairs j < lane <= i, of this warp's rows i
#pragma unroll
    for (int n = 0; n < BT / WARPS; ++n) {
      const int i = warp + n * WARPS;
      const float earlier_keys = sum_of_lower_lanes(lane < i ? s.pairs[i][lane] : 0.f, own_lane());
      dg += lane <= i ? earlier_keys : 0.f;
    }
    s.pair_terms[warp][lane] = dg;
  }
  // d[16 tokens from 16 m on, the warp's 16 channels] += a matrix of tokens times k or q. LOWER, UPPER: the block of
  // 16 x 16 tokens on the diagonal's other side would be 0; it is left out, and must be: no task has stored it.
  multiply_tokens<LOWER, BK>(dq, s.dq_from_k, s.k, channel);
  multiply_tokens<WHOLE, BK>(dk, s.dk_from_k, s.k, channel);
  multiply_tokens<UPPER, BK>(dk, s.dk_from_q, s.q, channel);
  __syncthreads();  // pair_terms are in shared memory
  if (args.dg.p && warp == 0) {
    float dg = 0.f, S_term = 0.f, dS_term = 0.f;
#pragma unroll
    for (int other = 0; other < WARPS; ++other) {
      dg += s.pair_terms[other][lane];
      S_term += s.gate_terms[other][lane], dS_term += s.gate_terms[other][BT + lane];
    }
    dg += sum_of_this_and_higher_lanes(S_term, own_lane()) + sum_of_lower_lanes(dS_term, own_lane());
    if (lane < rows)  // decays past the end are 1, so that the last one is the chunk's
      *args.dg.row(b, h, span.start + lane) =
          fmaf(factors.decay_from_start[BT - 1], s.state_dots[0] + s.state_dots[1], dg);
  }
  // Whether dq and dk are to be made the gradients of q and k from those of q / |q| and k / |k|.
  const bool divided = args.normalized && !args.parts;
  if (divided) {
    __syncthreads();  // gate_terms have been read: dots overwrite them
    store_dots(s, at, dq, dk);
    __syncthreads();  // dots are in shared memory
    if (threadIdx.x < 2 * BT) {
      const float inverse = factors.inverse_length[threadIdx.x];
      float sum = 0.f;
#pragma unroll
      for (int other = 0; other < WARPS; ++other) sum += s.dots[other][threadIdx.x];
      s.parallel[threadIdx.x] = inverse * inverse * sum;
    }
    __syncthreads();  // `parallel` is in shared memory
  }
  store_gradient(s, args, at, dq, OF_Q, divided, b, h, head, span);
  store_gradient(s, args, at, dk, OF_K, divided, b, h, head, span);
}
