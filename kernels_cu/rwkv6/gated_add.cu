// what      The channel mix's product, added to the residual through its gate.
// math      x += sigmoid(gate) value, which comes in units of UNIT_OF_SQUARES<X>
// shapes    x gate value [count]; gate may be null, where the sigmoid is 1
// grid      a thread four elements; 256 threads
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    count a multiple of 4; all start on 16 bytes
#include "decode.cuh"

// From the includes:
//   UNIT_OF_SQUARES: 2048 for float16, otherwise 1

constexpr int THREADS = 256;

struct Args {
  float* x;
  const float* gate;
  const float* value;
  i64 count;
};

template <typename X> __global__ void __launch_bounds__(THREADS) rwkv6_gated_add(const Args args) {
  launch_next();        // the next kernel may begin
  wait_for_previous();  // the previous kernel has ended: what it wrote can be read
  const i64 index = 4 * (i64(blockIdx.x) * THREADS + threadIdx.x);
  if (index >= args.count) return;
  const float4 x = load4(args.x + index), value = load4(args.value + index);
  constexpr float UNIT = UNIT_OF_SQUARES<X>;
  float4 opening = {UNIT, UNIT, UNIT, UNIT};
  if (args.gate) {
    const float4 gate = load4(args.gate + index);
    opening = {UNIT * sigmoid(gate.x), UNIT * sigmoid(gate.y), UNIT * sigmoid(gate.z), UNIT * sigmoid(gate.w)};
  }
  store4(args.x + index, fma4(opening, value, x));
}
