#pragma once
/// Curves for TensorBoard: event files, as in PyTorch's SummaryWriter.

#include <chorus/core/config.hpp>
#include <chorus/train/log_file.hpp>
#include <cstdint>
#include <string>
#include <string_view>

namespace chorus {

namespace detail {

/// An integer's bytes, lowest first.
template <class Integer>
std::string little_endian(Integer number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof number; ++i) bytes += static_cast<char>(number >> (8 * i));
  return bytes;
}

/// A protocol buffers message (https://protobuf.dev/programming-guides/encoding): each field is its number and type,
/// then its value.
class ProtoMessage {
 public:
  ProtoMessage& varint(int field, std::uint64_t number);
  ProtoMessage& number(int field, double value);
  ProtoMessage& number(int field, float value);
  ProtoMessage& text(int field, std::string_view text);
  const std::string& bytes() const { return bytes_; }

 private:
  void begin_field(int field, unsigned type) { append_varint(static_cast<std::uint64_t>(field) << 3 | type); }
  void append_varint(std::uint64_t number);

  std::string bytes_;
};

/// CRC-32C (RFC 3720, B.4), masked as in TFRecord files, where checksums may cover other checksums.
std::uint32_t masked_crc32c(std::string_view bytes);

}  // namespace detail

/// Writes scalars to an event file in the folder `log_dir`, which `tensorboard --logdir` reads. Format: records of a
/// length, its checksum, an `Event` (tensorflow/core/util/event.proto), its checksum.
class SummaryWriter {
 public:
  /// Makes the folder and adds a file for this writer. An empty path gives a writer that writes nothing. Throws
  /// FileError, as do all calls.
  explicit SummaryWriter(const std::string& log_dir);

  /// Adds a point to the curve `tag`, such as "loss/train".
  void add_scalar(std::string_view tag, double value, std::int64_t global_step);
  /// Writes all added points to disk.
  void flush() { file_.flush(); }

 private:
  /// TensorBoard looks for "tfevents" in the name and reads files in name order.
  static std::string path_in(const std::string& log_dir);
  /// Seconds since 1970.
  static double now();

  void write(const detail::ProtoMessage& event);

  detail::LogFile file_;
};

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/train/summary_writer_impl.hpp>
#endif
