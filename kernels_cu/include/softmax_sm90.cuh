// what      What softmax attention's kernels on Hopper share: tiles that tensor maps fill, a block's list of work,
//           stores of results, and the two roles of a block's warpgroups.
// limits    sm_90a; 16-bit data; rows of whole 16 bytes
#include "softmax_work.cuh"
#include "wgmma.cuh"

// A tile [ROWS, D] of 16-bit values, in panels [ROWS, 64 columns] whose rows have 128 bytes, in the hardware's 128-byte
// swizzle: piece p (16 bytes) of row r is in the place of piece p ^ r % 8.
constexpr int PANEL = 64;
template <typename T, int D, int ROWS> using Tile = T[D / PANEL][ROWS * PANEL];

// x, which is the same in all lanes though the compiler cannot know it. The compiler then keeps what depends on x in
// uniform registers and branches; otherwise it computes the descriptors of wgmma's operands lane by lane.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// To be called after a warp's plain reads of shared memory, before one of its lanes arrives at the mbarrier that lets a
// bulk copy overwrite it. The mbarrier alone does not order a bulk copy after plain reads, and orders nothing for the
// lanes that do not arrive.
__device__ __forceinline__ void order_reads_before_copies() {
  fence_proxy_async();
  __syncwarp();
}

// Starts copying the next entry of the block's column of the table `works` [rounds, gridDim.x] to shared memory; by one
// thread.
__device__ __forceinline__ void prefetch_work(Work& to, const Work*& next) {
  for (int n = 0; n < int(sizeof(Work)) / 16; ++n)
    cp_async<16>(reinterpret_cast<uint4*>(&to) + n, reinterpret_cast<const uint4*>(next) + n);
  cp_async_commit();
  next += gridDim.x;
}
// Waits for the entry and returns it; starts copying the next one unless this one, of 0 tiles, ends the list.
__device__ __forceinline__ Work take_prefetched_work(Work& prefetched, const Work*& next) {
  cp_async_wait<0>();
  const Work work = prefetched;
  if (work.tiles) prefetch_work(prefetched, next);
  return work;
}

// Starts copying the tokens of a tile, from `token` on, BOX at a time, which is the box of the tensor map; by one
// thread. `full` counts the bytes: the caller announces them by mbarrier_arrive_and_expect.
template <int BOX, int PANELS, int SIZE, typename T>
__device__ __forceinline__ void start_tile_copy(T (&tile)[PANELS][SIZE], const TensorMap& map, MBarrier& full,
                                                i32 token, i32 head, i32 batch) {
  static_assert(SIZE / PANEL % BOX == 0, "whole boxes");
#pragma unroll 1
  for (int panel = 0; panel < PANELS; ++panel)
#pragma unroll
    for (int row = 0; row < SIZE / PANEL; row += BOX)
      tensor_load(tile[panel] + row * PANEL, map, full, panel * PANEL, token + row, head, batch);
}

// Writes zeros to the rows of a tile from `first` on: they are another sequence's, and NaN times a weight of 0 is NaN.
// Each warpgroup that multiplies the tile calls it, and need not wait for the others. All lanes make the same number of
// iterations: where a loop or a branch can part lanes, the compiler computes wgmma's descriptors lane by lane.
constexpr int ZERO_ROWS_BARRIER = 1;  // + warpgroup: a named barrier
template <int PANELS, int SIZE, typename T>
__device__ __forceinline__ void zero_rows(T (&tile)[PANELS][SIZE], int first, int warpgroup) {
  const int thread = opaque(threadIdx.x % 128);
#pragma unroll 1
  for (int n = 0; n < PANELS * SIZE / 8 / 128; ++n) {
    const int piece = n * 128 + thread;  // of 16 bytes
    if (piece / 8 % (SIZE / PANEL) >= first) reinterpret_cast<uint4*>(tile[0])[piece] = {0, 0, 0, 0};
  }
  fence_proxy_async();
  named_barrier_sync(ZERO_ROWS_BARRIER + warpgroup, 128);  // the warpgroup's zeros have been written
}

// The address that this lane gives to ldmatrix or stmatrix for four 8 x 8 matrices: the warp's 16 rows and 16 columns,
// from column 16 n on. The warpgroup's 64 rows are the tile's from `row` on, a multiple of 8 here and below: the
// swizzle depends on a row's number modulo 8. `opaque`: computed again, not held in registers.
template <int SIZE, int PANELS, typename T>
__device__ __forceinline__ T* ldmatrix_row(T (&tile)[PANELS][SIZE], int row, int n) {
  const int thread = opaque(threadIdx.x), i = thread % 16;
  return &tile[n / 4][(row + thread / 32 % 4 * 16 + i) * PANEL + ((n % 4 * 2 + thread / 16 % 2) ^ (i & 7)) * 8];
}

