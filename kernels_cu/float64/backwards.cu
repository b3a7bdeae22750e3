// what      Every recurrence with gates in float64, backwards in time: the gradients of what a state's rows are written
//           with, of their gates, and of the initial state.
// math      X_t = a_t (b_t * X_{t-1}) + x_t y_t is a row of the state (forwards.cu), D_t its gradient: dht after the
//           last token, else D_t = a_{t+1} (b_{t+1} * D_{t+1}) + scale p_t z_t (RWKV-6: p_{t+1} z_{t+1});
//           dx_t = y_t . D_t;  the gradient of log a:  da_t = a_t (b_t * X_{t-1}) . D_t
//           RWKV-6: dx_t += scale p_t u_r sum_c u_c y_t z_t, and du_r = scale sum_t p_t x_t y_t . z_t
// shapes    see state_row.cuh; p of the rows: what reads them, q, or do if the state is transposed; dx da [B, H, T, R],
//           kept [B, H, NC, R, C], of which `before` [N, H, R, chunk, a launch's columns] keeps all states of a chunk;
//           du [N, H, R]
// grid      a block for every (sequence, head, 4 rows), sequence slowest; a warp a row
// smem      none
// barriers  none: a lane reads what it has written itself
// numerics  float64 throughout, sums over the columns in a fixed order; no difference of sums, so that strong gates
//           keep their gradient's digits
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    COLUMNS columns a launch; later launches add to the dx, da and du of earlier ones
#include "cards.cuh"
#include "state_row.cuh"

struct Args {
  Rows<const double> x, a, y, b, z, p;
  Rows<double> dx, da;               // da: null: not wanted
  const double *u_rows, *u_columns;  // null: not this side, or no bonus
  double* du;                        // null: not wanted
  const double* dht;                 // [N, H, K, V] or null
  double* dh0;                       // [N, H, K, V] or null
  const double* kept;
  double* before;
  Shape shape;
  i64 R, C;
  i64 columns, adds;   // columns of this launch; whether its results are added to those of earlier launches
  i64 row, column;     // strides of a state
  i64 a_step, b_step;  // 0 if one decay is for all channels, else 1
  double scale;
};

// Blocks on a multiprocessor, which bound registers; 0: no bound. Where a number is given, the assembler would choose
// fewer registers and spill.
template <class ReadOrder, int COLUMNS>
constexpr int BLOCKS = COLUMNS == 64 && !ReadOrder::reads_before_write && !SINCE_SM100 ? 5 : 0;

template <class ReadOrder, int COLUMNS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<ReadOrder, COLUMNS>) float64_backwards(const Args args) {
  const StateRow at(args.shape, args.R);
  if (at.r >= args.R) return;
  const i64 b = at.b, h = at.h, r = at.r, state = at.n * args.shape.H + h, every = args.shape.chunk;
  const Span chunks = chunks_of(args.shape, at.n % args.shape.count);
  double* before = args.before + (state * args.R + r) * every * args.columns;
  double du = 0.;
  const auto at_column = [&](int c) { return state * args.R * args.C + r * args.row + c * args.column; };
  Row<COLUMNS> X, D;
  D.each(int(args.columns), [&](double& D, int c) { D = args.dht ? args.dht[at_column(c)] : 0.; });
  for (i64 chunk = chunks.stop - 1; chunk >= chunks.start; --chunk) {
    const Span span = chunk_tokens(args.shape, chunk);
    const double* kept = args.kept + (((b * args.shape.H + h) * args.shape.NC + chunk) * args.R + r) * args.C;
    X.each(int(args.columns), [&](double& X, int c) { X = kept[c]; });
#pragma unroll 1
    for (i64 t = span.start; t < span.stop; ++t) {
      const double x = args.x.row(b, h, t)[r], a = args.a.row(b, h, t)[r * args.a_step];
      X.each(int(args.columns), [&](double& X, int c) {
        before[(t - span.start) * args.columns + c] = X;
        X = fma(x, args.y.row(b, h, t)[c], a * (args.b.row(b, h, t)[c * int(args.b_step)] * X));
      });
    }
#pragma unroll 1
    for (i64 t = span.stop - 1; t >= span.start; --t) {
      const double a = args.a.row(b, h, t)[r * args.a_step], read = args.scale * args.p.row(b, h, t)[r];
      double dx = 0., da = 0., self_term = 0.;
      D.each(int(args.columns), [&](double& D, int c) {
        const double y = args.y.row(b, h, t)[c], z = args.z.row(b, h, t)[c],
                     ab = a * args.b.row(b, h, t)[c * int(args.b_step)];
        if (!ReadOrder::reads_before_write) D = fma(read, z, D);
        dx = fma(y, D, dx);
        da = fma(ab * before[(t - span.start) * args.columns + c], D, da);
        D *= ab;
        if (ReadOrder::reads_before_write) {
          D = fma(read, z, D);
          self_term = fma(args.u_columns ? args.u_columns[h * args.C + c] * y : y, z, self_term);
        }
      });
      dx = warp_sum(dx);
      da = warp_sum(da);
      if (ReadOrder::reads_before_write) {
        self_term = read * warp_sum(self_term);
        dx = fma(args.u_rows ? args.u_rows[h * args.R + r] : 1., self_term, dx);
        du = fma(args.x.row(b, h, t)[r], self_term, du);
      }
      if (threadIdx.x % 32) continue;
      put(args.dx.row(b, h, t)[r], dx, args.adds);
      if (args.da.p) put(args.da.row(b, h, t)[r], da, args.adds);
    }
  }
  if (args.dh0) D.each(int(args.columns), [&](double& D, int c) { args.dh0[at_column(c)] = D; });
  if (args.du && threadIdx.x % 32 == 0) put(args.du[state * args.R + r], du, args.adds);
}
