// what      A chunk of 32 tokens in shared memory, in Hopper's kernels of the delta rule with one gate per token and
//           head, or none: its matrices, the factors of its tokens, and the registers of each role of warps.
// math      i and j are tokens of the chunk, S is the state before it. A token's decay is e^g of its log gate g. Decays
//           over tokens: D_ij from after token j through token i, E_i from the chunk's start through i, L_i from after
//           i to the chunk's end. Matrices [32, 32]:
//           M_ij = D_ij k_i . k_j, j < i;  A_ij = scale D_ij q_i . k_j, j <= i;  N = (I + diag(beta) M)^-1;
//           R = (I + M diag(beta))^-1, for which diag(beta) R = N diag(beta);  B = A inverse
//           Matrices of a row for each token, with the factors of tokens that Gates has:
//           W_i = query_start_i q_i - sum_j B_ij key_start_j k_j;  Z_j = sum_i inverse_ij key_end_i k_i;
//           X_j = v_j - key_start_j S^T k_j
// passes    The including kernel says which PASS it is. That chooses `inverse`, and which factors have beta:
//           PASS              kernel                      computes  inverse       key_start  key_end
//           FORWARD           scalar_forward.cu           B W Z X   N diag(beta)  E          L
//           SUMMARY           scalar_summary.cu           Z X       N diag(beta)  E          L
//           BACKWARD_STATES   scalar_backward_states.cu   B W Z     N             beta E     L
//           BACKWARD_SUMMARY  the same, without outputs   B W Z     N             beta E     L
//           BACKWARD_TOKENS   scalar_backward_tokens.cu   Z X       R             E          beta L
//           The third and the fourth take chunks from the last to the first. What comments say of BACKWARD_STATES holds
//           for BACKWARD_SUMMARY, too, which stores nothing but the last state; what they say of FORWARD holds for
//           SUMMARY, too, which reads no queries
// shapes    A kernel's struct of shared memory, `Memory` in the functions, has
//           - PASS; T, the type of q, k and v; BK and BV, K and V of a block rounded up; STAGES
//           - stages[STAGES]: Stage, or in BACKWARD_TOKENS a struct with Element, queries_keys, weighted_M, inverse,
//             inverse_to_end and D. gates[STAGES]: Gates; in BACKWARD_TOKENS they also have query_inverse and
//             key_to_end, arrays of a number for each token. upcoming: Upcoming
//           - the barriers below, one for each stage; in BACKWARD_TOKENS values_full are of its own number
// barriers  of each stage, in the order in which its chunk passes them: who arrives -> who waits;
//           run_roles (scalar_chunks.cuh) has how many arrive.
//           full: q and k have been copied: copies -> operands, consumers
//           values_full: v or do has been copied: copies -> consumers
//           decays_ready: D and Gates are complete: decays -> operands, consumers
//           scores_ready: A and M: operands -> inverses
//           inverse_ready: inverse and inverse_to_end: inverses -> operands
//           operands_ready: B, W and Z: operands -> consumers
//           outputs_ready: o or dv, and all of the stage has been read: consumers -> copies, decays
//           (BACKWARD_TOKENS: dq and dk: operands' warpgroup -> copies, decays)
// numerics  products of T are summed in float32. W, X and Z are rounded to T. A, B, N and M's block at the lower left
//           are split (scalar_panels.cuh). N's diagonal blocks of 16 tokens come from substitution in float32. A decay
//           is a product of the decays of the tokens in between, never a quotient. A token's decay that is infinite or
//           NaN also makes NaN of zeros of D, for keys after the query
// limits    sm_90a; bfloat16 or float16
#include "delta/sm90/scalar_panels.cuh"

