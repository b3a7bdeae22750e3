// what      Joins the segments 0...P - 1 into which sequences are cut, for a delta rule: computes the state S_p before
//           segment p, or the gradient dS_p of the state after segment p, or both, as the host asks.
// math      Segment p changes S_p to F_p S_p + G_p, and dS_p to F_p^T dS_p + G'_p. The host gives F, G and G', computed
//           from the initial state for segment 0, from the final state's gradient for P - 1: so S_1 = G_0, and
//           dS_{P-2} = G'_{P-1}
//           S_{p+1} = F_p S_p + G_p, p = 1...P - 2;   dS_{p-1} = F_p^T dS_p + G'_p, p = P - 2...1
// shapes    F [N, P, H, K, K padded with zeros to a multiple of 4], on 16 bytes; starts [directions, N, P, H, K, V] has
//           at p first G_{p-1} and then S_p, and in the second direction first G'_{p+1} and then dS_p. Its places of
//           segment 0, and in the second direction of P - 1, are not touched. All are of type R. N sequences
// grid      a block for every (direction, sequence, head, BV columns), direction slowest; `backwards`: of the second
//           direction alone; a warp has 16 channels, or, of float64, a thread 2 channels of 4 columns
// smem      a ring of panels of F; S, or dS
// barriers  one in all_forget: whether a segment remembers; one a segment: the previous S has been read; one a panel:
//           it and S are in shared memory, and the previous panel has been read; one at the end: whether a number is
//           not finite
// numerics  R: float32, whose products are three in tf32 (operands.cuh), or float64
//           If a last state, S_{P-1} or dS_0, is not finite, since gates above 0 have made F or a state grow, its
//           first two channels become NaN in all columns of the block: the kernels that read `starts` take this for the
//           order to compute the sequence as one segment
// source    the recurrence of Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, computed one segment
//           after the other
// limits    K <= BK of 64, 128, 256; P >= 3
#include "delta/operands.cuh"
#include "delta/segments.cuh"
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

// From the includes:
//   Word<T>, `single`: a float that tensor cores multiply as three products in tf32 (mma_m16n8k16 of `single`)
//   FORWARDS, BACKWARDS: false and true. padded_to_4(n): n rounded up to a multiple of 4; is_finite
//   cp_async<16>(to, from, exists): starts copying 16 bytes, or stores zeros if not `exists`

template <typename R> struct Args {
  const R* F;
  R* starts;
  const i64* forgets;  // [N, P, H]: whether F is 0; null: unknown. Not of segments 0 and P - 1
  i64 N, P, H, K, V;
  i64 backwards;  // whether the launch has the second direction alone
};

constexpr int BV = 16;

template <typename R, int BK> struct Shared {
  static constexpr int STAGES = BK * sizeof(R) >= 1024 ? 3 : 4;  // 3 of 256 channels fit on every card
  static constexpr int PANEL = 16384 / BK / sizeof(R);           // columns of F in a stage; if BACKWARDS, rows
  // [BK][PANEL] columns of F, GAP numbers between its rows; or, BACKWARDS, [PANEL][BK] rows of F, 16 bytes between
  // them. What a warp reads at a time is then in different banks. 16384 bytes without the gaps.
  static constexpr int GAP = sizeof(R) == 4 ? 8 : 2;
  R panels[STAGES][BK * (PANEL + GAP)];
  R S[BK][BV + (sizeof(R) == 4 ? 4 : 0)];  // S_p or dS_p
};

// The numbers of a state that a thread computes: of channels from `channel` on and columns from `column` on, of the
// block's. Of float32 a warp has 16 channels and all 16 columns, as accumulators of tensor cores; of float64 a thread
// has 2 channels of 4 columns.
template <typename R> struct Own {
  static constexpr bool TENSOR = sizeof(R) == 4;
  int channel = TENSOR ? threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 : threadIdx.x / 4 * 2;
  int column = TENSOR ? threadIdx.x % 4 * 2 : threadIdx.x % 4 * 4;

  // Calls f(channel, column, the number in x) for all 8.
  template <class F> __device__ __forceinline__ void each(R (&x)[2][4], F f) const {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int m = 0; m < 4; ++m)
        if constexpr (TENSOR) f(channel + m / 2 * 8, column + 8 * i + m % 2, x[i][m]);
        else f(channel + i, column + m, x[i][m]);
  }
};

