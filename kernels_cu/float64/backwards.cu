// what      RWKV-6, and GLA with gates of channels, of columns of V, or one for each token, in float64, backwards in
//           time: the gradients of what writes a state's rows, of the rows' gates, and of the initial state.
// math      X is a row of the state, or of its transpose, whose rows are the columns of V. x_t, a_t, p_t and u_r are
//           numbers of the row; X, its gradients D and G, y_t, b_t, z_t and u_c are vectors over the columns. a and b
//           are decays. X_t = a_t (b_t * X_{t-1}) + x_t y_t
//           G_T = dht;  for t = T ... 1:  D_t = G_t + scale p_t z_t,  G_{t-1} = a_t (b_t * D_t);  dh0 = G_0
//           (RWKV-6: D_t = G_t,  G_{t-1} = a_t (b_t * D_t) + scale p_t z_t)
//           dx_t = y_t . D_t;  the gradient of log a_t:  da_t = a_t (b_t * X_{t-1}) . D_t
//           RWKV-6: dx_t += scale p_t u_r (u_c * y_t) . z_t;  du_r = scale sum_t p_t x_t (u_c * y_t) . z_t.  The bonus
//           u has a number for each channel: so u_r is its number and u_c is 1, or in the transpose u_c is u, u_r is 1,
//           and du is not wanted
//           state [K, V]:      x y p z = k v q do, a decays of channels, b of columns of V; dx is dk
//           transpose [V, K]:  x y p z = v k do q, a decays of columns of V, b of channels; dx is dv
// shapes    R rows, C columns of the state or its transpose: x p dx a da [B, H, T, R] and y z b [B, H, T, C];
//           chunk_starts [B, H, NC, R, C]: X before the first token of each of NC chunks, from forwards.cu;
//           chunk_states [N, H, R, shape.chunk, columns]: X_{t-1} of all tokens t of the chunk that is being computed;
//           u [H, R] or [H, C]; du [N, H, R]. N sequences: shape.row_sequences in each of B rows of the batch
// grid      a block for every (sequence, head, 4 rows), sequence slowest; a warp a row
// barriers  none: a lane reads what it has written itself
// numerics  float64 throughout, sums over the columns in a fixed order. da is no difference of sums, which would
//           lose its digits if gates are strong
// source    Yang et al., 2024, section 4.4; Peng et al., 2024, eq. 18-19
// limits    COLUMNS columns a launch. Later launches add to the dx, da and du of earlier ones
#include "cards.cuh"
#include "state_row.cuh"

// From the includes:
//   StateRow: a warp's sequence, head and row r of X. Row: a lane's columns of it: lane, lane + 32 and so on; each(n,
//     f): calls f(number, column) for those below n
//   store_or_add(x, y, adds): x = y, or x += y if `adds`. warp_sum: the sum over a warp, in every lane
//   chunks_of, chunk_tokens: the chunks of a sequence, the tokens of a chunk. SINCE_SM100: cards of generation 10.0 or
//   later

struct Args : StateArgs {  // state_row.cuh: sizes, x to z, the bonus, chunk_starts
  StridedRows<const double> p;
  StridedRows<double> dx, da;  // da: null: not wanted
  double* du;                  // null: not wanted
  const double* dht;           // or null
  double* dh0;                 // or null
  double* chunk_states;
};

// The blocks that a multiprocessor must have room for, which limits a thread's registers. 0: no number is asked for,
// and the assembler chooses the registers itself. In one case it then chooses too few and spills. If it is asked for
// room for 5 blocks, it takes more.
template <class ReadOrder, int COLUMNS>
constexpr int BLOCKS = COLUMNS == 64 && !ReadOrder::reads_before_write && !SINCE_SM100 ? 5 : 0;

