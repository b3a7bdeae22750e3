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
//           chunks, one sums up gates, and two invert I + diag(beta) M, every other chunk each
// smem      scalar_forward_storage.cuh, which names the barriers, too
// barriers  named 1: the makers among each other
// numerics  products of T in float32: tokens as they came; S as it is read, W, X and Z rounded once; A, B and N the sum
//           of two numbers. |W_i| <= scale |q_i| and |Z_j| <= beta_j |k_j| while gates are <= 0 and beta |k|^2 <= 2,
//           whatever the keys: no large numbers cancel. N by substitution in float32 within 16 tokens.
//           Decays are powers of sums of the gates that lie between, never of differences of such sums: any gate is
//           exact
// source    Yang et al., 2024, "Gated Delta Networks", eq. 10; the chunk's form is the WY representation multiplied out
// limits    sm_90a; bfloat16, float16; K <= BK, V a multiple of 8; BK and BV of 64, 128; rows start on 16 bytes
#include "delta/sm90/scalar_forward_storage.cuh"

// What rounding leaves over of two values.
template <typename T> __device__ __forceinline__ u32 rest_of(u32 rounded, float x, float y) {
  const float2 two = unpack(rounded, T{});
  return pack<T>(x - two.x, y - two.y);
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

// ---- a warp that sums up gates ------------------------------------------------------------------------------------

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
  template <typename T>
  __device__ __forceinline__ void put(float (&to)[AHEAD][CHUNK], bool wide, int lane, float by, T) const {
#pragma unroll
    for (int n = 0; n < AHEAD; ++n) to[n][lane] = by * (wide ? __uint_as_float(bits[n]) : to_float(T{u16(bits[n])}));
  }
};

// A number of a matrix of 32 floats a row, in the swizzle of 16-byte pieces.
__device__ __forceinline__ float* float_of(float (&rows)[CHUNK][32], int row, int column) {
  return swizzled(rows[0], row, column / 4) + column % 4;
}

template <class S>
__device__ __forceinline__ void sum_gates(S& s, const Args<typename S::T>& args, const WorkTile& at) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31;
  const bool wide[2] = {args.wide_gate != 0, args.wide_beta != 0};
  const float scale = float(args.scale);
  Numbers g, beta;
  g.read(args.g, wide[0], at, lane, T{}), beta.read(args.beta, wide[1], at, lane, T{});
  Turn<S::STAGES> turn;
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < at.tokens; ++chunk, turn.next()) {
    if (chunk % AHEAD == 0) {
      const int next = (chunk + AHEAD) * CHUNK + lane;
      __syncwarp();  // the last ones have been read
      g.put(s.next.g, wide[0], lane, LOG2E, T{}), beta.put(s.next.beta, wide[1], lane, 1.f, T{});
      g.read(args.g, wide[0], at, next, T{}), beta.read(args.beta, wide[1], at, next, T{});
      __syncwarp();
    }
    if (chunk >= S::STAGES) barrier_wait(s.done[turn.stage], turn.parity ^ 1);
    auto& decay = s.stages[turn.stage].decay;
    const float* const gates = s.next.g[chunk % AHEAD];
    float sum = __uint_as_float(0xff800000u);  // of the gates behind this lane's token: nothing before it
#pragma unroll 2
    for (int i = 0; i < CHUNK; i += 4) {
      const float4 four = *reinterpret_cast<const float4*>(gates + i);
      const float its[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        sum = i + m == lane ? 0.f : sum + its[m];
        *float_of(decay, i + m, lane) = exp2_approx(sum);
      }
    }
    float until = gates[lane];  // of those up to it
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, until, distance);
      if (lane >= distance) until += other;
    }
    Gates& to = s.gates[turn.stage];
    const float start = exp2_approx(until);
    to.start[lane] = start, to.read[lane] = scale * start;
    to.end[lane] = exp2_approx(sum), to.beta[lane] = s.next.beta[chunk % AHEAD][lane];
    barrier_arrive(s.gated[turn.stage]);
  }
}

// ---- matrices of a chunk as the sum of two numbers -----------------------------------------------------------------

