// what      Where a tile's values lie in the tensor cores' 128-byte swizzle: panels of 128 bytes a row.
// limits    panels start on 1024 bytes
#include "ptx.cuh"

// The address of 16-byte piece `piece` of row `row` of a panel.
template <typename X> __device__ __forceinline__ X* swizzled(X* panel, int row, int piece) {
  return reinterpret_cast<X*>(reinterpret_cast<char*>(panel) + row * 128 + ((piece ^ row) & 7) * 16);
}
