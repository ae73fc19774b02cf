// DataParallel on GPUs that are different ones, over a stand-in for NCCL: what is broadcast and reduced, the steps that
// come of it, and failures.
#include <catch.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include "../../unit/comm/processes.hpp"
#include "../../unit/parallel/policies.hpp"
#include "nccl_stand_in.hpp"

namespace data_parallel_nccl_test {

using namespace test::names;
using namespace std::chrono_literals;
using test::nccl_net;

constexpr double rounding = 2e-6;  // of the floats among them

/// A model of two dtypes, with buffers. The parameters of `side` get gradients on some devices only.
template <class D>
struct Net : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 3}, side{5, 3};
  nn::BatchNorm<D, double> norm{3};
  nn::Linear<D, float> gain{1, 1};
  CHORUS_MODULE(Net, fc1, norm, fc2, side, gain)
  auto forward(const auto& x, const std::vector<int>& sides, int fails) const {
    if (x.device().index == fails) fail<ShapeError>("device ", fails, " does not like it");
    const auto h = norm(reshape(fc1(x), std::array<Index, 3>{-1, 3, 4}));
    const auto factor = mean(to<double>(gain(Tensor<float, 2, D>::full({2, 1}, 0.5f, x.device()))));
    const auto y = fc2(tanh(flatten(h))) * factor;
    return std::find(sides.begin(), sides.end(), x.device().index) == sides.end() ? y : y + side(x);
  }
};
// In the flat buffers, on GPUs: 1 + 1 floats, in 8 each, then 3 + 15 doubles of `side`, 3 + 36 of fc2, 3 + 3, 12 + 60,
// each up to a multiple of 4.
constexpr std::size_t f32 = 16, f64 = 140, sides = 20, own_bytes = 2 * 4 + (18 + 39 + 6 + 72) * 8;
constexpr std::size_t buffer_bytes = 24 + 24 + 8;

template <class D>
struct Training {
  std::vector<int> ids;
  DataParallel<Net<D>> net;
  optim::Sgd<D> optimizer;

  explicit Training(std::vector<int> devices, std::chrono::milliseconds timeout = 60s)
      : ids(std::move(devices)),
        net{(manual_seed(4), Net<D>{}), {.device_ids = ids, .timeout = timeout}, 3},
        optimizer{net.parameters(), {.lr = 0.2, .momentum = 0.9}} {}

  double backward(std::uint32_t number, Index size = 12, const std::vector<int>& with_side = {}, int fails = -1) {
    optimizer.zero_grad();
    const auto wanted = labels(size, 3, number);
    const auto loss = cross_entropy(net(numbers(size, 5, number), with_side, fails),
                                    Tensor<std::int64_t, 1, D>::from(wanted.to_vector(), wanted.shape(), D{ids[0]}));
    loss.backward();
    return loss.item();
  }
  double step(std::uint32_t number, Index size = 12, const std::vector<int>& with_side = {}, int fails = -1) {
    const double loss = backward(number, size, with_side, fails);
    optimizer.step();
    return loss;
  }
  /// All parameters, or their gradients, -77 where there is none.
  std::vector<double> values(bool gradients = false) {
    std::vector<double> out;
    for (const auto& named : net.parameters()) {
      const auto& p = *named.parameter;
      const auto count = static_cast<std::size_t>(p.count());
      std::vector<double> wide(count, -77);
      std::vector<float> narrow(count, -77);
      void* to = p.dtype() == DType::f64 ? static_cast<void*>(wide.data()) : narrow.data();
      if (!gradients || p.grad_arrived())
        copy_bytes(Cpu{}, to, p.where(), gradients ? p.grad_data() : p.value_data(), p.size_bytes());
      if (p.dtype() == DType::f32) wide.assign(narrow.begin(), narrow.end());
      out.insert(out.end(), wide.begin(), wide.end());
    }
    return out;
  }
};

// Batches of all sizes; gradients of `side` on all devices, on some, on none.
template <class D>
std::vector<double> run(std::vector<int> ids) {
  Training<D> training(std::move(ids));
  constexpr std::array<Index, 6> sizes{12, 7, 2, 12, 1, 9};
  const std::vector<std::vector<int>> with_side{{}, {0, 1, 2}, {1}, {}, {2}, {0}};
  std::vector<double> out;
  for (std::uint32_t i = 0; i < 12; ++i) {
    out.push_back(training.step(i, sizes[i % 6], with_side[i % 6]));
    const auto gradients = training.values(true);
    out.insert(out.end(), gradients.begin(), gradients.end());
  }
  const auto parameters = training.values();
  out.insert(out.end(), parameters.begin(), parameters.end());
  return out;
}

