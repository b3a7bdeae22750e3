// what      The time mix of one token for heads of 64 channels: keys, state, group norm, bonus, gate; each state is
//           read and written once, and is loaded before the previous kernel has ended.
// math      v += (first - v) share;  kappa = k removal / |k removal|;  key = k (1 + (rate - 1) replacement)
//           e = S^T kappa;  S <- diag(exp w) S - (kappa rate) e^T + key v^T;  o = S^T r of the new S
//           y = (GroupNorm_H(o) + (sum r key bonus) v) gate, GroupNorm with weight and bias. In the paper: rate is a,
//           removal is xi, replacement alpha, bonus rho
// shapes    v k r and log decays w [B, H, N], openings [3, B, H, N] (what decode_one.cu computes by low-rank matrices):
//           rate, gate, share, which is -1 in the first layer; first [B, H, N], that layer's values, which it writes;
//           removal replacement bonus weight bias [H, N]; state [pool, H, N, N], the key's channel first, slots [B] or
//           null; y [TERMS, B, H, N] of type X, the sum of TERMS arrays; N = 64
// grid      rwkv7/cuda_decode.py launches a block for every (sequence, head), sequence slowest; a warp: a lane has four
//           columns of the state and every second channel
// smem      Shared, then [ROWS - HELD, 2, N] numbers of type S: the rows of the state that are not in registers
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N = 64. States are read before the previous kernel has ended. So between this launch and the one that last
//           wrote them there must be another launch that waits for its predecessor (wait_for_previous) before it
//           calls launch_next
#include "rwkv6/time_mix_heads.cuh"
#include "rwkv7/time_mix_arguments.cuh"

// From the includes:
//   QUADS = 16 lanes share a channel, GROUPS = 2 channels at once, ROWS = 32 rows of a lane
//   load2: two neighbouring floats; load4: four neighbouring floats, or numbers of a state as floats; store4 the same;
//   store4_evict_first: store4 of numbers that leave L2 before others; Four, load_four: four neighbouring numbers of a
//   state
//   add_scaled(x, f, y) = x + f y; LEAST_NORM: the least that |k removal| counts as
//   group_norm: o of the lane's columns, summed over the lanes that have them, and normalised over the head
//   store4_terms: four numbers as sums of TERMS terms

// Of each channel of the key.
struct Shared {
  float2 reads[N];   // x: kappa before its division by the norm; y: r times the decay
  float4 writes[N];  // x: decay; y: kappa rate before the division; z: key
};

