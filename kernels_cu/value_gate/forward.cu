// what      GLA with a value gate beside the gate, forward: every input is read once, o is written once.
// math      per chunk, with decays of channels on queries and keys, of columns on values and outputs:
//           o = scale ((q decayed) S + A v),   S <- diag(decay) S diag(decay) + (k decayed)^T (v decayed)
// shapes    q k g [B, H, T, K], v gv o [B, H, T, V], sums [B, H, T, V] float32, initial and final state [N, H, K, V]
//           float32; SegmentState: channel_decays [N, H, 2, K], column_decays [N, H, V]
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; a warp for every 16 of the columns
// smem      ValueShared: as gated/forward.cu has it, and a chunk of gates of values
// barriers  one, then three a chunk: a chunk has arrived, its decays stand | its operands stand, gates of values have
//           arrived | its scores stand
// numerics  Scores as gated/forward.cu makes them. Where two tokens meet, values are decayed to and outputs from there:
//           at the border of two sub-chunks or of the chunk's halves, so that both decays are at most 1, or in the
//           middle of their sub-chunk (columns.cuh). Products have o transposed, as decays of columns lie
// source    Yang et al., 2024, section 4.1
// limits    BK and BV of 64, 128; more channels by SplitChannels, a launch for every BK, each adding to `sums`
#include "read_order.cuh"
#include "gated/forward_block.cuh"
#include "value_gate/columns.cuh"
#include "value_gate/forward_products.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v;
  Rows<const G> g, gv;
  Rows<T> o;
  const float* initial;  // [N, H, K, V] or null
  float* final;          // [N, H, K, V] or null
  Shape shape;
  double scale;
  float* sums;            // o of the channels before these, for those after these; null where these are all
  float* channel_decays;  // SegmentState: of all tokens, then ones
  float* column_decays;
  i64 channel;     // the first one
  i64 of, needed;  // of so many segments in turn so many are computed
  i64 bytes;       // all rows are whole pieces of so many: 16, 8, 4 or 2
};

constexpr u32 MOST_OF_TWO = 113 * 1024;  // bytes of shared memory: of blocks with more no card has two at once

// A warp's 16 columns of a chunk to rows that are no whole pieces of 16 bytes, out of the way of those that are.
template <int ROWS, int COLS, typename T>
__device__ __noinline__ void store_slowly(T* to, i64 stride, const T* tile, int column, int rows, int columns) {
#pragma unroll 1
  for (int at = threadIdx.x & 31; at < ROWS * 16; at += 32) {
    const int row = at / 16, across = at % 16;
    if (row < rows && across < columns)
      to[row * stride + across] = *place<COLS>(const_cast<T*>(tile), row, column + across);
  }
}

