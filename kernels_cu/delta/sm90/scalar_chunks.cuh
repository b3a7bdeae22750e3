// what      A chunk of 32 tokens in Hopper's kernels of the delta rule with one gate per token and head, or none: what
//           the warps of each role do with it, and `run_roles`, which gives the warps of a block their roles: one
//           copies chunks, one computes decays, two invert, a warpgroup makes operands, and a warpgroup for every 64
//           columns of V, a *consumer*, computes the state (here is what kernels share of that).
// math      i and j are tokens of the chunk, S is the state before it. A token's decay is e^g of its log gate g. Decays
//           over tokens: D_ij from after token j through token i, E_i from the chunk's start through i, L_i from after
//           i to the chunk's end. Matrices [32, 32]:
//           M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  N = (I + diag(beta) M)^-1
//           Which others there are depends on S::PASS, the pass of the including kernel: scalar_forward.cu is FORWARD,
//           scalar_summary.cu SUMMARY or BACKWARD_SUMMARY, scalar_backward_states.cu BACKWARD_STATES,
//           scalar_backward_tokens.cu BACKWARD_TOKENS.
//           FORWARD: B = A N diag(beta);  W_i = scale E_i q_i - sum_j B_ij E_j k_j;  Z_j = beta_j sum_i N_ij L_i k_i;
//           X_j = v_j - E_j S^T k_j
//           BACKWARD_STATES: the same B and Z without beta; W_i = scale E_i q_i - sum_j B_ij beta_j E_j k_j. Chunks are
//           taken from the last to the first
//           BACKWARD_TOKENS: Z and X as in FORWARD, but Z by R = (I + M diag(beta))^-1: N diag(beta) = diag(beta) R
//           SUMMARY: Z and X as in FORWARD, and no queries
//           BACKWARD_SUMMARY: as BACKWARD_STATES, and stores nothing but the last state. What is said of
//           BACKWARD_STATES below holds for it, too
//           `inverse` in the code is N diag(beta) (FORWARD and SUMMARY), N (BACKWARD_STATES) or R (BACKWARD_TOKENS)
// shapes    An offset, in bytes, is that of a 16-byte piece in a panel (see Panel). The including kernel defines S (in
//           code never the state), the struct of its shared memory, and passes Args, that of its arguments. S has
//           - PASS; T, the type of q, k and v; BK and BV, K and V of a block rounded up; STAGES
//           - stages[STAGES]: Stage, or in BACKWARD_TOKENS a struct with Element, queries_keys, minus_beta_M, inverse,
//             inverse_to_end and D. gates[STAGES]: Gates; in BACKWARD_TOKENS they also have query_inverse and
//             key_to_end, arrays of a number for each token. upcoming: Upcoming
//           - barriers full, decays_ready, scores_ready, inverse_ready, operands_ready and outputs_ready, one for each
//             stage, and values_full, for move_chunks also one for each: see scalar_forward_storage.cuh
//           - for make_operands, which BACKWARD_TOKENS does not use: Panel<T> minus_BE[2], of even and odd chunks
//           Args has shape; scale; g and beta, Rows of one number for each token, g.p null without gates, beta.p never;
//           wide_gate and wide_beta, whether these are float32 (otherwise T); normalized (see Gates). For move_chunks,
//           which BACKWARD_TOKENS does not use: q, q_rows, k, k_rows; group, how many value heads share a head of q and
//           k
//           Fragments: a lane's part of operands and sums, g = lane / 4 and t = lane % 4. A u32 has two 16-bit numbers,
//           the first one in its low half
//           - x[4] of a product [16, 8]: x[2h + p] is row g + 8h, column 2t + p. x[2][4]: two of these side by side
//           - Values x, of a warp's 16 rows and 32 columns: x[4n + 2h + p] is row g + 8h, column 8n + 2t + p. A state
//             [16 columns of V, BK channels] is float[BK / 2], likewise
//           - u32 a[4], a left operand [16, 16]: a[m] is row g + 8 (m % 2), columns 8 (m / 2) + 2t and the next.
//             Operand x, of 32 columns: x[s] has those from 16 s on
//           - u32 b[4], two right operands [16, 8] side by side: b[2n] is column 8n + g, rows 2t and the next;
//             b[2n + 1] has the rows 8 later
// barriers  of each stage, in the order in which its chunk passes them. full: q and k have been copied; values_full: v
//           or do has. Then, complete in shared memory, decays_ready: D and Gates; scores_ready: A and M;
//           inverse_ready: inverse and inverse_to_end; operands_ready: B, W and Z; outputs_ready: o or dv, and all of
//           the stage has been read. Named barrier 1 joins the warpgroup of make_operands
// numerics  products of T are summed in float32. W, X and Z are rounded to T. A, B, N and M's block at the lower left
//           are split: sums of two numbers of T, a rounded one and its rounding error. A number of them beyond T's
//           range (65504 in float16) becomes NaN: infinity and a rounding error of -infinity. N's diagonal blocks of 16
//           tokens come from substitution in float32. A decay is a product of the decays of the tokens in between,
//           never a quotient. A token's decay that is infinite or NaN also makes NaN of zeros of D, for keys after the
//           query
// limits    sm_90a; bfloat16 or float16
// tests     test_delta_on_hopper, in whose emulator a product is computed only when it is waited for, and whoever waits
//           at an mbarrier goes on as soon as its phase ends: a wait or an arrival in a wrong place changes results.
//           test_compile: no spills, no product that the assembler serialises
constexpr int CHUNK = 32;  // tokens; before warpgroup.cuh, which uses it
#include "warpgroup.cuh"
#include "delta/segments.cuh"
#include "fragments.cuh"
#include "half_products.cuh"

// From the includes:
//   wgmma_fence_operand(d): the compiler reads no register of d before it
//   k_major_tile(x): wgmma's descriptor of a tile whose rows are 64 channels of a token; K_MAJOR: the product sums over
//   a row, MN_MAJOR: over the rows. OVERWRITE, ACCUMULATE: d = a b, d += a b
//   Tile<T, BV>: a chunk's rows [32, BV], in panels; WorkTile: the block's sequence, head and tokens
//   fetch_chunk, store_chunk: copy a chunk's rows of several arrays
//   RingPosition: a place in the ring of stages: `stage` and `parity`, which waits for an mbarrier of it take
//   Segment, segment_of: one of P parts of a sequence, and its states in memory (segments.cuh)
//   each_two: calls f for a lane's pairs of Values and Operands

enum Pass { FORWARD, SUMMARY, BACKWARD_STATES, BACKWARD_SUMMARY, BACKWARD_TOKENS };
// Whether the states of a pass go forwards by N diag(beta): Z has beta.
template <class S> constexpr bool HAS_BETA = S::PASS == FORWARD || S::PASS == SUMMARY;
// Whether a pass goes backwards in time.
template <class S> constexpr bool IS_BACKWARDS = S::PASS == BACKWARD_STATES || S::PASS == BACKWARD_SUMMARY;