// A warp's values [16, 16 N] from (row, column) on, as `mma_bf16` gives them.
template <typename T, int N>
__device__ __forceinline__ void put_two(Panel<T>& to, int row, int column, const float (&x)[2 * N][4]) {
  const int lane = opaque(threadIdx.x) & 31;
#pragma unroll
  for (int c = 0; c < N; ++c) {
    u32 rounded[4], rest[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* two = &x[2 * c + m / 2][m % 2 * 2];
      rounded[m] = pack<T>(two[0], two[1]), rest[m] = rest_of<T>(rounded[m], two[0], two[1]);
    }
    const int piece = column / 8 + 2 * c + (lane >> 4);
    stmatrix_x4(swizzled(to[0], row + (lane & 15), piece), rounded);
    stmatrix_x4(swizzled(to[0], row + (lane & 15), piece + 4), rest);
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
  Turn<S::STAGES> turn;
  if (first) turn.next();
#pragma unroll 1
  for (int chunk = first; chunk * CHUNK < tokens; chunk += 2) {
    const int lane = opaque(threadIdx.x) & 31, last = lane >> 4;
    auto& in = s.stages[turn.stage];
    const Gates& gates = s.gates[turn.stage];
    barrier_wait(s.scored[turn.stage], turn.parity);
    float x[16];
    substitute(x, in.M, lane);
    const float beta = gates.beta[lane];
    const auto put_rows = [&](Panel<T>& to, const float (&x)[8], int piece) {
      u32 rounded[4], rest[4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        rounded[m] = pack<T>(x[2 * m], x[2 * m + 1]), rest[m] = rest_of<T>(rounded[m], x[2 * m], x[2 * m + 1]);
      *reinterpret_cast<uint4*>(swizzled(to[0], lane, piece)) = {rounded[0], rounded[1], rounded[2], rounded[3]};
      *reinterpret_cast<uint4*>(swizzled(to[0], lane, piece + 4)) = {rest[0], rest[1], rest[2], rest[3]};
      __syncwarp();  // else all are made before one is put, and there are no registers for that
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // of the block's rows
      float own[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i] = beta * x[8 * half + i];
      put_rows(in.N, own, 2 * last + half);
#pragma unroll
      for (int i = 0; i < 8; ++i) own[i] *= gates.end[16 * last + 8 * half + i];
      put_rows(in.B, own, 2 * last + half);
      if (last)  // late keys are nothing to early queries
        for (int part = 0; part < 2; ++part)
          *reinterpret_cast<uint4*>(swizzled(in.B[0], lane, half + 4 * part)) = {0, 0, 0, 0};
    }
    __syncwarp();
    u32 left[2][4], right[2][4];  // the other block is N (-M) N of the three
    float y[2][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      ldmatrix_x4(left[part], swizzled(in.N[0], lane & 15, (lane >> 4) + 4 * part));
      ldmatrix_x4(right[part], swizzled(in.M[0], (lane >> 4) * 8 + (lane & 7), 4 + (lane >> 3 & 1) + 2 * part));
    }
    multiply_two<T>(y, left, right);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float* two = &y[m / 2][m % 2 * 2];
      left[0][m] = pack<T>(two[0], two[1]), left[1][m] = rest_of<T>(left[0][m], two[0], two[1]);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part)
      ldmatrix_x4_trans(right[part],
                        swizzled(in.N[0], 16 + (lane >> 3 & 1) * 8 + (lane & 7), 2 + (lane >> 4) + 4 * part));
#pragma unroll
    for (int m = 0; m < 4; ++m) y[0][m] = y[1][m] = 0.f;
    multiply_two<T>(y, left, right);
    put_two<T, 1>(in.N, 0, 16, y);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float2 end = two_of(gates.end + 16 + 8 * m + 2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) y[m][i] *= i % 2 ? end.y : end.x;
    }
    put_two<T, 1>(in.B, 0, 16, y);
    fence_async();
    barrier_arrive(s.solved[turn.stage]);
    turn.next(), turn.next();
  }
}

// ---- a warpgroup that makes scores, then B, W and Z -----------------------------------------------------------------

// Puts 64 channels of a chunk, of which a warp has 16, to [token][channel].
template <typename T> __device__ __forceinline__ void put_channels(T (*to)[64], const Values& x) {
  Operand two;
  each_two([&](int at, int s, int m) { two[s][m] = pack<T>(x[at], x[at + 1]); });
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) stmatrix_x4_trans(matrix_row(to[0], 16 * s), two[s]);
}

template <typename T> __device__ __forceinline__ void get_channels(Operand& x, T (*from)[64]) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) ldmatrix_x4_trans(x[s], matrix_row(from[0], 16 * s));
}

// Starts [q; k] k^T.
template <typename T, int PANELS>
__device__ __forceinline__ void start_scores(Values& d, T (&rows)[PANELS][2 * CHUNK][64]) {
#pragma unroll
  for (int c = 0; c < 4 * PANELS; ++c) {
    const u64 all = wgmma_tile(rows[c / 4], 16, 1024), keys = wgmma_tile(rows[c / 4] + CHUNK, 16, 1024);
    wgmma<T, CHUNK, false>(d, all + c % 4 * 2, keys + c % 4 * 2, c > 0);
  }
  wgmma_commit();
}

