// Cross entropy of bf16 and half logits as they are, and gradients in the logits' place: as on the CPU, where logits are
// made float; and never in the place of what somebody still has.
#include <catch.hpp>
#include <chorus/autograd/grad.hpp>
#include <chorus/nn/linear.hpp>
#include <chorus/nn/mixed_precision.hpp>
#include <chorus/ops/cross_entropy.hpp>
#include <chorus/parallel/cuda/graphed.hpp>
#include <chorus/ops/arithmetic.hpp>
#include <chorus/ops/reduction.hpp>
#include <chorus/ops/shape.hpp>
#include <chorus/parallel/single_device.hpp>
#include <functional>
#include <limits>

#include "compare.hpp"

namespace losses_gpu_test {

using namespace chorus;

template <class T>
std::vector<T> scores(Index batch, Index classes) {
  auto x = ::numbers<T>(batch * classes, 1);
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (i % 7 == 2) x[i] = static_cast<T>(1000 * static_cast<float>(x[i]));  // the largest comes late, and far above
    if (i % 11 < 3) x[i] = static_cast<T>(-std::numeric_limits<float>::infinity());
  }
  return x;
}

// Loss and gradient, and where the gradient lies, of logits that an operation has made.
struct Result {
  std::vector<float> loss, gradient;
};
template <class T, class D>
Result result(D device, Index batch, Index classes, const CrossEntropyOptions& options) {
  std::vector<std::int64_t> labels;
  for (Index i = 0; i < batch; ++i) labels.push_back(i % 5 == 3 ? -100 : i * classes / batch / 11 * 11 + 3);
  for (auto& label : labels) label = label < classes ? label : classes - 1;
  const auto leaf = Variable<T, 2, D>(Tensor<T, 2, D>::from(scores<T>(batch, classes), {batch, classes}, device), true);
  const auto target = Tensor<std::int64_t, 1>::from(labels, {batch});
  Result out;
  const auto run = [&](const auto& loss) {
    out.loss = to<float>(reshape(loss.value(), Shape<1>{-1})).to_vector();
    sum(loss * 2.0).backward();
  };
  if (options.reduction == Reduction::none)
    run(cross_entropy_per_sample(leaf + leaf, target, options));
  else
    run(cross_entropy(leaf + leaf, target, options));
  out.gradient = to<float>(leaf.grad()).to_vector();
  return out;
}

TEST_CASE("cross entropy of narrow logits on a GPU") {
  if (!gpu_present()) return;
  const auto check_type = [](auto number, double tolerance) {
    using T = decltype(number);
    for (const auto reduction : {Reduction::none, Reduction::mean})
      for (const Index classes : {5, 1000, 2051}) {
        const CrossEntropyOptions options{.reduction = reduction};
        CAPTURE(dtype<T>, static_cast<int>(reduction), classes);
        const auto expected = result<T>(Cpu{}, 6, classes, options), actual = result<T>(Cuda{}, 6, classes, options);
        CHECK(error(actual.loss, expected.loss) <= tolerance);
        CHECK(error(actual.gradient, expected.gradient) <= tolerance);
      }
  };
  check_type(bf16{}, 1e-2);
  check_type(chorus::half{}, 1e-3);
  check_type(float{}, 1e-5);
}

// Where the gradient by the logits lies, which is told to a hook, as the logits themselves do.
template <class T>
struct Places {
  const T *logits, *gradient = nullptr;
};
template <class T, class Use>
Places<T> places(const Use& use) {
  const auto leaf = Variable<T, 2, Cuda>(Tensor<T, 2, Cuda>::from(::numbers<T>(6, 1), {2, 3}, Cuda{}), true);
  auto logits = leaf + leaf;
  Places<T> out{logits.value().data()};
  logits.register_hook([&](const Tensor<T, 2, Cuda>& gradient) { out.gradient = gradient.data(); });
  use(std::move(logits));
  return out;
}

