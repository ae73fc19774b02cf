// Options that a program reads, and options that look like a mistake.

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

/// A command line, with all options that `launch` itself reads marked as read.
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
        "unknown option --devcies: did you mean --devices? (A program must read its own options before it builds the "
        "net.)");
  const auto meant = [](const char* word) {
    const std::string text = complaint(Line{word, "1"});
    const auto at = text.find("did you mean --");
    return at == std::string::npos ? text : text.substr(at + 15, text.find('?') - at - 15);
  };
  for (const char* word : {"--devies", "--Devices", "--devicess", "--dvecies"}) CHECK(meant(word) == "devices");
  for (const char* word : {"--devcie", "--devic", "--Device"}) CHECK(meant(word) == "device");
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
  CHECK(asked.option("rl", 1.0) == 1);  // too short to guess
  asked.check_options();
  CHECK(asked.unused_options() == " --lr");

  CHECK(complaint(Line{"--devices", "2", "--device", "cpu"}) == "nothing");
  CHECK(complaint(Line{"--", "--devcies", "2"}) == "nothing");

  const Line epochs{"--epocs", "3"};  // a program's own options too
  auto own = epochs.run();
  CHECK(own.option("epochs", 10) == 10);
  CHECK(own.option("epochs", 10) == 10);
  CHECK(message_of<ch::UsageError>([&] { own.check_options(); }).find("did you mean --epochs?") !=
        std::string::npos);
}

TEST_CASE("--device names devices by number and kind") {
  const auto list = [](const char* text) { return *Line{"--device", text}.options.device_ids; };
  CHECK(list("0,1") == ch::DeviceList{"", {0, 1}});
  CHECK(list("cpu:3,0,63") == ch::DeviceList{"cpu", {3, 0, 63}});
  CHECK(list("cuda:1") == ch::DeviceList{"cuda", {1}});
  CHECK(list("cpu") == ch::DeviceList{"cpu", {}});
  for (const char* text : {"0,1", "2", "cpu:1,0", "cuda", "cuda:5"}) CHECK(list(text).text() == text);

  const Line line{"--device=3,1,2"};
  auto run = line.run();
  CHECK(run.devices() == 3);
  CHECK(run.device_ids() == std::vector{3, 1, 2});
  CHECK(run.own_device() == 3);
  ch::comm::World world{.rank = 4, .size = 5};
  world.local_rank = 1;
  world.local_size = 3;
  ch::Run on_second_machine(line.arguments, line.options, world);
  CHECK(on_second_machine.own_device() == 1);
  CHECK(on_second_machine.devices() == 5);
  world.local_rank = 3;
  CHECK(message_of<ch::UsageError>([&] { ch::Run(line.arguments, line.options, world).own_device(); }) ==
        "--device 3,1,2: expected a device for process 3 of this machine, got 3");
  const Line both{"--device", "4,5", "--devices", "2"}, kind{"--device", "cpu", "--devices", "3"}, none{};
  CHECK(both.run().device_ids() == std::vector{4, 5});
  CHECK(kind.run().devices() == 3);
  CHECK_FALSE(kind.run().own_device());
  CHECK_FALSE(none.run().own_device());
}

