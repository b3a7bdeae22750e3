// Runs a CUDA kernel on the CPU, for tests. A block's threads are fibers on one core, so that a barrier is a
// switch of stacks and a warp collective runs once for all 32 lanes. Blocks run in turn, odd ones with their
// threads in reverse, which shows a missing barrier in one direction or the other; those of a cluster run by
// turns. Arithmetic flushes denormals, as CuPy's compiler option does. What the hardware would leave undefined
// ends the launch with a message instead.
//
// Only dynamic shared memory exists: `__shared__` is left undefined because a C++ static could be neither
// poisoned before each block nor checked for its bounds.
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#define __global__
#define __device__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };

static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

constexpr int WARP = 32, MAX_THREADS = 1024, MAX_CLUSTER = 8, MAX_TOGETHER = 2560, MAX_COPIES = 1024, MAX_PRODUCTS = 64;
constexpr size_t STACK = 128 * 1024 + 256;  // a power of two would put all stacks into one set of the cache
constexpr size_t MAX_SHARED = 227 * 1024, GUARD = 1024;
constexpr unsigned char POISON = 0xff;  // in every byte: a NaN of each float type

// ---- switching stacks -------------------------------------------------------------------------------------

#ifdef __x86_64__
// The registers a call preserves lie on top of the stack. The switch leaves by a jump: the processor predicts
// it, while a `ret` into another fiber always misses.
struct Context { void** stack; };

extern "C" void emulator_switch(Context* from, Context to);
asm(R"(
.text
emulator_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  pop %rcx
  jmp *%rcx
)");

static void switch_stacks(Context& from, Context& to) { emulator_switch(&from, to); }

static void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + STACK);
  top[-2] = reinterpret_cast<void*>(entry);  // where the switch jumps, the stack then aligned as after a call
  context.stack = top - 8;
}

static unsigned flush_denormals() {
  const unsigned before = __builtin_ia32_stmxcsr();
  __builtin_ia32_ldmxcsr(before | 0x8040);
  return before;
}
static void restore_denormals(unsigned before) { __builtin_ia32_ldmxcsr(before); }
#else
}  // namespace emulator
#include <ucontext.h>
namespace emulator {
using Context = ucontext_t;

static void switch_stacks(Context& from, Context& to) { swapcontext(&from, &to); }

static void prepare(Context& context, unsigned char* stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = STACK;
  makecontext(&context, entry, 0);
}

static unsigned flush_denormals() { return 0; }
static void restore_denormals(unsigned) {}
#endif

// ---- threads ----------------------------------------------------------------------------------------------

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
  int copies_count, groups_count;
};

static Thread threads[MAX_TOGETHER];  // of a cluster, block by block
static Copy copies[MAX_TOGETHER][MAX_COPIES];  // cp.async: started, not yet waited for
static Products products[MAX_TOGETHER / WARP];
static Thread* current;
static int waiting_count;  // threads that are Waiting
static Context scheduler;
static char message[1024];
static size_t shared_bytes;
alignas(1024) static unsigned char shared_storage[MAX_CLUSTER][GUARD + MAX_SHARED + GUARD];
static unsigned char* shared_memory;  // of the block that runs
static int cluster, rank;  // blocks of a cluster, and which of them runs
static int votes[MAX_CLUSTER];

static void report(const char* format, ...) {
  const int length = snprintf(message, sizeof message, "block %u: ", blockIdx.x);
  va_list values;
  va_start(values, format);
  vsnprintf(message + length, sizeof message - length, format, values);
  va_end(values);
}

// The thread that runs, of all threads of the cluster.
static int index() { return int(current - threads); }

