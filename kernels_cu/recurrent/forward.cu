// what      GLA and RWKV-6 token by token, as in the equations; GLA also with a gate of columns.
// math      S_t = diag(exp g_t) S_{t-1} + k_t v_t^T;   o_t = scale q_t^T S_t  (RWKV-6: scale q_t^T (S_{t-1} + diag(u)
//           k_t v_t^T)); with gv S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T, * number by number
// shapes    q k g [B, H, T, K], v o gv [B, H, T, V], u [H, K], initial and final state [N, H, K, V]; u and states
//           are float32
// grid      a block for every (sequence, head, 32 columns of V), sequence slowest; 128 threads: a lane a column,
//           a warp a quarter of the channels
// smem      Shared<BK>: 16 tokens of q, k, v and decays, and each warp's sums of o over its channels
// barriers  three every 16 tokens: q, k, v and gates are loaded, and the sums of o read | decays are stored | the sums
//           of o are stored. A fourth with gv, if one of the 16 tokens has a gate above 0: gates are loaded again
// numerics  float32 throughout. With gv and a gate above 0 the decay is exp(g + gv): exp g or exp gv alone may overflow
// source    Yang et al., 2024, eq. 3 and section 4.1; Peng et al., 2024, eq. 18-19
// limits    K <= BK; BK of 64, 128, 256, chosen with the bytes of Shared by gated_kernels.py (Recurrent); gv with
//           AfterWrite
// tests     test_contract and test_value_gate, in mode "recurrent"
#include "forward_arguments.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

// From the includes:
//   ForwardArgs: q, k, v, g, o, the bonus u, initial and final states, the shape, the scale
//   ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6): whether a token is read after it was written, or before
//   load_tile: fills a tile of shared memory with tokens, as floats, by all threads, with zeros beyond the sequence
//   tokens_of(shape, n): the tokens of sequence n.

constexpr int THREADS = 128, WARPS = THREADS / 32, TOKENS = 16, BV = 32;

template <typename T, typename G> struct Args : ForwardArgs<T, G> {
  StridedRows<const G> gv;  // null unless GATED
};

template <int BK> struct Shared {
  float q[TOKENS * BK];  // [16, BK]
  float k[TOKENS * BK];  // [16, BK]
  float a[TOKENS * BK];  // [16, BK], gates, then decays
  float v[TOKENS * BV];  // [16, BV]
  float u[BK];
  float partial[WARPS][TOKENS * BV];  // [16, BV], sums of o over each warp's channels
  float av[TOKENS * BV];              // [16, BV], gates of columns, then decays
};