TEST_CASE("a list of devices that makes no sense is refused") {
  const auto refused = [](const char* text) {
    return message_of<ch::UsageError>([&] { ch::DeviceList::of("--device", text); });
  };
  const std::string expected = "--device: expected numbers of devices, as 0,1 or cpu:0,1 or cuda:0,1, got '";
  CHECK(refused("") == expected + "'");
  for (const char* text : {"0,,1", ",0", "0,", ",", "cpu:", "cuda:1,"})
    CHECK(refused(text) == expected + text + "': an entry is empty");
  CHECK(refused(":0") == expected + ":0': no kind before the colon");
  CHECK(refused("0,one") == expected + "0,one': 'one' is not a whole number");
  CHECK(refused("0, 1") == expected + "0, 1': ' 1' is not a whole number");
  CHECK(refused("1.5") == expected + "1.5': '1.5' is not a whole number");
  CHECK(refused("cpu:0,cpu:1") == expected + "cpu:0,cpu:1': 'cpu:1' is not a whole number");
  CHECK(refused("0\x1b") == expected + "0\\x1b': '0\\x1b' is not a whole number");
  CHECK(refused("0,99999999999") == expected + "0,99999999999': 99999999999 is not from 0 to 63");
  CHECK(refused("-1") == "--device: expected numbers of devices from 0 to 63, got -1");
  CHECK(refused("0,64") == "--device: expected numbers of devices from 0 to 63, got 64");
  CHECK(refused("cpu:2,0,2") == "--device: expected each device once, got 2 twice in 'cpu:2,0,2'");
  CHECK(refused("mps") == "--device: expected the kind cpu or cuda, as in cpu:0,1, got 'mps'");
  CHECK(refused("tpu:0") == "--device: expected the kind cpu or cuda, as in cpu:0,1, got 'tpu'");

  const auto incomplete = [](ch::LaunchOptions options) {
    return message_of<ch::UsageError>([&] { options.complete(); });
  };
  ch::LaunchOptions options;
  options.devices = 3;
  options.device_ids = ch::DeviceList{"cpu", {0, 1}};
  CHECK(incomplete(options) ==
        "--devices 3, but --device cpu:0,1 names 2: expected the same number, or one of the two");
  options.devices.reset();
  options.device_ids = ch::DeviceList{"", {1, 1}};  // from a program
  CHECK(incomplete(options) == "--device: expected each device once, got 1 twice in '1,1'");
}

TEST_CASE("DataParallel takes the run's devices, unless the program names others") {
  const Line line{"--device", "1,3"};
  auto run = line.run();
  ch::DataParallel<Model> net(Model{}, run);
  CHECK(net.options().device_ids == std::vector{1, 3});
  CHECK(ch::nn::named_parameters<ch::Cpu>(net.module()).front().parameter->where() == ch::Cpu{1});
  CHECK(ch::trace_place(net, 1) == 3);
  CHECK(ch::DataParallel<Model>(Model{}, run, {.device_ids = {1, 3}}).devices() == 2);
  CHECK(message_of<ch::UsageError>([&] { ch::DataParallel<Model>(Model{}, run, {.device_ids = {0, 1}}); }) ==
        "DataParallel: --device names 1,3, but the program's device_ids are 0,1");
  const Line none{};
  auto open = none.run();
  CHECK(ch::DataParallel<Model>(Model{}, open, {.device_ids = {2, 5}}).options().device_ids == std::vector{2, 5});
}

TEST_CASE("under other policies the model moves to the process's own device") {
  const Line line{"--device", "cpu:5"};
  auto run = line.run();
  const auto where = [](auto&& net) {
    return ch::nn::named_parameters<ch::Cpu>(net.module()).front().parameter->where().index;
  };
  CHECK(where(ch::SingleDevice<Model>(Model{}, run)) == 5);
  CHECK(where(ch::DistributedDataParallel<Model>(Model{}, run)) == 5);
  CHECK(where(ch::LocalSgd<Model>(Model{}, run)) == 5);
  CHECK(where(ch::ParameterServer<Model>(Model{}, run)) == 5);
}

TEST_CASE("a value that is none is told with its option or its variable, and steers no terminal") {
  const auto refused = [](std::initializer_list<const char*> words) {
    return message_of<ch::UsageError>([&] {
      const Line line(words);
      const auto run = line.run();
    });
  };
  CHECK(refused({"--backend", "x\x1b"}).starts_with("--backend: backend: expected auto, "));
  CHECK(refused({"--devices", "\x1b[2J"}) == "--devices must be a whole number, got '\\x1b[2J'");
  CHECK(refused({"--timeout", "1\n2"}) == "--timeout must be a number, got '1\\x0a2'");
  CHECK(refused({"--seed", "99999999999999999999"}) ==
        "--seed must be in the range of its type, got '99999999999999999999'");
  setenv("CHORUS_BACKEND", "carrier\npigeon", 1);
  CHECK(refused({}).starts_with("environment variable CHORUS_BACKEND: backend: expected auto, "));
  unsetenv("CHORUS_BACKEND");
  CHECK(refused({"--all-reduce", "tree"}) ==
        "--all-reduce: all-reduce: expected auto, ring, direct, in_place or hierarchical, got 'tree'");
  setenv("CHORUS_ALL_REDUCE", "star", 1);
  CHECK(refused({}).starts_with("environment variable CHORUS_ALL_REDUCE: all-reduce: expected auto"));
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
