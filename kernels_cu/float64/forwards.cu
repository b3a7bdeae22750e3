// what      RWKV-6, and GLA with gates of channels, of columns of V, or one for each token, in float64, forwards in
//           time: outputs, or the gradient of the queries.
// math      X is a row of the state [K, V]; or of its transpose [V, K], whose rows are the columns of V. x_t, a_t and
//           u_r are numbers of the row; X, y_t, b_t, z_t and u_c are vectors over the columns. a and b are decays
//           X_t = a_t (b_t * X_{t-1}) + x_t y_t,   result_t = scale z_t . X_t
//           RWKV-6:  result_t = scale (z_t . X_{t-1} + u_r x_t (u_c * y_t) . z_t). The bonus u has a number for each
//           channel: so u_r is its number and u_c is 1, or in the transpose u_c is u and u_r is 1
//           state:      x y z = k v do, a decays of channels, b of columns of V; result: dq
//           transpose:  x y z = v k q, a decays of columns of V, b of channels; result: o
// shapes    R rows, C columns of the state or its transpose: x a result [B, H, T, R]; y b z [B, H, T, C]; u [H, R] or
//           [H, C]; chunk_starts [B, H, NC, R, C], of NC chunks in a row of the batch. N sequences:
//           shape.row_sequences in each of B rows
// grid      a block for every (sequence, head, 4 rows), sequence slowest; a warp a row
// numerics  float64 throughout, sums over the columns in a fixed order
// source    Yang et al., 2024, eq. 3 and section 4.1; Peng et al., 2024, eq. 18-19
// limits    COLUMNS columns a launch. Later launches add to the `result` of earlier ones
#include "cards.cuh"
#include "state_row.cuh"

struct Args : StateArgs {  // state_row.cuh: sizes, x to z, the bonus, chunk_starts
  StridedRows<double> result;
  const double* initial;  // or null
  double* final;          // or null
};

// The blocks that a multiprocessor must have room for, which limits a thread's registers. 0: no number is asked for,
// and the assembler chooses the registers itself. In one case it then chooses too few and spills. If it is asked for
// room for 9 blocks, it takes more.
template <class ReadOrder, int COLUMNS>
constexpr int BLOCKS = COLUMNS == 64 && !ReadOrder::reads_before_write && SINCE_SM100 ? 9 : 0;

// ReadOrder: AfterWrite, or BeforeWrite for RWKV-6 (read_order.cuh). COLUMNS: 32 times a lane's columns (Row in
// state_row.cuh): lane l has columns l, l + 32, ...; X.each(columns, f) calls f(number, column) for those that exist.
// StateRow: the warp's row r, of head h of sequence n, whose tokens are `span` of batch row b; WARPS = 4 rows a block.
// store_or_add(to, x, adds): to = x, or to += x.
template <class ReadOrder, int COLUMNS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<ReadOrder, COLUMNS>) float64_forwards(const Args args) {
  const StateRow row(args.shape, args.R);
  if (row.r >= args.R) return;
  const i64 batch = row.b, h = row.h, r = row.r, sequence_head = row.n * args.shape.H + h;
  i64 chunk = chunks_of(args.shape, row.n % args.shape.row_sequences).start;
  const auto at_column = [&](int c) { return args.at(sequence_head, r, c); };  // the index of X's number in a state
  Row<COLUMNS> X;
  X.each(int(args.columns), [&](double& state, int c) { state = args.initial ? args.initial[at_column(c)] : 0.; });
#pragma unroll 1
  for (i64 t = row.span.start; t < row.span.stop; ++t) {
    if (args.chunk_starts && (t - row.span.start) % args.shape.chunk == 0) {
      double* start =
          args.chunk_starts + (((batch * args.shape.H + h) * args.shape.NC + chunk++) * args.R + r) * args.C;
      X.each(int(args.columns), [&](double& state, int c) { start[c] = state; });
    }
    const double x = args.x.row(batch, h, t)[r], a = args.a.row(batch, h, t)[r * args.a_step];
    double read = 0., self_term = 0.;  // this lane's terms, then sums over the warp: z . X; (u_c * y) . z
    X.each(int(args.columns), [&](double& state, int c) {
      const double y = args.y.row(batch, h, t)[c], z = args.z.row(batch, h, t)[c], before = state;
      state = fma(x, y, a * (args.b.row(batch, h, t)[c * int(args.b_step)] * state));
      read = fma(z, ReadOrder::reads_before_write ? before : state, read);
      if (ReadOrder::reads_before_write)
        self_term = fma(args.u_columns ? args.u_columns[h * args.C + c] * y : y, z, self_term);
    });
    read = warp_sum(read);
    if (ReadOrder::reads_before_write) {
      self_term = warp_sum(self_term);
      read = fma(args.u_rows ? args.u_rows[h * args.R + r] * x : x, self_term, read);
    }
    if (threadIdx.x % 32 == 0) store_or_add(args.result.row(batch, h, t)[r], args.scale * read, args.adds);
  }
  if (args.final) X.each(int(args.columns), [&](double& state, int c) { args.final[at_column(c)] = state; });
}
