#pragma once
/// The seam for products whose inner axis the members of a TensorGroup share, if their bits must not depend on the
/// number of members (SameBits): the group cuts the axis into leaves.

#include <chorus/core/dtype.hpp>
#include <chorus/core/error.hpp>
#include <chorus/kernels/gemm.hpp>
#include <concepts>
#include <memory>
#include <type_traits>

namespace chorus::detail {

class LeafProducts;

/// The axis of a layer's weight [outputs, inputs] that members share: `blocks` blocks of `width` entries, each in
/// multiples of `unit`.
struct LeafCut {
  const char* layer;
  Index width, unit, blocks;
  bool of_inputs;  // then outputs are sums over it; else gradients of inputs are
  std::shared_ptr<const LeafProducts> products = {};
};

/// c = a op(b), or c += with `accumulate`: a: [m, k], op(b): [k, n], c: [m, n], row-major; `ldb` is b's row stride.
template <class T>
struct LeafProduct {
  kernels::Trans tb;
  Index m, n, k;
  const T *a, *b;
  Index ldb;
  T* c;
  bool accumulate;
};

/// A group's products.
class LeafProducts {
 public:
  virtual ~LeafProducts() = default;
  virtual int members() const = 0;
  /// Throws UsageError if the members can't share the axis in whole leaves.
  virtual void check(const LeafCut& cut) const = 0;
  /// This member's term of the product.
  virtual void multiply(const LeafCut& cut, const LeafProduct<float>& product) const = 0;
  virtual void multiply(const LeafCut& cut, const LeafProduct<double>& product) const = 0;
};

/// The cut of this thread's linear layers; null if they are not cut.
inline thread_local constinit const LeafCut* leaf_cut = nullptr;

/// kernels::gemm of packed a and c, in leaves if `cut` cuts the inner axis of this product.
template <Device D, class T, class Out>
void gemm_in_leaves(const LeafCut* cut, bool over_inputs, D device, kernels::Trans tb, Index m, Index n, Index k,
                    const T* a, const T* b, Index ldb, Out* c, bool accumulate, const T* bias_n = nullptr) {
  if (cut != nullptr && cut->of_inputs == over_inputs) [[unlikely]] {
    if constexpr (std::is_same_v<D, Cpu> && std::floating_point<T> && std::is_same_v<T, Out>)
      return cut->products->multiply(*cut, {tb, m, n, k, a, b, ldb, c, accumulate});
    else
      check<UsageError>(cut->products->members() == 1, cut->layer,
                        ": SameBits under TensorParallel: expected float or double on the CPU, got ", name(dtype<T>),
                        " on ", D::kind, ": use a policy whose ranks have whole layers");
  }
  kernels::gemm(device, kernels::Trans::no, tb, m, n, k, a, k, b, ldb, c, n, accumulate, bias_n);
}

}  // namespace chorus::detail
