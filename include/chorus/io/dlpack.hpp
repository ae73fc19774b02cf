#pragma once
/// DLPack: memory shared with NumPy, PyTorch, JAX and others without a copy
/// (https://dmlc.github.io/dlpack/latest/c_api.html).

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/tensor/shape.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace chorus {

/// The structs of dlpack.h, version 1.0, under names of their own: a program that includes dlpack.h casts pointers.
namespace dlpack {

/// `type` 1 is a CPU, 2 a CUDA device.
struct Device {
  std::int32_t type, id;
};
/// `code`: 0 signed, 1 unsigned, 2 float, 4 bfloat, 6 bool.
struct DataType {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};
/// Strides are in elements; null strides mean row-major order without gaps.
struct Array {
  void* data;
  dlpack::Device device;
  std::int32_t rank;
  DataType dtype;
  std::int64_t *shape, *strides;
  std::uint64_t byte_offset;
};
/// DLManagedTensor, in Python a capsule "dltensor".
struct Managed {
  Array array;
  void* context;
  void (*deleter)(Managed*);
};
/// DLManagedTensorVersioned, in Python a capsule "dltensor_versioned".
struct ManagedVersioned {
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Array array;
};
/// Flags of ManagedVersioned.
inline constexpr std::uint64_t read_only = 1, is_copied = 2;

static_assert(sizeof(Array) == 48 && offsetof(Array, byte_offset) == 40 && offsetof(ManagedVersioned, array) == 32);

}  // namespace dlpack

namespace detail {

template <Scalar T>
constexpr dlpack::DataType dlpack_type() {
  constexpr std::uint8_t code = std::is_same_v<T, bool>   ? 6
                                : std::is_same_v<T, bf16> ? 4
                                : Real<T>                 ? 2
                                : std::is_unsigned_v<T>   ? 1
                                                          : 0;
  return {code, static_cast<std::uint8_t>(8 * sizeof(T)), 1};
}

inline std::string dlpack_name(dlpack::DataType type) {
  constexpr std::string_view kinds[] = {"I", "U", "F", "opaque ", "BF", "complex ", "BOOL"};
  const std::string kind(type.code < 7 ? kinds[type.code] : "unknown ");
  return cat(kind, type.code == 6 && type.bits == 8 ? "" : cat(int{type.bits}),
             type.lanes == 1 ? "" : cat(" x ", type.lanes, " lanes"));
}

template <Device D>
dlpack::Device dlpack_device(D device) {
  if constexpr (std::is_same_v<D, Cpu>)
    return {1, 0};
  else
    return {2, device.index};
}

/// What a managed tensor refers to. It lives until the consumer calls the deleter.
template <class Owner, class T, int Rank, class D>
struct DlpackOwner {
  Owner managed{};
  Storage<D> storage;
  Shape<Rank> shape, strides;

  static Owner* make(const Tensor<T, Rank, D>& x) {
    // The memory, and not the parameter that has it: it stays where it is if the parameter moves.
    auto* const self = new DlpackOwner{{}, x.storage().memory(), x.shape(), x.strides()};
    self->managed.context = self;
    self->managed.deleter = [](Owner* done) { delete static_cast<DlpackOwner*>(done->context); };
    self->managed.array = {x.data(),           dlpack_device(x.device()), Rank, dlpack_type<T>(),
                           self->shape.data(), self->strides.data(),      0};
    return &self->managed;
  }
};

/// Whether consumers may write. Throws UsageError for memory that can't be lent.
template <class T, int Rank, class D>
bool dlpack_lends(const Tensor<T, Rank, D>& x, std::optional<bool> writable) {
  check<UsageError>(x.defined(), "to_dlpack: the tensor is undefined");
  check<UsageError>(
      !x.storage().in_parts(),
      "to_dlpack: expected values that stay in memory, got a parameter that its policy gathers and frees; "
      "export a clone of it");
  const bool home = x.storage().writes() != nullptr;
  if (home) x.storage().watch();
  return writable.value_or(!home);
}

}  // namespace detail

/// Options of to_dlpack.
struct ToDlpackOptions {
  /// Whether consumers may write. By default not into parameters and buffers.
  std::optional<bool> writable = {};
};

/// Lends the memory of `x`, which stays alive until the consumer calls the result's deleter, on any thread. Consumers'
/// writes into a parameter or buffer on the CPU are noticed, as those through a pointer; if a policy moves the
/// parameter later, the lent memory keeps the old values. Work on a GPU must be finished before the consumer reads.
/// Throws UsageError for an undefined tensor, or one whose memory a policy frees between uses.
template <class T, int Rank, class D>
dlpack::ManagedVersioned* to_dlpack(const Tensor<T, Rank, D>& x, const ToDlpackOptions& options = {}) {
  const bool writable = detail::dlpack_lends(x, options.writable);
  auto* const out = detail::DlpackOwner<dlpack::ManagedVersioned, T, Rank, D>::make(x);
  out->major = 1;
  out->flags = writable ? 0 : dlpack::read_only;
  return out;
}

/// The same for consumers older than DLPack 1.0, which know no read-only memory. Throws UsageError for a parameter or
/// buffer too, unless `options.writable` is true.
template <class T, int Rank, class D>
dlpack::Managed* to_dlpack_unversioned(const Tensor<T, Rank, D>& x, const ToDlpackOptions& options = {}) {
  check<UsageError>(detail::dlpack_lends(x, options.writable),
                    "to_dlpack_unversioned: the memory is read-only, which needs a consumer of DLPack 1.0");
  return detail::DlpackOwner<dlpack::Managed, T, Rank, D>::make(x);
}

/// Options of from_dlpack.
struct FromDlpackOptions {
  /// Take read-only memory. The program must not write into the tensor.
  bool read_only = false;
};

namespace detail {

/// Calls the deleter when it is destroyed.
template <class Managed>
std::shared_ptr<Managed> dlpack_owned(Managed* managed) {
  return {managed, [](Managed* owned) {
            if (owned != nullptr && owned->deleter != nullptr) owned->deleter(owned);
          }};
}

template <Scalar T, int Rank, Device D>
Tensor<T, Rank, D> from_dlpack_array(const dlpack::Array& array, std::shared_ptr<void> owner) {
  static_assert(std::is_same_v<D, Cpu>,
                "from_dlpack: memory of a GPU can be lent but not taken: its allocator has no memory of other owners");
  const auto& [data, device, rank, type, extents, steps, byte_offset] = array;
  constexpr dlpack::DataType own = dlpack_type<T>();
  check<UsageError>(type.code == own.code && type.bits == own.bits && type.lanes == 1, "from_dlpack: expected ",
                    dtype<T>, ", got ", dlpack_name(type));
  check<ShapeError>(rank == Rank, "from_dlpack: expected ", Rank, " axes, got ", rank);
  const int kind = dlpack_device(D{}).type;
  check<DeviceError>(device.type == kind && device.id >= 0 && device.id < D::max_devices, "from_dlpack: expected ",
                     D::kind, " memory (DLPack's device type ", kind, "), got device type ", device.type, ", number ",
                     device.id);
  Shape<Rank> shape{}, strides{};
  check<UsageError>(Rank == 0 || extents != nullptr, "from_dlpack: expected a shape, got a null pointer");
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) shape[axis] = extents[axis];
  const D where{};
  constexpr Index most = (Index{1} << 56) / static_cast<Index>(sizeof(T));
  Index count = 1;
  for (const Index size : shape) {
    check<ShapeError>(size >= 0, "from_dlpack: shape ", shape, " has a negative size");
    check<ShapeError>(size == 0 || count <= most / size, "from_dlpack: shape ", shape, " has too many elements");
    if (size > 0) count *= size;
  }
  // Without elements the pointer may be null, and the memory nobody's.
  if (chorus::numel(shape) == 0) return Tensor<T, Rank, D>::empty(shape, where);
  // Any stride may stand for an axis of size 1: the row-major one stays, so that dense arrays are contiguous.
  strides = row_major(shape);
  if (steps != nullptr)
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis)
      if (shape[axis] != 1) strides[axis] = steps[axis];
  Index last = 0;  // the place of the last element
  for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
    if (shape[axis] == 1) continue;
    check<ShapeError>(strides[axis] >= 0, "from_dlpack: expected strides of at least 0, got ", strides,
                      "; copy the array first (numpy.ascontiguousarray)");
    check<ShapeError>(strides[axis] <= (most - last) / (shape[axis] - 1), "from_dlpack: strides ", strides,
                      " are too large for shape ", shape);
    last += strides[axis] * (shape[axis] - 1);
  }
  check<UsageError>(data != nullptr, "from_dlpack: expected memory of ", count, " elements, got a null pointer");
  auto* const begin = static_cast<std::byte*>(data) + byte_offset;
  check<UsageError>(reinterpret_cast<std::uintptr_t>(begin) % alignof(T) == 0,
                    "from_dlpack: expected memory aligned to ", alignof(T), " bytes; copy the array first");
  Storage<D> storage(where, std::shared_ptr<void>(std::move(owner), begin),
                     static_cast<std::size_t>(last + 1) * sizeof(T));
  return {std::move(storage), reinterpret_cast<T*>(begin), shape, strides};
}

}  // namespace detail

