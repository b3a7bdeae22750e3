// what      The time mix of one token: keys, state, group norm, bonus, gate; each state is read and written once. Of
//           heads with more than 64 channels, the part that registers do not hold is read twice.
// math      v += (first - v) share;  kappa = k removal / |k removal|;  key = k (1 + (rate - 1) replacement)
//           e = S^T kappa;  S = diag(exp w) S - (kappa rate) e^T + key v^T;  o = S^T r, from the S before
//           y = (GroupNorm_H(o) + (sum r key bonus) v) gate
// shapes    v k r w [B, H, N], openings [3, B, H, N]: rate, gate, share, which is -1 in the first layer; first
//           [B, H, N], that layer's values, which it writes; removal replacement bonus weight bias [H, N];
//           state [P, H, N, N], slots [B] or null; y [TERMS, B, H, N]
// grid      a block for every (sequence, head), sequence slowest; 256 threads: four columns of the state and every
//           (1024 / N)-th channel each
// smem      Scratch
// barriers  four: the token and its sums are in shared memory | parts of e and o | the first sum of the group norm, and
//           e | its second sum
// numerics  float32; the state of type S is rounded when it is stored
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N a multiple of 4, up to 256
#include "rwkv6/time_mix.cuh"
#include "rwkv7/time_mix_arguments.cuh"
#include "cards.cuh"

// Blocks on a multiprocessor, which bound registers: without a bound the assembler spills on some cards.
constexpr int BLOCKS = BEFORE_SM90 ? 3 : 2;

struct Scratch {
  float v[MAX_N], key[MAX_N], removed[MAX_N], written[MAX_N], decay[MAX_N], read[MAX_N];  // of the token
  float erased[MAX_N];
  float4 dots[WARPS];
  float sum[WARPS], squares[WARPS];
  float parts[2][4 * THREADS];  // [parts, N]: of e and of o
};

template <typename X, typename S, int TERMS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rwkv7_time_mix_step(const Args<X, S> args) {
  auto& s = *reinterpret_cast<Scratch*>(dynamic_smem());
  launch_next();
  const int N = int(args.N), tid = threadIdx.x;
  const i64 h = blockIdx.x % args.H, b = blockIdx.x / args.H, D = args.H * N, head = h * N, at = b * D + head + tid;
  S* const state = args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N;
  if (tid < N / 4) prefetch_l2(state + tid * 4 * N, sizeof(S) * 4 * N);
  const bool busy = tid < N;
  float removal = 0.f, replacement = 0.f, bonus = 0.f, gain = 0.f, bias = 0.f;
  if (busy) {
    removal = args.removal[head + tid], replacement = args.replacement[head + tid], bonus = args.bonus[head + tid];
    gain = args.weight[head + tid], bias = args.bias[head + tid];
  }
  wait_for_previous();

  float v = 0.f, gate = 0.f;
  float4 dots = {};  // |kappa|^2 and r (kappa rate) before the norm, r key, r key bonus
  if (busy) {
    const float k = args.k[at], r = args.r[at], rate = args.openings[at], share = args.openings[2 * args.B * D + at];
    gate = args.openings[args.B * D + at], v = args.v[at];
    if (share < 0.f) args.first[at] = v;
    else v = fmaf(args.first[at] - v, share, v);
    const float removed = k * removal, key = k * fmaf(rate - 1.f, replacement, 1.f), decay = decay_of(args.w[at]);
    s.v[tid] = v, s.key[tid] = key, s.removed[tid] = removed, s.written[tid] = removed * rate;
    s.decay[tid] = decay, s.read[tid] = r * decay;
    dots = {removed * removed, r * removed * rate, r * key, r * key * bonus};
  }
  const StatePart part(state, N, tid, true);
  dots = {warp_sum(dots.x), warp_sum(dots.y), warp_sum(dots.z), warp_sum(dots.w)};
  if ((tid & 31) == 0) s.dots[tid >> 5] = dots;
  sync();  // the token and the warps' dots are in shared memory
  dots = {};
#pragma unroll
  for (int n = 0; n < WARPS; ++n) dots = add_scaled(dots, 1.f, s.dots[n]);
  const float inverse = 1.f / fmaxf(sqrtf(dots.x), LEAST_NORM);

  const int groups = part.groups, group = part.group, column = part.column;
  const auto each_row = [&](const auto& row) {
    if (group >= groups) return;
#pragma unroll
    for (int n = 0; n < ROWS_HELD; ++n)
      if (group + n * groups < N) row(group + n * groups, part.held[n]);
#pragma unroll 2
    for (int c = group + ROWS_HELD * groups; c < N; c += groups) row(c, load4(state + c * N + column));
  };
  float4 found = {}, o_of_columns = {};
  each_row([&](int c, float4 old) {
    found = add_scaled(found, s.removed[c], old), o_of_columns = add_scaled(o_of_columns, s.read[c], old);
  });
  if (group < groups) {
    store4(s.parts[0] + group * N + column, found);
    store4(s.parts[1] + group * N + column, o_of_columns);
  }
  sync();  // the parts of e and of o are in shared memory

  float o = 0.f;
  if (busy) {
    float e = 0.f;
    for (int n = 0; n < groups; ++n) e += s.parts[0][n * N + tid], o += s.parts[1][n * N + tid];
    e *= inverse * inverse;  // one factor is that of the kappa which is written
    s.erased[tid] = e;
    o = fmaf(dots.z, v, fmaf(-dots.y, e, o));
  }
  const float inverse_N = 1.f / N, mean = sum_of_threads(o, s.sum, tid) * inverse_N;
  if (group < groups) {
    const float4 written = load4(s.v + column), erased = load4(s.erased + column);
    each_row([&](int c, float4 old) {
      const float decay = s.decay[c];
      const float4 kept = {decay * old.x, decay * old.y, decay * old.z, decay * old.w};
      store4(state + c * N + column, add_scaled(add_scaled(kept, -s.written[c], erased), s.key[c], written));
    });
  }
  const float centred = busy ? o - mean : 0.f;
  const float variance = sum_of_threads(centred * centred, s.squares, tid) * inverse_N;
  if (!busy) return;
  const float normed = fmaf(centred * inverse_root(variance + float(args.eps)), gain, bias);
  store_terms<TERMS>(args.y + at, args.B * D, fmaf(dots.w, v, normed) * gate);
}
