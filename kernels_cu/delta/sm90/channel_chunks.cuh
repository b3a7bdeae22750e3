// what      A chunk of 32 tokens in Hopper's forward kernels of the delta rules with a gate for each channel:
//           warpgroups with states, a warp that copies chunks, the inverse of a chunk's matrix, and what is common to
//           the warpgroups that make operands.
// math      S is the state before a chunk, transposed in registers; E, W, Z, B and the chunk's decay D are those of
//           delta/prepared.cuh, but W and B are multiplied by scale.   Y = E S;   o = W S + B V;
//           S <- D S + Z^T (V + Y), or, S::TWO_WRITES, S <- D S + Zb^T Y + Z^T V
// shapes    S is the including kernel's struct of shared memory: S::T, S::BK, S::BV, S::STAGES and S::TWO_WRITES,
//           stages, numbers, and the barriers of a stage. Stages have E, W, Z, B, values; recurrence_matrix, N
// limits    sm_90a; bfloat16 or float16
#include "delta/sm90/scalar_chunks.cuh"
#include "delta/channel_chunk.cuh"
static_assert(CHUNK == BT);

template <int BK> constexpr int MAKERS = 2 * BK;  // threads that make operands: the first of a block
template <int BK, int BV> constexpr int CHANNEL_THREADS = MAKERS<BK> + CONSUMERS<BV> + OTHER_THREADS;

// Calls f(x, token) for each pair x[0], x[1] of Values: those of tokens `token` and `token` + 1.
template <class F> __device__ __forceinline__ void each_token_pair(Values& x, F f) {
  const int t = threadIdx.x & 3;
  each_two([&](int i, int, int) { f(&x[i], i / 4 * 8 + 2 * t); });
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// Calls f(number, its address in `states`) for a consumer's numbers of the state, whose block has columns from
// first_column on.
template <class S, typename P, class A, class F>
__device__ __forceinline__ void each_of_own_state(float (&state)[S::BK / 2], P* states, const A& args,
                                                  const WorkTile& work, int first_column, F f) {
  const int thread = opaque(threadIdx.x) - MAKERS<S::BK>;  // `opaque`: registers hold nothing made of it between calls
  states += work.pair * args.shape.K * args.shape.V;
  each_transposed<S::BK>(state, states, args, args.shape, first_column + thread / 32 * 16 + thread % 32 / 4, f);
}

// A warpgroup with 64 columns of V: Y, o and the state S, transposed in registers, of each chunk.
template <class S, class A>
__device__ __forceinline__ void consume(S& s, const A& args, const WorkTile& work, int first_column) {
  using T = typename S::T;
  constexpr int BK = S::BK;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0) - BK / 64;
  const int channel_offset = channel_operand_offset(threadIdx.x & 31, threadIdx.x / 32 % 4);
  float state[BK / 2] = {};
  if (args.initial)
    each_of_own_state<S>(state, args.initial, args, work, first_column, [](float& x, const float* from) { x = *from; });
  Ring<S::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < work.tokens; token += CHUNK, ring.next()) {
    auto& in = s.stages[ring.stage];
    u32 rounded_state[BK / 16][4];
    ::Operand v, written;
    Values x;  // Y, then o
    round_state<T, BK>(rounded_state, state);
    barrier_wait(s.scores_ready[ring.stage], ring.parity);  // the decay is in shared memory
    const float* const decay = s.numbers[ring.stage].decay + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int n = 0; n < BK / 8; ++n) {
      const float2 two = load_float2(decay + 8 * n);
      state[4 * n] *= two.x, state[4 * n + 1] *= two.y, state[4 * n + 2] *= two.x, state[4 * n + 3] *= two.y;
    }
    barrier_wait(s.values_full[ring.stage], ring.parity);
    barrier_wait(s.operands_ready[ring.stage], ring.parity);
    const u64 descriptor = stage_descriptor(in);
    // Computes x = S^T y of the rows y of a tile.
    const auto multiply_state = [&](const Tile<T, BK>& rows) {
      wgmma_fence();
      start_state_product<T>(x, rounded_state, [&](int p) { return descriptor + descriptor_offset(in, rows[p]); });
      wgmma_commit();
      wgmma_wait<0>();
      wgmma_keep(x);
    };
    const auto tile = [](const Tile<T, BK>& rows) { return wgmma_tile(rows, sizeof rows[0], 1024); };
    multiply_state(in.E);
    if constexpr (!S::TWO_WRITES) load_transposed(v, in.values[warpgroup], channel_offset);
    each_two([&](int i, int c, int m) {
      const float2 value = S::TWO_WRITES ? float2{} : unpack(v[c][m], T{});
      written[c][m] = pack<T>(x[i] + value.x, x[i + 1] + value.y);
    });
    // One product at a time, and v is loaded twice: registers do not suffice for more.
    wgmma_fence();
    start_state_update<T, BK>(state, written, tile(in.Z[S::TWO_WRITES]));
    wgmma_wait<0>();
    wgmma_keep(state);
    multiply_state(in.W);
    load_transposed(v, in.values[warpgroup], channel_offset);
    wgmma_fence();
    start_split_product<T>(x, v, descriptor + descriptor_offset(in, in.B), true);
    if constexpr (S::TWO_WRITES) start_state_update<T, BK>(state, v, tile(in.Z[0]));
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_keep(x), wgmma_keep(state);
    store_transposed(in.values[warpgroup], channel_offset, x);
    barrier_arrive(s.outputs_ready[ring.stage]);
  }
  if (args.final)
    each_of_own_state<S>(state, args.final, args, work, first_column, [](float& x, float* to) { *to = x; });
}

