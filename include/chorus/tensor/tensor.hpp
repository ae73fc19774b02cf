#pragma once
/// Tensor: a shared, strided view of device memory. Copying a Tensor copies the handle, not the data.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <chorus/core/device.hpp>
#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/tensor/allocator.hpp>
#include <chorus/tensor/memory.hpp>
#include <chorus/tensor/shape.hpp>

namespace chorus {

/// Elements of type `T` along `Rank` axes on a `D`. Scalar type, rank and kind of device are part of the type; sizes,
/// strides and the device's index are values. Views (slice, select, permute, expand, view of contiguous memory) share
/// memory.
template <Scalar T, int Rank, Device D = Cpu>
class Tensor {
  static_assert(Rank >= 0 && Rank <= 8, "Tensor: expected 0 to 8 axes");

 public:
  using value_type = T;
  using device_type = D;
  static constexpr int rank = Rank;

  /// An undefined tensor: no memory, no device.
  Tensor() = default;

  /// A view of `storage` that starts at `data`. For library code.
  Tensor(Storage<D> storage, T* data, const Shape<Rank>& shape, const Shape<Rank>& strides)
      : storage_(std::move(storage)), data_(shifted(data, -storage_.moved())), shape_(shape), strides_(strides) {}

  Tensor(const Tensor&) = default;
  Tensor(Tensor&&) noexcept = default;
  /// `y = x`: `y` now refers to x's memory; the old data is unchanged.
  Tensor& operator=(const Tensor&) & = default;
  Tensor& operator=(Tensor&&) & noexcept = default;
  /// `x[0] = y`, `x.slice(1, 0, 2) = y`, `p.grad() = 0`: assignment to a temporary handle copies data, as in PyTorch.
  /// `y` is a number or a Tensor that broadcasts. All handles to the memory see the change, as after `x[0] += y`.
  /// Throws ShapeError if `y` doesn't broadcast. Throws UsageError if one is undefined, if the handle is expanded, or
  /// if no other handle shares its memory, so that the data would be lost (as with a sum).
  template <class Y>
  Tensor operator=(const Y& y) && {
    write_through(*this, y);
    return *this;
  }
  /// Other assignments to a name, and assignments to a constant, don't compile.
  void operator=(const Tensor&) const& = delete;  // use parameter.assign(y), buffer.assign(y), x.slice(0, 0, n) = y
  template <class Y>
  requires(!std::is_convertible_v<const Y&, Tensor>) void operator=(const Y& y) const& { refuse_assignment(*this, y); }

  /// Contiguous and uninitialised, on `default_device` unless given. Throws ShapeError if a size is negative or their
  /// product is too large.
  static Tensor empty(const Shape<Rank>& shape, D device = default_device<D>()) {
    constexpr Index most = (Index{1} << 56) / static_cast<Index>(sizeof(T));
    Index count = 1;
    for (const Index size : shape) {
      check<ShapeError>(size >= 0, "Tensor: shape ", shape, " has a negative size");
      check<ShapeError>(size == 0 || count <= most / size, "Tensor: shape ", shape, " has too many elements");
      if (size > 0) count *= size;
    }
    Storage<D> storage(device, static_cast<std::size_t>(chorus::numel(shape)) * sizeof(T));
    T* data = static_cast<T*>(storage.data());
    return Tensor(std::move(storage), data, shape, row_major(shape));
  }

  static Tensor zeros(const Shape<Rank>& shape, D device = default_device<D>()) {
    Tensor out = empty(shape, device);
    zero_bytes(device, out.data_, out.bytes());
    return out;
  }

  /// Contiguous, with the given values in row-major order. Throws ShapeError if their number doesn't match the shape.
  static Tensor from(std::span<const T> values, const Shape<Rank>& shape, D device = default_device<D>()) {
    Tensor out = empty(shape, device);
    check<ShapeError>(static_cast<Index>(values.size()) == out.numel(), "Tensor::from: expected ", out.numel(),
                      " numbers for shape ", shape, ", got ", values.size());
    copy_bytes(device, out.data(), Cpu{}, values.data(), out.bytes());
    return out;
  }
  static Tensor from(std::initializer_list<T> values, const Shape<Rank>& shape, D device = default_device<D>()) {
    return from(std::span<const T>(values.begin(), values.size()), shape, device);
  }

  static Tensor full(const Shape<Rank>& shape, T value, D device = default_device<D>()) {
    if constexpr (std::is_same_v<D, Cpu>) {
      Tensor out = empty(shape, device);
      std::fill_n(out.data_, out.numel(), value);
      return out;
    } else {
      const auto host = Tensor<T, Rank, Cpu>::full(shape, value);
      return from(std::span<const T>(host.data(), static_cast<std::size_t>(host.numel())), shape, device);
    }
  }
  static Tensor ones(const Shape<Rank>& shape, D device = default_device<D>()) { return full(shape, T{1}, device); }

  bool defined() const { return static_cast<bool>(storage_); }
  D device() const { return storage_.device(); }
  const Storage<D>& storage() const { return storage_; }
  const Shape<Rank>& shape() const { return shape_; }
  const Shape<Rank>& strides() const { return strides_; }
  Index size(Index axis) const { return shape_[normalize_axis("size", axis, Rank)]; }
  Index numel() const { return chorus::numel(shape_); }
  std::size_t bytes() const { return static_cast<std::size_t>(numel()) * sizeof(T); }
  T* data() const { return shifted(data_, storage_.moved()); }

