// what      Stage 4 of the chunked form: the scores of a chunk, A_ij the weight of token j in the output of token i.
// math      A_ij = sum_c q_ic k_jc exp(g_{j+1,c} + ... + g_ic) over channels c, j <= i   (RWKV-6: to g_{i-1,c};
//           A_ii = sum_c q_ic u_c k_ic). The decay of a pair is the query's decay since a border between both tokens,
//           times the key's decay up to it. With tokens of a chunk in groups of 16, and of 8 (sub-chunks), borders are:
//           the end of the key's 16 tokens; for pairs in one group of 16, the end of the key's sub-chunk; for pairs in
//           one sub-chunk, its middle. There a query before the middle, or a key after it, is divided by the decay
//           between it and the middle. A has no factor `scale`: combine.cu multiplies by it
// shapes    q k g [B, H, T, K], g log gates, u [H, K], A [B, H, T, C] float32, C tokens a chunk; zero above the
//           diagonal
// grid      stages.py launches a block for every (batch, head, chunk, ROWS rows of it, BK channels), batch slowest; a
//           warp has 16 rows. The blocks of later channels write arrays of their own behind A, for the host to add
// smem      Shared
// barriers  two for every ROWS keys: decayed queries and keys are stored | they have been read. Within its 16 rows a
//           warp uses __syncwarp
// numerics  Pairs of tokens in one group of 16: three tf32 products of operands split in two. A token with itself:
//           float32. Others: three such products for float32 data, for 16-bit data one of operands rounded to tf32;
//           sums are float32. A decay is a product of tokens' decays. From or to a middle each of these counts as at
//           least e^-20, so that no divisor is 0: if a gate is a reset (-inf), e^-20 (2e-9) of a key before it still
//           counts for queries after it in the same sub-chunk. If a gate is above GROWTH (growth.cuh), the pairs of the
//           warp's two sub-chunks are computed one by one, without a middle
// source    Yang et al., 2024, section 4.3 (secondary chunking)
// limits    BK of 64, 128, 256; C a multiple of 16
// instances both orders, BK, and T and G: float32, or T of 16 bits with G of T or float32
// tests     test_stages, its case "positive" for pairs one by one
#include "lanes.cuh"
#include "stages/copies.cuh"
#include "stages/intra_decays.cuh"

// Operands of tensor cores (fragments.cuh): Pairs<SPLIT, float, N>: N pairs of numbers a lane, each split in two tf32.
// LeftOf<T> and RightOf<T> (stages/copies.cuh) are split if T is float, else rounded to tf32; `load_rounded` sets
// either kind from a tile of shared memory: a left operand from 16 rows of queries, TRANSPOSED two right ones from 16
// rows of keys, each of 16 channels. multiply(d, left, right) is d[query, key] += their product over these channels.
// From intra_decays.cuh: WARP_ROWS = 16 tokens of a warp, SUB_CHUNK = 8; ROW<BK>: the distance of rows in shared
// memory; WIDTH<T>: how many neighbouring channels a lane has, of a token a Piece<WIDTH, T>. load reads the pieces of
// all 16 tokens, and zeros if a token or channel does not exist: then the gate's decay is 1. decay_about_middles,
// decay_from_starts and decay_to_ends<N> store a lane's channels of 16 queries or keys times their decays from or to a
// middle, or a border of each N tokens; the last argument of the latter two is set to the decays over the sub-chunks,
// or over the first N tokens; multiply_sub_chunk multiplies a lane's channels of 8 stored rows by factors; put stores
// WIDTH floats. A lane's g = lane / 4 and t = lane % 4, but args.g and from.g are gates. c is a channel, in the kernel
// a chunk. Others: decay_of(gate) = e^gate; shape.NC: chunks of a batch row; AS_STORED: not transposed.

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k;
  StridedRows<const G> g;
  const float* u;        // [H, K], null for GLA
  StridedRows<float> A;  // rows start on 16 bytes
  Shape shape;
  i64 bytes;        // 16, 8, 4 or 2: all rows of q, k and g start at multiples of so many bytes, and are multiples long
  i64 part_stride;  // numbers from A to the array of the next BK channels
};

// The warps of a block, and its rows. BK: K rounded up. Two warps if BK is 256: so Shared has 70 KiB (72 if it is
// 128), and three blocks fit in the 228 KiB of Hopper's multiprocessors.
constexpr int RESIDENT = 3;  // blocks of a multiprocessor
template <int BK> constexpr int WARPS = BK > 128 ? 2 : 4;
template <int BK> constexpr int ROWS = WARPS<BK> * WARP_ROWS;

