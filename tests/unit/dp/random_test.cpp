// DataParallel on random programs, compared with an equivalent on one device; and the errors if a copy of the model
// errs. Other seeds: CHORUS_RANDOM_SEEDS=17 (one, whose program is printed), or =1000-2000 (all of them, and how often
// each feature was drawn).
#include <catch.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/check_programs.hpp>
#include "random_runs.hpp"

namespace test::random::dp {

template <class Net>
std::vector<double> alone(const Program& program, int way) {
  Runner<Net> runner(program, "");
  nudge(runner.net(), way);
  return runner.run();
}
/// What is wrong with a program's run, or "".
std::string judge(const Program& program) {
  const chorus_test::TemporaryFolder folder;
  const auto expected_from = [&](int way) {
    return program.by_shares ? alone<ByShares>(program, way) : alone<SingleDevice<Model>>(program, way);
  };
  const auto expected = expected_from(0);
  const auto on_devices = [&](const std::string& file) { return Runner<DataParallel<Model>>(program, file).run(); };
  const auto got = on_devices(folder / "checkpoint");
  const auto wrong = difference(got, expected, program.width, expected_from);
  if (!wrong.empty()) return wrong;
  if (program.saved_before >= 0 && program.resumed_ids.empty() && on_devices("") != got)
    return "a checkpoint changes the numbers";
  return "";
}

TEST_CASE("dp random: programs that seeds draw train as one device does") {
  check_programs(500, draw, judge);
}

}  // namespace test::random::dp