// 32 rows of 128 bytes, in the tensor cores' swizzle: row r has its 16-byte piece p in the place of piece p ^ r % 8;
// swizzled_offset(r, p) is its offset in bytes. All arrays of rows of 128 bytes have this swizzle, float32 ones, too. A
// split matrix [32, 32], whose elements are sums of two numbers of T, has the rounded elements in columns 0 to 31, and
// their rounding errors in columns 32 to 63.
template <typename T> using Panel = T[CHUNK][64];

// A chunk of tokens and its matrices. In a union the member below overwrites the one above, which has been read by
// then.
template <typename T, int BK, int BV> struct alignas(1024) Stage {
  using Element = T;
  // The first member, for start_scores. Rows 0 to 31: queries, later overwritten by W; rows 32 to 63: keys.
  T queries_keys[BK / 64][2 * CHUNK][64];
  union {
    struct {
      // On its diagonal the two blocks [16, 16] of -diag(beta) M. M's block at the lower left is stored at the upper
      // right, where M is zero: -M, without beta, split. See `store_scores` for other passes.
      float minus_beta_M[CHUNK][32];
      Panel<T> A;  // [query, key], split
    };
    // Z[0] overwrites minus_beta_M once this has been inverted; Z[1], if BK = 128, A once B has been computed.
    Panel<T> Z[BK / 64];
  };
  static_assert(sizeof minus_beta_M == sizeof(Panel<T>) && BK <= 128);
  union {
    Panel<T> inverse_to_end;  // element [i, j] of `inverse` times key_end_factors[i] of Gates; [j, i], split: for Z
    Panel<T> B;               // [query, key], split
  };
  union {
    float D[CHUNK][32];  // [i][j]: the decay from after token j through token i, times key j's factor; 0 if j > i
    Panel<T> inverse;    // FORWARD: N_ij beta_j, BACKWARD_STATES: N_ij; [j, i], split: for B
  };
  Tile<T, BV> values;  // v, overwritten by o; BACKWARD_STATES: do, overwritten by dv
};

// Factors of a chunk's tokens, one for each token. If args.normalized, queries q and keys k count as divided by their
// lengths |q| and |k|: the factors include the inverse lengths, since shared memory holds q and k undivided.
struct alignas(16) Gates {
  float query_factors[CHUNK], key_factors[CHUNK];  // scale / |q|, 1 / |k|; if not args.normalized, scale and 1
  // Times E_i, the decay from the chunk's start through the token. BACKWARD_STATES: key_start_factors also times beta.
  float query_start_factors[CHUNK], key_start_factors[CHUNK];
  // The key's factor times L_i, the decay from after the token to the chunk's end. BACKWARD_TOKENS: also times beta.
  float key_end_factors[CHUNK];
  float beta[CHUNK];
  alignas(16) float chunk_decay;  // E_32, over the whole chunk
};

// Decays and betas of CHUNKS_AHEAD chunks, loaded early to hide the latency of memory.
constexpr int CHUNKS_AHEAD = 4;
struct alignas(16) Upcoming {
  float decay[CHUNKS_AHEAD][CHUNK], beta[CHUNKS_AHEAD][CHUNK];
};

constexpr int OPERAND_THREADS = 128, OTHER_THREADS = 128;  // others: copies, decays, inverses
template <int BV> constexpr int CONSUMERS = 2 * BV;
template <int BV> constexpr int ALL_THREADS = CONSUMERS<BV> + OPERAND_THREADS + OTHER_THREADS;

// Registers of a thread by role. BLOCKS: blocks on a multiprocessor. A block whose roles ask for more registers than it
// starts with (AT_FIRST a thread) would wait for ever.
template <Pass PASS, int BK, int BV> struct Registers {
  static constexpr bool TOKENS = PASS == BACKWARD_TOKENS, NARROW = BV == 64;
  static constexpr int BLOCKS = !TOKENS && BK + BV == 128 ? 2 : 1,
                       AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  struct Roles {
    int consumer, operands, other;
  };
  static constexpr Roles ROLES = TOKENS && NARROW ? Roles{168, 232, 104}
                                 : TOKENS         ? Roles{152, 152, 56}
                                 : BLOCKS == 2    ? PASS == BACKWARD_SUMMARY ? Roles{112, 72, 56} : Roles{120, 72, 48}
                                 : NARROW         ? Roles{208, 168, 128}
                                                  : Roles{168, 120, 56};
  static_assert(BV / 64 * ROLES.consumer + ROLES.operands + ROLES.other <= ALL_THREADS<BV> / 128 * AT_FIRST);
};

// The rounding errors of x and y, as two numbers of T; `rounded` has x and y rounded to T.
template <typename T> __device__ __forceinline__ u32 rounding_errors(u32 rounded, float x, float y) {
  const float2 values = unpack(rounded, T{});
  return pack<T>(x - values.x, y - values.y);
}

