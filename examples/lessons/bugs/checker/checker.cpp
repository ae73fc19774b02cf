/// Runs a program of the bug hunt: as it is shown, and in cases that it doesn't show. One device's results are pinned:
/// who changes them has not mended the program.

#include <chorus/comm/thread_group.hpp>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "../bug.hpp"

namespace {

using namespace bug;
namespace ch = chorus;

std::map<int, Program::Train>& programs() {
  static std::map<int, Program::Train> all;
  return all;
}

struct Run {
  int ranks;
  Case with;
  double one_device;
};
struct Hunted {
  const char* report;
  Run shown, hidden[3];
};
const std::map<int, Hunted> hunted = {
#include "cases.inc"
};

/// Groups of threads, and those that are parts of them.
class Threads {
 public:
  explicit Threads(int ranks) : all_(ch::comm::thread_group(ranks, patience)) {}
  ch::comm::AnyCommunicator& of(int rank) { return all_[static_cast<std::size_t>(rank)]; }
  Threads& part(int number, int count) {
    const std::lock_guard lock(mutex_);
    auto& group = parts_[{number, count}];
    if (!group) group = std::make_unique<Threads>(count);
    return *group;
  }
  void abort(int rank, const std::string& why) {
    of(rank).abort(why);
    const std::lock_guard lock(mutex_);
    for (auto& [which, group] : parts_) {
      const auto& [number, count] = which;
      if (rank / count == number) group->of(rank % count).abort(why);
    }
  }

 private:
  static constexpr std::chrono::seconds patience{10};
  std::vector<ch::comm::AnyCommunicator> all_;
  std::map<std::pair<int, int>, std::unique_ptr<Threads>> parts_;
  std::mutex mutex_;
};

class ThreadRank final : public Rank {
 public:
  ThreadRank(Threads& threads, int rank) : threads_(threads), own_(threads.of(rank)) {}
  int rank() const override { return own_.rank(); }
  int size() const override { return own_.size(); }
  void sum(std::span<double> data) override { own_.all_reduce(data); }
  std::function<void()> start_sum(std::span<double> data) override {
    return [this, data] { sum(data); };
  }
  void broadcast(std::span<double> data, int root) override { own_.broadcast(data, root); }
  Numbers gather(std::span<const double> mine) override {
    Numbers all(mine.size() * static_cast<std::size_t>(size()));
    own_.all_gather(mine, std::span(all));
    return all;
  }
  Rank& part(int count) override {
    ch::check<ch::UsageError>(count >= 1 && size() % count == 0, "part: ", count, " of ", size(),
                              " ranks: expected a count that divides them");
    auto& part = parts_[count];
    if (!part) part = std::make_unique<ThreadRank>(threads_.part(rank() / count, count), rank() % count);
    return *part;
  }

 private:
  Threads& threads_;
  ch::comm::AnyCommunicator& own_;
  std::map<int, std::unique_ptr<ThreadRank>> parts_;
};

/// What each rank returns.
Numbers run(Program::Train train, int ranks, const Case& with) {
  Threads group(ranks);
  Numbers results(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] {
      try {
        ThreadRank own(group, rank);
        results[static_cast<std::size_t>(rank)] = train(own, with);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        group.abort(rank, error.what());
      }
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
  return results;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-9 * (1 + std::abs(b)); }

/// The first rank's result that is not right, or the last one's.
double worst(const Numbers& results, double right) {
  for (const double one : results)
    if (!near(one, right)) return one;
  return results.back();
}

bool check(int number, Program::Train train) {
  const auto& [report, shown, hidden] = hunted.at(number);
  std::printf("bug %d: %s\n", number, report);
  const double got = worst(run(train, shown.ranks, shown.with), shown.one_device);
  const bool right = near(got, shown.one_device);
  std::printf("  %d ranks: %.9f, one device: %.9f   %s\n", shown.ranks, got, shown.one_device, right ? "right" : "WRONG");
  int good = 0, same = 0;
  for (const auto& [ranks, with, one_device] : hidden) {
    Case whole = with;
    whole.interrupted = 0;
    const bool kept = near(run(train, 1, whole).front(), one_device);
    same += kept;
    good += kept && near(worst(run(train, ranks, with), one_device), one_device);
  }
  if (same < 3)
    std::printf("  one device's own result has changed: mend what the ranks do\n");
  else
    std::printf("  other seeds, sizes and numbers of ranks: %d of 3 right\n", good);
  return right && good == 3;
}

/// For cases.inc: one device's results.
void print_results(int number, Program::Train train) {
  const auto& [report, shown, hidden] = hunted.at(number);
  std::printf("{%d, {\"%s\", ", number, report);
  const auto print = [&](const Run& of) {
    Case whole = of.with;
    whole.interrupted = 0;
    std::printf("{%d, {%d, %d, %d, %d}, %.17g}", of.ranks, static_cast<int>(of.with.seed), of.with.samples,
                of.with.steps, of.with.interrupted, run(train, 1, whole).front());
  };
  print(shown);
  std::printf(",\n  {");
  for (const auto& one : hidden) {
    print(one);
    std::printf(&one == &hidden[2] ? "}}},\n" : ",\n   ");
  }
}

}  // namespace

namespace bug {
Program::Program(int number, Train train) { programs()[number] = train; }
}  // namespace bug

int main(int argc, char** argv) {
  try {
    const std::string word = argc == 2 ? argv[1] : "";
    const bool all = word == "all", print = word == "results";
    bool right = true, any = false;
    for (const auto& [number, train] : programs()) {
      if (!all && !print && word != std::to_string(number)) continue;
      any = true;
      print ? print_results(number, train) : void(right = check(number, train) && right);
    }
    ch::check<ch::UsageError>(any, "usage: bugs N, where N is 1 to ", programs().size(), ", or all");
    return right ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
