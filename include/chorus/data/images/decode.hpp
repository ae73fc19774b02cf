#pragma once
/// Reads PNG and JPEG files.

#include <algorithm>
#include <array>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/file.hpp>
#include <chorus/data/images/jpeg.hpp>
#include <chorus/data/images/picture.hpp>
#include <chorus/data/images/png.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

namespace chorus::data {

namespace detail {
template <class Reader>
Picture decode_with(std::string_view name, const char* kind, std::span<const std::uint8_t> bytes) {
  Reader reader(bytes);
  Index height = 0, width = 0;
  check<FileError>(reader.header(height, width), printable(name), ": reading the ", kind,
                   " file failed: ", reader.trouble());
  check<FileError>(width <= Picture::most_pixels / height, printable(name), ": expected at most ", Picture::most_pixels,
                   " pixels, got ", width, " x ", height);
  Picture out(height, width);
  check<FileError>(reader.rows(out), printable(name), ": reading the ", kind, " file failed: ", reader.trouble());
  return out;
}
}  // namespace detail

/// Decodes a PNG or JPEG file; which, its first bytes say. Gray values and palettes become RGB. Alpha is dropped, not
/// blended; of 16 bits the upper 8 remain; the EXIF orientation is not applied. The pixels are those of torchvision's
/// `decode_image(bytes, ImageReadMode.RGB)` and, but for 16-bit gray, of Pillow's `convert("RGB")`. `name` is for
/// messages. Throws FileError if the bytes are damaged or cut short, or if the build lacks the format's library.
inline Picture decode_image(std::span<const std::uint8_t> bytes, std::string_view name = "decode_image") {
  static constexpr std::array<std::uint8_t, 8> png = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1a, '\n'};
  static constexpr std::array<std::uint8_t, 3> jpeg = {0xff, 0xd8, 0xff};
  const auto begins = [&](const auto& magic) {
    return bytes.size() >= magic.size() && std::equal(magic.begin(), magic.end(), bytes.begin());
  };
  if (begins(png)) return detail::decode_with<detail::PngReader>(name, "PNG", bytes);
  if (begins(jpeg)) return detail::decode_with<detail::JpegReader>(name, "JPEG", bytes);
  const auto first = bytes.first(std::min<std::size_t>(bytes.size(), 8));
  fail<FileError>(printable(name), ": expected a PNG or JPEG file, got ", bytes.size(), " bytes that begin with '",
                  printable({reinterpret_cast<const char*>(first.data()), first.size()}), "'");
}

/// Reads and decodes a file. Throws FileError as `decode_image` does, with the path, or if the file can't be read.
inline Picture read_image(const std::string& path) {
  constexpr std::uint64_t most = std::uint64_t{1} << 30;
  InputFile file(path);
  check<FileError>(file.size() <= most, printable(path), ": expected an image of at most 1 GiB, got ", file.size(),
                   " bytes");
  const auto size = static_cast<std::size_t>(file.size());
  const auto bytes = std::make_unique_for_overwrite<std::uint8_t[]>(size);
  return decode_image({bytes.get(), file.read({bytes.get(), size})}, path);
}

}  // namespace chorus::data
