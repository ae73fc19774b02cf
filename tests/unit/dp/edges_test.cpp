// Edge cases of DataParallel: fewer samples than devices, no samples, no inputs, outputs and parameters of size 0, what
// replicas share and lose, memory.
#include <atomic>
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/ops/matmul.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <map>
#include <thread>
#include <tuple>

#include <unit/parallel/policies.hpp>

namespace dp_edges_test {

using namespace test::names;

/// Counts its forward passes in an object that all copies share, and in itself.
struct Count {
  mutable std::atomic<int> passes{0};
  mutable std::atomic<const void*> address{nullptr};
};
template <class D>
struct Counting : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  mutable int own = 0;
  CHORUS_MODULE(Counting, fc)
  auto forward(const auto& x, const Count& count) const {
    ++count.passes;
    count.address = &count;
    ++own;
    return fc(x);
  }
};

/// Without inputs, or with lists of any length.
template <class D>
struct Flexible : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Flexible, fc)
  auto forward() const { return sum(square(fc.weight)); }
  auto forward(const std::vector<Variable<double, 2, D>>& list, const std::map<int, Tensor<double, 2, D>>& more) const {
    std::vector<Variable<double, 2, D>> out;
    for (const auto& x : list) out.push_back(fc(x));
    return std::pair(out, static_cast<int>(list.size() + more.size()));
  }
};

/// Has a weight without outputs, and returns columns of width 0.
template <class D>
struct Hollow : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  Parameter<double, 2, D> none{Tensor<double, 2, D>::empty({5, 0})};
  CHORUS_MODULE(Hollow, fc, none)
  auto forward(const auto& x) const { return std::pair(fc(x), matmul(x, none)); }
};

/// Records the threads that work for it.
template <class D>
struct Threads : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Threads, fc)
  auto forward(const auto&) const { return std::this_thread::get_id(); }
};

/// Returns an undefined scalar.
template <class D>
struct Forgetful : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Forgetful, fc)
  auto forward(const auto&) const { return Variable<double, 0, D>(); }
};

template <class Net>
std::vector<double> gradients_of(Net& net, const Tensor<double, 2>& x) {
  for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
  mean(square(net(x))).backward();
  return test::gradients(net.module());
}

TEST_CASE("dp edges: of a batch smaller than the number of devices each device gets at most one sample") {
  for (const Index size : {1, 2, 3}) {
    INFO(size << " samples");
    DataParallel<Counting<Cpu>> net{make<Counting<Cpu>>(), {.device_ids = {0, 1, 2, 3}}, 3};
    SingleDevice<Counting<Cpu>> single{make<Counting<Cpu>>(), 3};
    Count count, one;
    trace::reset_traffic();
    const auto y = net(numbers(size, 5, 1), count), expected = single(numbers(size, 5, 1), one);
    CHECK(count.passes == size);
    CHECK(y.shape() == Shape<2>{size, 3});
    CHECK(distance(y.value().to_vector(), expected.value().to_vector()) < rounding);
    // Only the devices that work get parameters, and no gradient comes from others.
    const auto bytes = net.flat_parameters().bytes();
    CHECK(trace::bytes_sent(0, trace::Traffic::parameters) == static_cast<std::uint64_t>(size - 1) * bytes);
    mean(square(y)).backward();
    mean(square(expected)).backward();
    for (int device = 1; device < 4; ++device)
      CHECK(trace::bytes_sent(device, trace::Traffic::gradients) == (device < size ? bytes : 0));
    CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
  }
}

using Smooth = test::Smooth<Cpu>;

TEST_CASE("dp edges: a timeout that no clock can count to is refused, as is none") {
  for (const auto timeout : {std::chrono::milliseconds(0), std::chrono::milliseconds::max()})
    CHECK_THROWS_AS((DataParallel<Smooth>{make<Smooth>(), {.device_ids = {0, 1}, .timeout = timeout}, 3}), UsageError);
}

