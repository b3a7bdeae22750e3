// what      The delta rule's forward pass on Hopper, with one gate for all channels of a token or none: chunks of 32.
// math      S' = e^g_t S_{t-1};  S_t = S' + beta_t k_t (v_t - S'^T k_t)^T;  o_t = scale S_t^T q_t.  Of a chunk, with
//           D_ij the decay from behind token j to i, E_i from the chunk's start to i, L_j from behind j to its end:
//           M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  N = (I + diag(beta) M)^-1
//           B = A N diag(beta);  W_i = scale E_i q_i - sum_j B_ij E_j k_j;  Z_j = beta_j sum_i N_ij L_i k_i
//           X_j = v_j - E_j S^T k_j;  o = W S + B V;  S <- E_32 S + Z^T X
// shapes    q k [B, H, T, K], v o [B, HV, T, V], g beta [B, HV, T] of any strides; states [N, HV, K, V] float32
// grid      a block for every (sequence, head of v, BV columns of V), columns side by side, sequence slowest
// roles     a warpgroup for every 64 columns, with their state transposed in its registers, multiplies by it; one makes
//           B, W and Z, and beside W the scores A and M of the chunk after the next; of another one a warp moves
//           chunks, one multiplies decays, and two invert I + diag(beta) M, every other chunk each
// smem      scalar_forward_storage.cuh, which names the barriers, too
// barriers  named 1: the makers among each other
// numerics  products of T in float32: tokens as they came; S as it is read, W, X and Z rounded once; A, B and N the sum
//           of two numbers. |W_i| <= scale |q_i| and |Z_j| <= beta_j |k_j| while gates are <= 0 and beta |k|^2 <= 2,
//           whatever the keys: no large numbers cancel. N by substitution in float32 within 16 tokens.
//           Decays are products of those of the tokens that lie between, never quotients: any gate is exact
// source    Yang et al., 2024, "Gated Delta Networks", eq. 10; the chunk's form is the WY representation multiplied out
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/scalar_forward_storage.cuh"

// What rounding leaves over of two values.
template <typename T> __device__ __forceinline__ u32 rest_of(u32 rounded, float x, float y) {
  const float2 two = unpack(rounded, T{});
  return pack<T>(x - two.x, y - two.y);
}

// A warp's arrival: of one lane for all, since arrivals at a barrier are counted one after the other.
__device__ __forceinline__ void warp_arrive(Barrier& barrier) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) barrier_arrive(barrier);
}

__device__ __forceinline__ float2 two_of(const float* p) { return *reinterpret_cast<const float2*>(p); }

// ---- a warp that moves chunks -------------------------------------------------------------------------------------

template <class S>
__device__ __forceinline__ void move(S& s, const Args<typename S::T>& args, const WorkTile& at, int column) {
  WorkTile keys = at;
  keys.head /= int(args.group);
  Turn<S::STAGES> turn;
#pragma unroll 1
  for (int token = 0; token - S::STAGES * CHUNK < at.tokens; token += CHUNK, turn.next()) {
    auto& stage = s.stages[turn.stage];
    const int before = token - S::STAGES * CHUNK;
    if (before >= 0) {
      barrier_wait(s.done[turn.stage], turn.parity ^ 1);
      fence_async();  // here, since consumers have less time
    }
    if (token < at.tokens)
      fetch_chunk(s.full[turn.stage], keys, token, [&](auto f) {
        for (int panel = 0; panel < S::BK / 64; ++panel) {
          auto& two = *reinterpret_cast<Panel<typename S::T>(*)[2][1]>(&stage.rows[panel]);
          f(two[0], args.q, args.q_rows, args.shape.K, 64 * panel);
          f(two[1], args.k, args.k_rows, args.shape.K, 64 * panel);
        }
      });
    if (before >= 0) store_chunk(at, before, [&](auto f) { f(stage.v, args.o, args.o_rows, args.shape.V, column); });
    if (token < at.tokens)
      fetch_chunk(s.valued[turn.stage], at, token,
                  [&](auto f) { f(stage.v, args.v, args.v_rows, args.shape.V, column); });
    __syncwarp();
  }
}