// One lane arrives for its warp. For barriers whose waiters touch the memory that the warp has read or written only by
// wgmma, ldmatrix, stmatrix or copies of boxes. If they touch it by loads, stores or copies of single threads, each
// lane must arrive: racecheck, a tool that finds races, orders by an arrival only what that lane itself has done.
__device__ __forceinline__ void warp_arrive(MBarrier& barrier) {
  __syncwarp();  // all lanes have made their accesses
  if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

// Has a block work on `tokens` tokens from `start` on, numbers that all lanes have. The shuffle tells the compiler so,
// which then needs no register of each lane for them. The previous `start` is whole chunks away.
__device__ __forceinline__ void set_tokens(WorkTile& work, int start, int tokens) {
  work.chunk_row += start / CHUNK - work.start / CHUNK;
  work.start = __shfl_sync(0xffffffffu, start, 0), work.tokens = __shfl_sync(0xffffffffu, tokens, 0);
}

// Has a block walk over the tokens of its segment, or of the whole sequence (is_whole), whose states' columns are
// `columns` from `column` on. work: of the segment, as work_tile returns it. The other arguments, and the result, which
// has the memory of the first and the last state: see segment_of; states [sequences, H, K, V].
template <bool BACKWARDS>
__device__ __forceinline__ Segment<float> start_of_walk(WorkTile& work, bool outputs, const Shape& shape, i64 P,
                                                        const float* given, float* starts, float* final, int column,
                                                        int columns) {
  const i64 state_size = shape.K * shape.V, of_heads = shape.H * state_size;
  const bool whole = outputs && is_whole<BACKWARDS>(shape, u32(P), work.sequence, work.head, starts, column, columns);
  const auto segment =
      segment_of<BACKWARDS, float>(outputs, shape, u32(P), work.sequence, work.head, {given, of_heads, state_size, 0},
                                   starts, {final, of_heads, state_size, 0}, whole);
  set_tokens(work, int(segment.tokens.start), int(segment.tokens.stop - segment.tokens.start));
  return segment;
}

// Two neighbouring floats; p is aligned to 8 bytes.
__device__ __forceinline__ float2 load_float2(const float* p) { return *reinterpret_cast<const float2*>(p); }

// ---- a warp that copies chunks ------------------------------------------------------------------------------------

// The first token of the chunk that a pass takes after the chunks of `token` tokens, a multiple of CHUNK.
template <class S> __device__ __forceinline__ int first_token(const WorkTile& work, int token) {
  return IS_BACKWARDS<S> ? (work.tokens - 1 & -CHUNK) - token : token;
}

// Fills each stage with q and k, then `in` (v, or do), of a chunk; before `in`, stores `out` (o, or dv) of the stage's
// previous chunk, but for BACKWARD_SUMMARY. column: the first of the block's columns of V.
template <class S, class Args, typename T>
__device__ __forceinline__ void move_chunks(S& s, const Args& args, const TensorMap& in,
                                            const StridedRows<const T>& in_rows, const TensorMap& out,
                                            const StridedRows<T>& out_rows, const WorkTile& work, int column) {
  WorkTile keys = work;  // its head is that of q and k
  keys.head /= int(args.group);
  RingPosition<S::STAGES> ring;
  // Goes on for STAGES chunks after the last one, to store their outputs. fetch_chunk: all lanes arrive at the barrier,
  // whose phase ends when the copies have arrived. store_chunk returns when the shared memory has been read.
#pragma unroll 1
  for (int token = 0; token - S::STAGES * CHUNK < work.tokens; token += CHUNK, ring.next()) {
    auto& stage = s.stages[ring.stage];
    const int stored_token = token - S::STAGES * CHUNK;
    if (stored_token >= 0) {
      mbarrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
      // Orders the consumers' stores before the copy engine's reads. This warp does it because it has the time.
      fence_proxy_async();
    }
    if (token < work.tokens)
      fetch_chunk(s.full[ring.stage], keys, first_token<S>(work, token), [&](auto f) {
        for (int panel = 0; panel < S::BK / 64; ++panel) {
          // The panel's 64 rows as two tiles: 32 queries, 32 keys.
          auto& q_and_k = *reinterpret_cast<Panel<typename S::T>(*)[2][1]>(&stage.queries_keys[panel]);
          f(q_and_k[0], args.q, args.q_rows, args.shape.K, 64 * panel);
          f(q_and_k[1], args.k, args.k_rows, args.shape.K, 64 * panel);
        }
      });
    if (S::PASS != BACKWARD_SUMMARY && stored_token >= 0)
      store_chunk(work, first_token<S>(work, stored_token),
                  [&](auto f) { f(stage.values, out, out_rows, args.shape.V, column); });
    if (token < work.tokens)
      fetch_chunk(s.values_full[ring.stage], work, first_token<S>(work, token),
                  [&](auto f) { f(stage.values, in, in_rows, args.shape.V, column); });
    __syncwarp();  // lanes that fetch_chunk has parted (lane 0 starts copies) go on together; no data depend on it
  }
}

// ---- matrices [16, 16] in panels ------------------------------------------------------------------------------------

// The instructions below load or store a matrix [16, 16] of 16-bit numbers as four of [8, 8]; each lane gives them the
// address of a row of 8 numbers. This is its byte offset in a panel, for the matrix at (0, 0): for `ldmatrix_x4` of a
// left operand, `stmatrix_x4` of a product, and `ldmatrix_x4_trans` of right operands that are stored by rows.
__device__ __forceinline__ int left_operand_offset(int lane) { return swizzled_offset(lane & 15, lane >> 4); }
// The same for `ldmatrix_x4` of right operands that are stored by columns.
__device__ __forceinline__ int right_operand_offset(int lane) {
  return swizzled_offset((lane >> 4) * 8 + (lane & 7), lane >> 3 & 1);
}
// left_operand_offset or right_operand_offset of the matrix at (row, column), multiples of 16; offset: of the matrix at
// (0, 0). A split matrix has its rounding errors 32 columns after its rounded elements.
__device__ __forceinline__ int shifted_offset(int offset, int row, int column) {
  return (offset ^ 2 * column) + 128 * row;
}

// ---- a warp that computes decays ------------------------------------------------------------------------------------

// Gates or betas of this lane's token in each of CHUNKS_AHEAD chunks, as they are in memory: the lane with number l has
// token l of a chunk. `value` converts them: a conversion in `load` would wait for the memory. BACKWARDS: the chunks
// follow each other backwards in time.
template <bool BACKWARDS> struct TokenScalars {
  u32 bits[CHUNKS_AHEAD];

  // token: this lane's in the first of the chunks. Zeros for tokens outside of the sequence, and if from.p is null:
  // there are no gates, and the decay of a gate of 0 is 1.
  template <typename T>
  __device__ __forceinline__ void load(const StridedRows<const void>& from, bool is_float32, const WorkTile& work,
                                       int token, T) {
    const i64 first =
        work.batch * from.batch_stride + work.head * from.head_stride + (work.start + token) * from.token_stride;
#pragma unroll
    for (int n = 0; n < CHUNKS_AHEAD; ++n) {
      const int offset = BACKWARDS ? -n * CHUNK : n * CHUNK;
      const i64 index = first + offset * from.token_stride;
      bits[n] = 0;
      if (from.p && (BACKWARDS ? u32(token + offset) < u32(work.tokens) : token + offset < work.tokens))
        bits[n] = is_float32 ? static_cast<const u32*>(from.p)[index] : static_cast<const u16*>(from.p)[index];
    }
  }
  template <typename T> __device__ __forceinline__ float value(int n, bool is_float32, T) const {
    return is_float32 ? __uint_as_float(bits[n]) : to_float(T{u16(bits[n])});
  }
};

// Fills `norms` with the inverse lengths 1 / sqrt(|x|^2 + 1e-6) of the 32 rows x from `first` on; |x|^2 is on the
// diagonal of x x^T.
template <typename T, int PANELS>
__device__ __forceinline__ void put_inverse_norms(T (&rows)[PANELS][2 * CHUNK][64], int first, float (&norms)[CHUNK],
                                                  int lane) {
  lane = opaque(lane);  // hides it from the compiler, which computes offsets from it again: that saves registers
  const int g = lane / 4, left = left_operand_offset(lane);
  // d[m]: of 16 rows, with themselves. The first product has the upper 8 rows alone, the second the lower 8.
  float d[CHUNK / 16][4] = {};
#pragma unroll 1
  for (int c = 0; c < 4 * PANELS; ++c)
#pragma unroll
    for (int m = 0; m < CHUNK / 16; ++m) {
      u32 x[4];
      ldmatrix_x4(x, at_byte_offset(rows[c / 4], shifted_offset(left, first + 16 * m, c % 4 * 16)));
      mma_m16n8k16(d[m], {x[0], 0, x[2], 0}, {x[0], x[2]}, T{});
      mma_m16n8k16(d[m], {0, x[1], 0, x[3]}, {x[1], x[3]}, T{});
    }
  if (lane % 4 == g / 2)
#pragma unroll
    for (int n = 0; n < CHUNK; n += 8) {
      const float* two = d[n / 16] + n % 16 / 4;
      norms[n + g] = inverse_root((g & 1 ? two[1] : two[0]) + 1e-6f);
    }
}

// Fills each stage's D and Gates; for one warp.
template <class S, class Args>
__device__ __forceinline__ void compute_decays(S& s, const Args& args, const WorkTile& work) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31;
  const bool is_float32[2] = {args.wide_gate != 0, args.wide_beta != 0};  // of gates, and of betas
  TokenScalars<IS_BACKWARDS<S>> g, beta;
  const int first = first_token<S>(work, 0) + lane;
  g.load(args.g, is_float32[0], work, first, T{}), beta.load(args.beta, is_float32[1], work, first, T{});
  RingPosition<S::STAGES> ring;
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < work.tokens; ++chunk, ring.next()) {
    if (chunk % CHUNKS_AHEAD == 0) {
      const int next = first_token<S>(work, (chunk + CHUNKS_AHEAD) * CHUNK) + lane;
      __syncwarp();  // all lanes have read s.upcoming of the previous chunks
#pragma unroll
      for (int n = 0; n < CHUNKS_AHEAD; ++n) {
        s.upcoming.decay[n][lane] = decay_of(g.value(n, is_float32[0], T{}));
        s.upcoming.beta[n][lane] = beta.value(n, is_float32[1], T{});
      }
      g.load(args.g, is_float32[0], work, next, T{}), beta.load(args.beta, is_float32[1], work, next, T{});
      __syncwarp();  // s.upcoming has the next chunks, of all lanes
    }
    if (chunk >= S::STAGES) mbarrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
    auto& to = s.gates[ring.stage];
    float query_inverse = 1.f, key = 1.f;  // this lane's inverse lengths
    if (args.normalized) {
      auto& rows = s.stages[ring.stage].queries_keys;
      mbarrier_wait(s.full[ring.stage], ring.parity);
      if constexpr (S::PASS != SUMMARY) put_inverse_norms(rows, 0, to.query_factors, lane);
      put_inverse_norms(rows, CHUNK, to.key_factors, lane);
      fence_proxy_async();  // orders these reads before the copies that later overwrite the rows
      __syncwarp();         // the inverse lengths of all tokens are in shared memory
      if constexpr (S::PASS != SUMMARY) query_inverse = to.query_factors[lane];
      key = to.key_factors[lane];
      if constexpr (S::PASS == BACKWARD_TOKENS) to.query_inverse[lane] = query_inverse;
    }
    to.query_factors[lane] = float(args.scale) * query_inverse, to.key_factors[lane] = key;
    __syncwarp();  // the factors of all keys are stored
    auto& D = s.stages[ring.stage].D;
    const float* const decays = s.upcoming.decay[chunk % CHUNKS_AHEAD];
    const int D_row = swizzled_offset(lane, 0);  // row of D of this lane's query
    // From the last key to the first: the decay from after the key through the query, this lane's. It stays 0 for keys
    // after the query (NaN after a decay that is infinite or NaN), is 1 for the query's own token, and is multiplied by
    // one more token's decay for each key before.
    float product = 0.f, next_decay = 1.f;
#pragma unroll 2
    for (int piece = 7; piece >= 0; --piece) {
      const float4 loaded = *reinterpret_cast<const float4*>(decays + 4 * piece);
      const float of_token[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
      float of_key[4];
#pragma unroll
      for (int m = 3; m >= 0; --m) {
        product = lane == 4 * piece + m ? 1.f : product * next_decay;
        of_key[m] = product, next_decay = of_token[m];
      }
      const float4 keys = *reinterpret_cast<const float4*>(to.key_factors + 4 * piece);
      *reinterpret_cast<float4*>(at_byte_offset(D, D_row ^ 16 * piece)) = {of_key[0] * keys.x, of_key[1] * keys.y,
                                                                           of_key[2] * keys.z, of_key[3] * keys.w};
    }
    const float from_start = product * next_decay;
    to.query_start_factors[lane] = to.query_factors[lane] * from_start,
    to.key_start_factors[lane] = to.key_factors[lane] * from_start;
    to.beta[lane] = s.upcoming.beta[chunk % CHUNKS_AHEAD][lane];
    if constexpr (IS_BACKWARDS<S>) to.key_start_factors[lane] *= to.beta[lane];
    if (lane == 31) to.chunk_decay = from_start;
    __syncwarp();  // row 31 of D is stored: the decays from after each token to the chunk's end, times key factors
    to.key_end_factors[lane] = swizzled(D[0], CHUNK - 1, lane / 4)[lane % 4];
    if constexpr (S::PASS == BACKWARD_TOKENS) {
      to.key_to_end[lane] = to.key_end_factors[lane];
      to.key_end_factors[lane] *= to.beta[lane];
    }
    mbarrier_arrive(s.decays_ready[ring.stage]);
  }
}

