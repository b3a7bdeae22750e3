// Runs a CUDA kernel on the CPU, for tests. A block's threads are fibers on one core, so that a barrier is a
// switch of stacks and a warp collective runs once for all 32 lanes. Blocks run in turn, odd ones with their
// threads in reverse, which shows a missing barrier in one direction or the other, and at every third and fourth launch
// even ones; those of a cluster run by turns. What the copy engine copies arrives when somebody waits for it.
// Arithmetic flushes denormals, as CuPy's compiler option does. What the hardware would leave undefined
// ends the launch with a message instead.
//
// Only dynamic shared memory exists: `__shared__` is left undefined because a C++ static could be neither
// poisoned before each block nor checked for its bounds.
// What is only declared here stands in `runtime.cu`.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

// Of float, as CUDA has them: C's, which are read in half of the time that C++'s take, are of double.
inline float abs(float x) { return fabsf(x); }
inline float ceil(float x) { return ceilf(x); }
inline float exp(float x) { return expf(x); }
inline float fabs(float x) { return fabsf(x); }
inline float floor(float x) { return floorf(x); }
inline float log(float x) { return logf(x); }
inline float sqrt(float x) { return sqrtf(x); }
inline float tanh(float x) { return tanhf(x); }
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

#pragma GCC visibility push(default)  // one runtime serves the libraries of all kernels

struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

extern dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_CLUSTER = 8, MAX_TOGETHER = 2560, MAX_COPIES = 1024, MAX_PRODUCTS = 64;
constexpr size_t STACK = 128 * 1024 + 256;  // a power of two would put all stacks into one set of the cache
constexpr size_t MAX_SHARED = 227 * 1024, GUARD = 1024;
constexpr unsigned char POISON = 0xff;  // in every byte: a NaN of each float type

#ifdef __x86_64__
struct Context { void** stack; };
#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
using Context = ucontext_t;
#endif

struct Where { const char* file; int line; };
constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

enum class State { Ready, AtBarrier, InCollective, Waiting, Returned };
using Operation = void (*)(void* const* operands);  // one operand a lane
using Condition = bool (*)(const void* operand);

struct Copy { void* dst; const void* src; int bytes; bool valid; int group; };

// One warp's wgmma. It is computed when it is waited for, which shows what came too early or too late.
struct Started {
  void (*multiply)(const Started&);
  int columns;
  bool transposed;
  float* d[WARP];
  unsigned a[WARP][4];        // or, of which the warp's rows:
  unsigned long long a_tile;  // 0 where there is none
  int first_row;
  unsigned long long b;
  bool accumulate;
  int group;
  Where where;
};
struct Products { Started started[MAX_PRODUCTS]; int count, groups; };

struct Thread {
  Context context;
  State state;
  const char* call;  // the barrier or collective it waits in
  Where where;
  Operation operation;
  Condition over;  // what ends its waiting
  void* operand;
  int copies_count, groups_count, stores_count;
};

extern Thread threads[MAX_TOGETHER];  // of a cluster, block by block
extern Copy copies[MAX_TOGETHER][MAX_COPIES];  // cp.async: started, not yet waited for
extern Products products[MAX_TOGETHER / WARP];
extern Thread* current;
extern size_t shared_bytes;
extern unsigned char shared_storage[MAX_CLUSTER][GUARD + MAX_SHARED + GUARD];
extern unsigned char* shared_memory;  // of the block that runs
extern int cluster, rank;  // blocks of a cluster, and which of them runs
extern int votes[MAX_CLUSTER];

void report(const char* format, ...);  // the launch ends with this message ...
void leave();  // ... when the scheduler runs again
void end_stores();  // what the thread stores by the copy engine arrives
#define EMULATOR_CHECK(condition, format, ...)                          \
  if (!(condition)) {                                                   \
    emulator::report("thread %u: " format, threadIdx.x, ##__VA_ARGS__); \
    emulator::leave();                                                  \
  }

// The thread that runs, of all threads of the cluster.
static int index() { return int(current - threads); }

void wait(State state, const char* call, Where where, Operation operation = nullptr, void* operand = nullptr);

// Waits for the whole warp; then `operation` runs once on the operands of the 32 lanes.
void collective(const char* call, Where where, Operation operation, void* operand);

// Waits for its turn after the operand meets `over`; threads of a warp need not wait together.
void wait_until(const char* call, Where where, Condition over, void* operand);

// Whether `bytes` at `pointer` lie in the block's shared memory, aligned to their number.
static bool in_shared(const void* pointer, size_t bytes) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - shared_memory;
  return offset % bytes == 0 && offset < shared_bytes && bytes <= shared_bytes - offset;
}

// ---- barriers of some warps -------------------------------------------------------------------------------

// threads: of the wait under way; times: how often it was over; some, any: what barrier_any has gathered, and had last;
// warps, before: bits of those that have come, and that came to the last wait, when the block had met `met` times
struct NamedBarrier { int threads, arrived, times; bool some, any; unsigned warps, before; int met; };
struct Arrival { int id, threads, times; };
extern NamedBarrier named_barriers[MAX_CLUSTER][16], cluster_barrier;