// The block computes its rows of A for ROWS keys at a time: first for the keys of its own tokens, then for those of
// earlier tokens, the latest first. q and k have a row for each token.
template <int BK> struct alignas(16) Shared {
  static_assert(BK == 64 || BK == 128 || BK == 256);
  // Queries: in score_within decayed from the middles of their sub-chunks, then from the sub-chunks' starts; afterwards
  // from the start of their warp's 16 tokens.
  float q[ROWS<BK> * ROW<BK>];
  // Keys: in score_within decayed to the middles of their sub-chunks, then to the sub-chunks' ends; afterwards to the
  // end of their 16 tokens.
  float k[ROWS<BK> * ROW<BK>];
  float keys_decay[WARPS<BK>][BK];  // the decay over each 16 tokens whose keys are in k
  // For each warp the decay over the tokens between the 16 keys that it uses next and its own 16 tokens: 1 at first,
  // when these keys are right before its own; later over all tokens whose keys it has used.
  float gap_decay[WARPS<BK>][BK];
};

// A warp's 16 tokens in memory. q, k, g: channel 0 of the first token (of the chunk's first, if rows is 0). rows,
// channels: how many of the tokens, and of a token's channels, exist.
template <typename T, typename G> struct WarpTokens {
  const T *q, *k;
  const G* g;
  int rows, channels;
};

// Replaces, in a lane's scores `within`, those of pairs in one sub-chunk by sums over single pairs without the
// sub-chunk's middle. score_of_pair (growth.cuh) reads q, k and g in memory, and returns one pair's score to each of
// lanes 0 to 27, float32 sums.
template <class ReadOrder, typename T, typename G>
__device__ __forceinline__ void score_pairs_one_by_one(float (&within)[2][4], const WarpTokens<T, G>& from,
                                                       const Args<T, G>& args) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll 1
  for (int sub_chunk = 0; sub_chunk < 2; ++sub_chunk) {
    const int first = SUB_CHUNK * sub_chunk;
    const float score =
        score_of_pair<ReadOrder>(from.q + first * args.q.token_stride, from.k + first * args.k.token_stride,
                                 from.g + first * args.g.token_stride, args.q.token_stride, args.k.token_stride,
                                 args.g.token_stride, from.rows - first, from.channels);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      // Lane i (i - 1) / 2 + j has the score of the sub-chunk's query i with its earlier key j.
      const float x = __shfl_sync(0xffffffffu, score, g * (g - 1) / 2 + 2 * t + p);
      within[0][p] = sub_chunk == 0 ? x : within[0][p];
      within[1][2 + p] = sub_chunk == 1 ? x : within[1][2 + p];
    }
  }
}

