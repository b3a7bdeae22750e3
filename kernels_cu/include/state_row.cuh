// what      A row of a recurrence's state in float64, in the registers of a warp; a lane has every 32nd column. A block
//           has WARPS rows, a warp each.
// math      X_t = a_t (b_t * X_{t-1}) + x_t y_t, for one row's numbers x and a and vectors y and b over the columns;
//           kernels multiply X_t by vectors z over the columns
// shapes    x a of the rows and y z b of the columns, [B, H, T, R] and [B, H, T, C]: the state is [K, V] with k as x, v
//           as y, and do as z; or transposed, [V, K], with v as x, k as y, and q as z
#include "lanes.cuh"
#include "read_order.cuh"
#include "ptx.cuh"
#include "tensor.cuh"

constexpr int WARPS = 4;  // of a block; each has a row

// What both kernels take, before the arguments of their own. The pointers to arrays with columns are to the launch's
// first one: y, b, z, u_columns, chunk_starts, and those of states [N, H, K, V].
struct StateArgs {
  Shape shape;
  i64 R, C;                       // rows and columns of the matrix of which X is a row: K and V, or V and K
  i64 columns;                    // of this launch
  i64 adds;                       // whether this launch's results are added to those of earlier launches
  i64 row_stride, column_stride;  // of X in arrays of states
  i64 a_step, b_step;             // 0 if all rows, or all columns, have one decay, else 1
  double scale;
  StridedRows<const double> x, a, y, b, z;
  const double *u_rows, *u_columns;  // u_r and u_c; null: 1, or there is no bonus
  double* chunk_starts;              // X before every chunk's first token; null: not wanted

  // The index of the number in row r and column c of the state of one sequence and head.
  __device__ i64 at(i64 sequence_head, i64 r, int c) const {
    return sequence_head * R * C + r * row_stride + c * column_stride;
  }
};

struct StateRow {
  i64 n, b, h, r;  // sequence, its row of the batch, head, row of the state, which may be `rows` or more: no row
  Span span;

  __device__ StateRow(const Shape& shape, i64 rows) {
    const i64 blocks = (rows + WARPS - 1) / WARPS, head = blockIdx.x / blocks;
    r = blockIdx.x % blocks * WARPS + threadIdx.x / 32, h = head % shape.H, n = head / shape.H,
    b = n / shape.row_sequences;
    span = tokens_of(shape, n % shape.row_sequences);
  }
};

// A lane's columns of a row: lane, lane + 32, ...
template <int COLUMNS> struct Row {
  static constexpr int LANE_COLUMNS = COLUMNS / 32;
  static_assert(COLUMNS % 32 == 0);
  double x[LANE_COLUMNS];

  // Calls f(number, column) for every column. At most four of a lane's columns are loaded at a time: more loads would
  // take the registers of the state.
  template <class F> __device__ __forceinline__ void each(int columns, F f) {
#pragma unroll
    for (int i = 0; i < LANE_COLUMNS; ++i) {
      if (const int c = i * 32 + threadIdx.x % 32; c < columns) f(x[i], c);
      if (i % 4 == 3) __syncwarp();
    }
  }
};

// Stores x, or, if `adds`, adds x to the stored value.
__device__ __forceinline__ void store_or_add(double& sum, double x, i64 adds) { sum = adds ? sum + x : x; }