// Puts A, of which the first two warps have the rows, and -beta M, of which the others have them.
template <class S>
__device__ __forceinline__ void put_scores(S& s, const Turn<S::STAGES>& turn, Values& d, float scale) {
  using T = typename S::T;
  const int thread = opaque(threadIdx.x), lane = thread & 31, warp = thread / 32 % 4, g = lane / 4, t = lane % 4;
  const int row = 16 * (warp & 1) + g;
  const bool queries = warp < 2, late = warp == 3;  // late: the last 16 keys
  auto& in = s.stages[turn.stage];
  barrier_wait(s.gated[turn.stage], turn.parity);
  const float* const beta = &s.gates[turn.stage].beta[row];
  const float by[2] = {queries ? scale : -beta[0], queries ? scale : -beta[8]};
  float x[4][4];
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 decay = two_of(float_of(in.decay, row + 8 * h, 8 * n + 2 * t));
      const float its = late && n < 2 ? -1.f : by[h];
      x[n][2 * h] = d[4 * n + 2 * h] * (decay.x * its), x[n][2 * h + 1] = d[4 * n + 2 * h + 1] * (decay.y * its);
    }
  if (queries) put_two<T, 2>(in.A, 16 * warp, 0, x);
  else {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float own[2] = {late ? x[n + 2][2 * h] : x[n][2 * h], late ? x[n + 2][2 * h + 1] : x[n][2 * h + 1]};
        *reinterpret_cast<float2*>(float_of(in.M, row + 8 * h, 16 * late + 8 * n + 2 * t)) = {own[0], own[1]};
      }
    if (late) {
      u32 rounded[4], rest[4];
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* two = &x[m / 2][m % 2 * 2];
        rounded[m] = pack<T>(two[0], two[1]), rest[m] = rest_of<T>(rounded[m], two[0], two[1]);
      }
      stmatrix_x4(swizzled(in.M[0], lane & 15, 4 + (lane >> 4)), rounded);
      stmatrix_x4(swizzled(in.M[0], lane & 15, 6 + (lane >> 4)), rest);
    }
  }
  barrier_arrive(s.scored[turn.stage]);
}