// x += F S, or, BACKWARDS, F^T S, for the first `columns` columns of a panel of F: S has their channels. LD: the
// distance of a panel's rows.
template <bool BACKWARDS, int LD, typename R, int ROW>
__device__ __forceinline__ void multiply(R (&x)[2][4], const Own<R>& own, const R* panel, const R (*S)[ROW],
                                         int columns) {
  if constexpr (Own<R>::TENSOR) {
    const int g = threadIdx.x % 32 / 4, two = own.column;
#pragma unroll 2
    for (int first = 0; first < columns; first += 16) {
      const int k = first + two;
      float2 a[4], b[2][2];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const int row = own.channel + m % 2 * 8, column = k + m / 2 * 8;
        if constexpr (BACKWARDS) a[m] = {panel[column * LD + row], panel[(column + 1) * LD + row]};
        else a[m] = *reinterpret_cast<const float2*>(panel + row * LD + column);
      }
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int m = 0; m < 2; ++m) b[n][m] = {S[k + 8 * m][8 * n + g], S[k + 8 * m + 1][8 * n + g]};
        mma_m16n8k16(x[n], a, b[n], single{});
      }
    }
  } else {
#pragma unroll 4
    for (int k = 0; k < columns; ++k)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const R factor = BACKWARDS ? panel[k * LD + own.channel + i] : panel[(own.channel + i) * LD + k];
#pragma unroll
        for (int m = 0; m < 4; ++m) x[i][m] = fma(factor, S[k][own.column + m], x[i][m]);
      }
  }
}

