#pragma once
/// NumPy's files of one array, `.npy`, versions 1 to 3 of the format:
/// https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html

#include <algorithm>
#include <array>
#include <bit>
#include <chorus/core/printable.hpp>
#include <chorus/core/atomic_file.hpp>
#include <chorus/core/descriptor.hpp>
#include <chorus/io/foreign_file.hpp>
#include <chorus/kernels/contiguous.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::io {

namespace detail {

static_assert(std::endian::native == std::endian::little, "npy: expected a little-endian machine");

/// NumPy's name of a dtype, without the byte order; empty for bf16, which NumPy does not have.
constexpr std::string_view numpy_name(DType type) {
  constexpr std::string_view names[] = {"b1", "u1", "i1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "", "f4", "f8"};
  return names[static_cast<std::size_t>(type)];
}

/// An array in a file's bytes.
struct NpyArray {
  DType dtype{};
  bool fortran_order = false;
  std::vector<Index> shape;
  std::span<const std::byte> data;
};

/// Reads the dictionary of a header: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }.
class NpyHeader {
 public:
  NpyHeader(std::string_view text, std::string_view who) : text_(text), who_(who) {}

  NpyArray parse() {
    NpyArray out;
    bool seen[3] = {};
    expect('{');
    while (!take('}')) {
      const std::string_view key = quoted();
      const std::size_t which = key == "descr" ? 0 : key == "fortran_order" ? 1 : key == "shape" ? 2 : 3;
      check<FileError>(which < 3 && !seen[which], who_, ": the header has the key ", Quoted{key}, " ",
                       which < 3 ? "twice" : "which is unknown");
      seen[which] = true;
      expect(':');
      if (which == 0) out.dtype = dtype();
      if (which == 1) out.fortran_order = boolean();
      if (which == 2) out.shape = sizes();
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    check<FileError>(seen[0] && seen[1] && seen[2], who_, ": the header lacks 'descr', 'fortran_order' or 'shape'");
    skip();
    check<FileError>(at_ == text_.size(), who_, ": the header has data after its dictionary");
    return out;
  }

 private:
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool take(char c) {
    skip();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) { check<FileError>(take(c), who_, ": byte ", at_, " of the header: expected '", c, "'"); }
  std::string_view quoted() {
    skip();
    const char mark = at_ < text_.size() ? text_[at_] : '\0';
    check<FileError>(mark == '\'' || mark == '"', who_, ": byte ", at_, " of the header: expected a string in quotes");
    const auto end = text_.find(mark, ++at_);
    check<FileError>(end != std::string_view::npos, who_, ": the header ends inside a string");
    const auto out = text_.substr(at_, end - at_);
    at_ = end + 1;
    return out;
  }
  DType dtype() {
    check<FileError>(!take('['), who_, ": structured arrays are not supported");
    const std::string_view name = quoted();
    for (std::size_t i = 0; i <= static_cast<std::size_t>(DType::f64); ++i) {
      const auto type = static_cast<DType>(i);
      const auto known = numpy_name(type);
      if (known.empty() || name.size() != 3 || name.substr(1) != known) continue;
      const bool one_byte = size_of(type) == 1;
      check<FileError>(name[0] != '>' || one_byte, who_, ": big-endian numbers (", Quoted{name}, ") are not supported");
      if (name[0] == '<' || name[0] == '=' || (one_byte && (name[0] == '|' || name[0] == '>'))) return type;
    }
    fail<FileError>(who_, ": numbers of type ", Quoted{name}, " are not supported",
                    name.ends_with('O') ? ": these are Python objects in a pickle, which can run code; in Python, "
                                          "astype(\"float32\") makes numbers of them"
                                        : "");
  }
  bool boolean() {
    skip();
    for (const bool value : {true, false}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_, word.size()) != word) continue;
      at_ += word.size();
      return value;
    }
    fail<FileError>(who_, ": expected True or False for 'fortran_order'");
  }
  std::vector<Index> sizes() {
    std::vector<Index> out;
    expect('(');
    while (!take(')')) {
      skip();
      Index size = 0;
      std::size_t digits = 0;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_, ++digits) {
        check<FileError>(digits < 18, who_, ": a size in the shape is too large");
        size = 10 * size + (text_[at_] - '0');
      }
      check<FileError>(digits > 0, who_, ": byte ", at_, " of the header: expected a size");
      check<FileError>(out.size() < 8, who_, ": the shape has more than 8 axes");
      out.push_back(size);
      if (!take(',')) {
        expect(')');
        check<FileError>(out.size() > 1, who_, ": '(", out[0], ")' is not a tuple");
        break;
      }
    }
    return out;
  }

  std::string_view text_, who_;
  std::size_t at_ = 0;
};

