// what      The time mix of one token: decay, state, group norm, gate; each state is read and written once.
// math      w = exp(-exp(decay_base + tanh(decay_low) decay_up));  o = r^T (S + diag(bonus) k v^T)
//           S = diag(w) S + k v^T;  y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate y [B, H, N], decay_low [B, W], decay_up [W, H, N], decay_base bonus weight bias [H, N], state
//           [pool, H, N, N], slots [B] or null
// grid      a block for every (sequence, head), sequence slowest; 256 threads: four columns of the state and every
//           (1024 / N)-th channel each
// smem      TimeMixScratch
// barriers  six: inputs, groups' sums of the decay, decay, groups' sums of o, and the two sums of the group norm
// numerics  float32; the state of type S is rounded when it is stored
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N a multiple of 4, up to MAX_N = 256; W up to MAX_W = 512
#include "rwkv6/time_mix.cuh"
#include "rwkv6/time_mix_arguments.cuh"
#include "cards.cuh"

// From the includes:
//   THREADS = 256
//   StatePart: a thread's part of the state; ChannelOfHead: of its channel; time_mix_head: decay, state and y
//   store_terms: a number as a sum of TERMS terms

// Blocks on a multiprocessor, which bound registers; 0: no bound. Where a number is given, the assembler would choose
// fewer registers and spill.
constexpr int BLOCKS = BEFORE_SM90 ? 4 : 0;

template <typename T, typename X, typename S, int TERMS>
__global__ void __launch_bounds__(THREADS, BLOCKS) rwkv6_time_mix_step(const TimeMixArgs<T, X, S> args) {
  auto& s = *reinterpret_cast<TimeMixScratch*>(dynamic_smem());
  launch_next();  // the next kernel may begin
  const int N = int(args.N), W = int(args.W), tid = threadIdx.x;
  const i64 h = blockIdx.x % args.H, b = blockIdx.x / args.H, D = args.H * N, head_offset = h * N,
            offset = b * D + head_offset;  // of [H, N], of [B, H, N]
  S* state = args.state_of(b, h, N);
  if (tid < N / 4) prefetch_l2(state + tid * 4 * N, sizeof(S) * 4 * N);
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read

  ChannelOfHead channel = {};
  if (tid < N) {
    s.k[tid] = args.k[offset + tid];
    s.v[tid] = args.v[offset + tid];
    s.r[tid] = args.r[offset + tid];
    s.u[tid] = args.bonus[head_offset + tid];
    channel = {args.decay_base[head_offset + tid], silu(args.gate[offset + tid]), args.weight[head_offset + tid],
               args.bias[head_offset + tid]};
  }
  const StatePart part(state, N, tid, HOLDS_ROWS);
  for (int j = tid; j < W; j += THREADS) s.low[j] = tanhf(args.decay_low[b * W + j]);
  sync();  // the inputs are in shared memory

  const int splits = THREADS / N, split = tid / N;
  if (split < splits) {
    float sum = 0.f;
#pragma unroll 8
    for (int j = split; j < W; j += splits)
      sum = fmaf(s.low[j], to_float(args.decay_up[j * D + head_offset + tid % N]), sum);
    s.group_sums[split * N + tid % N] = sum;
  }
  // Adds the sums of the decay, steps the state, and calls the function with each y (time_mix.cuh).
  time_mix_head(s, part, state, N, tid, channel, float(args.eps),
                [&](int n, float y) { store_terms<TERMS>(args.y + offset + n, args.B * D, y); });
}
