// The CPU twin of kernels_cu/include/ptx.cuh: the same names and types, as the PTX manual defines them.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

struct bf16 {
  u16 bits;
};
struct f16 {
  u16 bits;
};
typedef signed char i8;
struct tf32 {};
#define OFFSET_OF(type, member) __builtin_offsetof(type, member)

// ---- conversions ------------------------------------------------------------------------------------------

inline float to_float(float x) { return x; }

inline float to_float(bf16 x) { return __uint_as_float(u32(x.bits) << 16); }

inline float to_float(f16 x) {
  _Float16 half;
  memcpy(&half, &x, sizeof half);
  return float(half);
}

template <typename T> T from_float(float x);

template <> inline float from_float<float>(float x) { return x; }

template <> inline bf16 from_float<bf16>(float x) {
  const u32 bits = __float_as_uint(x);
  if (x != x) return {0x7fff};
  return {u16((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <> inline f16 from_float<f16>(float x) {
  if (x != x) return {0x7fff};
  const _Float16 half = x;
  f16 y;
  memcpy(&y, &half, sizeof y);
  return y;
}

inline u32 to_tf32(float x) {
  if (x != x) return 0x7fffffff;
  return (__float_as_uint(x) + 0x1000) & ~0x1fffu;
}

template <typename T> u32 pack(float low, float high) {
  return u32(from_float<T>(low).bits) | u32(from_float<T>(high).bits) << 16;
}

inline u32 bf16_of_i8(u32 two) { return pack<bf16>(float(i8(two)), float(i8(two >> 8))); }

inline u32 fma_bf16(u32 x, u32 y, u32 z) {
  const auto of = [](u32 x, u32 y, u32 z) {
    const auto value = [](u32 bits) { return double(__uint_as_float(bits << 16)); };
    return float(value(x) * value(y) + value(z));
  };
  return pack<bf16>(of(x, y, z), of(x >> 16, y >> 16, z >> 16));
}

inline u32 mul_f16(u32 x, u32 y) {
  const auto value = [](u32 bits) { return to_float(f16{u16(bits)}); };
  return pack<f16>(value(x) * value(y), value(x >> 16) * value(y >> 16));
}

inline u32 larger_magnitudes_of_halves(u32 a, u32 b) {
  const auto of = [](u32 a, u32 b) { return (a & 0x7fff) > (b & 0x7fff) ? a & 0x7fff : b & 0x7fff; };
  return of(a, b) | of(a >> 16, b >> 16) << 16;
}

inline u32 max_of_each_half(u32 a, u32 b) {
  const auto of = [](short a, short b) { return u32(u16(a > b ? a : b)); };
  return of(short(a), short(b)) | of(short(a >> 16), short(b >> 16)) << 16;
}

inline float inverse(float x) { return 1.f / x; }
inline float inverse_root(float x) { return 1.f / sqrtf(x); }

inline float exp2_approx(float x) {
  const float y = exp2f(x);
  return y < 0x1p-126f ? 0 : y;
}

inline float log2_approx(float x) { return log2f(x); }

inline float max_nan(float x, float least) { return x < least ? least : x; }

template <typename T> u32 max_nan(u32 x, u32 least) {
  const auto of = [&](int shift) { return max_nan(to_float(T{u16(x >> shift)}), to_float(T{u16(least >> shift)})); };
  return pack<T>(of(0), of(16));
}

inline void hide_origin(int&) {}
inline void hide_origin(u64&) {}
inline u32 copy_of(float x) { return __float_as_uint(x); }
inline int opaque(int x) { return x; }

// ---- warp: matrix products and reductions -----------------------------------------------------------------

namespace emulator {

#pragma GCC visibility push(default)
void multiply_tf32(void* const* operands);
void multiply_bf16(void* const* operands);
void multiply_f16(void* const* operands);
void multiply_integers(void* const* operands);
void load_matrices(void* const* operands);
void load_matrices_trans(void* const* operands);
void store_matrices(void* const* operands);
void store_matrices_trans(void* const* operands);
void multiply_tile_tf32(const Started& product);
void multiply_tile_bf16(const Started& product);
void multiply_tile_f16(const Started& product);
#pragma GCC visibility pop

// How a 32-bit operand register holds values: PACKED of them, and tiles are DEPTH of them deep. What multiplies them.
template <class T> struct Format;
template <> struct Format<tf32> {
  static constexpr int PACKED = 1, DEPTH = 8;
  static constexpr auto multiply = multiply_tf32;
  static constexpr auto multiply_tile = multiply_tile_tf32;
  static float value(u32 bits, int) { return __uint_as_float(bits & ~0x1fffu); }
};
template <class T> struct Packed {
  static constexpr int PACKED = 2, DEPTH = 16;
  static float value(u32 bits, int i) { return to_float(T{u16(bits >> 16 * i)}); }
};
template <> struct Format<bf16> : Packed<bf16> {
  static constexpr auto multiply = multiply_bf16;
  static constexpr auto multiply_tile = multiply_tile_bf16;
};
template <> struct Format<f16> : Packed<f16> {
  static constexpr auto multiply = multiply_f16;
  static constexpr auto multiply_tile = multiply_tile_f16;
};

struct Product {
  float* d;
  const u32* a;
  const u32* b;
};
struct IntegerProduct {
  i32* d;
  const u32* a;
  const u32* b;
};

struct MatrixRow {
  u32* r;
  u16* row;
};

static void matrix_collective(const char* call, u32* r, const void* row, Operation operation, Where where) {
  EMULATOR_CHECK(in_shared(row, 16), "%s of a row not aligned to 16 bytes or not in shared memory (%s:%d)", call,
                 where.file, where.line);
  MatrixRow operand{r, static_cast<u16*>(const_cast<void*>(row))};
  collective(call, where, operation, &operand);
}

template <class T> void multiply_own(const char* call, float* d, const u32* a, const u32* b, Where where) {
  Product operand{d, a, b};
  collective(call, where, Format<T>::multiply, &operand);
}

}  // namespace emulator

inline void mma_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], emulator::Where where = emulator::here()) {
  emulator::multiply_own<tf32>("mma_tf32", d, a, b, where);
}

template <typename T>
inline void mma_m16n8k16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], T,
                         emulator::Where where = emulator::here()) {
  emulator::multiply_own<T>("mma_m16n8k16", d, a, b, where);
}

