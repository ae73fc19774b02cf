#pragma once
/// Converts a recorded pass with fake quantisation to integer steps: the operations between two roundings become one
/// step. An operation without an integer form is refused by name.

#include <array>
#include <chorus/core/error.hpp>
#include <chorus/quantization/fold_batch_norm.hpp>
#include <chorus/quantization/int8/program.hpp>
#include <chorus/quantization/int8/recorded_pass.hpp>
#include <chorus/quantization/int8/step.hpp>
#include <chorus/quantization/quantized_numbers.hpp>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace chorus::nn::int8 {

namespace detail {

class Conversion {
  using Tensor_ = chorus::detail::WatchedTensor;

 public:
  explicit Conversion(const RecordedPass& pass) : pass_(pass) {
    values_[0].is_input = true;
    for (const auto& operation : pass.operations()) convert(operation);
    const auto output = values_.find(pass.output());
    check<UsageError>(output != values_.end(), who,
                      ": the model's output does not depend on its input, or uses operations that are not recorded");
    check<UsageError>(output->second.number > 0, who, ": the model's output is not rounded to integers",
                      unrounded_.empty() ? "" : cat(": it is the output of ", unrounded_));
    check<UsageError>(output->second.number == static_cast<Index>(steps_.size()), who,
                      ": the model's output is not the output of its last operation");
  }

  Program program() && { return {*input_, std::move(steps_)}; }
  /// The rounded numbers of the program's values in the recorded pass.
  const std::map<Index, Tensor_>& rounded_numbers() const { return rounded_; }

 private:
  static constexpr const char* who = "quantized";

  /// A value of the pass: either a value of the program (`number`), or not rounded yet: `step` computes it, and `after`
  /// are steps that keep its levels.
  struct Value {
    Index number = -1;
    std::optional<Step> step;
    std::vector<Step> after;
    bool is_input = false;  // the model's input, possibly reshaped, not rounded yet
    bool folds = false;     // input of the batch norm that is folded into the weights
  };

  std::string place(const RecordedOperation& operation) const {
    return operation.layer.empty() ? cat("'", operation.name, "'")
                                   : cat("'", operation.name, "' in '", operation.layer, "', a ",
                                         operation.layer_description);
  }

  Value& value(const RecordedOperation& operation, std::size_t operand) {
    const Index number = operation.inputs.at(operand);
    check<UsageError>(number >= 0, who, ": ", place(operation), " computes with a constant: it has no integer form");
    const auto found = values_.find(number);
    check<UsageError>(found != values_.end(), who, ": ", place(operation), " has an input that no step computes");
    return found->second;
  }
  /// The program's value of an operand. Throws if it is not rounded to integers.
  Index rounded(const RecordedOperation& operation, std::size_t operand) {
    const Value& x = value(operation, operand);
    if (x.number < 0) unrounded_ = x.step ? cat("'", x.step->name, "'") : "the input";
    check<UsageError>(x.number >= 0, who, ": ", place(operation),
                      " needs integers, and its input is not rounded: ", unrounded_);
    return x.number;
  }

  std::string name_of(const RecordedOperation& operation, std::string_view otherwise) {
    const std::string wanted = operation.layer.empty() ? std::string(otherwise) : operation.layer;
    std::string name = wanted;
    for (int i = 2; !names_.insert(name).second; ++i) name = cat(wanted, "_", i);
    return name;
  }
  Step begin_step(Kind kind, const RecordedOperation& operation, std::vector<Index> inputs) {
    Step out;
    out.kind = kind;
    out.name = name_of(operation, kind_names[static_cast<std::size_t>(kind)]);
    out.inputs = std::move(inputs);
    return out;
  }
  Index push(Step step) {
    steps_.push_back(std::move(step));
    return static_cast<Index>(steps_.size());
  }

  /// Adds a step that may have been added for another value, with the same levels or different ones.
  Index push_once(Step step) {
    for (std::size_t i = 0; i < steps_.size(); ++i) {
      if (steps_[i].name != step.name) continue;
      if (steps_[i].levels == step.levels && steps_[i].relu == step.relu) return static_cast<Index>(i) + 1;
      const std::string name = step.name;
      for (int n = 2; !names_.insert(step.name = cat(name, "_", n)).second; ++n) continue;
      return push(std::move(step));
    }
    return push(std::move(step));
  }

