// what      RWKV-6's time mix in a step: its five inputs, each a mix of a token with the previous one by weights that
//           depend on the data. A block computes all five, so that xx and d are read once.
// math      mixed_c = xx + d (maa_c + tanh(low_c) up_c), for the inputs c = w k v r g; xx is a token's LN(x); d is the
//           previous token's LN(x) less xx
// shapes    B sequences, a token each, of D channels. low [PARTS, B, 5, A] float32, to be summed over PARTS, A the
//           rank; up [5, A, D]; maa [5, D], xx d [B, D] float32; mixed [5, B, D]
// grid      a block for every (TOKENS sequences, 128 channels), sequences slowest; a warp for every (16 sequences, 16
//           channels)
// smem      Shared: `up` of the block's channels, tanh(low) in two terms
// barriers  one: tanh(low) and `up` are in shared memory
// numerics  tensor cores multiply `up` with two terms of tanh(low), its value in type T and the rounding error of that;
//           sums in float32; `mixed` is rounded once
// source    Peng et al., 2024, "Eagle and Finch", eq. 14-15
// limits    D a multiple of 8; A even, up to RANK; all arrays start on 16 bytes. The host launches it on sm_90 only
#include "decode.cuh"

constexpr int COLUMNS = 128, INPUTS = 5;
constexpr int PARTS = 4;  // arrays whose sum is `low`
constexpr int TERMS = 2;  // numbers of type T whose sum is a number of tanh(low)

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
  static_assert(RANK % 16 == 0 && TOKENS % 16 == 0);  // tensor cores multiply 16 tokens, 16 ranks at a time
  // Rows are 8 numbers longer, so that ldmatrix reads them from different banks.
  T up[INPUTS * RANK][COLUMNS + 8], low[TERMS][TOKENS][INPUTS * RANK + 8];
};

// The launch bounds leave a thread 128 registers; or 255 if RANK is 64, when its part of `low` takes 80.
template <typename T, int RANK, int TOKENS>
__global__ void __launch_bounds__(16 * TOKENS, RANK > 32 || TOKENS > 16 ? 1 : 2) rwkv6_five_mixes(const Args<T> args) {
  constexpr int THREADS = 16 * TOKENS;
  constexpr int PAIRS = TOKENS * INPUTS * RANK / 2 / THREADS;  // pairs of `low` that a thread sums
  static_assert(TOKENS * INPUTS * RANK / 2 % THREADS == 0);
  auto& s = *reinterpret_cast<Shared<T, RANK, TOKENS>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int g = lane >> 2, t = lane & 3;  // a lane's rows and columns in a product of tensor cores, as ptx.cuh has them
  const int B = int(args.B), D = int(args.D), A = int(args.A), channel_blocks = (D + COLUMNS - 1) / COLUMNS;
  const int first_channel = blockIdx.x % channel_blocks * COLUMNS;
  const int first_sequence = blockIdx.x / channel_blocks * TOKENS;
  // input_rank: an index of [INPUTS, RANK]. Only parameters, `up` and maa, are read before wait_for_previous: kernels
  // before this one write the other arrays.
  for (int n = tid; n < INPUTS * RANK * COLUMNS / 8; n += THREADS) {
    const int input_rank = n / (COLUMNS / 8), channel = n % (COLUMNS / 8) * 8, a = input_rank % RANK;
    const bool inside = a < A && first_channel + channel < D;
    cp_async<16>(&s.up[input_rank][channel],
                 inside ? args.up + i64(input_rank / RANK * A + a) * D + first_channel + channel : args.up, inside);
  }
  cp_async_commit();
  // A lane has two pairs of channels, from lane_channel and from lane_channel + 8 on, of two sequences, warp_sequence +
  // g and warp_sequence + g + 8 (`half` 0 and 1). What lies beyond D or B stays undefined; no result of it is stored.
  const int lane_channel = warp % (COLUMNS / 16) * 16 + 2 * t, warp_sequence = warp / (COLUMNS / 16) * 16;
  const auto inside = [&](int pair) { return first_channel + lane_channel + 8 * pair < D; };
  float2 maa[INPUTS][2];
#pragma unroll
  for (int c = 0; c < INPUTS; ++c)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair)
      if (inside(pair)) maa[c][pair] = load2(args.maa + i64(c) * D + first_channel + lane_channel + 8 * pair);
  wait_for_previous();  // low, xx and d are written

  float2 low[PAIRS][PARTS], xx[2][2], d[2][2];  // [half][pair]; all loads are issued before the first is used
#pragma unroll
  for (int n = 0; n < PAIRS; ++n) {
    const int index = n * THREADS + tid, b = first_sequence + index / (INPUTS * RANK / 2),
              input_rank = index % (INPUTS * RANK / 2) * 2;
    const float* const from = args.low + (i64(b) * INPUTS + input_rank / RANK) * A + input_rank % RANK;
#pragma unroll
    for (int part = 0; part < PARTS; ++part)
      low[n][part] = b < B && input_rank % RANK < A ? load2(from + i64(part) * B * INPUTS * A) : float2{};
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
    const int index = n * THREADS + tid, token = index / (INPUTS * RANK / 2),
              input_rank = index % (INPUTS * RANK / 2) * 2;
    float2 sum = {};
#pragma unroll
    for (int part = 0; part < PARTS; ++part) sum = {sum.x + low[n][part].x, sum.y + low[n][part].y};
    sum = {tanh_approx(sum.x), tanh_approx(sum.y)};
    const u32 rounded = pack<T>(sum.x, sum.y);
    *reinterpret_cast<u32*>(&s.low[0][token][input_rank]) = rounded;
    store2(&s.low[1][token][input_rank], {sum.x - to_float(T{u16(rounded)}), sum.y - to_float(T{u16(rounded >> 16)})});
  }
  cp_async_wait<0>();
  __syncthreads();  // tanh(low) and `up` are in shared memory

#pragma unroll
  for (int c = 0; c < INPUTS; ++c) {
    float sums[2][4] = {};  // of the pairs of channels: [0], [1] of sequence `half` 0, [2], [3] of 1
#pragma unroll
    for (int a = 0; a < RANK; a += 16) {
      const int input_rank = c * RANK + a;
      u32 up[4];
      ldmatrix_x4_trans(up, &s.up[input_rank + lane % 16][lane_channel - 2 * t + lane / 16 * 8]);
#pragma unroll
      for (int term = TERMS - 1; term >= 0; --term) {  // the smaller term first
        u32 low_operand[4];
        ldmatrix_x4(low_operand, &s.low[term][warp_sequence + lane % 16][input_rank + lane / 16 * 8]);
        mma_m16n8k16(sums[0], low_operand, {up[0], up[1]}, T{});
        mma_m16n8k16(sums[1], low_operand, {up[2], up[3]}, T{});
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 mixed[2];
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const float2 &m = maa[c][pair], &x = xx[half][pair], &diff = d[half][pair];
        mixed[pair] =
            pack<T>(fmaf(diff.x, m.x + sums[pair][2 * half], x.x), fmaf(diff.y, m.y + sums[pair][2 * half + 1], x.y));
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