inline void mma_f16_plus(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], const float (&c)[4],
                         emulator::Where where = emulator::here()) {
  for (int i = 0; i < 4; ++i) d[i] = c[i];
  mma_m16n8k16(d, a, b, f16{}, where);
}

template <typename T>
inline void mma_m16n8k8(float (&d)[4], const u32 (&a)[2], u32 b, T, emulator::Where where = emulator::here()) {
  mma_m16n8k16(d, {a[0], a[1], 0, 0}, {b, 0}, T{}, where);
}

inline void mma_i8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2], emulator::Where where = emulator::here()) {
  emulator::IntegerProduct operand{d, a, b};
  emulator::collective("mma_i8", where, emulator::multiply_integers, &operand);
}

inline void ldmatrix_x4(u32 (&r)[4], const void* row, emulator::Where where = emulator::here()) {
  emulator::matrix_collective("ldmatrix_x4", r, row, emulator::load_matrices, where);
}

inline void ldmatrix_x4_flipped(u32 (&r)[4], const void* at, int flip, int offset,
                                emulator::Where where = emulator::here()) {
  const u64 place = static_cast<const unsigned char*>(at) - emulator::shared_memory;
  ldmatrix_x4(r, emulator::shared_memory + (place ^ flip) + offset, where);
}

inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, emulator::Where where = emulator::here()) {
  emulator::matrix_collective("ldmatrix_x4_trans", r, row, emulator::load_matrices_trans, where);
}

inline u32 transpose_pairs(u32 x, emulator::Where where = emulator::here()) {
  const u32 lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  u32 pair = 0;
  for (u32 half = 0; half < 2; ++half) {
    const u32 row = __shfl_sync(0xffffffffu, x, (2 * t + half) * 4 + g / 2, where);
    pair |= (row >> g % 2 * 16 & 0xffff) << half * 16;
  }
  return pair;
}

// ---- shared memory ----------------------------------------------------------------------------------------

inline unsigned char* dynamic_smem() { return emulator::shared_memory; }

// The destination holds poison until the wait, so that reading it too early shows.
inline void store_if(bool wanted, void* to, uint2 x, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(!wanted || emulator::in_shared(to, 8),
                 "store_if to a place not aligned or not in shared memory (%s:%d)", where.file, where.line);
  if (wanted) *static_cast<uint2*>(to) = x;
}

inline void store_flipped(void* at, int flip, int offset, uint2 x, emulator::Where where = emulator::here()) {
  const u64 place = static_cast<unsigned char*>(at) - emulator::shared_memory;
  store_if(true, emulator::shared_memory + (place ^ flip) + offset, x, where);
}

