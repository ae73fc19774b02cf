#pragma once
/// A file that appears whole or not at all: written beside its place, synced, and renamed over the old one. If the
/// process is killed or the disk is full at any moment, either the old file or the new one is left.

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

/// Writes all of `data` at a place of a file; false, with errno, on failure.
bool write_at(int file, std::uint64_t offset, std::span<const std::byte> data);

/// Writes to `.NAME.<16 hex digits>.tmp` in the folder of `path`; `commit` puts it in place. Without a commit the
/// destructor removes it and the old file stays. The next AtomicFile of the same path removes leftovers of a killed
/// process; a temporary file that is still being written is locked. Every FileError names path, step and reason.
class AtomicFile {
 public:
  /// A symbolic link is followed, even to a missing file. Throws FileError if the folder is missing or can't be
  /// written, or if `path` is read-only or no regular file.
  explicit AtomicFile(std::string path);
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;
  ~AtomicFile() { discard(); }

  /// Appends. Throws FileError, and then removes the temporary file.
  void write(std::span<const std::byte> data);
  void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

  /// Gives the file that length, for others who write ranges of it, and returns the path at which they find it. Throws
  /// FileError.
  std::string extend(std::uint64_t bytes);
  /// Writes at a place; the next `write` does not depend on it. Throws FileError, and then removes the file.
  void write_at(std::uint64_t offset, std::span<const std::byte> data);

  /// Syncs the file to the disk, renames it to its place, and syncs the folder. Throws FileError. The old file is then
  /// untouched, unless the message says that only the folder's sync failed.
  void commit();

 private:
  struct Unopened {};
  static constexpr std::string_view suffix = ".tmp";
  static constexpr std::size_t digits = 16;

  AtomicFile(Unopened, std::string path) : path_(std::move(path)) {}

  void discard();

  /// Reports errno. The written bytes are useless: a caller that catches the error must not commit them.
  [[noreturn]] void fail_at(std::string_view step);

  static int sync(const Descriptor& descriptor);

  [[gnu::cold]] void open_folder();

  /// The permissions for the new file; 0 if there is no old file.
  mode_t check_old_file();

  /// Removes the files of dead writers of this path. Best effort: if it fails, the save continues.
  void remove_leftovers() const;

  [[gnu::cold]] void create(mode_t mode);

  std::string random_name();

  std::string path_, folder_path_, name_, prefix_, temporary_;
  Descriptor folder_, file_;
};

/// Writes a whole file: AtomicFile replaces an old file at `path`; a pipe or a device is written to. Throws FileError
/// that begins with `who`.
void write_file(std::string_view who, const std::string& path, std::string_view text);

}  // namespace chorus::io

#if !CHORUS_COMPILED
#include <chorus/core/atomic_file_impl.hpp>
#endif
