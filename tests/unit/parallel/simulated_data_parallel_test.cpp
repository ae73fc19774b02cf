// DataParallel's copies in virtual time: the same copies as a real one makes, and their times.
#include <algorithm>
#include <catch.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/simulate/training.hpp>
#include <chorus/trace/trace_facts.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <cmath>
#include <numeric>

#include "policies.hpp"

namespace simulated_data_parallel_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace comm::simulated;
using Catch::Matchers::Contains;
using test::Index;
using trace::Traffic;

/// Large parameters are aligned, so that a small one fills the gap before them; and there are buffers.
template <class D>
struct Layers : nn::Module {
  nn::Linear<D, float> fc1{50, 307}, fc2{12, 203};
  nn::BatchNorm<D, float> norm{12};
  nn::Linear<D, float> fc3{203, 10};
  CHORUS_MODULE(Layers, fc1, norm, fc2, fc3)
  auto forward(const auto& x) const {
    const auto h = slice(tanh(fc1(x)), 1, 0, 24);
    return fc3(tanh(fc2(slice(flatten(norm(reshape(h, std::array<Index, 3>{-1, 12, 2}))), 1, 0, 12))));
  }
};
/// Returns its loss.
template <class D>
struct Losing : nn::Module {
  nn::Linear<D, float> fc{50, 4};
  CHORUS_MODULE(Losing, fc)
  auto forward(const auto& x) const { return mean(fc(x)); }
};

/// The sizes of its transfers, for rows of 50 numbers.
template <class Model>
DataParallelSizes sizes_of(Model model, Index samples, std::size_t output) {
  ModelSizes sizes;
  DataParallelSizes out{.samples = samples, .sample = 50 * sizeof(float), .output = output};
  for (const auto& parameter : nn::named_parameters<Cpu>(model))
    sizes.parameters.push_back({.count = static_cast<std::size_t>(parameter.parameter->count())});
  for (const auto& buffer : nn::named_buffers<Cpu>(model)) out.buffers.push_back(buffer.buffer->size_bytes());
  out.parameters = sizes.flat_bytes();
  out.gradients = sizes.count() * sizeof(float);
  return out;
}

