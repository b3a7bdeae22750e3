// what      The time mix of one token: decay, state, group norm, gate; each state is read and written once.
// math      w = exp(-exp(decay + tanh(low) up));  o = r^T (S + diag(u) k v^T);  S = diag(w) S + k v^T
//           y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate y [B, H, N], low [B, W], up [W, H, N], decay u weight bias [H, N], state [P, H, N, N],
//           slots [B] or null
// grid      a block for every (sequence, head), sequence slowest; 256 threads: four columns of the state and every
//           (1024 / N)-th channel each
// smem      Shared
// barriers  six: inputs, parts of the decay, decay, parts of o, and the two sums of the group norm
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N a multiple of 4, up to 256; W up to 512
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_N = 256, MAX_W = 512;

template <typename T, typename X> struct Args {
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
  float* state;
  const i64* slots;  // or null: sequence b has state b
  X* y;
  i64 B, H, N, W;
  double eps;
};

struct Shared {
  float k[MAX_N], v[MAX_N], r[MAX_N], u[MAX_N];
  float decay[MAX_N];
  float low[MAX_W];
  float parts[4 * THREADS];  // [., N], of the decay, then of o
  float sum[WARPS], squares[WARPS];
};

template <typename T, typename X>
__global__ void __launch_bounds__(THREADS) rwkv6_time_mix_step(const Args<T, X> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const int N = int(args.N), W = int(args.W), tid = threadIdx.x;
  const i64 h = blockIdx.x % args.H, b = blockIdx.x / args.H, D = args.H * N, at = b * D + h * N;
  float* state = args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N;
  if (tid < N) prefetch_l2(state + tid * N, 4 * N);
  wait_for_previous();

  if (tid < N) {
    s.k[tid] = args.k[at + tid];
    s.v[tid] = args.v[at + tid];
    s.r[tid] = args.r[at + tid];
    s.u[tid] = args.u[h * N + tid];
  }
  for (int j = tid; j < W; j += THREADS) s.low[j] = tanhf(args.low[b * W + j]);
  __syncthreads();  // the inputs stand

  const int shares = THREADS / N, share = tid / N, channel = tid % N;
  if (share < shares) {
    float part = 0.f;
#pragma unroll 8
    for (int j = share; j < W; j += shares) part = fmaf(s.low[j], to_float(args.up[j * D + h * N + channel]), part);
    s.parts[share * N + channel] = part;
  }
  __syncthreads();  // the parts of the decay stand
  if (tid < N) {
    float z = args.decay[h * N + tid];
    for (int n = 0; n < shares; ++n) z += s.parts[n * N + tid];
    s.decay[tid] = decay_of(-expf(z));
  }
  __syncthreads();  // the decay stands, its parts are free

  const int quads = N / 4, groups = THREADS / quads, group = tid / quads, column = tid % quads * 4;
  if (group < groups) {
    const float4 v = load4(s.v + column);
    float4 o = {};
#pragma unroll 4
    for (int c = group; c < N; c += groups) {
      const float k = s.k[c], r = s.r[c], decay = s.decay[c], ku = k * s.u[c];
      float4 S = load4(state + c * N + column);
      o.x = fmaf(r, fmaf(ku, v.x, S.x), o.x);
      o.y = fmaf(r, fmaf(ku, v.y, S.y), o.y);
      o.z = fmaf(r, fmaf(ku, v.z, S.z), o.z);
      o.w = fmaf(r, fmaf(ku, v.w, S.w), o.w);
      S = {fmaf(decay, S.x, k * v.x), fmaf(decay, S.y, k * v.y), fmaf(decay, S.z, k * v.z), fmaf(decay, S.w, k * v.w)};
      *reinterpret_cast<float4*>(state + c * N + column) = S;
    }
    *reinterpret_cast<float4*>(s.parts + group * N + column) = o;
  }
  __syncthreads();  // the parts of o stand

  float o = 0.f;
  if (tid < N)
    for (int n = 0; n < groups; ++n) o += s.parts[n * N + tid];
  const float mean = block_sum<WARPS>(o, s.sum) / N;
  const float centred = tid < N ? o - mean : 0.f;
  const float variance = block_sum<WARPS>(centred * centred, s.squares) / N;
  if (tid < N) {
    const float gate = args.gate[at + tid], normed = centred / sqrtf(variance + float(args.eps));
    const float y = fmaf(normed, args.weight[h * N + tid], args.bias[h * N + tid]);
    args.y[at + tid] = from_float<X>(y * gate * sigmoid(gate));
  }
}
