/// NumPy and safetensors files with randomly changed bytes: the reader returns what a valid file can contain, or throws
/// a FileError with the path. CHORUS_RANDOM_SEEDS=FIRST-LAST runs other seeds.
#include <catch.hpp>
#include <chorus/io/npz.hpp>
#include <chorus/io/tensor_file.hpp>

#include "../random_bytes.hpp"
#include "files.hpp"

namespace random_files_test {

using namespace chorus;
using namespace chorus_test;
using Draw = test::DrawFrom<0x66696c65>;

std::string show(std::uint64_t seed) { return cat("seed ", seed, "\n"); }

/// Tensors of several types, with all kinds of shapes.
struct Contents {
  Tensor<float, 2, Cpu> f = Tensor<float, 2, Cpu>::from({1.0f, 2.0f, -0.5f, 4.0f, 5.0f, 6.0f}, {2, 3});
  Tensor<bool, 1, Cpu> b = Tensor<bool, 1, Cpu>::from({true, false, true}, {3});
  Tensor<std::int64_t, 3, Cpu> i = Tensor<std::int64_t, 3, Cpu>::zeros({2, 0, 4});
  Tensor<half, 0, Cpu> h = Tensor<half, 0, Cpu>::from({1.0f}, {});
};

/// Whether each value is valid for its type; a sanitizer detects reads out of bounds.
template <class T, int Rank>
bool is_sane(const Tensor<T, Rank, Cpu>& tensor) {
  const auto bytes = std::as_bytes(std::span(tensor.data(), static_cast<std::size_t>(tensor.numel())));
  return std::all_of(bytes.begin(), bytes.end(),
                     [](std::byte value) { return !std::is_same_v<T, bool> || value <= std::byte{1}; });
}

struct Verdicts {
  int read = 0, refused = 0;

