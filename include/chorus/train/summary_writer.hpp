#pragma once
/// Curves for TensorBoard: event files, as PyTorch's SummaryWriter writes them.

#include <chorus/core/config.hpp>
#include <chorus/train/log_file.hpp>
#include <cstdint>
#include <string>
#include <string_view>

namespace chorus {

namespace detail {

/// An integer's bytes, the lowest first.
template <class Integer>
std::string little_endian(Integer number) {
  std::string bytes;
  for (std::size_t i = 0; i < sizeof number; ++i) bytes += static_cast<char>(number >> (8 * i));
  return bytes;
}

/// A message of protocol buffers (https://protobuf.dev/programming-guides/encoding): fields, of which each is its
/// number and type, then its value.
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

/// CRC-32C (RFC 3720, B.4), masked as TFRecord files have it, so that a checksum of checksums tells something.
std::uint32_t masked_crc32c(std::string_view bytes);

}  // namespace detail

/// Writes scalars into an event file in the folder `log_dir`, which `tensorboard --logdir` reads. The format: records
/// of a length, its checksum, an `Event` (tensorflow/core/util/event.proto), its checksum.
class SummaryWriter {
 public:
  /// Makes the folder; each writer has a file of its own there. An empty path makes a writer that writes nothing.
  /// Throws FileError, as all calls do.
  explicit SummaryWriter(const std::string& log_dir);

  /// A point of the curve `tag`: "loss/train".
  void add_scalar(std::string_view tag, double value, std::int64_t global_step);
  /// What was added is on disk when this returns.
  void flush() { file_.flush(); }

 private:
  /// TensorBoard looks for "tfevents" in the name, and reads files in the order of their names.
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