// A warp comes to a barrier.
void arrive(void* const* operands);
bool all_arrived(const void* operand);
bool cluster_arrived(const void* operand);

// The block of a cluster whose threads run from here on.
void enter(int block);

// ---- a launch ---------------------------------------------------------------------------------------------

// What a kernel's struct and its host's have, and the order of its blocks, and of the threads of even ones.
struct Sizes { size_t given, wanted; bool backwards, reversed; };
const char* launch(void (*entry)(), Sizes sizes, long long blocks, int count, size_t shared, int together);

}  // namespace emulator
#pragma GCC visibility pop

namespace emulator {

template <class Args> struct Call {
  static inline void (*kernel)(Args);
  alignas(Args) static inline unsigned char args[sizeof(Args)];
  static void run() {
    kernel(*reinterpret_cast<const Args*>(args));
    EMULATOR_CHECK(!current->stores_count, "returns while the copy engine may still read its shared memory");
    wait(State::Returned, nullptr, {});
  }
};

// Runs `blocks` blocks, from the last to the first at every second launch, as no order is promised; returns null or
// what went wrong.
template <class Args> const char* launch(void (*kernel)(Args), const void* args, size_t size,
                                         long long blocks, int count, size_t shared, int together) {
  static unsigned launches = 0;
  const bool backwards = launches % 2, reversed = launches / 2 % 2;
  ++launches;
  Call<Args>::kernel = kernel;
  memcpy(Call<Args>::args, args, size < sizeof(Args) ? size : sizeof(Args));
  return launch(Call<Args>::run, {size, sizeof(Args), backwards, reversed}, blocks, count, shared, together);
}

// ---- shuffles ---------------------------------------------------------------------------------------------

template <class T> struct Shuffle { T value; int source; T result; };

template <class T> void exchange(void* const* operands) {
  for (int lane = 0; lane < WARP; ++lane) {
    auto* mine = static_cast<Shuffle<T>*>(operands[lane]);
    mine->result = static_cast<Shuffle<T>*>(operands[mine->source])->value;
  }
}

template <class T> T shuffle(const char* call, unsigned mask, T value, int source, Where where) {
  EMULATOR_CHECK(mask == 0xffffffffu, "%s with mask %#x: only whole warps here", call, mask);
  const int lane = threadIdx.x % WARP;
  Shuffle<T> operand{value, source >= 0 && source < WARP ? source : lane, {}};
  collective(call, where, exchange<T>, &operand);
  return operand.result;
}

}  // namespace emulator

// ---- what CUDA C++ has built in ---------------------------------------------------------------------------

inline void __syncthreads(emulator::Where where = emulator::here()) {
  emulator::wait(emulator::State::AtBarrier, "__syncthreads", where);
}
inline int __syncthreads_or(int some, emulator::Where where = emulator::here()) {
  int& any = emulator::votes[emulator::rank];
  any |= some != 0;
  emulator::wait(emulator::State::AtBarrier, "__syncthreads_or", where);
  some = any;
  emulator::wait(emulator::State::AtBarrier, "__syncthreads_or", where);  // all have read it
  any = 0;
  emulator::wait(emulator::State::AtBarrier, "__syncthreads_or", where);  // before the next vote
  return some;
}
inline void __syncwarp(emulator::Where where = emulator::here()) {
  emulator::collective("__syncwarp", where, nullptr, nullptr);
}
template <class T> T __shfl_sync(unsigned mask, T value, int lane, emulator::Where where = emulator::here()) {
  return emulator::shuffle("__shfl_sync", mask, value, lane % emulator::WARP, where);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, emulator::Where where = emulator::here()) {
  return emulator::shuffle("__shfl_xor_sync", mask, value, int(threadIdx.x % emulator::WARP) ^ bits, where);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, int by, emulator::Where where = emulator::here()) {
  return emulator::shuffle("__shfl_up_sync", mask, value, int(threadIdx.x % emulator::WARP) - by, where);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, int by, emulator::Where where = emulator::here()) {
  return emulator::shuffle("__shfl_down_sync", mask, value, int(threadIdx.x % emulator::WARP) + by, where);
}
inline int __any_sync(unsigned mask, int some, emulator::Where where = emulator::here()) {
  some = some != 0;
  for (int bits = emulator::WARP / 2; bits > 0; bits /= 2) some |= __shfl_xor_sync(mask, some, bits, where);
  return some;
}

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline int __float2int_rn(float x) { return int(nearbyintf(x)); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selected) {
  const unsigned long long both = low | (unsigned long long)(high) << 32;
  unsigned y = 0;
  for (int byte = 0; byte < 4; ++byte) y |= unsigned(both >> 8 * (selected >> 4 * byte & 7) & 255) << 8 * byte;
  return y;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned __reduce_max_sync(unsigned mask, unsigned x, emulator::Where where = emulator::here()) {
  for (int bits = emulator::WARP / 2; bits > 0; bits /= 2) x = max(x, __shfl_xor_sync(mask, x, bits, where));
  return x;
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
