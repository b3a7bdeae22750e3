// what      Two warps that invert I + diag(beta) M, one of even and one of odd chunks, in Hopper's kernels of the delta
//           rule with one gate per token and head, or none.
// math      M_ij = D_ij k_i . k_j for tokens j < i of a chunk's 32, D_ij the decay from after j through i; N = (I +
//           diag(beta) M)^-1; R = (I + M diag(beta))^-1. Past the last token k and beta are 0, and so is M. What is
//           computed depends on the pass of the including kernel (scalar_stage.cuh). store_scores has stored M in two
//           parts, its diagonal blocks [16, 16] and M21, the block below the diagonal:
//           pass                                `inverse`     in diagonal blocks  in place of M21
//           FORWARD, SUMMARY                    N diag(beta)  -diag(beta) M       -M21
//           BACKWARD_STATES, BACKWARD_SUMMARY   N             -diag(beta) M       -diag(beta) M21
//           BACKWARD_TOKENS                     R             -M diag(beta)       -M21 diag(beta)
//           Diagonal blocks of N or R come from forward substitution. In every pass inverse21 = inverse22 X inverse11,
//           X in place of M21, and inverse12 = 0. inverse_to_end_ij = gates.key_end_factors[i] inverse_ij; of it comes
//           Z_j = sum_i inverse_to_end_ij k_i, an operand of the state's update. The factor has the decay from after i
//           to the chunk's end, 1 / |k_i| if keys are normalized, and beta_i in BACKWARD_TOKENS
// shapes    `inverse` and inverse_to_end have a row for each key j: they are stored transposed, [j, i], and split (see
//           numerics). weighted_M (so named in all passes) has float32 diagonal blocks, and X, split, where M12 = 0
//           would be, not transposed: rows 0 to 15, 16-bit columns 32 to 47, rounding errors in columns 48 to 63
// barriers  waits for scores_ready. Then M is stored, and what the results overwrite has been read: `inverse` lies upon
//           the chunk's decays D_ij, inverse_to_end upon B (A `inverse`) of the stage's previous chunk. In
//           BACKWARD_TOKENS both lie upon matrices of that chunk. All 32 lanes fence, as wgmma reads what each has
//           stored, and arrive at inverse_ready, which run_roles initialises for 32 (scalar_chunks.cuh)
// numerics  substitution in float32. A split matrix has sums of two numbers of T: rounded ones, and their errors
// limits    sm_90a; T is bf16 or f16
// tests     those of scalar_chunks.cuh
#include "delta/sm90/scalar_stage.cuh"

// From the includes:
//   Panel: 32 rows of 128 bytes; a split matrix has rounded elements in columns 0 to 31, errors in columns 32 to 63
//   swizzled_offset(row, piece): the offset of 16 bytes of a row. XOR 16, 32 and 64 change bits 0, 1 and 2 of the
//     piece. at_byte_offset(array, offset): the address there
//   left_operand_offset, right_operand_offset: a lane's offset for ldmatrix and stmatrix of the matrix [16, 16] at (0,
//     0), shifted_offset: of the one at (row, column)
//   split: sums as split operands; store_split<T, N>: stores sums of 16 rows, 16 N columns, split; rounding_errors: of
//     two numbers that have been rounded; multiply_split(d, a, b): d += a b of split a and b
//   RingPosition: a chunk's stage, and the parity to wait for. opaque(x): x, whose origin it hides, so that the
//     compiler computes offsets again: that saves registers
//   INVERSE_HAS_BETA: FORWARD or SUMMARY, where `inverse` is times beta; IS_BACKWARDS: BACKWARD_STATES or
//     BACKWARD_SUMMARY

// Forward substitution: x = column lane % 16 of the inverse of a diagonal block [16, 16], of the first 16 tokens for
// lanes 0 to 15, of the last 16 for the others: x_i = I_i + sum_j weighted_M_ij x_j. Above the diagonal all summands,
// and so x_i, are 0.
__device__ __forceinline__ void substitute(float (&x)[16], const float (&weighted_M)[CHUNK][32], int lane) {
  const int second_block = lane >> 4;
  const char* const block = reinterpret_cast<const char*>(weighted_M[16 * second_block]);
  // A piece has 4 floats. Piece j / 4 of the block's row i is piece 4 second_block + j / 4 of the array's, in place
  // (4 second_block + j / 4) ^ i % 8: bit 2 of that chooses between two addresses, by bit 2 of i; the other bits,
  // j / 4 ^ i % 4, are known when compiled.
  const char* const row_bases[2] = {block + 64 * second_block, block + 64 * (1 - second_block)};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float sums[2] = {};
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 row = *reinterpret_cast<const float4*>(row_bases[i >> 2 & 1] + i * 128 + (j / 4 ^ i & 3) * 16);
      sums[0] = fmaf(row.x, x[j], sums[0]);
      if (j + 1 < i) sums[1] = fmaf(row.y, x[j + 1], sums[1]);
      if (j + 2 < i) sums[0] = fmaf(row.z, x[j + 2], sums[0]);
      if (j + 3 < i) sums[1] = fmaf(row.w, x[j + 3], sums[1]);
    }
    x[i] = i == (lane & 15) ? 1.f : sums[0] + sums[1];
  }
}

