// what      The time mix of one token: keys, state, group norm, bonus, gate; each state is read and written once. Of
//           heads with more than 64 channels, the part that registers do not hold is read twice.
// math      v += (first - v) share;  kappa = k removal / |k removal|;  key = k (1 + (rate - 1) replacement)
//           e = S^T kappa;  S <- diag(exp w) S - (kappa rate) e^T + key v^T;  o = S^T r of the new S
//           y = (GroupNorm_H(o) + (sum r key bonus) v) gate
// shapes    v k r and log decays w [B, H, N], openings [3, B, H, N]: rate, gate, share, which is -1 in the first layer;
//           first [B, H, N], that layer's values, which it writes; removal replacement bonus weight bias [H, N];
//           state [pool, H, N, N], slots [B] or null; y [TERMS, B, H, N]
// grid      rwkv7/cuda_decode.py launches a block for every (sequence, head), sequence slowest; 256 threads: four
//           columns of the state and every (1024 / N)-th channel each
// smem      Scratch
// barriers  those of a head (rwkv7/time_mix.cuh)
// numerics  float32; the state of type S is rounded when it is stored
// source    Peng et al., 2025, "RWKV-7 Goose", section 4 (2503.14456)
// limits    N a multiple of 4, up to 256
#include "rwkv7/time_mix.cuh"
#include "rwkv7/time_mix_arguments.cuh"
#include "cards.cuh"

// From the includes:
//   THREADS = 256
//   StatePart: a thread's part of the state; KeyParameters, Token: of its channel; time_mix_head: keys, state and y
//   store_terms: a number as a sum of TERMS terms

// Blocks on a multiprocessor, which bound registers: without a bound the assembler spills on some cards.
constexpr int BLOCKS = BEFORE_SM90 ? 3 : 2;

template <typename X, typename S, int TERMS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rwkv7_time_mix_step(const Args<X, S> args) {
  auto& s = *reinterpret_cast<Scratch*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int N = int(args.N), tid = threadIdx.x;
  const i64 h = blockIdx.x % args.H, b = blockIdx.x / args.H, D = args.H * N, head_offset = h * N,
            offset = b * D + head_offset + tid;
  S* const state = args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N;
  if (tid < N / 4) prefetch_l2(state + tid * 4 * N, sizeof(S) * 4 * N);
  const bool busy = tid < N;
  KeyParameters own = {};
  if (busy)
    own = {args.removal[head_offset + tid], args.replacement[head_offset + tid], args.bonus[head_offset + tid],
           args.weight[head_offset + tid], args.bias[head_offset + tid]};
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  Token token = {};
  if (busy) {
    const float share = args.openings[2 * args.B * D + offset];
    float v = args.v[offset];
    if (share < 0.f) args.first[offset] = v;  // the first layer
    else v = fmaf(args.first[offset] - v, share, v);
    token = {args.k[offset],        v,
             args.r[offset],        decay_of(args.w[offset]),
             args.openings[offset], args.openings[args.B * D + offset]};
  }
  const StatePart part(state, N, tid, HOLDS_ROWS);
  // Computes the new state and y; the function is called with each y.
  time_mix_head(s, part, state, N, tid, own, token, float(args.eps),
                [&](int, float y) { store_terms<TERMS>(args.y + offset, args.B * D, y); });
}
