#pragma once
/// Decodes JPEG files with libjpeg-turbo, if the build has it.

#include <chorus/core/error.hpp>
#include <chorus/data/images/picture.hpp>
#include <cstdint>
#include <span>
#include <string_view>

#ifndef CHORUS_USE_JPEG
#define CHORUS_USE_JPEG 0
#endif
#if CHORUS_USE_JPEG
#include <setjmp.h>

#include <cstdio>
// Needs std::FILE and std::size_t before.
#include <jerror.h>
#include <jpeglib.h>
#endif

namespace chorus::data::detail {

#if CHORUS_USE_JPEG

/// libjpeg's errors leave its functions by longjmp, which runs no destructors. So only these functions call it, and
/// they have no objects with destructors: `header` and `rows` return false after a longjmp, with the reason in
/// `trouble`.
class JpegReader {
 public:
  explicit JpegReader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {
    info_.err = jpeg_std_error(&errors_);
    info_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) {
      auto& self = *static_cast<JpegReader*>(info->client_data);
      (*info->err->format_message)(info, self.trouble_);
      longjmp(self.out_, 1);
    };
    errors_.emit_message = [](j_common_ptr info, int level) {
      const int code = info->err->msg_code;
      const bool pixels_are_lost =
          code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER || code == JWRN_HUFF_BAD_CODE || code == JWRN_MUST_RESYNC;
      if (level < 0 && pixels_are_lost) (*info->err->error_exit)(info);
    };
    progress_.progress_monitor = [](j_common_ptr info) {
      auto& self = *static_cast<JpegReader*>(info->client_data);
      if (self.info_.input_scan_number > most_scans) self.leave("it has more than 100 scans");
    };
  }
  ~JpegReader() { jpeg_destroy_decompress(&info_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  const char* trouble() const { return trouble_; }

  /// Reads up to the pixels, and finds out the size.
  bool header(Index& height, Index& width) {
    if (setjmp(out_) != 0) return false;
    jpeg_create_decompress(&info_);
    info_.mem->max_memory_to_use = 1L << 30;
    info_.progress = &progress_;
    jpeg_mem_src(&info_, bytes_.data(), static_cast<unsigned long>(bytes_.size()));
    jpeg_read_header(&info_, TRUE);
    height = static_cast<Index>(info_.image_height);
    width = static_cast<Index>(info_.image_width);
    if (info_.arith_code) leave("arithmetic coding is not supported");
    // A block of 64 pixels takes at least one bit. Coefficients of several scans are allocated before these are read.
    if (height * width / 512 > static_cast<Index>(bytes_.size())) leave("the file is too short for its size in pixels");
    return true;
  }

  /// Reads the pixels and the rest of the file.
  bool rows(const Picture& out) {
    if (setjmp(out_) != 0) return false;
    const bool cmyk = info_.num_components == 4;
    info_.out_color_space = cmyk ? JCS_CMYK : JCS_RGB;
    jpeg_start_decompress(&info_);
    read_rows(out, cmyk);
    jpeg_finish_decompress(&info_);
    return true;
  }

 private:
  static constexpr int most_scans = 100;

  [[noreturn]] void leave(const char* trouble) {
    std::snprintf(trouble_, sizeof trouble_, "%s", trouble);
    longjmp(out_, 1);
  }
  void read_rows(const Picture& out, bool cmyk) {
    auto* const common = reinterpret_cast<j_common_ptr>(&info_);
    JSAMPROW inks = nullptr;
    if (cmyk) inks = (*info_.mem->alloc_sarray)(common, JPOOL_IMAGE, info_.output_width * 4, 1)[0];
    for (Index y = 0; y < out.height(); ++y) {
      JSAMPROW row = cmyk ? inks : out.row(y);
      jpeg_read_scanlines(&info_, &row, 1);
      if (cmyk) to_rgb(inks, out.row(y), out.width());
    }
  }
  /// Inks are stored as 255 - ink, as Adobe does. Rounds as Pillow does.
  static void to_rgb(const std::uint8_t* inks, std::uint8_t* rgb, Index width) {
    for (Index x = 0; x < width; ++x, inks += 4, rgb += 3)
      for (int c = 0; c < 3; ++c) {
        const int product = (255 - inks[c]) * inks[3] + 128;
        rgb[c] = static_cast<std::uint8_t>(inks[3] - ((product + (product >> 8)) >> 8));
      }
  }

  std::span<const std::uint8_t> bytes_;
  jpeg_decompress_struct info_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  jmp_buf out_;
  char trouble_[JMSG_LENGTH_MAX] = {};
};

#else

/// For builds without libjpeg: throws FileError.
class JpegReader {
 public:
  explicit JpegReader(std::span<const std::uint8_t>) {}
  const char* trouble() const {
    return "this program was built without libjpeg: link the CMake target chorus::images, or compile with "
           "-DCHORUS_USE_JPEG=1 -ljpeg";
  }
  bool header(Index&, Index&) { return false; }
  bool rows(const Picture&) { return false; }
};

#endif

}  // namespace chorus::data::detail