inline void store_flipped(void* at, int flip, int offset, u32 x, emulator::Where where = emulator::here()) {
  const u64 place = static_cast<unsigned char*>(at) - emulator::shared_memory;
  u32* const to = reinterpret_cast<u32*>(emulator::shared_memory + (place ^ flip) + offset);
  EMULATOR_CHECK(emulator::in_shared(to, 4), "store_flipped to a place not aligned or not in shared memory (%s:%d)",
                 where.file, where.line);
  *to = x;
}

template <int BYTES>
void cp_async(void* smem_dst, const void* gmem_src, bool valid = true, emulator::Where where = emulator::here()) {
  static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16, "cp.async copies 4, 8 or 16 bytes");
  emulator::Thread& self = *emulator::current;
  EMULATOR_CHECK(emulator::in_shared(smem_dst, BYTES),
                 "cp_async to %d bytes not aligned or not in shared memory (%s:%d)", BYTES, where.file, where.line);
  EMULATOR_CHECK(reinterpret_cast<u64>(gmem_src) % BYTES == 0, "cp_async of %d bytes from a source not aligned (%s:%d)",
                 BYTES, where.file, where.line);
  EMULATOR_CHECK(self.copies_count < emulator::MAX_COPIES, "more than %d cp_async under way (%s:%d)",
                 emulator::MAX_COPIES, where.file, where.line);
  memset(smem_dst, emulator::POISON, BYTES);
  emulator::copies[emulator::index()][self.copies_count++] = {smem_dst, gmem_src, BYTES, valid, self.groups_count};
}

inline void cp_async_commit() { ++emulator::current->groups_count; }

template <int N> void cp_async_wait() {
  emulator::Thread& self = *emulator::current;
  emulator::Copy* copies = emulator::copies[emulator::index()];
  int done = 0;
  for (; done < self.copies_count && copies[done].group < self.groups_count - N; ++done) {
    const emulator::Copy& copy = copies[done];
    if (copy.valid) memcpy(copy.dst, copy.src, copy.bytes);
    else memset(copy.dst, 0, copy.bytes);
  }
  self.copies_count -= done;
  memmove(copies, copies + done, self.copies_count * sizeof(emulator::Copy));
}

inline void named_barrier_sync(int id, int threads, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(id > 0 && id < 16 && threads > 0 && threads % 32 == 0 && threads <= blockDim.x,
                 "named_barrier_sync(%d, %d): no such barrier or number of threads (%s:%d)", id, threads, where.file,
                 where.line);
  emulator::Arrival operand{id, threads};
  emulator::collective("named_barrier_sync", where, emulator::arrive, &operand);
  emulator::wait_until("named_barrier_sync", where, emulator::all_arrived, &operand);
}

inline void named_barrier_arrive(int id, int threads, emulator::Where where = emulator::here()) {
  emulator::Arrival operand{id, threads};
  emulator::collective("named_barrier_arrive", where, emulator::arrive, &operand);
}

inline bool named_barrier_any(int id, int threads, bool some, emulator::Where where = emulator::here()) {
  emulator::NamedBarrier& barrier = emulator::named_barriers[emulator::rank][id];
  barrier.some |= some;
  named_barrier_sync(id, threads, where);
  return barrier.any;
}

inline void prefetch_line(const void*) {}

// ---- kernels that overlap: here they run in turn -------------------------------------------------------------

template <typename X> void load_in_turn(X& x, const void* from) { x = *static_cast<const X*>(from); }
inline void store_evict_first(uint4& to, const u32 (&x)[4]) { to = {x[0], x[1], x[2], x[3]}; }
inline void store_evict_first(uint2& to, const u32 (&x)[2]) { to = {x[0], x[1]}; }

inline void prefetch_l2(const void* gmem, u32 bytes, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(reinterpret_cast<u64>(gmem) % 16 == 0 && bytes % 16 == 0,
                 "prefetch_l2 of %u bytes, or an address, that is no multiple of 16 (%s:%d)", bytes, where.file,
                 where.line);
}
inline void launch_next() {}
inline void wait_for_previous() {}

// ---- warps in different roles -----------------------------------------------------------------------------

struct MBarrier {
  u64 state;
};

struct alignas(64) TensorMap {
  unsigned char* array;
  i64 sizes[4], strides[4];                     // columns, tokens, heads, batch; in elements and bytes
  i32 columns, tokens, heads, bytes, swizzled;  // of the box; of an element
};