// ---- matrices [16, 16] in panels ------------------------------------------------------------------------------------

// Where the rows of a lane lie that it gives of a matrix [16, 16] at (0, 0) of a panel: as `ldmatrix_x4` reads a left
// operand and `stmatrix_x4` puts a product, or `ldmatrix_x4_trans` reads a right operand; as that is read by columns.
__device__ __forceinline__ int place_of_left(int lane) { return swizzled_offset(lane & 15, lane >> 4); }
__device__ __forceinline__ int place_of_right(int lane) {
  return swizzled_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}
// The same of a matrix at (row, column), multiples of 16; what rounding left over has column + 32.
__device__ __forceinline__ int moved(int place, int row, int column) { return (place ^ 2 * column) + 128 * row; }

// ---- a warp that multiplies decays ----------------------------------------------------------------------------------

// Numbers of the tokens `lane`, 32 + lane, ... of AHEAD chunks, as they are in memory: nothing waits for them yet.
struct Numbers {
  u32 bits[AHEAD];

  template <typename T>
  __device__ __forceinline__ void read(const Rows<const void>& from, bool wide, const WorkTile& at, int token, T) {
    const i64 first = at.batch * from.b + at.head * from.h + (at.start + token) * from.t;
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) {
      const i64 place = first + n * CHUNK * from.t;
      bits[n] = 0;
      if (from.p && token + n * CHUNK < at.tokens)
        bits[n] = wide ? static_cast<const u32*>(from.p)[place] : static_cast<const u16*>(from.p)[place];
    }
  }
  template <typename T> __device__ __forceinline__ float number(int n, bool wide, T) const {
    return wide ? __uint_as_float(bits[n]) : to_float(T{u16(bits[n])});
  }
};

// 1 / sqrt(|x|^2 + 1e-6) of 32 rows x, of each lane's row: from the diagonal of x x^T.
template <typename T, int PANELS>
__device__ __forceinline__ float inverse_length(T (&rows)[PANELS][2 * CHUNK][64], int first, float (&lengths)[CHUNK],
                                                int lane) {
  lane = opaque(lane);  // what is made of it is made anew, since there are few registers
  const int g = lane / 4, left = place_of_left(lane);
#pragma unroll 1
  for (int row = 0; row < CHUNK; row += 16) {
    float d[2][4] = {};
#pragma unroll 1
    for (int c = 0; c < 4 * PANELS; ++c) {
      u32 x[4];
      ldmatrix_x4(x, at_offset(rows[c / 4], moved(left, first + row, c % 4 * 16)));
      multiply_halves(d[0], x, {x[0], x[2]}, T{}), multiply_halves(d[1], x, {x[1], x[3]}, T{});
    }
    if (lane % 4 == g / 2) {
      lengths[row + g] = inverse_root((g & 1 ? d[0][1] : d[0][0]) + 1e-6f);
      lengths[row + 8 + g] = inverse_root((g & 1 ? d[1][3] : d[1][2]) + 1e-6f);
    }
  }
  __syncwarp();
  return lengths[lane];
}