// HELD: a lane's first rows of the state before the token, which are in registers; the others are copied to shared
// memory, past L1. With all in registers a multiprocessor has registers for 8 blocks, else for 12.
template <typename X, typename S, int TERMS, int HELD>
__global__ void __launch_bounds__(32, HELD == ROWS ? 8 : 12) rwkv7_time_mix_batch(const Args<X, S> args) {
  auto& s = *reinterpret_cast<Shared*>(dynamic_smem());
  S* const s_rows = reinterpret_cast<S*>(&s + 1);
  launch_next();  // the next kernel may begin
  const int lane = threadIdx.x, column = lane % QUADS * 4, group = lane / QUADS;
  const int own_channel = 2 * lane;  // the first of two channels whose keys the lane computes
  const i64 h = blockIdx.x % args.H, b = blockIdx.x / args.H, D = args.H * N, head_offset = h * N,
            offset = b * D + head_offset;
  S* const state = args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N;
  // In one expression: otherwise the compiler does not see that it is aligned, and splits stores of 16 bytes.
  const auto row_address = [&](int row) { return state + row * GROUPS * N + 4 * lane; };
  constexpr int PIECE = 16 / sizeof(S);
#pragma unroll
  for (int n = 0; n < (ROWS - HELD) * GROUPS * N; n += 32 * PIECE)
    cp_async<16>(s_rows + n + PIECE * lane, state + HELD * GROUPS * N + n + PIECE * lane);
  cp_async_commit();
  Four<S> held[HELD];
#pragma unroll
  for (int row = 0; row < HELD; ++row) held[row] = load_four(row_address(row));
  const auto before = [&](int row) {  // the lane's four columns of a row
    return row < HELD ? float4(held[row]) : load4(s_rows + (row - HELD) * GROUPS * N + 4 * lane);
  };
  const float2 removal = load2(args.removal + head_offset + own_channel),
               replacement = load2(args.replacement + head_offset + own_channel);
  const float2 bonus = load2(args.bonus + head_offset + own_channel);
  const float4 gain = load4(args.weight + head_offset + column), bias = load4(args.bias + head_offset + column);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  const float2 k = load2(args.k + offset + own_channel), r = load2(args.r + offset + own_channel),
               w = load2(args.w + offset + own_channel);
  const float2 rate = load2(args.openings + offset + own_channel);
  const float4 gate = load4(args.openings + args.B * D + offset + column);
  const float4 share = load4(args.openings + 2 * args.B * D + offset + column);
  float4 v = load4(args.v + offset + column);
  // Loaded before `share` says whether it is used, since a load behind that one would begin later.
  const float4 first = load4(args.first + offset + column);
  float4 dots = {};  // |kappa|^2 and r (kappa rate) before the norm, r key, r key bonus
  const auto put = [&](int c, float k, float r, float w, float rate, float removal, float replacement, float bonus) {
    const float removed = k * removal, key = k * fmaf(rate - 1.f, replacement, 1.f), decay = decay_of(w);
    s.reads[c] = {removed, r * decay}, s.writes[c] = {decay, removed * rate, key, 0.f};
    dots = add_scaled(dots, 1.f, {removed * removed, r * removed * rate, r * key, r * key * bonus});
  };
  put(own_channel, k.x, r.x, w.x, rate.x, removal.x, replacement.x, bonus.x);
  put(own_channel + 1, k.y, r.y, w.y, rate.y, removal.y, replacement.y, bonus.y);
  if (share.x < 0.f) {  // the first layer
    store4(args.first + offset + column, v);
  } else {
    v = {fmaf(first.x - v.x, share.x, v.x), fmaf(first.y - v.y, share.y, v.y), fmaf(first.z - v.z, share.z, v.z),
         fmaf(first.w - v.w, share.w, v.w)};
  }
  dots = {warp_sum(dots.x), warp_sum(dots.y), warp_sum(dots.z), warp_sum(dots.w)};
  const float norm = fmaxf(sqrtf(dots.x), LEAST_NORM);
  cp_async_wait<0>();
  __syncwarp();  // s and s_rows are in shared memory

  // Rows whose channels are loaded at a time, since registers are few: __syncwarp keeps the compiler from loading those
  // of later rows earlier.
  constexpr int AT_ONCE = 4;
  // e: S^T removed, later -e / |removed| of `math`; o: S^T (decay r), of the state before, to which the terms that the
  // token writes are added below.
  float4 e = {}, o = {};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row % AT_ONCE == 0) __syncwarp();
    const float2 read = s.reads[row * GROUPS + group];
    const float4 old = before(row);
    e = add_scaled(e, read.x, old), o = add_scaled(o, read.y, old);
  }
  const float scale = -1.f / (norm * norm);  // one factor of 1 / norm is that of the kappa which is written
  static_assert(GROUPS == 2);                // one exchange adds up the groups
  const auto erased = [&](float x) { return scale * (x + __shfl_xor_sync(0xffffffffu, x, QUADS)); };
  e = {erased(e.x), erased(e.y), erased(e.z), erased(e.w)};
#pragma unroll
  for (int row = 0; row < ROWS; ++row) {
    if (row % AT_ONCE == 0) __syncwarp();
    const float4 write = s.writes[row * GROUPS + group], old = before(row);
    const float4 kept = {write.x * old.x, write.x * old.y, write.x * old.z, write.x * old.w};
    // Leaving first, so that L2 keeps the vectors of the sequences that come later.
    store4_evict_first(row_address(row), add_scaled(add_scaled(kept, write.y, e), write.z, v));
  }

  // group_norm adds up the lanes' o over the GROUPS groups. Every group has all of e and v, and adds a share of them.
  constexpr float PER_GROUP = 1.f / GROUPS;
  o = group_norm(add_scaled(add_scaled(o, PER_GROUP * dots.y, e), PER_GROUP * dots.z, v), float(args.eps));
  if (group > 0) return;
  const auto gated = [&](float normed, float gain, float bias, float v, float gate) {
    return fmaf(dots.w, v, fmaf(normed, gain, bias)) * gate;
  };
  store4_terms<TERMS>(args.y + offset + column, args.B * D,
                      {gated(o.x, gain.x, bias.x, v.x, gate.x), gated(o.y, gain.y, bias.y, v.y, gate.y),
                       gated(o.z, gain.z, bias.z, v.z, gate.z), gated(o.w, gain.w, bias.w, v.w, gate.w)});
}
