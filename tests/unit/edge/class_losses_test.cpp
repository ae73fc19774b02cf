#include <chorus/ops/class_losses.hpp>
#include <chorus/ops/elementary.hpp>

#include "edge.hpp"

namespace class_losses_test {
using namespace edge;

// 0, 1, 2, ... again and again.
Labels labels(Index count, Index classes = 4) {
  std::vector<std::int64_t> all;
  for (Index i = 0; i < count; ++i) all.push_back(i % classes);
  return Labels::from(all, Shape<1>{count}, Device{});
}
template <class X>
auto weights(const X&) {
  using T = typename ch::tensor_of<X>::value_type;
  return Tensor<T, 1>::from({T(1), T(2), T(0), T(0.5)}, {4}, Device{});
}

TEST_CASE("losses over classes at the edge are PyTorch's") {
  Group group("classes");
  for (const auto reduction : {ch::Reduction::none, ch::Reduction::mean, ch::Reduction::sum}) {
    const char* suffix = reduction == ch::Reduction::none   ? " none"
                         : reduction == ch::Reduction::mean ? " mean"
                                                            : " sum";
    const auto is_right = [&](const std::string& name, const auto& whole, const auto& each) {
      if (reduction == ch::Reduction::none)
        operator_is_right<2>(group, name + suffix, each, Rounding::absolute);
      else
        operator_is_right<2>(group, name + suffix, whole, Rounding::absolute);
    };
    const ch::CrossEntropyOptions plain{.reduction = reduction},
        smooth{.label_smoothing = 0.25, .reduction = reduction}, ignored{.ignore_index = 0, .reduction = reduction};
#define BOTH(NAME, ...)                                    \
  [=](const auto& x) { return ch::NAME(x, __VA_ARGS__); }, \
      [=](const auto& x) { return ch::NAME##_per_sample(x, __VA_ARGS__); }
    is_right("cross_entropy", BOTH(cross_entropy, labels(x.shape()[0]), plain));
    is_right("cross_entropy smooth", BOTH(cross_entropy, labels(x.shape()[0]), smooth));
    is_right("cross_entropy ignored", BOTH(cross_entropy, labels(x.shape()[0]), ignored));
    is_right("cross_entropy all ignored", BOTH(cross_entropy, Labels::full({x.shape()[0]}, -100, Device{}), plain));
    is_right("cross_entropy weighted", BOTH(cross_entropy, labels(x.shape()[0]), weights(x), plain));
    is_right("nll_loss", BOTH(nll_loss, labels(x.shape()[0]), {.reduction = reduction}));
    is_right("nll_loss weighted", BOTH(nll_loss, labels(x.shape()[0]), weights(x), {.reduction = reduction}));
    const auto of_two = [&](const auto& whole, const auto& each) {
      const std::string name = std::string("cross_entropy probabilities") + suffix;
      if (reduction == ch::Reduction::none)
        operator_is_right<2, 2>(group, name, each, Rounding::absolute);
      else
        operator_is_right<2, 2>(group, name, whole, Rounding::absolute);
    };
    const auto target = [](const auto& t) { return ch::abs(t.value()) / 6.5; };
    of_two([=](const auto& x, const auto& t) { return ch::cross_entropy(x, target(t), plain); },
           [=](const auto& x, const auto& t) { return ch::cross_entropy_per_sample(x, target(t), plain); });
    const auto places = labels(12, 2).view(Shape<2>{4, 3});
    const std::string name = std::string("cross_entropy of places") + suffix;
    if (reduction == ch::Reduction::none)
      operator_is_right<3>(group, name, [=](const auto& x) { return ch::cross_entropy_per_sample(x, places, plain); });
    else
      operator_is_right<3>(group, name, [=](const auto& x) { return ch::cross_entropy(x, places, plain); });
#undef BOTH
  }
  operator_is_right<2>(group, "cross_entropy of one class",
                       [](const auto& x) { return ch::cross_entropy_per_sample(x, labels(x.shape()[0], 1)); });
  group_is_whole(group);
}

}  // namespace class_losses_test
