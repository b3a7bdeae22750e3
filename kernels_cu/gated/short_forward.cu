// what      GLA and RWKV-6 forward for sequences of at most 16 tokens that start from a state of 0: no product with a
//           state.
// math      E_ts, the product of the decays of tokens s + 1 ... t (RWKV-6: ... t - 1); F_s, that of s + 1 ... the last;
//           1 if there is none.
//           A_ts = scale sum over channels of q_t E_ts k_s, s <= t (RWKV-6: A_tt = scale sum of q_t u k_t);
//           o_t = sum over s of A_ts v_s;  final state sum over s of F_s k_s v_s^T
// shapes    q k g [B, H, T, K], v o [B, H, T, V], u [H, K], final state [N, H, K, V] float32
// grid      a block for every sequence and head, sequence slowest. 128 threads: a thread a channel for the scores, then
//           a thread a column for o and the final state. With V <= 64 the threads form 2 to 8 groups: each group has
//           every column, and the groups share out the tokens of o and the channels of the final state
// smem      Shared: the warps' sums of scores, the scores, and decayed keys of 128 channels
// barriers  two after the sums of scores over warps: the warps' sums are written | scores are complete. With a final
//           state two for each 128 channels, in every pass over columns: the previous ones have been read | these are
//           in shared memory
// numerics  float32 throughout. Decays are products, never divided
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    sequences of at most 16 tokens, TOKENS of an instance: 8 or 16; any K and V
// tests     test_short_sequences
//
// From short_sequences.cuh: Sequence loads a thread's numbers of all tokens, zeros where there is none. add_scores adds
// row t to the warp's sums, or writes it, for the first channels. finish_scores sums over warps, multiplies by the
// scale, and has both barriers: A may be read after it. each_four: four tokens at a time, past the last one, too, where
// keys and v are 0. ROW: numbers of a channel's keys, padded to a multiple of 4. decay_of: exp.
#include "gated/short_sequences.cuh"
#include "ptx.cuh"
#include "read_order.cuh"

template <typename T, typename G> struct Args {
  StridedRows<const T> q, k, v;
  StridedRows<const G> g;
  StridedRows<T> o;
  const float* u;  // null for GLA
  float* final;    // null: not wanted
  Shape shape;
  double scale;
};

template <int TOKENS> struct alignas(16) Shared {
  float keys[THREADS * ROW<TOKENS>];   // [128 channels, tokens]: F_s k_s
  float sums[WARPS][TOKENS * TOKENS];  // each warp's sums of scores, over its channels
  float A[TOKENS * TOKENS];
};

// Blocks of a multiprocessor, as their registers allow.
template <int TOKENS> constexpr int RESIDENT = TOKENS > 8 ? 3 : 6;

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of data; G: that of gates. TOKENS:
// the most of a sequence. Threads without a channel or column go through all loops, with zeros: shuffles and barriers
// need them.
template <class ReadOrder, typename T, typename G, int TOKENS>
__global__ void __launch_bounds__(THREADS, RESIDENT<TOKENS>) gated_short_forward(const Args<T, G> args) {
  constexpr bool BEFORE = ReadOrder::reads_before_write;
  auto& s = *reinterpret_cast<Shared<TOKENS>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 h = blockIdx.x % shape.H, n = blockIdx.x / shape.H;
  const int K = int(shape.K), V = int(shape.V);
  const Span span = tokens_of(shape, n % shape.row_sequences);
  const Sequence sequence = {n / shape.row_sequences, h, span.start, int(span.stop - span.start)};
  const int tokens = sequence.tokens;
  // The tokens' decays of a channel; 1 where there is no such token or channel.
  const auto load_decays = [&](float (&a)[TOKENS], int channel) {
    sequence.load(a, args.g, channel, K);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t) a[t] = t < tokens && channel < K ? decay_of(a[t]) : 1.f;
  };

#pragma unroll 1
  for (int first = 0; first < K; first += THREADS) {  // the sums of A: a thread has a channel
    const int channel = first + threadIdx.x;
    float q[TOKENS], k[TOKENS], a[TOKENS];
    sequence.load(q, args.q, channel, K);
    sequence.load(k, args.k, channel, K);
    load_decays(a, channel);
    const float u = BEFORE && channel < K ? args.u[h * K + channel] : 0.f;
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens) {
        float x[TOKENS] = {}, decayed = q[t];
        if (BEFORE) x[t] = q[t] * u * k[t];
#pragma unroll
        for (int i = t - BEFORE; i >= 0; --i) {
          x[i] = decayed * k[i];
          decayed *= a[i];
        }
        add_scores(x, s.sums[threadIdx.x / 32], t, first == 0);
      }
  }
  finish_scores<TOKENS>(s, s.A, tokens, float(args.scale));

  int columns = THREADS;  // of a group of threads, at least 16; a power of 2, and so is the number of groups
  while (columns > 16 && columns / 2 >= V) columns /= 2;
  const int group = threadIdx.x / columns, groups = THREADS / columns;
#pragma unroll 1
  for (int first = 0; first < V; first += columns) {  // o and the final state: a thread has a column
    const int column = first + threadIdx.x % columns;
    float v[TOKENS];
    sequence.load(v, args.v, column, V);
#pragma unroll
    for (int t = 0; t < TOKENS; ++t)
      if (t < tokens && column < V && (t & (groups - 1)) == group) {
        float o = 0.f;
#pragma unroll
        for (int i = 0; i <= t; ++i) o = fmaf(s.A[t * TOKENS + i], v[i], o);
        args.o.row(sequence.b, h, span.start + t)[column] = from_float<T>(o);
      }
    if (args.final)
#pragma unroll 1
      for (int first_channel = 0; first_channel < K; first_channel += THREADS) {
        float k[TOKENS], a[TOKENS], decay = 1.f;
        __syncthreads();  // the previous channels have been read
        load_decays(a, first_channel + threadIdx.x);
        sequence.load(k, args.k, first_channel + threadIdx.x, K);
#pragma unroll
        for (int t = TOKENS - 1; t >= 0; --t) {
          s.keys[threadIdx.x * ROW<TOKENS> + t] = decay * k[t];
          decay *= a[t];
        }
        __syncthreads();  // the channels' keys are in shared memory
        const int channels = min(K - first_channel, THREADS);
        float* to = args.final + ((n * shape.H + h) * K + first_channel) * V + column;
        if (column < V)
#pragma unroll 4
          for (int c = group; c < channels; c += groups) {
            float S = 0.f;
            each_four<TOKENS>(s.keys + c * ROW<TOKENS>, tokens, [&](int t, float4 keys) {
              const float low = fmaf(keys.x, v[t], keys.y * v[t + 1]);
              S += low + fmaf(keys.z, v[t + 2], keys.w * v[t + 3]);
            });
            to[i64(c) * V] = S;
          }
      }
  }
}