std::vector<int> ids(int devices) {
  std::vector<int> out(static_cast<std::size_t>(devices));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

/// The copies in the second step of a real one, and the bytes of each link by the counters.
template <class Model>
DataParallelCopies real_copies(int devices, Index samples, bool wants_input_gradient = false) {
  DataParallel<Model> net{Model(), {.device_ids = ids(devices)}, 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  const auto step = [&] {
    optimizer.zero_grad();
    auto x = Tensor<float, 2>::ones({samples, 50});
    const auto y = net(Variable<float, 2>(x, wants_input_gradient));
    if constexpr (std::is_same_v<Model, Losing<Cpu>>)
      net.mean_loss(y).backward();
    else
      sum(y).backward();
    optimizer.step();
  };
  step();
  trace::reset_traffic();
  DeviceCopyListener listener(ids(devices));
  step();
  return listener.take();
}

/// By source, destination and kind.
using Links = std::map<std::tuple<int, int, Traffic>, std::size_t>;
Links links_of(const DataParallelCopies& copies) {
  Links out;
  for (const auto* part :
       {&copies.prepare, &copies.gather, &copies.output_gradients, &copies.reduce, &copies.input_gradients})
    for (const auto& [from, to, kind, bytes] : *part) out[{from, to, kind}] += bytes;
  return out;
}

TEST_CASE("simulated: DataParallel's copies are those of the real one, link by link") {
  for (const int devices : {2, 3, 4})
    for (const Index samples : {12, 7, 2}) {  // even shares, uneven ones, and devices without a sample
      INFO(devices << " devices, " << samples << " samples");
      const auto made = data_parallel_copies(sizes_of(Layers<Cpu>(), samples, 10 * sizeof(float)), devices);
      const auto real = real_copies<Layers<Cpu>>(devices, samples);
      CHECK(links_of(made) == links_of(real));
      CHECK(made == real);  // and in the same order
      // The counters agree.
      std::map<std::pair<int, Traffic>, std::size_t> sums;
      for (const auto& [link, bytes] : links_of(made)) sums[{std::get<0>(link), std::get<2>(link)}] += bytes;
      for (int device = 0; device < devices; ++device)
        for (std::size_t kind = 0; kind < trace::traffic_kinds; ++kind) {
          const auto traffic = static_cast<Traffic>(kind);
          CHECK(trace::bytes_sent(device, traffic) == sums[{device, traffic}]);
        }
      const auto loss = data_parallel_copies(sizes_of(Losing<Cpu>(), samples, 0), devices);
      CHECK(loss == real_copies<Losing<Cpu>>(devices, samples));
    }
  CHECK(data_parallel_copies(sizes_of(Layers<Cpu>(), 5, 4), 1) == DataParallelCopies{});
  const auto inputs = real_copies<Losing<Cpu>>(3, 6, true).input_gradients;
  CHECK(inputs == std::vector<DeviceCopy>{{1, 0, Traffic::inputs, 400}, {2, 0, Traffic::inputs, 400}});
}

constexpr double alpha = 5e-6, bandwidth = 10e9, forward_time = 3e-3, backward_time = 6e-3, optimizer_time = 1e-3;
constexpr std::size_t parameters = 40'000'000, gradients = 39'000'000, sample = 600'000, output = 4'000;

Training plain_training() {
  return {.policy = TrainingPolicy::data_parallel,
          .forward = forward_time,
          .backward = backward_time,
          .optimizer = optimizer_time,
          .copied = {.parameters = parameters,
                     .gradients = gradients,
                     .buffers = {256, 8},
                     .samples = 32,
                     .sample = sample,
                     .output = output},
          .parameter_bytes = parameters,
          .optimizer_slots = 2};
}
SimulationOptions on(int devices, bool keeps = false) {
  return {.ranks = devices,
          .links = {.island = 0, .inside = {alpha, bandwidth}, .between = {alpha, bandwidth}},
          .keep_spans = keeps};
}

TEST_CASE("simulated: a step of DataParallel takes what its closed form says") {
  for (const int n : {1, 2, 3, 4, 8}) {
    INFO(n << " devices");
    const double others = n - 1, passes = forward_time + backward_time + optimizer_time;
    // To and from each other device: inputs, parameters and two buffers; outputs and their gradients; gradients.
    const double bytes = 32.0 * sample + parameters + 264 + 2 * 32.0 * output + gradients;
    const double expected = passes + others * (7 * alpha + bytes / bandwidth);
    const auto times = simulate_training(on(n), plain_training(), 3);
    CHECK(std::abs(times.step / expected - 1) < 1e-9);
    // The others also wait while the first device steps.
    CHECK(std::abs(times.exposed - (expected - forward_time - backward_time - optimizer_time / n)) < 1e-9 * expected);
  }
}

TEST_CASE("simulated: NCCL takes DataParallel's parameters and gradients along a chain") {
  auto of = plain_training();
  of.copied.by_nccl = true;
  for (const int n : {1, 2, 3, 4, 8}) {
    INFO(n << " devices");
    auto options = on(n, true);
    options.links.call = 8e-6;
    const double others = n - 1;
    const double copied = 32.0 * sample + 2 * 32.0 * output, chained = parameters + 264 + gradients;
    const double expected = forward_time + backward_time + optimizer_time + others * (3 * alpha + copied / bandwidth) +
                            (n == 1 ? 0 : 2 * 8e-6 + 2 * others * alpha + chained / bandwidth);
    const auto times = simulate_training(options, of, 3);
    CHECK(std::abs(times.step / expected - 1) < 1e-9);
    // The bytes of each link are those without NCCL.
    auto copies = data_parallel_copies(of.copied, n), plain = data_parallel_copies(plain_training().copied, n);
    CHECK(links_of(copies) == links_of(plain));
    CHECK(copies.by_nccl == (n > 1));
    std::size_t counted = 0;
    for (const auto& copy : times.times.ranks[0].copies)
      counted += copy.kind == Traffic::parameters || copy.kind == Traffic::buffers ? copy.bytes : 0;
    CHECK(counted == 3 * (parameters + 264) * static_cast<std::size_t>(n - 1));
  }
  // Unless a device has no samples.
  of.copied.samples = 2;
  CHECK(!data_parallel_copies(of.copied, 3).by_nccl);
}

TEST_CASE("simulated: a device of DataParallel begins when it has its parameters, the first one last") {
  // The last device computes for twice as long in both passes. The first one waits for it, after it has received device
  // 1's results.
  auto options = on(3);
  const double usual = simulate_training(options, plain_training(), 1).step;
  const double outputs = alpha + 32.0 * output / bandwidth, reduced = alpha + gradients / bandwidth;
  options.computing.stragglers = {{2, 2}};
  CHECK(simulate_training(options, plain_training(), 1).step ==
        Approx(usual + forward_time - outputs + backward_time - reduced).epsilon(1e-9));
  // Device 1's forward begins while the first device still sends to device 2, which hides the delay of its forward.
  const double to_another = alpha + parameters / bandwidth;
  auto of = plain_training();
  of.copied.buffers = {};
  const double without = simulate_training(on(3), of, 1).step;
  options.computing.stragglers = {{1, 1 + 0.9 * to_another / (forward_time + backward_time)}};
  const double late = simulate_training(options, of, 1).step;
  const double backward_late = 0.9 * to_another * backward_time / (forward_time + backward_time);
  // Its outputs' gradient comes before device 2's.
  CHECK(late == Approx(without + backward_late - outputs).epsilon(1e-9));
}

TEST_CASE("simulated: copies that a real DataParallel has made can be simulated") {
  const auto real = real_copies<Layers<Cpu>>(3, 12);
  auto of = plain_training();
  const auto sizes = sizes_of(Layers<Cpu>(), 4, 10 * sizeof(float));  // a device
  of.copied = sizes;
  CHECK(simulate_data_parallel(on(3), of, real, 2).step == simulate_training(on(3), of, 2).step);
}

TEST_CASE("simulated: a trace of DataParallel") {
  const auto text = [&] {
    return trace_text(simulate_training(on(3, true), plain_training(), 2).times, 64, "dp",
                      cat(R"("gradient_bytes":)", gradients));
  };
  CHECK(text() == text());
  const auto trace = parse_trace(text(), "simulated.json");
  CHECK(trace.policy() == "dp");
  CHECK(trace.devices() == 3);
  const auto facts = facts_of(trace);
  const auto times = simulate_training(on(3), plain_training(), 2);
  CHECK(facts.step_us == Approx(times.step * 1e6).epsilon(1e-6));
  CHECK(facts.compute_us[0] == Approx(1e6 * (forward_time + backward_time + optimizer_time)).epsilon(1e-6));
  CHECK(facts.compute_us[1] == Approx(1e6 * (forward_time + backward_time)).epsilon(1e-6));
  // A device waits whenever it doesn't compute.
  CHECK(facts.exposed_us[0] == Approx(facts.step_us - facts.compute_us[0]).epsilon(1e-6));
  CHECK(facts.exposed_us[1] == Approx(facts.step_us - facts.compute_us[1]).epsilon(1e-6));
  CHECK(facts.hidden == 0);
  auto sizes = plain_training().copied;
  sizes.samples *= 3;
  std::map<std::tuple<int, int, std::string>, double> expected, got;
  for (const auto& [link, bytes] : links_of(data_parallel_copies(sizes, 3)))
    expected[{std::get<0>(link), std::get<1>(link), std::string(trace::name(std::get<2>(link)))}] = double(bytes);
  for (const auto& link : facts.links) got[{link.from, link.to, link.kind}] = link.bytes;
  CHECK(got == expected);
  int arrows = 0;
  for (const auto& arrow : trace.arrows) arrows += arrow.category == "copy" && arrow.phase == 's';
  CHECK(arrows == 2 * 2 * 7);
  // Memory: only the first device has an optimizer.
  const auto block = size_class<64>(parameters).bytes;
  CHECK(facts.peak[0]["parameters"] == block);
  CHECK(facts.peak[0]["optimizer"] == 2 * block);
  CHECK(facts.peak[1]["gradients"] == block);
  CHECK(facts.peak[1]["optimizer"] == 0);
}

TEST_CASE("simulated: devices of DataParallel hold what the real ones do") {
  const auto held = [](int device) {
    std::array<std::size_t, trace::memory_kinds> out{};
    for (std::size_t kind = 0; kind < out.size(); ++kind)
      out[kind] = trace::memory(trace_slot(Cpu{device}), static_cast<trace::Memory>(kind));
    out[0] = 0;  // activations
    return out;
  };
  std::vector<std::array<std::size_t, trace::memory_kinds>> before;
  for (int device = 0; device < 3; ++device) before.push_back(held(device));
  DataParallel<Losing<Cpu>> net{Losing<Cpu>(), {.device_ids = ids(3)}, 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  net.mean_loss(net(Tensor<float, 2>::ones({6, 50}))).backward();
  optimizer.step();
  const Training of{.parameter_bytes = sizes_of(Losing<Cpu>(), 1, 0).parameters, .optimizer_slots = 1};
  for (int device = 0; device < 3; ++device) {
    INFO("device " << device);
    auto expected = held_by(of, device == 0);
    for (std::size_t kind = 0; kind < expected.size(); ++kind)
      expected[kind] += before[static_cast<std::size_t>(device)][kind];
    CHECK(held(device) == expected);
  }
}

TEST_CASE("simulated: DataParallel that makes no sense") {
  const auto refused = [](const SimulationOptions& options, const Training& of, int steps = 1) {
    return message_of<UsageError>([&] { simulate_training(options, of, steps); });
  };
  const auto with = [](const char* links, int devices) {
    return SimulationOptions{.ranks = devices, .links = links_named(links)};
  };
  CHECK(refused(with("nvlink8+25gbit", 8), plain_training()) == "nothing");
  CHECK(refused(with("nvlink8+25gbit", 9), plain_training()) ==
        "DataParallel: one process on one machine: 9 devices over nvlink8+25gbit, which join machines of 8 devices "
        "each: expected nvlink or pcie, or fewer devices");
  CHECK_THAT(refused(with("25gbit", 2), plain_training()), Contains("which join machines of one device each"));
  CHECK(refused(with("25gbit", 1), plain_training()) == "nothing");
  CHECK(refused(with("pcie", 65), plain_training()) == "DataParallel: 65 devices, expected 1 to 64");
  CHECK(refused(with("pcie", 0), plain_training()) == "DataParallel: 0 devices, expected 1 to 64");
  CHECK(refused(with("pcie", 2), plain_training(), 0) == "simulate_training: 0 steps, expected 1 to 100000");
  auto few = plain_training();
  few.copied.samples = -1;
  CHECK(refused(with("pcie", 2), few) == "simulate_training: -1 samples a device, expected 0 to 1e9");
  auto large = plain_training();
  large.copied.parameters = std::size_t{1} << 50;
  CHECK_THAT(refused(with("pcie", 2), large), Contains("a copy: 7148"));
  auto slow = plain_training();
  slow.forward = 7000;
  CHECK(refused(with("pcie", 2), slow, 2) == "simulation: more than 9000 s of virtual time");
  const auto of_copies = [&](const DataParallelCopies& copies) {
    return message_of<UsageError>([&] { simulate_data_parallel(with("pcie", 2), plain_training(), copies, 1); });
  };
  CHECK(of_copies({.gather = {{2, 0, Traffic::outputs, 4}}}) ==
        "simulate_data_parallel: a copy from device 2 to 0, of 2");
  CHECK(of_copies({.gather = {{1, 1, Traffic::outputs, 4}}}) ==
        "simulate_data_parallel: a copy from device 1 to 1, of 2");
  CHECK(message_of<UsageError>([] { data_parallel_copies({}, 0); }) == "data_parallel_copies: 1 samples for 0 devices");
  // The recorded copies must be those of one pass.
  DeviceCopyListener listener(ids(2));
  CHECK_THAT(message_of<UsageError>([] { DeviceCopyListener(ids(2)); }), Contains("somebody listens already"));
  DataParallel<Losing<Cpu>> net{Losing<Cpu>(), {.device_ids = ids(2)}, 3};
  const auto x = Tensor<float, 2>::ones({4, 50});
  net.mean_loss(net(x)).backward();
  net.module().fc.weight.assign(net.module().fc.weight.value());
  net.mean_loss(net(x)).backward();
  CHECK(message_of<UsageError>([&] { listener.take(); }) ==
        "DeviceCopyListener: expected one forward pass, got a second one");
}

}  // namespace simulated_data_parallel_test
