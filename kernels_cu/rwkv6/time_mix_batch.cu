// what      The time mix of one token of many sequences: decay, state, group norm, gate; each state is read and written
//           once, and the next one is on its way while one is in work.
// math      w = exp(-exp(decay + tanh(low) up));  o = r^T (S + diag(u) k v^T);  S = diag(w) S + k v^T
//           y = GroupNorm_H(o) silu(gate)
// shapes    k v r gate y [B, H, N], low [B, W], up [W, H, N], decay u weight bias [H, N], state [P, H, N, N],
//           slots [B] or null
// grid      any number of blocks, each with its share of all (head, sequence), heads slowest; 256 threads: four columns
//           of the state and every (1024 / N)-th channel each, or a quarter of a channel's sums
// smem      Shared, then for two units N N of the state, k v r gate, low; then `up` of a head
// barriers  a unit's: inputs, tanh(low), decay, parts of o, and the two sums of the group norm
// numerics  float32; the state of type S is rounded when it is stored; the variance from centred values
// source    Peng et al., 2024, "Eagle and Finch", eq. 16-19
// limits    N a multiple of 4, up to 64
#include "decode.cuh"

constexpr int THREADS = 256, WARPS = THREADS / 32, MAX_N = 64, QUARTERS = 4;
constexpr int GAP = 8;  // behind a row of `up`: no bank conflicts

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

struct Shared {
  float base[MAX_N], u[MAX_N], gain[MAX_N], bias[MAX_N];  // of a head
  float decay[MAX_N];
  float parts[4 * THREADS];  // of o: [4 THREADS / N, N]
  float sum[WARPS], squares[WARPS];
};