// Loads a warpgroup's 64 rows of a tile, from `row` on, as operands A of wgmma: a[n] has columns 16 n to 16 n + 15.
template <int N, int PANELS, int SIZE, typename T>
__device__ __forceinline__ void load_operand_rows(u32 (&a)[N][4], T (&tile)[PANELS][SIZE], int row) {
#pragma unroll
  for (int n = 0; n < N; ++n) ldmatrix_x4(a[n], ldmatrix_row(tile, row, n));
}

// The products below are issued, not waited for; each is a group. N / 32 panels of 64 columns, or 2 N rows, make the N
// accumulators of a lane. Descriptors count 16 bytes: the next 16 rows of a panel are 128 on, its next 16 columns 2 on.
//
// sum = the tile's rows, weighted by `a` [64, rows] and summed; or what sum holds and that, if it accumulates.
template <typename T, int N, int DEPTHS, int PANELS, int SIZE>
__device__ __forceinline__ void issue_weighted_sum(float (&sum)[N], const u32 (&a)[DEPTHS][4], T (&tile)[PANELS][SIZE],
                                                   bool accumulates) {
  static_assert(2 * N == PANELS * PANEL && DEPTHS * 16 * PANEL == SIZE);
  const u64 b = mn_major_tile(tile[0], sizeof tile[0]);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < DEPTHS; ++n) wgmma<T, 2 * N, MN_MAJOR>(sum, a[n], b + n * 128, n > 0 || accumulates);
  wgmma_commit();
}
// The columns 16 n to 16 n + 15 of a tile, as a descriptor less that of its first ones.
template <typename T, int PANELS, int SIZE> __device__ __forceinline__ int columns_offset(T (&)[PANELS][SIZE], int n) {
  return n / 4 * int(sizeof(T[SIZE]) / 16) + n % 4 * 2;
}
// sum [64, rows] = a [64, columns] by the transposed tile: the scores of its rows.
template <typename T, int N, int DEPTHS, int PANELS, int SIZE>
__device__ __forceinline__ void issue_scores(float (&sum)[N], const u32 (&a)[DEPTHS][4], T (&tile)[PANELS][SIZE]) {
  static_assert(2 * N * PANEL == SIZE && DEPTHS * 16 == PANELS * PANEL);
  const u64 b = k_major_tile(tile[0]);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < DEPTHS; ++n) wgmma<T, 2 * N, K_MAJOR>(sum, a[n], b + columns_offset(tile, n), n > 0);
  wgmma_commit();
}
// The same with a tile's 64 rows from `row` on as `a`.
template <typename T, int N, int PANELS, int ROWS, int SIZE>
__device__ __forceinline__ void issue_scores(float (&sum)[N], T (&a_tile)[PANELS][ROWS], int row,
                                             T (&tile)[PANELS][SIZE]) {
  static_assert(2 * N * PANEL == SIZE);
  const u64 a = k_major_tile(a_tile[0] + row * PANEL), b = k_major_tile(tile[0]);
  wgmma_fence();
#pragma unroll
  for (int n = 0; n < PANELS * PANEL / 16; ++n)
    wgmma<T, 2 * N, K_MAJOR>(sum, a + columns_offset(a_tile, n), b + columns_offset(tile, n), n > 0);
  wgmma_commit();
}
// Rounds accumulators [64, 2 N] to T, as operands A of wgmma for a product over their columns.
template <typename T, int N> __device__ __forceinline__ void round_operands(u32 (&a)[N / 8][4], const float (&x)[N]) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n)
#pragma unroll
    for (int r = 0; r < 4; ++r) a[n][r] = pack<T>(x[8 * n + 2 * r], x[8 * n + 2 * r + 1]);
}

// Gradients ds of the scores of 64 keys and 64 queries, as backward_keys.cu stores them for query_gradient.cu: operands
// A of wgmma with keys as rows, in the order of a warpgroup's registers. A lane has 16 bytes of every 16 queries.
struct ScoreGradients {
  uint4 of_warp[4][4][32];  // 16 keys, 16 queries, lane
};

// An element of the array ds: of a tile of 128 keys, 64 at a time, and a chunk of 64 queries. ds has the same number of
// entries for every head of queries, `ds_entries` in the kernels' arguments. A key tile n has entries only for the
// chunks of queries that see it, one after the other. Chunks c are numbered as in `statistics` (softmax_work.cuh), over
// all sequences of a batch row, and the entry of n and c has number ds_offsets[n] + c among its head's. ds_offsets[n]
// is the number of entries before n's, less the number of n's first chunk: it may be below 0.
using DsEntry = ScoreGradients[2];

