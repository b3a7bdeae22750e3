// what      Where a tile's values lie in the tensor cores' 128-byte swizzle: panels of 128 bytes a row.
// limits    panels start on 1024 bytes
#include "ptx.cuh"

// Where a piece of a row of a panel lies, in bytes. What is 1, 2 or 4 pieces further, as bits of their numbers, is 16,
// 32 or 64 XOR that: addresses of a loop that the compiler need not make.
__device__ __forceinline__ int swizzled_offset(int row, int piece) { return row * 128 + ((piece ^ row) & 7) * 16; }
template <typename X> __device__ __forceinline__ char* at_offset(X& tile, int offset) {
  return reinterpret_cast<char*>(&tile) + offset;
}

// The address of 16-byte piece `piece` of row `row` of a panel.
template <typename X> __device__ __forceinline__ X* swizzled(X* panel, int row, int piece) {
  return reinterpret_cast<X*>(reinterpret_cast<char*>(panel) + row * 128 + ((piece ^ row) & 7) * 16);
}
