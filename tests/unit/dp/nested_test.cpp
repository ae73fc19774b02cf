// DataParallel: inputs and outputs in tuples, vectors, maps, optionals and structs; losses that the model computes
// itself.
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <map>
#include <optional>
#include <tuple>

#include <unit/comm/processes.hpp>
#include <unit/parallel/policies.hpp>

namespace dp_nested_test {

using namespace test::names;
using Matrix = Tensor<double, 2>;
using Recorded = Variable<double, 2>;

/// Named arguments, like keyword arguments.
struct Batch {
  Matrix images;
  Recorded mask;
  double factor = 1;
  std::string note;
  auto fields() { return std::tie(images, mask, factor, note); }
};

template <class D>
struct TakesNested : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(TakesNested, fc)
  auto forward(const Batch& batch, const std::map<std::string, Recorded>& more,
               const std::tuple<Matrix, std::vector<Recorded>>& rest) const {
    check<UsageError>(batch.note == "kept", "the note is lost");
    const auto& [extra, list] = rest;
    auto y = tanh(fc(batch.images)) * batch.mask * batch.factor + more.at("shift");
    for (const auto& one : list) y = y + one * extra;
    return y;
  }
};

struct Result {
  Recorded y, h;
  std::vector<Recorded> both;
  std::string note;
  auto fields() { return std::tie(y, h, both, note); }
};

template <class D>
struct GivesNested : nn::Module {
  nn::Linear<D, double> fc1{5, 4}, fc2{4, 3};
  CHORUS_MODULE(GivesNested, fc1, fc2)
  auto forward(const auto& x) const {
    const auto h = tanh(fc1(x));
    const auto y = fc2(h);
    const std::map<std::string, Recorded> named{{"h", h}, {"y", y}};
    return std::tuple(Result{y, h, {h, h}, "a note"}, named, std::pair(mean(h), 7));
  }
};

/// The number of tensors, or the keys, that it returns depend on its share's first number.
template <class D>
struct Uneven : nn::Module {
  nn::Linear<D, double> fc{5, 4};
  CHORUS_MODULE(Uneven, fc)
  auto forward(const auto& x) const {
    const auto count = static_cast<std::size_t>(x(0, 0));
    return std::pair(std::vector<Matrix>(count, x), std::map<std::size_t, Matrix>{{count == 3 ? 1 : 0, x}});
  }
};

/// Takes and returns optional values.
struct Perhaps {
  std::optional<Recorded> y;
  std::optional<double> factor;
  auto fields() { return std::tie(y, factor); }
};
template <class D>
struct Optional : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Optional, fc)
  auto forward(const auto& x, const std::optional<Recorded>& mask, const Perhaps& more) const {
    check<UsageError>(more.factor.has_value(), "the factor is lost");
    auto y = fc(x) * *more.factor;
    if (mask) y = y * *mask;
    if (more.y) y = y + *more.y;
    std::optional<Recorded> positive;
    if (value_of(x)(0, 0) > 0) positive = y;
    return std::tuple(Perhaps{y, 2.0}, std::optional(std::pair(mean(y), 7)), positive);
  }
};

/// Computes its loss itself.
template <class D>
struct WithLoss : nn::Module {
  nn::Linear<D, double> fc1{5, 7}, fc2{7, 3};
  CHORUS_MODULE(WithLoss, fc1, fc2)
  auto forward(const auto& x, const auto& targets) const { return cross_entropy(fc2(tanh(fc1(x))), targets); }
};

template <class Net>
std::vector<double> step_nested(Net& net) {
  const Recorded mask(numbers(7, 3, 2), true), shift(numbers(7, 3, 3), true), one(numbers(7, 3, 4), true);
  const Batch batch{numbers(7, 5, 1), mask, 0.5, "kept"};
  const std::map<std::string, Recorded> more{{"shift", shift}, {"unused", Recorded(numbers(7, 2, 9), true)}};
  const std::tuple<Matrix, std::vector<Recorded>> rest{numbers(7, 3, 5), {one, one * 2.0}};
  const auto y = net(batch, more, rest);
  y.backward(numbers(7, 3, 6));
  auto out = y.value().to_vector();
  for (const auto& x : {mask.grad(), shift.grad(), one.grad()})
    for (const double v : x.to_vector()) out.push_back(v);
  for (const double v : test::gradients(net.module())) out.push_back(v);
  return out;
}