// ---- split matrices: each element is a rounded number and its rounding error ---------------------------------------

// Splits this lane's accumulators of a block [16, 16]: x[0] and x[1] are those of its left and of its right 8 columns.
template <typename T> __device__ __forceinline__ void split(u32 (&rounded)[4], u32 (&errors)[4], const float (*x)[4]) {
#pragma unroll
  for (int m = 0; m < 4; ++m) {
    const float* two = &x[m / 2][m % 2 * 2];
    rounded[m] = pack<T>(two[0], two[1]), errors[m] = rounding_errors<T>(rounded[m], two[0], two[1]);
  }
}

// Stores accumulators [16, 16 N] split at byte `offset`: rounded elements, and rounding errors 32 columns later.
template <typename T, int N>
__device__ __forceinline__ void store_split(Panel<T>& to, int offset, const float (&x)[2 * N][4]) {
#pragma unroll
  for (int c = 0; c < N; ++c) {
    u32 rounded[4], errors[4];
    split<T>(rounded, errors, &x[2 * c]);
    stmatrix_x4(at_byte_offset(to, shifted_offset(offset, 0, 16 * c)), rounded);
    stmatrix_x4(at_byte_offset(to, shifted_offset(offset, 0, 16 * c + 32)), errors);
  }
}

// d[16, 16] += a[16, 16] b[16, 16] of split matrices: [0] rounded elements, [1] rounding errors. The product of both
// errors is too small to matter; that of the rounded elements is added last, so that the sum of the small products is
// not rounded away.
template <typename T>
__device__ __forceinline__ void multiply_split(float (&d)[2][4], const u32 (&a)[2][4], const u32 (&b)[2][4]) {
#pragma unroll
  for (int product = 0; product < 3; ++product)  // errors x rounded, rounded x errors, rounded x rounded
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const u32 right[2] = {b[product == 1][2 * m], b[product == 1][2 * m + 1]};
      mma_m16n8k16(d[m], a[product == 0], right, T{});
    }
}

