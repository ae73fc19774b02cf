// The example's model on a GPU: the same training as on the CPU, under the policies of one process.
#include <chorus/chorus.hpp>
#include <chorus/optim/grad_scaler.hpp>
#include <cmath>

#include "compare.hpp"

namespace training_test {

namespace ch = chorus;

template <class Device>
struct ToyModel : ch::nn::Module {
  ch::nn::Conv2d<Device> conv1{3, 6, {.kernel = 5}}, conv2{6, 16, {.kernel = 5}};
  ch::nn::Linear<Device> fc1{400, 120}, fc2{120, 84}, fc3{84, 10};
  CHORUS_MODULE(ToyModel, conv1, conv2, fc1, fc2, fc3)

  auto forward(const auto& images) const {
    auto x = ch::max_pool2d(ch::relu(conv1(images)), 2);
    x = ch::max_pool2d(ch::relu(conv2(x)), 2);
    return fc3(ch::relu(fc2(ch::relu(fc1(ch::flatten(x))))));
  }
};

struct Result {
  std::vector<double> losses;
  std::vector<float> parameters;
};

/// Some steps on batches that a loader would bring: in the host's memory.
template <class Optimizer, class Net, class Options>
Result train(Net& net, const Options& options) {
  Optimizer optimizer{net.parameters(), options};
  Result result;
  for (std::uint64_t step = 0; step < 2; ++step) {
    const auto images = ch::Tensor<float, 4>::from(numbers<float>(3 * 3 * 32 * 32, step + 1), {3, 3, 32, 32});
    const auto labels = ch::Tensor<std::int64_t, 1>::from(numbers<std::int64_t>(3, step + 50, 0, 10), {3});
    optimizer.zero_grad();
    auto loss = ch::cross_entropy(net(images), labels);
    loss.backward();
    optimizer.step();
    result.losses.push_back(static_cast<double>(loss.item()));
  }
  for (const auto& named : net.parameters()) {
    std::vector<float> values(static_cast<std::size_t>(named.parameter->count()));
    ch::copy_bytes(Cpu{}, values.data(), named.parameter->where(), named.parameter->value_data(),
                   named.parameter->size_bytes());
    result.parameters.insert(result.parameters.end(), values.begin(), values.end());
  }
  return result;
}

template <class Optimizer, class Net, class Options, class... Arguments>
Result trained(const Options& options, const Arguments&... arguments) {
  ch::manual_seed(5);
  Net net{typename Net::model_type{}, arguments...};
  return train<Optimizer>(net, options);
}

void check_close(const Result& actual, const Result& expected) {
  CHECK(error(actual.losses, expected.losses) < 1e-4);
  CHECK(error(actual.parameters, expected.parameters) < 1e-4);
}

TEST_CASE("a model trains on a GPU as on the CPU") {
  if (!gpu_present()) return;
  const ch::optim::SgdOptions sgd{.lr = 0.05, .momentum = 0.9};
  const auto expected = trained<ch::optim::Sgd<Cpu>, ch::SingleDevice<ToyModel<Cpu>>>(sgd);
  const auto single = trained<ch::optim::Sgd<Cuda>, ch::SingleDevice<ToyModel<Cuda>>>(sgd);
  check_close(single, expected);
  CHECK(expected.losses.front() != expected.losses.back());

  // The same again has the same bits.
  const auto again = trained<ch::optim::Sgd<Cuda>, ch::SingleDevice<ToyModel<Cuda>>>(sgd);
  CHECK(again.losses == single.losses);
  CHECK(again.parameters == single.parameters);

  const ch::DataParallelOptions twice{.device_ids = {0, 0}};
  check_close(trained<ch::optim::Sgd<Cuda>, ch::DataParallel<ToyModel<Cuda>>>(sgd, twice), expected);
  if (ch::cuda::device_count() > 1)
    check_close(trained<ch::optim::Sgd<Cuda>, ch::DataParallel<ToyModel<Cuda>>>(
                    sgd, ch::DataParallelOptions{.device_ids = {0, 1}}),
                expected);
}

using Optimizer = ch::optim::Sgd<Cuda>;

template <class Net>
void step(Net& net, Optimizer& optimizer, std::uint64_t seed) {
  const auto images = ch::Tensor<float, 4>::from(numbers<float>(4 * 3 * 32 * 32, seed), {4, 3, 32, 32});
  const auto labels = ch::Tensor<std::int64_t, 1>::from({1, 2, 3, 4}, {4});
  optimizer.zero_grad();
  ch::cross_entropy(net(images), labels).backward();
  optimizer.step();
}

template <class Net>
void check_second_step(Net& net) {
  Optimizer optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
  auto& allocator = ch::CachingAllocator<Cuda>::of(Cuda{});
  allocator.empty_cache();
  step(net, optimizer, 1);
  const auto before = allocator.system_allocations();
  step(net, optimizer, 2);
  CHECK(allocator.system_allocations() == before);
}

// An optimizer that only counts the ranges of parameters that one kernel each would update.
struct Ranges : ch::optim::Optimizer<Cuda> {
  using ch::optim::Optimizer<Cuda>::Optimizer;
  int count = 0;
  void step() override {
    for_each_range([this](auto, const Range&) { ++count; });
  }
  std::span<const std::string_view> slots() const override {
    static constexpr std::array<std::string_view, 1> names{"state"};
    return names;
  }
};

bool is_aligned(const void* place) { return reinterpret_cast<std::uintptr_t>(place) % 16 == 0; }

TEST_CASE("the second step asks the driver for no memory") {
  if (!gpu_present()) return;
  ch::SingleDevice<ToyModel<Cuda>> single{ToyModel<Cuda>{}};
  check_second_step(single);
  ch::DataParallel<ToyModel<Cuda>> twice{ToyModel<Cuda>{}, {.device_ids = {0, 0}}};
  check_second_step(twice);
}

TEST_CASE("a step without enough memory says what holds it, and the next one goes on") {
  if (!gpu_present()) return;
  ch::SingleDevice<ToyModel<Cuda>> net{ToyModel<Cuda>{}};
  Optimizer optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9}};
  step(net, optimizer, 1);
  std::string message;
  try {
    const auto image = ch::Tensor<float, 4, Cuda>::zeros({1, 3, 32, 32});
    net(image.expand(ch::Shape<4>{Index{1} << 40, 3, 32, 32}));
  } catch (const ch::Error& error) {
    message = error.what();
  }
  CAPTURE(message);
  for (const char* part :
       {"out of memory on cuda:0: asked for ", "parameters ", "gradients ", "optimizer ", "activations ", " MiB free"})
    CHECK(message.find(part) != std::string::npos);
  step(net, optimizer, 2);
  ch::cuda::synchronize(Cuda{});
}

