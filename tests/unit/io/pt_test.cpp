// Files of torch.save: what PyTorch wrote is read, with views and types; whatever else a pickle says is refused by
// name.
#include <catch.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/pt.hpp>
#include <chorus/nn/linear.hpp>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "files.hpp"

namespace pt_test {

using namespace chorus;
using namespace chorus_test;
using namespace std::string_literals;
using Catch::Matchers::Contains;

std::string pt(const char* name) {
  const auto tests = std::filesystem::path(CHORUS_TESTS);
  return (tests / "pt" / name).string();
}
std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
template <class T>
std::vector<T> numbers(const io::PtReader& file, const char* name) {
  const auto* const entry = file.find(name);
  REQUIRE(entry != nullptr);
  std::vector<T> out(entry->bytes / sizeof(T));
  file.read(*entry, std::as_writable_bytes(std::span(out)));
  return out;
}

std::string number(std::size_t value, std::size_t width) {
  std::string out(width, '\0');
  std::memcpy(out.data(), &value, width);
  return out;
}
/// A zip archive of stored files, without checksums.
std::string zip(const std::vector<std::pair<std::string, std::string>>& files, int method = 0) {
  std::string out, directory;
  for (const auto& [name, content] : files) {
    const auto facts = number(20, 2) + number(0, 2) + number(static_cast<std::size_t>(method), 2) + number(0, 8) +
                       number(content.size(), 4) + number(content.size(), 4) + number(name.size(), 2) + number(0, 2);
    directory += "PK\1\2"s + number(0, 2) + facts + number(0, 10) + number(out.size(), 4) + name;
    out += "PK\3\4"s + facts + name + content;
  }
  return out + directory + "PK\5\6"s + number(0, 4) + number(files.size(), 2) + number(files.size(), 2) +
         number(directory.size(), 4) + number(out.size(), 4) + number(0, 2);
}
std::string text(const std::string& value) { return "X" + number(value.size(), 4) + value; }
std::string integer(std::size_t value) { return "\x8a\x08"s + number(value, 8); }
std::string tuple(const std::vector<std::size_t>& values) {
  std::string out = "(";
  for (const auto value : values) out += integer(value);
  return out + "t";
}
struct Facts {
  std::string type = "torch\nFloatStorage", key = "0";
  std::size_t elements = 6, offset = 0;
  std::vector<std::size_t> shape = {2, 3}, strides = {3, 1};
};
std::string tensor(const Facts& f) {
  return "ctorch._utils\n_rebuild_tensor_v2\n((" + text("storage") + "c" + f.type + "\n" + text(f.key) + text("cpu") +
         integer(f.elements) + "tQ" + integer(f.offset) + tuple(f.shape) + tuple(f.strides) +
         "\x89"
         "ccollections\nOrderedDict\n)RtR";
}
std::string dict_of(const std::string& value) { return "\x80\x02}" + text("a") + value + "s."; }
/// What a file with this pickle, and 24 bytes as its only storage, says.
std::string refusal(const std::string& pickle, const std::string& from = "") {
  const TemporaryFolder folder;
  put(folder / "x", zip({{"m/data.pkl", pickle}, {"m/byteorder", "little"}, {"m/data/0", std::string(24, '\1')}}));
  return message_of<FileError>([&] { io::PtReader(folder / "x", from); });
}

TEST_CASE("a state_dict of PyTorch has its tensors, views and types") {
  const io::PtReader file(pt("state.pt"));
  CHECK(file.entries().size() == 22);
  CHECK(file.find("nothing") == nullptr);
  CHECK(numbers<float>(file, "0.weight") == std::vector<float>{0, 1, 2, 3, 4, 5});
  CHECK(file.find("1.num_batches_tracked")->dtype == io::FileDType::i64);
  CHECK(numbers<float>(file, "tied") == numbers<float>(file, "base"));
  CHECK(file.find("transposed")->shape == std::vector<Index>{6, 4});
  CHECK(numbers<float>(file, "transposed")[1] == 6);
  CHECK(numbers<float>(file, "part") == std::vector<float>{8, 9, 10, 14, 15, 16});
  CHECK(numbers<float>(file, "expanded") == std::vector<float>(5, 0.0f));
  CHECK(numbers<std::int64_t>(file, "number") == std::vector<std::int64_t>{7});
  CHECK(file.find("empty")->shape == std::vector<Index>{0, 3});
  CHECK(numbers<float>(file, "parameter") == std::vector<float>{1.5f, -2.5f});
  CHECK(static_cast<float>(numbers<half>(file, "half")[1]) == 65504);
  CHECK(static_cast<float>(numbers<bf16>(file, "bfloat16")[1]) == -3);
  CHECK(numbers<double>(file, "double") == std::vector<double>{1.0 / 3});
  CHECK(numbers<std::uint16_t>(file, "uint16") == std::vector<std::uint16_t>{1, 65535});
  CHECK(file.find("float8")->dtype == io::FileDType::f8_e4m3);
  CHECK(numbers<std::uint8_t>(file, "bool") == std::vector<std::uint8_t>{1, 0});
  CHECK(numbers<std::int8_t>(file, "bytes") == std::vector<std::int8_t>{-1, 2});
}

TEST_CASE("load_pt fills a model, also from a checkpoint's dict and with other names") {
  nn::Linear<Cpu> layer{2, 3};
  const auto report = io::load_pt(layer, pt("state.pt"), {.strict = false, .rename = io::without_prefix("0.")});
  CHECK(report.missing.empty());
  CHECK(value_of(layer.weight).to_vector() == std::vector<float>{0, 1, 2, 3, 4, 5});
  layer.weight.assign(Tensor<float, 2>::zeros({3, 2}));
  CHECK(io::load_pt(layer, pt("checkpoint.pt"), {.from = "model"}).complete());
  CHECK(value_of(layer.weight).to_vector() == std::vector<float>{0, 1, 2, 3, 4, 5});
  nn::Linear<Cpu> other{3, 2};
  CHECK_THAT(message_of<FileError>([&] { io::load_pt(other, pt("checkpoint.pt"), {.from = "model"}); }),
             Contains("weight (expected F32 [2, 3], got F32 [3, 2])"));
  io::load_pt(other, pt("checkpoint.pt"), {.from = "model", .strict = false, .transposed = [](auto) { return true; }});
  CHECK(value_of(other.weight).to_vector() == std::vector<float>{0, 2, 4, 1, 3, 5});
  CHECK_THAT(message_of<FileError>([&] { io::load_pt(layer, pt("checkpoint.pt")); }),
             Contains("name its key as {.from = KEY}; the keys are \"epoch\" (an integer), \"model\" (a dict)"));
  CHECK_THAT(message_of<FileError>([&] { io::load_pt(layer, pt("checkpoint.pt"), {.from = "ema"}); }),
             Contains("at key \"ema\", got nothing; the keys are"));
}

TEST_CASE("whole modules, old files, other formats and other readers' files are named") {
  const TemporaryFolder folder;
  const auto says = [](const std::string& path) { return message_of<FileError>([&] { io::PtReader file(path); }); };
  CHECK_THAT(says(pt("module.pt")), Contains("a whole module (torch.nn.modules.linear.Linear)") &&
                                        Contains("torch.save(model.state_dict(), FILE)"));
  CHECK_THAT(says(pt("legacy.pt")), Contains("torch.save before 1.6") && Contains("weights_only=True"));
  CHECK_THAT(message_of<FileError>([&] { io::SafetensorsReader{pt("state.pt")}; }), Contains("io::load_pt"));
  CHECK_THAT(message_of<FileError>([&] { io::NpzReader{pt("state.pt")}; }), Contains("io::load_pt"));
  io::NpzWriter writer;
  writer.add("a", Tensor<float, 1>::zeros({3}));
  writer.save(folder / "x.npz");
  CHECK_THAT(says(folder / "x.npz"), Contains("not a file of torch.save") && Contains("io::NpzReader"));
  put(folder / "x", zip({{"m/data.pkl", dict_of("N")}, {"m/code/a.py", "import os"}}));
  CHECK_THAT(says(folder / "x"), Contains("TorchScript"));
  put(folder / "x", zip({{"m/data.pkl", dict_of("N")}, {"m/byteorder", "big"}}));
  CHECK_THAT(says(folder / "x"), Contains("byteorder: expected little, got \"big\""));
  put(folder / "x", zip({{"m/data.pkl", dict_of("N")}}, 8));
  CHECK_THAT(says(folder / "x"), Contains("compressed"));
  put(folder / "x", zip({{"m/data.pkl", dict_of(tensor({}))}}));
  CHECK_THAT(says(folder / "x"), Contains("\"m/data/0\" is missing in the archive"));
}

TEST_CASE("a hostile pickle is refused, and calls nothing") {
  CHECK(refusal(dict_of(tensor({}))) == "");
  CHECK_THAT(refusal(dict_of("cos\nsystem\n(" + text("true") + "tR")), Contains("the file needs os.system"));
  CHECK_THAT(refusal(dict_of("cposix\nsystem\n" + text("true") + "\x85R")), Contains("needs posix.system"));
  CHECK_THAT(refusal(dict_of("c__builtin__\neval\n" + text("1") + "\x85R")), Contains("needs __builtin__.eval"));
  CHECK_THAT(refusal(dict_of("c__main__\nNet\n)\x81")), Contains("a whole module (__main__.Net)"));
  CHECK_THAT(refusal("\x80\x04}."), Contains("expected pickle protocol 2, torch.save's default, got 4"));
  CHECK_THAT(refusal("\x80\x02(i__main__\nX\n."), Contains("operation 105 at byte 3 is not one of those"));
  CHECK_THAT(refusal("\x80\x02K\x01."), Contains("expected a dict of tensors") && Contains("got an integer"));
  for (const auto* damaged :
       {"", "\x80", "\x80\x02", "\x80\x02.", "\x80\x02(.", "\x80\x02}s.", "\x80\x02t.", "\x80\x02h\1.", "\x80\x02R.",
        "\x80\x02)R.", "\x80\x02}}b.", "\x80\x02Q.", "\x80\x02]K\1KKu.", "\x80\x02X\xff\xff\xff\xff."})
    CHECK(refusal(damaged) != "");
  CHECK_THAT(refusal("\x80\x02" + std::string(1'000'001, ')') + "."), Contains("values are on its stack"));
  CHECK_THAT(refusal("\x80\x02" + std::string(1'000'001, '(') + "."), Contains("marks"));
  CHECK_THAT(refusal(dict_of("}" + text("b") + tensor({}) + "s")),
             Contains("{.from = KEY}; the keys are \"a\" (a dict)"));
  CHECK(refusal(dict_of("}" + text("b") + tensor({}) + "s"), "a") == "");
}

TEST_CASE("a tensor stays in its storage") {
  constexpr std::size_t huge = std::size_t{1} << 62, minus = ~std::size_t{0};
  const auto of = [](const Facts& facts) { return refusal(dict_of(tensor(facts))); };
  CHECK(of({.strides = {1, 2}}) == "");
  CHECK(of({.shape = {0, 1u << 30}, .strides = {1, 1}}) == "");
  CHECK_THAT(of({.offset = 1}), Contains("does not fit its storage of 6"));
  CHECK_THAT(of({.strides = {4, 1}}), Contains("with strides [4, 1] does not fit"));
  CHECK_THAT(of({.shape = {1'000'000}, .strides = {0}}), Contains("does not fit"));
  CHECK_THAT(of({.elements = 7}), Contains("its storage of 7 F32 has 24 bytes only"));
  CHECK_THAT(of({.type = "torch\nDoubleStorage"}), Contains("its storage of 6 F64 has 24 bytes only"));
  CHECK_THAT(of({.elements = huge}), Contains("has 24 bytes only"));
  CHECK_THAT(of({.shape = {huge, huge}, .strides = {0, 0}}), Contains("overflows"));
  CHECK_THAT(of({.shape = {3}, .strides = {huge}}), Contains("does not fit"));
  CHECK_THAT(of({.shape = {5}, .strides = {huge}}), Contains("overflow"));
  CHECK_THAT(of({.offset = minus}), Contains("expected a size that is not negative, got -1"));
  CHECK_THAT(of({.shape = {minus}, .strides = {1}}), Contains("not negative, got -1"));
  CHECK_THAT(of({.shape = {1}, .strides = {minus}}), Contains("not negative, got -1"));
  CHECK_THAT(of({.shape = {1, 1}, .strides = {1}}), Contains("2 sizes and 1 strides"));
  CHECK_THAT(of({.shape = std::vector<std::size_t>(9, 1), .strides = std::vector<std::size_t>(9, 1)}),
             Contains("a tensor of 9 axes; the limit is 8"));
  CHECK_THAT(of({.key = "../0"}), Contains("expected a number as the name of a storage"));
  CHECK_THAT(of({.key = "1"}), Contains("\"m/data/1\" is missing"));
}

TEST_CASE("a file of torch.save that was cut or changed gives all or an error") {
  const TemporaryFolder folder;
  const auto whole = content_of(pt("checkpoint.pt"));
  nn::Linear<Cpu> layer{2, 3};
  std::size_t refused = 0, tried = 0;
  for (std::size_t i = 0; i < whole.size(); i += 7, ++tried) {
    auto bad = i % 2 == 0 ? whole.substr(0, i) : whole;
    if (i % 2 == 1) bad[i] = static_cast<char>(bad[i] ^ 0x55);
    put(folder / "x", bad);
    refused += message_of<Error>([&] { io::load_pt(layer, folder / "x", {.from = "model"}); }) != "";
  }
  CHECK(refused > tried / 2);
}

}  // namespace pt_test
