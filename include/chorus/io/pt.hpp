#pragma once
/// Weights that PyTorch's `torch.save(model.state_dict(), path)` wrote. The file's pickle is not run: of its language
/// only what describes tensors is understood, and anything else is refused by name.

#include <chorus/io/load_model.hpp>
#include <chorus/io/npy.hpp>
#include <chorus/io/pickle.hpp>
#include <chorus/io/zip.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io {

/// An open .pt or .pth file: the list of its tensors, and their numbers on demand.
class PtReader {
 public:
  /// Opens and checks the file. `from`: in a checkpoint, the key of the dict with the tensors ("model", "state_dict").
  /// Throws FileError if the file can't be read, is damaged, is not a dict of tensors, has anything but tensors and
  /// plain values in it (a whole module, TorchScript), or was written by PyTorch before 1.6.
  explicit PtReader(const std::string& path, const std::string& from = {})
      : path_(path), bytes_(detail::read_whole(path)), zip_(bytes_, cat("loading ", printable(path, 4096))) {
    read(from);
  }
  PtReader(const PtReader&) = delete;
  PtReader& operator=(const PtReader&) = delete;

  const std::string& path() const { return path_; }
  /// All tensors, in the file's order. Views have the shape of the view.
  std::span<const TensorEntry> entries() const { return entries_; }
  /// Nothing: as in safetensors' files.
  const Metadata& metadata() const { return metadata_; }
  /// The tensor of that name, or nullptr.
  const TensorEntry* find(std::string_view name) const {
    const auto found = by_name_.find(name);
    return found != by_name_.end() ? &entries_[found->second] : nullptr;
  }
  /// Copies a tensor's elements, row-major; `to` must have exactly `entry.bytes`. Throws UsageError if it doesn't, or
  /// if `entry` belongs to another file.
  void read(const TensorEntry& entry, std::span<std::byte> to) const {
    check<UsageError>(find(entry.name) == &entry && to.size() == entry.bytes, zip_.who(), ": tensor ",
                      Quoted{entry.name}, " has ", entry.bytes, " bytes: expected an entry of this file and ",
                      entry.bytes, " bytes, got ", to.size());
    const auto& tensor = tensors_[static_cast<std::size_t>(&entry - entries_.data())];
    const std::size_t size = bits_of(entry.dtype) / 8;
    const std::byte* const from = tensor.data.data();
    std::vector<std::int64_t> at(entry.shape.size());
    std::uint64_t element = tensor.offset;
    for (std::size_t i = 0; i < to.size(); i += size) {
      std::memcpy(to.data() + i, from + element * size, size);
      for (std::size_t axis = at.size(); axis-- > 0;) {
        element += static_cast<std::uint64_t>(tensor.strides[axis]);
        if (++at[axis] < entry.shape[axis]) break;
        element -= static_cast<std::uint64_t>(tensor.strides[axis]) * static_cast<std::uint64_t>(at[axis]);
        at[axis] = 0;
      }
    }
  }

 private:
  struct Data {
    std::span<const std::byte> data;  // of the storage
    std::uint64_t offset = 0;         // in elements, as strides
    std::vector<std::int64_t> strides;
  };

  [[noreturn]] void refuse() const {
    const auto bytes = zip_.part(0, zip_.size());
    const auto what = detail::identify_file(bytes, path_);
    fail<FileError>(zip_.who(), ": not a file of torch.save", what.empty() ? "" : "; ", what);
  }

