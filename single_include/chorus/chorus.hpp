#pragma once
// chorus in one header, made by tests/amalgamate.py from include/chorus: change it there.

// <chorus/chorus.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CHORUS_HPP
#define CHORUS_SINGLE_CHORUS_CHORUS_HPP
/// All of chorus.

// <chorus/core/config.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP
#define CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP
/// Version, optional parts, and the macros that every other header may rely on.

#define CHORUS_VERSION_MAJOR 0
#define CHORUS_VERSION_MINOR 1
#define CHORUS_VERSION_PATCH 0

// Optional parts: always defined, 0 or 1. CMake sets them from what it finds.
#ifndef CHORUS_USE_CUDA
#define CHORUS_USE_CUDA 0
#endif
#ifndef CHORUS_USE_ZLIB
#define CHORUS_USE_ZLIB 0
#endif

// The configuration is part of every symbol's name, so that mixing two of them in one program is a link error.
#if CHORUS_USE_CUDA
#define CHORUS_ABI v0_1_cuda
#else
#define CHORUS_ABI v0_1
#endif

// Marks functions that also run in a CUDA kernel; the pragma allows host-only scalar types in them.
#if defined(__CUDACC__)
#define CHORUS_HD _Pragma("nv_exec_check_disable") __host__ __device__
#else
#define CHORUS_HD
#endif

// Eigen turns its vectorisation off, on the host too, when it sees nvcc; we never use it inside a kernel.
#ifndef EIGEN_NO_CUDA
#define EIGEN_NO_CUDA
#endif
#endif  // CHORUS_SINGLE_CHORUS_CORE_CONFIG_HPP

// <chorus/core/device.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP
/// Devices: the kind is a type, the number is a value.

#include <compare>
#include <concepts>
#include <string>

// <chorus/core/error.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP
#define CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP
/// Exceptions and the two calls that throw them. A message names the operation, what was expected and what was got.

#include <array>
#include <charconv>
#include <cstdint>
#include <exception>
#include <span>
#include <stdexcept>
#include <string_view>
#include <type_traits>

namespace chorus::inline CHORUS_ABI {

/// Base of every exception that chorus throws.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// Shapes, axes or ranks that don't fit the operation.
struct ShapeError : Error {
  using Error::Error;
};
/// Tensors on the wrong device, or a device that does not exist.
struct DeviceError : Error {
  using Error::Error;
};
/// A call or an option that makes no sense.
struct UsageError : Error {
  using Error::Error;
};
/// A file that is missing, malformed, or could not be written.
struct FileError : Error {
  using Error::Error;
};
/// A collective, a peer or a rendezvous that failed; the message names rank and operation.
struct CommError : Error {
  using Error::Error;
};
/// A wait that reached its deadline.
struct TimeoutError : CommError {
  using CommError::CommError;
};

// How a value looks in a message. A type of chorus brings its own `append`, found by its namespace.
inline void append(std::string& out, std::string_view part) { out += part; }
inline void append(std::string& out, char part) { out += part; }
inline void append(std::string& out, bool part) { out += part ? "true" : "false"; }

template <class Number>
  requires std::integral<Number> || std::floating_point<Number>
void append(std::string& out, Number part) {
  char digits[64];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, part).ptr);
}

template <class Element, std::size_t Extent>
void append(std::string& out, std::span<Element, Extent> parts) {
  out += '[';
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (i != 0) out += ", ";
    append(out, parts[i]);
  }
  out += ']';
}

template <class Element, std::size_t Extent>
void append(std::string& out, const std::array<Element, Extent>& parts) {
  append(out, std::span<const Element, Extent>(parts));
}

namespace detail {
template <class Part>
void append_part(std::string& out, const Part& part) {
  if constexpr (std::is_array_v<Part>) {
    out += std::string_view(part);
  } else if constexpr (std::is_same_v<Part, const char*> || std::is_same_v<Part, char*>) {
    out += std::string_view(part);
  } else {
    append(out, part);
  }
}
}  // namespace detail

/// Joins text, numbers and shapes into one string: `cat("got ", shape)` gives `got [2, 3]`.
template <class... Parts>
std::string cat(const Parts&... parts) {
  std::string out;
  (detail::append_part(out, parts), ...);
  return out;
}

/// Throws `Kind` with the joined parts as its message.
template <class Kind = Error, class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw Kind(cat(parts...));
}

/// Throws `Kind` unless `ok`.
template <class Kind = Error, class... Parts>
void check(bool ok, const Parts&... parts) {
  if (!ok) [[unlikely]]
    fail<Kind>(parts...);
}

