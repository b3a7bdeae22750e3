// what      The time mix of one token of many sequences, as time_mix_batch.cu has it: a warp takes several sequences in
//           turn, and asks for the next one's state and inputs while it computes with this one's.
// math      w = exp(-exp(decay + tanh(low) up));  o = r^T (S + diag(u) k v^T);  S = diag(w) S + k v^T
//           y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate [B, H, N], low [B, W], y [B, H, N], up [W, H, N], decay u weight bias [H, N],
//           state [P, H, N, N], slots [B] or null; N = 64
// grid      a block for every (head, turns WARPS sequences), heads slowest; 256 threads: a lane has four columns of a
//           state and every second channel
// smem      Shared, then low of two sequences of each warp, as it is and its tanh, then `up` of a head
// barriers  one: what a head's sequences share stands. Warps work alone
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N = 64, W even; all start on 16 bytes; some launch between this one and the last that wrote the states has
//           waited for the one before it before it let the next begin: states are read without waiting; sm_90a
#include "rwkv6/time_mix_heads.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32;

template <typename T, typename S> struct Args : TimeMixArgs<T, T, S> {
  i64 turns;
};

struct Shared {
  float4 channels[WARPS][N];  // what a channel's row of the state meets: k, r, decay, k u
  float inputs[WARPS][3][N];  // k, v and r of the next sequence
  float gates[WARPS][2][N];   // of this one and the next
  float head[4][N];           // decay, u, weight, bias
};

template <typename T, typename S>
__global__ void __launch_bounds__(THREADS, 2) rwkv6_time_mix_many(const Args<T, S> args) {
  constexpr int HELD = sizeof(S) < 4 ? ROWS : ROWS / 2;  // rows on their way: as many as there are registers for
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const int W = int(args.W), H = int(args.H), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const int each = WARPS * int(args.turns), groups = (int(args.B) + each - 1) / each, h = blockIdx.x / groups;
  const int start = blockIdx.x % groups * each, first = start + warp, stop = min(int(args.B), start + each);
  float* const s_low = reinterpret_cast<float*>(&s + 1) + warp * 2 * W;
  T* const s_up = reinterpret_cast<T*>(reinterpret_cast<float*>(&s + 1) + WARPS * 2 * W);

  constexpr int EACH = 16 / sizeof(T);
  for (int n = tid; n < W * (N / EACH); n += THREADS) {
    const int w = n / (N / EACH), j = n % (N / EACH) * EACH;
    cp_async<16>(s_up + w * N + j, args.up + (i64(w) * H + h) * N + j, true);
  }
  if (tid < 4 * QUADS) {
    const int which = tid / QUADS, j = tid % QUADS * 4;
    const float* const from = which == 0 ? args.decay : which == 1 ? args.u : which == 2 ? args.weight : args.bias;
    cp_async<16>(&s.head[which][j], from + h * N + j, true);
  }
  cp_async_commit();
  // The lane's part of a sequence's state.
  const auto state_of = [&](int b) { return args.state_of(b, h, N) + lane / QUADS * N + lane % QUADS * 4; };
  const auto place = [](int row) { return row * GROUPS * N; };
  S* state = first < stop ? state_of(first) : nullptr;
  Four<S> held[HELD] = {};
  if (state)
#pragma unroll
    for (int n = 0; n < HELD; ++n) held[n] = load_four(state + place(n));
  cp_async_wait<0>();
  __syncthreads();  // what a head's sequences share stands
  wait_for_previous();

  // Has a sequence's inputs copied.
  const auto copy_inputs = [&](int b, int slot) {
    const int j = lane % QUADS * 4;
    const i64 at = (i64(b) * H + h) * N + j;
    const bool lower = lane < QUADS;
    cp_async<16>(&s.inputs[warp][lower ? 0 : 1][j], (lower ? args.k : args.v) + at, true);
    cp_async<16>(lower ? &s.inputs[warp][2][j] : &s.gates[warp][slot][j], (lower ? args.r : args.gate) + at, true);
    for (int w = 2 * lane; w < W; w += 64) cp_async<8>(s_low + W + w, args.low + i64(b) * W + w, true);
    cp_async_commit();
  };
  if (state) copy_inputs(first, 0);
  int slot = 0;
#pragma unroll 1
  for (int b = first; b < stop; b += WARPS, slot ^= 1) {
    // Places are computed anew, or they would be kept in registers.
    const int me = opaque(lane), own = 2 * me, column = me % QUADS * 4;
    cp_async_wait<0>();
    __syncwarp();  // the warp's inputs stand
    for (int w = me; w < W; w += 32) s_low[w] = tanhf(s_low[W + w]);
    const float2 k = load2(&s.inputs[warp][0][own]), r = load2(&s.inputs[warp][2][own]), u = load2(&s.head[1][own]);
    const float4 v = load4(&s.inputs[warp][1][column]);
    const float2 z = load2(&s.head[0][own]);
    __syncwarp();  // tanh(low) stands
    const float2 decay = decays_of_channels(z, s_low, s_up, W, own);
    s.channels[warp][own] = {k.x, r.x, decay.x, k.x * u.x};
    s.channels[warp][own + 1] = {k.y, r.y, decay.y, k.y * u.y};
    __syncwarp();  // the channels stand, and the inputs' places are free

    S* const next = b + WARPS < stop ? state_of(b + WARPS) : nullptr;
    if (next) copy_inputs(b + WARPS, slot ^ 1);
    float4 o = {};
#pragma unroll
    for (int row = 0; row < ROWS; ++row) {
      const float4 old = float4(held[row % HELD]);
      float4 c;  // all rows' at once would take all registers
      load_shared_in_turn(c, &s.channels[warp][row * GROUPS + lane / QUADS]);
      store4(state + place(row), step_channel(o, old, v, c.x, c.y, c.z, c.w));
      if (row + HELD < ROWS) held[row % HELD] = load_four(state + place(row + HELD));
      else if (next) held[row % HELD] = load_four(next + place(row + HELD - ROWS));
    }
    state = next;
    o = group_norm(o, float(args.eps));
    const float4 gain = load4(&s.head[2][column]), bias = load4(&s.head[3][column]);
    const float4 gate = load4(&s.gates[warp][slot][column]);
    if (me < QUADS) store4(args.y + (i64(b) * H + h) * N + column, gated(o, gain, bias, gate));
  }
}