// ReadOrder: AfterWrite (GLA) or BeforeWrite (RWKV-6), read_order.cuh. T: the type of q, k, v and o; G: the
// gates' type. GATED: whether columns have gates gv, too. load_tile<tokens, columns, distance of rows, threads>
// (tensor.cuh) copies tokens to shared memory as floats. Channels from K on and columns from V on become 0, so that
// gates there are 0 and decays 1. Rows after the last token become 0, too, and no loop reads them: all end at `tokens`.
// decay_of(x): e^x, 0 if x is -inf. grown(x, sum): x e^sum by two factors e^(sum / 2), each finite: so 0 stays 0. A
// batch row has row_sequences sequences, more than one if they are packed; tokens_of: the tokens of one. Two blocks of
// 128 threads, the launch bound, leave a thread all the registers that it can have.
template <class ReadOrder, typename T, typename G, int BK, bool GATED>
__global__ void __launch_bounds__(THREADS, 2) recurrent_forward(const Args<T, G> args) {
  constexpr int THREAD_CHANNELS = BK / WARPS;
  static_assert(BV == 32 && BK % WARPS == 0, "a lane has a column, a warp an equal share of the channels");
  static_assert(WARPS == 4, "o is the sum of four parts");
  static_assert(!(GATED && ReadOrder::reads_before_write), "columns have gates in GLA only");
  Shared<BK>& s = *reinterpret_cast<Shared<BK>*>(dynamic_smem());
  const Shape& shape = args.shape;
  const i64 tiles = (shape.V + BV - 1) / BV, v_tile = blockIdx.x % tiles * BV, h = blockIdx.x / tiles % shape.H;
  const i64 n = blockIdx.x / tiles / shape.H, b = n / shape.row_sequences;  // sequence, its batch row
  const Span span = tokens_of(shape, n % shape.row_sequences);
  // A thread has column v_tile + lane and THREAD_CHANNELS channels from first_channel on.
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first_channel = warp * THREAD_CHANNELS;
  const i64 first_index = (n * shape.H + h) * shape.K * shape.V + v_tile + lane;
  const bool column_exists = v_tile + lane < shape.V;

  float S[THREAD_CHANNELS];
#pragma unroll
  for (int c = 0; c < THREAD_CHANNELS; ++c)
    S[c] = args.initial && first_channel + c < shape.K && column_exists
               ? args.initial[first_index + (first_channel + c) * shape.V]
               : 0.f;
  if (ReadOrder::reads_before_write)
    for (int c = threadIdx.x; c < BK; c += THREADS) s.u[c] = c < shape.K ? args.u[h * shape.K + c] : 0.f;
  for (i64 token = span.start; token < span.stop; token += TOKENS) {
    const int tokens = span.stop - token < TOKENS ? int(span.stop - token) : TOKENS;  // of these 16
    load_tile<TOKENS, BK, BK, THREADS>(s.q, args.q, b, h, token, span.stop, 0, shape.K);
    load_tile<TOKENS, BK, BK, THREADS>(s.k, args.k, b, h, token, span.stop, 0, shape.K);
    // Copies the 16 tokens' gates to s.a and s.av.
    const auto load_gates = [&] {
      load_tile<TOKENS, BK, BK, THREADS>(s.a, args.g, b, h, token, span.stop, 0, shape.K);
      if constexpr (GATED) load_tile<TOKENS, BV, BV, THREADS>(s.av, args.gv, b, h, token, span.stop, v_tile, shape.V);
    };
    load_gates();
    load_tile<TOKENS, BV, BV, THREADS>(s.v, args.v, b, h, token, span.stop, v_tile, shape.V);
    __syncthreads();           // the tiles are in shared memory; the sums of o have been read
    float largest_gate = 0.f;  // of those whose exp this thread takes; only if GATED
    const auto take_exp = [&](float& x) {
      if (GATED) largest_gate = fmaxf(largest_gate, x);
      x = decay_of(x);
    };
    for (int index = threadIdx.x; index < tokens * BK; index += THREADS) take_exp(s.a[index]);
    if constexpr (GATED)
      for (int index = threadIdx.x; index < tokens * BV; index += THREADS) take_exp(s.av[index]);
    // Computes the tokens in shared memory. next_state returns a number of the state after a token, from the number
    // before it, the decays of its channel and of its column, and k v.
    const auto run_tokens = [&](auto next_state) {
#pragma unroll 1
      for (int r = 0; r < tokens; ++r) {
        const float v = s.v[r * BV + lane], av = GATED ? s.av[r * BV + lane] : 1.f;
        float o = 0.f;
#pragma unroll
        for (int c = 0; c < THREAD_CHANNELS; ++c) {
          const int index = r * BK + first_channel + c;
          const float kv = s.k[index] * v, next = next_state(S[c], s.a[index], av, kv);
          o = fmaf(s.q[index], ReadOrder::reads_before_write ? fmaf(s.u[first_channel + c], kv, S[c]) : next, o);
          S[c] = next;
        }
        s.partial[warp][r * BV + lane] = o;
      }
    };
    // next_state for decays a of the channel and av of the column.
    const auto decayed = [](float x, float a, float av, float kv) { return fmaf(GATED ? a * av : a, x, kv); };
    if constexpr (!GATED) {
      __syncthreads();  // the decays are in shared memory
      run_tokens(decayed);
    } else if (__syncthreads_or(largest_gate > 0.f)) {  // the decays are in shared memory
      load_gates();
      __syncthreads();  // the gates are in shared memory, in place of decays
      run_tokens([](float x, float g, float gv, float kv) { return grown(x, g + gv) + kv; });
    } else {
      run_tokens(decayed);
    }
    __syncthreads();  // the sums of o are in shared memory; the tiles may be overwritten
    for (int index = threadIdx.x; index < tokens * BV; index += THREADS) {
      const i64 row = token + index / BV, column = v_tile + index % BV;
      const float o = (s.partial[0][index] + s.partial[1][index]) + (s.partial[2][index] + s.partial[3][index]);
      if (column < shape.V) args.o.row(b, h, row)[column] = from_float<T>(float(args.scale) * o);
    }
  }
  if (args.final && column_exists)
#pragma unroll
    for (int c = 0; c < THREAD_CHANNELS; ++c)
      if (first_channel + c < shape.K) args.final[first_index + (first_channel + c) * shape.V] = S[c];
}
