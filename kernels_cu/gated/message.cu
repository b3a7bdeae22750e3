// what      Writes the message that a rank sends to the others about its tokens: the state after them from a zero
//           start, and the product of their decays.
// math      total[n, h, k] = prod over parts p and factors f of decays[n, p, h, f, k]. Parts are those into which a
//           sequence was cut. The product of a part's factors is its decay: one number, or the two that Hopper's
//           SegmentState stores (Args in sm90/forward_storage.cuh)
// shapes    message: the state [N, H, K, V], then total [N, H, channels], of the first channels of K: all K of them, 1
//           if all channels of a head have one gate, 0 if nothing decays;
//           state [N, H, K, V] and decays [N, parts, H, factors, K], each with a stride of its own between sequences,
//           contiguous otherwise; all float32
// grid      a thread for every number of the message, or of `total` only, if the message has the state already; 256 a
//           block
// numerics  float32
// source    Yang et al., "Gated Linear Attention Transformers with Hardware-Efficient Training", 2024, section 4
#include "ptx.cuh"

struct Args {
  const float *state, *decays;  // state: null if the message has it already
  float* message;
  i64 state_stride, decays_stride, parts, factors, N, H, K, V, channels;
};

__global__ void __launch_bounds__(256) gated_message(const Args args) {
  const i64 size = args.H * args.K * args.V, states = args.N * size;
  i64 index = i64(blockIdx.x) * 256 + threadIdx.x;  // of a number of the message, then of a number of total
  if (args.state) {
    if (index < states) args.message[index] = args.state[index / size * args.state_stride + index % size];
    if (index < states || args.channels == 0) return;
    index -= states;
  }
  // stride: the distance of the decays of neighbouring heads; `from` moves from part to part.
  const i64 row = index / args.channels, n = row / args.H, h = row % args.H, stride = args.factors * args.K;
  if (n >= args.N) return;
  const float* from = args.decays + n * args.decays_stride + h * stride + index % args.channels;
  float total = 1.f;
  for (i64 part = 0; part < args.parts; ++part, from += args.H * stride)
    for (i64 factor = 0; factor < args.factors; ++factor) total *= from[factor * args.K];
  args.message[states + index] = total;
}
