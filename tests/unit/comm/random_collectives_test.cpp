// Communicators on randomly drawn calls with known results, and on programs in which one rank makes an error.
// CHORUS_RANDOM_SEEDS=17 runs another seed and shows its program; =1000-2000 runs all of them and shows how often each
// feature was drawn.
#include <dirent.h>
#include <unistd.h>

#include <catch.hpp>
#include <cstdlib>

#include "processes.hpp"
#include "random_rank.hpp"

#if CHORUS_USE_GLOO
#include <chorus/comm/gloo.hpp>
#endif

namespace random_collectives_test {

using namespace chorus;
using namespace test::calls;
using test::for_seeds, test::show_features;
using namespace std::chrono_literals;

std::vector<Carrier> carriers() {
  std::vector<Carrier> all{Carrier::shm, Carrier::shm, Carrier::shm, Carrier::tcp, Carrier::threads, Carrier::machines};
#if CHORUS_USE_GLOO
  all.push_back(Carrier::gloo);
#endif
  return all;
}

/// The final text of a rank: "ended with ...", "wrong: ...", or an error.
std::string one_rank(const Program& program, const comm::World& world) {
  try {
    return Rank(program, world).run();
  } catch (const Rank::Wrong& error) {
    return error.what();
  } catch (const Rank::OwnError& error) {
    return cat("own error: ", error.what());
  } catch (const CommError& error) {
    return cat("error: ", error.what());
  } catch (const std::exception& error) {
    return cat("wrong: strange error: ", error.what());
  }
}

std::vector<std::string> on_ranks(const Program& program, std::chrono::milliseconds timeout) {
  const auto seconds = static_cast<unsigned>(timeout / 1s) * 3 + 3;
  if (program.carrier != Carrier::threads)
    return test::Ranks(
               program.ranks,
               [&](const comm::World& world) {
                 alarm(seconds);  // kills a rank that hangs
                 test::NcclCarrier::register_it();
                 setenv("CHORUS_HOST_ID", program.machines.substr(static_cast<std::size_t>(world.rank), 1).c_str(), 1);
                 return one_rank(program, world);
               },
               timeout)
        .texts();
  const auto joined = test::Ranks(
                          1,
                          [&](const comm::World& world) {
                            alarm(seconds);
                            std::vector<std::string> texts(static_cast<std::size_t>(program.ranks));
                            std::vector<std::thread> threads;
                            for (int rank = 0; rank < program.ranks; ++rank)
                              threads.emplace_back([&, rank] {
                                auto own = world;
                                own.rank = own.local_rank = rank;
                                own.size = own.local_size = program.ranks;
                                own.listen_fd = -1;
                                texts[static_cast<std::size_t>(rank)] = one_rank(program, own);
                              });
                            for (auto& thread : threads) thread.join();
                            std::string all;
                            for (const auto& text : texts) all += text + '\x1f';
                            return all;
                          },
                          timeout)
                          .texts()[0];
  std::vector<std::string> texts;
  for (std::size_t begin = 0, end; (end = joined.find('\x1f', begin)) != std::string::npos; begin = end + 1)
    texts.push_back(joined.substr(begin, end - begin));
  if (texts.empty()) texts.push_back(joined);
  return texts;
}

bool has_ended(const std::string& text) { return text.starts_with("ended with "); }

std::string lines(const std::vector<std::string>& texts) {
  std::string all;
  for (const auto& text : texts) all += "\n  " + text.substr(0, 400);
  return all;
}

/// Counts only this test's files: other tests run at the same time.
std::size_t shared_files() {
  std::size_t count = 0;
  DIR* const folder = opendir("/dev/shm");
  while (const dirent* entry = readdir(folder)) count += std::string_view(entry->d_name).find("chorus") == 0;
  closedir(folder);
  return count;
}

void check_results(std::uint64_t last, const std::vector<Carrier>& over) {
  const auto before = shared_files();
  std::map<std::string, int> drawn;
  const auto check = [&](std::uint64_t seed) {
    const auto program = draw(seed, over);
    const auto texts = on_ranks(program, 10s);
    INFO(program.text() << lines(texts));
    for (const auto& text : texts) CHECK((has_ended(text) && text == texts[0]));
    for (const auto& [feature, times] : program.features) drawn[feature] += times;
  };
  for_seeds(last, check, [&](std::uint64_t seed) { return draw(seed, over).text(); });
  CHECK(shared_files() == before);
  show_features(drawn);
}

TEST_CASE("comm random: calls that seeds draw give what they have to, and touch nothing else", "[comm]") {
  check_results(30, carriers());
}
TEST_CASE("comm random: calls over NCCL's stand-in give what they have to", "[comm]") {
  check_results(20, {Carrier::nccl});
}

/// The size of the group in which `rank` makes a call.
int group_size(const Program& p, const Call& call, int rank) {
  if (!call.in_group) return p.ranks;
  return static_cast<int>(std::count(p.colors.begin(), p.colors.end(), p.colors[static_cast<std::size_t>(rank)]));
}

/// Lets one rank make an error of this kind. Returns false if the program has no call where that is possible.
bool spoil(Program& p, Fault fault) {
  Draw d(p.seed + 7'000'000);
  p.fault = static_cast<Fault>(1 + d.below(10));
  if (fault != Fault::none) p.fault = fault;
  if (p.carrier == Carrier::threads && p.fault == Fault::is_killed) p.fault = Fault::aborts_meanwhile;
  for (int attempt = 0; attempt < 20; ++attempt) {
    p.faulty_rank = static_cast<int>(d.below(static_cast<std::uint32_t>(p.ranks)));
    p.faulty_batch = d.below(static_cast<std::uint32_t>(p.batches.size()));
    const auto& calls = p.batches[p.faulty_batch].calls;
    p.faulty_call = d.below(static_cast<std::uint32_t>(calls.size()));
    const auto& call = calls[p.faulty_call];
    const bool bare = call.op == Op::barrier || call.op == Op::monitored_barrier;
    // Messages are checked elsewhere: here all ranks of a group take part.
    if (call.op == Op::message || group_size(p, call, p.faulty_rank) < 2) continue;
    if (bare && (p.fault == Fault::other_count || p.fault == Fault::other_type || p.fault == Fault::other_root))
      continue;
    if (call.op == Op::all_gather && p.fault == Fault::other_root) continue;
    if (p.carrier == Carrier::nccl) {  // ignores empty calls, moves untyped bytes, and has no bool
      const bool moves = call.op == Op::all_gather || call.op == Op::broadcast;
      if (call.count == 0 && !bare) continue;
      if (p.fault == Fault::other_type && (moves || call.dtype < DType::i32)) continue;
      if (p.fault == Fault::other_root && call.dtype == DType::boolean) continue;
    }
    if (p.fault == Fault::swaps) {
      if (p.faulty_call + 1 == calls.size()) continue;
      const auto& next = calls[p.faulty_call + 1];
      if (next.op == Op::message || next.op == call.op || next.in_group != call.in_group) continue;
      const bool one_way =
          habits(p, call, 0).lent == habits(p, next, 0).lent && next.count > 0 && !bare && next.op != Op::barrier;
      if (p.carrier == Carrier::nccl && !one_way) continue;
    }
    return true;
  }
  return false;
}

/// `fault`: the kind, or `none` to draw it.
void check_faults(std::uint64_t last, const std::vector<Carrier>& over, std::chrono::milliseconds timeout,
                  Fault fault = Fault::none) {
  const auto before = shared_files();
  int faults = 0;
  const auto check = [&](std::uint64_t seed) {
    auto program = draw(seed, over);
    if (!spoil(program, fault)) return;
    const auto start = comm::Clock::now();
    const auto texts = on_ranks(program, timeout);
    const auto took = comm::Clock::now() - start;
    INFO(program.text() << lines(texts) << "\n" << std::chrono::duration<double>(took).count() << " s");
    for (std::size_t rank = 0; rank < texts.size(); ++rank) {
      const auto& text = texts[rank];
      const bool faulty = static_cast<int>(rank) == program.faulty_rank;
      if (faulty && program.fault == Fault::is_killed) {
        CHECK(text == cat("(ended with status ", SIGKILL, ")"));
      } else if (faulty && program.fault == Fault::throws) {
        CHECK(text == "own error: an error of its own");
      } else if (faulty && text.find(": nccl does not ") != std::string::npos) {
        CHECK(program.carrier == Carrier::nccl);
      } else {
        CHECK(text.starts_with("error: rank "));
        // The error comes in a call, from its own abort, or from another rank's end between calls.
        CHECK((text.find(" #") != std::string::npos || text.ends_with(": aborted: it has enough") ||
               text.find(": nccl: gives up: rank ") != std::string::npos));
        CHECK(text.find("ended with status") == std::string::npos);
      }
    }
    // The calls before the fault also take time, most of all under a sanitizer; a rank that stops takes two seconds.
    const auto limit = 3 * timeout + (fault == Fault::stops ? 3s : 0s);
    CHECK(took < limit);
    ++faults;
  };
  for_seeds(last, check, [&](std::uint64_t seed) { return draw(seed, over).text(); });
  CHECK(shared_files() == before);
  if (!std::getenv("CHORUS_RANDOM_SEEDS")) CHECK(faults > static_cast<int>(last / 2));
}

TEST_CASE("comm random: where one rank errs, all say so in time, and no result is wrong", "[comm]") {
  check_faults(30, carriers(), 4s);
}
TEST_CASE("comm random: where one rank errs, all say so over NCCL's stand-in", "[comm]") {
  check_faults(20, {Carrier::nccl}, 4s);
}
TEST_CASE("comm random: where one rank stands still, all say so, over one machine and several", "[comm]") {
  check_faults(3, {Carrier::machines, Carrier::shm, Carrier::tcp}, 1s, Fault::stops);
}

}  // namespace random_collectives_test
