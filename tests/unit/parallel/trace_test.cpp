// Traces of real runs: trace, counters and formulas agree on every policy's bytes, spans are at the right times, and
// tracing changes no results.
#include <chorus/core/trace.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/trace/trace_recorder.hpp>

#include <catch.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "ranks.hpp"

namespace trace_test {

using namespace test::names;
using nlohmann::json;
using trace::Traffic;

/// The sizes of its parameters are multiples of 12, so that chunks of 2, 3 and 4 ranks have equal sizes.
template <class D>
struct Even : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 24}, fc3{24, 12};
  CHORUS_MODULE(Even, fc1, fc2, fc3)
  auto forward(const auto& x) const { return fc3(tanh(fc2(tanh(fc1(x))))); }
};
constexpr std::uint64_t even_bytes = (60 + 12 + 288 + 24 + 288 + 12) * sizeof(double);
constexpr int steps = 9;

struct Folder {
  std::string path = "/tmp/chorus_trace_XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string file() const { return path + "/run.json"; }
};
json whole(const std::string& path) {
  std::ifstream file(path);
  REQUIRE(file);
  return json::parse(file);
}

/// Bytes by sender, receiver and kind.
using Links = std::map<std::tuple<int, int, std::string>, std::uint64_t>;
Links links_of(const json& file) {
  Links out;  // a counter's last value is the sum
  for (const auto& event : file.at("traceEvents")) {
    const std::string name = event.at("name");
    if (event.at("ph") != "C" || name.rfind("sent to ", 0) != 0) continue;
    for (const auto& [kind, bytes] : event.at("args").items())
      out[{event.at("pid").get<int>() - 1, std::stoi(name.substr(8)), kind}] = bytes;
  }
  return out;
}
std::uint64_t sent_by(const Links& links, int rank, const std::string& kind) {
  std::uint64_t sum = 0;
  for (const auto& [link, bytes] : links)
    if (std::get<0>(link) == rank && std::get<2>(link) == kind) sum += bytes;
  return sum;
}
std::string counted(int rank) {
  std::string text;
  for (std::size_t kind = 0; kind < trace::traffic_kinds; ++kind)
    text += cat(trace::bytes_sent(rank, static_cast<Traffic>(kind)), " ");
  return text;
}
std::string traced(const Links& links, int rank) {
  std::string text;
  for (std::size_t kind = 0; kind < trace::traffic_kinds; ++kind)
    text += cat(sent_by(links, rank, std::string(trace::name(static_cast<Traffic>(kind)))), " ");
  return text;
}

/// Trains under a policy of processes, with a trace of `steps` steps from step `first` on. Returns for each rank its
/// counters, then the text of `more(net)`. Calls `begin(net)` before the trace begins.
template <class Make, class Begin, class More>
std::vector<std::string> train_ranks(int ranks, const std::string& path, std::uint32_t first, const Make& make_net,
                                     const Begin& begin, const More& more) {
  return Ranks(ranks, [&](const World& world) {
           TraceRecorder recorder({.path = path, .first_step = first, .steps = steps, .ring_steps = true},
                                  {.policy = "ddp", .distributed = true, .rank = world.rank, .ranks = world.size});
           auto communicator = comm::connect(world);
           auto net = make_net(communicator);
           optim::Sgd optimizer{net->parameters(), {.lr = 0.1}};
           for (std::uint32_t number = 0; number < first + steps; ++number) {
             if (number == first) {
               trace::reset_traffic();
               begin(*net);
             }
             optimizer.zero_grad();
             cross_entropy((*net)(test::share(numbers(12, 5, number), world)),
                           test::share(labels(12, 12, number), world))
                 .backward();
             optimizer.step();
           }
           recorder.finish();
           const auto text = counted(world.rank) + "|" + more(*net);
           communicator.barrier();  // all have finished
           return text;
         })
      .texts();
}
template <class Make>
void check_three_ways(int ranks, const Make& make_net, const std::function<Links(int rank)>& formula) {
  INFO(ranks << " ranks");
  const Folder folder;
  const auto texts = train_ranks(
      ranks, folder.file(), 0, make_net, [](auto&) {}, [](const auto&) { return std::string(); });
  const auto links = links_of(whole(folder.file()));
  Links expected, got;
  for (int rank = 0; rank < ranks; ++rank) {
    CHECK(traced(links, rank) + "|" == texts[static_cast<std::size_t>(rank)]);
    expected.merge(formula(rank));
  }
  for (const auto& [link, bytes] : links)
    if (std::get<2>(link) != "control") got[{std::get<0>(link), -1, std::get<2>(link)}] += bytes;
  CHECK(got == expected);
}