enum Pass { FORWARD, SUMMARY, BACKWARD_STATES, BACKWARD_SUMMARY, BACKWARD_TOKENS };
// Whether `inverse` is N diag(beta), the columns of N times beta.
template <class Memory> constexpr bool INVERSE_HAS_BETA = Memory::PASS == FORWARD || Memory::PASS == SUMMARY;
// Whether a pass goes backwards in time.
template <class Memory>
constexpr bool IS_BACKWARDS = Memory::PASS == BACKWARD_STATES || Memory::PASS == BACKWARD_SUMMARY;

// A chunk of tokens and its matrices. In a union the member below overwrites the one above, which has been read by
// then.
template <typename T, int BK, int BV> struct alignas(1024) Stage {
  using Element = T;
  // The first member, for start_scores. Rows 0 to 31: queries, later overwritten by W; rows 32 to 63: keys.
  T queries_keys[BK / 64][2 * CHUNK][64];
  union {
    struct {
      // The matrix that is inverted is the identity minus this one: M times -beta of the row, in BACKWARD_TOKENS of the
      // column. Diagonal blocks [16, 16] lie in place. The block at the lower left is at the upper right, where M is
      // zero, split; in FORWARD and SUMMARY without beta (table in scalar_inverse.cuh).
      float weighted_M[CHUNK][32];
      Panel<T> A;  // [query, key], split
    };
    // Z[0] overwrites weighted_M once this has been inverted; Z[1], if BK = 128, A once B has been computed.
    Panel<T> Z[BK / 64];
  };
  static_assert(sizeof weighted_M == sizeof(Panel<T>));
  static_assert((BK == 64 || BK == 128) && (BV == 64 || BV == 128));
  union {
    Panel<T> inverse_to_end;  // inverse_ij times key_end_factors[i] of Gates; [j, i], split: for Z
    Panel<T> B;               // [query, key], split
  };
  union {
    float D[CHUNK][32];  // [i][j]: D_ij times key_factors[j] of Gates; 0 if j > i
    Panel<T> inverse;    // [j, i], split: for B
  };
  Tile<T, BV> values;  // v, overwritten by o; BACKWARD_STATES: do, overwritten by dv
};

// Factors of a chunk's tokens, one for each token. Given args.lengths, queries q and keys k count as divided by their
// lengths |q| and |k|: the factors include the inverse lengths, since shared memory holds q and k undivided.
struct alignas(16) Gates {
  float query_factors[CHUNK], key_factors[CHUNK];  // scale / |q|, 1 / |k|; without args.lengths, scale and 1
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
  static constexpr int BLOCKS = BK + BV == 128 ? 2 : 1, AT_FIRST = 65536 / (BLOCKS * ALL_THREADS<BV>) / 8 * 8;
  struct Roles {
    int consumer, operands, other;
  };
  static constexpr Roles ROLES = BLOCKS == 2 ? TOKENS                     ? Roles{96, 104, 40}
                                               : PASS == BACKWARD_SUMMARY ? Roles{112, 72, 56}
                                                                          : Roles{120, 72, 48}
                                 : TOKENS    ? NARROW ? Roles{168, 232, 104} : Roles{144, 168, 56}
                                 : NARROW    ? Roles{208, 168, 128}
                                             : Roles{168, 120, 56};
  static_assert(BV / 64 * ROLES.consumer + ROLES.operands + ROLES.other <= ALL_THREADS<BV> / 128 * AT_FIRST);
};

// One lane arrives for its warp. For barriers whose waiters touch the memory that the warp has read or written only by
// wgmma, ldmatrix, stmatrix or copies of boxes. If they touch it by loads, stores or copies of single threads, each
// lane must arrive: racecheck, a tool that finds races, orders by an arrival only what that lane itself has done.
__device__ __forceinline__ void warp_arrive(MBarrier& barrier) {
  __syncwarp();  // all lanes have made their accesses
  if ((threadIdx.x & 31) == 0) mbarrier_arrive(barrier);
}

// Two neighbouring floats; p is aligned to 8 bytes.
__device__ __forceinline__ float2 load_float2(const float* p) { return *reinterpret_cast<const float2*>(p); }