template <class S>
__device__ __forceinline__ void multiply_decays(S& s, const Args<typename S::T>& args, const WorkTile& at) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31;
  const bool wide[2] = {args.wide_gate != 0, args.wide_beta != 0};
  Numbers g, beta;
  g.read(args.g, wide[0], at, lane, T{}), beta.read(args.beta, wide[1], at, lane, T{});
  Turn<S::STAGES> turn;
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < at.tokens; ++chunk, turn.next()) {
    if (chunk % AHEAD == 0) {
      const int next = (chunk + AHEAD) * CHUNK + lane;
      __syncwarp();  // the last ones have been read
#pragma unroll
      for (int n = 0; n < AHEAD; ++n) {
        s.next.decay[n][lane] = decay_of(g.number(n, wide[0], T{}));
        s.next.beta[n][lane] = beta.number(n, wide[1], T{});
      }
      g.read(args.g, wide[0], at, next, T{}), beta.read(args.beta, wide[1], at, next, T{});
      __syncwarp();
    }
    if (chunk >= S::STAGES) barrier_wait(s.done[turn.stage], turn.parity ^ 1);
    Gates& to = s.gates[turn.stage];
    float query = float(args.scale), key = 1.f;
    if (args.normalized) {
      auto& rows = s.stages[turn.stage].rows;
      barrier_wait(s.full[turn.stage], turn.parity);
      query *= inverse_length(rows, 0, to.query, lane), key = inverse_length(rows, CHUNK, to.key, lane);
      fence_async();  // the rows have been read before others come in their place
    }
    to.query[lane] = query, to.key[lane] = key;
    auto& decay = s.stages[turn.stage].decay;
    const float* const decays = s.next.decay[chunk % AHEAD];
    const int place = swizzled_offset(lane, 0);  // of this lane's query
    float product = 0.f, last = 1.f;             // of decays from behind a key on: nothing behind the query
#pragma unroll 2
    for (int piece = 7; piece >= 0; --piece) {
      const float4 four = *reinterpret_cast<const float4*>(decays + 4 * piece);
      const float its[4] = {four.x, four.y, four.z, four.w};
      float by_key[4];
#pragma unroll
      for (int m = 3; m >= 0; --m) {
        product = lane == 4 * piece + m ? 1.f : product * last;
        by_key[m] = product, last = its[m];
      }
      *reinterpret_cast<float4*>(at_offset(decay, place ^ 16 * piece)) = {by_key[0], by_key[1], by_key[2], by_key[3]};
    }
    if (args.normalized)
#pragma unroll 1
      for (int piece = 0; piece < 8; ++piece) {
        const float4 keys = *reinterpret_cast<const float4*>(to.key + 4 * piece);
        float4& its = *reinterpret_cast<float4*>(at_offset(decay, place ^ 16 * piece));
        its = {its.x * keys.x, its.y * keys.y, its.z * keys.z, its.w * keys.w};
      }
    const float start = product * last;
    to.read[lane] = to.query[lane] * start, to.start[lane] = to.key[lane] * start;
    to.beta[lane] = s.next.beta[chunk % AHEAD][lane];
    if (lane == 31) to.all = start;
    __syncwarp();
    to.end[lane] = swizzled(decay[0], CHUNK - 1, lane / 4)[lane % 4];
    warp_arrive(s.gated[turn.stage]);
  }
}

// ---- matrices of a chunk as the sum of two numbers -----------------------------------------------------------------

// Puts a warp's values [16, 16 N] as `mma_bf16` gives them.
template <typename T, int N>
__device__ __forceinline__ void put_two(Panel<T>& to, int place, const float (&x)[2 * N][4]) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    u32 rounded[4], rest[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* two = &x[2 * c + m / 2][m % 2 * 2];
      rounded[m] = pack<T>(two[0], two[1]), rest[m] = rest_of<T>(rounded[m], two[0], two[1]);
    }
    stmatrix_x4(at_offset(to, moved(place, 0, 16 * c)), rounded);
    stmatrix_x4(at_offset(to, moved(place, 0, 16 * c + 32)), rest);
  }
}

// d[16, 16] += a[16, 16] b[16, 16] but for the product of what rounding left over; the larger ones last.
template <typename T>
__device__ __forceinline__ void multiply_two(float (&d)[2][4], const u32 (&a)[2][4], const u32 (&b)[2][4]) {
#pragma unroll
  for (int pair = 0; pair < 3; ++pair)
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 its[2] = {b[pair == 1][2 * m], b[pair == 1][2 * m + 1]};
      multiply_halves(d[m], a[pair == 0], its, T{});
    }
}

// ---- two warps that invert I + diag(beta) M -------------------------------------------------------------------------

