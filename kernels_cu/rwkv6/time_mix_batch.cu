// what      The time mix of one token of many sequences: decay, state, group norm, gate; each state is read and written
//           once, and its first part is loaded before the previous kernel has ended.
// math      w = exp(-exp(decay_base + tanh(decay_low) decay_up));  o = r^T (S + diag(bonus) k v^T)
//           S = diag(w) S + k v^T;  y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate [B, H, N], each the sum of P parts, which are 4 B H N numbers apart: a part has all four arrays.
//           decay_low [P, B, W], of rank W, is such a sum, too; y [TERMS, B, H, N]: each number as a sum of TERMS
//           of type T times their units, three of which hold a float32 number for the next product; decay_up [W, H, N],
//           decay_base bonus weight bias [H, N], state [pool, H, N, N], slots [B] or null: then b has state b; N = 64
// grid      a block for every (head, SEQUENCES), heads slowest; a warp a sequence: a lane has four columns of the
//           state and every second channel
// smem      Shared, then tanh(decay_low) of each warp, then decay_up of a head
// barriers  one: decay_up is in shared memory
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N = 64; SEQUENCES of 2, 4, 8 and W even, so that decay_up starts on 16 bytes in shared memory; P = 1, or
//           up to 2 if SEQUENCES is less than 8. States are read before the previous kernel has ended. So between this
//           launch and the one that last wrote them there must be another launch that waits for its predecessor
//           (wait_for_previous) before it calls launch_next: chosen_norm.cu, a decoding step's first launch
#include "rwkv6/time_mix_heads.cuh"
#include "cards.cuh"

// From the includes:
//   TimeMixArgs<the type of decay_up, of y, of states>: the arrays, and eps
//   QUADS = 16 lanes share a channel, GROUPS = 2 channels at once, ROWS = 32 rows of a lane
//   read_and_step: adds a channel's terms to o, and returns its new state
//   decays_of_channels: of two channels, from tanh(decay_low) and decay_up; gated: with weight, bias and silu(gate)
//   load2, load4, store4: neighbouring floats; Four, load_four: four neighbouring numbers of a state
//   store4_terms: four numbers as sums of TERMS terms times units
//   state_of(b, h, N): the state of slots[b], or b, never null
//   group_norm: adds up o of the warp's two groups of lanes, and normalises over the head; for all lanes together
//   launch_next: the next kernel may start; wait_for_previous: until the previous kernel has ended

template <typename T, typename S> struct Args : TimeMixArgs<T, T, S> {
  i64 P;
};

template <int SEQUENCES> struct Shared {
  float4 channels[SEQUENCES][N];  // k, r, decay and k u of a channel
};

// The most parts of k, v, r, gate and decay_low: blocks of 8 sequences have no registers for two.
template <int SEQUENCES> constexpr int MOST_PARTS = SEQUENCES < 8 ? 2 : 1;

// Neighbours of an array that is the sum of one part, or, if TWO_PARTS, of one or two parts that are `apart` numbers
// apart.
template <bool TWO_PARTS> __device__ __forceinline__ float2 load2_parts(const float* x, i64 parts, i64 apart) {
  const float2 first = load2(x), second = TWO_PARTS && parts > 1 ? load2(x + apart) : float2{};
  return {first.x + second.x, first.y + second.y};
}
template <bool TWO_PARTS> __device__ __forceinline__ float4 load4_parts(const float* x, i64 parts, i64 apart) {
  const float4 first = load4(x), second = TWO_PARTS && parts > 1 ? load4(x + apart) : float4{};
  return {first.x + second.x, first.y + second.y, first.z + second.z, first.w + second.w};
}

