// what      The channel mix's gate, added to the residual.
// math      x += sigmoid(gate) value, which comes in units of UNIT_OF_SQUARES<X>
// shapes    x gate value [count]
// grid      a thread four elements; 256 threads
// smem      none
// barriers  none
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    count a multiple of 4; all start on 16 bytes
#include "decode.cuh"

constexpr int THREADS = 256;

struct Args {
  float* x;
  const float* gate;
  const float* value;
  i64 count;
};

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv6_gated_add(const Args args) {
  launch_next();
  wait_for_previous();
  const i64 at = 4 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (at >= args.count) return;
  const float4 x = load4(args.x + at), gate = load4(args.gate + at), value = load4(args.value + at);
  constexpr float UNIT = UNIT_OF_SQUARES<X>;
  store4(args.x + at, {fmaf(UNIT * sigmoid(gate.x), value.x, x.x), fmaf(UNIT * sigmoid(gate.y), value.y, x.y),
                       fmaf(UNIT * sigmoid(gate.z), value.z, x.z), fmaf(UNIT * sigmoid(gate.w), value.w, x.w)});
}
