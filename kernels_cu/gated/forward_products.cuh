// what      The products of the forward kernel of every card: scores of pairs of tokens; o from scores and values, and
//           from queries and the state; the new state. Tiles, CHUNK, SUB_CHUNK, SPAN, and what decayed means:
//           forward_storage.cuh; readers of tiles: forward_tiles.cuh; Math, Left, Right, multiply: fragments.cuh
// shapes    a warp has 16 columns of V and BK channels of the state, transposed: S[n] is [16 columns, 8 channels].
//           g = lane / 4, t = lane % 4: a lane has rows g and g + 8, and columns 2t and 2t + 1, of such a matrix, and
//           likewise of a tile of scores [16 queries, 8 keys]. All lanes of a warp call functions with
//           products together
// barriers  the caller's: between the stores of a chunk's operands and score_chunk, add_state_outputs and update_state;
//           between score_chunk and add_score_outputs
// numerics  sums in float32; products with S read it rounded
//
// A product is D[16, 8] += A[16, 16] B[16, 8]. From the includes:
//   PRODUCTS: tf32 products for each product of float32, 1 or 3
//   Left, Right: a lane's part of A and of B. multiply: d += A B; accumulate: the same for a sum over many tokens
//   Readers load them from tiles in shared memory: LeftReader and RowsReader for sums over columns, TransposedReader
//     (A) and RightReader (two B) for sums over rows; load(x, tile, row, col) starts at (row, col)
//   OperandOf<T>::Type: the type of operands in tiles; MiddleOf: that of operands about a middle
//   ScoreStorage: the part of shared memory that has scores A and their operands; NUMBERS: how many numbers a score is
//     the sum of, DISTANCE apart; LDA: the distance of A's rows; border: queries, and from row BORDER on keys, decayed
//     to borders
//   pair_of(lane): the lane's pair, one of the PAIRS = 28 of a query and an earlier key in a sub-chunk
#include "read_order.cuh"
#include "gated/forward_copies.cuh"
#include "gated/forward_storage.cuh"
#include "growth.cuh"

// Sets d to the scores [16 queries, 8 keys] of the rows of tile q from `query` on and of tile k from `key` on.
template <typename T, int PRODUCTS, int BK, typename X>
__device__ __forceinline__ void score_tile(float (&d)[4], const X* q, const X* k, int query, int key) {
  constexpr int N = sizeof(X) == 2 ? 2 : 1;
  const RowsReader<BK, X> keys;
  const LeftReader<BK, X> queries;
  float sums[2][4] = {};  // two, added to in turn: a product waits for the last one of the same sum
#pragma unroll
  for (int c = 0; c < BK; c += 16 * N) {
    Right<Math<T, PRODUCTS>> b[N];
    keys.load(b, k, key, c);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      Left<Math<T, PRODUCTS>> a;
      queries.load(a, q, query, c + 16 * n);
      multiply(sums[(c / 16 + n) % 2], a, b[n]);
    }
  }
#pragma unroll
  for (int x = 0; x < 4; ++x) d[x] = sums[0][x] + sums[1][x];
}

// Stores two neighbouring scores. A bfloat16 score is the sum of two numbers: its rounding error is stored `distance`
// numbers later.
__device__ __forceinline__ void put_score_pair(bf16* to, float x, float y, int distance) {
  const u32 two = pack<bf16>(x, y);
  *reinterpret_cast<u32*>(to) = two;
  *reinterpret_cast<u32*>(to + distance) = pack<bf16>(x - to_float(bf16{u16(two)}), y - to_float(bf16{u16(two >> 16)}));
}
__device__ __forceinline__ void put_score_pair(float* to, float x, float y, int) {
  *reinterpret_cast<float2*>(to) = {x, y};
}

// Stores one score, as put_score_pair stores two.
__device__ __forceinline__ void put_score(bf16* to, float x, int distance) {
  const bf16 rounded = from_float<bf16>(x);
  *to = rounded;
  to[distance] = from_float<bf16>(x - to_float(rounded));
}
__device__ __forceinline__ void put_score(float* to, float x, int) { *to = x; }

