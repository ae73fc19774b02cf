// Command lines, a word a line: of programs, and of chorus-run.
#include <chorus/launch/launch.hpp>

#include "../../examples/chorus_run_words.hpp"
#include "fuzz.hpp"

namespace fuzz_arguments {

void try_to(const auto& call) {
  try {
    call();
  } catch (const chorus::UsageError&) {
  }
}

}  // namespace fuzz_arguments

FUZZ_TARGET(arguments) {
  using namespace chorus;
  std::vector<std::string> words;
  std::string text(fuzz::text_of(input));
  for (std::size_t at = 0; at < text.size() && words.size() < 100;) {
    const auto end = std::min({text.find('\n', at), text.find('\0', at), text.size()});
    words.push_back(text.substr(at, end - at));
    at = end + 1;
  }
  std::vector<const char*> argv{"program"};
  for (const auto& word : words) argv.push_back(word.c_str());
  argv.push_back(nullptr);
  Arguments arguments(static_cast<int>(argv.size()) - 1, argv.data());
  for (const char* name : {"epochs", "learning-rate", ""}) try_to([&] { arguments.find(name); });
  try_to([&] { arguments.has("help"); });
  try_to([&] {
    auto options = LaunchOptions::from(arguments);
    options.complete();
    FUZZ_REQUIRE(!options.devices || (*options.devices >= 1 && *options.devices <= LaunchOptions::most_devices));
  });
  FUZZ_REQUIRE(arguments.unused().size() <= text.size() + 1);
  try_to([&] { arguments.refuse_misspelt(); });

  const std::string first = words.empty() ? "" : words[0];
  try_to([&] { FUZZ_REQUIRE(chorus_run::ranks_of(first) <= comm::max_ranks); });
  try_to([&] { chorus_run::seconds_of("--option", first); });
  for (const int nodes : {1, 2})
    try_to([&] {
      RankGroup group;
      group.nodes = nodes;
      chorus_run::take_endpoint(group, first, 29400);
      FUZZ_REQUIRE(!group.master_addr.empty() && group.master_port >= 0 && group.master_port < 65536);
    });
  try_to([&] {
    for (const int rank : chorus_run::ranks_in(words, 3)) FUZZ_REQUIRE(rank >= 0 && rank < 3);
  });
  try_to([&] {
    for (const int streams : chorus_run::streams_in("--tee", words, 3)) FUZZ_REQUIRE(streams >= 0 && streams < 4);
  });
  try_to([&] { chorus_run::signals_in(words); });
  chorus_run::why_not(first);
  MachineOptions machines;
  try_to([&] {
    chorus_run::take_nodes(machines, first);
    FUZZ_REQUIRE(machines.least >= 1 && machines.least <= machines.most && machines.most <= comm::max_ranks);
  });
  try_to([&] { chorus_run::take_conf(machines, words); });
}
