// Ranks that are killed, stopped and added: who lives, as elastic::Processes sees it.

#include <dirent.h>

#include <algorithm>
#include <catch.hpp>
#include <chorus/parallel/elastic/processes.hpp>
#include <cstdio>
#include <deque>
#include <random>

#include "unit/comm/processes.hpp"

namespace elastic_members_test {

namespace ch = chorus;
namespace el = chorus::elastic;
using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

int open_descriptors() {
  int n = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++n;
  closedir(folder);
  return n;
}

double milliseconds(Clock::time_point time) {
  return std::chrono::duration<double, std::milli>(time.time_since_epoch()).count();
}

/// What one rank does differently.
struct Oddity {
  int rank = -1;
  enum { none, hangs, fails, far, half_way } what = none;  ///< far: on another machine; half_way: see below
};

/// Rank 0 of three, by hand: as the chair of the first round it sends the new View to rank 2 alone, and ends.
void end_half_way(const ch::comm::World& world) {
  const auto door = test::free_port(), meeting = test::free_port();
  el::detail::Card card{.id = 77, .pid = getpid()};
  card.set_address(door.local());
  auto all = ch::comm::connect(world);
  el::detail::View view{.epoch = 2, .key = 5, .count = 3, .port = meeting.local().port()};
  std::vector<std::uint8_t> mine(sizeof card), cards(3 * sizeof card);
  std::memcpy(mine.data(), &card, mine.size());
  all.all_gather(std::span<const std::uint8_t>(mine), std::span(cards));
  std::memcpy(view.cards.data(), cards.data(), cards.size());
  all.abort("the round");
  ch::comm::Acceptor acceptor(door, sizeof(el::detail::Hello), card.id);
  std::vector<ch::comm::Accepted> came;
  while (came.size() < 2) came.push_back(acceptor.next(Clock::now() + 10s));
  for (const auto& one : came)
    if (one.hello_as<el::detail::Hello>().id == view.cards[2].id)
      one.socket.send_all(ch::comm::bytes_of(view), Clock::now() + 1s);
  std::this_thread::sleep_for(50ms);  // rank 2 waits at the meeting
}

/// Processes that each run the loop below, and the lines that they print.
class Job {
 public:
  explicit Job(int ranks, el::Options options = {}, std::chrono::milliseconds timeout = 20s, Oddity odd = {})
      : options_(options), timeout_(timeout), odd_(odd), listener_(test::free_port()) {
    if (pipe2(lines_, O_CLOEXEC) != 0) throw std::runtime_error("pipe");
    for (int rank = 0; rank < ranks; ++rank) {
      ch::comm::World world{.rank = rank, .size = ranks, .local_rank = rank, .local_size = ranks};
      world.master_port = listener_.local().port();
      if (rank == 0) world.listen_fd = listener_.fd();
      start(world, "");
    }
    listener_ = ch::comm::Socket();
  }
  ~Job() {
    for (const int pid : pids) kill(pid, SIGKILL), waitpid(pid, nullptr, 0);
    close(lines_[0]);
    close(lines_[1]);
  }

  void start(ch::comm::World world, const std::string& at) {
    std::fflush(nullptr);
    const int pid = fork();
    if (pid == 0) {
      world.timeout = timeout_;
      if (world.rank == odd_.rank && odd_.what == Oddity::far) setenv("CHORUS_HOST_ID", "far", 1);
      if (odd_.what == Oddity::far) world.backend = ch::comm::Backend::tcp;
      if (world.rank != 0) listener_ = ch::comm::Socket();
      run(world, at);
      _exit(0);
    }
    pids.push_back(pid);
  }
  void join() { start({.rank = 9, .size = 10}, doors); }

  /// Adds up ones for ever. The steps of all ranks are one number, which a newcomer takes from the others.
  void run(const ch::comm::World& world, const std::string& at) {
    std::string why;
    if (world.rank == odd_.rank && odd_.what == Oddity::half_way) return end_half_way(world);
    try {
      el::Processes members(world, options_, at);
      long step = 0;
      while (true) {
        auto all = members.regroup(why);
        why.clear();
        try {
          std::vector<long> newest{step};
          all.all_reduce(std::span(newest), ch::comm::ReduceOp::max);
          step = newest[0];
          print(ch::cat("epoch ", members.epoch, " rank ", all.rank(), " of ", all.size(), " pid ", getpid(), " fds ",
                        open_descriptors(), " at ", milliseconds(Clock::now()), " doors ", members.doors()));
          for (bool knocked = false; !knocked; ++step) {
            std::vector<long> sum{1, members.knocked() ? 1 : 0};
            all.all_reduce(std::span(sum));
            if (sum[0] != all.size()) return print("wrong sum");
            knocked = sum[1] > 0;
            std::this_thread::sleep_for(200us);
          }
        } catch (const ch::CommError& error) {
          why = error.what();
        }
        if (world.rank == odd_.rank && odd_.what == Oddity::hangs) std::this_thread::sleep_for(10s);
        if (world.rank == odd_.rank && odd_.what == Oddity::fails) return members.fail("no such file");
      }
    } catch (const el::TooFewRanks& error) {
      print(ch::cat("too few: ", error.what()));
    } catch (const el::Evicted& error) {
      print(ch::cat("evicted: ", error.what()));
    } catch (const std::exception& error) {
      print(ch::cat("error: ", error.what()));
    }
  }
  void print(std::string line) const {
    line += '\n';
    [[maybe_unused]] const auto n = write(lines_[1], line.data(), line.size());
  }