// ---- a warp that copies chunks ------------------------------------------------------------------------------------

// Fills each stage with a chunk: fetch_inputs(stage, its barrier `full`, token) starts all copies but that of v. Before
// v, stores o of the stage's previous chunk.
template <class S, class A, class F>
__device__ __forceinline__ void copy_chunks(S& s, const A& args, const WorkTile& work, int column, F fetch_inputs) {
  Ring<S::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token - S::STAGES * CHUNK < work.tokens; token += CHUNK, ring.next()) {
    auto& in = s.stages[ring.stage];
    const int stored_token = token - S::STAGES * CHUNK;
    if (stored_token >= 0) {
      barrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
      fence_async();  // orders consumers' o, known by the barrier, before the copy engine; consumers have less time
    }
    if (token < work.tokens) fetch_inputs(in, s.full[ring.stage], token);
    if (stored_token >= 0)
      store_chunk(work, stored_token, [&](auto f) { f(in.values, args.o, args.o_rows, args.shape.V, column); });
    if (token < work.tokens)
      fetch_chunk(s.values_full[ring.stage], work, token,
                  [&](auto f) { f(in.values, args.v, args.v_rows, args.shape.V, column); });
    __syncwarp();
  }
}

// ---- matrices of tokens with tokens ---------------------------------------------------------------------------------

// Stores x and y, neighbouring elements of a split matrix; j is even.
template <typename T> __device__ __forceinline__ void put_split_pair(Panel<T>& to, int i, int j, float x, float y) {
  const int offset = swizzled_offset(i, j / 8) + j % 8 * 2;
  const u32 rounded = pack<T>(x, y);
  *reinterpret_cast<u32*>(at_offset(to, offset)) = rounded;
  *reinterpret_cast<u32*>(at_offset(to, offset ^ 64)) = rounding_errors<T>(rounded, x, y);
}
// Stores an element of a split matrix.
template <typename T> __device__ __forceinline__ void put_split(Panel<T>& to, int i, int j, float x) {
  const int offset = swizzled_offset(i, j / 8) + j % 8 * 2;
  T rounded = from_float<T>(x);
  *reinterpret_cast<T*>(at_offset(to, offset)) = rounded;
  *reinterpret_cast<T*>(at_offset(to, offset ^ 64)) = from_float<T>(x - to_float(rounded));
}
__device__ __forceinline__ float* element(float (&matrix)[CHUNK][32], int i, int j) {
  return reinterpret_cast<float*>(at_offset(matrix, swizzled_offset(i, j / 4) + j % 4 * 4));
}

// Stores zeros in the rows of a block's tokens.
template <int BK, class Matrix> __device__ __forceinline__ void clear_block(Matrix& to, const BlockTask<BK>& task) {
#pragma unroll
  for (int piece = 0; piece < BLOCK * 8; piece += task.LANES) {
    const int n = piece + task.lane;
    *reinterpret_cast<uint4*>(at_offset(to, swizzled_offset(task.first + n / 8, n % 8))) = uint4{};
  }
}