TEST_CASE("dp edges: a batch without samples runs on the first device, and gives gradients of zero") {
  DataParallel<Counting<Cpu>> net{make<Counting<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  Count count;
  const auto y = net(numbers(0, 5, 1), count);
  CHECK(count.passes == 1);
  CHECK(y.shape() == Shape<2>{0, 3});
  sum(y).backward();
  for (const double g : test::gradients(net.module())) CHECK(g == 0);
  net(numbers(7, 5, 1), count);  // and the next pass on all
  CHECK(count.passes == 4);
}

TEST_CASE(
    "dp edges: other arguments are the same objects for all replicas; what replicas write in themselves is lost") {
  DataParallel<Counting<Cpu>> net{make<Counting<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  Count count;
  for (int pass = 0; pass < 3; ++pass) net(numbers(7, 5, 1), count);
  CHECK(count.passes == 9);
  CHECK(count.address == &count);
  CHECK(net.module().own == 3);  // the first device's own
}

TEST_CASE("dp edges: a forward pass without inputs runs once, on the first device") {
  DataParallel<Flexible<Cpu>> net{make<Flexible<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  SingleDevice<Flexible<Cpu>> single{make<Flexible<Cpu>>(), 3};
  const auto loss = net();
  CHECK(loss.shape() == Shape<1>{1});
  CHECK(loss.value()(0) == Approx(single().item()));
  sum(loss).backward();
  single().backward();
  CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
}

TEST_CASE("dp edges: an undefined scalar among the outputs is named") {
  DataParallel<Forgetful<Cpu>> net{make<Forgetful<Cpu>>(), {.device_ids = {0, 1}}, 3};
  CHECK(message_of<UsageError>([&] { net(numbers(4, 5, 1)); }) ==
        "DataParallel: replica 0 returned an undefined scalar");
}

TEST_CASE("dp edges: empty lists and maps among the inputs and outputs") {
  using V = Variable<double, 2>;
  DataParallel<Flexible<Cpu>> net{make<Flexible<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const std::map<int, Tensor<double, 2>> none, one{{3, numbers(7, 2, 1)}};
  const auto [nothing, counts] = net(std::vector<V>{}, none);
  CHECK(nothing.empty());
  CHECK(counts == std::vector<int>{0});  // no samples anywhere: only the first device
  const auto [still_nothing, with_one] = net(std::vector<V>{}, one);
  CHECK(still_nothing.empty());
  CHECK(with_one == std::vector<int>{1, 1, 1});
  const auto [list, more] = net(std::vector<V>{V(numbers(7, 5, 1)), V(numbers(7, 5, 2))}, none);
  CHECK(list.size() == 2);
  CHECK(list.at(1).shape() == Shape<2>{7, 3});
}

TEST_CASE("dp edges: outputs of no width, and parameters without numbers, do no harm") {
  const auto steps = [](auto& net) {
    optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9}};
    for (std::uint32_t number = 0; number < 3; ++number) {
      optimizer.zero_grad();
      const auto [y, empty] = net(numbers(number == 1 ? 2 : 7, 5, number));
      CHECK(empty.shape() == Shape<2>{number == 1 ? 2 : 7, 0});
      (mean(square(y)) + sum(empty)).backward();
      optimizer.step();
    }
    return test::values(net.module());
  };
  DataParallel<Hollow<Cpu>> net{make<Hollow<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  SingleDevice<Hollow<Cpu>> single{make<Hollow<Cpu>>(), 3};
  CHECK(distance(steps(net), steps(single)) < rounding);
}

TEST_CASE("dp edges: frozen parameters that a program changes between steps reach the replicas") {
  auto model = make<test::Smooth<Cpu>>();
  model.fc2.weight.set_requires_grad(false);
  DataParallel<test::Smooth<Cpu>> net{model, {.device_ids = {0, 1, 2}}, 3};
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  single.module().fc2.weight.set_requires_grad(false);
  for (std::uint32_t number = 0; number < 3; ++number) {
    const auto other = contiguous(numbers(6, 7, number + 10));
    net.module().fc2.weight.assign(other);
    single.module().fc2.weight.assign(other);
    CHECK(distance(gradients_of(net, numbers(7, 5, number)), gradients_of(single, numbers(7, 5, number))) < rounding);
    CHECK_FALSE(net.module().fc2.weight.grad().defined());
  }
}

TEST_CASE("dp edges: the first device works in the calling thread, every other one in a thread that stays") {
  DataParallel<Threads<Cpu>> net{make<Threads<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  const auto first = net(numbers(7, 5, 1));
  REQUIRE(first.size() == 3);
  CHECK(first[0] == std::this_thread::get_id());
  CHECK(first[1] != first[0]);
  CHECK(first[2] != first[1]);
  CHECK(net(numbers(7, 5, 1)) == first);
}

TEST_CASE("dp edges: when a net is gone its memory is, on all devices, with hooks and after losses") {
  const auto held = [] {
    std::vector<std::size_t> bytes;
    for (int device = 30; device < 33; ++device)
      for (const auto kind : {trace::Memory::parameters, trace::Memory::gradients, trace::Memory::activations})
        bytes.push_back(trace::memory(device, kind));
    return bytes;
  };
  const auto before = held();
  {
    DataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), {.device_ids = {30, 31, 32}}, 3};
    int calls = 0;
    net.module().fc1.weight.register_hook([&] { ++calls; });
    const auto kept = sum(net(numbers(9, 5, 1)));
    kept.backward(true);
    sum(net(numbers(9, 5, 2))).backward();
    CHECK(calls == 2);
    CHECK(held() != before);
  }
  CHECK(held() == before);
}

TEST_CASE("dp edges: backward twice, with other forward passes in between, is right for each") {
  DataParallel<test::Smooth<Cpu>> net{make<test::Smooth<Cpu>>(), {.device_ids = {0, 1, 2}}, 3};
  SingleDevice<test::Smooth<Cpu>> single{make<test::Smooth<Cpu>>(), 3};
  const auto run = [](auto& policy) {
    const auto first = mean(square(policy(numbers(7, 5, 1))));
    const auto second = mean(square(policy(numbers(2, 5, 2))));
    {
      const NoGrad no_grad;
      policy(numbers(5, 5, 3));
    }
    second.backward();
    first.backward();
    return test::gradients(policy.module());
  };
  CHECK(distance(run(net), run(single)) < rounding);
}

}  // namespace dp_edges_test
