// what      GLA and RWKV-6 forward on every card, in chunks of tokens: a block reads its tokens once and writes o once.
//           If gates are large (see `grows`), it reads q, k and g again.
// math      per chunk of 32 tokens (of 16 if operands are floats), S [K, V] being the state before it, A [query, key]
//           the scores A_ij = q_i . D_ij k_j, j <= i (forward_operands.cuh). Decays [K] are e^(sum of log gates g):
//           D_ij over gates j + 1 to i, E_i over those of the chunk up to i, L_j over those after j, D over all of
//           them. o_i = scale (E_i q_i S + sum_j A_ij v_j);  S <- diag(D) S + sum_j L_j k_j v_j^T
//           RWKV-6: D_ij and E_i end with gate i - 1, and A_ii = q_i . u k_i
// shapes    q k g [B, H, T, K], v o [B, H, T, V], RWKV-6's bonus u [H, K], sums [B, H, T, V] float32, initial and final
//           state [N, H, K, V] float32
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; a warp for every 16 of the columns
// smem      Shared, in forward_storage.cuh: two stages of q, k and v and one of g, which all threads copy; operands
//           (queries and keys times decays) of the current chunk: each warp makes those of its shares, spans of 4
//           tokens, and all warps read them; the chunk's scores: each warp computes some tiles of them (tasks), and all
//           warps read them
// barriers  three a chunk: its inputs have been copied and its decays computed | its operands are in shared memory |
//           its scores are
// numerics  S in float32 accumulators; decays as forward_operands.cuh says. bfloat16 data: products in bfloat16, a
//           score as the sum of two numbers. Other data: products in tf32, for float32 data PRODUCTS of them
//           (fragments.cuh)
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    BK and BV of 64, 128; more channels by SplitChannels, a launch for every BK, each adding to
//           `sums`
//
// Names. CHUNK<T>: tokens of a chunk. WarpShare (forward_operands.cuh), n: one of the SHARES_PER_WARP shares of a warp:
// a span of 4 tokens with all channels, or with half of them. A lane has LANE_CHANNELS channels of it, from
// coord.channel on; coord.row(i): the span's token i, counted in the chunk; exists(): whether the chunk has this span,
// since there may be fewer spans than shares. TokenDecays: e^g of a lane's tokens and channels. store_span_decays:
// stores the decays of the warp's spans and returns whether a gate is above GROWTH or NaN.
// State, Output: a lane's numbers of S and o in accumulators; each_number (forward_copies.cuh) finds those of S in
// memory. state_q, state_k: the chunk's queries and keys, decayed for products with S. clear_scores: sets to zero the
// scores that no task stores. Piece<2, X>: two numbers of a row. blocks_with_room<S>(n) (cards.cuh): n blocks on a
// multiprocessor, or as many as its shared memory has room for.
#include "cards.cuh"
#include "read_order.cuh"
#include "gated/forward_copies.cuh"
#include "gated/forward_tiles.cuh"
#include "gated/forward_operands.cuh"
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "forward_arguments.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args : ForwardArgs<T, G> {
  float* sums;  // SplitChannels: the sum of o over the channels of the launches so far; else null
  i64 channel;  // the first channel of this launch
  i64 bytes;    // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows of q, k, v, g and o
};

