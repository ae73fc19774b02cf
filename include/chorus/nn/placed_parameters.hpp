#pragma once
/// Parameters that say what ranks hold of them: SplitParameter, Summed. A plain Parameter is whole.

#include <chorus/autograd/parameter.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/ops/placement.hpp>
#include <string_view>
#include <type_traits>

namespace chorus::nn {

/// A parameter of which each rank of the axis has a part of axis `dim`: `SplitParameter<axis::Tensor, 0, float, 2>`.
/// Functions take it as a placement::Split. Without ranks it is a plain Parameter; files hold all of it.
template <PlacementAxis Axis, int dim, Real T, int Rank, Device D = Cpu>
class SplitParameter {
  static_assert(std::is_same_v<Axis, axis::Tensor>,
                "SplitParameter: TensorParallel alone cuts parameters: axis::Tensor");
  static constexpr int from_last = chorus::detail::from_the_last<dim, Rank>;
  static_assert(from_last >= -Rank && from_last < 0, "SplitParameter: the parameter has no such axis");
  static constexpr int from_first = from_last + Rank;

 public:
  using device_type = D;

  SplitParameter() = default;
  /// The whole parameter's initial numbers. Ranks have whole units of entries. Throws ShapeError unless `unit` divides
  /// the axis.
  explicit SplitParameter(const Tensor<T, Rank, D>& whole, Index unit = 1)
      : parameter_(whole), width_(whole.shape()[from_first]), unit_(unit) {
    check<ShapeError>(unit > 0 && width_ % unit == 0, "SplitParameter: units of ", unit, " do not divide axis ", dim,
                      " of shape ", whole.shape());
  }

  explicit operator bool() const { return static_cast<bool>(parameter_); }
  /// The handle, for code that does not compute with it.
  const Parameter<T, Rank, D>& parameter() const { return parameter_; }
  /// This rank's part. Throws UsageError outside of the pass of the policy that cut it, and in one that did not.
  auto placed() const {
    const auto& group = Axis::group();
    const Index mine = parameter_.shape()[from_first];
    check<UsageError>(group == nullptr ? mine == width_ : mine == group->part(width_, unit_).count,
                      "SplitParameter: ", "this rank has ", mine, " of ", width_,
                      " entries, which are not its part in this pass: list the "
                      "parameter with CHORUS_MODULE and call the net, not its module()");
    const ReadsParts parts;
    return Placed<Variable<T, Rank, D>, placement::Split<Axis, from_last>>(parameter_.as_variable(),
                                                                           {{width_, unit_, group}});
  }
  void visit(Visitor& visitor, std::string_view name) {
    if (parameter_) visitor.split_parameter(name, parameter_, {.axis = from_first, .unit = unit_});
  }

 private:
  Parameter<T, Rank, D> parameter_;
  Index width_ = 0, unit_ = 1;
};

/// A whole parameter whose gradient ranks of the axis compute in terms, such as a norm's of split sequences or a
/// router's. Functions take it as a placement::Copied; each use sums its gradient in one message.
template <PlacementAxis Axis, Real T, int Rank, Device D = Cpu>
class Summed {
 public:
  using device_type = D;

  Summed() = default;
  explicit Summed(const Tensor<T, Rank, D>& numbers) : parameter_(numbers) {}

  explicit operator bool() const { return static_cast<bool>(parameter_); }
  const Parameter<T, Rank, D>& parameter() const { return parameter_; }
  auto placed() const { return copy<Axis>(parameter_); }
  void visit(Visitor& visitor, std::string_view name) {
    if (parameter_) visitor.parameter(name, parameter_);
  }

 private:
  Parameter<T, Rank, D> parameter_;
};

}  // namespace chorus::nn
