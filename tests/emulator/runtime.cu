// The emulator's part that is the same for every kernel: the scheduler, and products of matrices.
#include <sys/mman.h>

#include "ptx.cuh"
#include "wgmma.cuh"

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

Thread threads[MAX_TOGETHER];
Copy copies[MAX_TOGETHER][MAX_COPIES];
Products products[MAX_TOGETHER / WARP];
Load loads[MAX_CLUSTER][MAX_LOADS];
Store stores[MAX_TOGETHER][MAX_STORES];
int loads_count[MAX_CLUSTER];
Thread* current;
static bool reversed;      // whether even blocks, and not odd ones, have their threads in reverse
static int waiting_count;  // threads that are Waiting
static Context scheduler;
static char message[1024];
size_t shared_bytes;
alignas(1024) unsigned char shared_storage[MAX_CLUSTER][GUARD + MAX_SHARED + GUARD];
unsigned char* shared_memory;
int cluster, rank;
int votes[MAX_CLUSTER];

// ---- switching stacks -------------------------------------------------------------------------------------

#ifdef __x86_64__
// The registers a call preserves lie on top of the stack. The switch leaves by a jump: the processor predicts
// it, while a `ret` into another fiber always misses.

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

void report(const char* format, ...) {
  const int length = snprintf(message, sizeof message, "block %u: ", blockIdx.x);
  va_list values;
  va_start(values, format);
  vsnprintf(message + length, sizeof message - length, format, values);
  va_end(values);
}

void leave() { switch_stacks(current->context, scheduler); }

// What -fsanitize=alignment gives its handler.
struct Sanitized {
  const char* file;
  u32 line, column;
  const void* type;
  unsigned char log_alignment, access;
};

extern "C" __attribute__((visibility("default"))) void __ubsan_handle_type_mismatch_v1_abort(const Sanitized* found,
                                                                                             const void* place) {
  report("thread %u: %p is not aligned to %d bytes (%s:%u)", threadIdx.x, place, 1 << found->log_alignment, found->file,
         found->line);
  leave();
}

void end_stores() {
  for (int i = 0; i < current->stores_count; ++i) stores[index()][i].copy(stores[index()][i]);
  current->stores_count = 0;
}

void wait(State state, const char* call, Where where, Operation operation, void* operand) {
  Thread& self = *current;
  self.state = state;
  self.call = call;
  self.where = where;
  self.operation = operation;
  self.operand = operand;
  switch_stacks(self.context, scheduler);
}

void collective(const char* call, Where where, Operation operation, void* operand) {
  wait(State::InCollective, call, where, operation, operand);
}

void wait_until(const char* call, Where where, Condition over, void* operand) {
  current->over = over;
  ++waiting_count;
  wait(State::Waiting, call, where, nullptr, operand);
}

// ---- barriers of some warps -------------------------------------------------------------------------------

NamedBarrier named_barriers[MAX_CLUSTER][16], cluster_barrier;
static int meetings[MAX_CLUSTER];  // of all of a block's threads