  /// Whether the elements are in row-major order without gaps.
  bool is_contiguous() const {
    Index expected = 1;
    for (std::size_t axis = Rank; axis-- > 0;) {
      if (shape_[axis] != 1 && strides_[axis] != expected) return shape_has_zero();
      expected *= shape_[axis];
    }
    return true;
  }

  /// One element, on the CPU. Throws ShapeError if an index is out of range, UsageError if the tensor is undefined.
  template <class... Indices>
    requires(sizeof...(Indices) == static_cast<std::size_t>(Rank) && std::is_same_v<D, Cpu>)
  T& operator()(Indices... indices) const {
      if constexpr (Rank == 0) check<UsageError>(defined(), "Tensor: an undefined tensor has no elements");
      const Shape<Rank> at{static_cast<Index>(indices)...};
      Index offset = 0;
      for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
        check<ShapeError>(at[axis] >= 0 && at[axis] < shape_[axis], "Tensor: index ", at, " is outside of shape ",
                          shape_);
        offset += at[axis] * strides_[axis];
    }
    return data()[offset];
  }

  /// The value of a one-element tensor, copied to the host.
  T item() const {
    check<UsageError>(defined(), "item: the tensor is undefined");
    check<ShapeError>(numel() == 1, "item: expected a tensor of one element, got shape ", shape_);
    T value{};
    copy_bytes(Cpu{}, &value, device(), data(), sizeof(T));
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

  /// Index `at` of an axis, which is removed; a view.
  Tensor<T, Rank - 1, D> select(Index axis, Index at) const
    requires(Rank > 0)
  {
    const auto a = normalize_axis("select", axis, Rank);
    check<ShapeError>(at >= 0 && at < shape_[a], "select: index ", at, " is not inside axis ", axis, " of shape ",
                      shape_);
    Shape<Rank - 1> shape{}, strides{};
    for (std::size_t from = 0, to = 0; from < static_cast<std::size_t>(Rank); ++from) {
      if (from == a) continue;
      shape[to] = shape_[from];
      strides[to++] = strides_[from];
    }
    return {storage_, data() + at * strides_[a], shape, strides};
  }
  Tensor<T, Rank - 1, D> operator[](Index at) const
    requires(Rank > 0)
  {
    return select(0, at);
  }

  /// Reorders the axes; a view. `axes` names each axis once.
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

  /// A new shape for the same memory, which must be contiguous. One size may be -1 and is computed.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> view(std::array<Index, NewRank> shape) const {
    check<ShapeError>(is_contiguous(), "view: a tensor of shape ", shape_, " and strides ", strides_,
                      " is not contiguous");
    infer_size(shape);
    return {storage_, data(), shape, row_major(shape)};
  }

  /// Repeats axes of size 1, and adds leading axes, without copying: their stride is 0.
  template <std::size_t NewRank>
  Tensor<T, static_cast<int>(NewRank), D> expand(const std::array<Index, NewRank>& shape) const {
    static_assert(NewRank >= static_cast<std::size_t>(Rank), "expand: expected a rank of at least the tensor's");
    Shape<static_cast<int>(NewRank)> strides{};
    constexpr std::size_t extra = NewRank - static_cast<std::size_t>(Rank);
    for (std::size_t axis = 0; axis < static_cast<std::size_t>(Rank); ++axis) {
      const Index wanted = shape[axis + extra];
      check<ShapeError>(shape_[axis] == wanted || shape_[axis] == 1, "expand: shape ", shape_, " does not expand to ",
                        shape);
      strides[axis + extra] = shape_[axis] == wanted ? strides_[axis] : 0;
    }
    return {storage_, data(), shape, strides};
  }

  /// The elements in row-major order, on the host.
  std::vector<T> to_vector() const
    requires(!std::is_same_v<T, bool>)
  {
    check<UsageError>(Rank > 0 || defined(), "to_vector: the tensor is undefined");
    check<ShapeError>(is_contiguous(), "to_vector: a tensor of shape ", shape_, " and strides ", strides_,
                      " is not contiguous");
    std::vector<T> out(static_cast<std::size_t>(numel()));
    copy_bytes(Cpu{}, out.data(), device(), data(), bytes());
    return out;
  }

 private:
  static T* shifted(T* data, std::ptrdiff_t bytes) {
    return reinterpret_cast<T*>(reinterpret_cast<std::uintptr_t>(data) + static_cast<std::uintptr_t>(bytes));
  }
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
  T* data_ = nullptr;  // the address when this handle was made: see Home
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

namespace detail {
/// Throws UsageError if one is undefined. An undefined tensor without axes would claim one element by its shape.
template <AnyTensor... Xs>
void check_defined(const char* operation, const Xs&... xs) {
  int i = 0;
  (check<UsageError>(xs.defined(), operation, ": operand ", i++, " is undefined"), ...);
}

template <Device D>
[[noreturn, gnu::cold, gnu::noinline]] void fail_for_devices(const char* operation, int i, D other, D first) {
  fail<DeviceError>(operation, ": operand ", i, " is on ", other, ", and operand 0 on ", first,
                    ": to_device(x, device) copies it, and Tensor::zeros(shape, x.device()) creates it there");
}
/// Throws DeviceError if operands are on different devices.
template <AnyTensor First, AnyTensor... Rest>
void check_same_device([[maybe_unused]] const char* operation, const First& first, const Rest&... rest) {
  [[maybe_unused]] int i = 0;
  ((++i, rest.device() == first.device() ? void() : fail_for_devices(operation, i, rest.device(), first.device())),
   ...);
}
}  // namespace detail

}  // namespace chorus
