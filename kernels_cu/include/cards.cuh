// what      What kernels for every card ask of the one that they are translated for, to say how many registers they may
//           have: nothing that they compute depends on it.
// limits    what asks for SINCE_SM100 alone is the same for all cards before, and for all since. BEFORE_SM90 is for
//           models' kernels, which differ on sm_90 anyway

#if __CUDA_ARCH__ >= 1000  // whose assembler wants more registers for the same work
constexpr bool SINCE_SM100 = true;
#else
constexpr bool SINCE_SM100 = false;
#endif
#if __CUDA_ARCH__ < 900
constexpr bool BEFORE_SM90 = true;
#else
constexpr bool BEFORE_SM90 = false;
#endif

// Bytes of shared memory of a multiprocessor, and those that every block takes besides its own.
#if __CUDA_ARCH__ == 800 || __CUDA_ARCH__ == 870
constexpr int MULTIPROCESSOR_SHARED = 164 * 1024;
#elif __CUDA_ARCH__ < 900 || __CUDA_ARCH__ >= 1200
constexpr int MULTIPROCESSOR_SHARED = 100 * 1024;
#else
constexpr int MULTIPROCESSOR_SHARED = 228 * 1024;
#endif
constexpr int RESERVED_SHARED = 1024;

// Blocks for which a kernel leaves registers on a multiprocessor: `most`, but no more than shared memory has room for.
template <class Shared> constexpr int blocks_with_room(int most) {
  const int fitting = MULTIPROCESSOR_SHARED / int(sizeof(Shared) + RESERVED_SHARED);
  return fitting < 1 ? 1 : fitting < most ? fitting : most;
}
