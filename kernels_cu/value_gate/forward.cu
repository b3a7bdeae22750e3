// what      GLA with a gate for each channel of K and one for each column of V, forward: every input is read once, o is
//           written once.
// math      S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T, * number by number;  o_t = scale q_t^T S_t.  Per chunk,
//           with E_i the decay of channels, F_i of columns, from the chunk's start through token i, D_ij and F_ij those
//           from after token j through i:  A_ij = sum over channels of q_i D_ij k_j, j <= i;
//           o_i = scale (F_i * (E_i q_i)^T S + sum_j A_ij F_ij * v_j);  S <- diag(decay of channels) S diag(decay of
//           columns) + (k decayed to the chunk's end)^T (v decayed to it), with the decays over the chunk
// shapes    q k g [B, H, T, K], v gv o [B, H, T, V], sums [B, H, T, V] float32, initial and final state [N, H, K, V]
//           float32, N sequences, or segments, of all batch rows; SegmentState: channel_decays [N, H, 2, K],
//           column_decays [N, H, V], both as logarithms (nats)
// schedules (gated/forward_storage.cuh) SinglePass: o and the final state, one launch for all channels. SplitChannels:
//           the same, by a launch for every BK channels, whose outputs add up in `sums`. SegmentState: a segment's
//           final state from zero and the logarithms of its decays, without q and o; scan_segments.cu joins segments
// grid      value_gate.py launches a block for every (sequence, head, BV columns of V), sequence slowest; a warp for
//           every 16 of the columns
// smem      ValueShared: Shared of gated/forward_storage.cuh, and a chunk of the columns' gates
// order     of a chunk, with the block's three barriers: decays of spans of 4 tokens are stored, and the chunk has been
//           copied | operands, the decayed q and k, are stored, and the columns' gates have been copied | scores are
//           stored, while S is read for o and then replaced (SegmentState: no scores, no barrier); o is completed and
//           stored over v. The next chunk is copied meanwhile
// barriers  see order
// numerics  Sums are float32. Scores as in gated/forward.cu: bfloat16 data in bfloat16, a score as the sum of two
//           numbers; others in tf32. Columns: between two sub-chunks a value is decayed to a border between both
//           tokens, and the output from it, so that both decays are at most 1. Within a sub-chunk both are decayed from
//           and to its middle; some of these factors are inverse decays, in which a gate below -16 counts as -16
//           (MiddleFactors in decays.cuh). Products compute o transposed, as a lane then has the gates of its columns
// growth    Three steps for gates above 0. If a gate of a channel is above GROWTH (1 nat), scores within sub-chunks are
//           computed pair by pair (score_chunk). If one of the warp's columns is, the values of an output's own
//           sub-chunk are added one by one (sum_one_by_one). If either is, and the positive gates over the chunk of
//           some channel and some column of the warp sum to more than BY_CHUNK (16 nats), the warp computes the chunk
//           again, token by token, and stores its outputs (forward_by_token.cuh)
// source    Yang et al., 2024, section 4.1
// limits    BK and BV of 64, 128; more channels by SplitChannels, a launch for every BK, each adding to `sums`
// instances each schedule with T of bfloat16, float16, float32; gates of T or float32; PRODUCTS of 1, of float32 also 3
// tests     test_value_gate; test_compile, whose SPILLED names the instances that spill: registers are all taken
//
// From the includes:
//   CHUNK<T>: tokens of a chunk; State, Output: a lane's numbers of S and o in accumulators
//   fetch_rows: starts copying rows from memory to a tile; RESIDENT: how many blocks a multiprocessor is to have;
//     blocks_with_room: so many, if its shared memory has room
//   WarpShare: a share of a warp, a span of 4 tokens; clear_scores: sets to zero the scores that no warp stores
//   fetch_chunk_gates: starts copying a thread's gates; store_span_decays: stores the decays of spans, and returns
//     whether a gate is above GROWTH; TokenDecays: decays of a lane's tokens, which make_operands computes if
//     store_span_decays does not (kept_in_registers); make_operands: stores decayed q and k
//   state_q: the decayed queries that are multiplied with S; add_earlier_channels: adds the sum over earlier launches'
//     channels, and stores it for later ones
//   add_state_outputs_by_columns: o += q S; add_score_outputs_by_columns: o += A v; write_state_by_columns: the new S
//   place: the address of a number in a tile
//   Tokens: rows in memory, read one number at a time, from tokens_at; ColumnsReader: loads pairs of tokens of the
//     warp's columns; ChunkColumns: a warp's 16 columns of a chunk; decay_over_subchunk: of the lane's columns;
//     four_lane_sums(x).all: the sum over the 4 lanes that have a column; max_nan: NaN if one number is
#include "cards.cuh"
#include "read_order.cuh"
#include "gated/forward_copies.cuh"
#include "gated/forward_operands.cuh"
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "gated/forward_tiles.cuh"
#include "value_gate/forward_by_token.cuh"
#include "value_gate/forward_products.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v;
  StridedRows<const G> g, gv;
  StridedRows<T> o;
  const float* initial;  // [N, H, K, V]; null: zero
  float* final;          // [N, H, K, V]; null: not wanted
  Shape shape;
  double scale;
  float* sums;             // SplitChannels: o of the channels of earlier launches; null if one launch has all channels
  float* channel_decays;   // SegmentState: sums of gates over all tokens, and zeros: scan_segments.cu adds both rows
  float* column_decays;    // SegmentState: such sums of the columns' gates, one row
  i64 channel;             // the first channel of this launch; of SplitChannels' first launch 0
  i64 segments, computed;  // segments of a sequence, and how many of them, from the first on, are computed
  i64 bytes;               // the largest of 16, 8, 4 and 2 of which all rows' starts and lengths are multiples
};