/// Throws the error again, of the same kind, with `context` in front of its message.
[[noreturn]] inline void rethrow_with(const std::exception_ptr& error, std::string_view context) {
  try {
    std::rethrow_exception(error);
  } catch (const ShapeError& e) {
    fail<ShapeError>(context, std::string_view(e.what()));
  } catch (const DeviceError& e) {
    fail<DeviceError>(context, std::string_view(e.what()));
  } catch (const UsageError& e) {
    fail<UsageError>(context, std::string_view(e.what()));
  } catch (const FileError& e) {
    fail<FileError>(context, std::string_view(e.what()));
  } catch (const TimeoutError& e) {
    fail<TimeoutError>(context, std::string_view(e.what()));
  } catch (const CommError& e) {
    fail<CommError>(context, std::string_view(e.what()));
  } catch (const std::exception& e) {
    fail<Error>(context, std::string_view(e.what()));
  }
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_ERROR_HPP

namespace chorus::inline CHORUS_ABI {

/// A processor of this machine. `Cpu{1}`, `Cpu{2}`, ... are virtual devices: each has its own memory account, and under
/// `DataParallel` its own thread, so that everything about several devices can be run and tested on one machine.
struct Cpu {
  int index = 0;
  static constexpr const char* kind = "cpu";
  static constexpr int max_devices = 64;
  friend auto operator<=>(const Cpu&, const Cpu&) = default;
};

/// A device type: a kind and an index.
template <class D>
concept Device = std::regular<D> && requires(D d) {
  { d.index } -> std::convertible_to<int>;
  { D::kind } -> std::convertible_to<const char*>;
};

template <Device D>
void append(std::string& out, const D& device) {
  out += D::kind;
  out += ':';
  append(out, device.index);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_DEVICE_HPP

// <chorus/core/dtype.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP
/// The scalar types of tensors and their run-time names.

#include <cstddef>

namespace chorus::inline CHORUS_ABI {

/// Extents, strides and element counts. Signed, so that differences behave.
using Index = std::int64_t;

/// Names as in the safetensors format.
enum class DType : std::uint8_t { boolean, u8, i8, i16, u16, i32, u32, i64, u64, f32, f64 };

template <class T>
struct dtype_of;
#define CHORUS_DTYPE(TYPE, VALUE) \
  template <>                     \
  struct dtype_of<TYPE> {         \
    static constexpr DType value = DType::VALUE; \
  }
CHORUS_DTYPE(bool, boolean);
CHORUS_DTYPE(std::uint8_t, u8);
CHORUS_DTYPE(std::int8_t, i8);
CHORUS_DTYPE(std::int16_t, i16);
CHORUS_DTYPE(std::uint16_t, u16);
CHORUS_DTYPE(std::int32_t, i32);
CHORUS_DTYPE(std::uint32_t, u32);
CHORUS_DTYPE(std::int64_t, i64);
CHORUS_DTYPE(std::uint64_t, u64);
CHORUS_DTYPE(float, f32);
CHORUS_DTYPE(double, f64);
#undef CHORUS_DTYPE

/// A type that a tensor can hold.
template <class T>
concept Scalar = requires { dtype_of<T>::value; };

/// A type that gradients can be taken in.
template <class T>
concept Real = Scalar<T> && std::floating_point<T>;

template <Scalar T>
inline constexpr DType dtype = dtype_of<T>::value;

constexpr std::string_view name(DType type) {
  constexpr std::string_view names[] = {"BOOL", "U8", "I8", "I16", "U16", "I32", "U32", "I64", "U64", "F32", "F64"};
  return names[static_cast<std::size_t>(type)];
}

constexpr std::size_t size_of(DType type) {
  constexpr std::size_t sizes[] = {1, 1, 1, 2, 2, 4, 4, 8, 8, 4, 8};
  return sizes[static_cast<std::size_t>(type)];
}

inline void append(std::string& out, DType part) { out += name(part); }

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_DTYPE_HPP

// <chorus/core/philox.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP
#define CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP
/// Counter-based random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3",
/// SC 2011). A number depends on its key and its counter alone, so that it doesn't matter which device, thread or rank
/// draws it, nor when.

namespace chorus::inline CHORUS_ABI {

using PhiloxWords = std::array<std::uint32_t, 4>;

/// Four random words for a counter under a key.
CHORUS_HD constexpr PhiloxWords philox(std::uint64_t key, PhiloxWords counter) {
  auto k0 = static_cast<std::uint32_t>(key), k1 = static_cast<std::uint32_t>(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t a = 0xD2511F53ull * counter[0], b = 0xCD9E8D57ull * counter[2];
    counter = {static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ k0, static_cast<std::uint32_t>(b),
               static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ k1, static_cast<std::uint32_t>(a)};
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return counter;
}

/// The upper 24 bits of a word as a float in [0, 1), exact on every device.
CHORUS_HD constexpr float unit_float(std::uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_PHILOX_HPP

// <chorus/core/random.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP
#define CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP
/// Which random numbers an operation draws: keyed by seed, step, layer and the sample's place in the global batch, so that
/// a run gives the same numbers under every policy and on any number of devices.

#include <atomic>
#include <functional>
#include <utility>

namespace chorus::inline CHORUS_ABI {

namespace detail {
struct SeedState {
  std::atomic<std::uint64_t> seed{0};
  std::atomic<std::uint32_t> next_stream{0};
};
inline SeedState& seed_state() {
  static SeedState state;
  return state;
}
}  // namespace detail

/// Seeds the initialisation of layers and everything random that no policy seeds.
inline void manual_seed(std::uint64_t seed) {
  detail::seed_state().seed = seed;
  detail::seed_state().next_stream = 0;
}
inline std::uint64_t initial_seed() { return detail::seed_state().seed; }
/// A new stream of numbers; each initialised parameter takes one.
inline std::uint32_t next_random_stream() { return detail::seed_state().next_stream++; }

/// What the random operations of one forward pass draw from.
struct RandomContext {
  std::uint64_t seed = 0;
  /// Number of the forward pass.
  std::uint32_t step = 0;
  /// Counts the random operations of the pass.
  std::uint32_t next_operation = 0;
  /// Place, in the global batch, of this device's first sample. A function, since DistributedDataParallel has to ask.
  std::function<std::int64_t()> first_sample;
};

namespace detail {
inline RandomContext*& random_context() {
  thread_local RandomContext* context = nullptr;
  return context;
}
}  // namespace detail

/// While it lives, random operations of this thread draw from `context`.
class RandomScope {
 public:
  explicit RandomScope(RandomContext& context) : before_(std::exchange(detail::random_context(), &context)) {}
  ~RandomScope() { detail::random_context() = before_; }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  RandomContext* before_;
};

/// The key of one random operation.
struct RandomKey {
  std::uint64_t seed = 0;
  std::uint32_t step = 0, operation = 0;
  std::int64_t first_sample = 0;
};

/// The key for the next random operation of this thread. Outside of a policy each call is a pass of its own.
inline RandomKey next_random_key() {
  if (auto* context = detail::random_context())
    return {context->seed, context->step, context->next_operation++, context->first_sample ? context->first_sample() : 0};
  constexpr std::uint32_t outside_of_policies = 0xFFFFFFFFu;
  return {initial_seed(), next_random_stream(), outside_of_policies, 0};
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_CORE_RANDOM_HPP

// <chorus/core/trace.hpp>
#ifndef CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP
#define CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP
/// Everything that moves is counted here: bytes sent per device by what they carried, and memory per device by kind.
/// Under DataParallel a "device" is a device of this process; under DistributedDataParallel it is the rank.

namespace chorus::inline CHORUS_ABI::trace {

inline constexpr int max_devices = 64;

/// What a message between devices or ranks carried.
enum class Traffic : std::uint8_t { control, parameters, gradients, buffers, inputs, outputs };
inline constexpr std::size_t traffic_kinds = 6;

/// What a block of device memory holds.
enum class Memory : std::uint8_t { activations, parameters, gradients, optimizer, buckets };
inline constexpr std::size_t memory_kinds = 5;

constexpr std::string_view name(Traffic kind) {
  constexpr std::string_view names[] = {"control", "parameters", "gradients", "buffers", "inputs", "outputs"};
  return names[static_cast<std::size_t>(kind)];
}
constexpr std::string_view name(Memory kind) {
  constexpr std::string_view names[] = {"activations", "parameters", "gradients", "optimizer", "buckets"};
  return names[static_cast<std::size_t>(kind)];
}

/// Bytes of one device, in use now and at most so far.
struct MemoryUse {
  std::size_t current = 0, peak = 0;
};

namespace detail {
struct DeviceCounters {
  std::array<std::atomic<std::uint64_t>, traffic_kinds> sent{};
  std::array<std::atomic<std::int64_t>, memory_kinds> held{};
  std::atomic<std::int64_t> total{0}, peak{0};
};
inline DeviceCounters& counters(int device) {
  static std::array<DeviceCounters, max_devices> all;
  check<DeviceError>(device >= 0 && device < max_devices, "trace: device index ", device, " is not in [0, ", max_devices,
                     ")");
  return all[static_cast<std::size_t>(device)];
}
}  // namespace detail

/// Counts `bytes` that `device` (or rank) handed to another one.
inline void sent(int device, Traffic kind, std::size_t bytes) {
  detail::counters(device).sent[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device, Traffic kind) {
  return detail::counters(device).sent[static_cast<std::size_t>(kind)].load(std::memory_order_relaxed);
}
inline std::uint64_t bytes_sent(int device) {
  std::uint64_t sum = 0;
  for (const auto& kind : detail::counters(device).sent) sum += kind.load(std::memory_order_relaxed);
  return sum;
}
inline void reset_traffic() {
  for (int device = 0; device < max_devices; ++device)
    for (auto& kind : detail::counters(device).sent) kind.store(0, std::memory_order_relaxed);
}

/// Counts `bytes` that came into use on `device` (negative: that were given back).
inline void allocated(int device, Memory kind, std::int64_t bytes) {
  auto& c = detail::counters(device);
  c.held[static_cast<std::size_t>(kind)].fetch_add(bytes, std::memory_order_relaxed);
  const auto now = c.total.fetch_add(bytes, std::memory_order_relaxed) + bytes;
  auto peak = c.peak.load(std::memory_order_relaxed);
  while (now > peak && !c.peak.compare_exchange_weak(peak, now, std::memory_order_relaxed)) {
  }
}
inline MemoryUse memory(int device) {
  const auto& c = detail::counters(device);
  return {static_cast<std::size_t>(c.total.load()), static_cast<std::size_t>(c.peak.load())};
}
inline std::size_t memory(int device, Memory kind) {
  return static_cast<std::size_t>(detail::counters(device).held[static_cast<std::size_t>(kind)].load());
}

}  // namespace chorus::inline CHORUS_ABI::trace
#endif  // CHORUS_SINGLE_CHORUS_CORE_TRACE_HPP

// <chorus/tensor/print.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP
/// Tensors as text: nested brackets, long axes shortened.

// <chorus/tensor/tensor.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP
/// Tensor: a shared, strided view of device memory. Copying a Tensor copies the handle, not the numbers.

#include <algorithm>
#include <initializer_list>
#include <vector>

// <chorus/tensor/allocator.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP
/// Device memory: blocks that are kept and reused, so that the second step of a training loop asks the system for nothing.

#include <bit>
#include <cstdlib>
#include <mutex>
#include <new>

#include <sys/mman.h>

namespace chorus::inline CHORUS_ABI {

/// What allocations of this thread are accounted as while the scope lives.
class MemoryScope {
 public:
  explicit MemoryScope(trace::Memory kind) : before_(std::exchange(current(), kind)) {}
  ~MemoryScope() { current() = before_; }
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;

  static trace::Memory& current() {
    thread_local trace::Memory kind = trace::Memory::activations;
    return kind;
  }

 private:
  trace::Memory before_;
};

/// Where a device's memory comes from: the only part of the allocator that differs between kinds of device. A null
/// pointer means that there is no more.
inline void* system_allocate(Cpu, std::size_t bytes) {
  constexpr std::size_t huge_page = std::size_t{2} << 20;
  const bool large = bytes >= huge_page;
  void* data = std::aligned_alloc(large ? huge_page : 64, large ? (bytes + huge_page - 1) / huge_page * huge_page : bytes);
  if (large && data != nullptr) madvise(data, bytes, MADV_HUGEPAGE);
  return data;
}
inline void system_free(Cpu, void* data) { std::free(data); }

/// A block of device memory, owned by the handles that count it, then by its allocator's free list.
template <Device D>
struct Block {
  std::atomic<int> owners{0};
  trace::Memory kind{};
  D device{};
  std::size_t bytes = 0;
  void* data = nullptr;
  Block* next_free = nullptr;
};

/// Keeps freed blocks by size class, four classes an octave, so at most a quarter of a block is unused. One per device;
/// never destroyed, since tensors in static storage may outlive it. Thread-safe.
template <Device D>
class CachingAllocator {
 public:
  static CachingAllocator& of(D device) {
    static auto& all = *new std::array<CachingAllocator, D::max_devices>;
    check<DeviceError>(device.index >= 0 && device.index < D::max_devices, "device ", device, " does not exist: ", D::kind,
                       " devices are numbered 0 to ", D::max_devices - 1);
    return all[static_cast<std::size_t>(device.index)];
  }

  /// A block of at least `bytes`, aligned to 64 bytes, contents undefined. Throws Error when the device has no more.
  Block<D>* allocate(D device, std::size_t bytes) {
    const auto [list, rounded] = size_class(bytes);
    Block<D>* block = nullptr;
    {
      std::lock_guard lock(mutex_);
      block = free_[list];
      if (block != nullptr) free_[list] = block->next_free;
    }
    if (block == nullptr) block = fresh(device, rounded);
    block->kind = MemoryScope::current();
    trace::allocated(device.index, block->kind, static_cast<std::int64_t>(block->bytes));
    return block;
  }

  void release(Block<D>* block) noexcept {
    trace::allocated(block->device.index, block->kind, -static_cast<std::int64_t>(block->bytes));
    const auto list = size_class(block->bytes).first;
    std::lock_guard lock(mutex_);
    block->next_free = free_[list];
    free_[list] = block;
  }

  /// Gives all unused blocks back to the system.
  void empty_cache() noexcept {
    std::lock_guard lock(mutex_);
    for (auto& list : free_)
      while (list != nullptr) {
        Block<D>* block = std::exchange(list, list->next_free);
        system_free(block->device, block->data);
        delete block;
      }
  }

  /// How often the system was asked for memory; a steady training loop doesn't change it.
  std::uint64_t system_allocations() const { return system_allocations_.load(); }

 private:
  static constexpr std::size_t smallest = 64;

  // The list's number and the block size for a request. Sizes are 64 * {4, 5, 6, 7} / 4 * 2^octave.
  static std::pair<std::size_t, std::size_t> size_class(std::size_t bytes) {
    if (bytes <= smallest * 4) {
      const std::size_t units = bytes == 0 ? 1 : (bytes + smallest - 1) / smallest;
      return {units - 1, units * smallest};
    }
    const auto octave = static_cast<std::size_t>(std::bit_width(bytes - 1)) - 1;
    const std::size_t quarter = std::size_t{1} << (octave - 2);
    const std::size_t steps = (bytes + quarter - 1) / quarter;  // 5 to 8
    return {4 * (octave - 7) + steps - 5, steps * quarter};
  }

  Block<D>* fresh(D device, std::size_t bytes) {
    void* data = system_allocate(device, bytes);
    if (data == nullptr) {
      empty_cache();
      data = system_allocate(device, bytes);
    }
    if (data == nullptr) out_of_memory(device, bytes);
    system_allocations_.fetch_add(1, std::memory_order_relaxed);
    auto* block = new Block<D>;
    block->device = device;
    block->bytes = bytes;
    block->data = data;
    return block;
  }

  [[noreturn]] static void out_of_memory(D device, std::size_t bytes) {
    std::string held;
    for (std::size_t kind = 0; kind < trace::memory_kinds; ++kind) {
      const auto memory = static_cast<trace::Memory>(kind);
      held += cat(kind == 0 ? "" : ", ", trace::name(memory), " ", trace::memory(device.index, memory) >> 20, " MiB");
    }
    fail<Error>("out of memory on ", device, ": asked for ", bytes, " bytes; in use: ", held);
  }

  std::mutex mutex_;
  std::array<Block<D>*, 256> free_{};
  std::atomic<std::uint64_t> system_allocations_{0};
};

/// A counted handle to a block. Copies share it.
template <Device D>
class Storage {
 public:
  Storage() = default;
  Storage(D device, std::size_t bytes) : block_(CachingAllocator<D>::of(device).allocate(device, bytes)) {
    block_->owners.store(1, std::memory_order_relaxed);
  }
  Storage(const Storage& other) noexcept : block_(other.block_) {
    if (block_ != nullptr) block_->owners.fetch_add(1, std::memory_order_relaxed);
  }
  Storage(Storage&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Storage& operator=(Storage other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  ~Storage() {
    if (block_ != nullptr && block_->owners.fetch_sub(1, std::memory_order_acq_rel) == 1)
      CachingAllocator<D>::of(block_->device).release(block_);
  }

  explicit operator bool() const { return block_ != nullptr; }
  void* data() const { return block_ == nullptr ? nullptr : block_->data; }
  std::size_t bytes() const { return block_ == nullptr ? 0 : block_->bytes; }
  D device() const { return block_ == nullptr ? D{} : block_->device; }
  int owners() const { return block_ == nullptr ? 0 : block_->owners.load(std::memory_order_relaxed); }

 private:
  Block<D>* block_ = nullptr;
};

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_ALLOCATOR_HPP

// <chorus/tensor/memory.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP
/// Moving bytes between devices: what a kind of device must bring so that tensors can be created and read there.

#include <cstring>

namespace chorus::inline CHORUS_ABI {

/// Copies bytes between two places of one kind of device; the ranges don't overlap.
inline void copy_bytes(Cpu, void* to, Cpu, const void* from, std::size_t bytes) {
  if (bytes != 0) std::memcpy(to, from, bytes);
}

inline void zero_bytes(Cpu, void* data, std::size_t bytes) {
  if (bytes != 0) std::memset(data, 0, bytes);
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_MEMORY_HPP

// <chorus/tensor/shape.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP
#define CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP
/// Extents and strides. The rank is a type, the sizes are values.

namespace chorus::inline CHORUS_ABI {

/// The sizes of a tensor's axes, outermost first; also used for strides and lists of axes.
template <int Rank>
using Shape = std::array<Index, static_cast<std::size_t>(Rank)>;

/// Number of elements.
constexpr Index numel(std::span<const Index> shape) {
  Index count = 1;
  for (const Index size : shape) count *= size;
  return count;
}

/// Strides, in elements, of a dense row-major tensor.
template <std::size_t N>
constexpr std::array<Index, N> row_major(const std::array<Index, N>& shape) {
  std::array<Index, N> strides{};
  Index stride = 1;
  for (std::size_t axis = N; axis-- > 0;) {
    strides[axis] = stride;
    stride *= shape[axis];
  }
  return strides;
}

/// The axis counted from the front; negative axes count from the back, as in PyTorch.
inline std::size_t normalize_axis(std::string_view operation, Index axis, int rank) {
  check<ShapeError>(axis >= -rank && axis < rank, operation, ": axis ", axis, " does not exist in a tensor of rank ", rank);
  return static_cast<std::size_t>(axis < 0 ? axis + rank : axis);
}

/// The shape that two shapes broadcast to, aligned at their last axes. Throws ShapeError where sizes differ and neither is 1.
template <std::size_t A, std::size_t B>
constexpr auto broadcast_shapes(std::string_view operation, const std::array<Index, A>& a, const std::array<Index, B>& b) {
  constexpr std::size_t rank = A > B ? A : B;
  std::array<Index, rank> out{};
  for (std::size_t i = 0; i < rank; ++i) {
    const Index size_a = i < A ? a[A - 1 - i] : 1, size_b = i < B ? b[B - 1 - i] : 1;
    check<ShapeError>(size_a == size_b || size_a == 1 || size_b == 1, operation, ": shapes ", a, " and ", b,
                      " do not broadcast");
    out[rank - 1 - i] = size_a == 1 ? size_b : size_a;
  }
  return out;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_SHAPE_HPP

namespace chorus::inline CHORUS_ABI {

/// Numbers of type `T` in `Rank` axes on a `D`. Scalar type, rank and kind of device are part of the type; sizes, strides
/// and the device's index are values. Views (slice, select, permute, expand, reshape of dense memory) share memory.
template <Scalar T, int Rank, Device D = Cpu>
class Tensor {
  static_assert(Rank >= 0 && Rank <= 8, "a Tensor has 0 to 8 axes");

 public:
  using value_type = T;
  using device_type = D;
  static constexpr int rank = Rank;

  /// An undefined tensor: no memory, no device.
  Tensor() = default;

  /// A view of `storage`, from element `data` on. For library code.
  Tensor(Storage<D> storage, T* data, const Shape<Rank>& shape, const Shape<Rank>& strides)
      : storage_(std::move(storage)), data_(data), shape_(shape), strides_(strides) {}

  /// Dense, contents undefined. Throws ShapeError where a size is negative.
  static Tensor empty(const Shape<Rank>& shape, D device = {}) {
    for (const Index size : shape) check<ShapeError>(size >= 0, "Tensor: shape ", shape, " has a negative size");
    Storage<D> storage(device, static_cast<std::size_t>(chorus::numel(shape)) * sizeof(T));
    T* data = static_cast<T*>(storage.data());
    return Tensor(std::move(storage), data, shape, row_major(shape));
  }

  static Tensor zeros(const Shape<Rank>& shape, D device = {}) {
    Tensor out = empty(shape, device);
    zero_bytes(device, out.data_, out.bytes());
    return out;
  }

  /// Dense, with the given numbers in row-major order. Throws ShapeError where their count doesn't fit the shape.
  static Tensor from(std::span<const T> values, const Shape<Rank>& shape, D device = {}) {
    Tensor out = empty(shape, device);
    check<ShapeError>(static_cast<Index>(values.size()) == out.numel(), "Tensor::from: ", values.size(),
                      " numbers for shape ", shape);
    copy_bytes(device, out.data_, Cpu{}, values.data(), out.bytes());
    return out;
  }
  static Tensor from(std::initializer_list<T> values, const Shape<Rank>& shape, D device = {}) {
    return from(std::span<const T>(values.begin(), values.size()), shape, device);
  }

  static Tensor full(const Shape<Rank>& shape, T value, D device = {}) {
    if constexpr (std::is_same_v<D, Cpu>) {
      Tensor out = empty(shape, device);
      std::fill_n(out.data_, out.numel(), value);
      return out;
    } else {
      const auto host = Tensor<T, Rank, Cpu>::full(shape, value);
      return from(std::span<const T>(host.data(), static_cast<std::size_t>(host.numel())), shape, device);
    }
  }
  static Tensor ones(const Shape<Rank>& shape, D device = {}) { return full(shape, T{1}, device); }

  bool defined() const { return static_cast<bool>(storage_); }
  D device() const { return storage_.device(); }
  const Storage<D>& storage() const { return storage_; }
  const Shape<Rank>& shape() const { return shape_; }
  const Shape<Rank>& strides() const { return strides_; }
  Index size(Index axis) const { return shape_[normalize_axis("size", axis, Rank)]; }
  Index numel() const { return chorus::numel(shape_); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * sizeof(T); }
  T* data() const { return data_; }

  /// True where the elements lie in row-major order without gaps.
  bool is_contiguous() const {
    Index expected = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      if (shape_[axis] != 1 && strides_[axis] != expected) return shape_has_zero();
      expected *= shape_[axis];
    }
    return true;
  }

  /// One element, on the CPU. Throws ShapeError where an index is out of range.
  template <class... Indices>
    requires(sizeof...(Indices) == static_cast<std::size_t>(Rank) && std::is_same_v<D, Cpu>)
  T& operator()(Indices... indices) const {
    const Shape<Rank> at{static_cast<Index>(indices)...};
    Index offset = 0;
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
      check<ShapeError>(at[axis] >= 0 && at[axis] < shape_[axis], "Tensor: index ", at, " is outside of shape ", shape_);
      offset += at[axis] * strides_[axis];
    }
    return data_[offset];
  }

  /// The number in a tensor of one element, brought to the host.
  T item() const {
    check<ShapeError>(defined() && numel() == 1, "item: expected a tensor of one element, got shape ", shape_);
    T value{};
    copy_bytes(Cpu{}, &value, device(), data_, sizeof(T));
    return value;
  }

  /// Indices `start` to `stop - 1` of an axis; a view.
  Tensor slice(Index axis, Index start, Index stop) const {
    const auto a = normalize_axis("slice", axis, Rank);
    check<ShapeError>(0 <= start && start <= stop && stop <= shape_[a], "slice: range [", start, ", ", stop,
                      ") is not inside axis ", axis, " of shape ", shape_);
    Tensor out = *this;
    out.shape_[a] = stop - start;
    out.data_ += start * strides_[a];
    return out;
  }

  /// Index `at` of an axis, which goes away; a view.
  Tensor<T, Rank - 1, D> select(Index axis, Index at) const
    requires(Rank > 0)
  {
    const auto a = normalize_axis("select", axis, Rank);
    check<ShapeError>(at >= 0 && at < shape_[a], "select: index ", at, " is not inside axis ", axis, " of shape ", shape_);
    Shape<Rank - 1> shape{}, strides{};
    for (std::size_t from = 0, to = 0; from < static_cast<std::size_t>(Rank); ++from) {
      if (from == a) continue;
      shape[to] = shape_[from];
      strides[to++] = strides_[from];
    }
    return {storage_, data_ + at * strides_[a], shape, strides};
  }
  Tensor<T, Rank - 1, D> operator[](Index at) const
    requires(Rank > 0)
  {
    return select(0, at);
  }

  /// The axes in another order; a view. `axes` names each axis once.
  Tensor permute(const Shape<Rank>& axes) const {
    Tensor out = *this;
    Shape<Rank> seen{};
    for (std::size_t i = 0; i < static_cast<std::size_t>(Rank); ++i) {
      const auto from = normalize_axis("permute", axes[i], Rank);
      check<ShapeError>(seen[from]++ == 0, "permute: axes ", axes, " name an axis twice");
      out.shape_[i] = shape_[from];
      out.strides_[i] = strides_[from];
    }
    return out;
  }
  Tensor transpose(Index a, Index b) const {
    Tensor out = *this;
    const auto i = normalize_axis("transpose", a, Rank), j = normalize_axis("transpose", b, Rank);
    std::swap(out.shape_[i], out.shape_[j]);
    std::swap(out.strides_[i], out.strides_[j]);
    return out;
  }

  /// Another shape over the same memory, which must be dense. One size may be -1: it is worked out.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> view(std::array<Index, NewRank> shape) const {
    check<ShapeError>(is_contiguous(), "view: a tensor of shape ", shape_, " and strides ", strides_, " is not contiguous");
    infer_size(shape);
    return {storage_, data_, shape, row_major(shape)};
  }

  /// Repeats axes of size 1, and new axes in front, without copying: their stride is 0.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> expand(const std::array<Index, NewRank>& shape) const {
    static_assert(NewRank >= static_cast<std::size_t>(Rank), "expand: the new rank is smaller");
    Shape<static_cast<int>(NewRank)> strides{};
    constexpr std::size_t extra = NewRank - static_cast<std::size_t>(Rank);
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
      const Index wanted = shape[axis + extra];
      check<ShapeError>(shape_[axis] == wanted || shape_[axis] == 1, "expand: shape ", shape_, " does not expand to ", shape);
      strides[axis + extra] = shape_[axis] == wanted ? strides_[axis] : 0;
    }
    return {storage_, data_, shape, strides};
  }

  /// The numbers in row-major order, on the host.
  std::vector<T> to_vector() const
    requires(!std::is_same_v<T, bool>)
  {
    check<ShapeError>(is_contiguous(), "to_vector: a tensor of shape ", shape_, " and strides ", strides_,
                      " is not contiguous");
    std::vector<T> out(static_cast<std::size_t>(numel()));
    copy_bytes(Cpu{}, out.data(), device(), data_, bytes());
    return out;
  }

 private:
  bool shape_has_zero() const { return std::find(shape_.begin(), shape_.end(), Index{0}) != shape_.end(); }

  template <std::size_t NewRank>
  void infer_size(std::array<Index, NewRank>& shape) const {
    Index known = 1, unknown = -1;
    for (std::size_t axis = 0; axis < NewRank; ++axis) {
      if (shape[axis] == -1 && unknown < 0)
        unknown = static_cast<Index>(axis);
      else
        known *= shape[axis];
    }
    const bool fits = unknown < 0 ? known == numel() : known > 0 && numel() % known == 0;
    check<ShapeError>(fits, "reshape: shape ", shape_, " does not fit ", shape);
    if (unknown >= 0) shape[static_cast<std::size_t>(unknown)] = numel() / known;
  }

  Storage<D> storage_;
  T* data_ = nullptr;
  Shape<Rank> shape_{};
  Shape<Rank> strides_{};
};

namespace detail {
template <class X>
inline constexpr bool is_tensor = false;
template <class T, int Rank, class D>
inline constexpr bool is_tensor<Tensor<T, Rank, D>> = true;
}  // namespace detail

/// Any Tensor.
template <class X>
concept AnyTensor = detail::is_tensor<std::remove_cvref_t<X>>;

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_TENSOR_HPP

namespace chorus::inline CHORUS_ABI {

/// `[[1, 2], [3, 4]]`; of an axis of over 8 entries the first and last 3 are shown.
template <Scalar T, int Rank>
void append(std::string& out, const Tensor<T, Rank, Cpu>& tensor) {
  if (!tensor.defined()) {
    out += "undefined";
  } else if constexpr (Rank == 0) {
    append(out, *tensor.data());
  } else {
    const Index size = tensor.size(0);
    out += '[';
    for (Index i = 0; i < size; ++i) {
      if (i != 0) out += ", ";
      if (size > 8 && i == 3) {
        out += "..., ";
        i = size - 3;
      }
      append(out, tensor[i]);
    }
    out += ']';
  }
}

template <class Stream, Scalar T, int Rank>
Stream& operator<<(Stream& stream, const Tensor<T, Rank, Cpu>& tensor) {
  stream << cat(tensor);
  return stream;
}

}  // namespace chorus
#endif  // CHORUS_SINGLE_CHORUS_TENSOR_PRINT_HPP

// <chorus/train/metrics.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP
/// The metrics log: one file of JSON lines (https://jsonlines.org) that tells how a training run went.

#include <cerrno>
#include <cmath>
#include <cstdio>
#include <memory>

namespace chorus::inline CHORUS_ABI {

/// What a finished run reports. Per-device lists have an entry for each device or, under DDP, rank.
struct RunSummary {
  std::string policy;
  int devices = 1;
  double samples_per_second = 0;
  std::vector<std::uint64_t> bytes_sent_per_device;
  std::vector<std::uint64_t> peak_memory_bytes_per_device;
  std::string parameters_sha256;
};

namespace detail {

/// One flat JSON object. Numbers keep all their digits; NaN and infinities, which JSON lacks, become null.
class JsonObject {
 public:
  JsonObject& field(std::string_view key, std::string_view text) {
    next(key);
    append_string(text);
    return *this;
  }
  template <class Number>
    requires std::integral<Number> || std::floating_point<Number>
  JsonObject& field(std::string_view key, Number value) {
    next(key);
    append_number(value);
    return *this;
  }
  template <class Number>
  JsonObject& field(std::string_view key, const std::vector<Number>& values) {
    next(key);
    text_ += '[';
    for (std::size_t i = 0; i < values.size(); ++i) {
      if (i != 0) text_ += ',';
      append_number(values[i]);
    }
    text_ += ']';
    return *this;
  }

  std::string str() const { return text_ + '}'; }

 private:
  void next(std::string_view key) {
    if (text_.size() > 1) text_ += ',';
    append_string(key);
    text_ += ':';
  }

  template <class Number>
  void append_number(Number value) {
    if constexpr (std::floating_point<Number>) {
      if (!std::isfinite(value)) {
        text_ += "null";
        return;
      }
    }
    append(text_, value);
  }

  void append_string(std::string_view text) {
    constexpr std::string_view hex = "0123456789abcdef";
    text_ += '"';
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (c == '"' || c == '\\') {
        text_ += '\\';
        text_ += c;
      } else if (byte < 0x20) {
        text_ += "\\u00";
        text_ += hex[byte >> 4];
        text_ += hex[byte & 15];
      } else {
        text_ += c;
      }
    }
    text_ += '"';
  }

  std::string text_ = "{";
};

}  // namespace detail

/// Writes the events of a run to a file, a line each:
///
///     {"event":"step","step":0,"loss":2.3}
///     {"event":"epoch","epoch":0,"train_loss":1.9,"test_accuracy":0.61,"seconds":4.2}
///     {"event":"done","policy":"ddp","devices":2,"samples_per_second":...,"bytes_sent_per_device":[...],
///      "peak_memory_bytes_per_device":[...],"parameters_sha256":"..."}
///
/// An epoch is on disk when `epoch` returns. Only one process of a run writes: the others give no path.
class MetricsLog {
 public:
  /// Replaces the file at `path`; an empty path makes a log that writes nothing. Throws FileError.
  explicit MetricsLog(std::string path) : path_(std::move(path)) {
    if (path_.empty()) return;
    file_.reset(std::fopen(path_.c_str(), "we"));
    check<FileError>(file_ != nullptr, "metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  /// The loss of a training step, counted from 0 over the whole run.
  void step(Index step, double loss) {
    write(detail::JsonObject().field("event", "step").field("step", step).field("loss", loss));
  }

  /// An epoch's mean training loss, the accuracy after it in [0, 1], and how long it took.
  void epoch(int epoch, double train_loss, double test_accuracy, double seconds) {
    write(detail::JsonObject()
              .field("event", "epoch")
              .field("epoch", epoch)
              .field("train_loss", train_loss)
              .field("test_accuracy", test_accuracy)
              .field("seconds", seconds));
    flush();
  }

  /// The last line.
  void done(const RunSummary& run) {
    write(detail::JsonObject()
              .field("event", "done")
              .field("policy", run.policy)
              .field("devices", run.devices)
              .field("samples_per_second", run.samples_per_second)
              .field("bytes_sent_per_device", run.bytes_sent_per_device)
              .field("peak_memory_bytes_per_device", run.peak_memory_bytes_per_device)
              .field("parameters_sha256", run.parameters_sha256));
    flush();
  }

 private:
  struct Close {
    void operator()(std::FILE* file) const { std::fclose(file); }
  };

  void write(const detail::JsonObject& event) {
    if (file_ == nullptr) return;
    const std::string line = event.str() + '\n';
    if (std::fwrite(line.data(), 1, line.size(), file_.get()) != line.size()) write_failed();
  }
  void flush() {
    if (file_ != nullptr && std::fflush(file_.get()) != 0) write_failed();
  }
  [[noreturn]] void write_failed() const {
    fail<FileError>("metrics: cannot write '", path_, "': ", std::strerror(errno));
  }

  std::string path_;
  std::unique_ptr<std::FILE, Close> file_;
};

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_METRICS_HPP

// <chorus/train/progress.hpp>
#ifndef CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP
#define CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP
/// A progress bar for a training loop: `for (int epoch : ch::progress(run, 10))`.

#include <chrono>
#include <iterator>

#include <unistd.h>

namespace chorus::inline CHORUS_ABI {

struct ProgressOptions {
  bool enabled = true;  ///< false: only count epochs, as all processes but one do
  int epochs = 1;       ///< epochs of the whole run
  int first_epoch = 0;  ///< where a resumed run goes on
  std::FILE* out = stderr;
};

/// A range of epoch numbers that tells how they go. On a terminal one line is redrawn at most ten times a second;
/// elsewhere a plain line is written every ten seconds. An epoch's end always writes one. Loss and samples a second
/// appear when the loop calls `step`; a loop that doesn't gets a line of time per epoch.
class Progress {
 public:
  explicit Progress(ProgressOptions options)
      : options_(options), terminal_(isatty(fileno(options.out)) == 1), epoch_(options.first_epoch) {
    check<UsageError>(options.epochs >= 0, "progress: epochs is ", options.epochs, ", expected 0 or more");
  }
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  class Iterator {
   public:
    using value_type = int;
    using difference_type = std::ptrdiff_t;

    explicit Iterator(Progress& progress) : progress_(&progress) {}
    int operator*() const { return progress_->epoch_; }
    Iterator& operator++() {
      progress_->finish_epoch();
      return *this;
    }
    void operator++(int) { ++*this; }
    bool operator==(std::default_sentinel_t) const { return progress_->epoch_ >= progress_->options_.epochs; }

   private:
    Progress* progress_;
  };

  Iterator begin() {
    start_epoch();
    return Iterator(*this);
  }
  std::default_sentinel_t end() const { return {}; }

  /// Tells that the batch number `step` of the `steps` in this epoch is done, with its mean `loss` over `samples`.
  void step(double loss, Index samples, Index step, Index steps) {
    if (!options_.enabled) return;
    loss_sum_ += loss * static_cast<double>(samples);
    samples_ += samples;
    const auto now = Clock::now();
    if (now - drawn_ < (terminal_ ? std::chrono::milliseconds(100) : std::chrono::seconds(10))) return;
    drawn_ = now;
    const double done = steps > 0 ? std::min(1.0, static_cast<double>(step + 1) / static_cast<double>(steps)) : 0;
    write(head() + (terminal_ ? "  " + bar(done) : "") + "  step " + cat(step + 1, "/", steps) + rates() +
              eta(done > 0 ? seconds() / done : 0, seconds()),
          !terminal_);
  }

 private:
  using Clock = std::chrono::steady_clock;

  void start_epoch() {
    loss_sum_ = 0;
    samples_ = 0;
    started_ = drawn_ = Clock::now();
  }

  void finish_epoch() {
    if (options_.enabled) {
      char time[32];
      std::snprintf(time, sizeof time, "  %.2f s", seconds());
      const bool last = epoch_ + 1 >= options_.epochs;
      write(head() + rates() + time + (last ? "" : eta(seconds(), seconds())), true);
    }
    ++epoch_;
    start_epoch();
  }

  double seconds() const { return std::chrono::duration<double>(Clock::now() - started_).count(); }

  std::string head() const { return cat("epoch ", epoch_ + 1, "/", options_.epochs); }

  static std::string bar(double done) {
    constexpr int width = 20;
    const int full = static_cast<int>(done * width);
    std::string cells(static_cast<std::size_t>(full), '=');
    if (full < width) cells += '>';
    cells.resize(width, ' ');
    return "[" + cells + "]";
  }

  // The mean loss of the epoch so far, and the throughput.
  std::string rates() const {
    if (samples_ == 0) return "";
    const auto count = static_cast<double>(samples_);
    char text[80];
    std::snprintf(text, sizeof text, "  loss %.4f  %.0f samples/s", loss_sum_ / count, count / std::max(seconds(), 1e-9));
    return text;
  }

  // What is left of the run, if each epoch takes as long as this one will and this one has run for `elapsed` seconds.
  std::string eta(double epoch_seconds, double elapsed) const {
    if (epoch_seconds <= 0) return "";
    const auto left = static_cast<long>(std::lround(epoch_seconds * (options_.epochs - epoch_) - elapsed));
    char text[48];
    if (left >= 3600) {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld:%02ld", left / 3600, left / 60 % 60, left % 60);
    } else {
      std::snprintf(text, sizeof text, "  ETA %ld:%02ld", left / 60, left % 60);
    }
    return text;
  }

  void write(const std::string& line, bool final) {
    std::fprintf(options_.out, "%s%s%s", terminal_ ? "\r\x1b[K" : "", line.c_str(), final ? "\n" : "");
    std::fflush(options_.out);
    line_open_ = !final;
  }

  // An exception left the loop: what it prints starts on a line of its own.
  void clear() {
    if (line_open_) std::fputc('\n', options_.out);
  }

  ProgressOptions options_;
  bool terminal_;
  bool line_open_ = false;
  int epoch_;
  double loss_sum_ = 0;
  Index samples_ = 0;
  Clock::time_point started_{}, drawn_{};
};

/// The epochs `first_epoch`, ..., `epochs - 1` of a run, shown by its main process alone.
template <class Run>
Progress progress(Run& run, int epochs, int first_epoch = 0) {
  return Progress({.enabled = run.is_main(), .epochs = epochs, .first_epoch = first_epoch});
}

}  // namespace chorus::inline CHORUS_ABI
#endif  // CHORUS_SINGLE_CHORUS_TRAIN_PROGRESS_HPP

#endif  // CHORUS_SINGLE_CHORUS_CHORUS_HPP