  void read(const std::string& from) {
    const auto files = detail::zip_directory(zip_, [&] { refuse(); });
    std::string root;
    for (const auto& [name, entry] : files)
      if (name.ends_with("/data.pkl") && name.find('/') == name.size() - 9) root = name.substr(0, name.size() - 8);
    if (root.empty()) refuse();
    const auto content = [&](const std::string& name) {
      const auto file = files.find(root + name);
      const auto who = cat(zip_.who(), ": ", Quoted{root + name});
      check<FileError>(file != files.end(), who, " is missing in the archive");
      check<FileError>(file->second.method == 0 && file->second.size == file->second.packed, who,
                       ": compressed: torch.save stores files as they are");
      const auto bytes = detail::zip_packed(zip_, who, file->second);
      check<FileError>(file->second.crc == 0 || detail::crc32_of(bytes) == file->second.crc, who,
                       ": the checksum is wrong");
      return bytes;
    };
    const auto text = [](std::span<const std::byte> bytes) {
      return std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    };
    for (const auto& [name, entry] : files)
      check<FileError>(!name.starts_with(root + "code/") && name != root + "constants.pkl", zip_.who(),
                       ": a TorchScript program, whose code chorus does not run: write its weights in Python: "
                       "torch.save(torch.jit.load(FILE).state_dict(), FILE)");
    if (files.contains(root + "byteorder"))
      check<FileError>(text(content("byteorder")) == "little", zip_.who(), ": byteorder: expected little, got ",
                       Quoted{text(content("byteorder"))});
    detail::Pickle pickle(text(content("data.pkl")), zip_.who());
    std::map<std::string, std::span<const std::byte>> storages;
    for (auto& [name, tensor] : pickle.tensors(from)) {
      const detail::TensorOfFile who{zip_.who(), name};
      detail::check_tensor_name<FileError>(who, ReaderLimits{}.name_bytes);
      const std::size_t bytes = detail::tensor_bytes<FileError>(tensor.dtype, tensor.shape, who);
      const std::size_t size = bits_of(tensor.dtype) / 8;
      auto known = storages.find(tensor.key);
      if (known == storages.end()) known = storages.emplace(tensor.key, content("data/" + tensor.key)).first;
      const auto data = known->second;
      check<FileError>(tensor.elements <= data.size() / size, who, "its storage of ", tensor.elements, " ",
                       tensor.dtype, " has ", data.size(), " bytes only");
      const std::uint64_t end = end_of(tensor, who);
      check<FileError>(end <= tensor.elements && bytes / size <= tensor.elements, who, "shape ",
                       std::span<const Index>(tensor.shape), " from element ", tensor.offset, " on with strides ",
                       std::span<const Index>(tensor.strides), " does not fit its storage of ", tensor.elements);
      const bool is_new = by_name_.emplace(name, entries_.size()).second;
      check<FileError>(is_new, who, "appears twice");
      entries_.push_back({name, tensor.dtype, tensor.shape, 0, bytes});
      tensors_.push_back({data, tensor.offset, tensor.strides});
    }
  }
  /// One more than the last element that a tensor reads; 0 if it reads none.
  static std::uint64_t end_of(const detail::PickledTensor& tensor, const detail::TensorOfFile& who) {
    std::uint64_t last = tensor.offset;
    bool overflows = false;
    for (std::size_t axis = 0; axis < tensor.shape.size(); ++axis) {
      if (tensor.shape[axis] == 0) return 0;
      std::uint64_t step = 0;
      overflows |= __builtin_mul_overflow(static_cast<std::uint64_t>(tensor.shape[axis] - 1),
                                          static_cast<std::uint64_t>(tensor.strides[axis]), &step);
      overflows |= __builtin_add_overflow(last, step, &last);
    }
    check<FileError>(!overflows && last + 1 != 0, who, "its strides ", std::span<const Index>(tensor.strides),
                     " overflow");
    return last + 1;
  }

  std::string path_;
  std::vector<std::byte> bytes_;
  detail::ZipBytes zip_;
  std::vector<TensorEntry> entries_;
  std::vector<Data> tensors_;  // of each entry
  std::map<std::string, std::size_t, std::less<>> by_name_;
  Metadata metadata_;
};

/// Options of `load_pt`: those of `load`, and where the tensors are.
struct PtOptions {
  /// In a checkpoint, the key of the dict with the tensors: "model", "state_dict".
  std::string from = {};
  bool strict = true;
  Rename rename = {};
  Transposed transposed = {};
};

/// Fills a model, or a policy's net, from a file of `torch.save(model.state_dict(), path)`, as `load` does from a
/// safetensors file: see there, and PtReader for what is refused.
template <class Model>
LoadReport load_pt(Model& model, const std::string& path, const PtOptions& options = {}) {
  return detail::load_from(model, [&] { return PtReader(path, options.from); },
                           {.strict = options.strict, .rename = options.rename, .transposed = options.transposed});
}

}  // namespace chorus::io
