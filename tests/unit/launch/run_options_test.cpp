// Options that a program asks for, and those that look like a mistake.

#include <catch.hpp>
#include <chorus/launch/run.hpp>
#include <chorus/parallel/data_parallel.hpp>
#include <chorus/parallel/distributed_data_parallel.hpp>
#include <chorus/parallel/local_sgd.hpp>
#include <chorus/parallel/parameter_server.hpp>
#include <chorus/parallel/single_device.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include <unit/parallel/policies.hpp>

namespace run_options_test {

namespace ch = chorus;

struct Model : ch::nn::Module {
  ch::nn::Linear<ch::Cpu> only{2, 1};
  CHORUS_MODULE(Model, only)

  auto forward(const auto& x) const { return only(x); }
};

/// A command line; what `launch` asks for has been asked for.
struct Line {
  std::vector<const char*> words{"program"};
  ch::Arguments arguments;
  ch::LaunchOptions options;

  explicit Line(std::initializer_list<const char*> rest) {
    words.insert(words.end(), rest);
    arguments = ch::Arguments(static_cast<int>(words.size()), words.data());
    arguments.has("help");
    options = ch::LaunchOptions::from(arguments);
  }
  ch::Run run() const& { return {arguments, options}; }
  ch::Run run() const&& = delete;  // it reads the words
};

std::string complaint(const Line& line) {
  const auto run = line.run();
  return message_of<ch::UsageError>([&] { run.check_options(); });
}

TEST_CASE("what looks like a misspelling is refused, with what was meant") {
  CHECK(complaint(Line{"--devcies", "2"}) ==
        "unknown option --devcies: is --devices meant? (An option of the program's own has to be asked for before the "
        "net is built.)");
  const auto meant = [](const char* word) {
    const std::string text = complaint(Line{word, "1"});
    const auto at = text.find("is --");
    return at == std::string::npos ? text : text.substr(at + 5, text.find(" meant") - at - 5);
  };
  for (const char* word : {"--device", "--devies", "--Devices", "--devicess", "--dvecies", "--device=3"})
    CHECK(meant(word) == "devices");
  for (const char* word : {"--sed", "--sede", "--seeed", "--seat"})
    CHECK(meant(word) == (word[4] == 'a' ? "nothing" : "seed"));
  CHECK(meant("--tiemout") == "timeout");
  CHECK(meant("--bakcend=tcp") == "backend");
  CHECK(meant("--hlep") == "help");
  for (const char* word : {"--step", "--keep", "--dev", "--devices-per-node", "--", "--d", "-devcies", "devcies"})
    CHECK(meant(word) == "nothing");
}

TEST_CASE("an option is no misspelling where the program has asked for it, or what it looks like is given") {
  const Line line{"--device", "cpu", "--lr", "0.1", "--speed=3"};
  auto asked = line.run();
  CHECK(asked.option("device", "") == "cpu");
  CHECK(asked.option("speed", 1) == 3);
  CHECK(asked.option("rl", 1.0) == 1);  // too short to tell
  asked.check_options();
  CHECK(asked.unused_options() == " --lr");

  CHECK(complaint(Line{"--devices", "2", "--device", "cpu"}) == "nothing");
  CHECK(complaint(Line{"--", "--devcies", "2"}) == "nothing");

  const Line epochs{"--epocs", "3"};  // the program's own options as well
  auto own = epochs.run();
  CHECK(own.option("epochs", 10) == 10);
  CHECK(own.option("epochs", 10) == 10);
  CHECK(message_of<ch::UsageError>([&] { own.check_options(); }).find("is --epochs meant") != std::string::npos);
}

TEST_CASE("a value that is none is told with its option or its variable, and steers no terminal") {
  const auto refused = [](std::initializer_list<const char*> words) {
    return message_of<ch::UsageError>([&] {
      const Line line(words);
      const auto run = line.run();
    });
  };
  CHECK(refused({"--backend", "x\x1b"}).starts_with("--backend: backend 'x\\x1b' is unknown, expected auto, "));
  CHECK(refused({"--devices", "\x1b[2J"}) == "--devices must be a whole number, got '\\x1b[2J'");
  CHECK(refused({"--timeout", "1\n2"}) == "--timeout must be a number, got '1\\x0a2'");
  CHECK(refused({"--seed", "99999999999999999999"}) == "--seed is out of range, got '99999999999999999999'");
  setenv("CHORUS_BACKEND", "carrier\npigeon", 1);
  CHECK(refused({}).starts_with("environment variable CHORUS_BACKEND: backend 'carrier\\x0apigeon' is unknown"));
  unsetenv("CHORUS_BACKEND");
  CHECK(refused({"--all-reduce", "tree"}) ==
        "--all-reduce: all-reduce 'tree' is unknown, expected auto, ring, direct, in_place or hierarchical");
  setenv("CHORUS_ALL_REDUCE", "star", 1);
  CHECK(refused({}).starts_with("environment variable CHORUS_ALL_REDUCE: all-reduce 'star' is unknown"));
  unsetenv("CHORUS_ALL_REDUCE");
  setenv("CHORUS_TIMEOUT", "1e9\x1b", 1);
  CHECK(refused({}) == "environment variable CHORUS_TIMEOUT must be a number, got '1e9\\x1b'");
  unsetenv("CHORUS_TIMEOUT");
}

template <class Net>
void refuses_misspelt() {
  const Line good{"--devices", "1"}, bad{"--devcies", "1"};
  auto right = good.run(), wrong = bad.run();
  CHECK(Net(Model{}, right).devices() == 1);
  INFO(Net::name);
  CHECK(message_of<ch::UsageError>([&] { Net(Model{}, wrong); }).starts_with("unknown option --devcies"));
}

TEST_CASE("every policy asks for a check of the options when it is built") {
  refuses_misspelt<ch::SingleDevice<Model>>();
  refuses_misspelt<ch::DataParallel<Model>>();
  refuses_misspelt<ch::DistributedDataParallel<Model>>();
  refuses_misspelt<ch::LocalSgd<Model>>();
  refuses_misspelt<ch::ParameterServer<Model>>();
}

}  // namespace run_options_test