TEST_CASE("trace = counters = formula: ddp") {
  for (const int n : {2, 3, 4})
    check_three_ways(
        n,
        [](auto& communicator) {
          return std::make_unique<DistributedDataParallel<Even<Cpu>>>(
              make<Even<Cpu>>(), communicator,
              DistributedDataParallelOptions{.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-3}, 3);
        },
        [n](int rank) {
          const auto ranks = static_cast<std::uint64_t>(n);
          return Links{{{rank, -1, "gradients"}, steps * 2 * (ranks - 1) * even_bytes / ranks}};
        });
}
TEST_CASE("trace = counters = formula: local sgd") {
  for (const int n : {2, 3, 4})
    check_three_ways(
        n,
        [](auto& communicator) {
          return std::make_unique<LocalSgd<Even<Cpu>>>(make<Even<Cpu>>(), communicator, LocalSgdOptions{.period = 4}, 3);
        },
        [n](int rank) {
          const auto ranks = static_cast<std::uint64_t>(n);
          return Links{{{rank, -1, "parameters"}, (steps - 1) / 4 * 2 * (ranks - 1) * even_bytes / ranks}};
        });
}
TEST_CASE("trace = counters = formula: parameter server") {
  for (const int n : {2, 3, 4})
    check_three_ways(
        n,
        [](auto& communicator) {
          return std::make_unique<ParameterServer<Even<Cpu>>>(make<Even<Cpu>>(), communicator, 3);
        },
        [n](int rank) {
          const auto workers = static_cast<std::uint64_t>(n - 1);
          // Before the first step all have the server's parameters.
          return rank == 0 ? Links{{{0, -1, "parameters"}, (steps - 1) * workers * even_bytes}}
                           : Links{{{rank, -1, "gradients"}, steps * even_bytes}};
        });
}
TEST_CASE("trace = counters = formula: dp, link by link") {
  for (const int n : {2, 3, 4}) {
    INFO(n << " devices");
    const Folder folder;
    TraceRecorder recorder({.path = folder.file(), .first_step = 0, .steps = steps}, {.policy = "dp"});
    std::vector<int> ids;
    for (int i = 0; i < n; ++i) ids.push_back(i);
    DataParallel<Even<Cpu>> net{make<Even<Cpu>>(), {.device_ids = ids}, 3};
    optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
    trace::reset_traffic();
    for (std::uint32_t number = 0; number < steps; ++number) test::step(net, optimizer, number, 12);
    recorder.finish();
    const auto file = whole(folder.file());
    const auto links = links_of(file);
    for (int i = 0; i < n; ++i) CHECK(traced(links, i) == counted(i));
    const auto share = static_cast<std::uint64_t>(12 / n);
    Links expected;
    for (int i = 1; i < n; ++i) {
      expected[{0, i, "parameters"}] = steps * even_bytes;
      expected[{0, i, "inputs"}] = steps * share * 5 * sizeof(double);
      expected[{0, i, "outputs"}] = steps * share * 12 * sizeof(double);  // their gradients
      expected[{i, 0, "outputs"}] = steps * share * 12 * sizeof(double);
      expected[{i, 0, "gradients"}] = steps * even_bytes;
    }
    CHECK(links == expected);
    CHECK(file.at("metadata").at("devices") == n);
  }
}

/// Three ranks of ddp whose gradients fill several buckets; each returns the total time of its buckets by DdpTimes, in
/// us, and their number.
std::vector<std::string> train_ddp(const std::string& path) {
  return train_ranks(
      3, path, 1,  // the first step learns the order
      [](auto& communicator) {
        return std::make_unique<DistributedDataParallel<Even<Cpu>>>(
            make<Even<Cpu>>(), communicator,
            DistributedDataParallelOptions{.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-3}, 3);
      },
      [](auto& net) { net.reset_logging_data(); },
      [](const auto& net) {
        const auto& data = net.logging_data();
        return cat(data.avg.bucket_comm_time * static_cast<double>(data.iterations) * 1e6, " ",
                   net.bucket_bytes().size());
      });
}
std::vector<double> told(const std::string& text) { return test::numbers_in(text.substr(text.find('|') + 1)); }