// Column lane % 16 of the inverse of a block of 16 tokens, the first or the last of the chunk.
template <int ROWS>
__device__ __forceinline__ void substitute(float (&x)[ROWS], const float (&M)[CHUNK][32], int lane) {
  const int last = lane >> 4;
  const char* const block = reinterpret_cast<const char*>(M[16 * last]);
  const char* const pieces[2] = {block + 64 * last,
                                 block + 64 * (1 - last)};  // `swizzled`, for rows known when compiled
#pragma unroll
  for (int i = 0; i < ROWS; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 four = *reinterpret_cast<const float4*>(pieces[i >> 2 & 1] + i * 128 + (l / 4 ^ i & 3) * 16);
      sums[0] = fmaf(four.x, x[l], sums[0]);
      if (l + 1 < i) sums[1] = fmaf(four.y, x[l + 1], sums[1]);
      if (l + 2 < i) sums[0] = fmaf(four.z, x[l + 2], sums[0]);
      if (l + 3 < i) sums[1] = fmaf(four.w, x[l + 3], sums[1]);
    }
    x[i] = i == (lane & 15) ? 1.f : sums[0] + sums[1];
  }
}

template <class S> __device__ __forceinline__ void solve(S& s, int tokens, int first) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31, last = lane >> 4;
  const int left_place = place_of_left(lane);
  const int own = swizzled_offset(lane, 2 * last);  // of the lane's key, where its column begins
  Turn<S::STAGES> turn;
  if (first) turn.next();
#pragma unroll 1
  for (int chunk = first; chunk * CHUNK < tokens; chunk += 2) {
    auto& in = s.stages[turn.stage];
    const Gates& gates = s.gates[turn.stage];
    barrier_wait(s.scored[turn.stage], turn.parity);
    float x[16];
    substitute(x, in.M, lane);
    const auto put_rows = [&](Panel<T>& to, const float (&x)[8], int place) {
      u32 rounded[4], rest[4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        rounded[m] = pack<T>(x[2 * m], x[2 * m + 1]), rest[m] = rest_of<T>(rounded[m], x[2 * m], x[2 * m + 1]);
      *reinterpret_cast<uint4*>(at_offset(to, place)) = {rounded[0], rounded[1], rounded[2], rounded[3]};
      *reinterpret_cast<uint4*>(at_offset(to, place ^ 64)) = {rest[0], rest[1], rest[2], rest[3]};
      __syncwarp();  // else all are made before one is put, and there are no registers for that
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the block's rows
      float some[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) some[i] = gates.beta[lane] * x[8 * half + i];
      put_rows(in.N, some, own ^ 16 * half);
#pragma unroll
      for (int i = 0; i < 8; ++i) some[i] *= gates.end[16 * last + 8 * half + i];
      put_rows(in.B, some, own ^ 16 * half);
      if (last)  // late keys are nothing to early queries
        for (int rest = 0; rest < 2; ++rest)
          *reinterpret_cast<uint4*>(at_offset(in.B, own ^ 32 ^ 16 * half ^ 64 * rest)) = {0, 0, 0, 0};
    }
    __syncwarp();
    u32 left[2][4], right[2][4];  // the other block is N (-M) N of the three
    float y[2][4] = {};
#pragma unroll
    for (int rest = 0; rest < 2; ++rest) {
      ldmatrix_x4(left[rest], at_offset(in.N, moved(left_place, 0, 32 * rest)));
      ldmatrix_x4(right[rest], at_offset(in.M, moved(place_of_right(opaque(lane)), 0, 32 + 16 * rest)));
    }
    multiply_two<T>(y, left, right);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* two = &y[m / 2][m % 2 * 2];
      left[0][m] = pack<T>(two[0], two[1]), left[1][m] = rest_of<T>(left[0][m], two[0], two[1]);
    }
#pragma unroll
    for (int rest = 0; rest < 2; ++rest)
      ldmatrix_x4_trans(right[rest], at_offset(in.N, moved(left_place, 16, 16 + 32 * rest)));
#pragma unroll
    for (int m = 0; m < 4; ++m) y[0][m] = y[1][m] = 0.f;
    multiply_two<T>(y, left, right);
    put_two<T, 1>(in.N, moved(left_place, 0, 16), y);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float2 end = two_of(gates.end + 16 + 8 * m + 2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) y[m][i] *= i % 2 ? end.y : end.x;
    }
    put_two<T, 1>(in.B, moved(left_place, 0, 16), y);
    fence_async();
    warp_arrive(s.solved[turn.stage]);
    turn.next(), turn.next();
  }
}

