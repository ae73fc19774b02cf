// The example's model on a GPU: the same training as on the CPU, under the policies of one process.
#include <chorus/chorus.hpp>
#include <cmath>

#include "compare.hpp"

namespace ch = chorus;

namespace {

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

}  // namespace

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

TEST_CASE("a repeated step asks the driver for no memory") {
  if (!gpu_present()) return;
  auto& allocator = ch::CachingAllocator<Cuda>::of(Cuda{});
  ch::SingleDevice<ToyModel<Cuda>> net{ToyModel<Cuda>{}};
  train<ch::optim::Sgd<Cuda>>(net, ch::optim::SgdOptions{.lr = 0.01});
  const auto before = allocator.system_allocations();
  train<ch::optim::Sgd<Cuda>>(net, ch::optim::SgdOptions{.lr = 0.01});
  CHECK(allocator.system_allocations() == before);
}