namespace emulator {

// How a Barrier lies in its memory.
struct Phases {
  u16 arrivals, pending;
  short coming;  // of what was announced, in 16 bytes; below 0 where it came before it was announced
  unsigned char parity, mark;
};
constexpr unsigned char MARK = 0x5a;  // of one that was initialised
struct PhaseEnd {
  const Phases* phases;
  u32 parity;
};

static Phases* phases(const char* call, MBarrier& b, Where where) {
  auto* phases = reinterpret_cast<Phases*>(&b);
  EMULATOR_CHECK(in_shared(&b, sizeof b), "%s of a Barrier not aligned or not in shared memory (%s:%d)", call,
                 where.file, where.line);
  EMULATOR_CHECK(phases->mark == MARK, "%s of a Barrier that was not initialised (%s:%d)", call, where.file,
                 where.line);
  return phases;
}

// Returns whether the phase is over.
static bool end_phase(Phases* phases) {
  if (phases->pending || phases->coming) return false;
  phases->pending = phases->arrivals;
  phases->parity ^= 1;
  return true;
}

// What the copy engine loads: its places hold poison until somebody waits for the barrier.
struct Load {
  void (*copy)(const Load&);
  Phases* phases;
  void* to;
  const void* from;
  u32 bytes;
  TensorMap map;
  i32 at[4];
  Where where;
};
// What it stores: places are read when the thread waits for it.
struct Store {
  void (*copy)(const Store&);
  TensorMap map;
  const void* box;
  i32 at[4];
  Where where;
};
constexpr int MAX_LOADS = 256, MAX_STORES = 8;
#pragma GCC visibility push(default)
extern Load loads[MAX_CLUSTER][MAX_LOADS];
extern int loads_count[MAX_CLUSTER];
extern Store stores[MAX_TOGETHER][MAX_STORES];
#pragma GCC visibility pop

static void land(const Load& load) {
  load.copy(load);
  load.phases->coming -= load.bytes / 16;
  end_phase(load.phases);
}

static void begin(const Load& load) {
  if (loads_count[rank] == MAX_LOADS) land(load);
  else loads[rank][loads_count[rank]++] = load;
}

static bool phase_over(const void* operand) {
  const auto* end = static_cast<const PhaseEnd*>(operand);
  int left = 0;
  for (int i = 0; i < loads_count[rank]; ++i) {
    const Load& load = loads[rank][i];
    if (load.phases == end->phases) land(load);
    else loads[rank][left++] = load;
  }
  loads_count[rank] = left;
  return end->phases->parity != end->parity;
}

}  // namespace emulator

inline void mbarrier_init(MBarrier& b, u32 arrivals, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::in_shared(&b, sizeof b) && arrivals > 0 && arrivals < 65536,
                 "mbarrier_init(%u), or of a Barrier not aligned or not in shared memory (%s:%d)", arrivals, where.file,
                 where.line);
  *reinterpret_cast<emulator::Phases*>(&b) = {u16(arrivals), u16(arrivals), 0, 0, emulator::MARK};
}

namespace emulator {

// Returns whether the phase is over.
static bool arrive_once(MBarrier& b, Where where) {
  Phases* own = phases("mbarrier_arrive", b, where);
  EMULATOR_CHECK(own->pending > 0, "one arrival too many (%s:%d)", where.file, where.line);
  --own->pending;
  return end_phase(own);
}

}  // namespace emulator

// Whoever waited for the phase runs first: if it overwrites what this thread still needs, results are wrong.
inline void mbarrier_arrive(MBarrier& b, emulator::Where where = emulator::here()) {
  if (emulator::arrive_once(b, where))
    emulator::wait_until("mbarrier_arrive", where, [](const void*) { return true; }, nullptr);
}

inline void mbarrier_wait(MBarrier& b, u32 parity, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(parity < 2, "mbarrier_wait for parity %u (%s:%d)", parity, where.file, where.line);
  emulator::PhaseEnd operand{emulator::phases("mbarrier_wait", b, where), parity};
  if (!emulator::phase_over(&operand)) emulator::wait_until("mbarrier_wait", where, emulator::phase_over, &operand);
}

inline void mbarrier_arrive_and_expect(MBarrier& b, u32 bytes, emulator::Where where = emulator::here()) {
  emulator::phases("mbarrier_arrive_and_expect", b, where)->coming += bytes / 16;
  mbarrier_arrive(b, where);
}

// ---- two blocks of a cluster ------------------------------------------------------------------------------