// Fills in.inverse and in.inverse_to_end of every other chunk from first_chunk on, 0 or 1; for one warp.
template <class Memory> __device__ __forceinline__ void invert(Memory& s, int tokens, int first_chunk) {
  using T = typename Memory::T;
  const int lane = threadIdx.x & 31, second_block = lane >> 4;
  const int left_offset = left_operand_offset(lane);
  // Of key `lane`'s row, at its block's first i: piece 0 or 2. XOR 16 is the next piece, XOR 32 the other block's,
  // XOR 64 that of the rounding errors.
  const int key_offset = swizzled_offset(lane, 2 * second_block);
  RingPosition<Memory::STAGES> ring;
  if (first_chunk) ring.next();
#pragma unroll 1
  for (int chunk = first_chunk; chunk * CHUNK < tokens; chunk += 2) {
    auto& in = s.stages[ring.stage];
    const auto& gates = s.gates[ring.stage];
    mbarrier_wait(s.scores_ready[ring.stage], ring.parity);
    float x[16];
    substitute(x, in.weighted_M, lane);
    const auto store_split_row = [&](Panel<T>& to, const float (&row)[8], int offset) {
      u32 rounded[4], errors[4];
#pragma unroll
      for (int m = 0; m < 4; ++m)
        rounded[m] = pack<T>(row[2 * m], row[2 * m + 1]),
        errors[m] = rounding_errors<T>(rounded[m], row[2 * m], row[2 * m + 1]);
      *reinterpret_cast<uint4*>(at_byte_offset(to, offset)) = {rounded[0], rounded[1], rounded[2], rounded[3]};
      *reinterpret_cast<uint4*>(at_byte_offset(to, offset ^ 64)) = {errors[0], errors[1], errors[2], errors[3]};
      // For registers only: keeps the compiler from computing all rows before it stores one.
      __syncwarp();
    };
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // 8 of the block's i
      float numbers[8];
#pragma unroll
      for (int i = 0; i < 8; ++i)
        numbers[i] = INVERSE_HAS_BETA<Memory> ? gates.beta[lane] * x[8 * half + i] : x[8 * half + i];
      store_split_row(in.inverse, numbers, key_offset ^ 16 * half);
#pragma unroll
      for (int i = 0; i < 8; ++i) numbers[i] *= gates.key_end_factors[16 * second_block + 8 * half + i];
      store_split_row(in.inverse_to_end, numbers, key_offset ^ 16 * half);
      // inverse12 = 0: j in the second block, i in the first. part 0: rounded elements, 1: rounding errors. Of
      // inverse_to_end wgmma reads this block in every pass, of `inverse` in BACKWARD_TOKENS. In the other passes it
      // keeps what lay there: compute_B (scalar_operands.cuh), which alone multiplies `inverse`, leaves it out.
      if (second_block)
        for (int part = 0; part < 2; ++part) {
          const int offset = key_offset ^ 32 ^ 16 * half ^ 64 * part;
          *reinterpret_cast<uint4*>(at_byte_offset(in.inverse_to_end, offset)) = {0, 0, 0, 0};
          if constexpr (Memory::PASS == BACKWARD_TOKENS)
            *reinterpret_cast<uint4*>(at_byte_offset(in.inverse, offset)) = {0, 0, 0, 0};
        }
    }
    __syncwarp();  // inverse11 and inverse22 are in shared memory: the lanes read each other's
    // inverse21^T = inverse11^T X^T inverse22^T
    u32 left[2][4], right[2][4];  // [0]: rounded elements, [1]: rounding errors
    float y[2][4] = {};           // inverse11^T X^T, then inverse21^T
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      ldmatrix_x4(left[part], at_byte_offset(in.inverse, shifted_offset(left_offset, 0, 32 * part)));
      ldmatrix_x4(right[part],
                  at_byte_offset(in.weighted_M, shifted_offset(right_operand_offset(opaque(lane)), 0, 32 + 16 * part)));
    }
    multiply_split<T>(y, left, right);
    split<T>(left[0], left[1], y);
    // Read transposed, a right operand has the addresses of a left one. Passes that go backwards have no register to
    // keep the offset in: `opaque` has it computed again.
    const int offset = IS_BACKWARDS<Memory> ? left_operand_offset(opaque(lane)) : left_offset;
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