// Sets `within`, which is zero, to a lane's scores of the warp's 16 queries with its 16 keys: within[n][0] and [1] are
// those of query g with keys 8n + 2t and the next, [2] and [3] those of query g + 8. Stores in q the queries, decayed
// from the start of these tokens, in k the keys, decayed to their end, and in `keys_decay` the decay over these tokens.
// u: the head's bonus, read only if queries read before the write.
template <class ReadOrder, typename T, typename G, int BK>
__device__ __forceinline__ void score_within(float (&within)[2][4], float* q, float* k, float* keys_decay,
                                             const WarpTokens<T, G>& from, const Args<T, G>& args, const float* u) {
  constexpr int W = WIDTH<T>;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  // 16 queries times the first 8 keys about the border between the sub-chunks. [2] and [3], of the second sub-chunk's
  // queries, are scores; [0] and [1] are not used.
  float border_scores[4] = {};
  float self_scores[WARP_ROWS] = {};  // this lane's channels' terms of each token's score with itself
  bool grows = false;                 // whether a gate is above GROWTH, which is 1 nat (growth.cuh), or NaN
#pragma unroll 1
  for (int slice = 0; slice < BK; slice += 32 * W) {
    const int channel = slice + lane * W;
    Piece<W, T> queries[WARP_ROWS], keys[WARP_ROWS];
    Piece<W, G> gates[WARP_ROWS];
    const int channels = from.channels - channel, bytes = int(args.bytes);
    load(queries, from.q + channel, args.q.token_stride, from.rows, channels, bytes);
    load(keys, from.k + channel, args.k.token_stride, from.rows, channels, bytes);
    load(gates, from.g + channel, args.g.token_stride, from.rows, channels, bytes);
    float token_decays[WARP_ROWS][W];
#pragma unroll
    for (int c = 0; c < W; ++c) {
      const float bonus = !ReadOrder::reads_before_write ? 1.f : c < channels ? u[channel + c] : 0.f;
#pragma unroll
      for (int i = 0; i < WARP_ROWS; ++i) {
        const float gate = gates[i].get(c);
        grows |= !(gate <= GROWTH);
        token_decays[i][c] = decay_of(gate);
        self_scores[i] = fmaf(queries[i].get(c), bonus * keys[i].get(c), self_scores[i]);
      }
    }

    // Calls f(16 queries, 16 keys as two operands), as they are stored, for each 16 of these channels.
    const auto each_16_channels = [&](auto f) {
#pragma unroll 2
      for (int c = slice; c < slice + 32 * W; c += 16) {
        Pairs<SPLIT, float, 4> left;
        Pairs<SPLIT, float, 2> right[2];
        load_rounded<AS_STORED>(left, q + c, ROW<BK>);
        load_rounded<TRANSPOSED>(right, k + c, ROW<BK>);
        f(left, right);
      }
    };
    decay_about_middles<ReadOrder, BK>(q + channel, k + channel, queries, keys, token_decays);
    __syncwarp();  // queries and keys are stored
    // All 16 queries with all 16 keys about the middles. Only pairs in one sub-chunk are right: within[0][0, 1] and
    // within[1][2, 3]. The end of this function replaces the other numbers.
    each_16_channels([&](auto& left, auto& right) { multiply(within, left, right); });
    __syncwarp();                                  // they have been read
    float sub_chunk_decays[2][W], first_decay[W];  // first_decay: an output that is not used: sub_chunk_decays[0] again
    decay_from_starts<ReadOrder, BK>(q + channel, queries, token_decays, sub_chunk_decays);
    decay_to_ends<SUB_CHUNK, BK>(k + channel, keys, token_decays, first_decay);
    __syncwarp();  // queries and keys for the border after 8 tokens are stored
    each_16_channels([&](auto& left, auto& right) { multiply(border_scores, left, right[0]); });
    __syncwarp();  // they have been read
    // From borders of sub-chunks to borders of the 16 tokens: the second sub-chunk's queries, the first one's keys. A
    // lane multiplies channels that it has stored itself: so no __syncwarp is needed before.
    multiply_sub_chunk<BK>(q + SUB_CHUNK * ROW<BK> + channel, sub_chunk_decays[0]);
    multiply_sub_chunk<BK>(k + channel, sub_chunk_decays[1]);
    float both[W];
#pragma unroll
    for (int c = 0; c < W; ++c) both[c] = sub_chunk_decays[0][c] * sub_chunk_decays[1][c];
    put(keys_decay + channel, both);
  }
  if (__any_sync(0xffffffffu, grows)) score_pairs_one_by_one<ReadOrder>(within, from, args);
  // Lane l gets the score of token l % 16 with itself: the sum over the 16 lanes of its half of the warp, then over
  // both. sum_and_share<sums, first shuffle distance, last> (lanes.cuh) leaves each of 16 lanes one of 16 sums.
  sum_and_share<WARP_ROWS, WARP_ROWS / 2, 1>(self_scores);
  const float sum = self_scores[0] + __shfl_xor_sync(0xffffffffu, self_scores[0], WARP_ROWS);
  // From here on all wrong numbers of `within` are replaced. Pairs of one sub-chunk: keys after the query become 0, a
  // token's own key gets self_scores.
#pragma unroll
  for (int sub_chunk = 0; sub_chunk < 2; ++sub_chunk) {
    const float score = __shfl_sync(0xffffffffu, sum, SUB_CHUNK * sub_chunk + g);
#pragma unroll
    for (int p = 0; p < 2; ++p) {
      float& x = within[sub_chunk][2 * sub_chunk + p];
      x = 2 * t + p > g ? 0.f : 2 * t + p == g ? score : x;
    }
  }
  // Queries of the first sub-chunk with keys of the second: 0. Queries of the second with keys of the first.
  within[1][0] = within[1][1] = 0.f, within[0][2] = border_scores[2], within[0][3] = border_scores[3];
}

