// Random training programs are interrupted and resumed from a checkpoint in new processes: the final state has the same
// bits as without the interruption. Other seeds: CHORUS_RANDOM_SEEDS=17 (one, whose program is printed), or =1000-2000
// (all of them, and how often each feature was drawn).
#include <catch.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/check_programs.hpp>
#include "resume_random_runs.hpp"

namespace resume_random_test {

using namespace test::names;
using namespace test::random::resume;
using test::random::check_programs, test::random::has_ended;

std::vector<std::string> on_ranks(const Program& program, const Job& job) {
  return Ranks(program.processes(),
               [&](const World& world) {
                 alarm(30);  // a rank that hangs is killed
                 return run(program, world, job);
               })
      .texts();
}

/// The tensors in which two files differ; "" if they are equal.
std::string difference(const std::string& a, const std::string& b) {
  if (chorus_test::get(a) == chorus_test::get(b)) return "";
  const io::SafetensorsReader first(a), second(b);
  std::string out = first.metadata() == second.metadata() ? "the checkpoints differ:" : "the metadata differ:";
  for (const auto& entry : first.entries()) {
    const auto* other = second.find(entry.name);
    std::vector<std::byte> x(entry.bytes), y(other == nullptr ? 0 : other->bytes);
    first.read(entry, x);
    if (other != nullptr) second.read(*other, y);
    if (x != y) out += cat(" ", entry.name);
  }
  for (const auto& entry : second.entries())
    if (first.find(entry.name) == nullptr) out += cat(" +", entry.name);
  return out;
}

/// What is wrong with a program's resumed run, or "".
std::string judge(const Program& program) {
  const chorus_test::TemporaryFolder folder;
  const auto whole = folder / "whole", middle = folder / "middle", saved = folder / "saved", end = folder / "end";
  const auto expected = on_ranks(program, {.from = "", .middle = "", .to = whole});
  for (const auto& text : expected)
    if (!has_ended(text)) return "no program: " + text;
  if (on_ranks(program, {.from = "", .middle = middle, .to = saved}) != expected) return "saving changes the run";
  if (const auto wrong = difference(whole, saved); !wrong.empty()) return "saving changes the run: " + wrong;
  const auto resumed = on_ranks(program, {.from = middle, .middle = "", .to = end});
  for (std::size_t rank = 0; rank < expected.size(); ++rank)
    if (!has_ended(resumed[rank]) || !expected[rank].ends_with(resumed[rank]))
      return cat("rank ", rank, " resumed: ", resumed[rank], ", expected ", expected[rank], "; ",
                 std::filesystem::exists(end) ? difference(whole, end) : "");
  return difference(whole, end);
}

TEST_CASE("resume random: what goes on from a checkpoint ends with the same bits") { check_programs(100, draw, judge); }

}  // namespace resume_random_test