// R is the matrix of a chunk's recurrence, strictly below the diagonal: N = (I - diag(weights) R)^-1. The member
// `recurrence_matrix` has the diagonal blocks [16, 16] of diag(weights) R in float32, and the block of R at the lower
// left, split and without weights, at the upper right, where R is zero. These functions store R_ij and R_i(j + 1).
template <class Matrix>
__device__ __forceinline__ void put_in_block(Matrix& R, const float (&weights)[CHUNK], int i, int j, float x) {
  *element(R, i, j) = weights[i] * x;
}
template <class Matrix>
__device__ __forceinline__ void put_pair_of_border(Matrix& R, const float (&weights)[CHUNK], int i, int j, float2 x) {
  if (i >= 16 && j < 16) {
    const int offset = swizzled_offset(i - 16, 4 + j / 8) + j % 8 * 2;
    const u32 rounded = pack<f16>(x.x, x.y);
    *reinterpret_cast<u32*>(at_offset(R, offset)) = rounded;
    *reinterpret_cast<u32*>(at_offset(R, offset ^ 32)) = rounding_errors<f16>(rounded, x.x, x.y);
  } else {
    *reinterpret_cast<float2*>(element(R, i, j)) = {weights[i] * x.x, weights[i] * x.y};
  }
}

// The largest power of 2 that x, 1 or more, is not below, and the reciprocal of a power of 2.
__device__ __forceinline__ float power_of_2(float x) { return __uint_as_float(__float_as_uint(x) & 0x7f800000u); }
__device__ __forceinline__ float reciprocal(float power) {
  return __uint_as_float(0x7f000000u - __float_as_uint(power));
}
// The largest |x| of LANES neighbouring lanes.
template <int LANES> __device__ __forceinline__ float largest_of_lanes(float x) {
  x = fabsf(x);
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, distance));
  return x;
}
// A power of 2 by which weights are divided, so that their products with scores are within float16. All lanes call it.
__device__ __forceinline__ float weights_scale(const float (&weights)[CHUNK]) {
  return power_of_2(fmaxf(1.f, largest_of_lanes<32>(weights[own_lane()])));
}

// Fills in.N with N transposed, a row for each j, split and divided by a power of 2, so that float16 holds it; returns
// this power. Blocks N11 and N22 by substitution, N21 = N22 diag(weights) R21 N11 by products, N12 = 0.
template <class Stage> __device__ __forceinline__ float invert_matrix(Stage& in, const float (&weights)[CHUNK]) {
  int lane = own_lane();  // its values are computed again after each product, which saves registers
  const int second_block = lane >> 4;
  const int column = swizzled_offset(lane, 2 * second_block);  // offset of row `lane` at its block's first i
  float x[16], largest = 1.f;
  substitute(x, in.recurrence_matrix, lane);
#pragma unroll
  for (int i = 0; i < 16; ++i) largest = fmaxf(largest, fabsf(x[i]));
  const float own_scale = power_of_2(largest_of_lanes<16>(largest)), factor = reciprocal(own_scale);  // of the block
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    u32 rounded[4], rest[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float pair[2] = {factor * x[8 * half + 2 * m], factor * x[8 * half + 2 * m + 1]};
      rounded[m] = pack<f16>(pair[0], pair[1]), rest[m] = rounding_errors<f16>(rounded[m], pair[0], pair[1]);
    }
    const int offset = column ^ 16 * half;
    *reinterpret_cast<uint4*>(at_offset(in.N, offset)) = {rounded[0], rounded[1], rounded[2], rounded[3]};
    *reinterpret_cast<uint4*>(at_offset(in.N, offset ^ 64)) = {rest[0], rest[1], rest[2], rest[3]};
    if (second_block) {  // N12 = 0: i of the first block
      *reinterpret_cast<uint4*>(at_offset(in.N, offset ^ 32)) = uint4{};
      *reinterpret_cast<uint4*>(at_offset(in.N, offset ^ 96)) = uint4{};
    }
    __syncwarp();  // keeps the compiler from computing all rows before it stores one, which takes too many registers
  }
  // N21^T = (N11^T R21^T) diag(weights) N22^T
  lane = own_lane();
  int left_offset = left_operand_offset(lane);
  u32 left[2][4], right[2][4];
  float y[2][4] = {};
#pragma unroll
  for (int part = 0; part < 2; ++part) {
    ldmatrix_x4(left[part], at_offset(in.N, shifted_offset(left_offset, 0, 32 * part)));
    ldmatrix_x4(right[part],
                at_offset(in.recurrence_matrix, shifted_offset(right_operand_offset(lane), 0, 32 + 16 * part)));
  }
  multiply_split<f16>(y, left, right);
  float scale = weights_scale(weights);  // of y
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 weight = load_float2(weights + 16 + 8 * m + 2 * (lane & 3));
    const float factors[2] = {reciprocal(scale) * weight.x, reciprocal(scale) * weight.y};