// ---- two warps that invert I + diag(beta) M -------------------------------------------------------------------------

// Forward substitution: x = column lane % 16 of the inverse of a diagonal block [16, 16] of I + diag(beta) M, of the
// first 16 tokens for lanes 0 to 15, of the last 16 for the others. `minus_beta_M` holds -diag(beta) M.
__device__ __forceinline__ void substitute(float (&x)[16], const float (&minus_beta_M)[CHUNK][32], int lane) {
  const int second_block = lane >> 4;
  const char* const block = reinterpret_cast<const char*>(minus_beta_M[16 * second_block]);
  // Piece l / 4 of row i of the block is piece 4 second_block + l / 4 of its row, in the place of piece
  // (4 second_block + l / 4) ^ i % 8 (see Panel): bit 2 of that chooses between two addresses, by bit 2 of i; the other
  // bits, l / 4 ^ i % 4, are known when compiled.
  const char* const pieces[2] = {block + 64 * second_block, block + 64 * (1 - second_block)};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int l = 0; l < i; l += 4) {
      const float4 row = *reinterpret_cast<const float4*>(pieces[i >> 2 & 1] + i * 128 + (l / 4 ^ i & 3) * 16);
      sums[0] = fmaf(row.x, x[l], sums[0]);
      if (l + 1 < i) sums[1] = fmaf(row.y, x[l + 1], sums[1]);
      if (l + 2 < i) sums[0] = fmaf(row.z, x[l + 2], sums[0]);
      if (l + 3 < i) sums[1] = fmaf(row.w, x[l + 3], sums[1]);
    }
    x[i] = i == (lane & 15) ? 1.f : sums[0] + sums[1];
  }
}

// Fills in.inverse and in.inverse_to_end of every other chunk from `first` on; for one warp. in.inverse: N diag(beta)
// (FORWARD), N (BACKWARD_STATES), R (BACKWARD_TOKENS). in.inverse_to_end: the same, element [i, j] times
// gates.key_end_factors[i]. Both are stored transposed: a row for each key j. N has four blocks [16, 16]: N11 and N22
// by substitution, N21 = -N22 diag(beta) M21 N11 by products, N12 = 0. store_scores has stored, for N21, -M21 (FORWARD:
// the beta is in the stored N22), -beta_i M21_ij (BACKWARD_STATES) or -M21_ij beta_j (BACKWARD_TOKENS: R21 = -R22 M21
// diag(beta) R11).
template <class S> __device__ __forceinline__ void invert(S& s, int tokens, int first) {
  using T = typename S::T;
  const int lane = threadIdx.x & 31, second_block = lane >> 4;
  const int left_offset = left_operand_offset(lane);
  const int key_offset = swizzled_offset(lane, 2 * second_block);  // of key `lane`'s row at its block's first query
  RingPosition<S::STAGES> ring;
  if (first) ring.next();
#pragma unroll 1
  for (int chunk = first; chunk * CHUNK < tokens; chunk += 2) {
    auto& in = s.stages[ring.stage];
    const auto& gates = s.gates[ring.stage];
    mbarrier_wait(s.scores_ready[ring.stage], ring.parity);
    float x[16];
    substitute(x, in.minus_beta_M, lane);
    const auto store_split_row = [&](Panel<T>& to, const float (&row)[8], int offset) {
      u32 rounded[4], errors[4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        rounded[m] = pack<T>(row[2 * m], row[2 * m + 1]),
        errors[m] = rounding_errors<T>(rounded[m], row[2 * m], row[2 * m + 1]);
      *reinterpret_cast<uint4*>(at_byte_offset(to, offset)) = {rounded[0], rounded[1], rounded[2], rounded[3]};
      *reinterpret_cast<uint4*>(at_byte_offset(to, offset ^ 64)) = {errors[0], errors[1], errors[2], errors[3]};
      __syncwarp();  // keeps the compiler from computing all rows before it stores one, which takes too many registers
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 of the block's queries i
      float numbers[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] = HAS_BETA<S> ? gates.beta[lane] * x[8 * half + i] : x[8 * half + i];
      store_split_row(in.inverse, numbers, key_offset ^ 16 * half);
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] *= gates.key_end_factors[16 * second_block + 8 * half + i];
      store_split_row(in.inverse_to_end, numbers, key_offset ^ 16 * half);
      // N12 = 0: keys of the second block and queries of the first. part 0: rounded elements, 1: rounding errors.
      if (second_block)
        for (int part = 0; part < 2; ++part) {
          const int offset = key_offset ^ 32 ^ 16 * half ^ 64 * part;
          *reinterpret_cast<uint4*>(at_byte_offset(in.inverse_to_end, offset)) = {0, 0, 0, 0};
          if constexpr (S::PASS == BACKWARD_TOKENS)  // other passes do not read N12
            *reinterpret_cast<uint4*>(at_byte_offset(in.inverse, offset)) = {0, 0, 0, 0};
        }
    }
    __syncwarp();  // N11 and N22 are in shared memory: all lanes read them
    // FORWARD: (N21 diag(beta))^T = (N11 diag(beta))^T (-M21)^T (N22 diag(beta))^T; the last factor has the beta of
    // M21's rows. Other passes: the same product of what is stored.
    u32 left[2][4], right[2][4];
    float y[2][4] = {};
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      ldmatrix_x4(left[part], at_byte_offset(in.inverse, shifted_offset(left_offset, 0, 32 * part)));
      ldmatrix_x4(right[part], at_byte_offset(in.minus_beta_M,
                                              shifted_offset(right_operand_offset(opaque(lane)), 0, 32 + 16 * part)));
    }
    multiply_split<T>(y, left, right);
    split<T>(left[0], left[1], y);
    // BACKWARD_STATES: `opaque` has the offset computed again, as there is no register to keep it in.
    const int offset = IS_BACKWARDS<S> ? left_operand_offset(opaque(lane)) : left_offset;
#pragma unroll
    for (int part = 0; part < 2; ++part)
      ldmatrix_x4_trans(right[part], at_byte_offset(in.inverse, shifted_offset(offset, 16, 16 + 32 * part)));
#pragma unroll
    for (int m = 0; m < 4; ++m) y[0][m] = y[1][m] = 0.f;
    multiply_split<T>(y, left, right);
    store_split<T, 1>(in.inverse, shifted_offset(left_offset, 0, 16), y);
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float2 to_end = load_float2(gates.key_end_factors + 16 + 8 * m + 2 * (lane & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) y[m][i] *= i % 2 ? to_end.y : to_end.x;
    }
    store_split<T, 1>(in.inverse_to_end, shifted_offset(left_offset, 0, 16), y);
    fence_proxy_async();
    mbarrier_arrive(s.inverse_ready[ring.stage]);
    ring.next(), ring.next();
  }
}

// ---- a warpgroup that makes the operands: A and M, then B, W and Z --------------------------------------------------

