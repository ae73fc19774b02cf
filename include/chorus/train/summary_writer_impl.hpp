#pragma once
/// Writes TensorBoard's event files.

#include <unistd.h>

#include <atomic>
#include <bit>
#include <chorus/train/log_file.hpp>
#include <chorus/train/summary_writer.hpp>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>

namespace chorus::detail {

CHORUS_INLINE ProtoMessage& ProtoMessage::varint(int field, std::uint64_t number) {
  begin_field(field, 0);
  append_varint(number);
  return *this;
}

CHORUS_INLINE ProtoMessage& ProtoMessage::number(int field, double value) {
  begin_field(field, 1);
  bytes_ += little_endian(std::bit_cast<std::uint64_t>(value));
  return *this;
}

CHORUS_INLINE ProtoMessage& ProtoMessage::number(int field, float value) {
  begin_field(field, 5);
  bytes_ += little_endian(std::bit_cast<std::uint32_t>(value));
  return *this;
}

CHORUS_INLINE ProtoMessage& ProtoMessage::text(int field, std::string_view text) {
  begin_field(field, 2);
  append_varint(text.size());
  bytes_ += text;
  return *this;
}

CHORUS_INLINE void ProtoMessage::append_varint(std::uint64_t number) {
  for (; number >= 128; number >>= 7) bytes_ += static_cast<char>(number | 128);
  bytes_ += static_cast<char>(number);
}

CHORUS_INLINE std::uint32_t masked_crc32c(std::string_view bytes) {
  std::uint32_t crc = ~0u;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) crc = crc >> 1 ^ (crc & 1 ? 0x82f63b78u : 0);
  }
  crc = ~crc;
  return (crc >> 15 | crc << 17) + 0xa282ead8u;
}

}  // namespace chorus::detail

namespace chorus {

CHORUS_INLINE SummaryWriter::SummaryWriter(const std::string& log_dir) : file_("SummaryWriter", path_in(log_dir)) {
  if (file_) write(detail::ProtoMessage().number(1, now()).text(3, "brain.Event:2"));
}

CHORUS_INLINE void SummaryWriter::add_scalar(std::string_view tag, double value, std::int64_t global_step) {
  if (!file_) return;
  const auto point = detail::ProtoMessage().text(1, tag).number(2, static_cast<float>(value));
  write(detail::ProtoMessage()
            .number(1, now())
            .varint(2, static_cast<std::uint64_t>(global_step))
            .text(5, detail::ProtoMessage().text(1, point.bytes()).bytes()));
}

CHORUS_INLINE std::string SummaryWriter::path_in(const std::string& log_dir) {
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

CHORUS_INLINE double SummaryWriter::now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

CHORUS_INLINE void SummaryWriter::write(const detail::ProtoMessage& event) {
  const auto length = detail::little_endian(static_cast<std::uint64_t>(event.bytes().size()));
  file_.write(length + detail::little_endian(detail::masked_crc32c(length)) + event.bytes() +
              detail::little_endian(detail::masked_crc32c(event.bytes())));
}

}  // namespace chorus