void arrive(void* const* operands) {
  const Arrival& first = *static_cast<Arrival*>(operands[0]);
  NamedBarrier& barrier = named_barriers[rank][first.id];
  const unsigned warp = 1u << threadIdx.x / WARP;
  // On a card an instruction is illegal that asks for another number of threads than those who are still there.
  if (barrier.before && !(barrier.before & warp) && barrier.met == meetings[rank])
    return report(
        "thread %u: named_barrier_sync(%d, %d) where other warps may be in the barrier: all have not met since",
        threadIdx.x / WARP * WARP, first.id, first.threads);
  if (!barrier.arrived) barrier.threads = first.threads;
  for (int lane = 0; lane < WARP; ++lane) {
    Arrival& own = *static_cast<Arrival*>(operands[lane]);
    own.times = barrier.times;
    if (own.id != first.id || own.threads != barrier.threads)
      return report("thread %u: named_barrier_sync(%d, %d) while others are in named_barrier_sync(%d, %d)",
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

bool all_arrived(const void* operand) {
  const Arrival& own = *static_cast<const Arrival*>(operand);
  return named_barriers[rank][own.id].times != own.times;
}

bool cluster_arrived(const void* operand) { return cluster_barrier.times != *static_cast<const int*>(operand); }

// ---- the scheduler ----------------------------------------------------------------------------------------

void enter(int block) {
  blockIdx.x += block - rank;
  rank = block;
  shared_memory = shared_storage[block] + GUARD;
}

static void describe(const Thread& thread, char* out, size_t size) {
  const int index = int(&thread - threads) % blockDim.x;
  if (thread.state == State::Returned) snprintf(out, size, "thread %d has returned", index);
  else snprintf(out, size, "thread %d waits in %s (%s:%d)", index, thread.call, thread.where.file, thread.where.line);
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
  const int reverse = blockIdx.x % 2 != reversed ? WARP - 1 : 0;
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
      const Turn turn = run_warp(own + WARP * (blockIdx.x % 2 != reversed ? warps - 1 - i : i));
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
  memset(loads_count, 0, sizeof loads_count);
  for (int i = 0; i < cluster * count / WARP; ++i) products[i].count = products[i].groups = 0;
  waiting_count = 0;
  for (int i = 0; i < cluster * count; ++i) {
    threads[i].state = State::Ready;
    threads[i].copies_count = threads[i].groups_count = threads[i].stores_count = 0;
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

// Of all threads that may run together: the same pages for every launch.
static unsigned char* stacks() {
  static void* const all =
      mmap(nullptr, MAX_TOGETHER * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return static_cast<unsigned char*>(all);
}

const char* launch(void (*entry)(), Sizes sizes, long long blocks, int count, size_t shared, int together) {
  message[0] = 0;
  blockIdx = {0, 0, 0};
  if (sizes.given != sizes.wanted)
    report("args have %zu bytes, the kernel's struct has %zu", sizes.given, sizes.wanted);
  if (count < WARP || count > MAX_THREADS || count % WARP) report("%d threads, not 32, 64, ... 1024", count);
  if (together > MAX_CLUSTER || count * together > MAX_TOGETHER || blocks % together)
    report("%lld blocks in clusters of %d", blocks, together);
  if (shared > MAX_SHARED) report("%zu bytes of shared memory, more than %zu", shared, MAX_SHARED);
  if (message[0]) return message;

  shared_bytes = shared;
  cluster = together, rank = 0;
  blockDim = {unsigned(count), 1, 1};
  gridDim = {unsigned(blocks), 1, 1};
  reversed = sizes.reversed;
  const unsigned before = flush_denormals();
  for (long long n = 0; n < blocks && !message[0]; n += cluster) {
    blockIdx.x = unsigned(sizes.backwards ? blocks - cluster - n : n);
    run_cluster(stacks(), entry);
  }
  restore_denormals(before);
  return message[0] ? message : nullptr;
}

// ---- products ---------------------------------------------------------------------------------------------

typedef float Four __attribute__((vector_size(16)));

// Whether products are added exactly and the sum is cut off, as tensor cores do, instead of rounded after each product.
extern "C" __attribute__((visibility("default"))) bool cuts_off_sums;
bool cuts_off_sums = false;

float cut_off(double x) {
  const float rounded = x;
  return fabs(rounded) > fabs(x) ? nextafterf(rounded, 0) : rounded;
}

// Adds K products to each of eight sums: those of a row of A and as many rows of B, which lie `stride` floats apart.
template <int K> void multiply_row(float* sums, const float* a, const float* b, int stride) {
  if (cuts_off_sums) {
    for (int n = 0; n < 8; ++n) {
      double sum = sums[n];
      for (int k = 0; k < K; ++k) sum += double(a[k]) * b[k * stride + n];
      sums[n] = cut_off(sum);
    }
    return;
  }
  Four low, high, x, y;
  memcpy(&low, sums, sizeof low);
  memcpy(&high, sums + 4, sizeof high);
  for (int k = 0; k < K; ++k, b += stride) {
    memcpy(&x, b, sizeof x);
    memcpy(&y, b + 4, sizeof y);
    low += a[k] * x;
    high += a[k] * y;
  }
  memcpy(sums, &low, sizeof low);
  memcpy(sums + 4, &high, sizeof high);
}

// A lane's part of A, as mma and wgmma take it.
template <class T> void put_rows(float (&A)[16][Format<T>::DEPTH], int lane, const u32* a) {
  constexpr int P = Format<T>::PACKED, K = Format<T>::DEPTH;
  const int g = lane / 4, t = lane % 4;
  for (int i = 0; i < P; ++i)
    for (int r = 0; r < 4; ++r) A[g + r % 2 * 8][t * P + i + r / 2 * (K / 2)] = Format<T>::value(a[r], i);
}

template <class T> void multiply(void* const* operands) {
  constexpr int P = Format<T>::PACKED, K = Format<T>::DEPTH;
  float A[16][K], B[K][8], D[16][8];
  for (int lane = 0; lane < WARP; ++lane) {
    const Product& own = *static_cast<Product*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    put_rows<T>(A, lane, own.a);
    for (int i = 0; i < P; ++i)
      for (int r = 0; r < 2; ++r) B[t * P + i + r * (K / 2)][g] = Format<T>::value(own.b[r], i);
    for (int r = 0; r < 4; ++r) D[g + r / 2 * 8][t * 2 + r % 2] = own.d[r];
  }
  for (int row = 0; row < 16; ++row) multiply_row<K>(D[row], A[row], B[0], 8);
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int r = 0; r < 4; ++r) static_cast<Product*>(operands[lane])->d[r] = D[g + r / 2 * 8][t * 2 + r % 2];
  }
}

void multiply_tf32(void* const* operands) { multiply<tf32>(operands); }
void multiply_bf16(void* const* operands) { multiply<bf16>(operands); }
void multiply_f16(void* const* operands) { multiply<f16>(operands); }

void multiply_integers(void* const* operands) {
  i32 A[16][32], B[32][8];
  for (int lane = 0; lane < WARP; ++lane) {
    const IntegerProduct& own = *static_cast<IntegerProduct*>(operands[lane]);
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; ++i) {
      for (int r = 0; r < 4; ++r) A[g + r % 2 * 8][t * 4 + i + r / 2 * 16] = i8(own.a[r] >> 8 * i);
      for (int r = 0; r < 2; ++r) B[t * 4 + i + r * 16][g] = i8(own.b[r] >> 8 * i);
    }
  }
  for (int lane = 0; lane < WARP; ++lane)
    for (int r = 0; r < 4; ++r)
      for (int k = 0; k < 32; ++k)
        static_cast<IntegerProduct*>(operands[lane])->d[r] += A[lane / 4 + r / 2 * 8][k] * B[k][lane % 4 * 2 + r % 2];
}

template <bool TRANSPOSED> void load_matrices(void* const* operands) {
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int m = 0; m < 4; ++m) {
      auto value = [&](int i, int j) { return u32(static_cast<MatrixRow*>(operands[m * 8 + i])->row[j]); };
      static_cast<MatrixRow*>(operands[lane])->r[m] =
          TRANSPOSED ? value(2 * t, g) | value(2 * t + 1, g) << 16 : value(g, 2 * t) | value(g, 2 * t + 1) << 16;
    }
  }
}

template <bool TRANSPOSED> void store_matrices(void* const* operands) {
  for (int lane = 0; lane < WARP; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int m = 0; m < 4; ++m)
      for (int i = 0; i < 2; ++i) {
        const u16 value = u16(static_cast<MatrixRow*>(operands[lane])->r[m] >> 16 * i);
        if (TRANSPOSED) static_cast<MatrixRow*>(operands[m * 8 + 2 * t + i])->row[g] = value;
        else static_cast<MatrixRow*>(operands[m * 8 + g])->row[2 * t + i] = value;
      }
  }
}

