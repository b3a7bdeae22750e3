// what      Addresses in the tensor cores' 128-byte swizzle: tiles are panels whose rows have 128 bytes, 8 pieces of 16
//           bytes; piece p of row r is in the place of piece p ^ r % 8.
// limits    panels start on 1024 bytes
#include "ptx.cuh"

// The offset of a 16-byte piece of a row of a panel, in bytes. To change bit 0, 1 or 2 of the piece's number, XOR the
// offset with 16, 32 or 64: so loops over pieces need no other address.
__device__ __forceinline__ int swizzled_offset(int row, int piece) { return row * 128 + ((piece ^ row) & 7) * 16; }
// The address `offset` bytes after the start of a tile.
template <typename X> __device__ __forceinline__ char* at_byte_offset(X& tile, int offset) {
  return reinterpret_cast<char*>(&tile) + offset;
}

// The address of 16-byte piece `piece` of row `row` of a panel.
template <typename X> __device__ __forceinline__ X* swizzled(X* panel, int row, int piece) {
  return reinterpret_cast<X*>(reinterpret_cast<char*>(panel) + row * 128 + ((piece ^ row) & 7) * 16);
}
