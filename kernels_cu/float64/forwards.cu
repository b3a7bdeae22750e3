// what      Every recurrence with gates in float64, forwards in time: outputs, or the gradient of the queries.
// math      for every row X of the state S [K, V] (x = k, y = v, z = do), or of its transpose (x = v, y = k, z = q), a
//           and b the decays of rows and columns:  X_t = a_t (b_t * X_{t-1}) + x_t y_t,   result_t = scale z_t . X_t
//           RWKV-6:  scale (z_t . X_{t-1} + u_r x_t sum_c u_c y_t z_t), u of the rows or of the columns, else 1
// shapes    see state_row.cuh; result [B, H, T, R], u [H, R] or [H, C], kept [B, H, NC, R, C]
// grid      a block for every (sequence, head, 4 rows), sequence slowest; a warp a row
// smem      none
// barriers  none
// numerics  float64 throughout, sums over the columns in a fixed order
// source    Yang et al., 2024, eq. 3 and section 4.1; Peng et al., 2024, eq. 18-19
// limits    COLUMNS columns a launch; later launches add to the `result` of earlier ones
#include "cards.cuh"
#include "state_row.cuh"

struct Args {
  Rows<const double> x, a, y, b, z;
  Rows<double> result;
  const double *u_rows, *u_columns;  // null: not this side, or no bonus
  const double* initial;             // [N, H, K, V] or null
  double* final;                     // [N, H, K, V] or null
  double* kept;                      // the state at the start of every chunk, or null
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
constexpr int BLOCKS = COLUMNS == 64 && !ReadOrder::reads_before_write && SINCE_SM100 ? 9 : 0;

template <class ReadOrder, int COLUMNS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<ReadOrder, COLUMNS>) float64_forwards(const Args args) {
  const StateRow at(args.shape, args.R);
  if (at.r >= args.R) return;
  const i64 b = at.b, h = at.h, r = at.r, state = at.n * args.shape.H + h;
  i64 chunk = chunks_of(args.shape, at.n % args.shape.count).start;
  const auto at_column = [&](int c) { return state * args.R * args.C + r * args.row + c * args.column; };
  Row<COLUMNS> X;
  X.each(int(args.columns), [&](double& X, int c) { X = args.initial ? args.initial[at_column(c)] : 0.; });
#pragma unroll 1
  for (i64 t = at.span.start; t < at.span.stop; ++t) {
    if (args.kept && (t - at.span.start) % args.shape.chunk == 0) {
      double* kept = args.kept + (((b * args.shape.H + h) * args.shape.NC + chunk++) * args.R + r) * args.C;
      X.each(int(args.columns), [&](double& X, int c) { kept[c] = X; });
    }
    const double x = args.x.row(b, h, t)[r], a = args.a.row(b, h, t)[r * args.a_step];
    double read = 0., self_term = 0.;
    X.each(int(args.columns), [&](double& X, int c) {
      const double y = args.y.row(b, h, t)[c], z = args.z.row(b, h, t)[c], before = X;
      X = fma(x, y, a * (args.b.row(b, h, t)[c * int(args.b_step)] * X));
      read = fma(z, ReadOrder::reads_before_write ? before : X, read);
      if (ReadOrder::reads_before_write)
        self_term = fma(args.u_columns ? args.u_columns[h * args.C + c] * y : y, z, self_term);
    });
    read = warp_sum(read);
    if (ReadOrder::reads_before_write) {
      self_term = warp_sum(self_term);
      read = fma(args.u_rows ? args.u_rows[h * args.R + r] * x : x, self_term, read);
    }
    if (threadIdx.x % 32 == 0) put(args.result.row(b, h, t)[r], args.scale * read, args.adds);
  }
  if (args.final) X.each(int(args.columns), [&](double& X, int c) { args.final[at_column(c)] = X; });
}
