// One file for all policies: a file saved under one policy loads under every other, with the same names; and refused
// files.
#include <catch.hpp>
#include <chorus/io/checkpoint.hpp>
#include <chorus/parallel/data_parallel.hpp>

#include <unit/io/files.hpp>
#include <unit/parallel/ranks.hpp>

namespace checkpoint_test {

using namespace test::names;
using chorus_test::get;
using chorus_test::put;
using chorus_test::TemporaryFolder;

using Model = test::Normed<Cpu>;

const std::vector<std::string> names{"fc1.bias",          "fc1.weight",       "fc2.bias",
                                     "fc2.weight",        "norm.bias",        "norm.num_batches_tracked",
                                     "norm.running_mean", "norm.running_var", "norm.weight"};

std::vector<std::string> names_in(const std::string& path) {
  const io::SafetensorsReader file(path);
  std::vector<std::string> out;
  for (const auto& entry : file.entries()) out.push_back(entry.name);
  std::sort(out.begin(), out.end());
  return out;
}

/// All numbers of a model.
template <class Net>
std::string fingerprint(Net& net) {
  return io::parameters_sha256(net.module()) + test::text_of(net.module().norm.running_mean.value().to_vector()) +
         test::text_of(net.module().norm.running_var.value().to_vector());
}

/// Trains a little, so that every number changes.
template <class Net>
void advance(Net& net, const World& world = {}) {
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1}};
  for (std::uint32_t number = 0; number < 2; ++number) test::step(net, optimizer, number, 8, world);
}

/// Under each policy: calls `body(net, world)`, under ddp on two ranks, and returns its text.
template <class M, class Body>
std::string under(const std::string& policy, const Body& body) {
  if (policy == "single") {
    SingleDevice<M> net{make<M>(), 3};
    return body(net, World{});
  }
  if (policy == "dp") {
    DataParallel<M> net{make<M>(), {.device_ids = {0, 1}}, 3};
    return body(net, World{});
  }
  return common_text(2, [&](const World& world) {
    Distributed<M> rank(world);
    return body(rank.net, world);
  });
}

/// A net with other layers than `Normed`.
template <class D>
struct Other : nn::Module {
  nn::Linear<D, double> fc1{5, 12}, fc2{12, 4}, fc3{4, 3};
  CHORUS_MODULE(Other, fc1, fc2, fc3)
};

TEST_CASE("checkpoint: a model saved under one policy loads under every other") {
  const TemporaryFolder folder;
  for (const std::string from : {"single", "dp", "ddp"}) {
    const auto path = folder / (from + ".safetensors");
    const auto saved = under<Model>(from, [&](auto& net, const World& world) {
      advance(net, world);
      if (world.rank == 0) io::save(net.module(), path);
      return io::parameters_sha256(net.module());
    });
    REQUIRE_FALSE(saved.empty());
    CHECK(names_in(path) == names);
    SingleDevice<Model> plain{make<Model>(7)};
    io::load(plain.module(), path);
    const auto expected = fingerprint(plain);
    CHECK_THAT(expected, Contains(saved));
    for (const std::string to : {"single", "dp", "ddp"}) {
      INFO("from " << from << " to " << to);
      const auto loaded = under<Model>(to, [&](auto& net, const World&) {
        io::load(net.module(), path);
        return fingerprint(net);
      });
      CHECK(loaded == expected);
    }
  }
}

TEST_CASE("checkpoint: under dp what was loaded reaches all devices") {
  const TemporaryFolder folder;
  SingleDevice<Model> single{make<Model>(7)};
  io::save(single.module(), folder / "model");
  DataParallel<Model> net{make<Model>(1), {.device_ids = {0, 1, 2}}};
  net(numbers(6, 5, 1));  // the copies hold the old parameters
  io::load(net.module(), folder / "model");
  net.eval();
  single.eval();
  CHECK(distance(net(numbers(6, 5, 1)).value().to_vector(), single(numbers(6, 5, 1)).value().to_vector()) < rounding);
}