TEST_CASE("a trace of ddp: gradients are ready, buckets full, averaged and stepped, in this order on every rank") {
  const Folder folder;
  const auto texts = train_ddp(folder.file());
  const auto file = whole(folder.file());
  for (int rank = 0; rank < 3; ++rank) {
    INFO("rank " << rank);
    std::map<int, std::vector<double>> ready, full, averaged;  // by bucket
    std::vector<double> stepped;
    for (const auto& event : file.at("traceEvents")) {
      if (event.at("pid") != rank + 1) continue;
      const std::string category = event.value("cat", ""), phase = event.at("ph");
      const double at = event.value("ts", 0.0);
      if (category == "gradient") ready[event.at("args").at("bucket")].push_back(at);
      if (category == "bucket") full[event.at("args").at("bucket")].push_back(at);
      if (phase == "X" && category == "comm" && event.at("args").contains("bucket"))
        averaged[event.at("args").at("bucket")].push_back(at + event.value("dur", 0.0));
      if (category == "optimizer") stepped.push_back(at);
    }
    CHECK(static_cast<double>(full.size()) == told(texts[static_cast<std::size_t>(rank)]).at(1));
    REQUIRE(full.size() > 2);
    REQUIRE(stepped.size() == steps);
    for (const auto& [bucket, times] : full) {
      REQUIRE(times.size() == steps);
      REQUIRE(averaged[bucket].size() == steps);
      const auto each = ready[bucket].size() / steps;
      for (std::size_t i = 0; i < steps; ++i) {
        CHECK(ready[bucket][(i + 1) * each - 1] <= times[i]);
        CHECK(times[i] < averaged[bucket][i]);
        CHECK(averaged[bucket][i] < stepped[i]);
      }
    }
  }
}

TEST_CASE("a trace of ddp: spans of communication add up to what DdpTimes says") {
  // To within 1 % and the cost of reading the clock. A thread may be preempted in between, but not in each attempt.
  double apart = 0, may = 0;
  for (int attempt = 0; attempt < 10 && (attempt == 0 || apart > may); ++attempt) {
    const Folder folder;
    const auto texts = train_ddp(folder.file());
    const auto file = whole(folder.file());
    double spans = 0;
    may = 0;
    for (const auto& event : file.at("traceEvents")) {
      if (event.at("pid") != 2 || event.at("ph") != "X" || event.value("cat", "") != "comm") continue;
      spans += event.at("dur").get<double>();
      may += 2.0;
    }
    const double times = told(texts[1]).at(0);
    apart = std::abs(spans - times);
    may = may + 0.01 * times;
  }
  CHECK(apart <= may);
}

TEST_CASE("a trace of dp: what its devices do lies on their own lanes") {
  const Folder folder;
  TraceRecorder recorder({.path = folder.file(), .first_step = 1, .steps = 1}, {.policy = "dp"});
  DataParallel<Even<Cpu>> net{make<Even<Cpu>>(), {.device_ids = {2, 5}}, 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  for (std::uint32_t number = 0; number < 3; ++number) test::step(net, optimizer, number, 12);
  std::map<int, std::multiset<std::string>> seen;
  const auto file = whole(folder.file());
  for (const auto& event : file.at("traceEvents"))
    if (event.at("ph") == "X") seen[event.at("pid")].insert(event.at("name"));
  CHECK(seen.size() == 2);
  CHECK(seen[3] == std::multiset<std::string>{"step 1", "DataParallel forward", "forward", "scatter", "gather",
                                              "backward", "backward", "reduce", "optimizer step"});
  CHECK(seen[6] == std::multiset<std::string>{"scatter", "replicate", "forward", "backward", "reduce"});
}

TEST_CASE("a trace changes no number") {
  const auto train = [](bool with_trace) {
    return common_text(2, [&](const World& world) {
      const Folder folder;
      std::unique_ptr<TraceRecorder> recorder;
      if (with_trace)
        recorder = std::make_unique<TraceRecorder>(
            TraceOptions{.path = folder.file(), .first_step = 1, .steps = 2, .ring_steps = true},
            TracedProcess{.policy = "ddp", .distributed = true, .rank = 0, .ranks = 1});
      return test::train<test::Smooth<Cpu>>(world);
    });
  };
  const auto without = train(false);
  REQUIRE(without.find('|') != std::string::npos);
  CHECK(train(true) == without);
}

}  // namespace trace_test
