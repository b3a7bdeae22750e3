// what      The summary of a segment for the forward pass on every card, if sequences are cut: the final state of its
//           tokens from zero, and their decay.
// math      S = sum_j (k_j decayed to the segment's end)^T v_j, the last tokens first, so that S itself never decays
// shapes    k g [B, H, T, K], v [B, H, T, V]; left [N, parts, H, K, V] and decays [N, parts, H, 2, K] float32, of N
//           segments: the final state of each part's tokens; the segment's decay in the first part, ones in the others
// grid      a block for every (computed segment, part, head, BV columns of V), segment slowest, of BK channels; a warp
//           for every 16. Parts have the STEPs of a segment in turn; of other parts' STEPs a block reads the gates only
// smem      STAGES times STEP tokens
// barriers  one every STEP tokens: they have been copied, and the STEP before the previous one has been read. It also
//           votes whether the walk ends here: the gates of all channels add up to FORGOTTEN_NATS and none was positive
// numerics  S in float32 accumulators; products as in fragments.cuh. A token's decay is exp of the sum of the gates
//           after it; gates are never subtracted. If positive gates take that sum beyond float32's range, a small key
//           times the decay may still be in it: then the decay is two factors (`take_half`). What is left out is e^-48
//           of a state (1.4e-21), which changes no float32 of about that state's size
// source    Yang et al., 2024, section 4; Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    BK and BV of 64, 128; more channels are more launches
#include "decays.cuh"
#include "fragments.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int STAGES = 3;
template <typename T> constexpr int STEP = 64 / sizeof(T);  // tokens of a stage
template <typename T> constexpr int OWN = STEP<T> / 4;      // neighbouring tokens of a stage that a lane decays

template <typename T, typename G> struct Args {
  Rows<const T> k, v;
  Rows<const G> g;
  float *left, *decays;
  Shape shape;
  i64 channel;     // the first of this launch
  i64 of, needed;  // segments of a sequence, and how many of them, from the first on, are computed
  i64 parts;       // blocks that share a segment's tokens
  i64 bytes;       // the largest of 16, 8, 4 and 2 of which all rows of k, v and g are multiples
};

// A tile [STEP, COLS] of tokens. When all lanes read their n-th tokens, they touch every bank once.
template <typename T, typename E, int COLS> struct alignas(16) Tile {
  static constexpr int PIECE = 16 / sizeof(E), LD = COLS + PIECE, BETWEEN = 2 * PIECE;
  E x[STEP<T> * LD + 3 * BETWEEN];

  // The place of the n-th token of lanes with lane % 4 = t.
  __device__ __forceinline__ static int place(int t, int n, int col) {
    return t * (OWN<T> * LD + BETWEEN) + n * LD + col;
  }
};

template <typename T, typename G, int BK, int BV> struct Stage {
  Tile<T, T, BK> k;
  Tile<T, T, BV> v;
  Tile<T, G, BK> g;
};
template <typename T, typename G, int BK, int BV> struct Shared {
  Stage<T, G, BK, BV> stages[STAGES];
  u32 grows[BK / 16];  // of each warp: whether a gate was positive, before which nothing may be left out
};

// Starts copying rows that are no multiples of 16 bytes. Not inline: most rows are.
template <int BYTES, int THREADS, typename T, typename E, int COLS>
__device__ __forceinline__ void copy_rows(Tile<T, E, COLS>& to, const E* from, i64 stride, int rows, int columns) {
  constexpr int PIECE = BYTES / sizeof(E), ACROSS = COLS / PIECE;
  constexpr int UNROLLED =
      BYTES >= 4 ? 2 : 4;  // several loads at a time, since a thread waits for loads, not for copies
#pragma unroll UNROLLED
  for (int at = threadIdx.x; at < STEP<T> * ACROSS; at += THREADS) {
    const int row = at / ACROSS, col = at % ACROSS * PIECE;
    const bool inside = row < rows && col < columns;
    E* const here = to.x + to.place(row / OWN<T>, row % OWN<T>, col);
    if constexpr (BYTES >= 4) cp_async<BYTES>(here, from + row * stride + col, inside);
    else *here = inside ? from[row * stride + col] : from_float<E>(0.f);
  }
}
template <int THREADS, typename T, typename E, int COLS>
__device__ __noinline__ void copy_slowly(Tile<T, E, COLS>& to, const E* from, i64 stride, int rows, int columns,
                                         int bytes) {
  if (bytes == 8) copy_rows<8, THREADS>(to, from, stride, rows, columns);
  else if (bytes == 4) copy_rows<4, THREADS>(to, from, stride, rows, columns);
  else copy_rows<sizeof(E), THREADS>(to, from, stride, rows, columns);
}