namespace emulator {

template <class X> X* at_peer(X* p) {
  const u64 offset = reinterpret_cast<u64>(p) - reinterpret_cast<u64>(shared_storage[rank]);
  return reinterpret_cast<X*>(shared_storage[rank ^ 1] + offset);
}

}  // namespace emulator

inline void mbarrier_arrive_at_other_block(MBarrier& b, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::cluster == 2, "mbarrier_arrive_at_other_block without a cluster (%s:%d)", where.file,
                 where.line);
  emulator::phases("mbarrier_arrive_at_other_block", b, where);
  MBarrier& there = *emulator::at_peer(&b);
  const int here = emulator::rank;
  emulator::enter(here ^ 1);  // its shared memory is what a barrier must lie in
  emulator::arrive_once(there, where);
  emulator::enter(here);
}

inline void copy_to_other_block(const void* from, u32 bytes, MBarrier& b, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::in_shared(from, 16) && bytes % 16 == 0,
                 "copy_to_other_block of %u bytes, or of a place not aligned or not in shared memory (%s:%d)", bytes,
                 where.file, where.line);
  memcpy(const_cast<void*>(emulator::at_peer(from)), from, bytes);
  mbarrier_arrive_at_other_block(b, where);
}

inline float4 load4_of_block(const float* p, u32 rank, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(int(rank) < emulator::cluster, "load4_of_block %u of %d (%s:%d)", rank, emulator::cluster, where.file,
                 where.line);
  EMULATOR_CHECK(emulator::in_shared(p, 16), "load4_of_block of a place not aligned or not in shared memory (%s:%d)",
                 where.file, where.line);
  const u64 offset = reinterpret_cast<u64>(p) - reinterpret_cast<u64>(emulator::shared_storage[emulator::rank]);
  return *reinterpret_cast<const float4*>(emulator::shared_storage[rank] + offset);
}

inline void cluster_sync(emulator::Where where = emulator::here()) {
  emulator::NamedBarrier& barrier = emulator::cluster_barrier;
  int times = barrier.times;
  if (++barrier.arrived == emulator::cluster * int(blockDim.x)) {
    barrier.arrived = 0;
    ++barrier.times;
  } else {
    emulator::wait_until("cluster_sync", where, emulator::cluster_arrived, &times);
  }
}

inline void cluster_sync_shared(emulator::Where where = emulator::here()) { cluster_sync(where); }
inline void cluster_leave(emulator::Where where = emulator::here()) { cluster_sync(where); }

inline void copy_bulk_evict_first(void* to, const void* from, u32 bytes, MBarrier& b,
                                  emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::in_shared(to, 16) && reinterpret_cast<u64>(from) % 16 == 0 && bytes % 16 == 0,
                 "copy_bulk_evict_first of %u bytes, not aligned or not to shared memory (%s:%d)", bytes, where.file,
                 where.line);
  memset(to, emulator::POISON, bytes);
  emulator::Load load = {};
  load.copy = [](const emulator::Load& load) { memcpy(load.to, load.from, load.bytes); };
  load.phases = emulator::phases("copy_bulk_evict_first", b, where);
  load.to = to, load.from = from, load.bytes = bytes;
  emulator::begin(load);
}

inline void copy_bulk(void* to, const void* from, u32 bytes, MBarrier& b, emulator::Where where = emulator::here()) {
  copy_bulk_evict_first(to, from, bytes, b, where);
}

// ---- boxes of tensors -------------------------------------------------------------------------------------

namespace emulator {

// Calls f(piece of the box, piece of the array or null outside it, bytes) for every 16 bytes.
template <class F>
void each_piece(const char* call, const void* box, const TensorMap& map, const i32 (&at)[4], Where where, F f) {
  const int row = map.columns * map.bytes;
  EMULATOR_CHECK(in_shared(box, map.swizzled ? 1024 : 128), "%s of a box not aligned or not in shared memory (%s:%d)",
                 call, where.file, where.line);
  EMULATOR_CHECK(at[0] >= 0 && at[1] >= 0 && at[2] >= 0 && at[3] >= 0, "%s from before the array (%s:%d)", call,
                 where.file, where.line);
  for (int t = 0; t < map.heads * map.tokens; ++t)
    for (int byte = 0; byte < row; byte += 16) {
      const i64 place[4] = {at[0] + byte / map.bytes, at[1] + t % map.tokens, at[2] + t / map.tokens, at[3]};
      bool inside = true;
      i64 offset = 0;
      for (int axis = 0; axis < 4; ++axis) {
        inside = inside && place[axis] >= 0 && place[axis] < map.sizes[axis];
        offset += place[axis] * map.strides[axis];
      }
      const int piece = map.swizzled ? byte ^ (t & 7) * 16 : byte;
      f(static_cast<unsigned char*>(const_cast<void*>(box)) + t * row + piece, inside ? map.array + offset : nullptr);
    }
}

inline void begin(const Store& store) {
  if (current->stores_count == MAX_STORES) end_stores();
  stores[index()][current->stores_count++] = store;
}

}  // namespace emulator

