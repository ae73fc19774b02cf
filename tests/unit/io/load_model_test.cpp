/// Models loaded from files of other programs: names, types, tied tensors, parts of a model, and refusals.

#include <algorithm>
#include <catch.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/io/parameters_hash.hpp>
#include <chorus/io/tensor_file.hpp>
#include <chorus/nn/batch_norm.hpp>
#include <chorus/nn/embedding.hpp>
#include <chorus/nn/linear.hpp>
#include <cmath>
#include <limits>
#include <list>
#include <string>
#include <utility>
#include <vector>

#include "../random_bytes.hpp"
#include "files.hpp"

namespace load_model_test {

using namespace chorus;
using namespace chorus_test;
using Catch::Matchers::Contains;
using Strings = std::vector<std::string>;

/// Tensors of a file that `save` writes.
class File {
 public:
  template <class T>
  File& add(std::string name, std::vector<Index> shape, const std::vector<double>& numbers) {
    auto& item = items_.emplace_back(Item{std::move(name), dtype<T>, std::move(shape), {}});
    for (const double number : numbers) {
      const T value = static_cast<T>(number);
      const auto bytes = std::as_bytes(std::span(&value, 1));
      item.bytes.insert(item.bytes.end(), bytes.begin(), bytes.end());
    }
    return *this;
  }
  std::string save(const std::string& path, const std::string& prefix = "", const io::Metadata& metadata = {}) const {
    std::vector<io::TensorView> views;
    for (const auto& x : items_) views.push_back({prefix + x.name, io::file_dtype(x.dtype), x.shape, x.bytes});
    io::write_safetensors(path, views, metadata);
    return path;
  }

