// Fake quantisation, observers, folded batch norm, and training with them.
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/convolution.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/optim/sgd.hpp>
#include <chorus/quantization/ops/fake_quantize.hpp>
#include <chorus/quantization/quantization_aware.hpp>
#include <chorus/quantization/quantized.hpp>

#include "case.hpp"
#include "quantized.hpp"

#ifndef CHORUS_GOLDEN_ON_CPU  // fake quantisation is for the CPU
namespace golden {
void add_quantization(Operations&) {}
}  // namespace golden
#else

namespace golden {
namespace {

namespace nn = ch::nn;
namespace quantization = ch::nn::quantization;
using ch::quantized::Integers;
using ch::quantized::Levels;

struct Ends {
  std::int64_t least, most;
};
Ends ends_of(const Case& test) { return {test.attr<std::int64_t>("quant_min"), test.attr<std::int64_t>("quant_max")}; }

void fake_quantize(Case& test) {
  const auto ends = ends_of(test);
  unary(test, [&](const auto& x) {
    return ch::fake_quantize(x, test.attr<float>("scale"), test.attr<std::int64_t>("zero_point"), ends.least,
                             ends.most);
  });
}

void fake_quantize_per_channel(Case& test) {
  const auto ends = ends_of(test);
  const auto scales = test.tensor<1>("scale");
  const auto zero_points = test.integers<1>("zero_point");
  const int axis = test.attr<int>("axis");
  const auto x = test.in("x", test.around("x", axis));
  test.out_numbers("y", ch::fake_quantize_per_channel(x, scales, zero_points, 1, ends.least, ends.most));
}

void quantize_per_tensor(Case& test) {
  const auto ends = ends_of(test);
  const auto scale = test.attr<float>("scale");
  const auto zero_point = test.attr<std::int64_t>("zero_point");
  const auto x = test.tensor("x", Shape<1>{test.numel("x")});
  const auto q = ch::quantize_per_tensor<std::int64_t>(x, scale, zero_point, ends.least, ends.most);
  test.compare_integers("out.q", q.to_vector());
  test.out_numbers("y", ch::dequantize_per_tensor(q, scale, zero_point));
}

void quantize_per_channel(Case& test) {
  const auto ends = ends_of(test);
  const auto scales = test.tensor<1>("scale");
  const auto zero_points = test.integers<1>("zero_point");
  const int axis = test.attr<int>("axis");
  const auto x = test.tensor("x", test.around("x", axis));
  const auto q = ch::quantize_per_channel<std::int64_t>(x, scales, zero_points, 1, ends.least, ends.most);
  test.compare_integers("out.q", q.to_vector());
  test.out_numbers("y", ch::dequantize_per_channel(q, scales, zero_points, 1));
}

/// The ranges of one value, of the whole or by channel, and what they are step by step.
class Observed {
 public:
  explicit Observed(const Case& test)
      : symmetric_(test.attr<bool>("symmetric")),
        integers_{test.attr<std::int32_t>("quant_min"), test.attr<std::int32_t>("quant_max")},
        share_(test.attr<float>("averaging_constant", 0)) {}

  template <int Rank>
  void observe(const Tensor<Rank>& x, int axis) {
    const auto shape = ch::detail::channels_along(x.shape(), axis);
    const auto channels = static_cast<std::size_t>(shape.channels);
    std::vector<float> min(channels), max(channels);
    ch::kernels::min_max(ch::Cpu{}, shape, x.data(), min.data(), max.data());
    ranges_.resize(channels);
    for (std::size_t i = 0; i < channels; ++i) {
      const quantization::Range seen{min[i], max[i]};
      ranges_[i] = share_ > 0 ? quantization::MovingAverage{share_}(ranges_[i], seen)
                              : quantization::MinMax{}(ranges_[i], seen);
    }
  }
  std::vector<Levels> levels() const {
    std::vector<Levels> out;
    for (const auto& range : ranges_)
      out.push_back(symmetric_ ? ch::quantized::symmetric_levels(range.min, range.max, integers_)
                               : ch::quantized::affine_levels(range.min, range.max, integers_));
    return out;
  }
  void note() {
    for (const auto& range : ranges_) min_.push_back(range.min), max_.push_back(range.max);
    for (const auto& one : levels()) scale_.push_back(one.scale), zero_point_.push_back(one.zero_point);
  }
  void compare(Case& test) const {
    if (test.has("out.min_val")) {
      test.compare_numbers("out.min_val", min_);
      test.compare_numbers("out.max_val", max_);
    }
    test.compare_numbers("out.scale", scale_);
    test.compare_integers("out.zero_point", zero_point_);
  }