// Stores in k the keys of 16 tokens, decayed to their end, and in keys_decay the decay over these tokens.
template <typename T, typename G, int BK>
__device__ __forceinline__ void store_earlier_keys(float* k, float* keys_decay, const WarpTokens<T, G>& from,
                                                   const Args<T, G>& args) {
  constexpr int W = WIDTH<T>;
#pragma unroll 1
  for (int channel = (threadIdx.x & 31) * W; channel < BK; channel += 32 * W) {
    const int channels = from.channels - channel, bytes = int(args.bytes);
    Piece<W, T> keys[WARP_ROWS];
    Piece<W, G> gates[WARP_ROWS];
    load(keys, from.k + channel, args.k.token_stride, from.rows, channels, bytes);
    load(gates, from.g + channel, args.g.token_stride, from.rows, channels, bytes);
    float token_decays[WARP_ROWS][W], decay[W];
#pragma unroll
    for (int i = 0; i < WARP_ROWS; ++i)
#pragma unroll
      for (int c = 0; c < W; ++c) token_decays[i][c] = decay_of(gates[i].get(c));
    decay_to_ends<WARP_ROWS, BK>(k + channel, keys, token_decays, decay);
    put(keys_decay + channel, decay);
  }
}

__device__ __forceinline__ float2 load_float2(const float* x) { return *reinterpret_cast<const float2*>(x); }

// Adds to d[n] the scores of the warp's 16 queries with the n-th 16 keys in s.k, n < `count`, laid out as `within` is.
// Goes from the latest 16 keys, n = count - 1, to the earliest, and multiplies `decays`, the gap's, by the decay over
// each 16 keys after their use. Stores them in s.gap_decay for the next call, which takes the keys before these.
template <typename T, int BK>
__device__ __forceinline__ void score_earlier(float (&d)[WARPS<BK>][2][4], Shared<BK>& s, int warp, int count) {
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
  for (int c = 0; c < BK; c += 16) {
    // queries[m], and a's pair m: of four matrices of 8 rows and 8 channels, m has rows 8 (m % 2) and channels
    // 8 (m / 2) on.
    float2 queries[4], decays[2];  // decays: those from the end of the n-th keys to the start of the queries
    // DOWN_FIRST: matrix 1 is below matrix 0. x: row g, channels 2t and 2t + 1 of matrix m.
    each_matrix<DOWN_FIRST, AS_STORED>(s.q + warp * WARP_ROWS * ROW<BK> + c, ROW<BK>,
                                       [&](int m, float2 x) { queries[m] = x; });
#pragma unroll
    for (int half = 0; half < 2; ++half) decays[half] = load_float2(s.gap_decay[warp] + c + 8 * half + 2 * t);
#pragma unroll
    for (int n = WARPS<BK> - 1; n >= 0; --n) {
      if (n >= count) continue;
      LeftOf<T> a;
      RightOf<T> b[2];
#pragma unroll
      for (int m = 0; m < 4; ++m) a.set(m, float2{queries[m].x * decays[m >> 1].x, queries[m].y * decays[m >> 1].y});
      load_rounded<TRANSPOSED>(b, s.k + n * WARP_ROWS * ROW<BK> + c, ROW<BK>);
      multiply(d[n], a, b);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 keys_decay = load_float2(s.keys_decay[n] + c + 8 * half + 2 * t);
        decays[half].x *= keys_decay.x, decays[half].y *= keys_decay.y;
      }
    }
    __syncwarp();  // all lanes have read s.gap_decay
#pragma unroll
    for (int half = 0; half < 2; ++half)
      if (lane == t) *reinterpret_cast<float2*>(s.gap_decay[warp] + c + 8 * half + 2 * t) = decays[half];
  }
  __syncwarp();  // s.gap_decay is stored
}

