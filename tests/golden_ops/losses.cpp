// Losses.
#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/ops/losses.hpp>
#include <chorus/ops/more_losses.hpp>

#include "case.hpp"

namespace golden {
namespace {

// `per_element(x, target)`, or `reduced(x, target, reduction)` of all elements as the losses themselves reduce them.
template <class PerElement, class Reduced>
void loss(Case& test, const PerElement& per_element, const Reduced& reduced) {
  const auto reduction = reduction_of(test);
  const Shape<1> flat{test.numel("x")};
  const auto x = test.in<1>("x", flat), target = test.in<1>("target", flat);
  if (reduction == ch::Reduction::none)
    test.out_numbers("y", per_element(x, target));
  else
    test.out("y", reduced(x, target, reduction));
}

// `per_sample(x, target, weight..., options)`, or `reduced` of the same; weight where the case has one.
template <class PerSample, class Reduced, class Options>
void class_loss(Case& test, Options options, const PerSample& per_sample, const Reduced& reduced) {
  options.reduction = reduction_of(test);
  options.ignore_index = test.attr<std::int64_t>("ignore_index", -100);
  const auto run = [&](const auto& x, const auto& labels) {
    const auto call = [&](const auto&... arguments) {
      if (options.reduction == ch::Reduction::none)
        test.out_numbers("y", per_sample(arguments..., options));
      else
        test.out("y", reduced(arguments..., options));
    };
    if (test.has("in.weight"))
      call(x, labels, ch::to<Number>(test.tensor<1>("weight")));
    else
      call(x, labels);
  };
  const Shape<1> samples{ch::numel(test.shape("target"))};
  if (test.rank("x") <= 2) return run(test.in("x", test.stacked<2>("x")), test.integers("target", samples));
  const auto& shape = test.shape("x");  // [batch, classes, places...]
  const Index places = samples[0] / std::max<Index>(shape[0], 1);
  run(test.in("x", Shape<4>{shape[0], shape[1], places, 1}), test.integers("target", Shape<3>{shape[0], places, 1}));
}

}  // namespace

void add_losses(Operations& operations) {
#define LOSS(NAME)                                                                                        \
  operations[#NAME] = [](Case& test) {                                                                    \
    loss(                                                                                                 \
        test, [](const auto& x, const auto& t) { return ch::NAME##_per_element(x, t); },                  \
        [](const auto& x, const auto& t, ch::Reduction reduction) { return ch::NAME(x, t, reduction); }); \
  }
  LOSS(mse_loss);
  LOSS(l1_loss);
#undef LOSS
  operations["bce_with_logits"] = [](Case& test) {
    if (test.has("in.pos_weight") || test.has("in.weight")) {
      const auto x = test.in("x", test.widened("x")), target = test.in("target", test.widened("target"));
      const auto weights = [&](const char* name) {
        return test.has(ch::cat("in.", name)) ? ch::to<Number>(test.tensor(name, test.widened(name)))
                                              : ch::to<Number>(Tensor<5>::ones({1, 1, 1, 1, 1}));
      };
      const auto weight = weights("weight"), pos_weight = weights("pos_weight");
      if (reduction_of(test) == ch::Reduction::none)
        return test.out_numbers("y", ch::bce_with_logits_per_element(x, target, weight, pos_weight));
      return test.out("y", ch::bce_with_logits(x, target, weight, pos_weight, reduction_of(test)));
    }
    loss(
        test, [](const auto& x, const auto& t) { return ch::bce_with_logits_per_element(x, t); },
        [](const auto& x, const auto& t, ch::Reduction reduction) { return ch::bce_with_logits(x, t, reduction); });
  };
  operations["smooth_l1_loss"] = [](Case& test) {
    const double beta = test.attr("beta", 1.0);
    loss(
        test, [&](const auto& x, const auto& t) { return ch::smooth_l1_loss_per_element(x, t, beta); },
        [&](const auto& x, const auto& t, ch::Reduction reduction) {
          return ch::smooth_l1_loss(x, t, beta, reduction);
        });
  };
  operations["huber_loss"] = [](Case& test) {
    const double delta = test.attr("delta", 1.0);
    loss(
        test, [&](const auto& x, const auto& t) { return ch::huber_loss_per_element(x, t, delta); },
        [&](const auto& x, const auto& t, ch::Reduction reduction) { return ch::huber_loss(x, t, delta, reduction); });
  };
  operations["kl_div"] = [](Case& test) {
    if (test.attr<std::string>("reduction", "mean") == "batchmean") {
      const Index batch = test.rank("x") > 0 ? test.shape("x")[0] : 1;
      const Shape<2> rows{batch, test.numel("x") / std::max<Index>(batch, 1)};
      test.out("y", ch::kl_div(test.in("x", rows), test.in("target", rows)));
    } else {
      loss(
          test, [](const auto& x, const auto& t) { return ch::kl_div_per_element(x, t); },
          [](const auto& x, const auto& t, ch::Reduction reduction) {
            const auto losses = ch::kl_div_per_element(x, t);
            return reduction == ch::Reduction::mean ? ch::mean(losses) : ch::sum(losses);
          });
    }
  };
  operations["cross_entropy"] = [](Case& test) {
    if (test.file("in.target").values.index() == 0) {  // probabilities
      const ch::CrossEntropyOptions options{.label_smoothing = test.attr("label_smoothing", 0.0),
                                            .reduction = reduction_of(test)};
      const auto x = test.in<2>("x"), target = test.in<2>("target");
      if (options.reduction == ch::Reduction::none)
        test.out("y", ch::cross_entropy_per_sample(x, target, options));
      else
        test.out("y", ch::cross_entropy(x, target, options));
      return;
    }
    class_loss(
        test, ch::CrossEntropyOptions{.label_smoothing = test.attr("label_smoothing", 0.0)},
        [](const auto&... arguments) { return ch::cross_entropy_per_sample(arguments...); },
        [](const auto&... arguments) { return ch::cross_entropy(arguments...); });
  };
  operations["nll_loss"] = [](Case& test) {
    class_loss(
        test, ch::NllLossOptions{}, [](const auto&... arguments) { return ch::nll_loss_per_sample(arguments...); },
        [](const auto&... arguments) { return ch::nll_loss(arguments...); });
  };
}

}  // namespace golden
