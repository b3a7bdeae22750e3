// what      One token for B sequences where the inputs or the state are float64; each state is updated in place.
// math      o = scale q^T S', S' = diag(exp g) S + k v^T   (RWKV-6: o = scale q^T (S + diag(u) k v^T))
// shapes    q k g [B, H, K], v o [B, H, V], u [H, K], state [P, H, K, V], slots [B] or null
// grid      a block for every (sequence, head, 128 columns of V), sequence slowest; a column a thread
// smem      none
// barriers  none
// numerics  float64 throughout, channels in their order
// source    Yang et al., 2024, eq. 3; Peng et al., 2024, eq. 18-19
// limits    the last axis of the state is contiguous
#include "read_order.cuh"
#include "real.cuh"
#include "tensor.cuh"

template <typename T, typename G, typename S> struct Args {
  Rows<const T> q, k, v;  // the time stride is not used
  Rows<const G> g;
  Rows<T> o;
  const double* u;   // [H, K], null for GLA
  Rows<S> state;     // rows are channels
  const i64* slots;  // or null: sequence b has state b
  i64 H, K, V;
  double scale;
};

template <class ReadOrder, typename T, typename G, typename S>
__global__ void __launch_bounds__(128) float64_step(const Args<T, G, S> args) {
  const i64 tiles = (args.V + 127) / 128, head = blockIdx.x / tiles, h = head % args.H, b = head / args.H;
  const i64 column = blockIdx.x % tiles * 128 + threadIdx.x;
  if (column >= args.V) return;
  const T *q = args.q.row(b, h, 0), *k = args.k.row(b, h, 0);
  const G* g = args.g.row(b, h, 0);
  const double v = to_real(args.v.row(b, h, 0)[column]);
  double sum = 0.;
  for (i64 c = 0; c < args.K; ++c) {
    S& state = args.state.row(args.slots ? args.slots[b] : b, h, c)[column];
    const double before = to_real(state), kv = to_real(k[c]) * v, after = fma(exp(double(to_real(g[c]))), before, kv);
    const double read = ReadOrder::reads_before_write ? fma(args.u[h * args.K + c], kv, before) : after;
    sum = fma(double(to_real(q[c])), read, sum);
    state = from_real<S>(Real<S>(after));
  }
  args.o.row(b, h, 0)[column] = from_real<T>(Real<T>(args.scale * sum));
}
