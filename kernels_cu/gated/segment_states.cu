// what      The summary of a segment for the forward pass on every card, if the host cuts sequences into segments: the
//           state that the segment's tokens leave if it starts from zero, and the decay over them. scan_segments.cu
//           joins summaries.
// math      S = sum_j (k_j e^(sum of the log gates g after j))^T v_j over the segment's tokens j, the last one first,
//           so that S itself never decays
// shapes    k g [B, H, T, K], v [B, H, T, V]; float32, of N segments: states [N, parts, H, K, V] and, for every BV
//           columns, decays [N, parts, H, ceil(V / BV), 2, K]. A segment's state is the sum of its parts' states. The
//           product of both rows of `decays` over all parts is the segment's decay: it is in the first row of the first
//           part, all others are ones, since scan_segments.cu takes two rows from every kernel of summaries
// grid      a block for every (computed segment, part, head, BK channels, BV columns of V), segment slowest; a warp for
//           every 16 channels. A step is STEP tokens; steps are counted from the segment's last one back, and so
//           taken. Parts take the steps of a segment in turn; of other parts' steps a block reads the gates only
// smem      Stage: k, v and g of a step, STAGES times; copied by all threads, read by all warps
// barriers  one a step: the step has been copied, and the stage that is filled next has been read. The block stops, and
//           leaves out earlier tokens, after two votes:
//             at that barrier: the gates read so far sum to -48 (FORGOTTEN_NATS) or less in all channels, and none is
//             above 0. The block assumes that gates which it does not read are like these: growth by more than 30
//             nats before them is lost (docs/gates.md)
//             at one more: each number of S, of this part alone, is at least 2^21 times the decay over the gates read.
//             So an earlier state of size 1 would add at most 5e-7 of it (hides_forgotten in tensor.cuh). Gates of
//             later segments multiply both alike
//           Each part votes by itself: others may go on, and add what is still theirs. If part 0, which stores the
//           segment's decay, stops, it stores 0: the state before the segment is dropped, too, in the block's columns
// numerics  S in float32 accumulators; products as in fragments.cuh. A token's decay is exp of the sum of the gates
//           after it; gates are never subtracted. If positive gates take the decay beyond float32's range, a small key
//           times the decay may still be in it: then the decay is two factors (multiply_by_half). Tokens that are left
//           out would be decayed by e^-48 (1.4e-21): float32's rounding of later tokens' terms (6e-8) is larger unless
//           the terms left out are 4e13 times as large (6e-8 / 1.4e-21)
// source    Yang et al., 2024, section 4; Blelloch, 1990, "Prefix sums and their applications", section 1.4.1
// limits    BK and BV of 64, 128; if T is float16, BV of 64
// tests     test_portable_forward; test_segments, its cases "portable" and every_card, for what is forgotten
//
// Names. Math<T, PRODUCTS> (fragments.cuh) is how data T are multiplied. A product is D[16, 8] += A[16, 16] B[16, 8]:
// Left and RightData are a lane's part of A and B; set(p, pair) sets the p-th of its pairs of numbers, rounded;
// set(p, word, T{}): given as a word of two numbers T. accumulate(d, a, b): d += A B for two B; if both are split,
// A B is added in float32, which rounds, since tensor cores cut sums off. DEPTHS: products of a step. g, t: lane / 4
// and lane % 4, as in fragments.cuh; in.g, args.g, to.g: the gates. row_sequences: segments of a batch row; tokens_of:
// a segment's tokens in it. decay_of(x): e^x. at_most: the smaller one, but NaN stays NaN. four_lane_sums(x)
// (decays.cuh): the sums of x over the four lanes with the same lane / 4: `all`, and `after`, of the lanes with a
// larger lane % 4. opaque(x) (ptx.cuh): x, but what depends on it is computed again
#include "decays.cuh"
#include "fragments.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int STAGES = 3;                                       // steps in shared memory at a time
template <typename T> constexpr int STEP = 64 / sizeof(T);      // tokens of a stage
template <typename T> constexpr int LANE_TOKENS = STEP<T> / 4;  // neighbouring tokens of a stage that a lane decays

