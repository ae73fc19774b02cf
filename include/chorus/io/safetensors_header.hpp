#pragma once
/// Parses the JSON header of a safetensors file. It is stricter than the reference reader: no repeated names, metadata
/// keys or fields, no unknown fields, no control characters in names. The format:
/// https://github.com/huggingface/safetensors#format

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chorus/core/error.hpp>
#include <chorus/io/tensor_entry.hpp>

namespace chorus::io {

struct SafetensorsHeader {
  std::vector<TensorEntry> entries;  ///< in the order of their data
  Metadata metadata;
};

namespace detail {

/// Handles the events of nlohmann's parser. Unlike a parsed document, they show duplicates, and nothing deeper than the
/// format allows is stored. Every unexpected event throws FileError.
class SafetensorsHeaderEvents {
 public:
  using json = nlohmann::json;

  SafetensorsHeaderEvents(std::string_view path, const ReaderLimits& limits) : path_(path), limits_(limits) {}

  SafetensorsHeader take() { return std::move(header_); }

  bool null() {
    if (place_ == Place::top && key_ == metadata_key) return true;
    unexpected("null");
  }
  bool boolean(bool value) { unexpected(value ? "true" : "false"); }
  bool number_integer(std::int64_t value) { unexpected(cat("the number ", value)); }
  bool number_float(double, const std::string& text) { unexpected(cat("the number ", text.substr(0, 40))); }
  bool binary(json::binary_t&) { unexpected("binary data"); }

  bool number_unsigned(std::uint64_t value) {
    if (place_ == Place::shape) {
      check<FileError>(entry_.shape.size() < limits_.rank, who(), "shape has more than ", limits_.rank,
                       " axes, the limit (ReaderLimits::rank)");
      check<FileError>(value <= static_cast<std::uint64_t>(std::numeric_limits<Index>::max()), who(), "size ", value,
                       " in shape is too large");
      entry_.shape.push_back(static_cast<Index>(value));
    } else if (place_ == Place::offsets && offset_count_ < 2) {
      offsets_[offset_count_++] = value;
    } else {
      unexpected(cat("the number ", value));
    }
    return true;
  }

  bool string(std::string& value) {
    if (place_ == Place::metadata) {
      header_.metadata[key_] = std::move(value);
    } else if (place_ == Place::tensor && field_ == Field::dtype) {
      const auto dtype = file_dtype_named(value);
      check<FileError>(dtype.has_value(), who(), "unknown dtype ", Quoted{value});
      entry_.dtype = *dtype;
    } else {
      unexpected(cat("the string ", Quoted{value}));
    }
    return true;
  }

  bool start_object(std::size_t) {
    if (place_ == Place::outside) {
      place_ = Place::top;
    } else if (place_ == Place::top) {
      place_ = key_ == metadata_key ? Place::metadata : Place::tensor;
      entry_ = {key_, {}, {}, 0, 0};
      seen_ = 0;
      offset_count_ = 0;
    } else {
      unexpected("an object");
    }
    return true;
  }

  bool key(std::string& value) {
    if (place_ == Place::tensor) {
      field_ = field_named(value);
      check<FileError>((seen_ & bit(field_)) == 0, who(), "field ", Quoted{value}, " appears twice");
      seen_ |= bit(field_);
      return true;
    }
    key_ = std::move(value);
    if (place_ == Place::metadata) {
      check<FileError>(!header_.metadata.contains(key_), path_, ": metadata key ", Quoted{key_}, " appears twice");
    } else if (key_ == metadata_key) {
      check<FileError>(!std::exchange(has_metadata_, true), path_, ": __metadata__ appears twice");
    } else {
      check_tensor_name<FileError>({path_, key_}, limits_.name_bytes);
    }
    return true;
  }

  bool end_object() {
    if (place_ == Place::tensor) finish_tensor();
    place_ = place_ == Place::top ? Place::outside : Place::top;
    return true;
  }

  bool start_array(std::size_t) {
    if (place_ != Place::tensor || field_ == Field::dtype) unexpected("an array");
    place_ = field_ == Field::shape ? Place::shape : Place::offsets;
    return true;
  }

  bool end_array() {
    check<FileError>(place_ == Place::shape || offset_count_ == 2, who(), "expected two numbers in data_offsets, got ",
                     offset_count_);
    place_ = Place::tensor;
    return true;
  }

  bool parse_error(std::size_t position, const std::string&, const json::exception& error) {
    fail<FileError>(path_, ": the header is not valid JSON at byte ", position,
                    " of it: ", std::string_view(error.what()).substr(0, 240));
  }

 private:
  enum class Place { outside, top, metadata, tensor, shape, offsets };
  enum class Field { dtype, shape, offsets };
  static constexpr std::string_view metadata_key = "__metadata__";

  static unsigned bit(Field field) { return 1u << static_cast<unsigned>(field); }

