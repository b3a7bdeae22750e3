// what      A chunk of the value gate's forward kernel, forward.cu, token by token: by one warp, in its 16 columns,
//           where gates grow too much for products.
// math      S_t = (exp g_t exp gv_t^T) * S_{t-1} + k_t v_t^T, * number by number;  o_t = scale q_t^T S_t
// shapes    S: with g = lane / 4 and t = lane % 4, S[n][2h + p] is channel 8n + 2t + p, column g + 8h of the warp's 16.
//           Arrays are the caller's, read in memory
// barriers  none; all lanes of the warp call these functions together
// numerics  float32
#include "gated/forward_products.cuh"
#include "gated/forward_storage.cuh"
#include "value_gate/by_token.cuh"

// From the includes:
//   Tokens, tokens_at: rows in memory from a channel on: x.at(token, channel, width), 0 from `width` on
//   growth_of: the largest sum of one channel's positive gates. BY_CHUNK: the largest growth, 16 nats, for products
//   Schedule: has_outputs; all_channels: one launch has all channels. State: a lane's numbers of S

// A warp's 16 columns of a chunk.
struct ChunkColumns {
  i64 b, h, token;     // batch, head, first token
  int rows, channels;  // numbers of tokens and of channels that exist
  int first, columns;  // the first column, and how many of the 16 exist
};

// Adds the terms of earlier launches, which have other channels, to an output, and stores the sum for later launches.
__device__ __forceinline__ void add_earlier_channels(float& o, float& sum, bool first, bool last) {
  if (!first) o += sum;
  if (!last) sum = o;
}

// Whether gates grow too much in a chunk for products: then compute_token_by_token computes it. growth_of: the largest
// sum of one channel's, or column's, positive gates.
template <class Args>
__device__ __forceinline__ bool grows_beyond_products(const Args& args, const ChunkColumns& chunk) {
  return growth_of(tokens_at(args.g, chunk.b, chunk.h, chunk.token, args.channel), chunk.rows, chunk.channels) +
             growth_of(tokens_at(args.gv, chunk.b, chunk.h, chunk.token, chunk.first), chunk.rows, chunk.columns) >
         BY_CHUNK;
}

// Computes a chunk token by token: S, which is the state before and then after the chunk, and the outputs, which it
// stores. grown(x, nats): x e^nats. S is passed in memory, so that the caller needs no registers for it here.
template <class Schedule, typename T, int BK, class Args>
__device__ __noinline__ void compute_token_by_token(State<BK>& S, const Args& args, const ChunkColumns& chunk) {
  const auto tokens_of = [&](const auto& x, i64 first) { return tokens_at(x, chunk.b, chunk.h, chunk.token, first); };
  const auto g = tokens_of(args.g, args.channel), gv = tokens_of(args.gv, chunk.first);
  const auto q = tokens_of(args.q, args.channel), k = tokens_of(args.k, args.channel),
             v = tokens_of(args.v, chunk.first);
  const int lane = threadIdx.x & 31, t = lane & 3;
#pragma unroll 1
  for (int n = 0; n < 2 * chunk.rows; ++n) {
    // i: the token; side: the lane's first or second column of the warp's 16; c: its channels, BK / 4 of them
    const int i = n / 2, side = n % 2, column = (lane >> 2) + 8 * side;
    const float value = v.at(i, column, chunk.columns), gate = gv.at(i, column, chunk.columns);
    float o = 0.f;
#pragma unroll 1
    for (int m = 0; m < BK / 4; ++m) {
      const int c = m / 2 * 8 + 2 * t + m % 2;
      float& state = S[m / 2][m % 2 + 2 * side];
      state = fmaf(k.at(i, c, chunk.channels), value, grown(state, g.at(i, c, chunk.channels) + gate));
      if (Schedule::has_outputs) o = fmaf(q.at(i, c, chunk.channels), state, o);
    }
    if (!Schedule::has_outputs) continue;
    o += __shfl_xor_sync(0xffffffffu, o, 1);
    o += __shfl_xor_sync(0xffffffffu, o, 2);
    if (t || column >= chunk.columns) continue;
    const i64 token = chunk.token + i, v_column = chunk.first + column;
    float* sum = args.sums + ((chunk.b * args.shape.H + chunk.h) * args.shape.T + token) * args.shape.V + v_column;
    const bool last = args.channel + BK >= args.shape.K;
    if (!Schedule::all_channels) add_earlier_channels(o, *sum, args.channel == 0, last);
    if (Schedule::all_channels || last)
      args.o.row(chunk.b, chunk.h, token)[v_column] = from_float<T>(float(args.scale) * o);
  }
}