using Lines = std::vector<std::string>;
constexpr auto everything = "broadcast 1120 from 0";

TEST_CASE("dp over nccl takes the steps that copies take") {
  for (const auto& ids : {std::vector{0, 1, 2}, {2, 0, 1}, {1, 0}}) {
    const auto expected = run<Cpu>(ids);
    CHECK(distance(run<Cuda>(ids), expected) < rounding);
    const test::StandInNccl nccl;
    CHECK(distance(run<Cuda>(ids), expected) < rounding);
    for (int rank = 0; rank < static_cast<int>(ids.size()); ++rank) {
      CHECK(nccl_net().count(rank, "init") == 1);
      CHECK(nccl_net().count(rank, "broadcast") > 0);
      CHECK(nccl_net().count(rank, "reduce") > 0);
      CHECK(nccl_net().count(rank, "abort") == 0);
      const auto lines = nccl_net().record(rank);
      CHECK(Lines(lines.end() - 2, lines.end()) == Lines{"finalize", "destroy"});
    }
  }
}

TEST_CASE("dp over nccl: what travels, in what order, and what trace counts") {
  const test::StandInNccl nccl;
  Training<Cuda> training({2, 0, 1});
  const auto take = [&] {
    const auto lines = nccl_net().record(0);
    for (const int rank : {1, 2}) CHECK(nccl_net().record(rank) == lines);
    nccl_net().clear_records();
    return lines;
  };
  const auto with_buffers = [](Lines first, const Lines& last) {
    for (const char* line : {"broadcast 24 from 0", "broadcast 24 from 0", "broadcast 8 from 0"}) first.push_back(line);
    first.insert(first.end(), last.begin(), last.end());
    return first;
  };

  trace::reset_traffic();
  training.step(1, 12, {0, 1, 2});
  for (const int rank : {0, 1, 2}) {
    auto lines = nccl_net().record(rank);
    REQUIRE(!lines.empty());
    CHECK(lines.front() == cat("init rank ", rank, " of 3"));
    lines.erase(lines.begin());
    CHECK(lines == with_buffers({"broadcast 64 from 0", everything}, {"reduce 16 F32 to 0", "reduce 140 F64 to 0"}));
  }
  nccl_net().clear_records();
  CHECK(trace::bytes_sent(2, trace::Traffic::parameters) == 2 * (4 * f32 + 8 * f64));
  CHECK(trace::bytes_sent(2, trace::Traffic::buffers) == 2 * buffer_bytes);
  CHECK(trace::bytes_sent(2, trace::Traffic::gradients) == 0);
  for (const int device : {0, 1}) {
    CHECK(trace::bytes_sent(device, trace::Traffic::gradients) == own_bytes);
    CHECK(trace::bytes_sent(device, trace::Traffic::parameters) == 0);
    CHECK(trace::bytes_sent(device, trace::Traffic::buffers) == 0);
  }

  // Without a step before it nothing has changed; a gradient that no copy has is not asked for.
  training.backward(2);
  training.backward(3, 12, {2});
  CHECK(take().size() == 3 + 2 + 2 + 3 + 2);
  training.backward(4);
  CHECK(take() == with_buffers({}, {"reduce 16 F32 to 0", "reduce 120 F64 to 0"}));
  training.backward(5, 12, {1});
  CHECK(take() == with_buffers({}, {"reduce 16 F32 to 0", "reduce 140 F64 to 0"}));

  // One parameter alone.
  training.net.module().fc2.bias.assign(Tensor<double, 1, Cuda>::full({3}, 0.25, Cuda{2}));
  trace::reset_traffic();
  training.backward(6);
  CHECK(take() == with_buffers({"broadcast 32 from 0"}, {"reduce 16 F32 to 0", "reduce 120 F64 to 0"}));
  CHECK(trace::bytes_sent(2, trace::Traffic::parameters) == 2 * 32);

  // A small batch takes the other way, to the devices that it uses; what the third then lacks goes to all.
  training.net.module().fc2.bias.assign(Tensor<double, 1, Cuda>::full({3}, 0.5, Cuda{2}));
  training.backward(7, 2);
  CHECK(take().empty());
  training.backward(8);
  CHECK(take() == with_buffers({"broadcast 32 from 0"}, {"reduce 16 F32 to 0", "reduce 120 F64 to 0"}));
}

