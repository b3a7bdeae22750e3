// what      A warp that fills D and Gates of each chunk, in Hopper's kernels of the delta rule with one gate per token
//           and head, or none.
// math      D_ij: the decay from after token j through token i; E_i from the chunk's start through i, L_i from after i
//           to its end: products of e^g of the log gates in between
// shapes    args: g and beta, Rows of one number for each token, g.p null without gates, beta.p never; wide_gate and
//           wide_beta, whether these are float32 (otherwise T); scale; lengths, Rows of two numbers for each token and
//           head of q and k: see Gates
// barriers  waits for outputs_ready of the stage's previous chunk; each lane arrives at decays_ready
// limits    sm_90a
// tests     those of scalar_chunks.cuh
#include "delta/sm90/scalar_stage.cuh"

// From the includes:
//   WorkTile: the block's sequence, head and tokens. IS_BACKWARDS: whether the pass takes the last chunk first
//   RingPosition: a chunk's stage, and the parity to wait for (parity ^ 1: for the stage's previous chunk)
//   swizzled(D[0], row, piece): the address of 16 bytes of a row of D

// The first token of the chunk that a pass takes once it has passed chunks of `passed` tokens, a multiple of CHUNK.
template <class Memory> __device__ __forceinline__ int first_token(const WorkTile& work, int passed) {
  return IS_BACKWARDS<Memory> ? (work.tokens - 1 & -CHUNK) - passed : passed;
}

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
    const i64 first_index =
        work.batch * from.batch_stride + work.head * from.head_stride + (work.start + token) * from.token_stride;
#pragma unroll
    for (int n = 0; n < CHUNKS_AHEAD; ++n) {
      const int offset = BACKWARDS ? -n * CHUNK : n * CHUNK;
      const i64 index = first_index + offset * from.token_stride;
      bits[n] = 0;
      if (from.p && (BACKWARDS ? u32(token + offset) < u32(work.tokens) : token + offset < work.tokens))
        bits[n] = is_float32 ? static_cast<const u32*>(from.p)[index] : static_cast<const u16*>(from.p)[index];
    }
  }
  template <typename T> __device__ __forceinline__ float value(int n, bool is_float32, T) const {
    return is_float32 ? __uint_as_float(bits[n]) : to_float(T{u16(bits[n])});
  }
};

// The inverse lengths of this lane's query and key; 1 for tokens outside of the sequence, and if rows are not divided.
template <class Args> __device__ __forceinline__ float2 lengths_of(const Args& args, const WorkTile& work, int token) {
  if (!args.lengths.p || u32(token) >= u32(work.tokens)) return {1.f, 1.f};
  return load_float2(args.lengths.row(work.batch, work.head / int(args.group), work.start + token));
}

// Fills the row of D of this lane's query, and returns the decay from the chunk's start through the query. decays and
// key_factors: a number for each token.
__device__ __forceinline__ float fill_row(float (&D)[CHUNK][32], const float* decays, const float* key_factors) {
  const int lane = threadIdx.x & 31;
  const int row_offset = swizzled_offset(lane, 0);
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
    const float4 keys = *reinterpret_cast<const float4*>(key_factors + 4 * piece);
    *reinterpret_cast<float4*>(at_byte_offset(D, row_offset ^ 16 * piece)) = {of_key[0] * keys.x, of_key[1] * keys.y,
                                                                              of_key[2] * keys.z, of_key[3] * keys.w};
  }
  return product * next_decay;
}

// Fills each stage's D and Gates; for one warp.
template <class Memory, class Args>
__device__ __forceinline__ void compute_decays(Memory& s, const Args& args, const WorkTile& work) {
  using T = typename Memory::T;
  static_assert(CHUNK == 32, "a lane has a token");
  const int lane = threadIdx.x & 31;
  const bool is_float32[2] = {args.wide_gate != 0, args.wide_beta != 0};  // of gates, and of betas
  TokenScalars<IS_BACKWARDS<Memory>> gate, beta;
  const int token = first_token<Memory>(work, 0) + lane;
  gate.load(args.g, is_float32[0], work, token, T{}), beta.load(args.beta, is_float32[1], work, token, T{});
  float2 lengths = lengths_of(args, work, token);
  RingPosition<Memory::STAGES> ring;
#pragma unroll 1
  for (int chunk = 0; chunk * CHUNK < work.tokens; ++chunk, ring.next()) {
    if (chunk % CHUNKS_AHEAD == 0) {
      const int next = first_token<Memory>(work, (chunk + CHUNKS_AHEAD) * CHUNK) + lane;
      __syncwarp();  // all lanes have read s.upcoming of the previous chunks
#pragma unroll
      for (int n = 0; n < CHUNKS_AHEAD; ++n) {
        s.upcoming.decay[n][lane] = decay_of(gate.value(n, is_float32[0], T{}));
        s.upcoming.beta[n][lane] = beta.value(n, is_float32[1], T{});
      }
      gate.load(args.g, is_float32[0], work, next, T{}), beta.load(args.beta, is_float32[1], work, next, T{});
      __syncwarp();  // s.upcoming has the next chunks, of all lanes
    }
    if (chunk >= Memory::STAGES) mbarrier_wait(s.outputs_ready[ring.stage], ring.parity ^ 1);
    auto& to = s.gates[ring.stage];
    if constexpr (Memory::PASS == BACKWARD_TOKENS) to.query_inverse[lane] = lengths.x;
    to.query_factors[lane] = float(args.scale) * lengths.x, to.key_factors[lane] = lengths.y;
    lengths = lengths_of(args, work, first_token<Memory>(work, (chunk + 1) * CHUNK) + lane);
    __syncwarp();  // the factors of all keys are stored
    auto& D = s.stages[ring.stage].D;
    const float from_start = fill_row(D, s.upcoming.decay[chunk % CHUNKS_AHEAD], to.key_factors);
    to.query_start_factors[lane] = to.query_factors[lane] * from_start,
    to.key_start_factors[lane] = to.key_factors[lane] * from_start;
    to.beta[lane] = s.upcoming.beta[chunk % CHUNKS_AHEAD][lane];
    if constexpr (IS_BACKWARDS<Memory>) to.key_start_factors[lane] *= to.beta[lane];
    if (lane == 31) to.chunk_decay = from_start;
    __syncwarp();  // row 31 of D is stored: the decays from after each token to the chunk's end, times key factors
    to.key_end_factors[lane] = swizzled(D[0], CHUNK - 1, lane / 4)[lane % 4];
    if constexpr (Memory::PASS == BACKWARD_TOKENS) {
      to.key_to_end[lane] = to.key_end_factors[lane];
      to.key_end_factors[lane] *= to.beta[lane];
    }
    mbarrier_arrive(s.decays_ready[ring.stage]);
  }
}
