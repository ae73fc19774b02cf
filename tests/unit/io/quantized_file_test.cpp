// Quantized models: their results don't depend on the batch, their files, and refusals.
#include <catch.hpp>
#include <chorus/quantization/quantized_file.hpp>
#include <filesystem>
#include <int8_program.hpp>
#include <string>
#include <vector>

#include "files.hpp"

namespace quantized_file_test {

using namespace chorus;
using Catch::Matchers::Contains;
using chorus_test::message_of;
using test::Kind;
using test::Program;
using test::Step;

const test::Levels input{0.01f, 120, {}};

Program program() { return {input, test::steps_of_each_kind()}; }

/// The integers of all intermediate values, sample by sample.
std::vector<std::vector<std::uint8_t>> integers(const Program& model, const Tensor<float, 4>& x) {
  std::vector<std::vector<std::uint8_t>> out;
  model.watch(x, [&](const nn::int8::Seen& seen) {
    auto& numbers = out.emplace_back(static_cast<std::size_t>(seen.images.pixels() * seen.images.channels));
    kernels::int8::for_channels_first(seen.images, numbers.data(), [](std::uint8_t q) { return q; });
  });
  return out;
}

TEST_CASE("a quantized model gives each sample the same integers in any batch") {
  const auto model = program();
  const auto x = test::some_images(5);
  const auto together = integers(model, x);
  REQUIRE(together.size() == 10);
  for (Index sample = 0; sample < 5; ++sample) {
    const auto alone = integers(model, x.slice(0, sample, sample + 1));
    for (std::size_t value = 0; value < together.size(); ++value) {
      const auto count = alone[value].size();
      const auto begin = together[value].begin() + static_cast<std::ptrdiff_t>(count) * sample;
      CHECK(std::vector<std::uint8_t>(begin, begin + static_cast<std::ptrdiff_t>(count)) == alone[value]);
    }
  }
  for (const auto& value : together)  // values that are all 0 or 255 would hide errors
    CHECK(std::count_if(value.begin(), value.end(), [](std::uint8_t q) { return q > 0 && q < 255; }) >
          static_cast<std::ptrdiff_t>(value.size() / 10));
  CHECK(model(test::some_images(0)).shape() == Shape<2>{0, 10});
  CHECK(model(x).to_vector() == model(x).to_vector());
}

TEST_CASE("a quantized model comes back from its file with the same integers") {
  const chorus_test::TemporaryFolder folder;
  const auto model = program();
  io::save(model, folder / "model.safetensors", {{"note", "kept"}});
  const auto again = io::load_quantized(folder / "model.safetensors");
  const auto x = test::some_images(3);
  CHECK(integers(again, x) == integers(model, x));
  CHECK(again(x).to_vector() == model(x).to_vector());

  const io::SafetensorsReader file(folder / "model.safetensors");
  CHECK(file.metadata().at("note") == "kept");
  CHECK(file.at("conv1.weight").dtype == io::FileDType::i8);
  CHECK(file.at("conv1.weight").shape == std::vector<Index>{8, 3, 3, 3});
  CHECK(file.at("fc1.weight").shape == std::vector<Index>{6, 80});
  CHECK(file.at("fc1.weight_scale").dtype == io::FileDType::f32);
  CHECK(file.find("block.depthwise.bias") == nullptr);
}

TEST_CASE("files that hold no quantized model are refused") {
  const chorus_test::TemporaryFolder folder;
  const auto path = folder / "model.safetensors";
  const auto load = [&] { return message_of<FileError>([&] { io::load_quantized(path); }); };
  CHECK_THAT(load(), Contains("model.safetensors"));

  io::write_safetensors(path, {});
  CHECK_THAT(load(), Contains("expected a quantized model, but the metadata lack 'chorus.int8'"));
  const auto with = [&](const std::string& json) {
    io::write_safetensors(path, {}, {{"chorus.int8", json}});
    return load();
  };
  CHECK_THAT(with("nonsense"), Contains("is not a list of steps"));
  CHECK_THAT(with(R"({"version":2,"steps":[]})"), Contains("version 2, expected 1"));
  CHECK_THAT(with(R"({"version":1,"steps":[]})"), Contains("without steps"));
  CHECK_THAT(with(R"({"version":1,"steps":[7]})"), Contains("a step that is not an object"));
  CHECK_THAT(with(R"({"version":1,"steps":[{"kind":"softmax"}]})"), Contains("unknown step \"softmax\""));
  CHECK_THAT(with(R"({"version":1,"steps":[{"kind":"relu","name":"a"}]})"),
             Contains("lack a list of numbers 'inputs'"));
  CHECK_THAT(with(R"({"version":1,"steps":[{"kind":"relu","name":"a","inputs":[0.5]}]})"),
             Contains("has a non-integer value"));
  CHECK_THAT(with(R"({"version":1,"steps":[{"kind":"relu","name":"a","inputs":[0]}]})"),
             Contains("no tensor \"a.scale\""));
}

TEST_CASE("a file of which a tensor was changed is refused") {
  const chorus_test::TemporaryFolder folder;
  const auto path = folder / "model.safetensors";
  io::save(program(), path);
  const auto whole = chorus_test::get(path);
  const auto with = [&](const std::string& from, const std::string& to) {
    auto text = whole;
    const auto at = text.find(from);
    REQUIRE(at != std::string::npos);
    REQUIRE(from.size() == to.size());
    text.replace(at, from.size(), to);
    chorus_test::put(path, text);
    return message_of<FileError>([&] { io::load_quantized(path); });
  };
  // Swaps the dtypes I8 and U8, which have the same size.
  CHECK_THAT(with(R"("conv1.weight":{"dtype":"I8")", R"("conv1.weight":{"dtype":"U8")"),
             Contains("tensor \"conv1.weight\": expected I8, got U8"));
  CHECK_THAT(with(R"("shape":[8,3,3,3])", R"("shape":[3,8,3,3])"), Contains("'conv1' has 8 scales and 8 biases for 3"));
  CHECK_THAT(with(R"(\"inputs\":[3,2])", R"(\"inputs\":[9,2])"),
             Contains("input 9 of 'block.add', step 3, is not an earlier step"));
  CHECK_THAT(with(R"(\"integers\":[0,200])", R"(\"integers\":[9,256])"), Contains("expected 8-bit integers"));
  CHECK_THAT(with(R"(\"groups\":8)", R"(\"groups\":5)"), Contains("a weight of shape [8, 1, 3, 3] for 5 groups"));
  CHECK_THAT(with(R"(\"stride\":[1,2])", R"(\"stride\":[0,2])"),
             Contains("expected window, stride, dilation and groups >= 1"));
}

TEST_CASE("steps that can't be computed are refused by name") {
  const auto with = [&](auto change) {
    auto steps = test::steps_of_each_kind();
    change(steps);
    return message_of<UsageError>([&] { Program(input, steps); });
  };
  CHECK_THAT(message_of<UsageError>([] { Program(input, {}); }), Contains("expected at least one step"));
  CHECK_THAT(message_of<UsageError>([] { Program({0, 1, {}}, test::steps_of_each_kind()); }),
             Contains("'input' has a scale of 0"));
  CHECK_THAT(with([](auto& steps) { steps[3].inputs = {3}; }), Contains("add 'block.add' expected 2 inputs, got 1"));
  CHECK_THAT(with([](auto& steps) { steps[0].levels.zero_point = 256; }), Contains("a zero point of 256"));
  CHECK_THAT(with([](auto& steps) { steps[0].levels.integers = {-128, 127}; }),
             Contains("integers from -128 to 127: expected"));
  CHECK_THAT(with([](auto& steps) { steps[0].weight.pop_back(); }), Contains("'conv1' has 215 weights for shape"));
  CHECK_THAT(with([](auto& steps) { steps[0].weight_scale[2] = -1; }), Contains("'conv1' has a weight scale of -1"));
  CHECK_THAT(with([](auto& steps) { steps[0].bias[1] = std::numeric_limits<float>::infinity(); }),
             Contains("'conv1' has a bias of"));
  CHECK_THAT(with([](auto& steps) { steps[0].weight_scale.pop_back(); }), Contains("7 scales and 8 biases for 8"));
  CHECK_THAT(with([](auto& steps) {
               steps.push_back(test::product(Kind::linear, "long", 9, {1, 0, {}}, {1, 70000, 1, 1}));
             }),
             Contains("'long' adds 70000 products, expected at most 65793"));
}

TEST_CASE("inputs that do not fit a quantized model are refused") {
  const auto model = program();
  const auto message = [&](const auto& x) { return message_of<ShapeError>([&] { model(x); }); };
  CHECK_THAT(message(Tensor<float, 4>::zeros({2, 4, 9, 9})), Contains("'conv1' expected 3 channels, got [4, 9, 9]"));
  CHECK_THAT(message(Tensor<float, 4>::zeros({2, 3, 12, 9})), Contains("'fc1' expected 80 numbers, got [112]"));
  CHECK_THAT(message(Tensor<float, 2>::zeros({2, 3})), Contains("conv2d 'conv1' expected an image, got [3]"));
  CHECK_THAT(message_of<ShapeError>([&] { model.operator()<4>(test::some_images(1)); }),
             Contains("the output of a sample is [10], not of rank 3"));
  CHECK_THAT(message_of<UsageError>([&] { model(Tensor<float, 4>()); }), Contains("the input is undefined"));
  CHECK_THAT(message_of<UsageError>([] { Program()(test::some_images(1)); }), Contains("it has no steps"));
  CHECK_THAT(message_of<UsageError>([] { io::save(Program(), "nowhere.safetensors"); }), Contains("without steps"));
}

}  // namespace quantized_file_test