void load_matrices(void* const* operands) { load_matrices<false>(operands); }
void load_matrices_trans(void* const* operands) { load_matrices<true>(operands); }
void store_matrices(void* const* operands) { store_matrices<false>(operands); }
void store_matrices_trans(void* const* operands) { store_matrices<true>(operands); }

template <class T> void multiply_tile(const Started& product) {
  using F = Format<T>;
  constexpr int K = F::DEPTH, BYTES = 4 / F::PACKED, PIECE = 16 / BYTES, WIDEST = 256;
  const int N = product.columns;
  const u32 tile = (product.b & 0x3fff) << 4, leading = (product.b >> 16 & 0x3fff) << 4,
            stride = (product.b >> 32 & 0x3fff) << 4;
  float A[16][K], B[K][WIDEST], piece[PIECE];
  const auto read = [&](u32 at) {  // 16 bytes, which swizzles leave together
    const u32 swizzled = at ^ (at >> 3 & 0x70);
    if (swizzled + 16 > shared_bytes)
      return report("wgmma reads byte %u of %zu bytes of shared memory (%s:%d)", swizzled, shared_bytes,
                    product.where.file, product.where.line);
    for (int i = 0; i < PIECE; ++i) {
      u32 bits = 0;
      memcpy(&bits, shared_memory + swizzled + i * BYTES, BYTES);
      piece[i] = F::value(bits, 0);
    }
  };
  if (product.a_tile)
    for (int row = 0; row < 16; ++row)
      for (int k = 0; k < K; k += PIECE) {
        read(((product.a_tile & 0x3fff) << 4) + (product.first_row + row) / 8 * ((product.a_tile >> 32 & 0x3fff) << 4) +
             row % 8 * 128 + k * BYTES);
        memcpy(A[row] + k, piece, sizeof piece);
      }
  else
    for (int lane = 0; lane < WARP; ++lane) put_rows<T>(A, lane, product.a[lane]);
  if (product.transposed)
    for (int k = 0; k < K; ++k)
      for (int n = 0; n < N; n += PIECE) {
        read(tile + k / 8 * stride + k % 8 * 128 + n / 64 * leading + n % 64 * BYTES);
        memcpy(B[k] + n, piece, sizeof piece);
      }
  else
    for (int n = 0; n < N; ++n)
      for (int k = 0; k < K; k += PIECE) {
        read(tile + n / 8 * stride + n % 8 * 128 + k * BYTES);
        for (int i = 0; i < PIECE; ++i) B[k + i][n] = piece[i];
      }
  for (int row = 0; row < 16; ++row)
    for (int n = 0; n < N; n += 8) {
      float sums[8] = {};
      auto own = [&](int i) -> float& { return product.d[row % 8 * 4 + i / 2][n / 2 + row / 8 * 2 + i % 2]; };
      if (product.accumulate)
        for (int i = 0; i < 8; ++i) sums[i] = own(i);
      multiply_row<K>(sums, A[row], B[0] + n, WIDEST);
      for (int i = 0; i < 8; ++i) own(i) = sums[i];
    }
}