#pragma unroll
    for (int n = 0; n < 4; ++n) y[m][n] *= factors[n % 2];
  }
  split<f16>(left[0], left[1], y);
  left_offset = left_operand_offset(own_lane());
#pragma unroll
  for (int part = 0; part < 2; ++part)
    ldmatrix_x4_trans(right[part], at_offset(in.N, shifted_offset(left_offset, 16, 16 + 32 * part)));
#pragma unroll
  for (int m = 0; m < 4; ++m) y[0][m] = y[1][m] = 0.f;
  multiply_split<f16>(y, left, right);
  const float other_scale = __shfl_xor_sync(0xffffffffu, own_scale, 16);
  scale *= own_scale * other_scale, largest = 0.f;
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) y[m][n] *= scale, largest = fmaxf(largest, fabsf(y[m][n]));
  scale = power_of_2(fmaxf(fmaxf(own_scale, other_scale), largest_of_lanes<32>(largest)));  // of N
#pragma unroll
  for (int m = 0; m < 2; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n) y[m][n] *= reciprocal(scale);
  if (scale > own_scale) {  // divides N11 or N22 by the scale of N
    const float ratio = own_scale * reciprocal(scale);
#pragma unroll 1
    for (int piece = 0; piece < 4; ++piece) {
      u32(&words)[4] = *reinterpret_cast<u32(*)[4]>(at_offset(in.N, column ^ 16 * (piece % 2) ^ 64 * (piece / 2)));
      for (u32& word : words) {
        const float2 pair = unpack(word, f16{});
        word = pack<f16>(ratio * pair.x, ratio * pair.y);
      }
    }
  }
  store_split<f16, 1>(in.N, shifted_offset(left_offset, 0, 16), y);
  return scale;
}

// sum[16, 16] += the block at (row, column), multiples of 16, of X Y, lower triangles that are split. `transposed`: Y
// transposed.
template <typename T>
__device__ __forceinline__ void multiply_triangle(float (&sum)[2][4], Panel<T>& X, Panel<T>& transposed, int row,
                                                  int column, int lane) {
  const int left_offset = left_operand_offset(lane), right_offset = right_operand_offset(lane);
#pragma unroll
  for (int c = 0; c < CHUNK; c += 16)
    if (c <= row && c >= column) {
      u32 x[2][4], y[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(x[part], at_offset(X, shifted_offset(left_offset, row, c + 32 * part)));
        ldmatrix_x4(y[part], at_offset(transposed, shifted_offset(right_offset, column, c + 32 * part)));
      }
      multiply_split<T>(sum, x, y);
    }
}

// ---- warpgroups that make operands ----------------------------------------------------------------------------------

// The address of a token's channels from c on, a multiple of 4.
template <typename X> __device__ __forceinline__ X* channels_at(X (*tile)[CHUNK][PANEL<X>], int token, int c) {
  constexpr int PIECE = 16 / sizeof(X);
  return swizzled(tile[c / PANEL<X>][0], token, c % PANEL<X> / PIECE) + c % PIECE;
}

// A thread's 4 channels of a block of 4 tokens, in tiles of panels.
template <int BK> struct PanelTask : BlockTask<BK> {
  int offset;  // in bytes, of the block's first token in tiles of 16-bit numbers

  __device__ __forceinline__ PanelTask(int thread = threadIdx.x) {
    this->lane = thread & this->LANES - 1, this->block = thread / u32(this->LANES);
    this->first = BLOCK * this->block, this->c = 4 * this->lane;
    offset = this->c / 64 * int(sizeof(Panel<f16>)) + swizzled_offset(this->first, this->c % 64 / 8) + this->c % 8 * 2;
  }
  // The address of token n of the block. Tokens of a block differ in the lowest bits of their rows alone.
  template <typename X> __device__ __forceinline__ X* at(X (*tile)[CHUNK][PANEL<X>], int n) const {
    if constexpr (sizeof(X) == 2) return reinterpret_cast<X*>(at_offset(*tile, (offset ^ 16 * n) + 128 * n));
    else return channels_at(tile, this->first + n, this->c);
  }
};