// ---- a warpgroup that makes scores, then B, W and Z -----------------------------------------------------------------

// Where a lane's row lies of the first 16 tokens of a panel of 64 channels, of which a warp has 16.
__device__ __forceinline__ int place_of_channels(int lane, int warp) {
  return swizzled_offset((lane & 7) + (lane >> 4) * 8, 2 * warp + (lane >> 3 & 1));
}
template <typename T> __device__ __forceinline__ void put_channels(T (*to)[64], int place, const Values& x) {
  Operand two;
  each_two([&](int at, int s, int m) { two[s][m] = pack<T>(x[at], x[at + 1]); });
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) stmatrix_x4_trans(at_offset(*to, place + 16 * 128 * s), two[s]);
}
template <typename T> __device__ __forceinline__ void get_channels(Operand& x, T (*from)[64], int place) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) ldmatrix_x4_trans(x[s], at_offset(*from, place + 16 * 128 * s));
}

// A stage as products take its tiles: what lies in it is a sum away, which costs one instruction.
template <class Stage> __device__ __forceinline__ u64 tiles_of(Stage& stage) {
  u64 tiles = wgmma_tile(&stage, 16, 1024);
  forget(tiles);
  return tiles;
}
template <class Stage> __device__ __forceinline__ int tile_at(Stage& stage, const void* tile) {
  return int(static_cast<const char*>(tile) - reinterpret_cast<const char*>(&stage)) / 16;
}

// Starts [q; k] k^T.
template <class Stage> __device__ __forceinline__ void start_scores(Values& d, Stage& in) {
  const u64 tiles = tiles_of(in);
#pragma unroll
  for (int c = 0; c < 4 * int(sizeof in.rows / sizeof in.rows[0]); ++c) {
    const u64 rows = tiles + (tile_at(in, in.rows[c / 4]) + c % 4 * 2);
    wgmma<typename Stage::Number, CHUNK, false>(d, rows, rows + tile_at(in, in.rows[0] + CHUNK), c > 0);
  }
  wgmma_commit();
}

// Puts A, of which the first two warps have the rows, and -beta M, of which the others have them.
template <class S>
__device__ __forceinline__ void put_scores(S& s, const Turn<S::STAGES>& turn, Values& d, int lane, int warp, int left) {
  using T = typename S::T;
  const int row = 16 * (warp & 1) + lane / 4,
            place = 128 * 16 * (warp & 1) + swizzled_offset(lane / 4, lane / 2 & 1) + lane % 2 * 8;
  const bool queries = warp < 2, late = warp == 3;  // late: the last 16 keys
  auto& in = s.stages[turn.stage];
  barrier_wait(s.gated[turn.stage], turn.parity);
  const Gates& gates = s.gates[turn.stage];
  const float (&of_row)[CHUNK] = queries ? gates.query : gates.key;
  const float rows[2] = {of_row[row], of_row[row + 8]};
  const float by[2] = {queries ? rows[0] : -gates.beta[row] * rows[0],
                       queries ? rows[1] : -gates.beta[row + 8] * rows[1]};
  float x[4][4];
  // The two numbers from column 8 n + 2 (lane % 4) on, in row `row` + 8 h.
  const auto two_at = [&](float (&rows)[CHUNK][32], int n, int h) {
    return reinterpret_cast<float2*>(at_offset(rows, (place ^ 32 * n) + 8 * 128 * h));
  };
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 decay = *two_at(in.decay, n, h);
      const float its = late && n < 2 ? -rows[h] : by[h];
      x[n][2 * h] = d[4 * n + 2 * h] * (decay.x * its), x[n][2 * h + 1] = d[4 * n + 2 * h + 1] * (decay.y * its);
    }
  if (queries) put_two<T, 2>(in.A, moved(left, 16 * warp, 0), x);
  else if (!late) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *two_at(in.M, n, h) = {x[n][2 * h], x[n][2 * h + 1]};
  } else {
#pragma unroll
    for (int n = 2; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *two_at(in.M, n, h) = {x[n][2 * h], x[n][2 * h + 1]};
    u32 rounded[4], rest[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* two = &x[m / 2][m % 2 * 2];
      rounded[m] = pack<T>(two[0], two[1]), rest[m] = rest_of<T>(rounded[m], two[0], two[1]);
    }
    stmatrix_x4(at_offset(in.M, moved(left, 0, 32)), rounded);
    stmatrix_x4(at_offset(in.M, moved(left, 0, 48)), rest);
  }
  warp_arrive(s.scored[turn.stage]);
}

