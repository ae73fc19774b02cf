// DataParallel: models with shared layers, with layers on several devices, and models that are changed from outside or
// inside; arguments and outputs without the axis that is cut.
#include <algorithm>
#include <atomic>
#include <catch.hpp>
#include <chorus/autograd/checkpoint.hpp>
#include <chorus/ops/higher_order.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chrono>
#include <initializer_list>

#include <unit/parallel/policies.hpp>

namespace dp_model_test {

using namespace test::names;
using namespace std::chrono_literals;

template <class Model>
struct Parallel : DataParallel<Model> {
  explicit Parallel(std::vector<int> ids, Model model = make<Model>(), int dim = 0)
      : DataParallel<Model>(std::move(model), {.device_ids = std::move(ids), .dim = dim}, 3) {}
};
template <class Model>
struct Single : SingleDevice<Model> {
  explicit Single(Model model = make<Model>()) : SingleDevice<Model>(std::move(model), 3) {}
};

/// The same layer twice.
template <class D>
struct Tied : nn::Module {
  nn::Linear<D, double> in{5, 5}, again = in, out{5, 3};
  CHORUS_MODULE(Tied, in, again, out)
  auto forward(const auto& x) const { return out(tanh(again(tanh(in(x))))); }
};

/// Columns are samples. Also takes a number and a row that all samples share.
template <class D>
struct Scaled : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Scaled, fc)
  auto forward(const auto& x, const auto& temperature, const auto& row) const {
    return transpose(tanh(fc(transpose(x, 0, 1))) * temperature * row, 0, 1);
  }
};

/// Columns are samples; what it returns has one axis.
template <class D>
struct Flat : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Flat, fc)
  auto forward(const auto& x) const { return sum(fc(transpose(x, 0, 1)), 1); }
};

/// Clears its gradients in each forward pass, and may throw an object that is no exception.
template <class D>
struct Forgetful : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Forgetful, fc)
  auto forward(const auto& x, int thrown_on) const {
    if (x.device().index == thrown_on) throw 7;
    fc.weight.zero_grad();
    return fc(x);
  }
};

/// Computes a slope inside of itself. The second device has finished its slope, and destroyed its tape, before the
/// first one's gradients reach the layer.
struct Meeting {
  mutable std::atomic<bool> first_waits{false}, second_is_done{false};
  static void wait_for(std::atomic<bool>& sign) {
    const auto deadline = std::chrono::steady_clock::now() + 10s;
    while (!sign) check<TimeoutError>(std::chrono::steady_clock::now() < deadline, "the other device does not come");
  }
};
template <class D>
struct Slope : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  CHORUS_MODULE(Slope, fc)
  auto forward(const auto& x, const Meeting& meeting) const {
    const GraphVariable at(value_of(x), true);
    const auto h = fc(at);
    const auto y = record(
        "meeting", h.value(),
        [&meeting, first = x.device().index == 0](const auto& dy, auto dx) {
          if (first) meeting.first_waits = true;
          Meeting::wait_for(first ? meeting.second_is_done : meeting.first_waits);
          dx->add(dy);
        },
        h);
    const auto slope = grad(sum(y), at);
    if (x.device().index == 1) meeting.second_is_done = true;
    return fc(x * slope.value());
  }
};

/// Two large layers; a bit for each says which devices skip it.
template <class D>
struct Choosy : nn::Module {
  nn::Linear<D, double> in{5, 40}, fc1{40, 40}, fc2{40, 40};
  CHORUS_MODULE(Choosy, in, fc1, fc2)
  auto forward(const auto& x, const std::vector<int>& left_out) const {
    const int without = left_out.at(static_cast<std::size_t>(x.device().index));
    auto h = tanh(in(x));
    if (!(without & 1)) h = tanh(fc1(h)) + h;
    if (!(without & 2)) h = tanh(fc2(h)) + h;
    return h;
  }
};

/// Recomputes in backward, with dropout.
template <class D>
struct Recomputed : nn::Module {
  nn::Linear<D, double> fc{5, 3};
  nn::Dropout drop{0.5};
  CHORUS_MODULE(Recomputed, fc, drop)
  auto forward(const auto& x) const {
    const auto part = [this](const auto& in) { return square(fc(drop(in))); };
    if constexpr (detail::is_graph_variable<std::remove_cvref_t<decltype(x)>>)
      return part(x);
    else
      return checkpoint(part, x);
  }
};

std::vector<double> joined(std::initializer_list<std::vector<double>> lists) {
  std::vector<double> out;
  for (const auto& list : lists) out.insert(out.end(), list.begin(), list.end());
  return out;
}

