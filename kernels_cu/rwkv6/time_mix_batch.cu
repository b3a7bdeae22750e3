// what      The time mix of one token of many sequences: decay, state, group norm, gate; each state is read and written
//           once, and its first part is on its way before the inputs stand.
// math      w = exp(-exp(decay + tanh(low) up));  o = r^T (S + diag(u) k v^T);  S = diag(w) S + k v^T
//           y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate [B, H, N], y [TERMS, B, H, N], low [B, W], up [W, H, N], decay u weight bias [H, N], state [P, H, N, N],
//           slots [B] or null; N = 64
// grid      a block for every (head, 8 sequences), heads slowest; a warp a sequence: a lane has four columns of the
//           state and every second channel
// smem      Shared, then tanh(low) of each warp, then `up` of a head
// barriers  one: `up` stands
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N = 64; some launch between this one and the last that wrote the states has waited for the one before it
//           before it let the next begin: states are read without waiting
#include "decode.cuh"

constexpr int N = 64, THREADS = 256, WARPS = THREADS / 32;
constexpr int QUADS = N / 4, GROUPS = 32 / QUADS;  // lanes that share a channel, channels that a warp has at once
constexpr int ROWS = N / GROUPS, HELD = 16;        // of the state a lane, and those that it holds on their way

template <typename T, typename X, typename S> struct Args {
  const float* k;
  const float* v;
  const float* r;
  const float* gate;
  const float* low;
  const T* up;
  const float* decay;
  const float* u;
  const float* weight;
  const float* bias;
  S* state;
  const i64* slots;  // or null: sequence b has state b
  X* y;
  i64 B, H, N, W;
  double eps;
};

// What a channel's row of the state meets.
struct alignas(16) Channel {
  float k, r, decay, ku;
};

struct Shared {
  Channel channels[WARPS][N];
};

// Four columns of a state of type S as they come.
template <typename S> struct Four {
  uint2 bits;
  __device__ __forceinline__ explicit operator float4() const {
    return {to_float(S{u16(bits.x)}), to_float(S{u16(bits.x >> 16)}), to_float(S{u16(bits.y)}),
            to_float(S{u16(bits.y >> 16)})};
  }
};
template <> struct Four<float> {
  float4 bits;
  __device__ __forceinline__ explicit operator float4() const { return bits; }
};
// A row's registers take the next one as soon as they are free, and not before.
template <typename S> __device__ __forceinline__ Four<S> load_four(const S* x) {
  Four<S> found;
  load_in_turn(found.bits, x);
  return found;
}

template <typename T, typename X, typename S, int TERMS>
__global__ void __launch_bounds__(THREADS, 2) rwkv6_time_mix_batch(const Args<T, X, S> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const int W = int(args.W), B = int(args.B), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int eights = (B + WARPS - 1) / WARPS, h = blockIdx.x / eights, b = blockIdx.x % eights * WARPS + warp;
  const i64 D = args.H * N, head = i64(h) * N, at = b * D + head;
  const int column = lane % QUADS * 4, group = lane / QUADS;
  float* const s_low = reinterpret_cast<float*>(&s + 1) + warp * W;
  T* const s_up = reinterpret_cast<T*>(reinterpret_cast<float*>(&s + 1) + WARPS * W);

  constexpr int EACH = 16 / sizeof(T);
  for (int n = tid; n < W * (N / EACH); n += THREADS) {
    const int w = n / (N / EACH), j = n % (N / EACH) * EACH;
    cp_async<16>(s_up + w * N + j, args.up + w * D + head + j, true);
  }
  cp_async_commit();
  S* const state = b < B ? args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N : nullptr;
  Four<S> held[HELD] = {};
  const auto place = [&](int row) { return state + (row * GROUPS + group) * N + column; };
  if (state)
#pragma unroll
    for (int n = 0; n < HELD; ++n) held[n] = load_four(place(n));
  const int own = 2 * lane;  // and its neighbour: the lane's channels of the decay
  float2 z = load2(args.decay + head + own);
  const float2 u = load2(args.u + head + own);
  if (tid == 0) prefetch_l2(args.weight + head, 4 * N), prefetch_l2(args.bias + head, 4 * N);
  cp_async_wait<0>();
  __syncthreads();  // `up` stands
  wait_for_previous();
  if (!state) return;

  for (int w = lane; w < W; w += 32) s_low[w] = tanhf(args.low[i64(b) * W + w]);
  __syncwarp();
  const float2 k = load2(args.k + at + own), r = load2(args.r + at + own);
  const float4 v = load4(args.v + at + column);
#pragma unroll 8
  for (int w = 0; w < W; ++w) {
    const float2 up = load2(s_up + w * N + own);
    z = {fmaf(s_low[w], up.x, z.x), fmaf(s_low[w], up.y, z.y)};
  }
  s.channels[warp][own] = {k.x, r.x, decay_of(-expf(z.x)), k.x * u.x};
  s.channels[warp][own + 1] = {k.y, r.y, decay_of(-expf(z.y)), k.y * u.y};
  __syncwarp();

  float4 o = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    const float4 old = float4(held[row % HELD]);
    if (row + HELD < ROWS) held[row % HELD] = load_four(place(row + HELD));
    if (row % 4 == 0) __syncwarp();  // or all rows' channels are loaded first, and take registers
    const Channel c = s.channels[warp][row * GROUPS + group];
    store4(place(row), step_channel(o, old, v, c.k, c.r, c.decay, c.ku));
  }
  // All groups' channels: every lane has the sum of its columns.
#pragma unroll
  for (int by = QUADS; by < 32; by *= 2) {
    o = {o.x + __shfl_xor_sync(0xffffffffu, o.x, by), o.y + __shfl_xor_sync(0xffffffffu, o.y, by),
         o.z + __shfl_xor_sync(0xffffffffu, o.z, by), o.w + __shfl_xor_sync(0xffffffffu, o.w, by)};
  }
  constexpr float SHARE = 1.f / (N * GROUPS);  // each column is in GROUPS lanes
  const float mean = warp_sum((o.x + o.y) + (o.z + o.w)) * SHARE;
  o = {o.x - mean, o.y - mean, o.z - mean, o.w - mean};
  const float variance = warp_sum((o.x * o.x + o.y * o.y) + (o.z * o.z + o.w * o.w)) * SHARE;
  const float scale = inverse_root(variance + float(args.eps));
  if (group > 0) return;
  const float4 open = load4(args.gate + at + column);
  const float4 gain = load4(args.weight + head + column), bias = load4(args.bias + head + column);
  const auto gated = [](float normed, float gate) { return normed * gate * sigmoid(gate); };
  store4_terms<TERMS>(
      args.y + at + column, args.B * D,
      {gated(fmaf(o.x * scale, gain.x, bias.x), open.x), gated(fmaf(o.y * scale, gain.y, bias.y), open.y),
       gated(fmaf(o.z * scale, gain.z, bias.z), open.z), gated(fmaf(o.w * scale, gain.w, bias.w), open.w)});
}