// A warp's block [16, 16] of B from (row, column) on, and -B decayed from the chunk's start to `erased`.
template <typename T, class Stage>
__device__ __forceinline__ void pair_up(float (&B)[2][4], Panel<T>& erased, Stage& in, const Gates& gates, int row,
                                        int column, int lane, int left) {
  const int right = place_of_right(lane);
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (16 * c <= row && 16 * c >= column) {  // both are lower triangles
      u32 A[2][4], N[2][4];
#pragma unroll
      for (int rest = 0; rest < 2; ++rest) {
        ldmatrix_x4(A[rest], at_offset(in.A, moved(left, row, 16 * c + 32 * rest)));
        ldmatrix_x4(N[rest], at_offset(in.N, moved(right, column, 16 * c + 32 * rest)));
      }
      multiply_two<T>(B, A, N);
    }
  float x[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 start = two_of(gates.start + column + 8 * m + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[m][i] = -B[m][i] * (i % 2 ? start.y : start.x);
  }
  put_two<T, 1>(erased, moved(left, row, column), x);
}

// Starts y[channel, i] (+)= sum_j x[channel, j] pairs[i, j], of both numbers of the pairs.
template <typename T>
__device__ __forceinline__ void multiply_sums(Values& y, const Operand& x, u64 pairs, bool accumulate) {
#pragma unroll
  for (int c = 0; c < 4; ++c) wgmma<T, CHUNK, false>(y, x[c % 2], pairs + 2 * c, accumulate || c);
}

template <class S> __device__ __forceinline__ void make(S& s, int tokens) {
  using T = typename S::T;
  constexpr int PANELS = S::BK / 64;
  constexpr bool BESIDE = PANELS == 2;  // else there are no registers for scores beside W
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const int row = 16 * (warp & 1), column = 16 * (warp >> 1);  // of the warp's block of B
  const int lane = threadIdx.x & 31, place = place_of_channels(lane, warp), left = place_of_left(lane);
  Turn<S::STAGES> turn, scoring;
#pragma unroll 1
  for (int chunk = 0; chunk < 2 && chunk * CHUNK < tokens; ++chunk, scoring.next()) {
    Values d;
    barrier_wait(s.full[chunk], 0);
    wgmma_fence();
    start_scores(d, s.stages[chunk]);
    wgmma_wait<0>();
    wgmma_keep(d);
    put_scores(s, scoring, d, lane, warp, left);
  }
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < tokens; ++chunk, turn.next(), scoring.next()) {
    auto& in = s.stages[turn.stage];
    const Gates& gates = s.gates[turn.stage];
    Operand keys[PANELS];
    Values z[PANELS], w[PANELS], d;
    float B[2][4] = {};
#pragma unroll
    for (int p = 0; p < PANELS; ++p) get_channels(keys[p], in.rows[p] + CHUNK, place);
    const bool more = (chunk + 2) * CHUNK < tokens;
    if (BESIDE) {
      if (more) barrier_wait(s.full[scoring.stage], scoring.parity);
      wgmma_fence();
      start_scores(d, s.stages[more ? scoring.stage : turn.stage]);  // or those of nobody
    }
    barrier_wait(s.solved[turn.stage], turn.parity);
    u64 ends = wgmma_tile(in.B, 16, 1024), erased = wgmma_tile(s.erased[chunk & 1], 16, 1024);
    forget(ends), forget(erased);  // tiles further on are a sum away
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) multiply_sums<T>(z[p], keys[p], ends, false);
    wgmma_commit();
    pair_up(B, s.erased[chunk & 1], in, gates, row, column, lane, left);
    fence_async();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_keep(z[p]);
    if (BESIDE) wgmma_keep(d);
    put_channels(in.Z[0], place, z[0]);  // where M was
#pragma unroll
    for (int c = 0; c < CHUNK / 16; ++c) {
      const float2 read[2] = {two_of(gates.read + 16 * c + 2 * (lane % 4)),
                              two_of(gates.read + 16 * c + 8 + 2 * (lane % 4))};
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        u32 q[4];
        ldmatrix_x4_trans(q, at_offset(in.rows[p], place + 16 * 128 * c));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * (2 * c + m / 2) + m % 2 * 2;
          const float2 two = unpack(q[m], T{});
          w[p][i] = two.x * read[m / 2].x, w[p][i + 1] = two.y * read[m / 2].y;
        }
      }
    }
    barrier_sync(1, MAKERS);  // `erased` is there; A, the queries, and what lies where B comes have been read
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) multiply_sums<T>(w[p], keys[p], erased, true);
    wgmma_commit();
    if constexpr (PANELS == 2) put_channels(in.Z[1], place, z[1]);  // where A was
    put_two<T, 1>(in.B, moved(left, row, column), B);
    if (BESIDE && more) {                        // while W comes
      const int own = opaque(threadIdx.x) & 31;  // what is made of it is made anew, since there are few registers
      put_scores(s, scoring, d, own, warp, place_of_left(own));
    }
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_keep(w[p]), put_channels(in.rows[p], place, w[p]);
    fence_async();
    warp_arrive(s.made[turn.stage]);
    if (!BESIDE && more) {
      barrier_wait(s.full[scoring.stage], scoring.parity);
      wgmma_fence();
      start_scores(d, s.stages[scoring.stage]);
      wgmma_wait<0>();
      wgmma_keep(d);
      put_scores(s, scoring, d, lane, warp, left);
    }
  }
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// Calls f(value, where it is in memory) for those values of the transposed state that are this lane's and exist.
template <int BK, typename P, class Args, class F>
__device__ __forceinline__ void each_transposed(float (&S)[BK / 2], P* state, const Args& args, int column, F f) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < BK / 8; ++n) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const int channel = 8 * n + 2 * t + (x & 1), own = column + 8 * (x >> 1);
      if (channel < args.shape.K && own < args.shape.V)
        f(S[4 * n + x], state + channel * args.state_k + own * args.state_v);
    }
    __syncwarp();  // else all addresses are made at once, and there are no registers for that
  }
}