#define EMULATOR_CHECK(condition, format, ...)                                \
  if (!(condition)) {                                                         \
    emulator::report("thread %u: " format, threadIdx.x, ##__VA_ARGS__);       \
    emulator::switch_stacks(emulator::current->context, emulator::scheduler); \
  }

static void wait(State state, const char* call, Where where, Operation operation = nullptr,
                 void* operand = nullptr) {
  Thread& self = *current;
  self.state = state;
  self.call = call;
  self.where = where;
  self.operation = operation;
  self.operand = operand;
  switch_stacks(self.context, scheduler);
}

// Waits for the whole warp; then `operation` runs once on the operands of the 32 lanes.
static void collective(const char* call, Where where, Operation operation, void* operand) {
  wait(State::InCollective, call, where, operation, operand);
}

// Waits for its turn after the operand meets `over`; threads of a warp need not wait together.
static void wait_until(const char* call, Where where, Condition over, void* operand) {
  current->over = over;
  ++waiting_count;
  wait(State::Waiting, call, where, nullptr, operand);
}

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
static NamedBarrier named_barriers[MAX_CLUSTER][16], cluster_barrier;
static int meetings[MAX_CLUSTER];  // of all of a block's threads

// A warp comes to a barrier.
static void arrive(void* const* operands) {
  const Arrival& first = *static_cast<Arrival*>(operands[0]);
  NamedBarrier& barrier = named_barriers[rank][first.id];
  const unsigned warp = 1u << threadIdx.x / WARP;
  // On a card an instruction is illegal that asks for another number of threads than those who are still there.
  if (barrier.before && !(barrier.before & warp) && barrier.met == meetings[rank])
    return report("thread %u: barrier_sync(%d, %d) where other warps may be in the barrier: all have not met since",
                  threadIdx.x / WARP * WARP, first.id, first.threads);
  if (!barrier.arrived) barrier.threads = first.threads;
  for (int lane = 0; lane < WARP; ++lane) {
    Arrival& own = *static_cast<Arrival*>(operands[lane]);
    own.times = barrier.times;
    if (own.id != first.id || own.threads != barrier.threads)
      return report("thread %u: barrier_sync(%d, %d) while others are in barrier_sync(%d, %d)",
                    threadIdx.x / WARP * WARP + lane, own.id, own.threads, first.id, barrier.threads);
  }
  barrier.arrived += WARP;
  barrier.warps |= warp;
  if (barrier.arrived < barrier.threads) return;
  barrier.before = barrier.warps, barrier.met = meetings[rank];
  meetings[rank] += barrier.threads == int(blockDim.x);
  barrier.arrived = barrier.warps = 0;
  ++barrier.times;
  barrier.any = barrier.some;
  barrier.some = false;
}

static bool all_arrived(const void* operand) {
  const Arrival& own = *static_cast<const Arrival*>(operand);
  return named_barriers[rank][own.id].times != own.times;
}

static bool cluster_arrived(const void* operand) {
  return cluster_barrier.times != *static_cast<const int*>(operand);
}

// ---- the scheduler ----------------------------------------------------------------------------------------

// The block of a cluster whose threads run from here on.
static void enter(int block) {
  blockIdx.x += block - rank;
  rank = block;
  shared_memory = shared_storage[block] + GUARD;
}

static void describe(const Thread& thread, char* out, size_t size) {
  const int index = int(&thread - threads) % blockDim.x;
  if (thread.state == State::Returned)
    snprintf(out, size, "thread %d has returned", index);
  else
    snprintf(out, size, "thread %d waits in %s (%s:%d)", index, thread.call, thread.where.file,
             thread.where.line);
}

// Whether `count` threads wait in the same call at the same line as `one`.
static bool all_wait_with(const Thread& one, const Thread* group, int count) {
  for (const Thread* other = group; other < group + count; ++other) {
    if (other->state == one.state && other->operation == one.operation && other->where.line == one.where.line &&
        (other->where.file == one.where.file || !strcmp(other->where.file, one.where.file)))
      continue;
    char first[400], second[400];
    describe(one, first, sizeof first);
    describe(*other, second, sizeof second);
    report("%s, but %s", first, second);
    return false;
  }
  return true;
}

// Says where each run of threads waits.
static void report_deadlock(const Thread* own, int count) {
  char all[800];
  size_t length = 0;
  for (const Thread* thread = own; thread < own + count && length < sizeof all; ++thread) {
    const Thread* before = thread - 1;
    if (thread != own && thread->state == before->state &&
        (thread->state == State::Returned || thread->where.line == before->where.line))
      continue;
    char one[400];
    describe(*thread, one, sizeof one);
    length += snprintf(all + length, sizeof all - length, "%s%s", length ? ", " : "", one);
  }
  report("nobody can go on: %s", all);
}

static Thread* find(State state, Thread* group, int count) {
  for (Thread* thread = group; thread < group + count; ++thread)
    if (thread->state == state) return thread;
  return nullptr;
}

static void resume(Thread& thread) {
  current = &thread;
  threadIdx.x = unsigned(&thread - threads) % blockDim.x;
  switch_stacks(scheduler, thread.context);
}

enum class Turn { Idle, Ran, Failed };

// Runs a warp until each of its threads waits for another warp or has returned.
static Turn run_warp(Thread* lanes) {
  const int reverse = blockIdx.x % 2 ? WARP - 1 : 0;
  for (Turn turn = Turn::Idle;; turn = Turn::Ran) {
    for (int i = 0; i < WARP; ++i) {
      Thread& lane = lanes[i ^ reverse];
      if (lane.state == State::Waiting && lane.over(lane.operand)) {
        lane.state = State::Ready;
        --waiting_count;
      }
      if (lane.state != State::Ready) continue;
      turn = Turn::Ran;
      resume(lane);
      if (message[0]) return Turn::Failed;
    }
    const Thread* waiting = find(State::InCollective, lanes, WARP);
    if (!waiting || waiting_count && find(State::Waiting, lanes, WARP)) return turn;
    if (!all_wait_with(*waiting, lanes, WARP)) return Turn::Failed;
    void* operands[WARP];
    for (int i = 0; i < WARP; ++i) {
      operands[i] = lanes[i].operand;
      lanes[i].state = State::Ready;
    }
    if (waiting->operation) waiting->operation(operands);
    if (message[0]) return Turn::Failed;
  }
}

static void check_guards() {
  for (size_t i = 0; i < GUARD; ++i) {
    if (shared_memory[i - GUARD] != POISON) return report("wrote %zu bytes before its shared memory", GUARD - i);
    if (shared_memory[shared_bytes + i] != POISON)
      return report("wrote to byte %zu of %zu bytes of shared memory", shared_bytes + i, shared_bytes);
  }
}

// Runs a block until each of its threads waits for the cluster's other block or has returned.
static Turn run_block(Thread* own) {
  const int count = blockDim.x, warps = count / WARP;
  for (Turn all = Turn::Idle;;) {
    bool ran = false;
    for (int i = 0; i < warps; ++i) {
      const Turn turn = run_warp(own + WARP * (blockIdx.x % 2 ? warps - 1 - i : i));
      if (turn == Turn::Failed) return turn;
      ran |= turn == Turn::Ran;
    }
    if (ran) all = Turn::Ran;
    const bool waits = waiting_count && find(State::Waiting, own, count);
    if (waits && ran) continue;
    const Thread* waiting = find(State::AtBarrier, own, count);
    if (waits || !waiting) return all;
    if (!all_wait_with(*waiting, own, count)) return Turn::Failed;
    for (int i = 0; i < count; ++i) own[i].state = State::Ready;
    ++meetings[rank];
  }
}

// Runs the blocks of a cluster from blockIdx on.
static void run_cluster(unsigned char* stacks, void (*entry)()) {
  const int count = blockDim.x;
  memset(named_barriers, 0, sizeof named_barriers);
  cluster_barrier = {};
  memset(votes, 0, sizeof votes);
  memset(meetings, 0, sizeof meetings);
  for (int i = 0; i < cluster * count / WARP; ++i) products[i].count = products[i].groups = 0;
  waiting_count = 0;
  for (int i = 0; i < cluster * count; ++i) {
    threads[i].state = State::Ready;
    threads[i].copies_count = threads[i].groups_count = 0;
    prepare(threads[i].context, stacks + i * STACK, entry);
  }
  for (int block = 0; block < cluster; ++block) memset(shared_storage[block], POISON, GUARD + shared_bytes + GUARD);
  for (bool ran = true; ran;) {
    ran = false;
    for (int block = 0; block < cluster; ++block) {
      enter(block);
      const Turn turn = run_block(threads + block * count);
      if (turn == Turn::Failed) return;
      ran |= turn == Turn::Ran;
    }
  }
  for (int block = 0; block < cluster && !message[0]; ++block) {
    enter(block);
    if (waiting_count) report_deadlock(threads + block * count, count);
    else check_guards();
  }
  enter(0);
}

template <class Args> struct Call {
  static inline void (*kernel)(Args);
  static inline const Args* args;
  static void run() {
    kernel(*args);
    wait(State::Returned, nullptr, {});
  }
};

// Runs `blocks` blocks, from the last to the first at every second launch, as no order is promised; returns null or
// what went wrong.
template <class Args> const char* launch(void (*kernel)(Args), const void* args, size_t size,
                                         long long blocks, int count, size_t shared, int together) {
  message[0] = 0;
  blockIdx = {0, 0, 0};
  if (size != sizeof(Args)) report("args have %zu bytes, the kernel's struct has %zu", size, sizeof(Args));
  if (count < WARP || count > MAX_THREADS || count % WARP) report("%d threads, not 32, 64, ... 1024", count);
  if (together > MAX_CLUSTER || count * together > MAX_TOGETHER || blocks % together)
    report("%lld blocks in clusters of %d", blocks, together);
  if (shared > MAX_SHARED) report("%zu bytes of shared memory, more than %zu", shared, MAX_SHARED);
  if (message[0]) return message;

  Call<Args>::kernel = kernel;
  Call<Args>::args = static_cast<const Args*>(args);
  shared_bytes = shared;
  cluster = together, rank = 0;
  blockDim = {unsigned(count), 1, 1};
  gridDim = {unsigned(blocks), 1, 1};
  const size_t room = count * cluster * STACK;
  void* stacks = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  const unsigned before = flush_denormals();
  static bool backwards = true;
  backwards = !backwards;
  for (long long n = 0; n < blocks && !message[0]; n += cluster) {
    blockIdx.x = unsigned(backwards ? blocks - cluster - n : n);
    run_cluster(static_cast<unsigned char*>(stacks), Call<Args>::run);
  }
  restore_denormals(before);
  munmap(stacks, room);
  return message[0] ? message : nullptr;
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
inline int __float2int_rn(float x) { return int(std::nearbyint(x)); }

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