// The scores of a chunk are computed in tasks of 16 queries and 8 keys. The sub-chunks of the queries and keys whose
// scores a task stores:
//   chunk of 32 tokens   tasks 0 to 3: within sub-chunk 0, 1, 2, 3;  4: queries of 1, keys of 0;  5: of 3, of 2;
//                        6: queries of 2 and 3, keys of 0;  7: of 2 and 3, of 1
//   chunk of 16 tokens   tasks 0, 1: within sub-chunk 0, 1;  2: queries of 1, keys of 0
template <typename T> constexpr int TASKS = CHUNK<T> == 32 ? 8 : 3;

// The queries and keys of a task. A lane has a query in each half of the 16, and two neighbouring keys. kind: 0 and 1
// are scores within a sub-chunk of the first and the second 16 tokens, 2 between neighbouring sub-chunks, 3 (`across`)
// between the halves of the chunk; n: which of the two tasks of its kind; first_row: the first row, of both the task's
// queries and its keys, in the tiles of operands.
template <typename T> struct ScoreTask {
  int kind, n, first_row;
  bool within, across;

  // `within` is given by callers that know it at compile time, which saves branches.
  __device__ __forceinline__ ScoreTask(int task, bool within)
      : kind(CHUNK<T> == 16 && task == 2 ? 2 : task / 2),
        n(task & 1),
        first_row(16 * (kind & 1)),
        within(within),
        across(kind == 3) {}
  // Whether the scores of this half of the queries are the task's; otherwise they are not used.
  __device__ __forceinline__ bool has(int half) const { return half == n || across; }
  // The lane's query in this half, and its first key, as tokens of the chunk: their place in A.
  __device__ __forceinline__ int row(int half) const {
    const int g = (threadIdx.x & 31) >> 2;
    return within ? 16 * kind + 8 * n + g : across ? 16 + 8 * half + g : 16 * n + 8 + g;
  }
  __device__ __forceinline__ int column() const {
    return (within ? 16 * kind + 8 * n : across ? 8 * n : 16 * n) + 2 * (threadIdx.x & 3);
  }
};