// Byte offset in a panel [tokens, 64 channels] of the row that this lane gives to a transposed load or store of
// matrices [16 tokens, the warp's 16 channels]; the next 16 tokens are 16 * 128 bytes on.
__device__ __forceinline__ int channel_operand_offset(int lane, int warp) {
  return swizzled_offset((lane & 7) + (lane >> 4) * 8, 2 * warp + (lane >> 3 & 1));
}
// Store and load a panel's rows of tokens transposed; offset: channel_operand_offset.
template <typename T> __device__ __forceinline__ void store_transposed(T (*to)[64], int offset, const Values& x) {
  Operand pairs;
  each_two([&](int i, int s, int m) { pairs[s][m] = pack<T>(x[i], x[i + 1]); });
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) stmatrix_x4_trans(at_byte_offset(*to, offset + 16 * 128 * s), pairs[s]);
}
template <typename T> __device__ __forceinline__ void load_transposed(Operand& x, T (*from)[64], int offset) {
#pragma unroll
  for (int s = 0; s < CHUNK / 16; ++s) ldmatrix_x4_trans(x[s], at_byte_offset(*from, offset + 16 * 128 * s));
}

// wgmma's descriptor, an address in units of 16 bytes with the swizzle's parameters (wgmma.cuh), of the stage's first
// byte, for tiles of rows of 128 bytes. Adding descriptor_offset(stage, tile) gives the descriptor of a tile in the
// stage. `hide_origin` hides where the descriptor comes from: else the compiler holds each tile's in registers of its
// own.
template <class Stage> __device__ __forceinline__ u64 stage_descriptor(Stage& stage) {
  u64 descriptor = k_major_tile(&stage);
  hide_origin(descriptor);
  return descriptor;
}
template <class Stage> __device__ __forceinline__ int descriptor_offset(Stage& stage, const void* tile) {
  return int(static_cast<const char*>(tile) - reinterpret_cast<const char*>(&stage)) / 16;
}

// Issues d = [q; k] k^T, a product [64, 32]. wgmma<type, 32 columns of d, whether the right tile has a row for each
// number that is summed over, not for each column of d>; a step takes 16 channels, 32 bytes of each row.
template <class Stage> __device__ __forceinline__ void start_scores(Values& d, Stage& in) {
  // queries_keys is the stage's first member: the offset of the first panel's keys in the stage is also their distance
  // from the panel's queries, in every panel. (As a constant, it costs registers in scalar_backward_tokens.cu.)
  const u64 descriptor = stage_descriptor(in);
#pragma unroll
  for (int c = 0; c < 4 * int(sizeof in.queries_keys / sizeof in.queries_keys[0]); ++c) {
    const u64 rows = descriptor + (descriptor_offset(in, in.queries_keys[c / 4]) + c % 4 * 2);
    wgmma<typename Stage::Element, CHUNK, K_MAJOR>(d, rows, rows + descriptor_offset(in, in.queries_keys[0] + CHUNK),
                                                   c > 0);
  }
  wgmma_commit();
}

// Stores the scores of a chunk, from d = [q; k] k^T: warps 0 and 1 have the rows of A, warps 2 and 3 those of M. A is
// stored split, and the diagonal blocks [16, 16] of -diag(beta) M in float32. The block below the diagonal, which warp
// 3 has, is stored split where M12 = 0 would be: rounded elements in the 16-bit columns 32 to 47 of rows 0 to 15, their
// errors in columns 48 to 63; FORWARD without beta, as -M21: see `invert`. BACKWARD_TOKENS stores no A, and
// -M diag(beta) in place of -diag(beta) M, in the block below the diagonal, too. left_offset: left_operand_offset.
template <class S>
__device__ __forceinline__ void store_scores(S& s, const RingPosition<S::STAGES>& ring, Values& d, int lane, int warp,
                                             int left_offset) {
  using T = typename S::T;
  // pair_offset: of the two elements of float32 rows at `row`, column 2 (lane % 4).
  const int row = 16 * (warp & 1) + lane / 4,
            pair_offset = 128 * 16 * (warp & 1) + swizzled_offset(lane / 4, lane / 2 & 1) + lane % 2 * 8;
  const bool has_queries = warp < 2, has_last_keys = warp == 3;  // rows of A; rows 16 to 31 of M
  auto& in = s.stages[ring.stage];
  if constexpr (S::PASS == SUMMARY) {
    if (has_queries) return mbarrier_arrive(s.scores_ready[ring.stage]);
  }
  mbarrier_wait(s.decays_ready[ring.stage], ring.parity);
  const auto& gates = s.gates[ring.stage];
  const float (&row_factors)[CHUNK] = has_queries ? gates.query_factors : gates.key_factors;
  const float factors[2] = {row_factors[row], row_factors[row + 8]};
  const float beta_factors[2] = {has_queries ? factors[0] : -gates.beta[row] * factors[0],
                                 has_queries ? factors[1] : -gates.beta[row + 8] * factors[1]};
  float x[4][4];
  // The two elements from column 8 n + 2 (lane % 4) on, in row `row` + 8 h.
  const auto pair_at = [&](float (&matrix)[CHUNK][32], int n, int h) {
    return reinterpret_cast<float2*>(at_byte_offset(matrix, (pair_offset ^ 32 * n) + 8 * 128 * h));
  };
#pragma unroll
  for (int n = 0; n < CHUNK / 8; ++n)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 decay = *pair_at(in.D, n, h);
      float2 factor = {beta_factors[h], beta_factors[h]};
      if (HAS_BETA<S> && has_last_keys && n < 2) factor = {-factors[h], -factors[h]};
      if (S::PASS == BACKWARD_TOKENS) {
        const float2 beta = load_float2(gates.beta + 8 * n + 2 * (lane & 3));
        factor = {-factors[h] * beta.x, -factors[h] * beta.y};
      }
      x[n][2 * h] = d[4 * n + 2 * h] * (decay.x * factor.x);
      x[n][2 * h + 1] = d[4 * n + 2 * h + 1] * (decay.y * factor.y);
    }
  if (has_queries) {
    if constexpr (S::PASS != BACKWARD_TOKENS) store_split<T, 2>(in.A, shifted_offset(left_offset, 16 * warp, 0), x);
  } else if (!has_last_keys) {
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *pair_at(in.minus_beta_M, n, h) = {x[n][2 * h], x[n][2 * h + 1]};
  } else {
#pragma unroll
    for (int n = 2; n < 4; ++n)
#pragma unroll
      for (int h = 0; h < 2; ++h) *pair_at(in.minus_beta_M, n, h) = {x[n][2 * h], x[n][2 * h + 1]};
    u32 rounded[4], errors[4];
    split<T>(rounded, errors, x);
    stmatrix_x4(at_byte_offset(in.minus_beta_M, shifted_offset(left_offset, 0, 32)), rounded);
    stmatrix_x4(at_byte_offset(in.minus_beta_M, shifted_offset(left_offset, 0, 48)), errors);
  }
  mbarrier_arrive(s.scores_ready[ring.stage]);
}