  void convert(const RecordedOperation& operation) {
    const std::string_view name = operation.name;
    check<UsageError>(!operation.layer_description.starts_with("MultiheadAttention"), who, ": '", operation.layer,
                      "', a ", operation.layer_description, ", has no integer form");
    if (name == "fake_quantize") return round(operation);
    if (name == "conv2d" || name == "linear") return multiply(operation);
    if (name == "fold_batch_norm") return unfold(operation);
    if (name == "batch_norm" || name == "batch_norm_relu") return normalise(operation);
    if (name == "relu") return apply_relu(operation);
    if (name == "add") return add(operation);
    if (name == "concat") return concatenate(operation);
    if (name == "dropout") return drop(operation);
    if (name == "max_pool2d" || name == "avg_pool2d") return pool(operation);
    if (name == "reshape") return reshape(operation);
    if (name == "mean") return average(operation);
    fail<UsageError>(who, ": ", place(operation), " has no integer form");
  }

  const Levels& levels_of(Index number) const {
    return number == 0 ? *input_ : steps_[static_cast<std::size_t>(number - 1)].levels;
  }

  void round(const RecordedOperation& operation) {
    const auto& how = std::get<operations::FakeQuantize>(operation.facts);
    check<UsageError>(how.levels.size() == 1, who, ": ", place(operation), " rounds activations by channel");
    const Levels& levels = how.levels[0];
    check<UsageError>(levels.integers.least >= 0 && levels.integers.most <= 255, who, ": ", place(operation),
                      " rounds activations to integers in [", levels.integers.least, ", ", levels.integers.most,
                      "]: expected u8");
    Value& x = value(operation, 0);
    if (x.is_input && x.number < 0) {
      if (!input_) input_ = levels;
      check<UsageError>(*input_ == levels, who, ": ", place(operation),
                        " rounds the model's input to another scale than an earlier layer: expected one scale");
      x.number = 0;
    } else if (x.step) {
      x.step->levels = levels;
      x.number = push_once(std::move(*x.step));
      x.step.reset();
    }
    if (!x.after.empty()) {
      for (auto& step : x.after) {
        step.inputs = {x.number};
        step.levels = levels;
        x.number = push_once(std::move(step));
      }
      x.after.clear();
    }
    check<UsageError>(x.number >= 0 && levels_of(x.number) == levels, who, ": ", place(operation),
                      " rounds one value to two scales");
    rounded_.emplace(x.number, operation.result);
    Value out;
    out.number = x.number;
    values_[operation.output] = out;
  }

  static std::span<const float> floats(const Tensor_& x) {
    Index count = 1;
    for (const Index size : x.shape) count *= size;
    return {static_cast<const float*>(x.data), static_cast<std::size_t>(count)};
  }
  static bool is_dense(const Tensor_& x) {
    Index expected = 1;
    for (std::size_t axis = x.shape.size(); axis-- > 0; expected *= x.shape[axis])
      if (x.shape[axis] != 1 && x.strides[axis] != expected) return false;
    return true;
  }

  void multiply(const RecordedOperation& operation) {
    const bool is_linear = operation.name == "linear";
    const Index x = rounded(operation, 0);
    const auto* const weight = pass_.constant(operation.operands[1]);
    check<UsageError>(weight != nullptr, who, ": the weight of ", place(operation), " is not quantized");
    const auto& levels = weight->how.levels;
    const auto& shape = weight->original.shape;
    check<UsageError>(levels.size() == 1 || weight->how.axis == 0, who, ": the weight of ", place(operation),
                      " has scales along axis ", weight->how.axis, ", expected its outputs, axis 0");
    check<UsageError>(!is_linear || operation.operands[0].shape.size() == 2, who, ": ", place(operation),
                      " has an input of more axes than [batch, features]: it has no integer form yet");
    Step step = begin_step(is_linear ? Kind::linear : Kind::conv2d, operation, {x});
    step.weight_shape = {1, 1, 1, 1};
    std::copy(shape.begin(), shape.end(), step.weight_shape.begin());
    if (!is_linear) {
      const auto& s = std::get<kernels::Conv2dShape>(operation.facts);
      step.stride = {s.stride_h, s.stride_w};
      step.padding = {s.padding_h, s.padding_w};
      step.dilation = {s.dilation_h, s.dilation_w};
      step.groups = s.groups;
    }
    check<UsageError>(is_dense(weight->original), who, ": the weight of ", place(operation), " is not contiguous");
    const auto numbers = floats(weight->original);
    const auto outputs = static_cast<std::size_t>(shape[0]);
    for (std::size_t o = 0; o < outputs; ++o) {
      const auto& own = levels[levels.size() == 1 ? 0 : o];
      check<UsageError>(own.zero_point == 0 && own.integers.least >= -128 && own.integers.most <= 127, who,
                        ": the weight of ", place(operation), " has a zero point of ", own.zero_point,
                        " and integers in [", own.integers.least, ", ", own.integers.most, "]: expected s8, symmetric");
      step.weight_scale.push_back(own.scale);
      for (std::size_t i = o * numbers.size() / outputs; i < (o + 1) * numbers.size() / outputs; ++i)
        step.weight.push_back(static_cast<std::int8_t>(own.level(numbers[i])));
    }
    if (operation.inputs.size() > 2 && operation.inputs[2] != -2) {
      check<UsageError>(operation.inputs[2] == -1, who, ": the bias of ", place(operation), " depends on the input");
      const auto bias = floats(operation.operands[2]);
      step.bias.assign(bias.begin(), bias.end());
    }
    Value out;
    out.step = std::move(step);
    values_[operation.output] = std::move(out);
  }