TEST_CASE("dp over nccl: devices that repeat, and one alone, don't need it") {
  const test::StandInNccl nccl;
  for (const auto& ids : {std::vector{0, 0}, {0, 1, 0}, {1}}) {
    Training<Cuda> training(ids);
    training.step(1);
    CHECK(nccl_net().record(0).empty());
  }
}

TEST_CASE("dp over nccl: a copy that fails in its forward pass leaves the group whole") {
  const test::StandInNccl nccl;
  Training<Cuda> training({0, 1, 2}), untouched({0, 1, 2});
  training.step(1);
  CHECK(message_of<ShapeError>([&] { training.step(2, 12, {}, 1); }) ==
        "DataParallel: replica 1 on device cuda:1: device 1 does not like it");
  training.step(3);
  for (const int rank : {0, 1, 2}) {
    CHECK(nccl_net().count(rank, "init") == 1);
    CHECK(nccl_net().count(rank, "abort") == 0);
  }
  untouched.step(1);
  untouched.step(3);
  CHECK(training.values() == untouched.values());
}

TEST_CASE("dp over nccl: a device that fails in or before a collective ends it for all, at once; then all goes on") {
  Training<Cuda> untouched({0, 1, 2});
  std::vector<double> expected;
  {
    const test::StandInNccl nccl;
    untouched.step(1);
    untouched.step(2);
    expected = untouched.values();
  }
  struct Case {
    int rank;
    const char *call, *message;
  };
  for (const auto& [rank, call, message] :
       {Case{1, "init", "replica 1 on device cuda:1: rank 1: meeting the other ranks: nccl: error 5"},
        Case{2, "broadcast", "replica 2 on device cuda:2: rank 2: broadcast #2: nccl: error 5"},
        Case{0, "broadcast", "replica 0 on device cuda:0: rank 0: broadcast #2: nccl: error 5"},
        Case{1, "reduce", "replica 1 on device cuda:1: rank 1: reduce #3: nccl: error 5"}}) {
    INFO(rank << " " << call);
    const test::StandInNccl nccl;
    Training<Cuda> training({0, 1, 2});
    const bool at_once = std::string_view(call) == "init";
    if (!at_once) training.step(1);
    nccl_net().refusals[{rank, call}] = 5;
    const auto start = comm::Clock::now();
    CHECK(message_of<CommError>([&] { training.step(at_once ? 1 : 2); }) == cat("DataParallel: ", message));
    CHECK(comm::Clock::now() - start < 30s);  // of the 60 until the deadline
    for (const int each : {0, 1, 2}) CHECK(nccl_net().count(each, "abort") == 1);
    nccl_net().clear_records();
    if (at_once) training.step(1);
    training.step(2);
    CHECK(nccl_net().count(0, "init") == 1);
    if (!at_once) CHECK(nccl_net().count(0, "broadcast 1120") == 1);  // nobody knows what the copies have
    CHECK(training.values() == expected);
  }
}

TEST_CASE("dp over nccl: a collective that does not end runs into the deadline, and a new group goes on") {
  const test::StandInNccl nccl;
  Training<Cuda> training({0, 1, 2}, 300ms);
  training.step(1);
  nccl_net().stuck = true;
  const auto text = message_of<TimeoutError>([&] {
    const auto end = comm::Clock::now() + 20s;
    for (std::uint32_t i = 2; comm::Clock::now() < end; ++i) training.step(i);
  });
  // Which call is the first that does not end depends on how far the streams had come.
  CHECK_THAT(text, Contains("DataParallel: replica") &&
                       Contains("not every rank has joined in and finished within 300 ms"));
  for (const int rank : {0, 1, 2}) CHECK(nccl_net().count(rank, "abort") == 1);
  nccl_net().stuck = false;
  training.step(100);
  for (const int rank : {0, 1, 2}) CHECK(nccl_net().count(rank, "init") == 2);
}

TEST_CASE("dp on devices of unequal size: who holds the others up is named") {
  auto& processors = emulation::counters().processors;
  const std::vector<dp::DeviceSize> sizes{dp::device_size(Cuda{0}), dp::device_size(Cuda{2})};
  CHECK(sizes[0].memory == static_cast<double>(emulation::Counters::limit));
  CHECK(dp::imbalance(std::vector{0, 2}, sizes) == "");
  const auto text = test::Ranks(1, [&](const comm::World&) {
                      processors[2] = 2;
                      return test::with_stderr([] {
                        dp::warn_of_imbalance<Cuda>({0, 2});
                        return std::string();
                      });
                    }).texts()[0];
  CHECK_THAT(text, Contains("warning: DataParallel: device 2 has less than 75 % of the processors of device 0"));
}

}  // namespace data_parallel_nccl_test