TEST_CASE("parameters and their gradients lie where 16 bytes are one access, and one kernel updates them all") {
  if (!gpu_present()) return;
  ch::SingleDevice<ToyModel<Cuda>> net{ToyModel<Cuda>{}};
  Optimizer optimizer{net.parameters(), {.lr = 0.01, .momentum = 0.9, .weight_decay = 0.1}};
  for (std::uint64_t seed : {1u, 2u}) step(net, optimizer, seed);
  Index own = 0;
  double sum = 0;
  for (const auto& named : net.parameters()) {
    CHECK(is_aligned(named.parameter->value_data()));
    CHECK(is_aligned(named.parameter->grad_data()));
    own += named.parameter->count();
    std::vector<float> values(static_cast<std::size_t>(named.parameter->count()));
    ch::copy_bytes(Cpu{}, values.data(), Cuda{}, named.parameter->value_data(), named.parameter->size_bytes());
    for (const float value : values) sum += std::abs(static_cast<double>(value));
  }
  // What lies between them stays 0.
  const auto& group = net.flat_parameters().groups().at(0);
  CHECK(group.count > static_cast<std::size_t>(own));
  std::vector<float> all(group.count);
  ch::copy_bytes(Cpu{}, all.data(), Cuda{}, group.value(0), all.size() * sizeof(float));
  double whole = 0;
  for (const float value : all) whole += std::abs(static_cast<double>(value));
  CHECK(whole == Approx(sum).epsilon(1e-9));

  Ranges ranges(net.parameters(), 0.1);
  ranges.step();
  CHECK(ranges.count == 1);
}

TEST_CASE("one kernel updates parameters that were laid out anew, too") {
  if (!gpu_present()) return;
  ToyModel<Cuda> model;
  ch::nn::FlatParameters<Cuda> flat(model);
  Ranges ranges(flat.parameters(), 0.1);
  const std::array<std::size_t, 10> order{3, 1, 4, 0, 5, 9, 2, 6, 8, 7};
  flat.reorder(order);
  for (const auto& entry : flat.entries()) entry.parameter().set_grad_arrived(true);
  ranges.step();
  CHECK(ranges.count == 1);
}

TEST_CASE("a step whose gradients overflow is left out") {
  if (!gpu_present()) return;
  ch::SingleDevice<ToyModel<Cuda>> net{ToyModel<Cuda>{}};
  Optimizer optimizer{net.parameters(), {.lr = 0.01}};
  ch::optim::GradScaler scaler(net.parameters(), {.init_scale = 1e38, .backoff_factor = 1e-30});
  const auto scaled_step = [&] {
    const auto images = ch::Tensor<float, 4>::from(numbers<float>(4 * 3 * 32 * 32, 1), {4, 3, 32, 32});
    optimizer.zero_grad();
    const auto loss = ch::cross_entropy(net(images), ch::Tensor<std::int64_t, 1>::from({1, 2, 3, 4}, {4}));
    scaler.scale(loss * 100).backward();
    return scaler.step(optimizer);
  };
  const auto bias = [&] {
    std::vector<float> values(10);
    ch::copy_bytes(Cpu{}, values.data(), Cuda{}, net.module().fc3.bias.value().data(), 10 * sizeof(float));
    return values;
  };
  const auto before = bias();
  CHECK_FALSE(scaled_step());
  CHECK(bias() == before);
  CHECK(scaler.skipped_steps() == 1);
  CHECK(scaled_step());
  CHECK(bias() != before);
}

}  // namespace training_test
