// what      GLA and RWKV-6 forward: q, k, v, g are read once, o is written once, nothing else moves.
// math      per chunk:  o = scale ((q decayed) S + A v),   S <- diag(decay) S + (k decayed)^T v
// shapes    q k g [B, H, T, K], v o [B, H, T, V], u [H, K], sums [B, H, T, V] float32, initial and final state
//           [N, H, K, V] float32; SegmentState: decays [N, H, 2, K]
// grid      a block for every (sequence, head, BV columns of V), sequence slowest; a warp for every 16 of the columns
// smem      Shared: two chunks of inputs, operands of the present one's scores, the scores
// barriers  one, then three a chunk: a chunk has arrived, its decays stand | its operands stand | its scores stand
// numerics  forward_operands.cuh says where tokens meet; S stays in float32 accumulators. bfloat16 data: products in
//           bfloat16, scores as two numbers. Others: tf32, PRODUCTS of them for float32 (fragments.cuh)
// source    Yang et al., 2024, section 4; Peng et al., 2024, eq. 18-19
// limits    BK and BV of 64, 128, BV also of 256; more channels by SplitChannels, a launch for every BK, each adding to
//           `sums`
#include "read_order.cuh"
#include "gated/forward_block.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

template <typename T, typename G> struct Args {
  Rows<const T> q, k, v;
  Rows<const G> g;
  Rows<T> o;
  const float *u, *initial;  // [H, K] and [N, H, K, V]; null where there is none
  float* final;              // [N, H, K, V] or null
  Shape shape;
  double scale;
  float* sums;     // o of the channels before these, for those after these; null where these are all
  float* decays;   // SegmentState: of all tokens, then ones
  i64 channel;     // the first one
  i64 of, needed;  // of so many segments in turn so many are computed
  i64 bytes;       // all rows of q, k, v, g and o are whole pieces of so many: 16, 8, 4 or 2
};

// A lane's outputs one by one, out of the way of pairs. sums: null, or where those of the channels before are unless
// these are the `first`, and where these go unless they are the `last`.
template <typename T, int SHARES>
__device__ __noinline__ void store_slowly(const Output<T, SHARES>& o, T* to, i64 stride, float* sums, i64 sums_stride,
                                          float scale, int rows, int columns, bool first, bool last) {
#pragma unroll 1
  for (int n = 0; n < CHUNK<T> / 2 / SHARES; ++n) {
    const int row = n / 4 * 8, column = n % 4 / 2 * 8 + n % 2;
    if (row >= rows || column >= columns) continue;
    float x = o[row / 16][column / 8][row / 8 % 2 * 2 + n % 2];
    float* sum = sums + row * sums_stride + column;
    if (!first) x += *sum;
    if (last) to[row * stride + column] = from_float<T>(scale * x);
    else *sum = x;
  }
}