template <class Schedule, typename T, typename G, int PRODUCTS, int BK, int BV>
__global__ void __launch_bounds__(2 * BV, sizeof(ValueShared<Schedule, T, G, BK, BV>) > MOST_OF_TWO
                                              ? 1
                                              : RESIDENT<Schedule, T, BK, BV>)
    value_gate_forward(const Args<T, G> args) {
  using Mine = Block<Args<T, G>, Schedule, T, G, BK, BV>;
  constexpr int C = CHUNK<T>, SUBS = C / BC, BLOCKS = C / 16;
  constexpr bool READS = Schedule::reads;
  auto& s = *reinterpret_cast<ValueShared<Schedule, T, G, BK, BV>*>(dynamic_smem());
  const Mine block(args, s);
  const Shape& shape = args.shape;
  if (!READS && block.n % u32(args.of) >= u32(args.needed)) return;
  const float scale = float(args.scale);
  const int tokens = block.tokens, bytes = block.bytes;

  State<BK> S;
  block.start_state(S);
  if constexpr (READS) block.clear_scores();

  float total = 1.f, totals[2] = {1.f, 1.f};  // SegmentState: decays of channel threadIdx.x and of this lane's columns
  if (tokens) {
    block.fetch(0, 0);
    block.fetch_gates_of(0);
  }
  cp_async_commit();
  if constexpr (READS) __syncthreads();  // no gate has been looked at
  int stage = 0;
  for (int token = 0; token < tokens; token += C, stage ^= 1) {
    cp_async_wait<0>();
    const bool grows = block.put_spans();
    if constexpr (READS)
      if (grows) s.grows[stage] = true;
    __syncthreads();  // a chunk has arrived and its spans' decays stand; the last one's place is free
    if constexpr (READS)
      if (threadIdx.x == 0) s.grows[stage ^ 1] = false;
    const bool more = token + C < tokens;
    block.fetch_columns(s.value_gates, args.gv, token);
    cp_async_commit();
    if (more) block.fetch(token + C, stage ^ 1);
    block.template make_chunk_operands<AfterWrite, PRODUCTS>(stage);
    if (more) block.fetch_gates_of(token + C);
    cp_async_commit();
    cp_async_wait<1>();
    __syncthreads();  // the operands stand; the gates of values have arrived

    if constexpr (READS) block.template score<AfterWrite, PRODUCTS>(token, stage);
    const int column = threadIdx.x >> 5 << 4;
    const ColumnsReader<BV, G> gates(column);
    const ColumnsReader<BV, T> values(column);
    float all[2][SUBS];  // decays of columns over whole sub-chunks
#pragma unroll
    for (int m = 0; m < BLOCKS; ++m) {
      float2 x[4];
      gates.load(x, s.value_gates, 16 * m);
#pragma unroll
      for (int p = 0; p < 4; ++p) all[p & 1][2 * m + (p >> 1)] = whole_decay(x[p]);
    }
    Output<T> o = {};
    if constexpr (READS) read_state_by_columns<PRODUCTS, T, BK>(o, S, state_q(s, stage));
    write_state_by_columns<PRODUCTS, BV>(S, s, stage, gates, values, all);
    if constexpr (!READS) {
      if (threadIdx.x < BK) total *= s.decay[threadIdx.x];
#pragma unroll
      for (int x = 0; x < 2; ++x) totals[x] *= product_of(all[x], 0, SUBS);
    } else {
      __syncthreads();  // the scores stand
      read_scores_by_columns<PRODUCTS, BV>(o, s, stage, gates, values, all);

      const int rows = tokens - token, g = threadIdx.x >> 2 & 7, t = threadIdx.x & 3;
      if (!Schedule::all_channels) {
        float* sums = args.sums +
                      ((i64(block.b) * shape.H + block.h) * shape.T + block.span.start + token + 2 * t) * shape.V +
                      block.v_tile + column + g;
        const bool first = args.channel == 0, last = args.channel + BK >= shape.K;
#pragma unroll
        for (int n = 0; n < SUBS; ++n) {
#pragma unroll
          for (int x = 0; x < 4; ++x) {
            if (8 * n + 2 * t + (x & 1) >= rows || column + g + 8 * (x >> 1) >= block.columns) continue;
            float& sum = sums[(x & 1) * shape.V + 8 * (x >> 1)];
            if (!first) o[n / 2][n % 2][x] += sum;
            if (!last) sum = o[n / 2][n % 2][x];
          }
          sums += 8 * shape.V;
        }
        if (!last) continue;
      }
      __syncwarp();  // the warp's values are read, where its outputs come
#pragma unroll
      for (int n = 0; n < SUBS; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x)
          *place<BV>(s.v[stage], 8 * n + 2 * t + (x & 1), column + g + 8 * (x >> 1)) =
              from_float<T>(scale * o[n / 2][n % 2][x]);
      __syncwarp();  // the outputs stand
      T* to = args.o.row(block.b, block.h, block.span.start + token) + block.v_tile + column;
      if (bytes == 16) {
        constexpr int PIECE = 16 / sizeof(T), ACROSS = 16 / PIECE;
        const int lane = threadIdx.x & 31, across = lane % ACROSS * PIECE;
#pragma unroll
        for (int n = 0; n < C * ACROSS / 32; ++n) {
          const int row = n * 32 / ACROSS + lane / ACROSS;
          if (row < rows && column + across < block.columns)
            *reinterpret_cast<uint4*>(to + row * args.o.t + across) =
                *reinterpret_cast<const uint4*>(place<BV>(s.v[stage], row, column + across));
        }
      } else {
        store_slowly<C, BV>(to, args.o.t, s.v[stage], column, rows, block.columns - column);
      }
    }
  }
  block.store_state(S);
  if (!READS && blockIdx.x % block.tiles == 0 && threadIdx.x < block.channels) {
    float* decays = args.channel_decays + i64(block.pair) * 2 * shape.K + args.channel + threadIdx.x;
    decays[0] = total, decays[shape.K] = 1.f;
  }
  if (!READS && args.channel == 0 && (threadIdx.x & 3) == 0) {
    const int column = (threadIdx.x >> 5 << 4) + (threadIdx.x >> 2 & 7);
    float* decays = args.column_decays + i64(block.pair) * shape.V + block.v_tile + column;
    if (column < block.columns) decays[0] = totals[0];
    if (column + 8 < block.columns) decays[8] = totals[1];
  }
}