// Stores a warp's 16 columns of a chunk, from `column` on of a tile [ROWS, COLS], if rows are not multiples of 16
// bytes. `to`: of the first row and column; rows, columns: how many exist. Not inlined, since it is rare.
template <int ROWS, int COLS, typename T>
__device__ __noinline__ void store_unaligned(T* to, i64 stride, const T* tile, int column, int rows, int columns) {
#pragma unroll 1
  for (int index = threadIdx.x & 31; index < ROWS * 16; index += 32) {
    const int row = index / 16, across = index % 16;
    if (row < rows && across < columns)
      to[row * stride + across] = *place<COLS>(const_cast<T*>(tile), row, column + across);
  }
}

// Stores `scale` times a warp's outputs, of 16 columns from `column` on: over its values in the tile, and from there to
// memory. to: of the first token and column; rows, columns: how many exist; bytes: as Args::bytes.
template <int BV, typename T>
__device__ __forceinline__ void store_outputs(T* to, i64 stride, T* tile, const Output<T>& o, float scale, int column,
                                              int rows, int columns, int bytes) {
  constexpr int BT = CHUNK<T>, PIECE = 16 / sizeof(T), ACROSS = 16 / PIECE;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __syncwarp();  // all lanes have read these values
#pragma unroll
  for (int n = 0; n < BT / SUB_CHUNK; ++n)
#pragma unroll
    for (int x = 0; x < 4; ++x)
      *place<BV>(tile, 8 * n + 2 * t + (x & 1), column + g + 8 * (x >> 1)) = from_float<T>(scale * o[n / 2][n % 2][x]);
  __syncwarp();  // the outputs are in shared memory
  if (bytes != 16) return store_unaligned<BT, BV>(to, stride, tile, column, rows, columns);
  const int across = lane % ACROSS * PIECE;
#pragma unroll
  for (int n = 0; n < BT * ACROSS / 32; ++n) {
    const int row = n * 32 / ACROSS + lane / ACROSS;
    if (row < rows && across < columns)
      *reinterpret_cast<uint4*>(to + row * stride + across) =
          *reinterpret_cast<const uint4*>(place<BV>(tile, row, column + across));
  }
}