// A warp's block [16, 16] of B from (row, column) on, and -B decayed from the chunk's start to `erased`.
template <typename T, class Stage>
__device__ __forceinline__ void pair_up(float (&B)[2][4], Panel<T>& erased, Stage& in, const Gates& gates, int row,
                                        int column) {
  const int lane = opaque(threadIdx.x) & 31;
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (16 * c <= row && 16 * c >= column) {  // both are lower triangles
      u32 A[2][4], N[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(A[part], swizzled(in.A[0], row + (lane & 15), 2 * c + (lane >> 4) + 4 * part));
        ldmatrix_x4(N[part],
                    swizzled(in.N[0], column + (lane >> 4) * 8 + (lane & 7), 2 * c + (lane >> 3 & 1) + 4 * part));
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
  put_two<T, 1>(erased, row, column, x);
}

// Starts y[channel, i] (+)= sum_j x[channel, j] pairs[i, j], of both numbers of the pairs.
template <typename T>
__device__ __forceinline__ void multiply_sums(Values& y, const Operand& x, Panel<T>& pairs, bool accumulate) {
  const u64 b = wgmma_tile(pairs, 16, 1024);
#pragma unroll
  for (int c = 0; c < 4; ++c) wgmma<T, CHUNK, false>(y, x[c % 2], b + 2 * c, accumulate || c);
}

template <class S> __device__ __forceinline__ void make(S& s, int tokens, float scale) {
  using T = typename S::T;
  constexpr int PANELS = S::BK / 64;
  constexpr bool BESIDE = PANELS == 2;  // else there are no registers for scores beside W
  Turn<S::STAGES> turn, scoring;
#pragma unroll 1
  for (int chunk = 0; chunk < 2 && chunk * CHUNK < tokens; ++chunk, scoring.next()) {
    Values d;
    barrier_wait(s.full[chunk], 0);
    wgmma_fence();
    start_scores(d, s.stages[chunk].rows);
    wgmma_wait<0>();
    wgmma_keep(d);
    put_scores(s, scoring, d, scale);
  }
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < tokens; ++chunk, turn.next(), scoring.next()) {
    const int thread = opaque(threadIdx.x), lane = thread & 31, warp = thread / 32 % 4;
    const int row = 16 * (warp & 1), column = 16 * (warp >> 1);  // of the warp's block of B
    auto& in = s.stages[turn.stage];
    const Gates& gates = s.gates[turn.stage];
    Operand keys[PANELS];
    Values z[PANELS], w[PANELS], d;
    float B[2][4] = {};
#pragma unroll
    for (int p = 0; p < PANELS; ++p) get_channels(keys[p], in.rows[p] + CHUNK);
    barrier_wait(s.solved[turn.stage], turn.parity);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) multiply_sums(z[p], keys[p], in.B, false);
    wgmma_commit();
    pair_up(B, s.erased[chunk & 1], in, gates, row, column);
    fence_async();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_keep(z[p]);
    put_channels(in.Z[0], z[0]);  // where M was
#pragma unroll
    for (int c = 0; c < CHUNK / 16; ++c) {
      const float2 read[2] = {two_of(gates.read + 16 * c + 2 * (lane % 4)),
                              two_of(gates.read + 16 * c + 8 + 2 * (lane % 4))};
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        u32 q[4];
        ldmatrix_x4_trans(q, matrix_row(in.rows[p][0], 16 * c));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * (2 * c + m / 2) + m % 2 * 2;
          const float2 two = unpack(q[m], T{});
          w[p][i] = two.x * read[m / 2].x, w[p][i + 1] = two.y * read[m / 2].y;
        }
      }
    }
    barrier_sync(1, MAKERS);  // `erased` is there; A, the queries, and what lies where B comes have been read
    const bool more = (chunk + 2) * CHUNK < tokens;
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) multiply_sums(w[p], keys[p], s.erased[chunk & 1], true);
    wgmma_commit();
    if (BESIDE) {
      if (more) barrier_wait(s.full[scoring.stage], scoring.parity);
      wgmma_fence();
      start_scores(d, s.stages[more ? scoring.stage : turn.stage].rows);  // or those of nobody
    }
    if constexpr (PANELS == 2) put_channels(in.Z[1], z[1]);  // where A was
    put_two<T, 1>(in.B, row, column, B);
    wgmma_wait<BESIDE ? 1 : 0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_keep(w[p]), put_channels(in.rows[p], w[p]);
    fence_async();
    barrier_arrive(s.made[turn.stage]);
    if (BESIDE) wgmma_wait<0>(), wgmma_keep(d);
    if (!more) continue;
    if (!BESIDE) {
      barrier_wait(s.full[scoring.stage], scoring.parity);
      wgmma_fence();
      start_scores(d, s.stages[scoring.stage].rows);
      wgmma_wait<0>();
      wgmma_keep(d);
    }
    put_scores(s, scoring, d, scale);
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
  const i64 place = at.pair * args.shape.K * args.shape.V;
  float state[BK / 2] = {};
  if (args.initial)
    each_transposed<BK>(state, args.initial + place, args, column, [](float& x, const float* from) { x = *from; });
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
    get_channels(v, in.v[warpgroup]);
    barrier_wait(s.made[turn.stage], turn.parity);
    const auto multiply = [&](Values& y, int rows) {
#pragma unroll
      for (int c = 0; c < BK / 16; ++c)
        wgmma<T, CHUNK, false>(y, read[c], wgmma_tile(in.rows[c / 4] + rows, 16, 1024) + c % 4 * 2, c > 0);
      wgmma_commit();
    };
    wgmma_fence();
    multiply(x, CHUNK), multiply(o, 0);
    const float all = gates.start[CHUNK - 1];
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
    multiply_sums(o, v, in.B, true);
    wgmma_commit();
    const u64 z = wgmma_tile(in.Z, sizeof in.Z[0], 1024);
#pragma unroll
    for (int c = 0; c < CHUNK / 16; ++c) wgmma<T, BK, true>(state, written[c], z + c * (16 * 128 / 16), true);
    wgmma_commit();
    wgmma_wait<1>();
    wgmma_keep(o);
    put_channels(in.v[warpgroup], o);
    wgmma_wait<0>();
    wgmma_keep(state);
    barrier_arrive(s.done[turn.stage]);
  }
  if (args.final) each_transposed<BK>(state, args.final + place, args, column, [](float& x, float* to) { *to = x; });
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
      barrier_init(s.full[stage], 32), barrier_init(s.valued[stage], 32), barrier_init(s.gated[stage], 32);
      barrier_init(s.scored[stage], MAKERS), barrier_init(s.solved[stage], 32), barrier_init(s.made[stage], MAKERS);
      barrier_init(s.done[stage], CONSUMERS<BV>);
    }
  fence_async();
  __syncthreads();
  using Own = Registers<BK, BV>;
  if (threadIdx.x < CONSUMERS<BV>) {
    registers_up<Own::CONSUMER>();
    consume(s, args, at, column);
  } else if (threadIdx.x < CONSUMERS<BV> + MAKERS) {
    registers_down<Own::MAKER>();
    make(s, at.tokens, float(args.scale));
  } else {
    registers_down<Own::OTHER>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) move(s, args, at, column);
    else if (warp == 1) sum_gates(s, args, at);
    else solve(s, at.tokens, warp - 2);
  }
}