// Sets d to a lane's scores of a task: d[2 half + p] of the query of each half and key p of two.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void score_task(float (&d)[4], const ScoreStorage<Schedule, T, BK>& s,
                                           const ScoreTask<T>& task) {
  using Storage = ScoreStorage<Schedule, T, BK>;
  using Middle = MiddleOf<Schedule, T>;
  const int query = task.first_row, key = query + 8 * task.n;
  if constexpr (sizeof(typename Storage::Middle) == sizeof(typename Storage::X)) {  // one call, inlined once
    const auto* queries = task.within ? s.middle_q : s.border;
    const auto* keys = task.within ? s.middle_k : s.border + Storage::BORDER * BK;
    score_tile<T, PRODUCTS, BK>(d, queries, keys, query, key);
  } else if (task.within) {
    score_tile<typename Middle::Product, Middle::template PRODUCTS<PRODUCTS>, BK>(d, s.middle_q, s.middle_k, query,
                                                                                  key);
  } else {
    score_tile<T, PRODUCTS, BK>(d, s.border, s.border + Storage::BORDER * BK, query, key);
  }
  if (!task.within) return;
  // Scores that no gate multiplies come from s.direct: [0] of a query and its own key, [1] of the key before it; each
  // is the sum of two parts. Scores of later keys are 0.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (!task.has(half)) continue;
    const int i = task.row(half), j = task.column();
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      const bool before = ReadOrder::reads_before_write && j + p + 1 == i && i % SPAN;  // in the same span
      if (j + p >= i || before) {
        const auto& direct = s.direct[j + p != i];
        d[2 * half + p] = j + p > i ? 0.f : direct[0][i] + direct[1][i];
      }
    }
  }
}
// Stores a lane's scores of a task in A.
template <int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void put_scores(ScoreStorage<Schedule, T, BK>& s, const ScoreTask<T>& task,
                                           const float (&d)[4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (task.has(half))
      put_score_pair(s.A + task.row(half) * s.LDA + task.column(), operand_value<T, PRODUCTS>(d[2 * half]),
                     operand_value<T, PRODUCTS>(d[2 * half + 1]), s.DISTANCE);
}
// Computes and stores the scores of a task.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, int BK>
__device__ __forceinline__ void make_scores(ScoreStorage<Schedule, T, BK>& s, const ScoreTask<T>& task) {
  float d[4];
  score_task<ReadOrder, PRODUCTS>(d, s, task);
  put_scores<PRODUCTS>(s, task, d);
}

// Computes and stores the scores within a sub-chunk pair by pair, from its `rows` rows in memory: for gates above
// GROWTH (growth.cuh), with which decays about the sub-chunk's middle could overflow. The pointers are to the
// sub-chunk's first token and the block's first channel.
template <class ReadOrder, int PRODUCTS, class Schedule, typename T, typename G, int BK>
__device__ __noinline__ void score_pairs_one_by_one(ScoreStorage<Schedule, T, BK>& s, int subchunk, const T* q,
                                                    const T* k, const G* g, i64 q_stride, i64 k_stride, i64 g_stride,
                                                    int rows, int channels) {
  const int lane = threadIdx.x & 31;
  // Stores the score of the sub-chunk's query i and key j.
  const auto put = [&](int i, int j, float x) {
    put_score(s.A + (SUB_CHUNK * subchunk + i) * s.LDA + SUB_CHUNK * subchunk + j, operand_value<T, PRODUCTS>(x),
              s.DISTANCE);
  };
  const float score = score_of_pair<ReadOrder>(q, k, g, q_stride, k_stride, g_stride, rows, channels);
  const TokenPair pair = pair_of(lane);
  if (lane < PAIRS) put(pair.query, pair.key, score);
  const int row = SUB_CHUNK * subchunk + lane % SUB_CHUNK;
  if (lane < SUB_CHUNK) put(lane, lane, s.direct[0][0][row] + s.direct[0][1][row]);
}

// Computes all scores of the chunk that begins with token `token` of the sequence's `tokens`, WARPS tasks at a time. If
// `grows`, those within sub-chunks pair by pair. b, h: batch row and head.
template <class ReadOrder, int PRODUCTS, int WARPS, class Schedule, typename T, int BK, class Args>
__device__ __forceinline__ void score_chunk(ScoreStorage<Schedule, T, BK>& s, const Args& args, u32 b, u32 h,
                                            const Span& span, int token, int tokens, int channels, bool grows) {
  constexpr int NUM_SUBCHUNKS = CHUNK<T> / SUB_CHUNK, ITERATIONS = (TASKS<T> + WARPS - 1) / WARPS;
  constexpr bool ONE_OF_EACH =
      TASKS<T> == 2 * NUM_SUBCHUNKS && WARPS == NUM_SUBCHUNKS;  // within a sub-chunk, and between two
#pragma unroll ONE_OF_EACH ? 2 : 1
  for (int iteration = 0; iteration < ITERATIONS; ++iteration) {
    const int task = (threadIdx.x >> 5) + iteration * WARPS;
    if (TASKS<T> % WARPS && task >= TASKS<T>) break;
    const bool within = ONE_OF_EACH ? iteration == 0 : task < NUM_SUBCHUNKS;
    if (grows && within) {
      const i64 first_token = span.start + token + SUB_CHUNK * task;
      score_pairs_one_by_one<ReadOrder, PRODUCTS>(
          s, task, args.q.row(b, h, first_token) + args.channel, args.k.row(b, h, first_token) + args.channel,
          args.g.row(b, h, first_token) + args.channel, args.q.token_stride, args.k.token_stride, args.g.token_stride,
          tokens - token - SUB_CHUNK * task, channels);
    } else {
      make_scores<ReadOrder, PRODUCTS, Schedule, T, BK>(s, ScoreTask<T>(task, within));
    }
  }
}

// Sets a to the scores of queries row ... row + 15 and keys key ... key + 15.
template <int LDA> __device__ __forceinline__ void load_scores(LeftBf16& a, const bf16* A, int row, int key) {
  const int lane = own_lane();
  ldmatrix_x4(a.words, A + (row + (lane & 15)) * LDA + key + (lane >> 4) * 8);
}
template <int LDA, bool SPLIT>
__device__ __forceinline__ void load_scores(LeftTf32<SPLIT>& a, const float* A, int row, int key) {
  const int lane = own_lane(), g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int lower = 0; lower < 2; ++lower) {
      const float2 two = *reinterpret_cast<const float2*>(A + (row + g + 8 * lower) * LDA + key + 8 * half + 2 * t);
      a.set_unrounded(4 * half + 2 * lower, two.x);
      a.set_unrounded(4 * half + 2 * lower + 1, two.y);
    }
}