  /// The next line; fails after 15 s.
  std::string line() {
    while (text_.find('\n') == std::string::npos) {
      pollfd event{lines_[0], POLLIN, 0};
      REQUIRE(poll(&event, 1, 15'000) == 1);
      char buffer[4096];
      const auto n = read(lines_[0], buffer, sizeof buffer);
      text_.append(buffer, static_cast<std::size_t>(n));
    }
    auto line = text_.substr(0, text_.find('\n'));
    text_.erase(0, line.size() + 1);
    return line;
  }

  struct Epoch {
    long number = 0;
    std::vector<int> pids;  ///< by rank
    int descriptors = 0;    ///< most of any rank
    double at = 0;          ///< ms: when the last rank had its first sum
  };
  /// Waits until an epoch of exactly `size` ranks has begun.
  Epoch epoch(int size) {
    while (true) {
      const auto text = line();
      INFO(text);
      Epoch one;
      int rank = 0, of = 0, pid = 0, fds = 0, rest = 0;
      double at = 0;
      REQUIRE(std::sscanf(text.c_str(), "epoch %ld rank %d of %d pid %d fds %d at %lf doors %n", &one.number, &rank,
                          &of, &pid, &fds, &at, &rest) == 6);
      doors = text.substr(static_cast<std::size_t>(rest));
      auto& known = epochs_[one.number];
      known.number = one.number;
      known.pids.resize(static_cast<std::size_t>(of));
      known.pids[static_cast<std::size_t>(rank)] = pid;
      known.descriptors = std::max(known.descriptors, fds);
      known.at = std::max(known.at, at);
      if (of == size && std::ranges::count(known.pids, 0) == 0) return known;
    }
  }
  /// Kills them, and removes them from `pids`.
  void end(const std::vector<int>& killed) {
    for (const int pid : killed) kill(pid, SIGKILL);
    for (const int pid : killed) waitpid(pid, nullptr, 0), std::erase(pids, pid);
  }

  std::vector<int> pids;
  std::string doors;

 private:
  el::Options options_;
  std::chrono::milliseconds timeout_;
  Oddity odd_;
  ch::comm::Socket listener_;
  int lines_[2] = {-1, -1};
  std::string text_;
  std::map<long, Epoch> epochs_;
};

TEST_CASE("ranks are lost, one after the other, and two at once") {
  Job job(5);
  auto now = job.epoch(5);
  CHECK(now.number == 1);
  const auto first = now.pids;
  job.end({first[0]});
  now = job.epoch(4);
  CHECK(now.pids == std::vector(first.begin() + 1, first.end()));  // by age
  job.end({first[2], first[3]});
  CHECK(job.epoch(2).pids == std::vector{first[1], first[4]});
  job.end({first[1]});
  CHECK(job.epoch(1).pids == std::vector{first[4]});
}

TEST_CASE("a stopped rank is lost after lost_after, whoever it is") {
  const std::size_t stopped = GENERATE(0u, 1u, 2u);
  Job job(3, {.lost_after = 400ms});
  const auto first = job.epoch(3).pids;
  const auto begin = Clock::now();
  kill(first[stopped], SIGSTOP);
  CHECK(job.epoch(2).at - milliseconds(begin) < 1'500);
  CHECK(Clock::now() - begin > 350ms);
  job.end({first[stopped]});
}

TEST_CASE("a silent rank of another machine is left behind, and evicted when it comes back") {
  const int far = GENERATE(0, 1, 2);
  Job job(3, {.lost_after = 400ms}, 20s, {far, Oddity::far});
  const auto first = job.epoch(3).pids;
  kill(first[static_cast<std::size_t>(far)], SIGSTOP);
  job.epoch(2);
  kill(first[static_cast<std::size_t>(far)], SIGCONT);
  CHECK(job.line().starts_with("evicted: elastic: this process was taken for lost: the others are in epoch "));
}

TEST_CASE("half of the ranks may continue if the first one is among them, as far as anyone knows") {
  const int far = GENERATE(0, 1);
  Job job(2, {.lost_after = 400ms}, 20s, {1, Oddity::far});
  const auto first = job.epoch(2).pids;
  kill(first[static_cast<std::size_t>(far)], SIGSTOP);
  if (far == 1) {
    CHECK(job.epoch(1).pids == std::vector{first[0]});
  } else {
    CHECK(job.line() == "error: elastic: 1 of 2 ranks that may live are here: the others may continue without them");
  }
}

TEST_CASE("an epoch that only one rank has heard of is not counted twice") {
  Job job(3, {}, 5s, {0, Oddity::half_way});
  const auto now = job.epoch(2);
  CHECK(now.number == 3);
  CHECK(now.pids == std::vector{job.pids[1], job.pids[2]});
}

TEST_CASE("a rank that lives and does not come is named at the deadline") {
  const int odd = GENERATE(0, 2);
  Job job(3, {.lost_after = 400ms}, 1s, {odd, Oddity::hangs});
  const auto first = job.epoch(3).pids;
  job.end({first[1]});
  const auto line = job.line();
  INFO(line);
  CHECK(line.starts_with("error: elastic: "));
  CHECK(line.find(ch::cat("process ", first[static_cast<std::size_t>(odd)])) != std::string::npos);
}

TEST_CASE("a rank that fails by an error of its own ends the job with it") {
  const int odd = GENERATE(0, 2);
  Job job(3, {}, 5s, {odd, Oddity::fails});
  const auto first = job.epoch(3).pids;
  job.end({first[1]});
  CHECK(job.line() ==
        ch::cat("error: rank ", odd, " (process ", first[static_cast<std::size_t>(odd)], ") failed: no such file"));
}

TEST_CASE("a job that is stopped as a whole loses nobody") {
  Job job(3, {.lost_after = 200ms});
  const auto first = job.epoch(3).pids;
  for (const int pid : first) kill(pid, SIGSTOP);
  std::this_thread::sleep_for(500ms);
  for (const int pid : first) kill(pid, SIGCONT);
  std::this_thread::sleep_for(500ms);
  job.join();
  const auto now = job.epoch(4);
  CHECK(now.number == 2);
  CHECK(std::equal(first.begin(), first.end(), now.pids.begin()));
}

TEST_CASE("newcomers are let in, also while ranks are lost, and one that dies at once is forgotten") {
  Job job(2);
  const auto first = job.epoch(2).pids;
  job.join();
  const auto three = job.epoch(3).pids;
  CHECK(three[2] == job.pids[2]);
  job.join();
  std::this_thread::sleep_for(std::chrono::milliseconds(GENERATE(0, 2, 20)));
  job.end({job.pids.back()});
  job.join();
  job.end({first[0]});
  const auto now = job.epoch(3).pids;
  CHECK(now == std::vector{first[1], three[2], job.pids.back()});
}

TEST_CASE("below the minimum the job ends by name; a newcomer finds nobody") {
  Job job(3, {.at_least = 3});
  job.end({job.epoch(3).pids[1]});
  for (int i = 0; i < 2; ++i)
    CHECK(job.line().starts_with("too few: elastic: 2 ranks are left, expected at least 3; the last loss: rank "));
  for (const int pid : std::exchange(job.pids, {})) waitpid(pid, nullptr, 0);
  job.join();
  CHECK(job.line() ==
        "error: elastic: no rank of the job is left at the doors that this process was given: the job has ended");
}

TEST_CASE("ranks and newcomers are killed at random moments, also in rounds, and nothing is left") {
  const auto seed = static_cast<unsigned>(GENERATE(1, 2, 3));
  std::mt19937 draw(seed);
  Job job(4, {.lost_after = 2s});
  auto now = job.epoch(4);
  const int before = now.descriptors;
  for (int round = 0; round < 15; ++round) {
    const auto victims = std::min<std::size_t>(1 + draw() % 3, job.pids.size() - 1);
    for (std::size_t i = 0; i < victims; ++i) {
      job.end({job.pids[draw() % job.pids.size()]});
      std::this_thread::sleep_for(std::chrono::microseconds(draw() % 8'000));
    }
    INFO("seed " << seed << ", round " << round);
    now = job.epoch(static_cast<int>(job.pids.size()));
    while (job.pids.size() < 4) job.join();
    now = job.epoch(4);
  }
  CHECK(now.descriptors <= before + 6);
}

}  // namespace elastic_members_test