template <typename T, typename G> struct Args {
  StridedRows<const T> k, v;
  StridedRows<const G> g;
  float *states, *decays;
  Shape shape;             // its sequences are the segments, of all sequences of a batch row together
  i64 segments, computed;  // segments of a sequence, and how many of them, from the first on, are computed
  i64 parts;               // blocks that share a segment's tokens
  i64 bytes;               // the largest of 16, 8, 4 and 2 that divides the start and the length of all rows
};

// A tile [STEP tokens, COLS channels or columns] of type E. LD: the distance of neighbouring tokens; BETWEEN: a gap
// between the tokens of neighbouring lanes, so that lanes that read their n-th tokens touch every bank once.
template <typename T, typename E, int COLS> struct alignas(16) Tile {
  static constexpr int PIECE = 16 / sizeof(E), LD = COLS + PIECE, BETWEEN = 2 * PIECE;
  E x[STEP<T> * LD + 3 * BETWEEN];

  // The index of column `col` of the n-th token of the lanes with lane % 4 = t: the tile's token LANE_TOKENS t + n.
  __device__ __forceinline__ static int place(int t, int n, int col) {
    return t * (LANE_TOKENS<T> * LD + BETWEEN) + n * LD + col;
  }
};

template <typename T, typename G, int BK, int BV> struct Stage {
  Tile<T, T, BK> k;
  Tile<T, T, BV> v;
  Tile<T, G, BK> g;
};
template <typename T, typename G, int BK, int BV> struct Shared {
  Stage<T, G, BK, BV> stages[STAGES];
  u32 has_positive_gate[BK / 16];  // of each warp, so far: see barriers
};

// Starts copying a step's rows in pieces of BYTES bytes; rows from `rows` on and columns from `columns` on become zero.
// stride: the distance of tokens in memory.
template <int BYTES, int THREADS, typename T, typename E, int COLS>
__device__ __forceinline__ void copy_rows(Tile<T, E, COLS>& to, const E* from, i64 stride, int rows, int columns) {
  constexpr int PIECE = BYTES / sizeof(E), ACROSS = COLS / PIECE;
  constexpr int UNROLLED = BYTES >= 4 ? 2 : 4;  // more for loads, for which a thread waits, than for cp.async
#pragma unroll UNROLLED
  for (int index = threadIdx.x; index < STEP<T> * ACROSS; index += THREADS) {
    const int row = index / ACROSS, col = index % ACROSS * PIECE;
    const bool inside = row < rows && col < columns;
    E* const place = to.x + to.place(row / LANE_TOKENS<T>, row % LANE_TOKENS<T>, col);
    if constexpr (BYTES >= 4) cp_async<BYTES>(place, from + row * stride + col, inside);
    else *place = inside ? from[row * stride + col] : from_float<E>(0.f);
  }
}
// copy_rows, for rows that are no multiples of 16 bytes, but of `bytes`. Not inlined, since it is rare.
template <int THREADS, typename T, typename E, int COLS>
__device__ __noinline__ void copy_unaligned_rows(Tile<T, E, COLS>& to, const E* from, i64 stride, int rows, int columns,
                                                 int bytes) {
  if (bytes == 8) copy_rows<8, THREADS>(to, from, stride, rows, columns);
  else if (bytes == 4) copy_rows<4, THREADS>(to, from, stride, rows, columns);
  else copy_rows<sizeof(E), THREADS>(to, from, stride, rows, columns);
}