  void unfold(const RecordedOperation& operation) {
    Value out = value(operation, 0);
    check<UsageError>(out.step && out.step->has_weight() && !out.folds && !out.step->relu && out.after.empty(), who,
                      ": ", place(operation), " follows no convolution");
    out.folds = true;
    values_[operation.output] = std::move(out);
  }

  void normalise(const RecordedOperation& operation) {
    const auto& norm = std::get<operations::BatchNorm<float, Cpu>>(operation.facts);
    check<UsageError>(!norm.training, who, ": ", place(operation), " is in training: call eval() first");
    Value out = value(operation, 0);
    check<UsageError>(out.step && out.folds, who, ": ", place(operation),
                      " follows no convolution that it is folded into: it has no integer form");
    Step& step = *out.step;
    const auto outputs = static_cast<std::size_t>(step.weight_shape[0]);
    const auto numbers = [&](std::size_t operand) {
      return operation.inputs[operand] == -2 ? std::span<const float>() : floats(operation.operands[operand]);
    };
    const auto gamma = numbers(1), beta = numbers(2);
    const float* const mean = norm.running_mean.data();
    const float* const var = norm.running_var.data();
    const std::size_t terms = step.weight.size() / outputs;
    const auto eps = static_cast<float>(norm.eps);
    // A channel that is multiplied by 0 was not folded (FoldFactors): only its bias is left.
    for (std::size_t o = 0; o < outputs; ++o)
      if (quantization::is_nothing(quantized::fold_factor(gamma.empty() ? 1.0f : gamma[o], var[o], eps)))
        std::fill_n(step.weight.begin() + static_cast<std::ptrdiff_t>(o * terms), terms, std::int8_t{0});
    step.bias = quantization::folded_biases(step.weight_shape[0], step.bias.empty() ? nullptr : step.bias.data(),
                                            gamma.empty() ? nullptr : gamma.data(),
                                            beta.empty() ? nullptr : beta.data(), mean, var, eps);
    step.relu = operation.name == "batch_norm_relu";
    out.folds = false;
    values_[operation.output] = std::move(out);
  }

  void apply_relu(const RecordedOperation& operation) {
    Value out = value(operation, 0);
    if (out.number >= 0) {
      Step step = begin_step(Kind::relu, operation, {out.number});
      step.levels = levels_of(out.number);
      out.number = push(std::move(step));
    } else {
      check<UsageError>(out.step && !out.folds, who, ": ", place(operation), " has an input that is not integer");
      check<UsageError>(out.step->may_have_relu(), who, ": ", place(operation), " follows '", out.step->name,
                        "', which is not rounded to integers first");
      out.step->relu = true;
    }
    values_[operation.output] = std::move(out);
  }

  void add(const RecordedOperation& operation) {
    // The bias of a layer with folded batch norm is added after the unfolding.
    if (operation.inputs.size() == 2 && operation.inputs[0] >= 0 && operation.inputs[1] == -1) {
      Value out = value(operation, 0);
      const auto bias = floats(operation.operands[1]);
      if (out.step && out.folds && out.step->bias.empty() &&
          static_cast<Index>(bias.size()) == out.step->weight_shape[0]) {
        out.step->bias.assign(bias.begin(), bias.end());
        values_[operation.output] = std::move(out);
        return;
      }
    }
    check<UsageError>(operation.inputs.size() == 2 && operation.operands[0].shape == operation.operands[1].shape, who,
                      ": ", place(operation), " adds a number, or operands of two shapes: it has no integer form");
    Value out;
    const Index a = rounded(operation, 0), b = rounded(operation, 1);
    out.step = begin_step(Kind::add, operation, {a, b});
    values_[operation.output] = std::move(out);
  }