/// Parses the bytes of a .npy file. Throws FileError if they are malformed.
inline NpyArray parse_npy(std::span<const std::byte> bytes, std::string_view who) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (!text.starts_with("\x93NUMPY") || text.size() < 10)
    fail<FileError>(who, ": not a .npy file", numpy_hint(bytes, who));
  const int version = text[6];
  check<FileError>(version >= 1 && version <= 3 && text[7] == 0, who, ": version ", version, ".", int{text[7]},
                   " of the format is not supported");
  const std::size_t prefix = version == 1 ? 10 : 12;
  std::uint32_t length = 0;
  check<FileError>(text.size() >= prefix, who, ": the file ends inside its header");
  std::memcpy(&length, bytes.data() + 8, prefix - 8);
  check<FileError>(length <= 65535 && length <= text.size() - prefix, who, ": a header of ", length,
                   " bytes in a file of ", text.size());
  NpyArray out = NpyHeader(text.substr(prefix, length), who).parse();
  out.data = bytes.subspan(prefix + length);
  std::uint64_t expected = size_of(out.dtype);
  bool empty = false;
  for (const Index size : out.shape) {
    empty = empty || size == 0;
    const auto factor = static_cast<std::uint64_t>(std::max(size, Index{1}));
    check<FileError>(expected <= (std::uint64_t{1} << 62) / factor, who, ": shape ", std::span<const Index>(out.shape),
                     " is too large");
    expected *= factor;
  }
  if (empty) expected = 0;
  check<FileError>(expected == out.data.size(), who, ": shape ", std::span<const Index>(out.shape), " of ", out.dtype,
                   " takes ", expected, " bytes, but the file has ", out.data.size());
  return out;
}

/// The array as a Tensor; throws FileError if its dtype or number of axes differs.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> to_tensor(const NpyArray& array, std::string_view who) {
  check<FileError>(array.dtype == dtype<T> && array.shape.size() == static_cast<std::size_t>(Rank), who, ": expected ",
                   dtype<T>, " with ", Rank, " axes, got ", array.dtype, " ", std::span<const Index>(array.shape));
  const auto is_odd = [](std::byte value) { return value > std::byte{1}; };
  check<FileError>(array.dtype != DType::boolean || std::none_of(array.data.begin(), array.data.end(), is_odd), who,
                   ": a BOOL is not 0 or 1");
  Shape<Rank> shape{}, backwards{};
  for (std::size_t i = 0; i < shape.size(); ++i) {
    shape[i] = array.shape[array.fortran_order ? shape.size() - 1 - i : i];
    backwards[i] = static_cast<Index>(shape.size() - 1 - i);
  }
  auto out = Tensor<T, Rank, Cpu>::empty(shape);
  if (!array.data.empty()) std::memcpy(static_cast<void*>(out.data()), array.data.data(), array.data.size());
  return array.fortran_order ? contiguous(out.permute(backwards)) : out;
}

/// All bytes before an array's numbers.
inline std::string npy_header(DType type, std::span<const Index> shape, std::string_view who) {
  check<UsageError>(!numpy_name(type).empty(), who, ": NumPy has no ", type, "; convert to another dtype first");
  std::string text =
      cat("{'descr': '", size_of(type) == 1 ? "|" : "<", numpy_name(type), "', 'fortran_order': False, 'shape': (");
  for (std::size_t i = 0; i < shape.size(); ++i) text += cat(i == 0 ? "" : " ", shape[i], ",");
  if (shape.size() > 1) text.pop_back();
  text += "), }";
  text.append(63 - (10 + text.size()) % 64, ' ');
  text += '\n';
  const auto length = static_cast<std::uint16_t>(text.size());
  std::string out = "\x93NUMPY";
  out += {'\x01', '\x00', static_cast<char>(length & 0xFF), static_cast<char>(length >> 8)};
  return out + text;
}

/// A regular file's bytes. Throws FileError.
inline std::vector<std::byte> read_whole(const std::string& path) {
  const std::string who = cat("loading ", path);
  const RegularFile file(path, who);
  std::vector<std::byte> out(static_cast<std::size_t>(file.size()));
  file.read(0, out, who, ": reading");
  return out;
}

}  // namespace detail

/// Reads an array of `numpy.save`, in either memory order. Throws FileError if the file is damaged, holds values that
/// tensors cannot hold (texts, objects, complex or big-endian numbers), or has another dtype or number of axes.
template <Scalar T, int Rank>
Tensor<T, Rank, Cpu> load_npy(const std::string& path) {
  const auto bytes = detail::read_whole(path);
  const std::string who = cat("loading ", path);
  return detail::to_tensor<T, Rank>(detail::parse_npy(bytes, who), who);
}

/// Writes an array for `numpy.load`, atomically. Throws FileError, and UsageError for bf16, which NumPy does not have.
template <Scalar T, int Rank, Device D>
void save_npy(const std::string& path, const Tensor<T, Rank, D>& tensor) {
  const auto header = detail::npy_header(dtype<T>, tensor.shape(), cat("saving ", path));
  const auto dense = contiguous(tensor);
  std::vector<std::byte> numbers(dense.bytes());
  copy_bytes(Cpu{}, numbers.data(), dense.device(), dense.data(), numbers.size());
  AtomicFile file(path);
  file.write(header);
  file.write(numbers);
  file.commit();
}

}  // namespace chorus::io