// Stores a lane's outputs one by one, for rows whose pairs of numbers are not aligned. `to`, `sums`: of the lane's
// first output. rows, columns: how many exist from there on. With SplitChannels every launch but the `first` adds
// `sums`, and every one but the `last` writes to `sums` instead of o; else `sums` is null and not read. Not inlined,
// since it is rare.
template <typename T>
__device__ __noinline__ void store_unaligned(const Output<T>& o, T* to, i64 stride, float* sums, i64 sums_stride,
                                             float scale, int rows, int columns, bool first, bool last) {
#pragma unroll 1
  for (int n = 0; n < CHUNK<T> / 2; ++n) {
    const int row = n / 4 * 8, column = n % 4 / 2 * 8 + n % 2;
    if (row >= rows || column >= columns) continue;
    float x = o[row / 16][column / 8][row / 8 % 2 * 2 + n % 2];
    float* sum = sums + row * sums_stride + column;
    if (!first) x += *sum;
    if (last) to[row * stride + column] = from_float<T>(scale * x);
    else *sum = x;
  }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. Schedule: forward_storage.cuh. T: the type of q,
// k, v and o; G: that of g. PRODUCTS: tf32 products for each product of float32, 1 or 3.
template <class ReadOrder, class Schedule, typename T, typename G, int PRODUCTS, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, blocks_with_room<Shared<Schedule, T, G, BK, BV>>(RESIDENT<Schedule, BK, BV>))
    gated_forward(const Args<T, G> args) {
  constexpr int THREADS = 2 * BV, WARPS = THREADS / 32, BT = CHUNK<T>;
  using Share = WarpShare<T, BK, WARPS>;
  auto& s = *reinterpret_cast<Shared<Schedule, T, G, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, head = blockIdx.x / tiles, H = u32(shape.H);
  // head: the number among all sequences' heads; b: batch row
  const u32 row_sequences = u32(shape.row_sequences);
  const u32 sequence = head / H, h = head % H, b = sequence / row_sequences;
  const Span span = tokens_of(shape, sequence % row_sequences);
  const int first_column = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(min(shape.K - args.channel, i64(BK))), columns = int(min(shape.V - first_column, i64(BV)));

  // Whether outputs and their sums are stored in pairs.
  const bool in_pairs = bytes >= int(2 * sizeof(T)) && (Schedule::all_channels || shape.V % 2 == 0);

  // Calls f(number, its index in the array of states, whether it is inside) for this lane's numbers of S: the warp's 16
  // columns and all channels, transposed (State in forward_copies.cuh).
  State<BK> S;
  const auto each_state_number = [&](auto f) {
    each_number<BK>(S, i64(head) * shape.K + args.channel, shape.V, first_column, channels, columns, f);
  };
  each_state_number([&](float& x, i64 index, bool inside) { x = args.initial && inside ? args.initial[index] : 0.f; });
  if (ReadOrder::reads_before_write)
    for (int c = threadIdx.x; c < BK; c += THREADS)
      s.u[c] = c < channels ? args.u[h * shape.K + args.channel + c] : 0.f;
  clear_scores<Share, THREADS>(s);

  // Starts copying q, k and v of the chunk that begins with token `token` of the sequence to stage `stage`.
  const auto fetch = [&](int token, int stage) {
    const int rows = tokens - token;
    const i64 first_token = span.start + token;
    const T *k = args.k.row(b, h, first_token) + args.channel, *v = args.v.row(b, h, first_token) + first_column;
    const T* q = args.q.row(b, h, first_token) + args.channel;
    if (bytes == 16) {  // asked once for all three
      copy_rows<16, BT, BK, THREADS>(s.k[stage], k, args.k.token_stride, rows, channels);
      copy_rows<16, BT, BK, THREADS>(s.q[stage], q, args.q.token_stride, rows, channels);
      copy_rows<16, BT, BV, THREADS>(s.v[stage], v, args.v.token_stride, rows, columns);
    } else {
      copy_unaligned_rows<BT, BK, THREADS>(s.k[stage], k, args.k.token_stride, rows, channels, bytes);
      copy_unaligned_rows<BT, BK, THREADS>(s.q[stage], q, args.q.token_stride, rows, channels, bytes);
      copy_unaligned_rows<BT, BV, THREADS>(s.v[stage], v, args.v.token_stride, rows, columns, bytes);
    }
    cp_async_commit();
  };
  // Starts copying the gates of the chunk that begins with token `token`. No barrier is needed: a thread copies the
  // gates that it alone reads, after it has read those in their place.
  const auto fetch_next_gates = [&](int token) {
    fetch_chunk_gates<Share, BK>(s.gates, args.g, b, h, span.start + token, tokens - token, args.channel, channels,
                                 bytes);
    cp_async_commit();
  };
  if (tokens) {
    fetch(0, 0);
    fetch_next_gates(0);
  }
  int stage = 0;
  for (int token = 0; token < tokens; token += BT, stage ^= 1) {
    TokenDecays<Share> decays;
    cp_async_wait<0>();
    // The chunk's inputs and its spans' decays are in shared memory; the previous chunk has been read. This barrier
    // is also a vote: whether a gate is above GROWTH (1 nat) or NaN. Operands about a sub-chunk's middle could then
    // overflow, and score_chunk computes the scores within sub-chunks pair by pair, from q, k and g in memory.
    const bool grows = __syncthreads_or(store_span_decays<Share, BK>(s, decays));
    const bool has_next = token + BT < tokens;
    if (has_next) fetch(token + BT, stage ^ 1);
    // Stores the operands of the warp's shares, and the chunk's decay in s.decay. If T is the type of operands
    // (bfloat16, float32), the queries and keys for products with S replace s.q[stage] and s.k[stage].
#pragma unroll
    for (int n = 0; n < Share::SHARES_PER_WARP; ++n) {
      const Share coord(n);
      if (coord.exists()) make_operands<ReadOrder, PRODUCTS>(s, stage, coord, decays, grows);
    }
    if (has_next) fetch_next_gates(token + BT);
    __syncthreads();  // the operands and the chunk's decay are in shared memory

    // forward_products.cuh: s.A = the chunk's scores, some by each warp; o = q S; S <- diag(s.decay) S + k^T v. After
    // the barrier o += A v: add_score_outputs, to which ScoreStorage tells A's type and layout.
    Output<T> o = {};
    score_chunk<ReadOrder, PRODUCTS, WARPS, Schedule, T, BK>(s, args, b, h, span, token, tokens, channels, grows);
    add_state_outputs<PRODUCTS, T, BK>(o, S, state_q(s, stage));
    update_state<PRODUCTS, T, BK, BV>(S, state_k(s, stage), s.v[stage], s.decay, 16 * (threadIdx.x >> 5));
    __syncthreads();  // the scores are in shared memory
    add_score_outputs<ScoreStorage<Schedule, T, BK>, PRODUCTS, BV>(o, s.A, s.v[stage], 16 * (threadIdx.x >> 5));
    // `opaque` hides where a number comes from: computed here, not held in registers since the start.
    const int thread = opaque(threadIdx.x), g = thread >> 2 & 7, column = (thread >> 5) * 16 + (thread & 3) * 2;
    T* to = args.o.row(b, h, span.start + token + g) + first_column + column;
    const int rows = tokens - token - g;
    const bool first = Schedule::all_channels || args.channel == 0;
    const bool last = Schedule::all_channels || args.channel + BK >= shape.K;
    // Likewise: else the compiler converts it again for every output.
    const float scale = __uint_as_float(opaque(__float_as_uint(float(args.scale))));
    float* sums = nullptr;
    if (!Schedule::all_channels)
      sums = args.sums + ((i64(b) * H + h) * shape.T + span.start + token + g) * shape.V + first_column + column;
    if (in_pairs) {
      if (!first)  // all are read before one is written: else each read would wait for the write before it
#pragma unroll
        for (int n = 0; n < BT / 8; ++n)
#pragma unroll
          for (int across = 0; across < 2; ++across) {
            if (8 * n >= rows || column + 8 * across >= columns) continue;
            Piece<2, float> sum;
            sum.load(sums + 8 * n * shape.V + 8 * across);
            o[n / 2][across][n % 2 * 2] += sum.get(0), o[n / 2][across][n % 2 * 2 + 1] += sum.get(1);
          }
#pragma unroll
      for (int n = 0; n < BT / 8; ++n) {
#pragma unroll
        for (int across = 0; across < 2; ++across) {
          const bool inside = 8 * n < rows && column + 8 * across < columns;
          const float x[2] = {o[n / 2][across][n % 2 * 2], o[n / 2][across][n % 2 * 2 + 1]};
          if (last) {
            const float scaled[2] = {scale * x[0], scale * x[1]};
            Piece<2, T> two;
            two.set(scaled);
            if (inside) two.store(to + 8 * across);
          } else {
            Piece<2, float> sum;
            sum.set(x);
            if (inside) sum.store(sums + 8 * across);
          }
        }
        to += 8 * args.o.token_stride;
        if (!Schedule::all_channels) sums += 8 * shape.V;
      }
    } else {
      Output<T> copy;  // store_unaligned is a call and needs an address: with o's, o would never be in registers
#pragma unroll
      for (int n = 0; n < BT / 2; ++n) copy[n / 8][n / 4 % 2][n % 4] = o[n / 8][n / 4 % 2][n % 4];
      store_unaligned(copy, to, args.o.token_stride, sums, shape.V, scale, rows, columns - column, first, last);
    }
  }
  if (args.final)
    each_state_number([&](float& x, i64 index, bool inside) {
      if (inside) args.final[index] = x;
    });
}