TEST_CASE("dp model: layers that share their parameters share them on every device") {
  Single<Tied<Cpu>> single;
  const auto expected = test::train(single);
  for (const std::vector<int>& ids : {std::vector<int>{0, 1}, {1, 0, 1}}) {
    Parallel<Tied<Cpu>> net(ids);
    CHECK(net.parameters().size() == 4);
    const auto got = [&] {
      optim::Sgd optimizer{net.parameters(), {.lr = 0.3, .momentum = 0.9, .weight_decay = 0.01}};
      test::each_step([&](std::uint32_t number, Index size) {
        optimizer.zero_grad();
        const auto y = net(numbers(size, 5, number));
        const auto targets = labels(size, 3, number);
        const auto near = Tensor<std::int64_t, 1>::from(targets.to_vector(), targets.shape(), y.device());
        cross_entropy(y, near).backward();
        optimizer.step();
        return 0.0;
      });
      return test::values(net.module());
    }();
    CHECK(distance(got, expected.parameters) < rounding);
  }
}

TEST_CASE("dp model: of a parameter that some devices leave out the gradient is the others' sum") {
  Single<Choosy<Cpu>> single;
  const auto x = numbers(8, 5, 1);
  // No gradient of fc1 and fc2 arrives first on all devices; the second and third devices skip different ones.
  const std::vector<int> left_out{3, 0, 1, 2};
  for (Index i = 0; i < 4; ++i)
    sum(single(contiguous(x.slice(0, 2 * i, 2 * i + 2)), std::vector{left_out[static_cast<std::size_t>(i)]}))
        .backward();
  Parallel<Choosy<Cpu>> net({0, 1, 2, 3});
  for (int run = 0; run < 5; ++run) {
    for (const auto& named : net.parameters()) named.parameter->set_grad_arrived(false);
    sum(net(x, left_out)).backward();
    CHECK(distance(test::gradients(net.module()), test::gradients(single.module())) < rounding);
  }
}

TEST_CASE("dp model: a hook on a parameter that a pass leaves out doesn't run, though there is an older gradient") {
  const auto fired = [](auto& net) {
    std::vector<int> counts(2);
    net.module().fc1.weight.register_hook([&] { ++counts[0]; });
    net.module().fc2.weight.register_hook([](const auto& gradient) { return gradient * 2.0; });
    net.module().fc2.weight.register_hook([&] { ++counts[1]; });
    for (const auto& left_out : {std::vector{0, 0, 0}, {2, 2, 2}, {3, 3, 3}, {1, 1, 1}})
      sum(net(numbers(6, 5, 1), left_out)).backward();
    CHECK(counts == std::vector{2, 2});
    return test::gradients(net.module());
  };
  Single<Choosy<Cpu>> single;
  const auto expected = fired(single);
  Parallel<Choosy<Cpu>> net({0, 1, 2});
  CHECK(distance(fired(net), expected) < rounding);
}

TEST_CASE("dp model: what is recomputed in backward is so in training, whatever passes there were in between") {
  const bool recorded = GENERATE(false, true);
  const auto gradients = [&](auto& net) {
    const auto loss = sum(net(numbers(8, 5, 1)));
    net.eval();
    net(numbers(8, 5, 2));
    net.train();
    if (recorded) sum(net(GraphVariable(numbers(8, 5, 3), true))).backward();
    loss.backward();
    return test::gradients(net.module());
  };
  Single<Recomputed<Cpu>> single;
  Parallel<Recomputed<Cpu>> net({0, 1, 2});
  CHECK(distance(gradients(net), gradients(single)) < rounding);
}

TEST_CASE("dp model: layers that lie on several devices come together on the first of the policy's") {
  auto scattered = make<test::Normed<Cpu>>();
  scattered.fc1 = detail::copy_to(scattered.fc1, Cpu{3});
  scattered.norm = detail::copy_to(scattered.norm, Cpu{1});
  Parallel<test::Normed<Cpu>> net({2, 0}, scattered);
  for (const auto& named : net.parameters()) CHECK(named.parameter->where() == Cpu{2});
  for (const auto& named : nn::named_buffers<Cpu>(net.module())) CHECK(named.buffer->where() == Cpu{2});
  Parallel<test::Normed<Cpu>> together({2, 0});
  const auto x = numbers(8, 5, 1);
  CHECK(net(x).value().to_vector() == together(x).value().to_vector());
  CHECK(scattered.fc1.weight.device() == Cpu{2});  // it refers to the same parameters
}