// Copies steps of an array in memory to tiles. Each call of `copy` copies one step: first the segment's step
// `first_step`, counted from its start, then always the one that is `every` steps earlier. rows: the segment's tokens
// from the step on; columns: those of the array; what is beyond becomes zero. bytes: as in Args. If it is 16, a thread
// copies the same 16-byte piece of every AT_ONCE-th row, which all have the same n in Tile::place.
// `from` is the next step's first row, or, if `bytes` is 16, this thread's first piece of it: then `copy` without
// `bytes` must be called. If no step is left, in a part without steps from the start, it is before the segment, unread.
template <int THREADS, typename T, typename E, int COLS> struct StepCopier {
  using Columns = Tile<T, E, COLS>;
  static constexpr int ACROSS = COLS / Columns::PIECE, AT_ONCE = THREADS / ACROSS;
  static_assert(AT_ONCE % LANE_TOKENS<T> == 0 && STEP<T> % AT_ONCE == 0, "a thread's rows are in the same place");
  const E* from;

  __device__ __forceinline__ static int row() { return threadIdx.x / ACROSS; }
  __device__ __forceinline__ static int col() { return threadIdx.x % ACROSS * Columns::PIECE; }
  // rows: the segment's first row.
  __device__ __forceinline__ StepCopier(const E* rows, i64 stride, int first_step, int bytes)
      : from(rows + first_step * STEP<T> * stride + (bytes == 16 ? row() * stride + col() : 0)) {}

  __device__ __forceinline__ void copy(Columns& to, i64 stride, int every, int rows, int columns) {
    const int rows_below = col() < columns ? rows - row() : 0;  // from this thread's first row on
    E* const place = to.x + to.place(row() / LANE_TOKENS<T>, row() % LANE_TOKENS<T>, col());
#pragma unroll
    for (int down = 0; down < STEP<T>; down += AT_ONCE)
      cp_async<16>(place + to.place(down / LANE_TOKENS<T>, 0, 0), from + down * stride, down < rows_below);
    from -= every * STEP<T> * stride;
  }
  __device__ __forceinline__ void copy(Columns& to, i64 stride, int every, int rows, int columns, int bytes) {
    copy_unaligned_rows<THREADS>(to, from, stride, rows, columns, bytes);
    from -= every * STEP<T> * stride;
  }
};

// Sets x to channel `col` + lane / 4 of this lane's tokens.
template <typename T, typename E, int COLS>
__device__ __forceinline__ void load_lane_tokens(float (&x)[LANE_TOKENS<T>], const Tile<T, E, COLS>& tile, int col) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(E) == 2) {
    static_assert(LANE_TOKENS<T> == 8);
    u32 r[4];  // r[m], of matrix m: tokens 2m and 2m + 1 of this lane. Lane 8m + i gives the address of row i of it
    ldmatrix_x4_trans(r, tile.x + tile.place(lane >> 1 & 3, (lane >> 3) * 2 + (lane & 1), col));
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 two = unpack(r[n], E{});
      x[2 * n] = two.x, x[2 * n + 1] = two.y;
    }
  } else {
#pragma unroll
    for (int n = 0; n < LANE_TOKENS<T>; ++n) x[n] = tile.x[tile.place(t, n, col + g)];
  }
}

// In nats. If the gates after a step sum to more than this, the decays of the step's tokens are two factors: float32
// ends at e^88, which leaves 28 nats for the gates of the step itself. With more a state overflows anyhow, unless keys
// are small (docs/numerics.md).
constexpr float LARGEST_SUM = 60.f;

// The first of two multiplications of x by exp(nats + more), which may be beyond float32's range: multiplies x by exp
// of half of nats + more, and sets `nats` to the other half. Halves are at most 87, so that exp is finite and 0 stays
// 0.
template <int N> __device__ __forceinline__ void multiply_by_half(float (&x)[N], float (&nats)[N], float more) {
#pragma unroll
  for (int i = 0; i < N; ++i) {
    nats[i] = at_most(0.5f * (nats[i] + more), 87.f);
    x[i] *= decay_of(nats[i]);
  }
}

