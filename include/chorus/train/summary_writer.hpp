#pragma once
/// Curves for TensorBoard: event files, as PyTorch's SummaryWriter writes them.

#include <unistd.h>

#include <atomic>
#include <bit>
#include <chorus/train/log_file.hpp>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

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
  ProtoMessage& varint(int field, std::uint64_t number) {
    begin_field(field, 0);
    append_varint(number);
    return *this;
  }
  ProtoMessage& number(int field, double value) {
    begin_field(field, 1);
    bytes_ += little_endian(std::bit_cast<std::uint64_t>(value));
    return *this;
  }
  ProtoMessage& number(int field, float value) {
    begin_field(field, 5);
    bytes_ += little_endian(std::bit_cast<std::uint32_t>(value));
    return *this;
  }
  ProtoMessage& text(int field, std::string_view text) {
    begin_field(field, 2);
    append_varint(text.size());
    bytes_ += text;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  void begin_field(int field, unsigned type) { append_varint(static_cast<std::uint64_t>(field) << 3 | type); }
  void append_varint(std::uint64_t number) {
    for (; number >= 128; number >>= 7) bytes_ += static_cast<char>(number | 128);
    bytes_ += static_cast<char>(number);
  }

  std::string bytes_;
};

/// CRC-32C (RFC 3720, B.4), masked as TFRecord files have it, so that a checksum of checksums tells something.
inline std::uint32_t masked_crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace detail

/// Writes scalars into an event file in the folder `log_dir`, which `tensorboard --logdir` reads. The format: records
/// of a length, its checksum, an `Event` (tensorflow/core/util/event.proto), its checksum.
class SummaryWriter {
 public:
  /// Makes the folder; each writer has a file of its own there. An empty path makes a writer that writes nothing.
  /// Throws FileError, as all calls do.
  explicit SummaryWriter(const std::string& log_dir) : file_("SummaryWriter", path_in(log_dir)) {
    if (file_) write(detail::ProtoMessage().number(1, now()).text(3, "brain.Event:2"));
  }

  /// A point of the curve `tag`: "loss/train".
  void add_scalar(std::string_view tag, double value, std::int64_t global_step) {
    if (!file_) return;
    const auto point = detail::ProtoMessage().text(1, tag).number(2, static_cast<float>(value));
    write(detail::ProtoMessage()
              .number(1, now())
              .varint(2, static_cast<std::uint64_t>(global_step))
              .text(5, detail::ProtoMessage().text(1, point.bytes()).bytes()));
  }
  /// What was added is on disk when this returns.
  void flush() { file_.flush(); }

 private:
  /// TensorBoard looks for "tfevents" in the name, and reads files in the order of their names.
  static std::string path_in(const std::string& log_dir) {
    if (log_dir.empty()) return {};
    std::error_code error;
    std::filesystem::create_directories(log_dir, error);
    check<FileError>(!error, "SummaryWriter: cannot make the folder '", log_dir, "': ", error.message());
    char host[256] = "host";
    gethostname(host, sizeof host - 1);
    static std::atomic<int> files{0};
    return cat(log_dir, "/events.out.tfevents.", static_cast<std::int64_t>(now()), ".", host, ".", getpid(), ".",
               files++);
  }
  /// Seconds since 1970.
  static double now() {
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  }

  void write(const detail::ProtoMessage& event) {
    const auto length = detail::little_endian(static_cast<std::uint64_t>(event.bytes().size()));
    file_.write(length + detail::little_endian(detail::masked_crc32c(length)) + event.bytes() +
                detail::little_endian(detail::masked_crc32c(event.bytes())));
  }

  detail::LogFile file_;
};

}  // namespace chorus
