// what      Properties of the card that a kernel is translated for, by which kernels of every card choose the number of
//           registers. Results do not depend on them.
// limits    A kernel that uses SINCE_SM100 only is translated once for all cards before, and once for all cards since.
//           BEFORE_SM90 is for models' kernels, which differ on sm_90 anyway

#if __CUDA_ARCH__ >= 1000  // its assembler needs more registers for the same work
constexpr bool SINCE_SM100 = true;
#else
constexpr bool SINCE_SM100 = false;
#endif
#if __CUDA_ARCH__ < 900
constexpr bool BEFORE_SM90 = true;
#else
constexpr bool BEFORE_SM90 = false;
#endif

// Bytes of shared memory of a multiprocessor, and bytes that every block takes beyond its own.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int MULTIPROCESSOR_SHARED = 164 * 1024;
#elif __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200
constexpr int MULTIPROCESSOR_SHARED = 100 * 1024;
#else
constexpr int MULTIPROCESSOR_SHARED = 228 * 1024;
#endif
constexpr int RESERVED_SHARED = 1024;

// The blocks that a kernel's launch bounds ask a multiprocessor's registers for: `most`, but at least one, and no more
// than its shared memory has room for.
template <class Shared> constexpr int blocks_with_room(int most) {
  const int fitting = MULTIPROCESSOR_SHARED / int(sizeof(Shared) + RESERVED_SHARED);
  return fitting < 1 ? 1 : fitting < most ? fitting : most;
}