// Copies the STEPs of an array backwards, each `every` STEPs before the last copied one; zeros behind the segment's
// end. If rows are multiples of 16 bytes, a thread copies the same pieces of every AT_ONCE-th row.
template <int THREADS, typename T, typename E, int COLS> struct Walk {
  using Columns = Tile<T, E, COLS>;
  static constexpr int ACROSS = COLS / Columns::PIECE, AT_ONCE = THREADS / ACROSS;
  static_assert(AT_ONCE % OWN<T> == 0);
  const E* from;

  __device__ __forceinline__ static int row() { return threadIdx.x / ACROSS; }
  __device__ __forceinline__ static int col() { return threadIdx.x % ACROSS * Columns::PIECE; }
  __device__ __forceinline__ Walk(const E* rows, i64 stride, int first, int bytes)
      : from(rows + first * STEP<T> * stride + (bytes == 16 ? row() * stride + col() : 0)) {}

  __device__ __forceinline__ void copy(Columns& to, i64 stride, int every, int rows, int columns) {
    const int left = col() < columns ? rows - row() : 0;
    E* const here = to.x + to.place(row() / OWN<T>, row() % OWN<T>, col());
#pragma unroll
    for (int down = 0; down < STEP<T>; down += AT_ONCE)
      cp_async<16>(here + to.place(down / OWN<T>, 0, 0), from + down * stride, down < left);
    from -= every * STEP<T> * stride;
  }
  __device__ __forceinline__ void copy(Columns& to, i64 stride, int every, int rows, int columns, int bytes) {
    copy_slowly<THREADS>(to, from, stride, rows, columns, bytes);
    from -= every * STEP<T> * stride;
  }
};

// x = this lane's tokens of channel `col` + lane / 4.
template <typename T, typename E, int COLS>
__device__ __forceinline__ void load_own(float (&x)[OWN<T>], const Tile<T, E, COLS>& tile, int col) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(E) == 2) {
    static_assert(OWN<T> == 8);
    u32 r[4];
    ldmatrix_x4_trans(r, tile.x + tile.place(lane >> 1 & 3, (lane >> 3) * 2 + (lane & 1), col));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack(r[n], E{});
      x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int n = 0; n < OWN<T>; ++n) x[n] = tile.x[tile.place(t, n, col + g)];
  }
}

constexpr float GROWN = 60.f;  // nats: the largest sum of gates to which those of a STEP are added in one factor

// Multiplies x by exp of half of (nats + more), and leaves the other half in `nats`: for factors beyond float32's
// range. 0 stays 0.
template <int N> __device__ __forceinline__ void take_half(float (&x)[N], float (&nats)[N], float more) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    nats[i] = fminf(0.5f * (nats[i] + more), 87.f);
    x[i] *= decay_of(nats[i]);
  }
}

// Loads two right operands side by side: columns col + 0...15 of every lane's tokens 4m + 0...3.
template <class R, typename T, int COLS>
__device__ __forceinline__ void load_values(R (&b)[2], const Tile<T, T, COLS>& tile, int m, int col) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(T) == 2) {
    u32 r[4];
    const int n = (lane >> 3 & 1) * 2 + (lane & 1);
    ldmatrix_x4_trans(r, tile.x + tile.place(lane >> 1 & 3, n + 4 * m, col + (lane >> 4) * 8));
#pragma unroll
    for (int n = 0; n < 4; ++n) b[n >> 1].set(n & 1, r[n], T{});
  } else {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* two = tile.x + tile.place(t, 4 * m + (n & 1) * 2, col + (n >> 1) * 8 + g);
      b[n >> 1].set(n & 1, float2{two[0], two[tile.LD]});
    }
  }
}

// The segment n, part and head h of a block, and its first column; its results have index `pair`.
template <int BV> struct SegmentTile {
  u32 n, part, h, pair;
  int v_tile;

  template <class Args> __device__ __forceinline__ SegmentTile(const Args& args, u32 block) {
    const u32 tiles = u32(args.shape.V + BV - 1) / BV, H = u32(args.shape.H), parts = u32(args.parts);
    const u32 index = block / tiles / H / parts, needed = u32(args.needed);
    n = index / needed * u32(args.of) + index % needed, part = block / tiles / H % parts, h = block / tiles % H;
    pair = (n * parts + part) * H + h, v_tile = block % tiles * BV;
  }
};