// The logarithm of a channel's decay over a chunk of `rows` tokens. If `decay`, the product, is 0 or infinite, it is
// the sum of the gates. Between 0 and float32's normal numbers there are none (-ftz).
template <typename G> __device__ __noinline__ float log_decay(float decay, Tokens<G> gates, int channel, int rows) {
  if (decay > 0.f && decay < __uint_as_float(0x7f800000u)) return logf(decay);
  float sum = 0.f;
#pragma unroll 1
  for (int i = 0; i < rows; ++i) sum += gates.at(i, channel, channel + 1);
  return sum;
}

// T: the type of q, k, v and o; G: that of both gates. PRODUCTS: tf32 products for each product of float32 data, 1 or
// 3. AfterWrite below: a query reads the state after its token's write.
template <class Schedule, typename T, typename G, int PRODUCTS, int BK, int BV>
__global__ void __launch_bounds__(2 * BV,
                                  blocks_with_room<ValueShared<Schedule, T, G, BK, BV>>(RESIDENT<Schedule, BK, BV>))
    value_gate_forward(const __grid_constant__ Args<T, G> args) {
  // BT: tokens of a chunk, 32, or 16 if operands are floats; NUM_SUBCHUNKS: its sub-chunks of SUB_CHUNK = 8; SIXTEENS:
  // its groups of 16
  constexpr int THREADS = 2 * BV, WARPS = THREADS / 32, BT = CHUNK<T>, NUM_SUBCHUNKS = BT / SUB_CHUNK,
                SIXTEENS = BT / 16;
  using Share = WarpShare<T, BK, WARPS>;  // the spans of 4 tokens whose operands a warp makes
  constexpr bool HAS_OUTPUTS = Schedule::has_outputs;
  static_assert(THREADS >= BK, "without outputs, a thread has a channel's sum of gates");
  auto& s = *reinterpret_cast<ValueShared<Schedule, T, G, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const u32 tiles = u32(shape.V + BV - 1) / BV, sequence_head = blockIdx.x / tiles, H = u32(shape.H),
            row_sequences = u32(shape.row_sequences);
  const u32 sequence = sequence_head / H, h = sequence_head % H, b = sequence / row_sequences;
  if (!HAS_OUTPUTS && sequence % u32(args.segments) >= u32(args.computed)) return;
  const Span span = tokens_of(shape, sequence % row_sequences);
  const int v_tile = blockIdx.x % tiles * BV, tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(min(shape.K - args.channel, i64(BK))), columns = int(min(shape.V - v_tile, i64(BV)));
  const float scale = float(args.scale);

  // The warp's 16 columns of the state, transposed. With g = lane / 4 and t = lane % 4, S[n][2h + p] is channel 8n + 2t
  // + p, column g + 8h. Calls f(number, its index in the array of states, whether it is inside) for this lane's
  // numbers.
  State<BK> S;
  const auto each_state_number = [&](auto f) {
    each_number<BK>(S, i64(sequence_head) * shape.K + args.channel, shape.V, v_tile, channels, columns, f);
  };
  each_state_number([&](float& x, i64 index, bool inside) { x = args.initial && inside ? args.initial[index] : 0.f; });
  if constexpr (HAS_OUTPUTS) clear_scores<Share, THREADS>(s);

  // Starts to copy k, q and v of the chunk that begins with token `token` of the sequence to stage `stage`.
  const auto fetch = [&](int token, int stage) {
    const int rows = tokens - token;
    const i64 first_token = span.start + token;
    fetch_rows<BT, BK, THREADS>(s.k[stage], args.k.row(b, h, first_token) + args.channel, args.k.token_stride, rows,
                                channels, bytes);
    if constexpr (HAS_OUTPUTS)
      fetch_rows<BT, BK, THREADS>(s.q[stage], args.q.row(b, h, first_token) + args.channel, args.q.token_stride, rows,
                                  channels, bytes);
    fetch_rows<BT, BV, THREADS>(s.v[stage], args.v.row(b, h, first_token) + v_tile, args.v.token_stride, rows, columns,
                                bytes);
  };
  // Starts to copy the channels' gates of that chunk. A thread copies those that it alone reads: no barrier is needed.
  const auto fetch_next_gates = [&](int token) {
    fetch_chunk_gates<Share, BK>(s.gates, args.g, b, h, span.start + token, tokens - token, args.channel, channels,
                                 bytes);
  };

  // SegmentState: sums of the gates of channel threadIdx.x, and of this lane's columns g and g + 8.
  float channel_total = 0.f, column_totals[2] = {};
  if (tokens) {
    fetch(0, 0);
    fetch_next_gates(0);
  }
  cp_async_commit();
  int stage = 0;
  for (int token = 0; token < tokens; token += BT, stage ^= 1) {
    TokenDecays<Share> decays;
    cp_async_wait<0>();
    // Whether a gate that this thread has copied is above GROWTH or NaN; then, for the whole chunk and block.
    bool grows = store_span_decays<Share, BK>(s, decays);
    // The chunk has been copied, and its spans' decays are stored; the previous chunk has been read: its gates of
    // columns, and its outputs in the other stage of v, may be overwritten.
    grows = __syncthreads_or(grows);
    const bool more = token + BT < tokens;
    fetch_rows<BT, BV, THREADS>(s.value_gates, args.gv.row(b, h, span.start + token) + v_tile, args.gv.token_stride,
                                tokens - token, columns, bytes);
    cp_async_commit();
    if (more) fetch(token + BT, stage ^ 1);
    // Stores the decayed queries and keys, and s.decay, the channels' decays over the chunk (forward_operands.cuh).
    // Last argument: whether decays are multiplied from the span nearest to the token on, the order that does not leave
    // float32's range where gates are large. Without outputs always: then the other order is not compiled.
#pragma unroll
    for (int index = 0; index < Share::SHARES_PER_WARP; ++index) {
      const Share share(index);
      if (share.exists()) make_operands<AfterWrite, PRODUCTS>(s, stage, share, decays, grows || !HAS_OUTPUTS);
    }
    if (more) fetch_next_gates(token + BT);
    cp_async_commit();  // one group for all of the next chunk, even if empty: wait<1> waits for the earlier ones
    cp_async_wait<1>();
    __syncthreads();  // the operands are stored; the columns' gates have been copied

    if constexpr (HAS_OUTPUTS)  // stores the chunk's scores in s.A, a share of them for each warp
      score_chunk<AfterWrite, PRODUCTS, WARPS, Schedule, T, BK>(s, args, b, h, span, token, tokens, channels, grows);
    const int column = threadIdx.x >> 5 << 4;  // the warp's first, of the block's
    const ColumnsReader<BV, G> gates(column);
    const ColumnsReader<BV, T> values(column);
    const int rows = tokens - token;
    if constexpr (!HAS_OUTPUTS) {
      if (threadIdx.x < channels)
        channel_total += log_decay(s.decay[threadIdx.x], tokens_at(args.g, b, h, span.start + token, args.channel),
                                   threadIdx.x, min(rows, BT));
    }
    float largest = 0.f;  // of the columns' gates
#pragma unroll
    for (int m = 0; m < SIXTEENS; ++m) {
      // x[p]: column g + 8 (p % 2), tokens 2t and 2t + 1 of sub-chunk 2m + p / 2
      float2 x[4];
      gates.load(x, s.value_gates, 16 * m);
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        largest = max_nan(x[p].x, max_nan(x[p].y, largest));
        if constexpr (!HAS_OUTPUTS) column_totals[p & 1] += four_lane_sums(x[p].x + x[p].y).all;
      }
    }
    const bool columns_grow = __any_sync(0xffffffffu, !(largest <= GROWTH));
    const ChunkColumns chunk = {
        b, h, span.start + token, min(rows, BT), channels, v_tile + column, min(columns - column, 16)};
    State<BK> S_before;     // set if by_token may be
    bool by_token = false;  // whether results of products are replaced by those of compute_token_by_token
    if (grows || columns_grow) {
      by_token = grows_beyond_products(args, chunk);
#pragma unroll
      for (int n = 0; n < BK / 2; ++n) S_before[n / 4][n % 4] = S[n / 4][n % 4];
    }
    float sub_chunk_decays[2][NUM_SUBCHUNKS];  // decays of columns g and g + 8 over whole sub-chunks
#pragma unroll
    for (int m = 0; m < SIXTEENS; ++m) {
      float2 x[4];
      gates.load(x, s.value_gates, 16 * m);
#pragma unroll
      for (int p = 0; p < 4; ++p) sub_chunk_decays[p & 1][2 * m + (p >> 1)] = decay_over_subchunk(x[p]);
    }
    // o[n / 2][n % 2][2h + p]: token 8n + 2t + p, column g + 8h. The products are value_gate/forward_products.cuh's:
    // o = q S; S of the next chunk; o times the columns' decays, plus A v.
    Output<T> o = {};
    if constexpr (HAS_OUTPUTS) add_state_outputs_by_columns<PRODUCTS, T, BK>(o, S, state_q(s, stage));
    write_state_by_columns<PRODUCTS, BV>(S, s, stage, gates, values, sub_chunk_decays);
    if constexpr (HAS_OUTPUTS) {
      __syncthreads();  // the scores are stored
      add_score_outputs_by_columns<PRODUCTS, BV>(o, s, stage, gates, values, sub_chunk_decays, columns_grow);
    }
    if (by_token) {  // the same for all lanes; no barrier of the block follows in this chunk
      compute_token_by_token<Schedule, T, BK>(S_before, args, chunk);
#pragma unroll
      for (int n = 0; n < BK / 2; ++n) S[n / 4][n % 4] = S_before[n / 4][n % 4];
      continue;
    }
    if constexpr (HAS_OUTPUTS) {
      const int g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
      if (!Schedule::all_channels) {
        float* sums =
            args.sums + ((i64(b) * H + h) * shape.T + span.start + token + 2 * t) * shape.V + v_tile + column + g;
        const bool first = args.channel == 0, last = args.channel + BK >= shape.K;
        // Calls f(number of o, its sum), for this lane's numbers that are inside.
        const auto each_sum = [&](auto f) {
#pragma unroll
          for (int n = 0; n < NUM_SUBCHUNKS; ++n)
#pragma unroll
            for (int x = 0; x < 4; ++x)
              if (8 * n + 2 * t + (x & 1) < rows && column + g + 8 * (x >> 1) < columns)
                f(o[n / 2][n % 2][x], sums[(8 * n + (x & 1)) * shape.V + 8 * (x >> 1)]);
        };
        // All are read before one is written: else each read would wait for the write before it.
        if (!first) each_sum([](float& o, float sum) { o += sum; });
        if (!last) each_sum([](float o, float& sum) { sum = o; });
        if (!last) continue;
      }
      store_outputs<BV>(args.o.row(b, h, span.start + token) + v_tile + column, args.o.token_stride, s.v[stage], o,
                        scale, column, rows, columns - column, bytes);
    }
  }
  if (args.final)
    each_state_number([&](float& x, i64 index, bool inside) {
      if (inside) args.final[index] = x;
    });
  if (!HAS_OUTPUTS && blockIdx.x % tiles == 0 && threadIdx.x < channels) {
    float* decays = args.channel_decays + i64(sequence_head) * 2 * shape.K + args.channel + threadIdx.x;
    decays[0] = channel_total, decays[shape.K] = 0.f;
  }
  if (!HAS_OUTPUTS && args.channel == 0 && (threadIdx.x & 3) == 0) {
    const int column = (threadIdx.x >> 5 << 4) + (threadIdx.x >> 2 & 7);
    float* decays = args.column_decays + i64(sequence_head) * shape.V + v_tile + column;
    if (column < columns) decays[0] = column_totals[0];
    if (column + 8 < columns) decays[8] = column_totals[1];
  }
}
