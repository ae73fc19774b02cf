#pragma once
/// Linear layers that TensorParallel shards: by columns of the output, then by rows.

#include <chorus/core/tensor_group.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cast.hpp>
#include <chorus/ops/columns.hpp>
#include <chorus/ops/sequence_part.hpp>
#include <type_traits>
#include <utility>

namespace chorus::nn {

namespace detail {
/// The group that shards a layer's `width` entries, of which the layer holds `mine`; null if it holds all, unless a
/// group of one adds up in leaves. Throws UsageError if there is no such group.
inline TensorGroupRef group_of_part(const char* layer, Index mine, Index width, Index unit) {
  const auto& group = tensor_group();
  auto leaves = group == nullptr || chorus::detail::interceptor != nullptr ? nullptr : group->in_leaves();
  if (mine == width && (leaves == nullptr || leaves->size() > 1)) return nullptr;
  check<UsageError>(group != nullptr && group->part(width, unit).count == mine, layer, ": its ", width,
                    " entries are split over ranks, and this rank has a part: call the net, not its module(); "
                    "TensorParallel::gathered gives a whole model");
  return leaves != nullptr ? leaves : group;
}
/// `f()`, whose linear layers are cut so if the group multiplies in leaves.
template <class F>
auto with_leaf_cut(const TensorGroupRef& group, chorus::detail::LeafCut cut, const F& f) {
  if (group != nullptr) cut.products = {group, group->products()};
  if (cut.products != nullptr) cut.products->check(cut);
  using chorus::detail::leaf_cut;
  const chorus::detail::Replaced scope(leaf_cut, cut.products != nullptr ? &cut : leaf_cut);
  return f();
}

/// The input of a sharded layer. From here on ranks compute different things; a sharded sequence is gathered.
template <Operand X>
auto entered(const X& x, const TensorGroupRef& group) {
  return enter_tensor_region(x, group);
}
template <class X>
auto entered(const SequencePart<X>& x, const TensorGroupRef& group) {
  if (x.group() == nullptr) return enter_tensor_region(x.part(), group);
  return gather_axis(x.part(), 1, x.length(), 1, /*summing=*/group != nullptr, x.group());
}
}  // namespace detail

/// Options of ColumnParallelLinear and RowParallelLinear.
struct ParallelLinearOptions {
  bool bias = true;
  /// Ranks hold whole groups of this many columns, such as the features of a head.
  Index unit = 1;
};

/// Linear with sharded outputs under TensorParallel: each rank holds rows of weight and bias and computes its columns
/// of y. Without it, a Linear with the same names, shapes and initial values.
template <Device D, Real T = float>
class ColumnParallelLinear : public Linear<D, T> {
 public:
  /// Throws ShapeError unless `unit` divides the outputs.
  ColumnParallelLinear(Index in_features, Index out_features, const ParallelLinearOptions& options = {})
      : Linear<D, T>(in_features, out_features, {.bias = options.bias}), out_(out_features), unit_(options.unit) {
    check<ShapeError>(unit_ > 0 && out_ % unit_ == 0, "ColumnParallelLinear: units of ", unit_, " do not divide ", out_,
                      " outputs");
  }

  /// x: [..., in], the same on all ranks -> Columns of [..., out].
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return columns_of(x); });
  }
  /// x: sharded [batch, length, in] -> Columns of [batch, length, out], for all positions.
  template <class X>
  auto operator()(const SequencePart<X>& x) const {
    return detail::watched(*this, [&] { return columns_of(x); });
  }
  template <class X>
  auto operator()(const Columns<X>& x) const {
    return linear(x, this->weight, this->bias);  // does not compile, with an explanation
  }
  void visit(Visitor& visitor) override {
    visitor.split_parameter("weight", this->weight, {.axis = 0, .unit = unit_});
    if (this->bias) visitor.split_parameter("bias", this->bias, {.axis = 0, .unit = unit_});
  }
  std::string describe() const override {
    return cat("Linear(", this->weight.shape()[1], ", ", out_, this->bias ? ")" : ", bias=false)");
  }

 private:
  auto columns_of(const auto& x) const {
    const ReadsParts parts;
    auto group = detail::group_of_part("ColumnParallelLinear", this->weight.shape()[0], out_, unit_);
    auto y = detail::with_leaf_cut(group, {"ColumnParallelLinear", out_, unit_, 1, /*of_inputs=*/false},
                                   [&] { return this->apply(detail::entered(x, group)); });
    return Columns<decltype(y)>(std::move(y), out_, unit_, std::move(group));
  }

  Index out_, unit_;
};

