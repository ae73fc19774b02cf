#pragma once
/// A file that is replaced atomically: written to a temporary file, synced, and renamed over the old one. If the
/// process is killed or the disk is full at any moment, either the old or the new file remains.

#include <fcntl.h>
#include <sys/stat.h>

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/descriptor.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace chorus::io {

/// Writes all of `data` at an offset of a file. Returns false, with errno, on failure.
bool write_at(int file, std::uint64_t offset, std::span<const std::byte> data);

/// Writes to `.NAME.<16 hex digits>.tmp` in the folder of `path`; `commit` moves it into place. Without a commit the
/// destructor removes it and the old file stays. The next AtomicFile for the same path removes leftovers of a killed
/// process; temporary files in use are locked. Every FileError names path, step and reason.
class AtomicFile {
 public:
  /// Follows symbolic links, even to a missing file. Throws FileError if the folder is missing or not writable, or if
  /// `path` is read-only or not a regular file.
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() { discard(); }

  /// Appends. On failure removes the temporary file and throws FileError.
  void write(std::span<const std::byte> data);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Extends the file to that length, for others who write ranges of it, and returns its temporary path. Throws
  /// FileError.
  std::string extend(std::uint64_t bytes);
  /// Writes at an offset, independently of `write`. On failure removes the file and throws FileError.
  void write_at(std::uint64_t offset, std::span<const std::byte> data);

  /// Syncs the file, renames it into place, and syncs the folder. Throws FileError; the old file is then unchanged,
  /// unless the message says that only the folder's sync failed.
  void commit();

 private:
  struct Unopened {};
  static constexpr std::string_view suffix = ".tmp";
  static constexpr std::size_t digits = 16;

  AtomicFile(Unopened, std::string path) : path_(std::move(path)) {}

  void discard();

  /// Reports errno. The written data is invalid: a caller that catches the error must not commit it.
  [[noreturn]] void fail_at(std::string_view step);

  static int sync(const Descriptor& descriptor);

  [[gnu::cold]] void open_folder();

  /// The new file's permissions; 0 if there is no old file.
  mode_t check_old_file();

  /// Removes temporary files of dead writers of this path. Best effort: saving continues if it fails.
  void remove_leftovers() const;

  [[gnu::cold]] void create(mode_t mode);

  std::string random_name();

  std::string path_, folder_path_, name_, prefix_, temporary_;
  Descriptor folder_, file_;
};

/// Writes a whole file. A regular file at `path` is replaced by AtomicFile; a pipe or a device is written to. Throws
/// FileError that begins with `who`.
void write_file(std::string_view who, const std::string& path, std::string_view text);

}  // namespace chorus::io

#if !CHORUS_COMPILED
#include <chorus/core/atomic_file_impl.hpp>
#endif