template <class T>
void check_places() {
  const auto labels = Tensor<std::int64_t, 1>::from({0, 2}, {2});
  const auto numbers = [](const auto& x) { return to<float>(x).to_vector(); };
  const auto alone = places<T>([&](auto logits) {
    const auto loss = cross_entropy(logits, labels);
    logits = {};
    loss.backward();
  });
  CHECK(alone.gradient == alone.logits);

  const auto held = places<T>([&](const auto& logits) {
    const auto before = numbers(logits.value());
    cross_entropy(logits, labels).backward();
    CHECK(numbers(logits.value()) == before);
  });
  CHECK(held.gradient != nullptr);
  CHECK(held.gradient != held.logits);

  const auto viewed = places<T>([&](auto logits) {
    const auto row = logits.value().select(0, 1);
    const auto before = numbers(row);
    const auto loss = cross_entropy(logits, labels);
    logits = {};
    loss.backward();
    CHECK(numbers(row) == before);
  });
  CHECK(viewed.gradient != viewed.logits);

  // Another operation's backward needs them, after this one's.
  const auto saved = places<T>([&](auto logits) {
    const auto square = logits * logits;
    const auto loss = cross_entropy(logits, labels) + sum(square);
    logits = {};
    loss.backward();
  });
  CHECK(saved.gradient != saved.logits);

  std::vector<std::vector<float>> twice;
  const auto retained = places<T>([&](auto logits) {
    const auto node = logits.node();
    const auto loss = cross_entropy(logits, labels);
    logits = {};
    node->add_gradient_hook(std::make_unique<chorus::detail::TypedHook<std::function<void(const Tensor<T, 2, Cuda>&)>,
                                                                       GradNode<T, 2, Cuda>>>(
        [&](const Tensor<T, 2, Cuda>& gradient) { twice.push_back(numbers(gradient)); }));
    loss.backward(true);
    loss.backward();
  });
  REQUIRE(twice.size() == 2);
  CHECK(twice[0] == twice[1]);
  CHECK(retained.gradient == retained.logits);  // at last
}

TEST_CASE("the gradient by logits lies in their place where nobody else has them") {
  if (!gpu_present()) return;
  check_places<float>();
  check_places<bf16>();
}

struct Net : nn::Module {
  nn::Linear<Cuda> fc{4, 3};
  CHORUS_MODULE(Net, fc)
  auto forward(const auto& x) const { return fc(x); }
};
Tensor<float, 2, Cuda> input() { return Tensor<float, 2, Cuda>::from(::numbers<float>(20, 5), {5, 4}, Cuda{}); }
Tensor<std::int64_t, 1> targets() { return Tensor<std::int64_t, 1>::from({0, 2, 1, 1, -100}, {5}); }

// What the loss of the net's output sends to its weight, when somebody does `before_loss` and `before_backward`; with
// another loss of the same logits beside it.
template <class Before, class Between>
std::vector<float> weight_gradient(const Before& before_loss, const Between& before_backward, bool beside = false) {
  manual_seed(3);
  Net inner;
  const auto weight = inner.fc.weight;
  SingleDevice<nn::MixedPrecision<Net>> net{nn::MixedPrecision<Net>{std::move(inner)}};
  const auto logits = net(input());
  before_loss(logits);
  const auto loss = cross_entropy(logits, targets());
  before_backward(logits);
  if (beside)
    (loss + mean(logits * logits)).backward();
  else
    loss.backward();
  const auto seen = logits.value().to_vector();
  CHECK(seen == net(input()).value().to_vector());
  return weight.grad().to_vector();
}

TEST_CASE("a model in bf16 gives float logits to who reads them, at any time") {
  if (!gpu_present()) return;
  const auto nothing = [](const auto&) {};
  const auto read = [](const auto& logits) { CHECK(logits.value().to_vector().size() == 15); };
  const auto unread = weight_gradient(nothing, nothing);
  CHECK(weight_gradient(read, nothing) == unread);
  CHECK(weight_gradient(nothing, read) == unread);
  CHECK(error(weight_gradient(nothing, nothing, true), weight_gradient(read, nothing, true)) < 1e-2);

  // The gradient by them is float, too: for hooks, which may change it, and for `grad`.
  int hooks = 0;
  const auto doubled = weight_gradient(
      [&](const auto& logits) {
        logits.register_hook([&](const Tensor<float, 2, Cuda>& gradient) {
          ++hooks;
          return gradient + gradient;
        });
      },
      nothing);
  CHECK(hooks == 1);
  REQUIRE(doubled.size() == unread.size());
  for (std::size_t i = 0; i < unread.size(); ++i) CHECK(doubled[i] == 2 * unread[i]);
  const auto doubled_in_place = weight_gradient(
      [](const auto& logits) {
        logits.register_hook([](const Tensor<float, 2, Cuda>& gradient) {
          kernels::axpy(gradient.device(), gradient.numel(), 1.f, gradient.data(), gradient.data());
        });
      },
      nothing);
  CHECK(doubled_in_place == doubled);
}

TEST_CASE("float logits that a captured step hands out are each replay's") {
  if (!gpu_present()) return;
  manual_seed(3);
  SingleDevice<nn::MixedPrecision<Net>> net{nn::MixedPrecision<Net>{}};
  Variable<float, 2, Cuda> logits;
  Graphed step(net,
               [&](const auto& x, const auto& y) {
                 logits = net(x);
                 return cross_entropy(logits, y);
               },
               {.warm_up = 2});
  for (int i = 0; i < 5; ++i) {
    const auto x = Tensor<float, 2, Cuda>::from(::numbers<float>(20, static_cast<unsigned>(i)), {5, 4}, Cuda{});
    step(x, targets());
    CHECK(logits.value().to_vector() == net(x).value().to_vector());
  }
  CHECK(step.replays() == 3);
}

}  // namespace losses_gpu_test
