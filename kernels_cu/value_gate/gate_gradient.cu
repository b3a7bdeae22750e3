// what      The gradient of the gate, or of the value gate, from what its tokens' queries and keys have of it.
// math      dgate_t = sum_{i >= t} (x_i dx_i - y_i dy_i) + sum_d last_d dlast_d; 0, for all tokens before too, where
//           exp(gate_t) is 0
// shapes    x dx y dy gate dgate [B, H, T, C], dx dy float32; last dlast [N, H, C, D] or turned over, float32, or null
// grid      a block for every (sequence, head, 128 channels), sequence slowest; 128 threads, a channel a thread
// smem      none
// barriers  none
// numerics  sums in float64, since a sequence is of any length
// source    Yang et al., 2024, section 4.4, and linattn_np/two_gates.py
// limits    none
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int THREADS = 128;

template <typename T, typename G> struct Args {
  Rows<const T> x, y;
  Rows<const float> dx, dy;
  Rows<const G> gate;
  Rows<G> dgate;
  const float *last, *dlast;
  i64 C, D, last_c, last_d;  // sizes, and the strides of last and dlast
  Shape shape;
};

template <typename T, typename G>
__global__ void __launch_bounds__(THREADS) value_gate_gate_gradient(const Args<T, G> args) {
  const Shape& shape = args.shape;
  const i64 tiles = (args.C + THREADS - 1) / THREADS, c = blockIdx.x % tiles * THREADS + threadIdx.x;
  const i64 h = blockIdx.x / tiles % shape.H, n = blockIdx.x / tiles / shape.H, b = n / shape.count;
  const Span span = tokens_of(shape, n % shape.count);
  if (c >= args.C) return;
  double sum = 0;
  if (args.last && args.dlast) {
    const i64 at = (n * shape.H + h) * args.C * args.D + c * args.last_c;
    for (i64 d = 0; d < args.D; ++d) sum += double(args.last[at + d * args.last_d]) * args.dlast[at + d * args.last_d];
  }
#pragma unroll 4
  for (i64 t = span.stop - 1; t >= span.start; --t) {
    sum += double(to_float(args.x.row(b, h, t)[c])) * args.dx.row(b, h, t)[c];
    sum -= double(to_float(args.y.row(b, h, t)[c])) * args.dy.row(b, h, t)[c];
    if (decay_of(to_float(args.gate.row(b, h, t)[c])) == 0.f) sum = 0;
    args.dgate.row(b, h, t)[c] = from_float<G>(float(sum));
  }
}