// A lane's numbers of a warp's outputs [CHUNK tokens, 16 columns]: accumulators [16, 8], side by side by the second
// index.
template <typename T> using Output = float[CHUNK<T> / 16][2][4];

// o += q S, for a warp's 16 columns. q: the chunk's queries, decayed from its start.
template <int PRODUCTS, typename T, int BK>
__device__ __forceinline__ void add_state_outputs(Output<T>& o, const State<BK>& S,
                                                  const typename OperandOf<T>::Type* q) {
  const LeftReader<BK, typename OperandOf<T>::Type> queries;
#pragma unroll
  for (int c = 0; c < BK / 16; ++c) {
    Right<Math<T, PRODUCTS>> b[2];
    pack_right(b[0], S[2 * c], S[2 * c + 1], 0);
    pack_right(b[1], S[2 * c], S[2 * c + 1], 1);
#pragma unroll
    for (int m = 0; m < CHUNK<T> / 16; ++m) {
      Left<Math<T, PRODUCTS>> a;
      queries.load(a, q, 16 * m, 16 * c);
      multiply(o[m][0], a, b[0]);
      multiply(o[m][1], a, b[1]);
    }
  }
}

// S <- diag(decay) S + k^T v, for 16 columns from `column` on. k: the chunk's keys, decayed to its end; decay: of each
// channel over the chunk.
template <int PRODUCTS, typename T, int BK, int BV>
__device__ __forceinline__ void update_state(State<BK>& S, const typename OperandOf<T>::Type* k, const T* v,
                                             const float* decay, int column) {
  const int t = opaque(threadIdx.x & 3);  // opaque: computed again, not held in a register
  const TransposedReader<BV, T> values(column);
  const RightReader<BK, typename OperandOf<T>::Type> keys;
#pragma unroll
  for (int n = 0; n < CHUNK<T> / 16; ++n) {
    Left<Math<T, PRODUCTS>> a;
    values.load(a, v, 16 * n);
#pragma unroll
    for (int c = 0; c < BK / 16; ++c) {
      Right<Math<T, PRODUCTS>> b[2];
      keys.load(b, k, 16 * n, 16 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float (&x)[4] = S[2 * c + half];
        if (n == 0) {
          const float2 decays = *reinterpret_cast<const float2*>(decay + 16 * c + 8 * half + 2 * t);
          x[0] *= decays.x, x[1] *= decays.y, x[2] *= decays.x, x[3] *= decays.y;
        }
        accumulate(x, a, b[half]);
      }
    }
  }
}

// o += A v, for 16 columns from `column` on.
template <class Storage, int PRODUCTS, int BV, typename T>
__device__ __forceinline__ void add_score_outputs(Output<T>& o, const typename Storage::X* A, const T* v, int column) {
  const RightReader<BV, T, INPUTS> values(column);  // INPUTS: v is data, not rounded to tf32 yet
#pragma unroll
  for (int n = 0; n < CHUNK<T> / 16; ++n) {
    Left<Math<T, PRODUCTS>> a;
    Right<Math<T, PRODUCTS>> b[2];
    values.load(b, v, 16 * n, 0);
#pragma unroll
    for (int m = n; m < CHUNK<T> / 16; ++m)
#pragma unroll
      for (int number = 0; number < Storage::NUMBERS; ++number) {
        load_scores<Storage::LDA>(a, A + number * Storage::DISTANCE, 16 * m, 16 * n);
        multiply(o[m][0], a, b[0]);
        multiply(o[m][1], a, b[1]);
      }
  }
}