void multiply_tile_tf32(const Started& product) { multiply_tile<tf32>(product); }
void multiply_tile_bf16(const Started& product) { multiply_tile<bf16>(product); }
void multiply_tile_f16(const Started& product) { multiply_tile<f16>(product); }

void start(void* const* operands) {
  Products& own = products[index() / WARP];
  const TileProduct& first = *static_cast<TileProduct*>(operands[0]);
  if (own.count == MAX_PRODUCTS)
    return report("more than %d wgmma under way (%s:%d)", MAX_PRODUCTS, first.where.file, first.where.line);
  Started& product = own.started[own.count++];
  const int first_row = int(threadIdx.x / WARP % 4 * 16);
  product = {first.multiply, first.columns, first.transposed, {},         {},         first.a_tile,
             first_row,      first.b,       first.accumulate, own.groups, first.where};
  for (int lane = 0; lane < WARP; ++lane) {
    const TileProduct& operand = *static_cast<TileProduct*>(operands[lane]);
    if (operand.b != first.b || operand.a_tile != first.a_tile || operand.accumulate != first.accumulate)
      return report("the lanes of a warp give wgmma different tiles (%s:%d)", first.where.file, first.where.line);
    product.d[lane] = operand.d;
    if (operand.a) memcpy(product.a[lane], operand.a, sizeof product.a[lane]);
  }
}

}  // namespace emulator
