#pragma once
/// Reads safetensors files. A file is checked completely before a tensor is read. It can't make the program run code,
/// allocate more data than the file's size, or read outside of the file. Values are not checked: NaN and infinity are
/// kept.

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/core/error.hpp>
#include <chorus/core/descriptor.hpp>
#include <chorus/io/foreign_file.hpp>
#include <chorus/io/safetensors_header.hpp>
#include <chorus/io/tensor_entry.hpp>

namespace chorus::io {

static_assert(std::endian::native == std::endian::little, "safetensors: expected a little-endian machine");

/// An open safetensors file: the list of its tensors, and their bytes on demand. Several threads may read it. If
/// `write_safetensors` replaces an open file, the old content stays readable.
class SafetensorsReader {
 public:
  /// Opens and checks the file. Throws FileError, with the path and the tensor's name, if it is missing, can't be read,
  /// breaks a rule of the format, or is above a limit.
  explicit SafetensorsReader(const std::string& path, const ReaderLimits& limits = {})
      : path_(path), loading_(cat("loading ", printable(path, 4096))), file_(path, loading_), size_(file_.size()) {
    read_header(limits);
  }

  /// Reads a file from memory, which must outlive the reader. `name` replaces the path in messages.
  explicit SafetensorsReader(std::span<const std::byte> memory, const std::string& name,
                             const ReaderLimits& limits = {})
      : path_(name), loading_(cat("loading ", printable(name, 4096))), memory_(memory), size_(memory.size()) {
    read_header(limits);
  }

  const std::string& path() const { return path_; }

  /// All tensors, in the order of their data in the file.
  std::span<const TensorEntry> entries() const { return header_.entries; }

  const Metadata& metadata() const { return header_.metadata; }

  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto at =
        std::lower_bound(by_name_.begin(), by_name_.end(), name,
                         [](const TensorEntry* entry, std::string_view text) { return entry->name < text; });
    return at != by_name_.end() && (*at)->name == name ? *at : nullptr;
  }

  /// The tensor of that name; throws FileError if there is none.
  const TensorEntry& at(std::string_view name) const {
    const TensorEntry* entry = find(name);
    check<FileError>(entry != nullptr, loading_, ": no tensor ", Quoted{name}, " among the ", entries().size(),
                     " in the file");
    return *entry;
  }

  /// Copies a tensor's bytes; `to` must have exactly `entry.bytes`. Throws UsageError if it doesn't, or if `entry`
  /// belongs to another file, and FileError if the file can't be read or has been truncated since.
  void read(const TensorEntry& entry, std::span<std::byte> to) const {
    check<UsageError>(to.size() == entry.bytes, loading_, ": tensor ", Quoted{entry.name}, " has ", entry.bytes,
                      " bytes, but the destination has ", to.size());
    read(entry, to, 0);
  }
  /// Copies a tensor's bytes from byte `begin` on, until `to` is full. Throws UsageError if the tensor has fewer.
  void read(const TensorEntry& entry, std::span<std::byte> to, std::uint64_t begin) const {
    check<UsageError>(begin <= entry.bytes && to.size() <= entry.bytes - begin, loading_, ": tensor ",
                      Quoted{entry.name}, " has ", entry.bytes, " bytes, expected a range within them, got ", to.size(),
                      " from ", begin, " on");
    check<UsageError>(entry.begin <= size_ - data_begin_ && entry.bytes <= size_ - data_begin_ - entry.begin, loading_,
                      ": tensor ", Quoted{entry.name}, " is not of this file");
    read_at(data_begin_ + entry.begin + begin, to, &entry);
  }

  /// The data of all tensors, which are contiguous: their number of bytes, and the bytes from `begin` on. Throws
  /// UsageError beyond their end, and FileError like `read`.
  std::uint64_t data_bytes() const { return size_ - data_begin_; }
  void read_data(std::uint64_t begin, std::span<std::byte> to) const {
    check<UsageError>(begin <= data_bytes() && to.size() <= data_bytes() - begin, loading_, ": the data have ",
                      data_bytes(), " bytes, expected a range within them, got ", to.size(), " from ", begin, " on");
    read_at(data_begin_ + begin, to, nullptr);
  }

 private:
  void read_header(const ReaderLimits& limits) {
    std::array<std::byte, 8> prefix{};
    check<FileError>(size_ >= prefix.size(), loading_, ": not a safetensors file: ", size_,
                     " bytes are too few for the 8-byte size of the header");
    read_at(0, prefix, nullptr);
    const auto length = std::bit_cast<std::uint64_t>(prefix);
    const bool none = length == 0 && size_ > prefix.size();
    const bool fits = !none && length <= format_header_bytes && length <= size_ - prefix.size();
    const auto other = fits ? "" : other_format();
    check<FileError>(other.empty(), loading_, ": not a safetensors file; ", other);
    check<FileError>(length <= format_header_bytes, loading_, ": not a safetensors file: a header of ", length,
                     " bytes; the format allows ", format_header_bytes);
    check<FileError>(length <= limits.header_bytes, loading_, ": a header of ", length, " bytes; the limit is ",
                     limits.header_bytes, " (ReaderLimits::header_bytes)");
    check<FileError>(length <= size_ - prefix.size(), loading_, ": cut short: expected a header of ", length,
                     " bytes, but the file has ", size_, " in all");
    data_begin_ = prefix.size() + length;

    std::string text(static_cast<std::size_t>(length), '\0');
    read_at(prefix.size(), std::as_writable_bytes(std::span(text)), nullptr);
    header_ = parse_safetensors_header(text, size_ - data_begin_, loading_, limits);

    by_name_.reserve(header_.entries.size());
    for (const TensorEntry& entry : header_.entries) by_name_.push_back(&entry);
    std::sort(by_name_.begin(), by_name_.end(),
              [](const TensorEntry* a, const TensorEntry* b) { return a->name < b->name; });
  }

  /// The file's actual format if it is not a safetensors file, if known.
  [[gnu::cold]] std::string other_format() const {
    std::vector<std::byte> begin(static_cast<std::size_t>(std::min<std::uint64_t>(size_, detail::foreign_bytes)));
    read_at(0, begin, nullptr);
    return detail::identify_file(begin, path_);
  }

  void read_at(std::uint64_t offset, std::span<std::byte> to, const TensorEntry* tensor) const {
    if (!file_.is_open()) {
      if (!to.empty()) std::memcpy(to.data(), memory_.data() + offset, to.size());
      return;
    }
    const auto what = tensor == nullptr ? "the header" : cat("tensor ", Quoted{tensor->name});
    file_.read(offset, to, loading_, ": reading ", what);
  }

  std::string path_, loading_;
  RegularFile file_;
  std::span<const std::byte> memory_;
  std::uint64_t size_ = 0;
  std::uint64_t data_begin_ = 0;
  SafetensorsHeader header_;
  std::vector<const TensorEntry*> by_name_;
};

namespace detail {

/// Throws FileError if bytes to be read as bools are neither 0 nor 1: other values in a bool are undefined behaviour.
void check_bools(const auto& file, const TensorEntry& entry, std::span<const std::byte> bytes) {
  const auto is_odd = [](std::byte value) { return value > std::byte{1}; };
  check<FileError>(entry.dtype != FileDType::boolean || std::none_of(bytes.begin(), bytes.end(), is_odd), "loading ",
                   file.path(), ": tensor ", Quoted{entry.name}, ": a BOOL is not 0 or 1");
}

}  // namespace detail

}  // namespace chorus::io