TEST_CASE("checkpoint: the file of a run is a model's file, too") {
  const TemporaryFolder folder;
  SingleDevice<Model> net{make<Model>(1), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  test::step(net, optimizer, 1, 8);
  io::save_checkpoint(net, optimizer, {.epoch = 2, .batch = 3, .step = 40}, folder / "run");
  auto expected = names;
  expected.push_back("training/lr");
  for (const auto& name : {"fc1.bias", "fc1.weight", "fc2.bias", "fc2.weight", "norm.bias", "norm.weight"}) {
    expected.push_back(std::string("training/momentum.") + name);
    expected.push_back(std::string("training/steps.") + name);
  }
  std::sort(expected.begin(), expected.end());
  CHECK(names_in(folder / "run") == expected);
  SingleDevice<Model> other{make<Model>(2)};
  io::load(other.module(), folder / "run");
  CHECK(fingerprint(other) == fingerprint(net));
}

TEST_CASE("checkpoint: names of PyTorch's wrappers, with module. before each, are those of what they wrap") {
  const TemporaryFolder folder;
  SingleDevice<Model> net{make<Model>(1)}, same{make<Model>(2)}, other{make<Model>(2)};
  io::save(net.module(), folder / "plain");
  const io::SafetensorsReader file(folder / "plain");
  const auto save_wrapped = [&](std::string_view but = "") {
    std::vector<std::vector<std::byte>> numbers;
    std::vector<io::TensorView> tensors;
    for (const auto& entry : file.entries()) {
      numbers.emplace_back(entry.bytes);
      file.read(entry, numbers.back());
      tensors.push_back({(entry.name == but ? "" : "module.") + entry.name, entry.dtype, entry.shape, numbers.back()});
    }
    io::write_safetensors(folder / "wrapped", tensors);
  };
  save_wrapped();
  io::load(same.module(), folder / "wrapped");
  CHECK(fingerprint(same) == fingerprint(net));

  SingleDevice<Other<Cpu>> stranger{make<Other<Cpu>>()};
  CHECK_THAT(message_of<FileError>([&] { io::load(stranger.module(), folder / "wrapped"); }),
             Contains("missing: fc3.") && Contains("unexpected: module.norm."));

  // If one name lacks the prefix, the prefix is part of the others.
  save_wrapped("fc1.bias");
  const auto before = fingerprint(other);
  CHECK_THAT(message_of<FileError>([&] { io::load(other.module(), folder / "wrapped"); }),
             Contains("missing: fc1.weight") && Contains("unexpected: module.") && Contains("module.fc1.weight"));
  CHECK(fingerprint(other) == before);
}

/// The file at `from`, as PyTorch would save it from a compiled float model in DDP.
void save_as_floats(const std::string& from, const std::string& to) {
  const io::SafetensorsReader file(from);
  std::vector<std::vector<std::byte>> numbers;
  std::vector<io::TensorView> tensors;
  for (const auto& entry : file.entries()) {
    std::vector<std::byte> bytes(entry.bytes);
    file.read(entry, bytes);
    const bool floating = entry.dtype == io::FileDType::f64;
    if (floating) bytes = io::detail::converted(bytes, DType::f64, DType::f32, entry.name);
    numbers.push_back(std::move(bytes));
    const auto type = floating ? io::FileDType::f32 : entry.dtype;
    tensors.push_back({"module._orig_mod." + entry.name, type, entry.shape, numbers.back()});
  }
  io::write_safetensors(to, tensors);
}

TEST_CASE("checkpoint: a file with other names and types loads under every policy, and copies on devices follow") {
  const TemporaryFolder folder;
  SingleDevice<Model> net{make<Model>(4)}, same{make<Model>(7)};
  advance(net);
  io::save(net.module(), folder / "model");
  save_as_floats(folder / "model", folder / "floats");
  io::load(same.module(), folder / "floats");
  const auto expected = fingerprint(same);
  CHECK(distance(test::values(same.module()), test::values(net.module())) < 1e-6);
  same.eval();
  const auto output = [](auto& any) { return any(numbers(6, 5, 1)).value().to_vector(); };
  const auto of_same = output(same);
  for (const std::string policy : {"single", "dp", "ddp"}) {
    const auto text = under<Model>(policy, [&](auto& any, const World&) {
      any.eval();
      output(any);  // the copies hold the old parameters now
      const bool complete = io::load(any.module(), folder / "floats").complete();
      const auto got = fingerprint(any);
      return distance(output(any), of_same) < rounding && complete ? got : "other outputs";
    });
    CHECK(text == expected);
  }
}

TEST_CASE("checkpoint: a file of another model is refused in one message, and nothing changes") {
  const TemporaryFolder folder;
  SingleDevice<Other<Cpu>> other{make<Other<Cpu>>()};
  io::save(other.module(), folder / "other");
  for (const std::string policy : {"single", "dp", "ddp"}) {
    const auto text = under<Model>(policy, [&](auto& net, const World&) {
      const auto before = fingerprint(net);
      const auto message = message_of<FileError>([&] { io::load(net.module(), folder / "other"); });
      return message + (fingerprint(net) == before ? "" : "; and it changed the model");
    });
    CHECK(text ==
          "loading " + (folder / "other") +
              ": the file doesn't fit the model; missing: norm.weight, norm.bias, norm.running_mean, "
              "norm.running_var, norm.num_batches_tracked; unexpected: fc3.bias, fc3.weight; mismatched: fc2.weight "
              "(expected F64 [3, 12], got F64 [4, 12]), fc2.bias (expected F64 [3], got F64 [4]); a function as "
              "{.rename = ...} turns names of the file into the model's; with {.strict = "
              "false} io::load fills what fits and returns the rest in a report");
  }
}

TEST_CASE("checkpoint: resuming needs a checkpoint, of this optimizer, with sane numbers") {
  const TemporaryFolder folder;
  SingleDevice<Model> net{make<Model>(1), 3};
  optim::Sgd optimizer{net.parameters(), {.lr = 0.1, .momentum = 0.9}};
  io::save(net.module(), folder / "model");
  const auto refusal = [&](const std::string& path) {
    const auto before = fingerprint(net);
    const auto message = message_of<FileError>([&] { io::load_checkpoint(net, optimizer, path); });
    CHECK(fingerprint(net) == before);
    return message;
  };
  CHECK_THAT(refusal(folder / "model"), Contains("not a checkpoint of a training run"));
  CHECK_THAT(refusal(folder / "nothing"), Contains(folder / "nothing"));

  optim::Adam adam{net.parameters(), {.lr = 0.1}};
  io::save_checkpoint(net, adam, {}, folder / "adam");
  CHECK_THAT(refusal(folder / "adam"),
             Contains("missing: training/momentum.") && Contains("unexpected: training/exp_avg."));

  const auto with_step = [&](const std::string& value) {
    io::write_safetensors(folder / "odd", {},
                          {{"training/epoch", "0"}, {"training/batch", "0"}, {"training/step", value}});
    return refusal(folder / "odd");
  };
  for (const std::string value : {"-1", "", "1e3", "12 ", "99999999999999999999"})
    CHECK_THAT(with_step(value), Contains("training/step is \"" + value + '"'));

  io::save_checkpoint(net, optimizer, {}, folder / "good");
  const auto content = get(folder / "good");
  put(folder / "cut", content.substr(0, content.size() - 1));
  CHECK_THAT(refusal(folder / "cut"), Contains(folder / "cut"));
}

}  // namespace checkpoint_test