 private:
  bool symmetric_;
  Integers integers_;
  float share_;
  std::vector<quantization::Range> ranges_;
  std::vector<float> min_, max_, scale_;
  std::vector<std::int64_t> zero_point_;
};

/// x, one tensor behind the other, each as [outer, axis, inner]; `axis` counts within one, and -1 says that there is
/// none.
Shape<4> steps_of(const Case& test, int axis) {
  const auto& shape = test.shape("x");
  ch::check<ch::ShapeError>(!shape.empty() && axis < test.rank("x") - 1, "no steps with an axis ", axis);
  Shape<4> out{shape[0], 1, 1, 1};
  for (int i = 1; i < test.rank("x"); ++i)
    out[axis < 0 || i - 1 < axis ? 1 : i - 1 == axis ? 2 : 3] *= shape[static_cast<std::size_t>(i)];
  return out;
}

void observer(Case& test) {
  Observed observed(test);
  const int axis = test.attr<int>("axis", -1);
  const auto steps = test.tensor("x", steps_of(test, axis));
  for (Index step = 0; step < steps.size(0); ++step) {
    observed.observe(ch::contiguous(steps[step]), axis < 0 ? -1 : 1);
    observed.note();
  }
  observed.compare(test);
}

void schedule(Case& test) {
  Observed observed(test);
  const int axis = test.attr<int>("axis", -1);
  const auto observes = test.attr<std::vector<int>>("observer_enabled");
  const auto rounds = test.attr<std::vector<int>>("fake_quant_enabled");
  const auto steps = test.tensor("x", steps_of(test, axis));
  const auto gradients = Tensor<4>::from(std::span<const float>(test.file("gout.y").f32()), steps.shape());
  test.seen("gout.y");
  std::vector<float> y, grad;
  for (Index step = 0; step < steps.size(0); ++step) {
    const auto at = static_cast<std::size_t>(step);
    const Variable<3> x(ch::contiguous(steps[step]), true);
    if (observes[at] != 0) observed.observe(x.value(), axis < 0 ? -1 : 1);
    observed.note();
    const auto out =
        rounds[at] != 0 ? ch::detail::fake_quantize(x, observed.levels(), axis < 0 ? -1 : 1, "schedule") : x;
    for (const float number : out.value().to_vector()) y.push_back(number);
    out.backward(ch::contiguous(gradients[step]));
    for (const float number : x.grad().to_vector()) grad.push_back(number);
  }
  observed.compare(test);
  test.compare_numbers("out.y", y);
  test.compare_numbers("grad.x", grad);
}

void fold_batch_norm(Case& test) {
  const auto mean = test.tensor<1>("running_mean"), shift = test.tensor<1>("bn_bias"), bias = test.tensor<1>("bias");
  const auto gamma = test.in<1>("bn_weight");
  const quantization::FoldFactors factors(gamma.value(), test.tensor<1>("running_var"), test.attr<float>("eps"));
  const auto channels = test.around("weight", 0);
  const Shape<4> weight{channels[1], channels[2], 1, 1};  // of any convolution
  test.out_numbers("weight", quantization::fold(test.in("weight", weight), gamma, factors));
  std::vector<float> folded;
  for (Index i = 0; i < bias.numel(); ++i)
    folded.push_back(ch::quantized::folded_bias(factors.factor[static_cast<std::size_t>(i)], bias.data()[i],
                                                mean.data()[i], shift.data()[i]));
  test.compare_numbers("out.bias", folded);
}

struct Small : nn::Module {
  nn::Conv2d<Device> conv1, conv2;
  nn::BatchNormReLU2d<Device> bn1, bn2;
  nn::Linear<Device> fc;
  CHORUS_MODULE(Small, conv1, bn1, conv2, bn2, fc)