// Computes the scores of a chunk, and stores them; for a warpgroup. It waits for the chunk's `full` and decays_ready,
// and arrives at scores_ready.
template <class S>
__device__ __forceinline__ void make_scores(S& s, const RingPosition<S::STAGES>& ring, int lane, int warp,
                                            int left_offset) {
  Values d;
  mbarrier_wait(s.full[ring.stage], ring.parity);
  wgmma_fence();
  start_scores(d, s.stages[ring.stage]);
  wgmma_wait<0>();
  wgmma_fence_operand(d);
  store_scores(s, ring, d, lane, warp, left_offset);
}

// Computes a warp's block [16, 16] of B = A N diag(beta) at (row, column), and stores -B_ij E_j to minus_BE, for W.
// BACKWARD_STATES: of B = A N, and -B_ij beta_j E_j. part 0: rounded elements, 1: rounding errors.
template <typename T, class Stage>
__device__ __forceinline__ void compute_B(float (&B)[2][4], Panel<T>& minus_BE, Stage& in, const Gates& gates, int row,
                                          int column, int lane, int left_offset) {
  const int right_offset = right_operand_offset(lane);
#pragma unroll
  for (int c = 0; c < 2; ++c)
    if (16 * c <= row && 16 * c >= column) {  // A and N are lower triangles
      u32 A[2][4], inverse[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        ldmatrix_x4(A[part], at_byte_offset(in.A, shifted_offset(left_offset, row, 16 * c + 32 * part)));
        ldmatrix_x4(inverse[part],
                    at_byte_offset(in.inverse, shifted_offset(right_offset, column, 16 * c + 32 * part)));
      }
      multiply_split<T>(B, A, inverse);
    }
  float x[2][4];
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float2 from_start = load_float2(gates.key_start_factors + column + 8 * m + 2 * (lane % 4));
#pragma unroll
    for (int i = 0; i < 4; ++i) x[m][i] = -B[m][i] * (i % 2 ? from_start.y : from_start.x);
  }
  store_split<T, 1>(minus_BE, shifted_offset(left_offset, row, column), x);
}

// Issues y[channel, i] = sum_j x[channel, j] matrix[i, j], or += if `accumulate`, of a split matrix, given by its
// descriptor. Order of the four steps: columns 0 to 15 of the rounded elements, columns 16 to 31, then the same of the
// rounding errors. The caller calls wgmma_commit and waits.
template <typename T>
__device__ __forceinline__ void start_split_product(Values& y, const Operand& x, u64 matrix, bool accumulate) {
#pragma unroll
  for (int c = 0; c < 4; ++c) wgmma<T, CHUNK, K_MAJOR>(y, x[c % 2], matrix + 2 * c, accumulate || c);
}

// Issues y[channel, j] = sum_i x[channel, i] matrix[i, j]; the caller calls wgmma_commit and waits. Order of the four
// steps: rows 0 to 15 of the rounded elements, rows 16 to 31 of them, then the same rows of the rounding errors.
template <typename T>
__device__ __forceinline__ void start_transposed_split_product(Values& y, const Operand& x, u64 matrix) {
#pragma unroll
  for (int c = 0; c < 4; ++c)
    wgmma<T, CHUNK, MN_MAJOR>(y, x[c % 2], matrix + c % 2 * (16 * 128 / 16) + c / 2 * (64 / 16), c > 0);
}

// Makes the operands of all chunks; for a warpgroup. Each lane's part of `keys`, z and w: the warp's 16 channels of
// every 64, all 32 tokens. In each iteration: A and M of chunk + 2; Z, the product of keys and inverse_to_end; B; W =
// scale E q + the product of keys and minus_BE, the matrix -B_ij E_j. W overwrites the queries, B overwrites
// inverse_to_end, Z overwrites M and (BK = 128) A.
template <class S> __device__ __forceinline__ void make_operands(S& s, int tokens) {
  static_assert(S::STAGES >= 3, "chunk, chunk + 1 and chunk + 2 have a stage each");
  using T = typename S::T;
  constexpr int PANELS = S::BK / 64;
  // Scores of chunk + 2 are computed while the product for W runs, with BK = 128. With 64 they come after it: two
  // blocks of 64 channels and columns share a multiprocessor's registers, which do not suffice.
  constexpr bool SCORES_DURING_W = PANELS == 2;
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32 % 4, 0);
  const int row = 16 * (warp & 1), column = 16 * (warp >> 1);  // of the warp's block of B
  const int lane = threadIdx.x & 31, channel_offset = channel_operand_offset(lane, warp),
            left_offset = left_operand_offset(lane);
  RingPosition<S::STAGES> ring, scores_ring;
#pragma unroll 1
  for (int chunk = 0; chunk < 2 && chunk * CHUNK < tokens; ++chunk, scores_ring.next())
    make_scores(s, scores_ring, lane, warp, left_offset);
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < tokens; ++chunk, ring.next(), scores_ring.next()) {
    auto& in = s.stages[ring.stage];
    const auto& gates = s.gates[ring.stage];
    Operand keys[PANELS];
    Values z[PANELS], w[PANELS], d;
    float B[2][4] = {};
#pragma unroll
    for (int p = 0; p < PANELS; ++p) load_transposed(keys[p], in.queries_keys[p] + CHUNK, channel_offset);
    const bool has_scores = (chunk + 2) * CHUNK < tokens;
    if (SCORES_DURING_W) {
      if (has_scores) mbarrier_wait(s.full[scores_ring.stage], scores_ring.parity);
      wgmma_fence();
      // Without a branch: the last two chunks compute their own scores again, which are not used.
      start_scores(d, s.stages[has_scores ? scores_ring.stage : ring.stage]);
    }
    mbarrier_wait(s.inverse_ready[ring.stage], ring.parity);
    u64 inverse_to_end = k_major_tile(in.inverse_to_end), minus_BE = k_major_tile(s.minus_BE[chunk & 1]);
    hide_origin(inverse_to_end), hide_origin(minus_BE);  // see stage_descriptor
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) start_split_product<T>(z[p], keys[p], inverse_to_end, OVERWRITE);
    wgmma_commit();
    compute_B(B, s.minus_BE[chunk & 1], in, gates, row, column, lane, left_offset);
    fence_proxy_async();
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) wgmma_fence_operand(z[p]);
    if (SCORES_DURING_W) wgmma_fence_operand(d);
    store_transposed(in.Z[0], channel_offset, z[0]);  // overwrites M