/// A Tensor in the memory of `managed`, whose deleter is called when the last handle to that memory is destroyed, on
/// that thread, or at once if this throws: it takes ownership in any case. Throws UsageError for another element type,
/// a major version other than 1, read-only memory (unless `options` take it), or memory that is not aligned to its
/// elements; ShapeError for another rank, negative strides (`x[::-1]`) or sizes that are too large; DeviceError for
/// memory of another kind of device. For CPUs alone.
template <Scalar T, int Rank, Device D = Cpu>
Tensor<T, Rank, D> from_dlpack(dlpack::ManagedVersioned* managed, const FromDlpackOptions& options = {}) {
  auto owner = detail::dlpack_owned(managed);
  check<UsageError>(managed != nullptr, "from_dlpack: expected a managed tensor, got a null pointer");
  check<UsageError>(managed->major == 1, "from_dlpack: expected DLPack 1, got version ", managed->major, ".",
                    managed->minor);
  check<UsageError>(
      options.read_only || (managed->flags & dlpack::read_only) == 0,
      "from_dlpack: the memory is read-only; copy it, or pass {.read_only = true} if nothing writes to it");
  return detail::from_dlpack_array<T, Rank, D>(managed->array, std::move(owner));
}

/// The same for producers older than DLPack 1.0.
template <Scalar T, int Rank, Device D = Cpu>
Tensor<T, Rank, D> from_dlpack(dlpack::Managed* managed) {
  auto owner = detail::dlpack_owned(managed);
  check<UsageError>(managed != nullptr, "from_dlpack: expected a managed tensor, got a null pointer");
  return detail::from_dlpack_array<T, Rank, D>(managed->array, std::move(owner));
}

}  // namespace chorus