  Small(Index in, Index width1, Index width2, Index features, Index classes)
      : conv1{in, width1, {.kernel = 3, .padding = 1, .bias = false}},
        conv2{width1, width2, {.kernel = 3, .stride = 2, .padding = 1, .bias = false}},
        bn1{width1},
        bn2{width2},
        fc{features, classes} {}
  auto forward(const auto& images) const { return fc(ch::flatten(bn2(conv2(bn1(conv1(images)))))); }
};

void train(Case& test) {
  const auto size = [&](const char* name, std::size_t axis) { return test.file(name).shape.at(axis); };
  const auto integers = [&](const char* name) {
    return Integers{test.attrs().at(name).at(0).get<std::int32_t>(), test.attrs().at(name).at(1).get<std::int32_t>()};
  };
  nn::QuantizationAware<Small> model{
      Small{size("init.conv1.weight", 1), size("init.conv1.weight", 0), size("init.conv2.weight", 0),
            size("init.fc.weight", 1), size("init.fc.weight", 0)},
      {.activations = integers("activation"),
       .weights = integers("weight"),
       .averaging = test.attr<float>("activation_averaging_constant"),
       .weight_averaging = test.attr<float>("weight_averaging_constant")}};
  const auto load = [&](const std::string& name, void* data) {
    std::visit(
        [&](const auto& values) {
          ch::copy_bytes(Device{}, data, ch::Cpu{}, values.data(), values.size() * sizeof(values[0]));
        },
        test.file("init." + name).values);
  };
  for (const auto& named : nn::named_parameters<Device>(model)) load(named.name, named.parameter->value_data());
  for (const auto& named : nn::named_buffers<Device>(model))
    if (!named.name.starts_with("quantization.")) load(named.name, named.buffer->data());

  ch::optim::Sgd<Device> optimizer{nn::named_parameters<Device>(model),
                                   {.lr = test.attr<double>("lr"), .momentum = test.attr<double>("momentum")}};
  const auto shape = as_shape<5>("batch.images", test.file("batch.images").shape);
  const auto images = Tensor<5>::from(std::span<const float>(test.file("batch.images").f32()), shape);
  const auto labels = ch::Tensor<std::int64_t, 2, Device>::from(
      std::span<const std::int64_t>(test.file("batch.labels").i64()), {shape[0], shape[1]});
  std::vector<float> losses;
  std::map<std::string, std::vector<float>> scales, weight_scales;
  std::map<std::string, std::vector<std::int64_t>> zero_points;
  for (Index step = 0; step < shape[0]; ++step) {
    if (step == test.attr<Index>("freeze_bn_at")) model.freeze_norms();
    if (step == test.attr<Index>("disable_observer_at")) model.observe(false);
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(model(images[step]), labels[step]);
    loss.backward();
    optimizer.step();
    losses.push_back(loss.item());
    const auto note = [&](const std::string& name, const quantization::ActivationSite& site) {
      const auto levels = site.levels(model.scheme());
      scales[name].push_back(levels.scale);
      zero_points[name].push_back(levels.zero_point);
    };
    note("quant", model.ranges()[0].input);
    for (const auto& layer : model.ranges()) {
      note(layer.name, layer.output);
      for (const auto& levels : layer.weight_levels(model.scheme())) weight_scales[layer.name].push_back(levels.scale);
    }
  }
  test.compare_numbers("out.loss", losses);
  for (const auto& [name, numbers] : scales) test.compare_numbers("out.scale." + name, numbers);
  for (const auto& [name, numbers] : zero_points) test.compare_integers("out.zero_point." + name, numbers);
  for (const auto& [name, numbers] : weight_scales) test.compare_numbers("out.weight_scale." + name, numbers);
  for (const auto& named : nn::named_parameters<Device>(model)) {
    const auto* const numbers = static_cast<const float*>(named.parameter->value_data());
    test.compare_numbers("final." + named.name, {numbers, static_cast<std::size_t>(named.parameter->count())});
  }
  for (const auto& named : nn::named_buffers<Device>(model)) {
    if (named.name.starts_with("quantization.")) continue;
    const auto count = static_cast<std::size_t>(named.buffer->count());
    if (named.buffer->dtype() == ch::DType::f32)
      test.compare_numbers("final." + named.name, {static_cast<const float*>(named.buffer->data()), count});
    else
      test.compare_integers("final." + named.name, {static_cast<const std::int64_t*>(named.buffer->data()), count});
  }
  model.eval();
  test.compare("out.eval_logits", model(test.tensor<4>("eval_images")).value());
  compare_int8_network(test);
  compare_integers_of(test, nn::quantized(model, test.tensor<4>("eval_images")));
  test.seen("out.torch_convert_logits");
}

}  // namespace

void add_quantization(Operations& operations) {
  operations["fake_quantize_per_tensor"] = fake_quantize;
  operations["fake_quantize_per_channel"] = fake_quantize_per_channel;
  operations["fake_quantize_schedule"] = schedule;
  operations["quantize_per_tensor"] = quantize_per_tensor;
  operations["quantize_per_channel"] = quantize_per_channel;
  for (const char* name : {"min_max", "moving_average_min_max", "per_channel_min_max",
                           "moving_average_per_channel_min_max"})
    operations[ch::cat("observer.", name)] = observer;
  operations["fold_batch_norm"] = fold_batch_norm;
  operations["train.QatConvBnReLU"] = train;
}

}  // namespace golden
#endif