template <typename T, typename S, int TERMS, int SEQUENCES>
__global__ void __launch_bounds__(32 * SEQUENCES, SEQUENCES < 8 ? 8 / SEQUENCES : 2)
    rwkv6_time_mix_batch(const Args<T, S> args) {
  // Whether there are registers for all rows, and for two parts: with __launch_bounds__ 8 warps share those of a
  // multiprocessor, with SEQUENCES of 8 two blocks of 8.
  constexpr bool HAS_REGISTERS = SEQUENCES < 8, TWO_PARTS = MOST_PARTS<SEQUENCES> == 2;
  constexpr int THREADS = 32 * SEQUENCES,
                HELD = HAS_REGISTERS ? ROWS : ROWS / 2;  // rows of the state whose loads are under way
  static_assert(ROWS % HELD == 0);                       // a row takes the place of the row HELD before it
  auto& s = *reinterpret_cast<Shared<SEQUENCES>*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int W = int(args.W), B = int(args.B), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int groups = (B + SEQUENCES - 1) / SEQUENCES, h = blockIdx.x / groups;
  const int b = blockIdx.x % groups * SEQUENCES + warp;
  const i64 D = args.H * N, head_offset = i64(h) * N, offset = b * D + head_offset;  // of [H, N], [B, H, N]
  const int column = lane % QUADS * 4, group = lane / QUADS;
  float* const s_low = reinterpret_cast<float*>(&s + 1) + warp * W;
  T* const s_up = reinterpret_cast<T*>(reinterpret_cast<float*>(&s + 1) + SEQUENCES * W);

  constexpr int PIECE = 16 / sizeof(T);
  for (int n = tid; n < W * (N / PIECE); n += THREADS) {
    const int w = n / (N / PIECE), j = n % (N / PIECE) * PIECE;
    cp_async<16>(s_up + w * N + j, args.decay_up + w * D + head_offset + j);
  }
  cp_async_commit();
  S* const state = b < B ? args.state_of(b, h, N) : nullptr;
  Four<S> held[HELD] = {};
  const auto row_address = [&](int row) { return state + (row * GROUPS + group) * N + column; };
  if (state)
#pragma unroll
    for (int n = 0; n < HELD; ++n) held[n] = load_four(row_address(n));
  const int own_channel = 2 * lane;  // the first of two channels whose decay the lane computes
  const float2 base_decay = load2(args.decay_base + head_offset + own_channel);
  const float2 u = load2(args.bonus + head_offset + own_channel);
  float4 norm_weight, bias, gate;  // of the lane's columns
  const auto load_norm = [&] {
    norm_weight = load4(args.weight + head_offset + column), bias = load4(args.bias + head_offset + column);
  };
  const auto load_gate = [&] { gate = load4_parts<TWO_PARTS>(args.gate + offset + column, args.P, 4 * B * D); };
  if (HAS_REGISTERS) load_norm();
  else if (tid == 0) prefetch_l2(args.weight + head_offset, 4 * N), prefetch_l2(args.bias + head_offset, 4 * N);
  cp_async_wait<0>();
  __syncthreads();      // decay_up is in shared memory
  wait_for_previous();  // the previous kernel has ended: what it wrote (k v r gate, decay_low) can be read
  if (!state) return;   // no sequence b; no barrier of the block follows

  struct Inputs {
    float2 k, r;
    float4 v;
  };
  const auto load_inputs = [&]() -> Inputs {
    if (!TWO_PARTS)  // as below, without an addition of 0
      return {load2(args.k + offset + own_channel), load2(args.r + offset + own_channel),
              load4(args.v + offset + column)};
    const i64 apart = 4 * B * D;
    return {load2_parts<TWO_PARTS>(args.k + offset + own_channel, args.P, apart),
            load2_parts<TWO_PARTS>(args.r + offset + own_channel, args.P, apart),
            load4_parts<TWO_PARTS>(args.v + offset + column, args.P, apart)};
  };
  Inputs early;
  if (HAS_REGISTERS) early = load_inputs(), load_gate();
  for (int w = lane; w < W; w += 32) {
    const i64 from = i64(b) * W + w;
    s_low[w] = tanhf(args.decay_low[from] + (TWO_PARTS && args.P > 1 ? args.decay_low[from + i64(B) * W] : 0.f));
  }
  __syncwarp();  // tanh(decay_low) is in shared memory
  const Inputs in = HAS_REGISTERS ? early : load_inputs();
  const float2 k = in.k, r = in.r;
  const float4 v = in.v;
  const float2 decay = decays_of_channels(base_decay, s_low, s_up, W, own_channel);
  s.channels[warp][own_channel] = {k.x, r.x, decay.x, k.x * u.x};
  s.channels[warp][own_channel + 1] = {k.y, r.y, decay.y, k.y * u.y};
  __syncwarp();  // s.channels of the warp's sequence is in shared memory

  // Rows between two __syncwarp, whose channels the compiler may load together: 4 on sm_90, and 8 on all other cards,
  // whose assemblers spilled registers with 4.
  constexpr int AT_ONCE = BEFORE_SM90 || SINCE_SM100 ? 8 : 4;
  float4 o = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float4 old = float4(held[row % HELD]);
    if (row + HELD < ROWS) held[row % HELD] = load_four(row_address(row + HELD));
    if (row % AT_ONCE == 0) __syncwarp();  // keeps the compiler from loading all rows' channels first
    const float4 c = s.channels[warp][row * GROUPS + group];
    store4(row_address(row), read_and_step(o, old, v, c.x, c.y, c.z, c.w));
  }
  o = group_norm(o, float(args.eps));
  if (group > 0) return;  // both groups have the same o now
  if (!HAS_REGISTERS) load_gate(), load_norm();
  store4_terms<TERMS>(args.y + offset + column, args.B * D, gated(o, norm_weight, bias, gate));
}