/// Linear with sharded inputs under TensorParallel: each rank holds columns of the weight and computes a partial y; the
/// sum gets the bias. Without it, a Linear with the same names, shapes and initial values.
template <Device D, Real T = float>
class RowParallelLinear : public Linear<D, T> {
 public:
  /// `unit` is that of the input columns. Throws ShapeError unless it divides the inputs.
  RowParallelLinear(Index in_features, Index out_features, const ParallelLinearOptions& options = {})
      : Linear<D, T>(in_features, out_features, {.bias = options.bias}), in_(in_features), unit_(options.unit) {
    check<ShapeError>(unit_ > 0 && in_ % unit_ == 0, "RowParallelLinear: units of ", unit_, " do not divide ", in_,
                      " inputs");
  }

  /// x: [..., in], as returned by ColumnParallelLinear -> [..., out], the same on all ranks. Throws ShapeError if the
  /// columns are sharded differently.
  template <class X>
  auto operator()(const Columns<X>& x) const {
    return detail::watched(*this, [&] { return of_columns(x); });
  }
  /// For an input that all ranks have: uses this rank's columns.
  template <Operand X>
  auto operator()(const X& x) const {
    return detail::watched(*this, [&] { return of_whole(x); });
  }
  /// The same with a sharded result [batch, length, out], if `group` shards sequences: a reduce-scatter.
  template <class X>
  auto to_sequence(const Columns<X>& x, const TensorGroupRef& group = sequence_group()) const {
    return detail::watched(*this, [&] { return sequence_of(x, group); });
  }
  void visit(Visitor& visitor) override {
    visitor.split_parameter("weight", this->weight, {.axis = 1, .unit = unit_});
    if (this->bias) visitor.parameter("bias", this->bias);
  }
  std::string describe() const override {
    return cat("Linear(", in_, ", ", this->weight.shape()[0], this->bias ? ")" : ", bias=false)");
  }

 private:
  TensorGroupRef group() const {
    return detail::group_of_part("RowParallelLinear", this->weight.shape()[1], in_, unit_);
  }
  template <class X>
  auto of_columns(const Columns<X>& x) const {
    const ReadsParts parts;
    check<ShapeError>(x.width() == in_, "RowParallelLinear: expected ", in_, " columns, got ", x.width());
    const auto own = group();
    if (own == nullptr) return this->apply(gather_columns(x));
    if (x.group() == nullptr) return sum_of(scatter_columns(x.part(), unit_, own));
    check_unit(x);
    return sum_of(x);
  }
  template <Operand X>
  auto of_whole(const X& x) const {
    const ReadsParts parts;
    if (const auto own = group()) return sum_of(scatter_columns(x, unit_, own));
    return this->apply(x);
  }
  template <class X>
  auto sum_of(const Columns<X>& x) const {
    const auto own = detail::with_leaf_cut(x.group(), {"RowParallelLinear", in_, unit_, 1, /*of_inputs=*/true},
                                           [&] { return linear(x.part(), this->weight); });
    return with_bias(leave_tensor_region(own, x.group()), this->bias);
  }
  template <class X>
  auto sequence_of(const Columns<X>& x, const TensorGroupRef& sequence) const {
    using Y = decltype(of_columns(x));
    const ReadsParts parts;
    const Index length = x.shape()[1];
    if (sequence == nullptr) return SequencePart<Y>(of_columns(x), length, nullptr);
    if (group() != sequence || x.group() != sequence) return split_sequence(of_columns(x), sequence);
    check_unit(x);
    Y y = with_bias(reduce_scatter_axis(linear(x.part(), this->weight), 1, 1, sequence),
                    enter_tensor_region(this->bias, this->bias ? sequence : nullptr));
    return SequencePart<Y>(std::move(y), length, sequence);
  }
  template <Operand Y, Operand B>
  static Y with_bias(const Y& y, const B& bias) {
    using Number = typename tensor_of<Y>::value_type;
    if (!value_of(bias).defined()) return y;
    if constexpr (std::is_same_v<Number, T>)
      return y + bias;
    else
      return y + to<Number>(bias);
  }
  template <class X>
  void check_unit(const Columns<X>& x) const {
    check<ShapeError>(x.unit() == unit_, "RowParallelLinear: expected columns in units of ", unit_,
                      ", got units of ", x.unit(), ": give both layers the same unit");
  }

  Index in_, unit_;
};

}  // namespace chorus::nn