// Joins the segments in one direction. block: the number of the (sequence, head, BV columns); starts: those of this
// direction. In the code S is dS, G is G', and F is F^T, if BACKWARDS. Step n multiplies S by F_p, p = first_segment +
// n * direction, and adds G_p; it ends with x, the next S, in registers and in `starts`.
template <bool BACKWARDS, int BK, typename R>
__device__ __forceinline__ void join(Shared<R, BK>& s, const Args<R>& args, R* starts, u32 block) {
  constexpr int STAGES = Shared<R, BK>::STAGES, PANEL = Shared<R, BK>::PANEL, PIECE = 16 / sizeof(R), THREADS = 2 * BK;
  // A panel's rows, and their distance.
  constexpr int ROWS = BACKWARDS ? PANEL : BK, LD = BACKWARDS ? BK + PIECE : PANEL + Shared<R, BK>::GAP;
  // The threads copy DOWN rows of a panel at a time, ACROSS pieces of 16 bytes each.
  constexpr int ACROSS = (BACKWARDS ? BK : PANEL) / PIECE, DOWN = THREADS / ACROSS;
  static_assert(ROWS % DOWN == 0 && (!Own<R>::TENSOR || PANEL % 16 == 0), "whole copies, whole steps of products");
  const u32 tiles = u32(args.V + BV - 1) / BV, H = u32(args.H), pair = block / tiles, h = pair % H, n = pair / H;
  const int K = int(args.K), V = int(args.V), P = int(args.P), F_stride = padded_to_4(K);
  const int first_column = int(block % tiles) * BV;
  const Own<R> own;
  const int direction = BACKWARDS ? -1 : 1, steps = P - 2;
  const i64 first_head = (i64(n) * P + (BACKWARDS ? P - 2 : 1)) * H + h;  // of the first step's segment
  // Calls f(number in starts, number in x) for the thread's numbers of a place of `starts`.
  const auto each = [&](R* place, R(&x)[2][4], auto f) {
    own.each(x, [&](int channel, int column, R& number) {
      if (channel < K && first_column + column < V) f(place[channel * V + column], number);
    });
  };
  const auto load = [](R& from, R& to) { to = from; };  // from `starts`
  // Starts to copy the panels of all steps, in the order in which they are read, one in a call. F, F_offset: the next
  // panel's matrix, and its first column there; or, BACKWARDS, its first row. Zeros surround F.
  const R* F = args.F + first_head * K * F_stride;
  int F_offset = 0, to_copy = steps * ((K + PANEL - 1) / PANEL);
  const int row = threadIdx.x / ACROSS, piece_column = threadIdx.x % ACROSS * PIECE;  // the thread's first piece
  const auto fetch = [&](int stage) {
    if (to_copy-- > 0) {
      const int F_row = row + (BACKWARDS ? F_offset : 0), F_column = piece_column + (BACKWARDS ? 0 : F_offset);
      const R* from = F + F_row * F_stride + F_column;
#pragma unroll
      for (int down = 0; down < ROWS; down += DOWN)
        cp_async<16>(s.panels[stage] + (row + down) * LD + piece_column, from + down * F_stride,
                     F_row + down < K && F_column < F_stride);
      F_offset += PANEL;
      if (F_offset >= K) F_offset = 0, F += direction * i64(H) * K * F_stride;
    }
    cp_async_commit();
  };
  for (int stage = 0; stage < STAGES - 1; ++stage) fetch(stage);
  // x: S, later the sum that becomes the next S; G: loaded a step before it is added. Channels from K on stay 0.
  // place: of the S that the step multiplies. Before an S is stored, its place has the G that is added to the product.
  const i64 next_place = direction * i64(H) * K * V;
  R* place = starts + first_head * K * V + first_column;
  R x[2][4] = {}, G[2][4] = {};
  each(place, x, load), each(place + next_place, G, load);
#pragma unroll 1
  for (int step = 0, stage = 0; step < steps; ++step) {
    __syncthreads();  // the previous S has been read
    own.each(x, [&](int channel, int column, R& number) { s.S[channel][column] = number; });
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i / 4][i % 4] = G[i / 4][i % 4];
    place += next_place;
    if (step + 1 < steps) each(place + next_place, G, load);
#pragma unroll 1
    for (int from = 0; from < K; from += PANEL) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // the panel and S are in shared memory; the previous panel has been read
      fetch(stage ? stage - 1 : STAGES - 1);
      const R* panel = s.panels[stage];
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      multiply<BACKWARDS, LD>(x, own, panel, s.S + from, min(PANEL, K - from));
    }
    each(place, x, [](R& to, R& from) { to = from; });  // stores the next S in the place of G
  }
  bool out_of_range = false;
  each(place, x, [&](R&, R& number) { out_of_range |= !is_finite(number); });
  if (!__syncthreads_or(out_of_range)) return;
  own.each(x, [&](int channel, int column, R&) {
    if (channel < 2 && channel < K && first_column + column < V)
      place[channel * V + column] = R(__uint_as_float(0x7fc00000u));
  });
}

// Whether all segments of the sequence and head of block `block` have an F of 0, but for segments 0 and P - 1, which
// have no F: then each G_p is S_{p+1}, in its place already, and G'_p is dS_{p-1}. All threads call this and get the
// same answer; it is a barrier.
template <typename R> __device__ __forceinline__ bool all_forget(const Args<R>& args, u32 block) {
  if (!args.forgets) return false;
  const u32 tiles = u32(args.V + BV - 1) / BV, H = u32(args.H), pair = block / tiles,
            first = pair / H * u32(args.P) + 1;
  bool remembers = false;
  for (u32 p = threadIdx.x; p < u32(args.P) - 2; p += blockDim.x)
    remembers |= !args.forgets[(first + p) * H + pair % H];
  return !__syncthreads_or(remembers);
}

template <typename R, int BK> __global__ void __launch_bounds__(2 * BK, 1) delta_join_segments(const Args<R> args) {
  auto& s = *reinterpret_cast<Shared<R, BK>*>(dynamic_smem());
  const u32 blocks = u32(args.N * args.H * ((args.V + BV - 1) / BV));
  if (all_forget(args, blockIdx.x % blocks)) return;
  if (!args.backwards && blockIdx.x < blocks) join<FORWARDS>(s, args, args.starts, blockIdx.x);
  else join<BACKWARDS>(s, args, args.starts + args.N * args.P * args.H * args.K * args.V, blockIdx.x % blocks);
}
