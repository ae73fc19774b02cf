#pragma once
/// Decodes PNG files with libpng, if the build has it.

#include <chorus/core/error.hpp>
#include <chorus/data/images/picture.hpp>
#include <cstdint>
#include <span>
#include <string_view>

#ifndef CHORUS_USE_PNG
#define CHORUS_USE_PNG 0
#endif
#if CHORUS_USE_PNG
#include <png.h>
#include <setjmp.h>

#include <cstdio>
#include <cstring>
#endif

namespace chorus::data::detail {

#if CHORUS_USE_PNG

/// libpng leaves its functions by longjmp, which runs no destructors. So only these functions call it, and they have no
/// objects with destructors: `header` and `rows` return false after a longjmp, with the reason in `trouble`.
class PngReader {
 public:
  explicit PngReader(std::span<const std::uint8_t> bytes) : rest_(bytes) {
    png_ = png_create_read_struct(PNG_LIBPNG_VER_STRING, this, &fail_with, [](png_structp, png_const_charp) {});
    info_ = png_ == nullptr ? nullptr : png_create_info_struct(png_);
  }
  ~PngReader() { png_destroy_read_struct(&png_, &info_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  const char* trouble() const { return trouble_; }

  /// Reads up to the pixels, and finds out the size.
  bool header(Index& height, Index& width) {
    if (info_ == nullptr) return false;
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_read_fn(png_, this, &give);
    png_set_user_limits(png_, 1'000'000, 1'000'000);
    png_set_chunk_malloc_max(png_, 8 << 20);
    png_set_keep_unknown_chunks(png_, PNG_HANDLE_CHUNK_NEVER, nullptr, -1);  // texts, colour profiles and the like
    png_read_info(png_, info_);
    height = static_cast<Index>(png_get_image_height(png_, info_));
    width = static_cast<Index>(png_get_image_width(png_, info_));
    return true;
  }

  /// Reads the pixels and the rest of the file.
  bool rows(const Picture& out) {
    if (setjmp(png_jmpbuf(png_)) != 0) return false;
    png_set_expand(png_);  // palettes, and 1, 2 and 4 bits of gray
    png_set_strip_16(png_);
    png_set_gray_to_rgb(png_);
    png_set_strip_alpha(png_);
    read_rows(out);
    png_read_end(png_, nullptr);
    return true;
  }

 private:
  void read_rows(const Picture& out) {
    const int passes = png_set_interlace_handling(png_);
    png_read_update_info(png_, info_);
    if (png_get_rowbytes(png_, info_) != static_cast<std::size_t>(out.width() * 3)) png_error(png_, "no RGB");
    for (int pass = 0; pass < passes; ++pass)
      for (Index y = 0; y < out.height(); ++y) png_read_row(png_, out.row(y), nullptr);
  }
  static void give(png_structp png, png_bytep to, std::size_t count) {
    auto& rest = static_cast<PngReader*>(png_get_io_ptr(png))->rest_;
    if (count > rest.size()) png_error(png, "the file is cut short");
    std::memcpy(to, rest.data(), count);
    rest = rest.subspan(count);
  }
  [[noreturn]] static void fail_with(png_structp png, png_const_charp message) {
    auto& trouble = static_cast<PngReader*>(png_get_error_ptr(png))->trouble_;
    std::snprintf(trouble, sizeof trouble, "%s", message);
    png_longjmp(png, 1);
  }

  std::span<const std::uint8_t> rest_;
  png_structp png_ = nullptr;
  png_infop info_ = nullptr;
  char trouble_[128] = "libpng could not start";
};

#else

/// For builds without libpng: throws FileError.
class PngReader {
 public:
  explicit PngReader(std::span<const std::uint8_t>) {}
  const char* trouble() const {
    return "this program was built without libpng: link the CMake target chorus::images, or compile with "
           "-DCHORUS_USE_PNG=1 -lpng";
  }
  bool header(Index&, Index&) { return false; }
  bool rows(const Picture&) { return false; }
};

#endif

}  // namespace chorus::data::detail