template <class S>
__device__ __forceinline__ void consume(S& s, const Args<typename S::T>& args, const WorkTile& at, int first) {
  using T = typename S::T;
  constexpr int BK = S::BK;
  const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0), lane = threadIdx.x & 31;
  const int column = first + threadIdx.x / 32 * 16 + lane / 4;
  const int place = place_of_channels(lane, threadIdx.x / 32 % 4);
  const i64 states = at.pair * args.shape.K * args.shape.V;
  float state[BK / 2] = {};
  if (args.initial)
    each_transposed<BK>(state, args.initial + states, args, column, [](float& x, const float* from) { x = *from; });
  Turn<S::STAGES> turn;
#pragma unroll 1
  for (int token = 0; token < at.tokens; token += CHUNK, turn.next()) {
    auto& in = s.stages[turn.stage];
    const Gates& gates = s.gates[turn.stage];
    u32 read[BK / 16][4];
    Operand v, written;
    Values x, o;
#pragma unroll
    for (int c = 0; c < BK / 16; ++c)
#pragma unroll
      for (int m = 0; m < 4; ++m) read[c][m] = pack<T>(state[8 * c + 2 * m], state[8 * c + 2 * m + 1]);
    wgmma_keep(read);
    barrier_wait(s.full[turn.stage], turn.parity);
    barrier_wait(s.valued[turn.stage], turn.parity);
    get_channels(v, in.v[warpgroup], place);
    barrier_wait(s.made[turn.stage], turn.parity);
    const u64 tiles = tiles_of(in);
    const auto multiply = [&](Values& y, int row) {
#pragma unroll
      for (int c = 0; c < BK / 16; ++c)
        wgmma<T, CHUNK, false>(y, read[c], tiles + (tile_at(in, in.rows[c / 4] + row) + c % 4 * 2), c > 0);
      wgmma_commit();
    };
    wgmma_fence();
    multiply(x, CHUNK), multiply(o, 0);
    const float all = gates.all;
    if (all != 1.f)  // a branch, so that it is done now, while products run
#pragma unroll
      for (float& value : state) value *= all;
    wgmma_wait<1>();
    wgmma_keep(x);
    each_two([&](int i, int c, int m) {
      const float2 start = two_of(gates.start + i / 4 * 8 + 2 * (lane & 3)), own = unpack(v[c][m], T{});
      written[c][m] = pack<T>(fmaf(-start.x, x[i], own.x), fmaf(-start.y, x[i + 1], own.y));
    });
    wgmma_fence();
    multiply_sums<T>(o, v, tiles + tile_at(in, in.B), true);
    wgmma_commit();
    const u64 z = wgmma_tile(in.Z, sizeof in.Z[0], 1024);
#pragma unroll
    for (int c = 0; c < CHUNK / 16; ++c) wgmma<T, BK, true>(state, written[c], z + c * (16 * 128 / 16), true);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(o);
    put_channels(in.v[warpgroup], place, o);
    wgmma_wait<0>();
    wgmma_keep(state);
    warp_arrive(s.done[turn.stage]);
  }
  if (args.final) each_transposed<BK>(state, args.final + states, args, column, [](float& x, float* to) { *to = x; });
}

