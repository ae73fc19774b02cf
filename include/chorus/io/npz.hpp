#pragma once
/// NumPy's files of several arrays, `.npz`: zip archives of .npy files.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include <chorus/io/npy.hpp>
#include <chorus/io/zip.hpp>

namespace chorus::io {

namespace detail {

inline std::map<std::string, ZipEntry> npz_directory(const ZipBytes& zip) {
  const auto refuse = [&] {
    fail<FileError>(zip.who(), ": not a .npz file", numpy_hint(zip.part(0, zip.size()), zip.who()));
  };
  auto out = zip_directory(zip, refuse);
  const auto is_array = [](const auto& file) { return file.first.ends_with(".npy"); };
  if (!out.empty() && std::none_of(out.begin(), out.end(), is_array)) refuse();
  return out;
}

}  // namespace detail

/// An open .npz file. Arrays are unpacked on demand.
class NpzReader {
 public:
  /// Throws FileError if the file can't be read or is no archive.
  explicit NpzReader(const std::string& path)
      : bytes_(detail::read_whole(path)), zip_(bytes_, cat("loading ", path)), entries_(detail::npz_directory(zip_)) {}
  NpzReader(const NpzReader&) = delete;
  NpzReader& operator=(const NpzReader&) = delete;

  /// Names of the arrays, in alphabetic order.
  std::vector<std::string> names() const {
    std::vector<std::string> out;
    for (const auto& [name, entry] : entries_)
      if (name.ends_with(".npy")) out.push_back(name.substr(0, name.size() - 4));
    return out;
  }

  /// The array of that name. Throws FileError if it is missing, and as load_npy does.
  template <Scalar T, int Rank>
  Tensor<T, Rank, Cpu> read(const std::string& name) const {
    const auto found = entries_.find(name + ".npy");
    check<FileError>(found != entries_.end(), zip_.who(), ": no array ", Quoted{name}, " among the ", names().size(),
                     " in the file");
    const auto bytes = detail::zip_content(zip_, name, found->second);
    const std::string who = cat(zip_.who(), ": ", Quoted{name});
    return detail::to_tensor<T, Rank>(detail::parse_npy(bytes, who), who);
  }

 private:
  std::vector<std::byte> bytes_;
  detail::ZipBytes zip_;
  std::map<std::string, detail::ZipEntry> entries_;
};

/// Collects arrays, then writes them like `numpy.savez`, uncompressed.
class NpzWriter {
 public:
  /// Throws UsageError for a name that is empty or repeats, for bf16, and if the file would exceed 4 GiB.
  template <Scalar T, int Rank, Device D>
  void add(const std::string& name, const Tensor<T, Rank, D>& tensor) {
    check<UsageError>(!name.empty() && name.size() < 1024 && offsets_.emplace(name, content_.size()).second,
                      "saving a .npz file: the name '", name, "' is empty, too long, or already in use");
    std::string array = detail::npy_header(dtype<T>, tensor.shape(), cat("saving ", name));
    const auto dense = contiguous(tensor);
    const std::size_t begin = array.size();
    array.resize(begin + dense.bytes());
    copy_bytes(Cpu{}, array.data() + begin, dense.device(), dense.data(), dense.bytes());
    check<UsageError>(content_.size() + array.size() < 0xF0000000u, "saving a .npz file: more than 4 GiB");
    const std::string facts = record(array);
    content_ += number(0x04034B50u, 4) + facts + number(name.size() + 4, 2) + number(0, 2) + name + ".npy" + array;
    facts_.emplace(name, facts);
  }

  /// Writes the file, atomically. Throws FileError.
  void save(const std::string& path) const {
    std::string directory;
    for (const auto& [name, offset] : offsets_)
      directory += number(0x02014B50u, 4) + number(20, 2) + facts_.at(name) + number(name.size() + 4, 2) +
                   std::string(12, '\0') + number(offset, 4) + name + ".npy";
    const std::string end = number(0x06054B50u, 4) + number(0, 4) + number(offsets_.size(), 2) +
                            number(offsets_.size(), 2) + number(directory.size(), 4) + number(content_.size(), 4) +
                            number(0, 2);
    AtomicFile file(path);
    file.write(content_);
    file.write(directory);
    file.write(end);
    file.commit();
  }

 private:
  static std::string number(std::uint64_t value, std::size_t width) {
    std::string out(width, '\0');
    std::memcpy(out.data(), &value, width);
    return out;
  }
  // The fields that the directory and an array's own header share: version, flags (names in UTF-8), stored, 1980-01-01,
  // sizes.
  static std::string record(const std::string& array) {
    return number(20, 2) + number(0x800, 2) + number(0, 2) + number(0, 2) + number(0x21, 2) +
           number(detail::crc32_of(std::as_bytes(std::span(array))), 4) + number(array.size(), 4) +
           number(array.size(), 4);
  }

  std::string content_;
  std::map<std::string, std::size_t> offsets_;
  std::map<std::string, std::string> facts_;
};

}  // namespace chorus::io