  /// `all` reads a file's tensors. An exception other than a FileError with the path fails the test.
  template <class Read>
  void judge(std::uint64_t seed, const Read& all) {
    try {
      if (!all()) FAIL_CHECK("seed " << seed << ": a value that its type has not");
      ++read;
    } catch (const FileError& error) {
      ++refused;
      if (std::string_view(error.what()).find("FILE") == std::string::npos)
        FAIL_CHECK("seed " << seed << ": " << error.what());
    }
  }
};

TEST_CASE("random changes to a .npy file: an array or an error with the path") {
  const TemporaryFolder folder;
  const Contents contents;
  std::vector<std::string> files;
  const auto add = [&](const auto& tensor) {
    io::save_npy(folder / "x.npy", tensor);
    files.push_back(get(folder / "x.npy"));
  };
  add(contents.f), add(contents.b), add(contents.i), add(contents.h);
  Verdicts verdicts;
  test::for_seeds(
      20'000,
      [&](std::uint64_t seed) {
        Draw draw(seed);
        const auto text = test::changed(draw.one_of(files), draw);
        const std::vector<std::byte> bytes(bytes_of(text).begin(), bytes_of(text).end());  // of its exact size
        verdicts.judge(seed, [&] {
          const auto array = io::detail::parse_npy(bytes, "FILE");
          bool sane = true;
          const auto to = [&]<class T, int Rank>() {
            sane = sane && is_sane(io::detail::to_tensor<T, Rank>(array, "FILE"));
          };
          if (array.dtype == DType::f32 && array.shape.size() == 2) to.template operator()<float, 2>();
          if (array.dtype == DType::boolean && array.shape.size() == 1) to.template operator()<bool, 1>();
          if (array.dtype == DType::i64 && array.shape.size() == 3) to.template operator()<std::int64_t, 3>();
          if (array.dtype == DType::f16 && array.shape.empty()) to.template operator()<half, 0>();
          return sane;
        });
      },
      show);
  CHECK(verdicts.refused > 0);
  CHECK(verdicts.read > 0);
}

#if CHORUS_USE_ZLIB
/// As `numpy.savez_compressed` writes it: takes stored archives, and deflates each file.
std::string deflated(const std::string& name, const std::string& content) {
  std::string packed(content.size() + 1000, '\0');
  z_stream stream{};
  deflateInit2(&stream, Z_DEFAULT_COMPRESSION, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  deflate(&stream, Z_FINISH);
  deflateEnd(&stream);
  packed.resize(stream.total_out);
  const auto number = [](std::uint64_t value, std::size_t width) {
    return std::string(reinterpret_cast<const char*>(&value), width);
  };
  const auto facts = number(0, 2) + number(8, 2) + number(0, 4) + number(io::detail::crc32_of(bytes_of(content)), 4) +
                     number(packed.size(), 4) + number(content.size(), 4) + number(name.size(), 2);
  const auto local = number(0x04034B50u, 4) + number(20, 2) + facts + number(0, 2) + name + packed;
  const auto entry =
      number(0x02014B50u, 4) + number(20, 2) + number(20, 2) + facts + std::string(12, '\0') + number(0, 4) + name;
  return local + entry + number(0x06054B50u, 4) + number(0, 4) + number(1, 2) + number(1, 2) + number(entry.size(), 4) +
         number(local.size(), 4) + number(0, 2);
}
#endif

TEST_CASE("random changes to a .npz file: arrays or an error with the path") {
  const TemporaryFolder folder;
  const Contents contents;
  io::NpzWriter writer;
  writer.add("f", contents.f), writer.add("b", contents.b), writer.add("i", contents.i), writer.add("h", contents.h);
  writer.save(folder / "FILE.npz");
  std::vector<std::string> files = {get(folder / "FILE.npz")};
#if CHORUS_USE_ZLIB
  io::save_npy(folder / "f.npy", contents.f);
  files.push_back(deflated("f.npy", get(folder / "f.npy")));
#endif
  Verdicts verdicts;
  const auto read = [&] {
    const io::NpzReader reader(folder / "FILE.npz");
    bool sane = true;
    for (const auto& name : reader.names()) {
      try {
        sane = sane && is_sane(reader.read<float, 2>(name)) && is_sane(reader.read<float, 2>(name));
      } catch (const FileError& error) {
        if (std::string_view(error.what()).find(", got ") == std::string_view::npos) throw;
        if (name == "b") sane = sane && is_sane(reader.read<bool, 1>(name));
        if (name == "i") sane = sane && is_sane(reader.read<std::int64_t, 3>(name));
        if (name == "h") sane = sane && is_sane(reader.read<half, 0>(name));
      }
    }
    return sane;
  };
  for (const auto& file : files) {
    put(folder / "FILE.npz", file);
    CHECK(read());
  }
  test::for_seeds(
      4000,
      [&](std::uint64_t seed) {
        Draw draw(seed);
        put(folder / "FILE.npz", test::changed(draw.one_of(files), draw));
        verdicts.judge(seed, read);
      },
      show);
  CHECK(verdicts.refused > 0);
  CHECK(verdicts.read > 0);
}

TEST_CASE("random changes to a safetensors file: tensors or an error with the path") {
  const Contents contents;
  const TemporaryFolder folder;
  const std::vector<io::TensorView> tensors = {io::view_of("f", contents.f), io::view_of("b", contents.b),
                                               io::view_of("i", contents.i), io::view_of("h", contents.h)};
  io::write_safetensors(folder / "x", tensors, {{"training/epoch", "3"}});
  const auto file = get(folder / "x");
  Verdicts verdicts;
  test::for_seeds(
      50'000,
      [&](std::uint64_t seed) {
        Draw draw(seed);
        auto text = test::changed(file, draw);
        // Most changes alter the header's length. This sets its length field to match, so that the reader gets past it.
        if (text.size() > 8 && draw.chance(70)) {
          const auto header = std::uint64_t{text.find("}}", 8) == text.npos ? 1 : text.find("}}", 8) + 2 - 8};
          std::memcpy(text.data(), &header, sizeof header);
        }
        const std::vector<std::byte> bytes(bytes_of(text).begin(), bytes_of(text).end());
        verdicts.judge(seed, [&] {
          const io::SafetensorsReader reader(bytes, "FILE");
          bool sane = true;
          for (const auto& entry : reader.entries()) {
            if (entry.name == "f") sane = sane && is_sane(io::read_tensor<float, 2>(reader, "f"));
            if (entry.name == "b") sane = sane && is_sane(io::read_tensor<bool, 1>(reader, "b"));
            if (entry.name == "i") sane = sane && is_sane(io::read_tensor<std::int64_t, 3>(reader, "i"));
            if (entry.name == "h") sane = sane && is_sane(io::read_tensor<half, 0>(reader, "h"));
          }
          return sane;
        });
      },
      show);
  CHECK(verdicts.refused > 0);
  CHECK(verdicts.read > 0);
}

}  // namespace random_files_test