template <typename T, int BK, int BV>
__global__ void __launch_bounds__(ALL_THREADS<BV>, Registers<BK, BV>::BLOCKS)
    delta_sm90_scalar_forward(const __grid_constant__ Args<T> args) {
  auto& s = *reinterpret_cast<Shared<T, BK, BV>*>(dynamic_smem());
  constexpr int STAGES = Shared<T, BK, BV>::STAGES;
  const u32 tiles = u32(args.shape.V + BV - 1) / BV;
  const int column = blockIdx.x % tiles * BV;
  const WorkTile at = work_tile(args.shape, blockIdx.x / tiles);
  if (threadIdx.x == 0)
    for (int stage = 0; stage < STAGES; ++stage) {
      barrier_init(s.full[stage], 32), barrier_init(s.valued[stage], 32);  // lanes of the warp that moves chunks
      barrier_init(s.gated[stage], 1), barrier_init(s.scored[stage], 4), barrier_init(s.solved[stage], 1);  // warps
      barrier_init(s.made[stage], 4), barrier_init(s.done[stage], CONSUMERS<BV> / 32);
    }
  fence_async();
  __syncthreads();
  using Own = Registers<BK, BV>;
  if (threadIdx.x < CONSUMERS<BV>) {
    registers_up<Own::CONSUMER>();
    consume(s, args, at, column);
  } else if (threadIdx.x < CONSUMERS<BV> + MAKERS) {
    registers_down<Own::MAKER>();
    make(s, at.tokens);
  } else {
    registers_down<Own::OTHER>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) move(s, args, at, column);
    else if (warp == 1) multiply_decays(s, args, at);
    else solve(s, at.tokens, warp - 2);
  }
}
