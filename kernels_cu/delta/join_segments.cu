// what      Joins the segments of sequences under a delta rule: the state from which each of them starts, and backwards
//           the gradient of the state behind it.
// math      A segment turns the state S before it into F S + G, and the gradient dS of the state behind it into
//           F^T dS + G. Segments have the numbers 0...P - 1. S_p is the state before segment p, dS_p the gradient of
//           the state behind it. S_1 = G_0, as segment 0 starts from the initial state; dS_{P-2} = G_{P-1}.
//           S_{p+1} = F_p S_p + G_p, p = 1...P - 2;  dS_{p-1} = F_p^T dS_p + G_p, p = P - 2...1
// shapes    F [N, P, H, K, K padded with zeros to a multiple of 4], on 16 bytes; starts [directions, N, P, H, K, V]. Of
//           segment p, starts holds G_{p-1} and later S_p; backwards G_{p+1} and later dS_p. Segment 0's place
//           (backwards that of P - 1) is not touched. All R
// grid      a block for every (direction, sequence, head, BV columns), direction slowest; a thread has 2 channels of 4
//           columns
// smem      a ring of panels of F; S, or dS
// barriers  one a segment: the previous S has been read; one a panel: it and S are in shared memory, and the previous
//           panel has been read; one at the end: whether a number is not finite
// numerics  R: float32, or float64
//           Where growth makes F or a state infinite, the first two channels of the last state become NaN in all
//           columns of the block: walks then take the sequence whole (segments.cuh)
// source    the recurrence of Blelloch, 1990, "Prefix sums and their applications", section 1.4.1, computed one segment
//           after the other
// limits    K <= BK of 64, 128, 256; P >= 3
#include "delta/segments.cuh"
#include "delta/tokens.cuh"
#include "ptx.cuh"
#include "real.cuh"
#include "tensor.cuh"

template <typename R> struct Args {
  const R* F;
  R* starts;
  i64 N, P, H, K, V;
};

constexpr int BV = 16;

template <typename R> struct alignas(16) Four {
  R x[4];
};

template <typename R, int BK> struct Shared {
  static constexpr int STAGES = BK * sizeof(R) > 1024 ? 3 : 4;  // 3 of float64 and 256 channels fit on every card
  static constexpr int PANEL = 16384 / BK / sizeof(R);          // columns of F in a stage; if BACKWARDS, rows
  // A row of a panel of columns has PANEL numbers and 16 bytes, for banks; one of a panel of rows has BK.
  R panels[STAGES][BK * (PANEL + 16 / sizeof(R))];
  Four<R> S[BK][BV / 4];
};