  void concatenate(const RecordedOperation& operation) {
    const auto rank = static_cast<Index>(operation.result.shape.size());
    const Index axis = std::get<operations::Concat>(operation.facts).axis;
    check<UsageError>((axis < 0 ? axis + rank : axis) == 1 && (rank == 2 || rank == 4), who, ": ", place(operation),
                      " is along axis ", axis, " of ", rank, ": it has an integer form along axis 1 of 2 or 4");
    std::vector<Index> inputs;
    for (std::size_t i = 0; i < operation.inputs.size(); ++i) {
      const Value& x = value(operation, i);
      // A list is concatenated by halves and rounded as a whole.
      if (x.step && x.step->kind == Kind::concat && !x.step->relu && x.after.empty())
        inputs.insert(inputs.end(), x.step->inputs.begin(), x.step->inputs.end());
      else
        inputs.push_back(rounded(operation, i));
    }
    Value out;
    out.step = begin_step(Kind::concat, operation, std::move(inputs));
    values_[operation.output] = std::move(out);
  }

  /// In evaluation dropout is the identity.
  void drop(const RecordedOperation& operation) {
    check<UsageError>(std::get<operations::Dropout>(operation.facts).p == 0, who, ": ", place(operation),
                      " drops numbers also in evaluation: it has no integer form");
    Value out = value(operation, 0);
    values_[operation.output] = std::move(out);
  }

  void pool(const RecordedOperation& operation) {
    const auto& s = std::get<kernels::Pool2dShape>(operation.facts);
    const bool takes_mean = operation.name == "avg_pool2d";
    Value out = value(operation, 0);
    Step step = begin_step(takes_mean ? Kind::avg_pool2d : Kind::max_pool2d, operation, {-1});
    step.window = {s.kernel_h, s.kernel_w};
    step.stride = {s.stride_h, s.stride_w};
    step.padding = {s.padding_h, s.padding_w};
    step.dilation = {s.dilation_h, s.dilation_w};
    step.ceil_mode = s.ceil_mode;
    values_[operation.output] = takes_mean ? averaged(operation, std::move(step)) : chained(out, std::move(step));
  }

  /// A mean that is not rounded yet.
  Value averaged(const RecordedOperation& operation, Step step) {
    Value out;
    step.inputs = {rounded(operation, 0)};
    out.step = std::move(step);
    return out;
  }
  /// Appends a step that keeps levels to a value that may not be rounded yet.
  Value chained(Value out, Step step) {
    if (out.number >= 0) {
      step.inputs = {out.number};
      step.levels = levels_of(out.number);
      out.number = push(std::move(step));
    } else {
      check<UsageError>((out.step || out.is_input) && !out.folds, who, ": '", step.name,
                        "' has an input that is not integer");
      out.after.push_back(std::move(step));
    }
    return out;
  }

  void reshape(const RecordedOperation& operation) {
    const auto& from = operation.operands[0].shape;
    const auto& to = operation.result.shape;
    const Value& x = value(operation, 0);
    if (from == to) {
      values_[operation.output] = Value(x);
    } else if (from.size() == 4 && to.size() == 2 && to[0] == from[0]) {
      values_[operation.output] = chained(x, begin_step(Kind::flatten, operation, {-1}));
    } else if (from.size() == 4 && to.size() == 3 && to[0] == from[0] && to[1] == from[1]) {
      values_[operation.output] = Value(x);  // for a mean over all pixels: see `average`
      pixels_.insert(operation.output);
    } else {
      fail<UsageError>(who, ": ", place(operation), " from ", std::span<const Index>(from), " to ",
                       std::span<const Index>(to), " has no integer form");
    }
  }

  void average(const RecordedOperation& operation) {
    const auto axis = std::get<operations::Mean>(operation.facts).axis;
    check<UsageError>(pixels_.contains(operation.inputs[0]) && (axis == -1 || axis == 2), who, ": ", place(operation),
                      " reduces other axes than those of an image: it has no integer form");
    values_[operation.output] = averaged(operation, begin_step(Kind::global_avg_pool, operation, {-1}));
  }

  const RecordedPass& pass_;
  std::map<Index, Value> values_;
  std::map<Index, Tensor_> rounded_;
  std::set<Index> pixels_;
  std::set<std::string> names_{"input"};
  std::optional<Levels> input_;
  std::vector<Step> steps_;
  std::string unrounded_;
};

}  // namespace detail

/// The integer program of a pass in evaluation with fake quantisation. Throws UsageError, with the name, for an
/// operation without an integer form.
inline Program converted(const RecordedPass& pass) { return detail::Conversion(pass).program(); }

}  // namespace chorus::nn::int8
