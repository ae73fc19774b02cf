// Steps of policies in virtual time: they take as long as the policies themselves, and they scale.
#include <algorithm>
#include <catch.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/outer/streaming.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/simulate/trace_file.hpp>
#include <chorus/simulate/training.hpp>
#include <chorus/trace/trace_reader.hpp>
#include <cmath>
#include <mutex>
#include <nlohmann/json.hpp>

#include "policies.hpp"

namespace simulated_training_test {

using namespace chorus;
using namespace chorus::simulated;
using namespace comm::simulated;
using Catch::Matchers::Contains;
using test::Index;

/// In float, with parameters of several sizes.
template <class D>
struct Layers : nn::Module {
  nn::Linear<D, float> fc1{50, 300}, fc2{300, 200}, fc3{200, 10};
  CHORUS_MODULE(Layers, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};

constexpr double forward_time = 3e-3, weight_time = 2e-3, optimizer_time = 1e-3;
constexpr int warm_up = 3, measured = 4;

/// The duration of a step of the policy's own code, with the computing times above.
template <class Net>
double step_of(int ranks, const Links& links, const auto& options, int period) {
  std::vector<double> ends(static_cast<std::size_t>(ranks));
  simulate({.ranks = ranks, .links = links, .all_reduce = comm::Algorithm::ring}, [&](SimulatedRank& rank) {
    Net net(Layers<Cpu>(), rank.communicator(), options, 3);
    const auto& layers = net.module();
    for (const auto* layer : {&layers.fc1, &layers.fc2, &layers.fc3})
      layer->weight.register_hook([&](const auto& gradient) {
        rank.compute(weight_time);
        return gradient;
      });
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    const auto x = Tensor<float, 2>::ones({2, 50});
    double begun = 0;
    for (int step = 0; step < warm_up * period + measured * period; ++step) {
      if (step == warm_up * period) begun = rank.time();
      optimizer.zero_grad();
      const auto y = net(x);
      rank.compute(forward_time);
      mean(y).backward();
      optimizer.step();
      if (!std::is_same_v<Net, ParameterServer<Layers<Cpu>>> || rank.rank() == 0) rank.compute(optimizer_time);
    }
    ends[static_cast<std::size_t>(rank.rank())] = (rank.time() - begun) / (measured * period);
  });
  return *std::max_element(ends.begin(), ends.end());
}

Training training(TrainingPolicy policy, const BucketOptions& caps, int period = 1) {
  ModelSizes model;
  for (const std::size_t in_out : {0u, 1u, 2u}) {
    const std::size_t sizes[] = {50, 300, 200, 10};
    model.parameters.push_back(
        {sizes[in_out + 1], 0});  // backward reaches the weight first, and its hook takes the time
    model.parameters.push_back({sizes[in_out] * sizes[in_out + 1], 1});
  }
  return {.policy = policy,
          .forward = forward_time,
          .backward = 3 * weight_time,
          .optimizer = optimizer_time,
          .buckets = bucket_times(model, caps, 3 * weight_time),
          .parameters = 6,
          .period = period};
}
double scheduled(const Training& of, int ranks, const Links& links) {
  const SimulationOptions options{.ranks = ranks, .links = links, .all_reduce = comm::Algorithm::ring};
  // The difference removes the first steps' extra time.
  const double all = simulate_training(options, of, (warm_up + measured) * of.period).times.seconds(),
               first = simulate_training(options, of, warm_up * of.period).times.seconds();
  return (all - first) / (measured * of.period);
}

TEST_CASE("simulated: a policy's step without numbers takes what the policy takes") {
  for (const auto* name : {"100mbit", "nvlink2+1gbit"})
    for (const int ranks : {2, 4, 8}) {
      INFO(ranks << " ranks over " << name);
      const auto links = links_named(name);
      for (const double cap : {25.0, 0.2, 0.0}) {
        INFO("buckets of " << cap << " MiB");
        const BucketOptions caps{.first_bucket_cap_mb = cap, .bucket_cap_mb = cap};
        const double real = step_of<DistributedDataParallel<Layers<Cpu>>>(
            ranks, links, DistributedDataParallelOptions{.first_bucket_cap_mb = cap, .bucket_cap_mb = cap}, 1);
        CHECK(scheduled(training(TrainingPolicy::ddp, caps), ranks, links) == Approx(real).epsilon(1e-3));
      }
      const BucketOptions caps;
      CHECK(scheduled(training(TrainingPolicy::local_sgd, caps, 2), ranks, links) ==
            Approx(step_of<LocalSgd<Layers<Cpu>>>(ranks, links, LocalSgdOptions{.period = 2}, 2)).epsilon(1e-3));
      CHECK(scheduled(training(TrainingPolicy::parameter_server, caps), ranks, links) ==
            Approx(step_of<ParameterServer<Layers<Cpu>>>(ranks, links, ParameterServerOptions{}, 1)).epsilon(1e-3));
      if (ranks == 8) continue;
      auto streaming = training(TrainingPolicy::local_sgd, caps, 6);
      streaming.fragments = {(60'000 + 200 + 2000 + 10) * sizeof(float), (300 * 50 + 300) * sizeof(float)};
      streaming.overlap = 1;
      CHECK(scheduled(streaming, ranks, links) ==
            Approx(step_of<LocalSgd<Layers<Cpu>, Streaming<2>>>(ranks, links, LocalSgdOptions{.period = 6}, 6))
                .epsilon(1e-3));
    }
}

using Kinds = std::array<std::size_t, trace::memory_kinds>;

/// Live bytes of all devices of the process except activations; and the peak of its buckets.
class MemoryListener : public trace::Listener {
 public:
  MemoryListener() { trace::listen(this); }
  ~MemoryListener() override { trace::listen(nullptr); }
  std::int64_t now() override { return 0; }
  void span(const trace::Event&) override {}
  void instant(const trace::Event&) override {}
  void sent(int, int, trace::Traffic, std::size_t) override {}
  void allocated(int, trace::Memory kind, std::int64_t bytes) override {
    const std::lock_guard lock(mutex_);
    held_[static_cast<std::size_t>(kind)] += static_cast<std::size_t>(bytes);
    buckets_ = std::max(buckets_, held_[static_cast<std::size_t>(trace::Memory::buckets)]);
  }
  Kinds held() {
    const std::lock_guard lock(mutex_);
    auto out = held_;
    out[static_cast<std::size_t>(trace::Memory::activations)] = 0;
    return out;
  }
  std::size_t most_buckets() const { return buckets_; }

 private:
  std::mutex mutex_;
  Kinds held_{};
  std::size_t buckets_ = 0;
};

/// The bytes that two ranks of the policy hold together after some steps, and their buckets' peak.
template <class Net>
std::pair<Kinds, std::size_t> held_in(const auto& options, float momentum) {
  MemoryListener listener;
  Kinds held{};
  simulate({.ranks = 2, .all_reduce = comm::Algorithm::ring}, [&](SimulatedRank& rank) {
    Net net(Layers<Cpu>(), rank.communicator(), options, 3);
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = momentum}};
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      mean(net(Tensor<float, 2>::ones({2, 50}))).backward();
      optimizer.step();
    }
    rank.communicator().barrier();
    if (rank.rank() == 0) held = listener.held();
    rank.communicator().barrier();
  });
  return {held, listener.most_buckets()};
}
std::pair<Kinds, std::size_t> scheduled_to_hold(TrainingPolicy policy, int slots) {
  auto of = training(policy, {}, 1);
  ModelSizes model;
  for (const std::size_t count : {50u * 300, 300u, 300u * 200, 200u, 200u * 10, 10u})
    model.parameters.push_back({count, 0});
  of.parameter_bytes = model.flat_bytes();
  of.optimizer_slots = slots;
  const auto times = simulate_training({.ranks = 2, .keep_spans = true}, of, 3).times;
  Kinds held{};
  std::size_t most = 0;
  for (const auto& rank : times.ranks) {
    REQUIRE(!rank.memory.empty());
    for (std::size_t kind = 0; kind < held.size(); ++kind) held[kind] += rank.memory.back().bytes[kind];
    for (const auto& sample : rank.memory)
      most = std::max(most, sample.bytes[static_cast<std::size_t>(trace::Memory::buckets)]);
  }
  return {held, most};
}

TEST_CASE("simulated: a policy's ranks hold without numbers what they hold with them") {
  for (const int slots : {0, 1}) {
    const float momentum = slots == 1 ? 0.9f : 0;
    CHECK(scheduled_to_hold(TrainingPolicy::ddp, slots) ==
          held_in<DistributedDataParallel<Layers<Cpu>>>(DistributedDataParallelOptions{}, momentum));
    CHECK(scheduled_to_hold(TrainingPolicy::local_sgd, slots) ==
          held_in<LocalSgd<Layers<Cpu>>>(LocalSgdOptions{.period = 1}, momentum));
    const auto server = scheduled_to_hold(TrainingPolicy::parameter_server, slots);
    CHECK(server == held_in<ParameterServer<Layers<Cpu>>>(ParameterServerOptions{}, momentum));
    CHECK(server.second > 0);
  }
}

TEST_CASE("simulated: models have the parameters that they are known for") {
  CHECK(model_named("resnet50").count() == 25'557'032);
  CHECK(model_named("resnet101").count() == 44'549'160);
  CHECK(model_named("resnet152").count() == 60'192'808);
  CHECK(model_named("vgg16").count() == 138'357'544);
  CHECK(model_named("bert_base").count() == 109'482'240);
  CHECK(model_named("bert_large").count() == 335'141'888);
  CHECK(model_named("100000000").count() == 25'000'000);
  for (const auto* name : {"", "resnet51", "255", "-1", "1e9", "100000000000000"})
    CHECK_THAT(message_of<UsageError>([&] { model_named(name); }), Contains(": expected resnet50"));
}

TEST_CASE("simulated: buckets are cut as DistributedDataParallel cuts them") {
  // Torchvision's ResNet-50 with PyTorch's caps: 97.5 MiB in a first bucket of up to 1 MiB and others of up to 25.
  const auto buckets = bucket_times(model_named("resnet50"), {}, 0.1);
  std::size_t sum = 0;
  for (const auto& bucket : buckets) sum += bucket.bytes;
  CHECK(sum == 4 * 25'557'032);
  CHECK(buckets.back().ready == Approx(0.1));
  CHECK(std::is_sorted(buckets.begin(), buckets.end(), [](auto& a, auto& b) { return a.ready < b.ready; }));
  for (std::size_t i = 1; i < buckets.size(); ++i) CHECK(buckets[i].bytes <= 25 << 20);
  CHECK(bucket_times(model_named("resnet50"), {.first_bucket_cap_mb = 1000}, 0.1).size() == 1);
}

TEST_CASE("simulated: 1,024 ranks train ResNet-50") {
  Training of{.forward = 0.04, .backward = 0.08, .buckets = bucket_times(model_named("resnet50"), {}, 0.08)};
  const auto links = links_named("nvlink8+100gbit");
  const auto times = simulate_training({.ranks = 1024, .links = links}, of, 1);
  CHECK(times.step > 0.12);
  CHECK(times.step == Approx(0.12 + times.exposed).epsilon(1e-3));
  // All ranks wait for one that computes 10 % longer; the steps after the wait add no delay.
  const auto late =
      simulate_training({.ranks = 1024, .links = links, .computing = {.stragglers = {{777, 1.1}}}}, of, 1);
  CHECK(late.step - times.step > 0.6 * 0.012);
  CHECK(late.step - times.step <= 0.012);
}

TEST_CASE("simulated: a trace of what ranks did") {
  Training of{.forward = 1e-3, .backward = 2e-3, .optimizer = 5e-4, .buckets = {{1e-3, 40'000}, {2e-3, 80'000}}};
  const SimulationOptions options{.ranks = 4,
                                  .links = links_named("1gbit"),
                                  .computing = {.stragglers = {{1, 1.5}}},
                                  .all_reduce = comm::Algorithm::ring,
                                  .keep_spans = true};
  const auto text = [&] {
    return trace_text(simulate_training(options, of, 2).times, 64, "ddp", R"("gradient_bytes":120000)");
  };
  CHECK(text() == text());
  const auto trace = nlohmann::json::parse(text());
  CHECK(trace["metadata"]["devices"] == 4);
  CHECK(trace["metadata"]["notes"]["gradient_bytes"] == 120'000);
  std::map<std::string, int> kinds;
  std::map<int, double> waits, ends;
  std::map<std::string, std::int64_t> sent;
  for (const auto& event : trace["traceEvents"]) {
    const std::string kind = event.value("cat", event["ph"].get<std::string>());
    ++kinds[kind];
    if (event["ph"] == "X") {
      CHECK(event["dur"].get<double>() >= 0);
      ends[event["pid"]] = std::max(ends[event["pid"]], event["ts"].get<double>() + event["dur"].get<double>());
    }
    if (kind == "wait") waits[event["pid"]] += event["dur"].get<double>();
    if (event["ph"] == "C")
      sent[cat(event["pid"].get<int>(), " ", event["name"].get<std::string>())] = event["args"].value("gradients", 0);
  }
  CHECK(kinds["step"] == 8);
  CHECK(kinds["forward"] == 8);
  CHECK(kinds["backward"] == 8);
  CHECK(kinds["optimizer"] == 8);
  CHECK(kinds["bucket"] == 16);
  CHECK(kinds["comm"] == 4 * 2 * 3);  // shares and two buckets
  CHECK(kinds["late"] > 0);
  CHECK(kinds["late"] % 2 == 0);
  CHECK(waits[2] < waits[1]);  // the straggler's process is the second one
  // 2 (N - 1) / N of the gradients in each step, to the next rank.
  CHECK(sent["1 sent to 1, bytes"] == 2 * 2 * 3 * 120'000 / 4);
  CHECK(sent["4 sent to 0, bytes"] == 2 * 2 * 3 * 120'000 / 4);
}

TEST_CASE("simulated: a trace with the steps of rings, and memory") {
  Training of{.forward = 1e-3, .backward = 2e-3, .buckets = {{2e-3, 48}}, .parameter_bytes = 48, .optimizer_slots = 1};
  const SimulationOptions options{.ranks = 3,
                                  .links = links_named("1gbit"),
                                  .all_reduce = comm::Algorithm::ring,
                                  .keep_spans = true,
                                  .keep_steps = true};
  const auto text = [&] { return trace_text(simulate_training(options, of, 1).times, 64, "ddp", ""); };
  CHECK(text() == text());
  const auto trace = parse_trace(text(), "simulated.json");
  int arrows = 0;
  for (const auto& arrow : trace.arrows) arrows += arrow.category == "ring" && arrow.phase == 's';
  CHECK(arrows > 0);
  for (int rank = 0; rank < 3; ++rank) {
    const auto& process = trace.processes[static_cast<std::size_t>(rank)];
    std::vector<std::string> steps;
    const TraceEvent* call = nullptr;
    for (const auto& span : process.spans)
      if (span.category == "comm" && span.args().at("op") == "all_reduce") call = &span;
    REQUIRE(call != nullptr);
    for (const auto& span : process.spans) {
      if (span.category != "ring" || span.args().at("sequence") != call->args().at("sequence")) continue;
      CHECK((span.begin >= call->begin && span.end <= call->end + 1e-6));
      CHECK(!span.args().contains("first"));  // nobody knows it
      steps.push_back(cat(span.name, ' ', span.args().at("offset").get<int>()));
    }
    // 12 numbers in 3 chunks of 4: each goes round twice.
    const auto chunk = [&](int back) { return 4 * ((rank - 1 - back + 6) % 3); };
    CHECK(steps == std::vector<std::string>{
                       cat("send ", chunk(0)), cat("add and send ", chunk(1)), cat("add and store and send ", chunk(2)),
                       cat("receive and store and send ", chunk(3)), cat("receive and store ", chunk(4))});
    CHECK(trace.metadata.at("peak")[static_cast<std::size_t>(rank)].at("parameters") == 64);
    CHECK(trace.metadata.at("peak")[static_cast<std::size_t>(rank)].at("optimizer") == 64);
  }
}

TEST_CASE("simulated: training that makes no sense") {
  const auto refused = [](const Training& of, int steps = 1) {
    return message_of<UsageError>([&] { simulate_training({.ranks = 2}, of, steps); });
  };
  Training good{.backward = 1, .buckets = {{1, 4}}};
  CHECK(refused(good) == "nothing");
  CHECK(refused(good, 0) == "simulate_training: 0 steps, expected 1 to 100000");
  CHECK(refused({.backward = 1}) == "simulate_training: no buckets");
  CHECK(refused({.backward = 1, .buckets = {{2, 4}}}) ==
        "simulate_training: a bucket that is full after 2 s, expected 0 to 1");
  CHECK(refused({.policy = TrainingPolicy::local_sgd, .backward = 1, .buckets = {{1, 4}}, .period = 0}) ==
        "simulate_training: expected a period of at least 1 step, got 0");
  good.policy = TrainingPolicy::local_sgd;
  good.fragments = {4, 4, 4};
  CHECK(refused(good) == "simulate_training: expected a period that 3 fragments divide, got 8 steps");
  good.fragments = {4, 4};
  good.overlap = 4;
  CHECK(refused(good) == "simulate_training: expected an overlap of 0 to 3 steps, got 4");
  CHECK_THAT(refused({.forward = -1, .backward = 1, .buckets = {{1, 4}}}), Contains("-1 s of virtual time"));
}

}  // namespace simulated_training_test