// block: the number of the (sequence, head, BV columns). S in the code is dS if BACKWARDS.
template <bool BACKWARDS, int BK, typename R>
__device__ __forceinline__ void join(Shared<R, BK>& s, const Args<R>& args, R* starts, u32 block) {
  constexpr int STAGES = Shared<R, BK>::STAGES, PANEL = Shared<R, BK>::PANEL, PIECE = 16 / sizeof(R), THREADS = 2 * BK;
  constexpr int ROWS = BACKWARDS ? PANEL : BK, LD = BACKWARDS ? BK : PANEL + PIECE;
  constexpr int ACROSS = (BACKWARDS ? BK : PANEL) / PIECE;
  const u32 tiles = u32(args.V + BV - 1) / BV, H = u32(args.H), pair = block / tiles, h = pair % H, n = pair / H;
  const int K = int(args.K), V = int(args.V), P = int(args.P), stride = (K + 3) / 4 * 4;
  const int channel = threadIdx.x / (BV / 4) * 2, group = threadIdx.x % (BV / 4);
  const int column = int(block % tiles) * BV + 4 * group;
  const int first = BACKWARDS ? P - 2 : 1, direction = BACKWARDS ? -1 : 1, steps = P - 2;
  const int panels = (K + PANEL - 1) / PANEL;  // of a segment
  // Calls f(number in starts, number in x) for the thread's 2 channels and 4 columns of the state that step `step`
  // multiplies: S_p, or dS_p, of p = first + direction * step.
  const auto each = [&](int step, R(&x)[2][4], auto f) {
    R* state = starts + ((i64(n) * P + first + direction * step) * H + h) * K * V;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (channel + j < K && column + i < V) f(state[i64(channel + j) * V + column + i], x[j][i]);
  };
  const auto load = [](R& from, R& to) { to = from; };
  const auto fetch = [&](int panel) {  // starts to copy panel `panel` of all that are read, in their order
    if (panel < steps * panels) {
      const int p = first + direction * (panel / panels), from = panel % panels * PANEL;
      const R* F = args.F + ((i64(n) * P + p) * H + h) * K * stride;
#pragma unroll
      for (int index = threadIdx.x; index < ROWS * ACROSS; index += THREADS) {
        const int row = index / ACROSS, place = index % ACROSS * PIECE;
        const int of_row = row + (BACKWARDS ? from : 0), of_column = place + (BACKWARDS ? 0 : from);
        if (of_row < K && of_column < stride)
          cp_async<16>(s.panels[panel % STAGES] + row * LD + place, F + of_row * stride + of_column, true);
      }
    }
    cp_async_commit();
  };
  for (int number = 0; number < STAGES - 1; ++number) fetch(number);
  R x[2][4] = {}, G[2][4] = {};
  each(0, x, load), each(1, G, load);
#pragma unroll 1
  for (int step = 0, number = 0; step < steps; ++step) {
    __syncthreads();  // the previous S has been read
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      s.S[channel + j][group] = {x[j][0], x[j][1], x[j][2], x[j][3]};
#pragma unroll
      for (int i = 0; i < 4; ++i) x[j][i] = G[j][i];
    }
    if (step + 1 < steps) each(step + 2, G, load);
#pragma unroll 1
    for (int panel = 0; panel < panels; ++panel, ++number) {
      cp_async_wait<STAGES - 2>();
      __syncthreads();  // the panel and S are in shared memory; the previous panel has been read
      fetch(number + STAGES - 1);
      const R* F = s.panels[number % STAGES];
      const int from = panel * PANEL, width = channel < K ? min(PANEL, stride - from) : 0;
#pragma unroll 4
      for (int k = 0; k < width; k += 4) {
        R factors[2][4] = {};  // of the thread's channels
        if constexpr (BACKWARDS) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (from + k + i < K) {
              R two[2];
              load_neighbours<2>(two, F + (k + i) * LD + channel);
              factors[0][i] = two[0], factors[1][i] = two[1];
            }
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j)
            if (channel + j < K) load_neighbours<4>(factors[j], F + (channel + j) * LD + k);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const Four<R> state = s.S[from + k + i][group];
#pragma unroll
          for (int j = 0; j < 2; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) x[j][c] = fma(factors[j][i], state.x[c], x[j][c]);
        }
      }
    }
    each(step + 1, x, [](R& to, R& from) { to = from; });
  }
  bool out_of_range = false;
  each(steps, x, [&](R&, R& number) { out_of_range |= !is_finite(number); });
  if (__syncthreads_or(out_of_range) && channel == 0)
    each(steps, x, [](R& to, R&) { to = R(__uint_as_float(0x7fc00000u)); });
}

template <typename R, int BK> __global__ void __launch_bounds__(2 * BK, 1) delta_join_segments(const Args<R> args) {
  auto& s = *reinterpret_cast<Shared<R, BK>*>(dynamic_smem());
  const u32 blocks = u32(args.N * args.H * ((args.V + BV - 1) / BV));
  if (blockIdx.x < blocks) join<false>(s, args, args.starts, blockIdx.x);
  else join<true>(s, args, args.starts + args.N * args.P * args.H * args.K * args.V, blockIdx.x - blocks);
}
