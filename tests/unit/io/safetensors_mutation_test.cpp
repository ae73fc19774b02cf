/// Damaged files: truncated at every byte, or with any one byte changed. The reader refuses each, or returns a list of
/// tensors that obeys the rules of the format.

#include <catch.hpp>

#include <cstddef>
#include <random>
#include <string>
#include <string_view>

#include <chorus/io/safetensors_reader.hpp>

#include "files.hpp"

namespace safetensors_mutation_test {

using namespace chorus;
using namespace chorus_test;
using io::SafetensorsReader;

const std::string original = safetensors_file(
    R"({"__metadata__":{"op":"add"},"a.w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"I64","shape":[],"data_offsets":[24,32]},"c":{"dtype":"BOOL","shape":[3,0],"data_offsets":[32,32]},)"
    R"("d":{"dtype":"U8","shape":[4],"data_offsets":[32,36]}}      )",
    36);

/// Checks an accepted file against the rules of the format, independently; returns "" or the broken rule.
std::string broken_promise(const SafetensorsReader& reader, std::size_t file_bytes) {
  std::size_t end = 0;
  for (const io::TensorEntry& entry : reader.entries()) {
    std::size_t bits = io::bits_of(entry.dtype);
    for (const Index size : entry.shape) {
      if (size < 0 || size > 1'000'000) return "size in shape";
      bits *= static_cast<std::size_t>(size);
    }
    if (bits != entry.bytes * 8) return "bytes of a tensor";
    if (entry.begin != end) return "hole or overlap";
    end += entry.bytes;
    if (reader.find(entry.name) != &entry) return "name";
    for (const char c : entry.name) {
      if (static_cast<unsigned char>(c) < 0x20) return "control character";
    }
    std::string data(entry.bytes, '\0');
    reader.read(entry, std::as_writable_bytes(std::span(data)));
  }
  return end <= file_bytes - 8 ? "" : "size of the file";
}

struct Verdicts {
  int accepted = 0, refused = 0;
  std::string wrong;

  /// An exception other than FileError fails the test.
  void judge(const std::string& file) {
    // In a block of its exact size, so that a sanitizer detects reads out of bounds.
    const std::vector<std::byte> memory(bytes_of(file).begin(), bytes_of(file).end());
    try {
      const SafetensorsReader reader(memory, "FILE");
      ++accepted;
      if (const std::string broken = broken_promise(reader, file.size()); !broken.empty()) wrong = broken + ": " + file;
    } catch (const FileError& error) {
      ++refused;
      if (!std::string_view(error.what()).starts_with("loading FILE: ")) wrong = error.what();
    }
  }
};

TEST_CASE("every proper prefix of a file is refused") {
  Verdicts verdicts;
  for (std::size_t size = 0; size < original.size(); ++size) verdicts.judge(original.substr(0, size));
  CHECK(verdicts.accepted == 0);
  verdicts.judge(original);
  CHECK(verdicts.accepted == 1);
  verdicts.judge(original + '\0');
  verdicts.judge(original + original);
  CHECK(verdicts.accepted == 1);
  CHECK(verdicts.wrong == "");
}

TEST_CASE("a file with any one byte changed is refused or keeps every promise") {
  Verdicts verdicts;
  for (std::size_t at = 0; at < original.size() - 36; ++at) {
    std::string file = original;
    for (int change = 1; change < 256; ++change) {
      file[at] = static_cast<char>(static_cast<unsigned char>(original[at]) ^ change);
      verdicts.judge(file);
    }
  }
  CHECK(verdicts.wrong == "");
  // Names, metadata and spaces can change to something valid; little else can.
  CHECK(verdicts.refused > 50'000);
  CHECK(verdicts.accepted > 100);
}

TEST_CASE("files with bytes deleted, doubled, swapped or spliced are refused or keep every promise") {
  std::mt19937 random(11);
  const auto below = [&](std::size_t bound) { return static_cast<std::size_t>(random()) % bound; };
  constexpr std::string_view words[] = {"{",
                                        "}",
                                        "[",
                                        "]",
                                        ",",
                                        ":",
                                        "\"",
                                        "0",
                                        "-1",
                                        "1e9",
                                        "null",
                                        "{}",
                                        "[]",
                                        "9223372036854775807",
                                        "18446744073709551615",
                                        "\"dtype\"",
                                        "\"F64\"",
                                        "\\u0000",
                                        "\"shape\":",
                                        "\"__metadata__\""};
  Verdicts verdicts;
  for (int repeat = 0; repeat < 20'000; ++repeat) {
    std::string header = original.substr(8, original.size() - 36 - 8);
    for (std::size_t edits = 1 + below(3); edits > 0; --edits) {
      const std::size_t from = below(header.size()), count = below(std::min<std::size_t>(header.size() - from, 30));
      const std::string piece = header.substr(from, count);
      switch (below(4)) {
        case 0:
          header.erase(from, count);
          break;
        case 1:
          header.insert(below(header.size()), piece);
          break;
        case 2:
          header.replace(from, count, words[below(std::size(words))]);
          break;
        default:
          header.insert(from, words[below(std::size(words))]);
      }
      if (header.empty()) header = " ";
    }
    verdicts.judge(safetensors_file(header, 36));
  }
  CHECK(verdicts.wrong == "");
  CHECK(verdicts.refused > 10'000);
}

}  // namespace safetensors_mutation_test