// Stores a block's tokens x, one of KINDS kinds, at all levels where they are rows of scores, since the block is after
// the level's border (ROWS), or columns, since it is before it: times the decays from the border to the block, or from
// the block to the border. Returns the decays from the chunk's start to the block, or from the block to the chunk's
// end.
template <bool ROWS, int KINDS, int BK, int SIZE>
__device__ __forceinline__ float4 store_at_borders(f16 (&tiles)[LEVELS][SIZE],
                                                   const float (&block_decays)[BT / BLOCK][BK],
                                                   const BlockTask<BK>& task, int kind, const float4 (&x)[BLOCK]) {
  float4 decay = {1.f, 1.f, 1.f, 1.f};
#pragma unroll
  for (int level = 0; level < LEVELS; ++level) {
    if ((task.block >> level & 1) != ROWS) continue;
    store_level<KINDS>(tiles[level], level, kind, task, x, decay);
    const float* const other_half = block_decays[(task.block >> level ^ 1) << level] + task.c;
#pragma unroll
    for (int n = 0; n < 1 << level; ++n) decay = times(decay, unpack_four(other_half + n * BK));
  }
  return decay;
}

// The stage before this one.
template <int N> __device__ __forceinline__ Ring<N> before(Ring<N> ring) {
  const bool wraps = ring.stage == 0;
  ring.stage += wraps ? N - 1 : -1, ring.parity ^= wraps;
  return ring;
}

// The makers' barrier.
template <int BK> __device__ __forceinline__ void makers_sync() { barrier_sync(1, MAKERS<BK>); }

// Makes the operands of all chunks. The scores of a chunk are made before the operands of the previous one, so that a
// warp of another role inverts meanwhile. The including file defines both functions.
template <class S, class A>
__device__ __forceinline__ void score_tokens(S& s, const A& args, const Ring<S::STAGES>& ring);
template <class S> __device__ __forceinline__ void make_operands(S& s, float scale, const Ring<S::STAGES>& ring);
template <class S, class A> __device__ __forceinline__ void make_chunks(S& s, const A& args, int tokens) {
  Ring<S::STAGES> ring;
#pragma unroll 1
  for (int token = 0; token < tokens + CHUNK; token += CHUNK, ring.next()) {
    if (token < tokens) score_tokens(s, args, ring);
    if (token) make_operands(s, float(args.scale), before(ring));
  }
}

// Copies arrays of shared memory, by all makers.
template <int BK, class Tile> __device__ __forceinline__ void copy_tile(Tile& to, const Tile& from) {
#pragma unroll 1
  for (int n = threadIdx.x; n < int(sizeof to / 16); n += MAKERS<BK>)
    reinterpret_cast<uint4*>(&to)[n] = reinterpret_cast<const uint4*>(&from)[n];
}

// Initialises the barriers of stages, by one thread. inputs: arrivals that fill a stage, but for values.
template <class S> __device__ __forceinline__ void init_stage_barriers(S& s, int inputs) {
  for (int stage = 0; stage < S::STAGES; ++stage) {
    barrier_init(s.full[stage], inputs), barrier_init(s.values_full[stage], 32);
    barrier_init(s.scores_ready[stage], MAKERS<S::BK>), barrier_init(s.inverse_ready[stage], 32);
    barrier_init(s.operands_ready[stage], MAKERS<S::BK>), barrier_init(s.outputs_ready[stage], CONSUMERS<S::BV>);
  }
}

// ---- sizes ----------------------------------------------------------------------------------------------------------

template <int BK, int BV> constexpr int BLOCKS_OF = BK + BV == 128 ? 2 : 1;  // blocks on a multiprocessor

// The stages, at most four, that fit in a block's shared memory beside `rest` bytes; each stage has its Numbers and its
// barriers, too.
template <class Stage, class Numbers> constexpr int stages_that_fit(int rest, int blocks) {
  const int room = 228 * 1024 / blocks - 1024 - rest, count = room / int(sizeof(Stage) + sizeof(Numbers) + 64);
  return count > 4 ? 4 : count;
}

// Registers of a thread by role. A block whose roles ask for more registers than it starts with (AT_FIRST) would wait
// for ever.
template <int BK, int BV> struct ChannelRegisters {
  static constexpr int BLOCKS = BLOCKS_OF<BK, BV>, WARPGROUPS = CHANNEL_THREADS<BK, BV> / 128;
  static constexpr int AT_FIRST = 65536 / (BLOCKS * CHANNEL_THREADS<BK, BV>) / 8 * 8;
  static constexpr int CONSUMER = BLOCKS == 2 ? 104 : BV == 64 ? 208 : BK == 64 ? 152 : 144;
  static constexpr int MAKER = BLOCKS == 2 ? 80 : BV == 64 ? 112 : BK == 64 ? 120 : 72;
  static constexpr int OTHER = BV + BK == 192 ? 80 : BLOCKS == 2 ? 56 : 48;
  static_assert(BK / 64 * MAKER + BV / 64 * CONSUMER + OTHER <= WARPGROUPS * AT_FIRST);
};
