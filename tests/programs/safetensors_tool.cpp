/// The C++ side of tests/python/safetensors_check.py.
///   safetensors_tool verdicts         reads files from standard input, each after its size in 8 bytes; prints a line
///   for each safetensors_tool rewrite IN OUT   reads a file and writes all that it holds to another

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>

namespace {

using namespace chorus;

std::vector<std::byte> load(const io::SafetensorsReader& file, const io::TensorEntry& entry) {
  std::vector<std::byte> data(entry.bytes);
  file.read(entry, data);
  return data;
}

std::string hex(std::span<const std::byte> data) {
  std::string out;
  for (const std::byte byte : data) {
    (out += "0123456789abcdef"[std::to_integer<int>(byte) >> 4]) += "0123456789abcdef"[std::to_integer<int>(byte) & 15];
  }
  return out;
}

std::string verdict(std::span<const std::byte> memory) {
  try {
    const io::SafetensorsReader file(memory, "FILE");
    std::string out = "ok";
    for (const io::TensorEntry& entry : file.entries()) {
      out += cat(' ', hex(std::as_bytes(std::span(entry.name))), ':', entry.dtype, ':',
                 std::span<const Index>(entry.shape), ':', hex(load(file, entry)));
    }
    return out;
  } catch (const FileError& error) {
    std::string out = cat("refused ", error.what());
    for (char& c : out) c = c == '\n' ? ' ' : c;
    return out;
  }
}

void verdicts() {
  std::uint64_t size = 0;
  std::vector<std::byte> memory;
  while (std::fread(&size, sizeof size, 1, stdin) == 1) {
    memory.resize(size);
    check<UsageError>(std::fread(memory.data(), 1, size, stdin) == size, "verdicts: standard input ends in a file");
    std::puts(verdict(memory).c_str());
  }
}

void rewrite(const std::string& from, const std::string& to) {
  const io::SafetensorsReader file(from);
  std::vector<std::vector<std::byte>> data;
  std::vector<io::TensorView> tensors;
  for (const io::TensorEntry& entry : file.entries()) {
    data.push_back(load(file, entry));
    tensors.push_back({entry.name, entry.dtype, entry.shape, data.back()});
  }
  io::write_safetensors(to, tensors, file.metadata());
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view mode = argc > 1 ? argv[1] : "";
  try {
    if (mode == "verdicts" && argc == 2) {
      verdicts();
    } else if (mode == "rewrite" && argc == 4) {
      rewrite(argv[2], argv[3]);
    } else {
      fail<UsageError>("usage: safetensors_tool verdicts | safetensors_tool rewrite IN OUT");
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
