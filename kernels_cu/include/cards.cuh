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
