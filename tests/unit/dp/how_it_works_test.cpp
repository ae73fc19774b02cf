// How DataParallel works, step by step, with numbers small enough to follow by hand. Read this first, then
// <chorus/parallel/data_parallel.hpp>, which has the same five verbs in one function.
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chrono>
#include <optional>
#include <thread>
#include <unit/parallel/policies.hpp>
#include <vector>

namespace dp_how_it_works_test {

using namespace test::names;
using Numbers = std::vector<double>;
using trace::Traffic;

/// y = 1 a + 10 b + 100 for a sample [a, b].
template <class D>
struct Model : nn::Module {
  nn::Linear<D, double> fc{2, 1};
  CHORUS_MODULE(Model, fc)
  Model() {
    fc.weight.assign(Tensor<double, 2, D>::from({1, 10}, {1, 2}));
    fc.bias.assign(Tensor<double, 1, D>::from({100}, {1}));
  }
  auto forward(const auto& x) const { return fc(x); }
};

// A batch of five samples, each with two numbers of 8 bytes.
Tensor<double, 2> batch() { return Tensor<double, 2>::from({1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, {5, 2}); }

TEST_CASE("dp how it works: the five verbs, one after the other, on two devices") {
  const std::vector<int> device_ids{0, 1};
  trace::reset_traffic();

  // 1. Scatter. The batch is cut along axis 0. Shares differ by at most one sample, and the first are larger.
  const dp::Split split{.batch = 5, .devices = 2, .dim = 0};
  CHECK(split.size(0) == 3);
  CHECK(split.size(1) == 2);
  const Variable<double, 2> x(batch(), true);
  std::vector<dp::GradientReturns> returns(2);
  const auto [x0] = dp::scatter(split, 0, Cpu{0}, returns[0], x);
  const auto [x1] = dp::scatter(split, 1, Cpu{1}, returns[1], x);
  CHECK(x0.value().to_vector() == Numbers{1, 2, 3, 4, 5, 6});
  CHECK(x1.value().to_vector() == Numbers{7, 8, 9, 10});
  CHECK(x1.device() == Cpu{1});
  // The second share was sent: two samples of two numbers. The first one stayed in place.
  CHECK(trace::bytes_sent(0, Traffic::inputs) == 2 * 2 * 8);
  CHECK(x0.value().data() == x.value().data());

  // 2. Replicate. The model is on the first device. The second has a permanent copy: it first gets all parameters,
  // later only the changed ones.
  Model<Cpu> model;
  const nn::FlatParameters<Cpu> parameters(model);
  const auto buffers = nn::named_buffers<Cpu>(model);  // it has none
  const dp::Replicas<Model<Cpu>> replicas(model, parameters, buffers, device_ids);
  const auto bytes_to_replicate = [&] {
    trace::reset_traffic();
    dp::replicate(replicas, 1);
    return trace::bytes_sent(0, Traffic::parameters);
  };
  CHECK(bytes_to_replicate() == (2 + 1) * 8);  // two weights and a bias
  CHECK(bytes_to_replicate() == 0);
  model.fc.bias.assign(Tensor<double, 1>::from({200}, {1}));
  CHECK(bytes_to_replicate() == 1 * 8);
  Model<Cpu>& copy = replicas[1].model();
  CHECK(copy.fc.bias.value().to_vector() == Numbers{200});
  CHECK(copy.fc.weight.device() == Cpu{1});

  // 3. Parallel apply. Each device has a thread; the first uses the calling thread. All run at once.
  dp::ParallelApply parallel_apply({"replica 0 on device cpu:0", "replica 1 on device cpu:1"}, {0, 1},
                                   Cpu::first_slot, std::chrono::seconds(60));
  std::vector<std::optional<Variable<double, 2>>> outputs(2);
  std::vector<std::thread::id> threads(2);
  parallel_apply(2, [&, &x0 = x0, &x1 = x1](std::size_t i) {
    threads[i] = std::this_thread::get_id();
    outputs[i] = i == 0 ? model.forward(x0) : copy.forward(x1);
  });
  CHECK(outputs[0]->value().to_vector() == Numbers{221, 243, 265});
  CHECK(outputs[1]->value().to_vector() == Numbers{287, 309});
  CHECK(threads[0] == std::this_thread::get_id());
  CHECK(threads[1] != threads[0]);
  // A device's exception is rethrown with its name.
  CHECK(message_of<UsageError>([&] {
          parallel_apply(2, [](std::size_t i) { check<UsageError>(i == 0, "I can't"); });
        }) == "DataParallel: replica 1 on device cpu:1: I can't");

  // 4. Gather. The outputs are joined on the first device.
  trace::reset_traffic();
  const auto y = dp::gather(outputs, split, Cpu{0}, {});
  CHECK(y.shape() == Shape<2>{5, 1});
  CHECK(y.value().to_vector() == Numbers{221, 243, 265, 287, 309});
  CHECK(y.device() == Cpu{0});
  CHECK(trace::bytes_sent(1, Traffic::outputs) == 2 * 8);

  // 5. Reduce. Backward runs on each device separately. For the sum of all outputs, the gradient of the weights is the
  // sum of the samples, and that of the bias is their number.
  sum(*outputs[0]).backward();
  sum(*outputs[1]).backward();
  CHECK(model.fc.weight.grad().to_vector() == Numbers{1 + 3 + 5, 2 + 4 + 6});
  CHECK(copy.fc.weight.grad().to_vector() == Numbers{7 + 9, 8 + 10});
  // Then the copy's gradients are added to the model's on the first device. There is no mean: the loss has taken it.
  dp::reduce(replicas, 2, [&](std::size_t workers, const auto& task) { parallel_apply.run(workers, task); });
  CHECK(model.fc.weight.grad().to_vector() == Numbers{25, 30});
  CHECK(model.fc.bias.grad().to_vector() == Numbers{5});
  CHECK(trace::bytes_sent(1, Traffic::gradients) == (2 + 1) * 8);

  // The gradient of the input takes the way of scatter in reverse.
  for (const auto& device : returns)
    for (const auto& entry : device) entry.add();
  CHECK(x.grad().to_vector() == Numbers{1, 10, 1, 10, 1, 10, 1, 10, 1, 10});
  CHECK(trace::bytes_sent(1, Traffic::inputs) == 2 * 2 * 8);
}

TEST_CASE("dp how it works: one call of the policy is all of it, and takes the step of one device") {
  DataParallel<Model<Cpu>> net{Model<Cpu>{}, {.device_ids = {0, 1}}, 3};
  SingleDevice<Model<Cpu>> single{Model<Cpu>{}, 3};
  const auto step = [](auto& policy, optim::Sgd<Cpu>& optimizer) {
    optimizer.zero_grad();
    const auto y = policy(batch());     // scatter, replicate, parallel apply, gather
    const auto loss = mean(square(y));  // on the first device, over the whole batch
    loss.backward();                    // and reduce
    optimizer.step();                   // of the model on the first device: copies are updated in the next pass
    return loss.item();
  };
  optim::Sgd<Cpu> optimizer{net.parameters(), {.lr = 1e-3}}, alone{single.parameters(), {.lr = 1e-3}};
  for (int number = 0; number < 3; ++number) {
    trace::reset_traffic();
    CHECK(step(net, optimizer) == Approx(step(single, alone)));
    CHECK(distance(test::values(net.module()), test::values(single.module())) < rounding);
    // In each step the first device sends its parameters and receives as many gradients: 2 (N - 1) K bytes pass it.
    CHECK(trace::bytes_sent(0, Traffic::parameters) == (2 + 1) * 8);
    CHECK(trace::bytes_sent(1, Traffic::gradients) == (2 + 1) * 8);
    CHECK(trace::bytes_sent(0, Traffic::inputs) == 2 * 2 * 8);
    // The outputs are sent to the first device, and their gradients back.
    CHECK(trace::bytes_sent(1, Traffic::outputs) == 2 * 8);
    CHECK(trace::bytes_sent(0, Traffic::outputs) == 2 * 8);
  }
}

}  // namespace dp_how_it_works_test