__device__ __forceinline__ float sum_of_quarters(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// The sum over the channels, of which each has its value in four threads.
__device__ __forceinline__ float sum_of_channels(float x, float (&parts)[WARPS]) {
  x = warp_sum(x);
  if ((threadIdx.x & 31) == 0) parts[threadIdx.x >> 5] = x;
  __syncthreads();  // the warps' sums stand
  float sum = 0.f;
#pragma unroll
  for (int n = 0; n < WARPS; ++n) sum += parts[n];
  return sum * (1.f / QUARTERS);
}

template <typename T, typename X, typename S>
__global__ void __launch_bounds__(THREADS, 4) rwkv6_time_mix_batch(const Args<T, X, S> args) {
  Shared& s = *reinterpret_cast<Shared*>(dynamic_smem());
  launch_next();
  const int N = int(args.N), W = int(args.W), B = int(args.B), tid = threadIdx.x;
  const i64 D = args.H * N, units = args.H * B;
  const int first = int(units * blockIdx.x / gridDim.x), last = int(units * (blockIdx.x + 1) / gridDim.x);
  const int state_bytes = N * N * int(sizeof(S)), stage_bytes = state_bytes + (4 * N + (W + 3) / 4 * 4) * 4;
  unsigned char* const stages = reinterpret_cast<unsigned char*>(&s + 1);
  T* const s_up = reinterpret_cast<T*>(stages + 2 * stage_bytes);
  const auto state_of = [&](int unit) {
    const i64 b = unit % B, h = unit / B;
    return args.state + ((args.slots ? args.slots[b] : b) * args.H + h) * N * N;
  };
  const auto copy = [&](int unit) {
    if (unit < last) {
      unsigned char* const stage = stages + (unit - first) % 2 * stage_bytes;
      const unsigned char* state = reinterpret_cast<const unsigned char*>(state_of(unit));
      for (int at = 16 * tid; at < state_bytes; at += 16 * THREADS) cp_async<16>(stage + at, state + at, true);
      const i64 b = unit % B, at = b * D + i64(unit / B) * N;
      float* const vectors = reinterpret_cast<float*>(stage + state_bytes);
      if (tid < N) {  // N / 4 threads a vector
        const int which = tid / (N / 4), j = tid % (N / 4) * 4;
        const float* from = which == 0 ? args.k : which == 1 ? args.v : which == 2 ? args.r : args.gate;
        cp_async<16>(vectors + which * N + j, from + at + j, true);
      }
      for (int w = tid; w < W; w += THREADS) cp_async<4>(vectors + 4 * N + w, args.low + b * W + w, true);
    }
    cp_async_commit();
  };
  wait_for_previous();
  copy(first);

  const int quads = N / 4, groups = THREADS / quads, group = tid / quads, column = tid % quads * 4;
  const int channel = tid / QUARTERS, quarter = tid % QUARTERS;
  const float inverse_N = 1.f / N;
  int before = -1;  // the head whose parameters stand
#pragma unroll 1
  for (int unit = first; unit < last; ++unit) {
    const int h = unit / B, b = unit % B;
    if (h != before) {  // whose readers have passed a barrier since
      for (int at = tid; at < W * N; at += THREADS)
        s_up[at / N * (N + GAP) + at % N] = args.up[at / N * D + h * N + at % N];
      if (tid < N) {
        s.base[tid] = args.decay[h * N + tid], s.u[tid] = args.u[h * N + tid];
        s.gain[tid] = args.weight[h * N + tid], s.bias[tid] = args.bias[h * N + tid];
      }
      before = h;
    }
    cp_async_wait<0>();
    __syncthreads();  // the inputs stand, the other stage is free
    copy(unit + 1);
    unsigned char* const stage = stages + (unit - first) % 2 * stage_bytes;
    const S* old = reinterpret_cast<const S*>(stage);
    const float* k = reinterpret_cast<const float*>(stage + state_bytes);
    const float *v = k + N, *r = k + 2 * N, *gate = k + 3 * N;
    float* const low = reinterpret_cast<float*>(stage + state_bytes) + 4 * N;
    for (int w = tid; w < W; w += THREADS) low[w] = tanhf(low[w]);
    __syncthreads();  // tanh(low) stands

    float z = 0.f;
    if (channel < N)
#pragma unroll 4
      for (int w = quarter; w < W; w += QUARTERS) z = fmaf(low[w], to_float(s_up[w * (N + GAP) + channel]), z);
    z = sum_of_quarters(z);
    if (channel < N && quarter == 0) s.decay[channel] = decay_of(-expf(z + s.base[channel]));
    __syncthreads();  // the decay stands

    if (group < groups) {
      S* const state = state_of(unit);
      const float4 values = load4(v + column);
      float4 o = {};
#pragma unroll 4
      for (int c = group; c < N; c += groups) {
        const float4 S_c = load4(old + c * N + column);
        const float key = k[c], query = r[c], decay = s.decay[c], ku = key * s.u[c];
        o = {fmaf(query, fmaf(ku, values.x, S_c.x), o.x), fmaf(query, fmaf(ku, values.y, S_c.y), o.y),
             fmaf(query, fmaf(ku, values.z, S_c.z), o.z), fmaf(query, fmaf(ku, values.w, S_c.w), o.w)};
        store4(state + c * N + column, {fmaf(decay, S_c.x, key * values.x), fmaf(decay, S_c.y, key * values.y),
                                        fmaf(decay, S_c.z, key * values.z), fmaf(decay, S_c.w, key * values.w)});
      }
      store4(s.parts + group * N + column, o);
    }
    __syncthreads();  // the parts of o stand

    float o = 0.f;
    if (channel < N)
      for (int n = quarter; n < groups; n += QUARTERS) o += s.parts[n * N + channel];
    o = sum_of_quarters(o);
    const float gain = channel < N ? s.gain[channel] : 0.f, bias = channel < N ? s.bias[channel] : 0.f;
    const float mean = sum_of_channels(o, s.sum) * inverse_N;
    const float centred = channel < N ? o - mean : 0.f;
    const float variance = sum_of_channels(centred * centred, s.squares) * inverse_N;
    if (channel < N && quarter == 0) {
      const float normed = fmaf(centred * inverse_root(variance + float(args.eps)), gain, bias);
      const float open = gate[channel];
      args.y[b * D + h * N + channel] = from_float<X>(normed * open * sigmoid(open));
    }
  }
}
