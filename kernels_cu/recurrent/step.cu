// what      One token for B sequences; each state is read and written once, in place.
// math      o = scale q^T S', S' = diag(exp g) S + k v^T   (RWKV-6: o = scale q^T (S + diag(u) k v^T))
// shapes    q k g [B, H, K], v o [B, H, V], u [H, K], state [P, H, K, V], slots [B] or null: sequence b has state
//           slots[b] of the P states, or state b
// grid      a block for every (sequence, head, 64 columns of V), sequence slowest: 8 warps if the state is float32, 16
//           if it is float64, else 4. A block takes 64 channels at a time, a lane four pieces of 16 bytes of them. If
//           rows of the state are not `aligned16`, a warp takes 4 channels at a time, and a piece is one number
// smem      [warps, 64]: each warp's sums over its channels, of which o is the sum
// barriers  one: the warps' sums are in shared memory
// numerics  float32, for every type of the stored state; float64 if the data or the state are float64
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19
// limits    the last axis of the state is contiguous
//
// A lane starts the loads of its four pieces before it stores the first: that hides the memory's latency, since the
// compiler may not move a load before a store. No warp waits for another before it stores: the shorter the time between
// the load and the store of an address, the faster.
#include "cards.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Wider<T, S>: double if numbers of T or S are computed in it, else float; widened, narrowed: convert to it and back
//   multiply_add(a, x, b): a x + b; decay_of(g): e^g. SINCE_SM100: whether the card is of the generation 10.0 or later
//   ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6)

constexpr int BV = 64;
template <typename S> constexpr int WARPS = 2 * sizeof(S);
// The least number of blocks on a multiprocessor: the compiler gives a thread no more registers than that allows.
// Without this bound it orders the loads of a half-precision state so that they take a sixth longer. From sm_100 on
// five blocks spill registers; a float32 state has no bound (0) there, since even three would.
template <typename R, typename S>
constexpr int BLOCKS = sizeof(R) == 8   ? 1
                       : sizeof(S) == 4 ? (SINCE_SM100 ? 0 : 4)
                       : SINCE_SM100    ? 4
                                        : 5;

template <typename T, typename G, typename S> struct Args {
  StridedRows<const T> q, k, v;  // the token stride is not used
  StridedRows<const G> g;
  StridedRows<T> o;
  const Wider<T, S>* u;  // [H, K], null for GLA
  StridedRows<S> state;  // rows are channels
  const i64* slots;      // null: sequence b has state b
  i64 H, K, V;
  double scale;
  i64 aligned16;  // whether every row of the state starts on 16 bytes and is a multiple of 16 bytes
};

// N neighbouring columns of a row of the state, loaded and stored at once.
template <typename S, int N> struct alignas(N * sizeof(S)) Piece {
  S x[N];
};

// What one channel has of the token; R: the type of the arithmetic. u: 0 for GLA.
template <typename R> struct Channel {
  R q, k, decay, u;
};

// Loads channel c of the token of sequence b and head h.
template <class ReadOrder, typename T, typename G, typename S>
__device__ __forceinline__ Channel<Wider<T, S>> channel_of(const Args<T, G, S>& args, i64 b, i64 h, int c) {
  using R = Wider<T, S>;
  return {widened(args.q.row(b, h, 0)[c]), widened(args.k.row(b, h, 0)[c]),
          decay_of(R(widened(args.g.row(b, h, 0)[c]))), ReadOrder::reads_before_write ? args.u[h * args.K + c] : R(0)};
}

// The Channel that lane `lane` of the warp holds as x.
template <class ReadOrder, typename R> __device__ __forceinline__ Channel<R> from_lane(const Channel<R>& x, int lane) {
  const auto shuffle = [&](R y) { return __shfl_sync(0xffffffffu, y, lane); };
  return {shuffle(x.q), shuffle(x.k), shuffle(x.decay), ReadOrder::reads_before_write ? shuffle(x.u) : R(0)};
}