// Stores the scores d of 16 queries with 16 keys, which lanes hold as score_within says, from (row, column) of A on;
// only rows before `stop`.
__device__ __forceinline__ void store_scores(const StridedRows<float>& A, u32 batch, u32 h, i64 row, i64 stop,
                                             i64 column, const float (&d)[2][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int down = 0; down < 2; ++down) {
    if (row + g + 8 * down >= stop) continue;
    float* const to = A.row(batch, h, row + g + 8 * down) + column + 2 * t;
#pragma unroll
    for (int across = 0; across < 2; ++across)
      *reinterpret_cast<float2*>(to + 8 * across) = {d[across][2 * down], d[across][2 * down + 1]};
  }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of q and k; G: that of g.
template <class ReadOrder, typename T, typename G, int BK>
__global__ void __launch_bounds__(32 * WARPS<BK>, RESIDENT) stages_intra_chunk(const Args<T, G> args) {
  static_assert(RESIDENT * (sizeof(Shared<BK>) + 1024) <= 228 * 1024, "1024: what a block takes beyond its own");
  Shared<BK>& s = *reinterpret_cast<Shared<BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 groups = u32(shape.chunk + ROWS<BK> - 1) / ROWS<BK>, NC = u32(shape.NC), H = u32(shape.H);
  // Of the channels: only the widest blocks have a part of them, and others no registers for more.
  const u32 parts = BK == 256 && shape.K > BK ? u32(shape.K + BK - 1) / BK : 1,
            part = BK == 256 ? blockIdx.x % parts : 0;
  // A chunk's tokens are in `groups` groups of ROWS. The block's rows are those of group `query_group` of its chunk.
  // `chunk` numbers the chunks of all batches and heads: it is chunk c of (batch, h).
  const u32 block = blockIdx.x / parts, query_group = block % groups, chunk = block / groups, c = chunk % NC;
  const u32 h = chunk / NC % H;
  const u32 batch = chunk / NC / H;
  const Span span = chunk_tokens(shape, c);
  if (span.start + query_group * ROWS<BK> >= span.stop)
    return;  // the chunk is a last, shorter one: no thread has a row
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const i64 first_row = span.start + query_group * ROWS<BK> + warp * WARP_ROWS;  // the warp's first row
  float* const k = s.k + warp * WARP_ROWS * ROW<BK>;
  StridedRows<float> A = args.A;
  A.p += part * args.part_stride;

  // The 16 tokens from `token` on, of which those before span.stop exist.
  const auto tokens_from = [&](i64 token) {
    const i64 rows = span.stop - token;
    const i64 first_token = rows > 0 ? token : span.start;
    return WarpTokens<T, G>{args.q.row(batch, h, first_token) + part * BK,
                            args.k.row(batch, h, first_token) + part * BK,
                            args.g.row(batch, h, first_token) + part * BK,
                            int(rows > WARP_ROWS ? WARP_ROWS
                                : rows > 0       ? rows
                                                 : 0),
                            min(int(shape.K) - int(part) * BK, BK)};
  };
  for (int channel = lane; channel < BK; channel += 32) s.gap_decay[warp][channel] = 1.f;
  if (first_row < span.stop) {  // a warp without rows stores keys of other groups, and comes to the barriers
    float d[2][4] = {};
    score_within<ReadOrder, T, G, BK>(d, s.q + warp * WARP_ROWS * ROW<BK>, k, s.keys_decay[warp],
                                      tokens_from(first_row), args,
                                      args.u ? args.u + h * shape.K + part * BK : nullptr);
    store_scores(A, batch, h, first_row, span.stop, first_row - span.start, d);
    constexpr int LANES = 32 / WARP_ROWS;  // of a row, which write zeros to its later columns, four at a time
    if (const i64 row = first_row + lane / LANES; row < span.stop)
      for (i64 column = first_row - span.start + WARP_ROWS + lane % LANES * 4; column < shape.chunk;
           column += 4 * LANES)
        *reinterpret_cast<float4*>(A.row(batch, h, row) + column) = {0.f, 0.f, 0.f, 0.f};
  }
  // s.k has the keys of `group`, 16 rows for each warp n: those that warp n stored.
#pragma unroll 1
  for (int group = query_group;; --group) {
    __syncthreads();  // decayed queries and keys, and the decays over 16 keys, are in shared memory
    if (first_row < span.stop) {
      // Of the block's own group a warp uses the keys of earlier warps: score_within has the scores of its own. Warps
      // without rows have stored no keys of this group, but they are the last warps: none uses their keys.
      const int count = group == int(query_group) ? warp : WARPS<BK>;
      float d[WARPS<BK>][2][4] = {};
      score_earlier<T, BK>(d, s, warp, count);
#pragma unroll
      for (int n = 0; n < WARPS<BK>; ++n)
        if (n < count) store_scores(A, batch, h, first_row, span.stop, group * ROWS<BK> + n * WARP_ROWS, d[n]);
    }
    if (group == 0) return;
    __syncthreads();  // keys and their decays have been read: those of the group before may overwrite them
    store_earlier_keys<T, G, BK>(k, s.keys_decay[warp],
                                 tokens_from(span.start + (group - 1) * ROWS<BK> + warp * WARP_ROWS), args);
  }
}
