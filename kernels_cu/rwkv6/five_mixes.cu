// what      The five inputs of the time mix of a step, whose token shift is mixed by data. A block computes all five,
//           so that xx and d are read once.
// math      mixed_c = xx + d (maa_c + tanh(low_c) up_c), c = w k v r g; xx is LN(x) of a token, d the previous token's
//           less it
// shapes    B sequences, a token each; low [PARTS, B, 5, A], to be summed over PARTS, A the rank, up [5, A, D], maa [5,
//           D], xx d [B, D], mixed [5, B, D]
// grid      a block for every (TOKENS sequences, 128 channels), sequences slowest; a warp for every 16 of both
// smem      Shared: `up` of the block's channels, tanh(low) in two terms
// barriers  one: tanh(low) and `up` are in shared memory
// numerics  tensor cores: `up` as it is, tanh(low) as a sum of two numbers of its type; float32; rounded once
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    D a multiple of 8; A even, up to RANK; all arrays start on 16 bytes; sm_90a
#include "decode.cuh"

constexpr int COLUMNS = 128, INPUTS = 5;
constexpr int PARTS = 4;  // arrays whose sum is `low`
constexpr int TERMS = 2;  // numbers whose sum is a number of tanh(low)

template <typename T> struct Args {
  const float* low;
  const T* up;
  const float* maa;
  const float* xx;
  const float* d;
  T* mixed;
  i64 B, D, A;
};

template <typename T, int RANK, int TOKENS> struct Shared {
  // Rows are 8 numbers longer, so that ldmatrix reads them from different banks.
  T up[INPUTS * RANK][COLUMNS + 8], low[TERMS][TOKENS][INPUTS * RANK + 8];
};

template <typename T, int RANK, int TOKENS>
__global__ void __launch_bounds__(16 * TOKENS, RANK > 32 || TOKENS > 16 ? 1 : 2) rwkv6_five_mixes(const Args<T> args) {
  constexpr int THREADS = 16 * TOKENS;
  constexpr int PAIRS = TOKENS * INPUTS * RANK / 2 / THREADS;  // pairs of `low` that a thread sums
  static_assert(TOKENS * INPUTS * RANK / 2 % THREADS == 0);
  auto& s = *reinterpret_cast<Shared<T, RANK, TOKENS>*>(dynamic_smem());
  launch_next();
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, g = lane >> 2, t = lane & 3;
  const int B = int(args.B), D = int(args.D), A = int(args.A), across = (D + COLUMNS - 1) / COLUMNS;
  const int first_channel = blockIdx.x % across * COLUMNS, first_sequence = blockIdx.x / across * TOKENS;
  for (int n = tid; n < INPUTS * RANK * COLUMNS / 8; n += THREADS) {
    const int row = n / (COLUMNS / 8), column = n % (COLUMNS / 8) * 8, a = row % RANK;
    const bool inside = a < A && first_channel + column < D;
    cp_async<16>(&s.up[row][column], inside ? args.up + i64(row / RANK * A + a) * D + first_channel + column : args.up,
                 inside);
  }
  cp_async_commit();
  // A lane has channels lane_channel and lane_channel + 8, each with the next one, of sequences warp_sequence + g and
  // warp_sequence + g + 8.
  const int lane_channel = warp % (COLUMNS / 16) * 16 + 2 * t, warp_sequence = warp / (COLUMNS / 16) * 16;
  const auto inside = [&](int pair) { return first_channel + lane_channel + 8 * pair < D; };
  float2 maa[INPUTS][2];
#pragma unroll
  for (int c = 0; c < INPUTS; ++c)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      if (inside(pair)) maa[c][pair] = load2(args.maa + i64(c) * D + first_channel + lane_channel + 8 * pair);
  wait_for_previous();

  float2 low[PAIRS][PARTS], xx[2][2], d[2][2];  // all loads are issued before the first is used
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int index = n * THREADS + tid, b = first_sequence + index / (INPUTS * RANK / 2),
              row = index % (INPUTS * RANK / 2) * 2;
    const float* const from = args.low + (i64(b) * INPUTS + row / RANK) * A + row % RANK;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      low[n][part] = b < B && row % RANK < A ? load2(from + i64(part) * B * INPUTS * A) : float2{};
  }
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int b = first_sequence + warp_sequence + g + 8 * half;
      const i64 index = i64(b) * D + first_channel + lane_channel + 8 * pair;
      if (b < B && inside(pair)) xx[half][pair] = load2(args.xx + index), d[half][pair] = load2(args.d + index);
    }
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int index = n * THREADS + tid, token = index / (INPUTS * RANK / 2), row = index % (INPUTS * RANK / 2) * 2;
    float2 sum = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sum = {sum.x + low[n][part].x, sum.y + low[n][part].y};
    sum = {tanh_approx(sum.x), tanh_approx(sum.y)};
    const u32 term = pack<T>(sum.x, sum.y);
    *reinterpret_cast<u32*>(&s.low[0][token][row]) = term;
    store2(&s.low[1][token][row], {sum.x - to_float(T{u16(term)}), sum.y - to_float(T{u16(term >> 16)})});
  }
  cp_async_wait<0>();
  __syncthreads();  // tanh(low) and `up` are in shared memory

#pragma unroll
  for (int c = 0; c < INPUTS; ++c) {
    float sums[2][4] = {};
#pragma unroll
    for (int a = 0; a < RANK; a += 16) {
      const int row = c * RANK + a;
      u32 up[4];
      ldmatrix_x4_trans(up, &s.up[row + lane % 16][lane_channel - 2 * t + lane / 16 * 8]);
#pragma unroll
      for (int term = TERMS - 1; term >= 0; --term) {
        u32 low_operand[4];
        ldmatrix_x4(low_operand, &s.low[term][warp_sequence + lane % 16][row + lane / 16 * 8]);
        multiply_halves(sums[0], low_operand, {up[0], up[1]}, T{});
        multiply_halves(sums[1], low_operand, {up[2], up[3]}, T{});
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 mixed[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float2 &m = maa[c][pair], &x = xx[half][pair], &shift = d[half][pair];
        mixed[pair] =
            pack<T>(fmaf(shift.x, m.x + sums[pair][2 * half], x.x), fmaf(shift.y, m.y + sums[pair][2 * half + 1], x.y));
      }
      // Two lanes exchange a pair, so that each stores four neighbouring channels.
      const bool odd = t & 1;
      const u32 other = __shfl_xor_sync(0xffffffffu, odd ? mixed[0] : mixed[1], 1);
      const uint2 four = odd ? uint2{other, mixed[1]} : uint2{mixed[0], other};
      const int b = first_sequence + warp_sequence + g + 8 * half, j = first_channel + lane_channel - 2 * odd + 8 * odd;
      if (b < B && j < D) *reinterpret_cast<uint2*>(args.mixed + (i64(c) * B + b) * D + j) = four;
    }
  }
}