template <typename T, typename G, int PRODUCTS, int BK, int BV>
__global__ void __launch_bounds__(2 * BK, 256 / BK) gated_segment_states(const Args<T, G> args) {
  using M = Math<T, PRODUCTS>;
  constexpr int THREADS = 2 * BK, DEPTHS = STEP<T> / 16;
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, own = 16 * (threadIdx.x >> 5);
  const SegmentTile<BV> work(args, blockIdx.x);
  const u32 count = u32(shape.count), parts = u32(args.parts), part = work.part, b = work.n / count;
  const Span span = tokens_of(shape, work.n % count);
  const int tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(min(shape.K - args.channel, i64(BK))), columns = int(min(shape.V - work.v_tile, i64(BV)));
  const int steps = (tokens + STEP<T> - 1) / STEP<T>, first = steps - 1 - part;

  Walk<THREADS, T, T, BK> k(args.k.row(b, work.h, span.start) + args.channel, args.k.t, first, bytes);
  Walk<THREADS, T, T, BV> v(args.v.row(b, work.h, span.start) + work.v_tile, args.v.t, first, bytes);
  Walk<THREADS, T, G, BK> gates(args.g.row(b, work.h, span.start) + args.channel, args.g.t, steps - 1, bytes);
  const auto is_mine = [&](int step) { return u32(step) % parts == part; };
  const auto fetch = [&](int step) {
    if (step < steps) {
      auto& to = s.stages[step % STAGES];
      const int rows = tokens - STEP<T> * (steps - 1 - step);  // tokens from this step on
      const bool own = is_mine(step);
      if (bytes == 16) {
        gates.copy(to.g, args.g.t, 1, rows, channels);
        if (own) k.copy(to.k, args.k.t, parts, rows, channels), v.copy(to.v, args.v.t, parts, rows, columns);
      } else {
        gates.copy(to.g, args.g.t, 1, rows, channels, bytes);
        if (own)
          k.copy(to.k, args.k.t, parts, rows, channels, bytes), v.copy(to.v, args.v.t, parts, rows, columns, bytes);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);

  float S[BV / 16][2][4] = {};  // channels own + g and own + g + 8, pairs of columns
  float behind[2];              // sums of their gates after this step; channels beyond K count as forgotten
#pragma unroll
  for (int row = 0; row < 2; ++row) behind[row] = own + g + 8 * row < channels ? 0.f : FORGOTTEN_NATS;
  const bool looks = (threadIdx.x & 31) == 0;  // the lane that writes and reads `grows`
  u32& grows = s.grows[threadIdx.x >> 5];
  if (looks) grows = 0;
  int step = 0;
#pragma unroll 1
  for (; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();
    const bool kept = looks && grows || !(behind[0] <= FORGOTTEN_NATS && behind[1] <= FORGOTTEN_NATS);
    if (!__syncthreads_or(kept)) break;  // this step's tokens have been copied; the previous ones have been read
    fetch(step + STAGES - 1);
    const auto& in = s.stages[step % STAGES];
    const bool grown = __any_sync(0xffffffffu, behind[0] > GROWN || behind[1] > GROWN);
    const bool mine = is_mine(step);
    Left<M> a[DEPTHS];
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      float gate[OWN<T>], sum = 0.f, most = 0.f;
      load_own(gate, in.g, own + 8 * row);
#pragma unroll
      for (int i = OWN<T> - 1; i >= 0; --i) {
        const float here = gate[i];
        gate[i] = sum;
        sum += here;
        most = fmaxf(most, here);
      }
      if (__any_sync(0xffffffffu, most > 0.f) && looks) grows = 1;
      const Around lanes = sums(sum);
      float others = lanes.behind + behind[row];
      behind[row] += lanes.all;
      if (!mine) continue;
      float key[OWN<T>];
      load_own(key, in.k, own + 8 * row);
      if (grown) take_half(key, gate, others), others = 0.f;
      others *= LOG2E;
#pragma unroll
      for (int i = 0; i < OWN<T>; ++i) key[i] *= exp2_approx(fmaf(gate[i], LOG2E, others));
#pragma unroll
      for (int n = 0; n < OWN<T> / 2; ++n) a[n / 2].set(n % 2 * 2 + row, float2{key[2 * n], key[2 * n + 1]});
    }
    if (!mine) continue;
#pragma unroll
    for (int m = 0; m < DEPTHS; ++m)
#pragma unroll
      for (int x = 0; x < BV / 16; ++x) {
        RightData<M, T> values[2];
        load_values(values, in.v, m, 16 * x);
        multiply(S[x], a[m], values);
      }
  }
  cp_async_wait<0>();

  const SegmentTile<BV> done(args, opaque(blockIdx.x));  // computed again, since the loop needs the registers
  float* left = args.left + i64(done.pair) * shape.K * shape.V;
#pragma unroll
  for (int x = 0; x < BV / 8; ++x)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = own + g + 8 * (i >> 1), column = 8 * x + 2 * t + (i & 1);
      if (channel < channels && column < columns)
        left[(args.channel + channel) * shape.V + done.v_tile + column] = S[x / 2][x % 2][i];
    }
  if (t == 0 && done.v_tile == 0)
    for (int row = 0; row < 2; ++row) {
      const int channel = own + g + 8 * row;
      float* decays = args.decays + i64(done.pair) * 2 * shape.K + args.channel + channel;
      const float all = step < steps ? 0.f : decay_of(behind[row]);
      if (channel < channels) decays[0] = done.part ? 1.f : all, decays[shape.K] = 1.f;
    }
}