// Loads two right operands side by side: columns col + 0...15 of every lane's tokens 4m + 0...3. So product m sums over
// these 16 tokens: at depths 2t, 2t + 1, 2t + 8 and 2t + 9 it has the four tokens of lanes with lane % 4 = t. Keys have
// the same order.
template <class R, typename T, int COLS>
__device__ __forceinline__ void load_values(R (&b)[2], const Tile<T, T, COLS>& tile, int m, int col) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  if constexpr (sizeof(T) == 2) {
    u32 r[4];  // r[0], r[1]: tokens 4m, 4m + 1 and 4m + 2, 4m + 3 of this lane; r[2], r[3]: of the column 8 further
    const int n = (lane >> 3 & 1) * 2 + (lane & 1);  // of the row that this lane points to; loops have their own
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

// What a block computes: part `part` of a segment (counted through all batch rows) of head h, columns from first_column
// and channels from first_channel on. result: the index [segment, part, h] of its state; decays: the index [segment,
// part, h, block] of its decays.
template <int BK, int BV> struct SegmentTile {
  u32 segment, part, h, result, decays;
  int first_channel, first_column;

  template <class Args> __device__ __forceinline__ SegmentTile(const Args& args, u32 block) {
    const u32 across = u32(args.shape.V + BV - 1) / BV, tiles = across * (u32(args.shape.K + BK - 1) / BK);
    const u32 H = u32(args.shape.H), parts = u32(args.parts), tile = block % tiles;
    const u32 index = block / tiles / H / parts, computed = u32(args.computed);  // index: among the computed segments
    segment = index / computed * u32(args.segments) + index % computed, part = block / tiles / H % parts,
    h = block / tiles % H;
    result = (segment * parts + part) * H + h, decays = result * across + tile % across;
    first_channel = tile / across * BK, first_column = tile % across * BV;
  }
};

// T: the type of k and v; G: that of g, T or float. PRODUCTS: tf32 products for each product of float32, 1 or 3. 512
// threads share a multiprocessor, so that each has 128 registers (blocks_per_multiprocessor of GatedSegmentStates).
template <typename T, typename G, int PRODUCTS, int BK, int BV>
__global__ void __launch_bounds__(2 * BK, 256 / BK) gated_segment_states(const Args<T, G> args) {
  using M = Math<T, PRODUCTS>;
  constexpr int THREADS = 2 * BK, DEPTHS = STEP<T> / 16;
  auto& s = *reinterpret_cast<Shared<T, G, BK, BV>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp_channel = 16 * (threadIdx.x >> 5);
  const SegmentTile<BK, BV> work(args, blockIdx.x);
  const u32 row_sequences = u32(shape.row_sequences), b = work.segment / row_sequences;
  const u32 parts = u32(args.parts), part = work.part;
  const Span span = tokens_of(shape, work.segment % row_sequences);
  const int tokens = int(span.stop - span.start), bytes = int(args.bytes);
  const int channels = int(min(shape.K - work.first_channel, i64(BK))),
            columns = int(min(shape.V - work.first_column, i64(BV)));
  // first_step: the step that this part begins with, counted from the segment's start: the part's last one in time.
  const int steps = (tokens + STEP<T> - 1) / STEP<T>, first_step = steps - 1 - part;

  StepCopier<THREADS, T, T, BK> k(args.k.row(b, work.h, span.start) + work.first_channel, args.k.token_stride,
                                  first_step, bytes);
  StepCopier<THREADS, T, T, BV> v(args.v.row(b, work.h, span.start) + work.first_column, args.v.token_stride,
                                  first_step, bytes);
  StepCopier<THREADS, T, G, BK> gates(args.g.row(b, work.h, span.start) + work.first_channel, args.g.token_stride,
                                      steps - 1, bytes);
  // Starts copying a step, counted from the segment's last one: its gates, and k and v if it is one of this part's.
  const auto is_of_part = [&](int step) { return u32(step) % parts == part; };
  const auto fetch = [&](int step) {
    if (step < steps) {
      auto& to = s.stages[step % STAGES];
      const int rows = tokens - STEP<T> * (steps - 1 - step);  // tokens from this step on
      const bool in_part = is_of_part(step);
      if (bytes == 16) {
        gates.copy(to.g, args.g.token_stride, 1, rows, channels);
        if (in_part)
          k.copy(to.k, args.k.token_stride, parts, rows, channels),
              v.copy(to.v, args.v.token_stride, parts, rows, columns);
      } else {
        gates.copy(to.g, args.g.token_stride, 1, rows, channels, bytes);
        if (in_part)
          k.copy(to.k, args.k.token_stride, parts, rows, channels, bytes),
              v.copy(to.v, args.v.token_stride, parts, rows, columns, bytes);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < STAGES - 1; ++step) fetch(step);

  // A lane has the channels warp_channel + g + 8 octet, octet 0 or 1. S: accumulators [16 channels, 8 columns] twice,
  // BV / 16 times; later_gates: by octet, the sums of the channels' gates after this step. Channels beyond K count as
  // forgotten.
  float S[BV / 16][2][4] = {};
  float later_gates[2];
#pragma unroll
  for (int octet = 0; octet < 2; ++octet)
    later_gates[octet] = warp_channel + g + 8 * octet < channels ? 0.f : FORGOTTEN_NATS;
  const bool first_lane = (threadIdx.x & 31) == 0;  // only this lane writes and reads `has_positive_gate`
  u32& has_positive_gate = s.has_positive_gate[threadIdx.x >> 5];
  if (first_lane) has_positive_gate = 0;
  const auto hides_earlier_steps = [&] {  // whether this lane's numbers of S do
    bool hides = true;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float decay = decay_of(later_gates[i >> 1]);
      if (warp_channel + g + 8 * (i >> 1) < channels)
#pragma unroll
        for (int x = 0; x < BV / 8; ++x)
          hides &= 8 * x + 2 * t + (i & 1) >= columns || hides_forgotten(S[x / 2][x % 2][i], decay);
    }
    return hides;
  };
  int step = 0;
#pragma unroll 1
  for (; step < steps; ++step) {
    cp_async_wait<STAGES - 2>();  // leaves the later steps' copies under way, each a group, maybe an empty one
    const bool remembered =
        first_lane && has_positive_gate || !(later_gates[0] <= FORGOTTEN_NATS && later_gates[1] <= FORGOTTEN_NATS);
    // This step has been copied; the previous one, whose stage is filled next, has been read.
    if (!__syncthreads_or(remembered) && !__syncthreads_or(!hides_earlier_steps())) break;
    fetch(step + STAGES - 1);
    const auto& in = s.stages[step % STAGES];
    const bool two_factors = __any_sync(0xffffffffu, later_gates[0] > LARGEST_SUM || later_gates[1] > LARGEST_SUM);
    const bool in_part = is_of_part(step);
    Left<M> a[DEPTHS];  // the decayed keys [the warp's 16 channels, 16 tokens], of each product
#pragma unroll
    for (int octet = 0; octet < 2; ++octet) {
      // within_lane: the gates of the lane's tokens, then, of each token, the sum of those of the lane's later tokens;
      // sum: the sum of the gates of all of them.
      float within_lane[LANE_TOKENS<T>], sum = 0.f, largest = 0.f;
      load_lane_tokens(within_lane, in.g, warp_channel + 8 * octet);
#pragma unroll
      for (int i = LANE_TOKENS<T> - 1; i >= 0; --i) {
        const float gate = within_lane[i];
        within_lane[i] = sum;
        sum += gate;
        largest = fmaxf(largest, gate);
      }
      if (__any_sync(0xffffffffu, largest > 0.f) && first_lane) has_positive_gate = 1;
      const FourLanes lanes = four_lane_sums(sum);
      float after_lane = lanes.after + later_gates[octet];  // the sum of the gates after the lane's tokens
      later_gates[octet] += lanes.all;
      if (!in_part) continue;
      float key[LANE_TOKENS<T>];
      load_lane_tokens(key, in.k, warp_channel + 8 * octet);
      if (two_factors) multiply_by_half(key, within_lane, after_lane), after_lane = 0.f;
      after_lane *= LOG2E;
#pragma unroll
      for (int i = 0; i < LANE_TOKENS<T>; ++i) key[i] *= exp2_approx(fmaf(within_lane[i], LOG2E, after_lane));
#pragma unroll
      for (int n = 0; n < LANE_TOKENS<T> / 2; ++n) a[n / 2].set(n % 2 * 2 + octet, float2{key[2 * n], key[2 * n + 1]});
    }
    if (!in_part) continue;
#pragma unroll
    for (int m = 0; m < DEPTHS; ++m)
#pragma unroll
      for (int x = 0; x < BV / 16; ++x) {
        RightData<M, T> values[2];
        load_values(values, in.v, m, 16 * x);
        accumulate(S[x], a[m], values);
      }
  }
  cp_async_wait<0>();

  const SegmentTile<BK, BV> tile(args,
                                 opaque(blockIdx.x));  // `work`, computed again, since the loop needs the registers
  float* state = args.states + i64(tile.result) * shape.K * shape.V;
#pragma unroll
  for (int x = 0; x < BV / 8; ++x)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int channel = warp_channel + g + 8 * (i >> 1), column = 8 * x + 2 * t + (i & 1);
      if (channel < channels && column < columns)
        state[(tile.first_channel + channel) * shape.V + tile.first_column + column] = S[x / 2][x % 2][i];
    }
  if (t == 0)
    for (int octet = 0; octet < 2; ++octet) {
      const int channel = warp_channel + g + 8 * octet;
      float* decays = args.decays + i64(tile.decays) * 2 * shape.K + tile.first_channel + channel;
      const float segment_decay = step < steps ? 0.f : decay_of(later_gates[octet]);
      if (channel < channels) decays[0] = tile.part ? 1.f : segment_decay, decays[shape.K] = 1.f;
    }
}