TEST_CASE("dp nested: tensors inside of structs, maps, tuples and vectors are cut, and get their gradients") {
  SingleDevice<TakesNested<Cpu>> single{make<TakesNested<Cpu>>(), 3};
  const auto expected = step_nested(single);
  for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {0, 1, 2}, {1, 1, 0, 2}}) {
    DataParallel<TakesNested<Cpu>> net{make<TakesNested<Cpu>>(), {.device_ids = ids}, 3};
    CHECK(distance(step_nested(net), expected) < rounding);
  }
}

TEST_CASE("dp nested: an input of another batch is no part of this one's, at any depth") {
  DataParallel<TakesNested<Cpu>> net{make<TakesNested<Cpu>>(), {.device_ids = {0, 1}}, 3};
  const Batch batch{numbers(7, 5, 1), Recorded(numbers(7, 3, 2)), 1, "kept"};
  const std::map<std::string, Recorded> more{{"shift", Recorded(numbers(7, 3, 3))}};
  const std::tuple<Matrix, std::vector<Recorded>> rest{numbers(7, 3, 5), {Recorded(numbers(6, 3, 3))}};
  CHECK_THAT(message_of<ShapeError>([&] { net(batch, more, rest); }), Contains("[6, 3] and [4, 3] do not broadcast"));
}