#pragma unroll
    for (int c = 0; c < CHUNK / 16; ++c) {
      const float2 factors[2] = {load_float2(gates.query_start_factors + 16 * c + 2 * (lane % 4)),
                                 load_float2(gates.query_start_factors + 16 * c + 8 + 2 * (lane % 4))};
#pragma unroll
      for (int p = 0; p < PANELS; ++p) {
        u32 q[4];
        ldmatrix_x4_trans(q, at_byte_offset(in.queries_keys[p], channel_offset + 16 * 128 * c));
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int i = 4 * (2 * c + m / 2) + m % 2 * 2;
          const float2 pair = unpack(q[m], T{});
          w[p][i] = pair.x * factors[m / 2].x, w[p][i + 1] = pair.y * factors[m / 2].y;
        }
      }
    }
    // All warps have written minus_BE, and read A, the queries and inverse_to_end.
    named_barrier_sync(1, OPERAND_THREADS);
    wgmma_fence();
#pragma unroll
    for (int p = 0; p < PANELS; ++p) start_split_product<T>(w[p], keys[p], minus_BE, ACCUMULATE);
    wgmma_commit();
    if constexpr (PANELS == 2) store_transposed(in.Z[1], channel_offset, z[1]);  // overwrites A
    store_split<T, 1>(in.B, shifted_offset(left_offset, row, column), B);
    if (SCORES_DURING_W && has_scores) {          // while the product for W runs
      const int lane = opaque(threadIdx.x) & 31;  // `opaque` has offsets computed again, which saves registers
      store_scores(s, scores_ring, d, lane, warp, left_operand_offset(lane));
    }
    wgmma_wait<0>();
#pragma unroll
    for (int p = 0; p < PANELS; ++p)
      wgmma_fence_operand(w[p]), store_transposed(in.queries_keys[p], channel_offset, w[p]);
    fence_proxy_async();
    warp_arrive(s.operands_ready[ring.stage]);
    if (!SCORES_DURING_W && has_scores) make_scores(s, scores_ring, lane, warp, left_offset);
  }
}

// ---- warpgroups with 64 columns of V each ---------------------------------------------------------------------------

// A lane of a consumer. Of its warp's 16 columns it has `column` and the 8th after it; its part of the state is
// transposed in registers (see each_transposed in warpgroup.cuh). first: the block's first column.
struct Consumer {
  int warp, warpgroup, lane, column, channel_offset;

  __device__ __forceinline__ explicit Consumer(int first) {
    warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), warpgroup = warp / 4, lane = threadIdx.x & 31;
    column = first + 16 * warp + lane / 4, channel_offset = channel_operand_offset(lane, warp % 4);
  }
};

// Rounds this lane's numbers of a transposed state to T: left operands [16 columns of V, 16 channels] each.
template <typename T, int BK>
__device__ __forceinline__ void round_state(u32 (&rounded)[BK / 16][4], const float (&state)[BK / 2]) {
#pragma unroll
  for (int c = 0; c < BK / 16; ++c)
#pragma unroll
    for (int m = 0; m < 4; ++m) rounded[c][m] = pack<T>(state[8 * c + 2 * m], state[8 * c + 2 * m + 1]);
  wgmma_fence_operand(rounded);
}

// Issues y[column of V, row] = S^T x of 32 rows x, for a state S as round_state leaves it; tile_of(p): the descriptor
// of the rows' channels from 64 p on. The caller calls wgmma_commit and waits.
template <typename T, int STEPS, class F>
__device__ __forceinline__ void start_state_product(Values& y, const u32 (&state)[STEPS][4], F tile_of) {
#pragma unroll
  for (int c = 0; c < STEPS; ++c) wgmma<T, CHUNK, K_MAJOR>(y, state[c], tile_of(c / 4) + c % 4 * 2, c > 0);
}

// state <- E_32 state: lets it decay over the chunk.
template <int N> __device__ __forceinline__ void decay_state(float (&state)[N], float chunk_decay) {
  if (chunk_decay != 1.f)  // the branch keeps the compiler from moving this after the wait for the products
#pragma unroll
    for (float& value : state) value *= chunk_decay;
}

// X_j = v_j - E_j S^T k_j, rounded to T. S_k: S^T k without E.
template <typename T>
__device__ __forceinline__ void make_X(Operand& X, const Operand& v, const Values& S_k, const Gates& gates, int lane) {
  each_two([&](int i, int c, int m) {
    const float2 from_start = load_float2(gates.key_start_factors + i / 4 * 8 + 2 * (lane & 3)),
                 values = unpack(v[c][m], T{});
    X[c][m] = pack<T>(fmaf(-from_start.x, S_k[i], values.x), fmaf(-from_start.y, S_k[i + 1], values.y));
  });
}

// Issues state += x rows, a sum over 32 tokens, x [columns of V, tokens]; `rows`: the descriptor of rows [32, BK].
template <typename T, int BK>
__device__ __forceinline__ void start_state_update(float (&state)[BK / 2], const Operand& x, u64 rows) {
#pragma unroll
  for (int c = 0; c < CHUNK / 16; ++c) wgmma<T, BK, MN_MAJOR>(state, x[c], rows + c * (16 * 128 / 16), ACCUMULATE);
  wgmma_commit();
}

// ---- the roles of a block -------------------------------------------------------------------------------------------

// Initialises the barriers of stages and of values, then has each warp do its part: consume() by a warpgroup for every
// 64 columns, compute_operands() by a warpgroup, copy_chunks() by a warp. Before the call one thread must have
// initialised the kernel's other barriers.
template <class S, class Args, class Consume, class Operands, class Copy>
__device__ __forceinline__ void run_roles(S& s, const Args& args, const WorkTile& work, Consume consume,
                                          Operands compute_operands, Copy copy_chunks) {
  using InRole = Registers<S::PASS, S::BK, S::BV>;
  constexpr auto ROLES = InRole::ROLES;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < S::STAGES; ++stage) {
      mbarrier_init(s.full[stage], 32);  // lanes of the copying warp
      mbarrier_init(s.decays_ready[stage], 32), mbarrier_init(s.inverse_ready[stage], 32);
      mbarrier_init(s.scores_ready[stage], OPERAND_THREADS);
      mbarrier_init(s.outputs_ready[stage], S::PASS == BACKWARD_TOKENS ? OPERAND_THREADS : CONSUMERS<S::BV>);
      mbarrier_init(s.operands_ready[stage], OPERAND_THREADS / 32);  // warps
    }
    for (MBarrier& full : s.values_full) mbarrier_init(full, 32);
  }
  fence_proxy_async();
  __syncthreads();  // the barriers are initialised
  if (threadIdx.x < CONSUMERS<S::BV>) {
    registers_up<ROLES.consumer>();
    consume();
  } else if (threadIdx.x < CONSUMERS<S::BV> + OPERAND_THREADS) {
    if constexpr (ROLES.operands > InRole::AT_FIRST) registers_up<ROLES.operands>();
    else registers_down<ROLES.operands>();
    compute_operands();
  } else {
    registers_down<ROLES.other>();
    const int warp = threadIdx.x / 32 % 4;
    if (warp == 0) copy_chunks();
    else if (warp == 1) compute_decays(s, args, work);
    else invert(s, work.tokens, warp - 2);
  }
}