// Computes the state after the token, of a warp's channels and 64 columns from tile_column on, in pieces of PIECE
// neighbouring columns. Stores the sums over these channels in `part` [64]. For channels and columns that do not exist
// the token's first numbers are read instead, which takes no branch.
template <class ReadOrder, int PIECE, typename T, typename G, typename S>
__device__ __forceinline__ void apply_token(Wider<T, S>* part, const Args<T, G, S>& args, i64 b, i64 h, i64 tile_column,
                                            int warp) {
  using R = Wider<T, S>;
  constexpr int CHANNELS = PIECE > 1 ? 64 / WARPS<S> : 4;  // of a warp at a time
  // A row of the state is a channel, of whose 64 columns ROW_LANES lanes have LANE_PIECES pieces each. A warp has ROWS
  // rows at once, and so a lane LANE_CHANNELS rows, ROWS apart.
  constexpr int LANE_PIECES = PIECE * 32 < BV ? BV / (PIECE * 32) : 1, ROW_LANES = BV / (PIECE * LANE_PIECES),
                ROWS = 32 / ROW_LANES, LANE_CHANNELS = CHANNELS / ROWS;
  static_assert(ROW_LANES * PIECE * LANE_PIECES == BV && ROWS * ROW_LANES == 32 && LANE_CHANNELS * ROWS == CHANNELS,
                "a warp's lanes have all of its channels and columns");
  static_assert(CHANNELS <= 32, "each of the warp's channels is loaded by a lane");
  const int lane = threadIdx.x % 32, row = lane / ROW_LANES, first_column = lane % ROW_LANES * PIECE, K = int(args.K);
  const i64 column = tile_column + first_column, channel_stride = ROWS * args.state.token_stride;
  const auto column_exists = [&](int m) { return column + m * 32 * PIECE < args.V; };
  S* address = args.state.row(args.slots ? args.slots[b] : b, h, warp * CHANNELS + row) + column;
  R o[LANE_PIECES][PIECE] = {};
  for (int first = warp * CHANNELS; first < K;
       first += WARPS<S> * CHANNELS, address += WARPS<S> * CHANNELS * args.state.token_stride) {
    const auto row_exists = [&](int n) { return first + row + n * ROWS < K; };
    Piece<S, PIECE> state[LANE_CHANNELS][LANE_PIECES];
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; ++n)
#pragma unroll
      for (int m = 0; m < LANE_PIECES; ++m)
        if (row_exists(n) && column_exists(m))
          state[n][m] = *reinterpret_cast<const Piece<S, PIECE>*>(address + n * channel_stride + m * 32 * PIECE);
    const int c = first + lane % CHANNELS;  // each lane loads one channel, and from_lane hands it to the others
    const Channel<R> loaded = channel_of<ReadOrder>(args, b, h, c < K ? c : 0);
    R v[LANE_PIECES][PIECE];
#pragma unroll
    for (int m = 0; m < LANE_PIECES; ++m) {
      const T* from = args.v.row(b, h, 0) + (column_exists(m) ? column + m * 32 * PIECE : 0);
#pragma unroll
      for (int i = 0; i < PIECE; ++i) v[m][i] = widened(from[i]);
    }
#pragma unroll
    for (int n = 0; n < LANE_CHANNELS; ++n) {
      const Channel<R> channel = from_lane<ReadOrder>(loaded, n * ROWS + row);
#pragma unroll
      for (int m = 0; m < LANE_PIECES; ++m) {
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
          const R before = widened(state[n][m].x[i]), kv = channel.k * v[m][i],
                  after = multiply_add(channel.decay, before, kv);
          const R read = ReadOrder::reads_before_write ? multiply_add(channel.u, kv, before) : after;
          const R sum = multiply_add(channel.q, read, o[m][i]);
          o[m][i] = row_exists(n) ? sum : o[m][i];
          state[n][m].x[i] = narrowed<S>(FloatOrDouble<S>(after));
        }
        if (row_exists(n) && column_exists(m))
          *reinterpret_cast<Piece<S, PIECE>*>(address + n * channel_stride + m * 32 * PIECE) = state[n][m];
      }
    }
  }
#pragma unroll
  for (int m = 0; m < LANE_PIECES; ++m)
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
      for (int distance = ROW_LANES; distance < 32; distance *= 2)
        o[m][i] += __shfl_xor_sync(0xffffffffu, o[m][i], distance);
      if (row == 0) part[first_column + m * 32 * PIECE + i] = o[m][i];
    }
}

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of q, k, v and o; G: that of g,
// float64 only if T is; S: that of the stored state. Wider<T, S> (real.cuh): the type of the arithmetic.
template <class ReadOrder, typename T, typename G, typename S>
__global__ void __launch_bounds__(32 * WARPS<S>, BLOCKS<Wider<T, S>, S>) recurrent_step(const Args<T, G, S> args) {
  using R = Wider<T, S>;
  static_assert(32 * WARPS<S> >= BV, "a thread adds the warps' sums of each column");
  R(*parts)[BV] = reinterpret_cast<R(*)[BV]>(dynamic_smem());
  const u32 tiles = u32((args.V + BV - 1) / BV), H = u32(args.H), head = blockIdx.x / tiles, h = head % H, b = head / H;
  const i64 tile_column = blockIdx.x % tiles * BV;
  const int warp = threadIdx.x / 32;
  if (args.aligned16) apply_token<ReadOrder, 16 / sizeof(S)>(parts[warp], args, b, h, tile_column, warp);
  else apply_token<ReadOrder, 1>(parts[warp], args, b, h, tile_column, warp);
  __syncthreads();  // the warps' sums are in shared memory
  if (threadIdx.x >= BV || tile_column + threadIdx.x >= args.V) return;
  R sum = 0;
#pragma unroll
  for (int n = 0; n < WARPS<S>; ++n) sum += parts[n][threadIdx.x];
  args.o.row(b, h, 0)[tile_column + threadIdx.x] = narrowed<T>(FloatOrDouble<T>(R(args.scale) * sum));
}