// Stores a warp's 16 rows of accumulators x [64 rows, 2 N columns] of the warpgroup, this lane's two rows times factor0
// and factor1, as tokens of `work`, through the warp's 16 rows of `tile`, where the warpgroup's 64 rows begin at `row`.
// width: the columns that exist in memory; map and `to` are the same array, whose batch index is work.output_batch.
// If all 16 are tokens of `work`, lane 0 has the copy engine store them, which may read the tile until lane 0's
// tensor_store_wait() returns.
template <int N, int PANELS, int SIZE, typename T>
__device__ __forceinline__ void store_rows(const TensorMap& map, const StridedRows<T>& to, i64 width,
                                           const float (&x)[N], float factor0, float factor1, T (&tile)[PANELS][SIZE],
                                           int row, const Work& work) {
#pragma unroll
  for (int n = 0; n < N / 8; ++n) {
    u32 packed[4];
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float factor = r & 1 ? factor1 : factor0;
      packed[r] = pack<T>(factor * x[8 * n + 2 * r], factor * x[8 * n + 2 * r + 1]);
    }
    stmatrix_x4(ldmatrix_row(tile, row, n), packed);
  }
  fence_proxy_async();
  __syncwarp();  // the warp's rows have been written
  const int thread = opaque(threadIdx.x), lane = thread % 32, first = row + thread / 32 % 4 * 16;
  if (!__any_sync(0xffffffffu, first + 16 > work.tokens)) {
    if (lane == 0)
      for (int panel = 0; panel < N / 32; ++panel)
        // Each call also closes a group, which tensor_store_wait waits for.
        tensor_store(map, tile[panel] + first * PANEL, panel * PANEL, work.start + first, work.head, work.output_batch);
    return;
  }
#pragma unroll 1
  for (int n = 0; n < 16 * N / 4 / 32; ++n) {
    const int i = (n * 32 + lane) / (N / 4), piece = (n * 32 + lane) % (N / 4);  // row i of 16, 8 columns of it
    if (first + i < work.tokens && piece * 8 < width)
      *reinterpret_cast<uint4*>(to.row(work.output_batch, work.head, work.start + first + i) + piece * 8) =
          *reinterpret_cast<const uint4*>(tile[piece / 8] + (first + i) * PANEL + ((piece ^ i) & 7) * 8);
  }
  order_reads_before_copies();  // this warp has read its rows
}

// Waits until at most RUNNING groups run; then the sums of the others may be read.
template <int RUNNING, int... N> __device__ __forceinline__ void wait_for(float (&... sums)[N]) {
  wgmma_wait<RUNNING>();
  (wgmma_fence_operand(sums), ...);
}

// Whether the copy engine may still read the tile from which this warp's store_rows stored last. Lane 0 knows.
struct PendingStore {
  bool pending = false;

  __device__ __forceinline__ void begin() { pending = threadIdx.x % 32 == 0; }
  // Waits for the store, then arrives at the barrier that lets the producer overwrite the tile.
  __device__ __forceinline__ void release(MBarrier& empty) {
    if (!pending) return;
    tensor_store_wait();
    mbarrier_arrive(empty);
    pending = false;
  }
};

// This warp has read what the barrier guards: one of the arrivals that its phase counts.
__device__ __forceinline__ void release(MBarrier& empty) {
  if (threadIdx.x % 32 == 0) mbarrier_arrive(empty);
}

// The barriers of N stages: a stage is full when the producer has arrived and all announced bytes have, and empty when
// each of WARPS consuming warps has arrived. By thread 0.
template <int WARPS, int N> __device__ __forceinline__ void init_stages(MBarrier (&full)[N], MBarrier (&empty)[N]) {
  for (int n = 0; n < N; ++n) mbarrier_init(full[n], 1), mbarrier_init(empty[n], WARPS);
}

// The factor of a product q . k in tanh(product scale / cap), from float64 arguments. `opaque` keeps the compiler from
// converting them again in the loop, of which float64 instructions took a quarter of the time.
__device__ __forceinline__ float scale_over_cap(double scale, double softcap) {
  return __uint_as_float(opaque(__float_as_uint(float(scale) * inverse(float(softcap)))));
}

// To be called after thread 0 has initialised the block's barriers. The first CONSUMER_WARPGROUPS warpgroups, 2 or 3,
// call consume(); one thread of the next warpgroup calls produce(), with fewer registers. The block has no other
// warpgroups. A multiprocessor has 65536 registers: 512 for each of 128 threads, which the warpgroups share.
template <int CONSUMER_WARPGROUPS, class Consume, class Produce>
__device__ __forceinline__ void consume_and_produce(Consume consume, Produce produce) {
  constexpr int CONSUMER_REGISTERS = CONSUMER_WARPGROUPS == 2 ? 240 : 160,
                PRODUCER_REGISTERS = CONSUMER_WARPGROUPS == 2 ? 24 : 32;
  static_assert(CONSUMER_WARPGROUPS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <=
                512);                         // else registers_up would wait for ever
  if (threadIdx.x == 0) fence_proxy_async();  // makes the barriers visible to the copy engine
  __syncthreads();                            // makes the barriers visible to all threads
  if (threadIdx.x < 128 * CONSUMER_WARPGROUPS) {
    registers_up<CONSUMER_REGISTERS>();
    consume();
  } else {
    registers_down<PRODUCER_REGISTERS>();
    if (threadIdx.x == 128 * CONSUMER_WARPGROUPS) produce();
  }
}