inline void prefetch_tensor_map(const TensorMap&) {}

inline void tensor_load(void* box, const TensorMap& map, MBarrier& b, i32 column, i32 token, i32 head, i32 batch,
                        emulator::Where where = emulator::here()) {
  emulator::Phases* phases = emulator::phases("tensor_load", b, where);
  const u32 bytes = map.columns * map.bytes * map.tokens * map.heads;
  emulator::each_piece("tensor_load", box, map, {column, token, head, batch}, where,
                       [](unsigned char* to, const unsigned char*) { memset(to, emulator::POISON, 16); });
  const auto copy = [](const emulator::Load& load) {
    emulator::each_piece("tensor_load", load.to, load.map, load.at, load.where,
                         [](unsigned char* to, const unsigned char* from) {
                           if (from) memcpy(to, from, 16);
                           else memset(to, 0, 16);
                         });
  };
  emulator::begin({copy, phases, box, nullptr, bytes, map, {column, token, head, batch}, where});
}

inline void tensor_load_evict_first(void* box, const TensorMap& map, MBarrier& b, i32 column, i32 token, i32 head,
                                    i32 batch, emulator::Where where = emulator::here()) {
  tensor_load(box, map, b, column, token, head, batch, where);
}

inline void tensor_prefetch(const TensorMap&, i32, i32, i32, i32) {}

inline void tensor_store(const TensorMap& map, const void* box, i32 column, i32 token, i32 head, i32 batch,
                         emulator::Where where = emulator::here()) {
  const auto copy = [](const emulator::Store& store) {
    emulator::each_piece("tensor_store", store.box, store.map, store.at, store.where,
                         [](const unsigned char* from, unsigned char* to) {
                           if (to) memcpy(to, from, 16);
                         });
  };
  emulator::begin({copy, map, box, {column, token, head, batch}, where});
}

template <typename T> void add_piece(T* to, const T* piece, emulator::Where where = emulator::here()) {
  EMULATOR_CHECK(emulator::in_shared(piece, 16) && reinterpret_cast<u64>(to) % 16 == 0,
                 "add_piece of what is not aligned or not in shared memory (%s:%d)", where.file, where.line);
  for (unsigned n = 0; n < 16 / sizeof(T); ++n) to[n] = from_float<T>(to_float(to[n]) + to_float(piece[n]));
}

template <typename T>
void tensor_store_or_add(const TensorMap& map, const T* box, i32 column, i32 token, i32 head, i32 batch, bool adds,
                         emulator::Where where = emulator::here()) {
  if (!adds) return tensor_store(map, box, column, token, head, batch, where);
  EMULATOR_CHECK(map.bytes == sizeof(T), "tensor_store_or_add of other numbers than the array's (%s:%d)", where.file,
                 where.line);
  const auto copy = [](const emulator::Store& store) {
    emulator::each_piece("tensor_store_or_add", store.box, store.map, store.at, store.where,
                         [](const unsigned char* from, unsigned char* to) {
                           if (to) add_piece(reinterpret_cast<T*>(to), reinterpret_cast<const T*>(from));
                         });
  };
  emulator::begin({copy, map, box, {column, token, head, batch}, where});
}

inline void commit_adds() {}

inline void tensor_store_wait() { emulator::end_stores(); }

inline void mbarrier_arrive_after_copies(MBarrier& b, emulator::Where where = emulator::here()) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(b, where);
}

inline void fence_proxy_async() {}

inline void stmatrix_x4(void* row, const u32 (&r)[4], emulator::Where where = emulator::here()) {
  emulator::matrix_collective("stmatrix_x4", const_cast<u32*>(r), row, emulator::store_matrices, where);
}

inline void stmatrix_x4_trans(void* row, const u32 (&r)[4], emulator::Where where = emulator::here()) {
  emulator::matrix_collective("stmatrix_x4_trans", const_cast<u32*>(r), row, emulator::store_matrices_trans, where);
}