  Field field_named(std::string_view text) const {
    if (text == "dtype") return Field::dtype;
    if (text == "shape") return Field::shape;
    if (text == "data_offsets") return Field::offsets;
    fail<FileError>(who(), "unknown field ", Quoted{text}, "; expected dtype, shape and data_offsets");
  }

  void finish_tensor() {
    check<FileError>((seen_ & bit(Field::dtype)) != 0, who(), "dtype is missing");
    check<FileError>((seen_ & bit(Field::shape)) != 0, who(), "shape is missing");
    check<FileError>((seen_ & bit(Field::offsets)) != 0, who(), "data_offsets is missing");
    const auto [begin, end] = offsets_;
    check<FileError>(begin <= end, who(), "data_offsets [", begin, ", ", end, "] end before they begin");
    const std::size_t bytes = tensor_bytes<FileError>(entry_.dtype, entry_.shape, who());
    check<FileError>(end - begin == bytes, who(), "shape ", std::span<const Index>(entry_.shape), " of ", entry_.dtype,
                     " takes ", bytes, " bytes, but data_offsets [", begin, ", ", end, "] span ", end - begin);
    check<FileError>(header_.entries.size() < limits_.tensors, path_, ": more than ", limits_.tensors,
                     " tensors, the limit (ReaderLimits::tensors)");
    entry_.begin = static_cast<std::size_t>(begin);
    entry_.bytes = bytes;
    header_.entries.push_back(std::move(entry_));
  }

  TensorOfFile who() const { return {path_, entry_.name}; }

  [[noreturn]] void unexpected(std::string_view got) const {
    switch (place_) {
      case Place::outside:
        fail<FileError>(path_, ": the header must be an object, got ", got);
      case Place::top:
        fail<FileError>(path_, ": ", key_ == metadata_key ? "" : "tensor ", Quoted{key_}, " must be an object, got ",
                        got);
      case Place::metadata:
        fail<FileError>(path_, ": metadata key ", Quoted{key_}, " must have a string, got ", got);
      case Place::tensor:
        if (field_ == Field::dtype) fail<FileError>(who(), "dtype must be a string, got ", got);
        fail<FileError>(who(), field_ == Field::shape ? "shape" : "data_offsets", " must be an array, got ", got);
      case Place::shape:
        fail<FileError>(who(), "expected a 64-bit integer as a size in shape, got ", got);
      case Place::offsets:
        break;
    }
    fail<FileError>(who(), "expected two 64-bit integers in data_offsets, got ", got);
  }

  std::string_view path_;
  const ReaderLimits& limits_;
  SafetensorsHeader header_;
  Place place_ = Place::outside;
  Field field_ = Field::dtype;
  std::string key_;
  TensorEntry entry_;
  std::uint64_t offsets_[2] = {};
  std::size_t offset_count_ = 0;
  unsigned seen_ = 0;
  bool has_metadata_ = false;
};

/// Checks that the tensors, sorted here by offset, cover the data without gaps or overlaps, and that no name repeats.
inline void check_layout(std::string_view path, std::vector<TensorEntry>& entries, std::uint64_t data_bytes) {
  std::sort(entries.begin(), entries.end(), [](const TensorEntry& a, const TensorEntry& b) {
    return std::pair(a.begin, a.bytes) < std::pair(b.begin, b.bytes);
  });
  std::size_t end = 0;
  for (const TensorEntry& entry : entries) {
    check<FileError>(entry.begin == end, TensorOfFile{path, entry.name}, "data begin at ", entry.begin, ", ",
                     entry.begin < end ? "inside the previous tensor, which ends at " : "after a gap that begins at ",
                     end);
    end += entry.bytes;
  }
  check<FileError>(end == data_bytes, path, ": the tensors have ", end, " bytes, but after the header the file has ",
                   data_bytes);

  std::vector<std::string_view> names;
  for (const TensorEntry& entry : entries) names.push_back(entry.name);
  check_names_differ<FileError>(path, std::move(names));
}

}  // namespace detail

/// Parses and checks a header. `data_bytes`: the number of bytes after it. `path`: the beginning of messages. Throws
/// FileError.
inline SafetensorsHeader parse_safetensors_header(std::string_view text, std::uint64_t data_bytes,
                                                  std::string_view path, const ReaderLimits& limits) {
  // The parser would skip a byte order mark, and treat a zero byte as the end of its input.
  check<FileError>(text.find('\0') == text.npos, path, ": the header is not valid JSON: it has a zero byte");
  check<FileError>(!text.starts_with("\xEF\xBB\xBF"), path, ": the header is not valid JSON: it has a byte order mark");
  detail::SafetensorsHeaderEvents events(path, limits);
  nlohmann::json::sax_parse(text.begin(), text.end(), &events);
  SafetensorsHeader header = events.take();
  detail::check_layout(path, header.entries, data_bytes);
  return header;
}

}  // namespace chorus::io