// ReadOrder: AfterWrite, or BeforeWrite for RWKV-6 (read_order.cuh). COLUMNS: 32 times a lane's columns (Row in
// state_row.cuh): lane l has columns l, l + 32, ...; X.each(columns, f) calls f(number, column) for those that exist.
// StateRow: the warp's row r, of head h of sequence n of batch row b. Chunks are taken from the last to the first: of
// each, X_{t-1} of all its tokens is computed forwards and kept in `states`, then gradients are computed backwards.
template <class ReadOrder, int COLUMNS>
__global__ void __launch_bounds__(32 * WARPS, BLOCKS<ReadOrder, COLUMNS>) float64_backwards(const Args args) {
  const StateRow row(args.shape, args.R);
  if (row.r >= args.R) return;
  const i64 batch = row.b, h = row.h, r = row.r, sequence_head = row.n * args.shape.H + h,
            chunk_length = args.shape.chunk;
  const Span chunks = chunks_of(args.shape, row.n % args.shape.row_sequences);
  double* states = args.chunk_states + (sequence_head * args.R + r) * chunk_length * args.columns;
  double du = 0.;
  const auto at_column = [&](int c) { return args.at(sequence_head, r, c); };  // the index of X's number in a state
  Row<COLUMNS> X, D;  // at token t: X_{t-1}, then X_t; and G_t, D_t, then G_{t-1}
  D.each(int(args.columns), [&](double& gradient, int c) { gradient = args.dht ? args.dht[at_column(c)] : 0.; });
  for (i64 chunk = chunks.stop - 1; chunk >= chunks.start; --chunk) {
    const Span span = chunk_tokens(args.shape, chunk);
    const double* start =
        args.chunk_starts + (((batch * args.shape.H + h) * args.shape.NC + chunk) * args.R + r) * args.C;
    X.each(int(args.columns), [&](double& state, int c) { state = start[c]; });
#pragma unroll 1
    for (i64 t = span.start; t < span.stop; ++t) {
      const double x = args.x.row(batch, h, t)[r], a = args.a.row(batch, h, t)[r * args.a_step];
      X.each(int(args.columns), [&](double& state, int c) {
        states[(t - span.start) * args.columns + c] = state;
        state = fma(x, args.y.row(batch, h, t)[c], a * (args.b.row(batch, h, t)[c * int(args.b_step)] * state));
      });
    }
#pragma unroll 1
    for (i64 t = span.stop - 1; t >= span.start; --t) {
      const double a = args.a.row(batch, h, t)[r * args.a_step], scaled_p = args.scale * args.p.row(batch, h, t)[r];
      double dx = 0., da = 0., self_term = 0.;  // self_term: (u_c * y) . z, then times scale p
      D.each(int(args.columns), [&](double& gradient, int c) {
        const double y = args.y.row(batch, h, t)[c], z = args.z.row(batch, h, t)[c],
                     ab = a * args.b.row(batch, h, t)[c * int(args.b_step)];
        if (!ReadOrder::reads_before_write) gradient = fma(scaled_p, z, gradient);
        dx = fma(y, gradient, dx);
        da = fma(ab * states[(t - span.start) * args.columns + c], gradient, da);
        gradient *= ab;
        if (ReadOrder::reads_before_write) {
          gradient = fma(scaled_p, z, gradient);
          self_term = fma(args.u_columns ? args.u_columns[h * args.C + c] * y : y, z, self_term);
        }
      });
      dx = warp_sum(dx);
      da = warp_sum(da);
      if (ReadOrder::reads_before_write) {
        self_term = scaled_p * warp_sum(self_term);
        dx = fma(args.u_rows ? args.u_rows[h * args.R + r] : 1., self_term, dx);
        du = fma(args.x.row(batch, h, t)[r], self_term, du);
      }
      if (threadIdx.x % 32) continue;
      store_or_add(args.dx.row(batch, h, t)[r], dx, args.adds);
      if (args.da.p) store_or_add(args.da.row(batch, h, t)[r], da, args.adds);
    }
  }
  if (args.dh0) D.each(int(args.columns), [&](double& gradient, int c) { args.dh0[at_column(c)] = gradient; });
  if (args.du && threadIdx.x % 32 == 0) store_or_add(args.du[sequence_head * args.R + r], du, args.adds);
}
