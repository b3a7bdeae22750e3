// what      The channel mix's gate, added to the residual.
// math      x += sigmoid(gate) value
// shapes    x gate value [count]
// grid      a thread an element; 256 threads
// smem      none
// barriers  none
// numerics  float32
// source    Peng et al., 2024, "Eagle and Finch", section 4
// limits    none
#include "decode.cuh"

constexpr int THREADS = 256;

struct Args {
  float* x;
  const float* gate;
  const float* value;
  i64 count;
};

__global__ void __launch_bounds__(THREADS) rwkv6_gated_add(const Args args) {
  launch_next();
  wait_for_previous();
  const i64 at = i64(blockIdx.x) * THREADS + threadIdx.x;
  if (at < args.count) args.x[at] = fmaf(sigmoid(args.gate[at]), args.value[at], args.x[at]);
}