TEST_CASE("dp nested: outputs are joined member by member, and go back so") {
  SingleDevice<GivesNested<Cpu>> single{make<GivesNested<Cpu>>(), 3};
  DataParallel<GivesNested<Cpu>> net{make<GivesNested<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto x = numbers(7, 5, 1);
  const auto [result, named, scalars] = net(x);
  const auto [expected, expected_named, expected_scalars] = single(x);
  const auto same = [](const Recorded& a, const Recorded& b) {
    return distance(a.value().to_vector(), b.value().to_vector()) < rounding;
  };
  CHECK(same(result.y, expected.y));
  CHECK(same(result.both.at(1), expected.h));
  CHECK(same(named.at("h"), expected.h));
  CHECK(result.note == "a note");
  CHECK(scalars.first.numel() == 3);
  CHECK(scalars.second == std::vector<int>{7, 7, 7});
  (sum(result.y) + sum(named.at("h") * named.at("h"))).backward();
  (sum(expected.y) + sum(expected_named.at("h") * expected.h)).backward();
  CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
}

TEST_CASE("dp nested: replicas that return other numbers of values, or other keys, are named") {
  DataParallel<Uneven<Cpu>> net{make<Uneven<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  auto x = Tensor<double, 2>::full({6, 5}, 2);
  CHECK(net(x).first.size() == 2);
  x(4, 0) = 1;
  CHECK_THAT(message_of<ShapeError>([&] { net(x); }),
             Contains("replica 2 returned 1 values, expected those of replica 0, 2"));
  x = Tensor<double, 2>::full({6, 5}, 3);
  x(2, 0) = 3;
  CHECK(net(x).second.contains(1));
}

TEST_CASE("dp nested: optionals are cut and joined where they have a value, and get their gradients") {
  const auto positive = [](std::uint32_t key) {
    auto x = numbers(7, 5, key);
    for (Index i = 0; i < 7; ++i) x(i, 0) = 1;
    return x;
  };
  for (const bool there : {false, true}) {
    const auto run = [&](auto& net) {
      std::optional<Recorded> mask;
      Perhaps more{std::nullopt, 0.5};
      if (there) mask.emplace(numbers(7, 3, 2), true), more.y.emplace(numbers(7, 3, 3), true);
      const auto [result, scalars, y] = net(positive(1), mask, more);
      CHECK(scalars->first.value().numel() >= 1);
      (sum(*result.y * *y) + sum(*y)).backward();
      auto out = result.y->value().to_vector();
      if (there)
        for (const auto& x : {mask->grad(), more.y->grad()})
          for (const double v : x.to_vector()) out.push_back(v);
      for (const double v : test::gradients(net.module())) out.push_back(v);
      return out;
    };
    SingleDevice<Optional<Cpu>> single{make<Optional<Cpu>>(), 3};
    const auto expected = run(single);
    CHECK(expected.size() == (there ? 81u : 39u));
    for (const std::vector<int>& ids : {std::vector<int>{0}, {0, 1}, {1, 1, 0}}) {
      DataParallel<Optional<Cpu>> net{make<Optional<Cpu>>(), {.device_ids = ids}, 3};
      CHECK(distance(run(net), expected) < rounding);
    }
  }
  DataParallel<Optional<Cpu>> net{make<Optional<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto [result, scalars, y] = net(positive(1), std::optional<Recorded>(), Perhaps{std::nullopt, 0.5});
  CHECK(result.factor == 2.0);
  CHECK(scalars->first.numel() == 3);
  CHECK(scalars->second == std::vector<int>{7, 7, 7});
  // A value must be present on all devices or on none.
  auto x = positive(1);
  const auto message = [&] {
    return message_of<ShapeError>([&] { net(x, std::optional<Recorded>(), Perhaps{std::nullopt, 0.5}); });
  };
  x(5, 0) = -1;
  CHECK_THAT(message(), Contains("replica 2 returned none, replica 0 a value"));
  x(0, 0) = -1;
  CHECK_THAT(message(), Contains("replica 1 returned a value, replica 0 none"));
  x(3, 0) = -1;
  CHECK_FALSE(std::get<2>(net(x, std::optional<Recorded>(), Perhaps{std::nullopt, 0.5})).has_value());
  CHECK_THAT(message_of<ShapeError>([&] {
               net(x, std::optional(Recorded(numbers(6, 3, 2))), Perhaps{{}, 0.5});
             }),
             Contains("do not broadcast"));
}

TEST_CASE("dp loss: the model's own losses, one a device, count by samples") {
  SingleDevice<WithLoss<Cpu>> single{make<WithLoss<Cpu>>(), 3};
  DataParallel<WithLoss<Cpu>> net{make<WithLoss<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto train = [](auto& policy) {
    optim::Sgd optimizer{policy.parameters(), {.lr = 0.3, .momentum = 0.9}};
    auto losses = test::each_step([&](std::uint32_t number, Index size) {
      optimizer.zero_grad();
      const auto loss = policy.mean_loss(policy(numbers(size, 5, number), labels(size, 3, number)));
      loss.backward();
      optimizer.step();
      return loss.item();
    });
    for (const double v : test::values(policy.module())) losses.push_back(v);
    return losses;
  };
  CHECK(distance(train(net), train(single)) < rounding);
  const auto losses = net(numbers(7, 5, 1), labels(7, 3, 1));
  CHECK(losses.numel() == 3);
  net(numbers(2, 5, 1), labels(2, 3, 1));
  CHECK_THAT(message_of<ShapeError>([&] { net.mean_loss(losses); }),
             Contains("expected 2 losses") && Contains("got 3"));
}

TEST_CASE("dp balance: a device that is too small for an even share is named") {
  const std::vector<int> ids{4, 2, 7};
  using Sizes = std::vector<dp::DeviceSize>;
  CHECK(dp::imbalance(ids, Sizes{{80, 100}, {61, 80}, {70, 76}}).empty());
  CHECK_THAT(dp::imbalance(ids, Sizes{{80, 100}, {59, 100}, {70, 100}}),
             Contains("device 2 has less than 75 % of the memory of device 4"));
  CHECK_THAT(dp::imbalance(ids, Sizes{{80, 100}, {80, 140}, {80, 140}}),
             Contains("device 4 has less than 75 % of the processors of device"));
  CHECK(dp::imbalance({}, {}).empty());
}

/// The stderr of four passes on `devices`; `use(net, losses)` takes their losses.
template <class Use>
std::string warnings(const std::vector<int>& devices, const Use& use) {
  return test::Ranks(1, [&](const comm::World&) {
           return test::with_stderr([&] {
             DataParallel<WithLoss<Cpu>> net{make<WithLoss<Cpu>>(), {.device_ids = devices}, 3};
             for (int pass = 0; pass < 4; ++pass) use(net, net(numbers(7, 5, 1), labels(7, 3, 1)));
             return std::string();
           });
         }).texts()[0];
}

TEST_CASE("dp loss: who takes one loss a device for the batch's is warned, once") {
  const auto text = warnings({0, 1, 2}, [](const auto&, const auto& losses) { mean(losses).backward(); });
  CHECK_THAT(text, Catch::Matchers::StartsWith("chorus: warning: DataParallel: the model returns scalars"));
  CHECK_THAT(text, Contains("for the 3 devices") && Contains("mean_loss"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
  CHECK(warnings({0}, [](const auto&, const auto& losses) { mean(losses).backward(); }) == "");
  CHECK(warnings({0, 1}, [](const auto& net, const auto& losses) { net.mean_loss(losses).backward(); }) == "");
}

}  // namespace dp_nested_test