 private:
  struct Item {
    std::string name;
    DType dtype;
    std::vector<Index> shape;
    std::vector<std::byte> bytes;
  };
  std::list<Item> items_;
};

template <class D = Cpu>
struct Bn : nn::Module {
  nn::Linear<D> fc{1, 2};
  nn::BatchNorm1d<D> norm{2};
  CHORUS_MODULE(Bn, fc, norm)
};
template <class T = float>
File bn(bool counted = true) {
  File file;
  file.add<T>("fc.weight", {2, 1}, {1, 2}).template add<T>("fc.bias", {2}, {3, 4});
  file.add<T>("norm.weight", {2}, {5, 6}).template add<T>("norm.bias", {2}, {7, 8});
  file.add<T>("norm.running_mean", {2}, {9, 10}).template add<T>("norm.running_var", {2}, {11, 12});
  if (counted) file.add<std::int64_t>("norm.num_batches_tracked", {}, {13});
  return file;
}
std::vector<double> numbers_of(nn::Module& model) {
  std::vector<double> out;
  const auto add = [&](const auto& x, const void* data) {
    for (std::size_t i = 0; i < static_cast<std::size_t>(x.count()); ++i)
      out.push_back(x.dtype() == DType::f32 ? static_cast<const float*>(data)[i]
                                            : static_cast<double>(static_cast<const std::int64_t*>(data)[i]));
  };
  for (const auto& named : nn::named_parameters<Cpu>(model)) add(*named.parameter, named.parameter->value_data());
  for (const auto& named : nn::named_buffers<Cpu>(model)) add(*named.buffer, named.buffer->data());
  return out;
}
const std::vector<double> all{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13};

/// All values of a model as bytes, for any types.
std::string bytes_in(nn::Module& model) {
  std::string out;
  const auto add = [&](const auto& x, const void* data) { out.append(static_cast<const char*>(data), x.size_bytes()); };
  for (const auto& named : nn::named_parameters<Cpu>(model)) add(*named.parameter, named.parameter->value_data());
  for (const auto& named : nn::named_buffers<Cpu>(model)) add(*named.buffer, named.buffer->data());
  return out;
}

template <class M>
std::string refusal(M& model, const std::string& path, const io::LoadOptions& options = {}) {
  const auto before = bytes_in(model);
  std::vector<std::uint64_t> versions;
  for (const auto& named : nn::named_parameters<Cpu>(model)) versions.push_back(named.parameter->version());
  auto text = message_of<FileError>([&] { io::load(model, path, options); });
  CHECK(bytes_in(model) == before);
  std::size_t i = 0;
  for (const auto& named : nn::named_parameters<Cpu>(model)) CHECK(named.parameter->version() == versions[i++]);
  return text;
}

TEST_CASE("load: names that PyTorch's wrappers make are those of what was wrapped") {
  const TemporaryFolder folder;
  for (const std::string prefix : {"", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.",
                                   "module.module.", "_forward_module.", "_fsdp_wrapped_module.module."}) {
    INFO(prefix);
    Bn<> model;
    CHECK(io::load(model, bn().save(folder / "x", prefix)).complete());
    CHECK(numbers_of(model) == all);
  }
  // Only a submodule was compiled.
  Bn<> model;
  File part;
  part.add<float>("fc._orig_mod.weight", {2, 1}, {1, 2}).add<float>("fc._orig_mod.bias", {2}, {3, 4});
  CHECK(io::load(model, part.save(folder / "part"), {.strict = false}).missing.front() == "norm.weight");
  CHECK(model.fc.bias.value().to_vector() == std::vector<float>{3, 4});
  // "module." is part of the name if some name lacks it.
  File mixed;
  mixed.add<float>("module.fc.weight", {2, 1}, {1, 2}).add<float>("fc.bias", {2}, {3, 4});
  CHECK(io::load(model, mixed.save(folder / "mixed"), {.strict = false}).unexpected == Strings{"module.fc.weight"});
}

template <class D>
struct Wrapped : nn::Module {
  Bn<D> module;
  CHORUS_MODULE(Wrapped, module)
};
TEST_CASE("load: a model that has a wrapper's word in its own names") {
  const TemporaryFolder folder;
  Wrapped<Cpu> model;
  for (const std::string prefix : {"module.", "module.module."}) {
    io::load(model, bn().save(folder / "x", prefix));
    CHECK(numbers_of(model) == all);
  }
}

TEST_CASE("load: batch norm of a file that counted no batches keeps its count") {
  const TemporaryFolder folder;
  Bn<> model;
  io::load(model, bn().save(folder / "new"));
  CHECK(io::load(model, bn(false).save(folder / "old")).complete());
  CHECK(numbers_of(model) == all);
  File bare;
  bare.add<float>("fc.weight", {2, 1}, {1, 2}).add<float>("fc.bias", {2}, {3, 4});
  CHECK_THAT(refusal(model, bare.save(folder / "bare")), Contains("norm.running_var, norm.num_batches_tracked;"));
}

template <class D>
struct Kinds : nn::Module {
  Parameter<float, 1, D> single{Tensor<float, 1, D>::zeros({4})};
  Parameter<double, 1, D> twofold{Tensor<double, 1, D>::zeros({4})};
  Buffer<std::int64_t, 1, D> count{Tensor<std::int64_t, 1, D>::zeros({2})};
  Buffer<std::int8_t, 1, D> small{Tensor<std::int8_t, 1, D>::zeros({2})};
  Buffer<bool, 1, D> mask{Tensor<bool, 1, D>::zeros({2})};
  Buffer<half, 1, D> narrow{Tensor<half, 1, D>::zeros({2})};
  CHORUS_MODULE(Kinds, single, twofold, count, small, mask, narrow)
};
template <class F, class I>
File kinds(double odd = 3, double whole = 1) {
  File file;
  file.add<F>("single", {4}, {1, -0.5, 0x1p-20, odd}).template add<F>("twofold", {4}, {1, -0.5, 0x1p-20, odd});
  file.add<I>("count", {2}, {0, 1}).template add<I>("small", {2}, {1, whole}).template add<I>("mask", {2}, {1, 0});
  return file.add<F>("narrow", {2}, {0.25, 2}), file;
}

TEMPLATE_TEST_CASE("load: numbers come in the model's type", "", (std::pair<half, bool>),
                   (std::pair<bf16, std::int8_t>), (std::pair<float, std::uint8_t>), (std::pair<double, std::int16_t>),
                   (std::pair<half, std::uint16_t>), (std::pair<bf16, std::int32_t>), (std::pair<float, std::uint32_t>),
                   (std::pair<double, std::int64_t>), (std::pair<double, std::uint64_t>)) {
  const TemporaryFolder folder;
  Kinds<Cpu> model;
  for (const double odd : {3.0, double(std::numeric_limits<float>::infinity())}) {
    auto file = kinds<typename TestType::first_type, typename TestType::second_type>(odd);
    CHECK(io::load(model, file.save(folder / "x")).complete());
    CHECK(model.single.value().to_vector() == std::vector{1.f, -0.5f, 0x1p-20f, static_cast<float>(odd)});
    CHECK(model.twofold.value().to_vector() == std::vector{1., -0.5, 0x1p-20, odd});
    CHECK(model.count.value().to_vector() == std::vector<std::int64_t>{0, 1});
    CHECK(model.small.value().to_vector() == std::vector<std::int8_t>{1, 1});
    CHECK((model.mask.value().data()[0] && !model.mask.value().data()[1]));
    CHECK(float(model.narrow.value().data()[0]) == 0.25f);
  }
}

TEST_CASE("load: a number that the model's type does not hold is named, and nothing changes") {
  const TemporaryFolder folder;
  Kinds<Cpu> model;
  CHECK_THAT(refusal(model, kinds<double, int>(-1e300).save(folder / "x")),
             Contains(R"(tensor "single": the number -1e+300 of type F64 is beyond the range of F32)"));
  CHECK_THAT(refusal(model, kinds<float, int>(3, 128).save(folder / "x")),
             Contains(R"(tensor "small": the number 128 of type I32 is beyond the range of I8)"));
  CHECK_THAT(refusal(model, kinds<float, std::uint64_t>(3, 0x1p63).save(folder / "x"), {.strict = false}),
             Contains("the number 9223372036854775808 of type U64 is beyond"));
  File file = kinds<float, int>();
  CHECK_THAT(refusal(model, File(file).add<float>("mask2", {1}, {1}).save(folder / "x")), Contains("mask2"));
  const auto nan = kinds<double, int>(std::numeric_limits<double>::quiet_NaN());
  io::load(model, nan.save(folder / "x"));
  CHECK(std::isnan(model.single.value().data()[3]));
}

TEST_CASE("load: integers are not taken for floating-point numbers, nor these for integers") {
  const TemporaryFolder folder;
  Bn<> model;
  File file = bn<std::int32_t>(false);
  file.add<float>("norm.num_batches_tracked", {}, {13});
  const auto text = refusal(model, file.save(folder / "x"));
  CHECK_THAT(text, Contains("none of its tensors does") &&
                       Contains("fc.weight (expected F32 [2, 1], got I32 [2, 1])") &&
                       Contains("num_batches_tracked (expected I64 [], got F32 [])") &&
                       Contains("I32 is not converted to F32"));
}

template <class D>
struct Scalar0 : nn::Module {
  Parameter<float, 0, D> scale{Tensor<float, 0, D>::zeros({})};
  CHORUS_MODULE(Scalar0, scale)
};
TEST_CASE("load: one number for a scalar") {
  const TemporaryFolder folder;
  Scalar0<Cpu> model;
  File file;
  io::load(model, file.add<float>("scale", {1}, {3}).save(folder / "x"));
  CHECK(model.scale.value().item() == 3);
}

template <class D>
struct Tied : nn::Module {
  nn::Embedding<D> wte{2, 1};
  nn::Linear<D> lm_head{1, 2, {.bias = false}};
  explicit Tied(bool tied = true) {
    if (tied) lm_head.weight = wte.weight;
  }
  CHORUS_MODULE(Tied, wte, lm_head)
};
File tied(const Strings& names, double last = 2) {
  File file;
  for (const auto& name : names) file.add<float>(name, {2, 1}, {1, name == names.back() ? last : 2});
  return file;
}
const std::string wte = "wte.weight", lm_head = "lm_head.weight";

TEST_CASE("load: tied tensors by one of their names, or all") {
  const TemporaryFolder folder;
  for (const auto& names : {Strings{wte}, Strings{lm_head}, Strings{wte, lm_head}})
    for (const std::string prefix : {"", "_orig_mod."}) {
      Tied<Cpu> model;
      CHECK(io::load(model, tied(names).save(folder / "x", prefix)).complete());
      CHECK(model.wte.weight.value().to_vector() == std::vector<float>{1, 2});
      CHECK(model.lm_head.weight.value().data() == model.wte.weight.value().data());
    }
}

TEST_CASE("load: tied tensors that differ in the file are an error, unless one is left out") {
  const TemporaryFolder folder;
  Tied<Cpu> model;
  const auto path = tied({wte, lm_head}, 7).save(folder / "x");
  for (const bool strict : {true, false})
    CHECK_THAT(refusal(model, path, {.strict = strict}),
               Contains(R"(tensor "lm_head.weight" has other values than "wte.weight")") && Contains("rename"));
  io::load(model, path, {.rename = [](std::string_view name) { return std::string(name == lm_head ? "" : name); }});
  CHECK(model.wte.weight.value().to_vector() == std::vector<float>{1, 2});
  // Without tying, each one loads its own values.
  Tied<Cpu> apart(false);
  io::load(apart, path);
  CHECK(apart.lm_head.weight.value().to_vector() == std::vector<float>{1, 7});
}

TEST_CASE(
    "load: of what save wrote, any flipped bit is refused, and nothing changes; a file without a checksum is not") {
  const TemporaryFolder folder;
  Tied<Cpu> model(false), other(false);
  io::save(model, folder / "good");
  const auto good = chorus_test::get(folder / "good");
  const auto before = io::parameters_sha256(other);
  for (std::size_t bit = 0; bit < 8 * 16; ++bit) {  // of the last four floats
    auto flipped = good;
    flipped[good.size() - 1 - bit / 8] = static_cast<char>(flipped[good.size() - 1 - bit / 8] ^ (1 << bit % 8));
    chorus_test::put(folder / "bad", flipped);
    CHECK(refusal(other, folder / "bad")
              .starts_with(
                  cat("loading ", folder / "bad", ": the file is damaged: its data changed after it was written")));
  }
  CHECK(io::parameters_sha256(other) == before);
  chorus_test::put(folder / "older", [&] {
    auto text = good;
    text.replace(text.find(io::data_hash_key), 8, "sometime");  // another key
    text.back() = static_cast<char>(text.back() ^ 1);
    return text;
  }());
  CHECK(io::load(other, folder / "older").complete());
  io::load(model, folder / "good");
}

TEST_CASE("load: a file's note of a tied name fills a model in which it is not tied; save writes such notes") {
  const TemporaryFolder folder;
  Tied<Cpu> apart(false), model;
  CHECK_THAT(refusal(apart, tied({lm_head}).save(folder / "x")), Contains("missing: wte.weight;"));
  io::load(apart, tied({lm_head}).save(folder / "x", "module.", {{"module." + wte, "module." + lm_head}}));
  CHECK(apart.wte.weight.value().to_vector() == std::vector<float>{1, 2});

  io::load(model, tied({wte}).save(folder / "x"));
  io::save(model, folder / "saved", {{"by", "a test"}});
  auto noted = io::SafetensorsReader(folder / "saved").metadata();
  noted.erase(std::string(io::data_hash_key));
  CHECK(noted == io::Metadata{{"by", "a test"}, {"format", "pt"}, {lm_head, wte}});
  Tied<Cpu> other(false);
  io::load(other, folder / "saved");
  CHECK(other.lm_head.weight.value().to_vector() == std::vector<float>{1, 2});
}

TEST_CASE("load: what doesn't fit is reported where that is asked for, and the rest is filled") {
  const TemporaryFolder folder;
  File file = bn();
  file.add<float>("head.weight", {1}, {1});
  Bn<> model;
  CHECK(refusal(model, file.save(folder / "x")) ==
        "loading " + (folder / "x") +
            ": the file doesn't fit the model; unexpected: head.weight; with "
            "{.strict = false} io::load fills what fits and returns the rest in a report");
  const auto report = io::load(model, folder / "x", {.strict = false});
  CHECK((report.missing.empty() && report.unexpected == Strings{"head.weight"} && report.mismatched.empty()));
  CHECK(numbers_of(model) == all);

  // Another number of classes.
  File other;
  other.add<float>("fc.weight", {2, 1}, {1, 2}).add<float>("fc.bias", {3}, {0, 0, 0}).add<float>("more", {1}, {1});
  Bn<> tuned;
  const auto bias = tuned.fc.bias.value().to_vector();
  const auto rest = io::load(tuned, other.save(folder / "y"), {.strict = false});
  CHECK(cat(rest) ==
        "missing: norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked; "
        "unexpected: more; mismatched: fc.bias (expected F32 [2], got F32 [3])");
  CHECK(tuned.fc.weight.value().to_vector() == std::vector<float>{1, 2});
  CHECK(tuned.fc.bias.value().to_vector() == bias);
  CHECK_THAT(refusal(tuned, folder / "y"), Contains("{.rename = ...} turns names of the file into the model's"));
  // No tensor fits: that is an error even if not strict.
  CHECK_THAT(
      refusal(tuned, bn().save(folder / "z", "net."), {.strict = false}),
      Contains("none of its tensors does") && Contains(R"({.rename = io::without_prefix("net.")} makes 7 names)"));
}

TEST_CASE("load: names can be changed, and a part filled") {
  const TemporaryFolder folder;
  const auto path = bn().save(folder / "x", "model.net.");
  Bn<> model;
  CHECK_THAT(refusal(model, path), Contains(R"({.rename = io::without_prefix("model.net.")} makes 7 names fit)"));
  io::load(model, path, {.rename = io::without_prefix("model.net.")});
  CHECK(numbers_of(model) == all);

  io::load(model.fc, path, {.rename = io::only_prefix("model.net.fc.")});
  const auto junk = io::load(model, path, {.strict = false, .rename = [](std::string_view name) {
                                             return std::string(name.ends_with("fc.bias") ? "fc.bias" : "junk");
                                           }});
  CHECK(junk.unexpected.size() == 6);
  CHECK_THAT(refusal(model, path, {.rename = [](std::string_view) { return std::string("fc.bias"); }}),
             Contains("both match the model's \"fc.bias\""));

  Wrapped<Cpu> whole;
  CHECK_THAT(refusal(whole, bn().save(folder / "y")), Contains(R"(io::with_prefix("module.")} makes 7 names fit)"));
  io::load(whole, folder / "y", {.rename = io::with_prefix("module.")});
  CHECK(numbers_of(whole) == all);
}

TEST_CASE("load: a transposed weight and one of several files are named as such") {
  const TemporaryFolder folder;
  Bn<> model;
  File file;
  file.add<float>("fc.weight", {1, 2}, {1, 2}).add<float>("fc.bias", {2}, {1, 2});
  CHECK_THAT(refusal(model, file.save(folder / "model-00001-of-00002.safetensors")),
             Contains("fc.weight is transposed in the file") && Contains("the model is in several files"));
}

TEST_CASE("load: a model in several files is read by their index, which names files of its folder alone") {
  const TemporaryFolder folder;
  const auto index = folder / "model.safetensors.index.json";
  const auto map = [&](const std::string& weight, const std::string& bias) {
    put(index, cat(R"({"metadata": {}, "weight_map": {"weight": )", weight, R"(, "bias": )", bias, "}}"));
  };
  File{}.add<float>("weight", {2, 3}, {1, 2, 3, 4, 5, 6}).save(folder / "a.safetensors");
  File{}.add<float>("bias", {2}, {7, 8}).save(folder / "b.safetensors");
  nn::Linear<Cpu> model{3, 2}, turned{2, 3};
  map(R"("a.safetensors")", R"("b.safetensors")");
  CHECK(io::load(model, index).complete());
  CHECK(value_of(model.weight).to_vector() == std::vector<float>{1, 2, 3, 4, 5, 6});
  CHECK(value_of(model.bias).to_vector() == std::vector<float>{7, 8});
  io::load(turned, index, {.strict = false, .transposed = [](std::string_view name) { return name == "weight"; }});
  CHECK(value_of(turned.weight).to_vector() == std::vector<float>{1, 4, 2, 5, 3, 6});
  CHECK_THAT(refusal(turned, index, {.transposed = [](std::string_view) { return true; }}), Contains("bias"));

  map(R"("a.safetensors")", R"("a.safetensors")");
  CHECK_THAT(refusal(model, index), Contains("tensor \"bias\" is not in a.safetensors"));
  for (const auto* name : {R"("../b.safetensors")", R"("/b.safetensors")", R"("b.bin")", "3", "null"}) {
    map(R"("a.safetensors")", name);
    CHECK_THAT(refusal(model, index), Contains("tensor \"bias\": expected the name of a .safetensors file"));
  }
  map(R"("a.safetensors")", R"("c.safetensors")");
  CHECK_THAT(refusal(model, index), Contains("c.safetensors: opening the file failed"));
  File{}
      .add<float>("bias", {2}, {7, 8})
      .add<float>("weight", {2, 3}, {1, 2, 3, 4, 5, 6})
      .save(folder / "c.safetensors");
  CHECK_THAT(refusal(model, index), Contains("tensor \"weight\" is in ") && Contains("and in "));
  for (const auto* text : {"", "[]", "{", R"({"weight_map": 3})"}) {
    put(index, text);
    CHECK_THAT(refusal(model, index), Contains("expected a JSON object with a weight_map"));
  }
}

TEST_CASE("load: from a file with bytes changed at random, all comes or nothing") {
  const TemporaryFolder folder;
  const auto file = get(kinds<float, int>().save(folder / "FILE"));
  Kinds<Cpu> model;
  int loaded = 0, refused = 0;
  test::for_seeds(
      2000,
      [&](std::uint64_t seed) {
        test::DrawFrom<0x6c6f6164> draw(seed);
        put(folder / "FILE", test::changed(file, draw));
        const io::LoadOptions options{.strict = draw.chance(50)};
        const auto before = bytes_in(model);
        try {
          const auto report = io::load(model, folder / "FILE", options);
          if (options.strict && !report.complete()) FAIL_CHECK("seed " << seed << ": " << cat(report));
          ++loaded;
        } catch (const FileError& error) {
          if (bytes_in(model) != before || std::string_view(error.what()).find("FILE") == std::string_view::npos)
            FAIL_CHECK("seed " << seed << ": " << error.what());
          ++refused;
        }
        const auto bools = std::as_bytes(std::span(model.mask.value().data(), 2));
        if (std::max(bools[0], bools[1]) > std::byte{1}) FAIL_CHECK("seed " << seed << ": an odd bool");
      },
      [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  CHECK(loaded > 0);
  CHECK(refused > 0);
}

}  // namespace load_model_test