template <class ReadOrder, class Schedule, typename T, typename G, int PRODUCTS, int BK, int BV, int SHARES>
__global__ void __launch_bounds__(2 * BV * SHARES, RESIDENT<Schedule, T, BK, BV, SHARES>)
    gated_forward(const Args<T, G> args) {
  using Mine = Block<Args<T, G>, Schedule, T, G, BK, BV, SHARES>;
  constexpr int C = Mine::C, CHANNELS = Mine::CHANNELS;
  constexpr bool READS = Schedule::reads;
  auto& s = *reinterpret_cast<typename Mine::Storage*>(dynamic_smem());
  const Mine block(args, s);
  const Shape& shape = args.shape;
  if (!READS && block.n % u32(args.of) >= u32(args.needed)) return;

  // Whether outputs, and what they are the sum of, go to memory in pairs.
  const bool in_pairs = block.bytes >= int(2 * sizeof(T)) && (Schedule::all_channels || shape.V % 2 == 0);
  const float scale = float(args.scale);

  State<CHANNELS> S;
  block.start_state(S);
  if constexpr (READS) {
    if (ReadOrder::reads_before_write)
      for (int c = threadIdx.x; c < BK; c += Mine::THREADS)
        s.u[c] = c < block.channels ? args.u[block.h * shape.K + args.channel + c] : 0.f;
    block.clear_scores();
  }

  float total = 1.f;  // SegmentState: the decay of channel threadIdx.x
  const int tokens = block.tokens;
  if (tokens) {
    block.fetch(0, 0);
    block.fetch_gates_of(0);
    cp_async_commit();
  }
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
    if (more) block.fetch(token + C, stage ^ 1);
    block.template make_chunk_operands<ReadOrder, PRODUCTS>(stage);
    if (more) block.fetch_gates_of(token + C);
    cp_async_commit();
    __syncthreads();  // the operands stand

    const int warp = threadIdx.x >> 5, share = Mine::share_of(warp), strip = Mine::strip_of(warp);
    Output<T, SHARES> o;
    if constexpr (READS) {
      block.template score<ReadOrder, PRODUCTS>(token, stage);
      Output<T> all = {};
      read_state<PRODUCTS, T, BK>(all, S, state_q(s, stage), share * CHANNELS);
      if constexpr (SHARES == 2) hand_over<T>(o, all, s.sums[share][strip], share);
      else copy_outputs(o, all);
    }
    write_state<PRODUCTS, T, BK, BV>(S, state_k(s, stage), s.v[stage], s.decay, share * CHANNELS, 16 * strip);
    if (!READS && threadIdx.x < BK) total *= s.decay[threadIdx.x];
    if constexpr (READS) {
      __syncthreads();  // the scores stand
      if constexpr (SHARES == 2) take_over<T>(o, s.sums[share ^ 1][strip]);
      read_scores<ScoreStorage<Schedule, T, BK>, PRODUCTS, BV, SHARES, T>(o, s.A, s.v[stage], 16 * strip, share);
      const int thread = opaque(threadIdx.x), t = thread & 3, g = (thread >> 2 & 7) + (SHARES > 1 ? 16 * share : 0);
      const int column = 16 * Mine::strip_of(thread >> 5) + 2 * t;
      T* to = args.o.row(block.b, block.h, block.span.start + token + g) + block.v_tile + column;
      const int rows = tokens - token - g;
      const bool first = Schedule::all_channels || args.channel == 0;
      const bool last = Schedule::all_channels || args.channel + BK >= shape.K;
      float* sums = nullptr;
      if (!Schedule::all_channels)
        sums = args.sums + ((i64(block.b) * shape.H + block.h) * shape.T + block.span.start + token + g) * shape.V +
               block.v_tile + column;
      if (in_pairs) {
#pragma unroll
        for (int n = 0; n < C / 8 / SHARES; ++n) {
#pragma unroll
          for (int across = 0; across < 2; ++across) {
            if (8 * n >= rows || column + 8 * across >= block.columns) continue;
            float x[2] = {o[n / 2][across][n % 2 * 2], o[n / 2][across][n % 2 * 2 + 1]};
            Piece<2, float> sum;
            if (!first) {
              sum.load(sums + 8 * across);
              x[0] += sum.get(0), x[1] += sum.get(1);
            }
            if (last) {
              const float scaled[2] = {scale * x[0], scale * x[1]};
              Piece<2, T> two;
              two.set(scaled);
              two.store(to + 8 * across);
            } else {
              sum.set(x);
              sum.store(sums + 8 * across);
            }
          }
          to += 8 * args.o.t;
          if (!Schedule::all_channels) sums += 8 * shape.V;
        }
      } else {
        Output<T, SHARES> copy;
        copy_outputs(copy, o);
        store_slowly<T, SHARES>(copy, to, args.o.t, sums, shape.V, scale, rows, block.columns - column, first, last);
      }
    }
  }
  block.store_state(S);
  if (!READS && blockIdx.x % block.tiles == 0 && threadIdx.x < block.channels) {
    float* decays = args.decays + i64(block.pair) * 2 * shape.K + args.channel + threadIdx.x;
    decays[0] = total, decays[shape.K] = 1.f;
  }
}