TEST_CASE("dp model: a parameter or a buffer that is replaced behind the policy's back is named") {
  const auto message = [](auto& net) { return message_of<UsageError>([&] { net(numbers(8, 5, 1)); }); };
  Parallel<test::Normed<Cpu>> net({0, 1});
  CHECK(message(net) == "nothing");
  net.module().fc2 = nn::Linear<Cpu, double>(12, 3);
  CHECK_THAT(message(net), Contains("'fc2.weight' was added or replaced"));
  Parallel<test::Normed<Cpu>> other({0, 1});
  other.module().norm.running_var = Buffer(Tensor<double, 1>::full({3}, 2));
  CHECK_THAT(message(other), Contains("'norm.running_var' was added or replaced"));
  // Numbers written to existing parameters reach all devices.
  Parallel<test::Normed<Cpu>> kept({0, 1});
  Single<test::Normed<Cpu>> single;
  for (auto* model : {&kept.module(), &single.module()}) {
    model->fc2.weight.assign(Tensor<double, 2>::full({3, 12}, 0.25));
    std::fill_n(model->norm.running_var.value().data(), 3, 2.0);
  }
  kept.eval();
  single.eval();
  const auto x = numbers(8, 5, 1);
  CHECK(distance(kept(x).value().to_vector(), single(x).value().to_vector()) < rounding);
}

TEST_CASE("dp model: variables without the axis go to every device, and get the sum of the gradients") {
  const auto run = [](auto& net, const auto& x, const auto& temperature, const auto& row) {
    sum(square(net(x, temperature * 1.0, row))).backward();
    return joined(
        {x.grad().to_vector(), temperature.grad().to_vector(), row.grad().to_vector(), test::gradients(net.module())});
  };
  const auto plain = [&](auto& net) {
    return run(net, Variable(numbers(5, 7, 1), true), Variable(Tensor<double, 0>::full({}, 0.5), true),
               Variable(Tensor<double, 1>::full({3}, 0.25), true));
  };
  const auto recorded = [&](auto& net) {
    return run(net, GraphVariable(numbers(5, 7, 1), true), GraphVariable(Tensor<double, 0>::full({}, 0.5), true),
               GraphVariable(Tensor<double, 1>::full({3}, 0.25), true));
  };
  Single<Scaled<Cpu>> single;
  const auto expected = plain(single);
  for (const bool graph : {false, true}) {
    INFO("recorded " << graph);
    Parallel<Scaled<Cpu>> net({0, 1, 2}, make<Scaled<Cpu>>(), 1);
    CHECK(distance(graph ? recorded(net) : plain(net), expected) < rounding);
  }
}

TEST_CASE("dp model: outputs without the axis can't be joined along it") {
  Parallel<Flat<Cpu>> net({0, 1}, make<Flat<Cpu>>(), 1);
  CHECK_THAT(message_of<ShapeError>([&] { net(numbers(5, 8, 1)); }), Contains("DataParallel") && Contains("axis 1"));
}

TEST_CASE("dp model: zero_grad inside of the model forgets what it forgets on one device") {
  Parallel<Forgetful<Cpu>> net({0, 1, 2});
  Single<Forgetful<Cpu>> single;
  const auto run = [](auto& policy) {
    for (std::uint32_t i = 0; i < 3; ++i) sum(square(policy(numbers(7, 5, i), -1))).backward();
    return test::gradients(policy.module());
  };
  CHECK(distance(run(net), run(single)) < rounding);
}

TEST_CASE("dp model: what is thrown and is no exception comes through, and the next pass is right") {
  Parallel<Forgetful<Cpu>> net({0, 1, 2});
  Single<Forgetful<Cpu>> single;
  for (const int device : {0, 2}) CHECK_THROWS_AS(net(numbers(7, 5, 1), device), int);
  const auto x = numbers(7, 5, 2);
  CHECK(distance(net(x, -1).value().to_vector(), single(x, -1).value().to_vector()) < rounding);
}

TEST_CASE("dp model: a slope taken inside of a recorded pass leaves all parameters alone") {
  Parallel<Slope<Cpu>> net({0, 1});
  const Meeting meeting;
  const GraphVariable x(numbers(6, 5, 1), true);
  const auto y = net(x, meeting);
  for (const auto& named : net.parameters()) CHECK_FALSE(named.parameter->grad_arrived());
  // The slope is the sum of the weight's rows, a constant.
  const auto& weight = net.module().fc.weight.value();
  const auto expected = linear(x.value() * sum(weight, 0), weight, net.module().fc.bias.value()).to_vector();
  CHECK(distance(y.value().to_vector(), expected) < rounding);
}

}  // namespace dp_model_test
