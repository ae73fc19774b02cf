#pragma once
/// Writes temporary files and moves them into place.

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <chorus/core/error.hpp>
#include <chorus/core/held_signal.hpp>
#include <chorus/core/atomic_file.hpp>
#include <chorus/core/descriptor.hpp>
#include <chorus/core/standard_streams.hpp>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

namespace chorus::io {

/// A path in a message: on one line and complete.
inline std::string shown(std::string_view path) { return printable(path, PATH_MAX); }

CHORUS_INLINE bool write_at(int file, std::uint64_t offset, std::span<const std::byte> data) {
  const chorus::detail::HeldSignal held(SIGXFSZ);
  while (!data.empty()) {
    const ssize_t count = ::pwrite(file, data.data(), std::min(data.size(), io_chunk), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;
    if (count <= 0) return false;
    offset += static_cast<std::uint64_t>(count);
    data = data.subspan(static_cast<std::size_t>(count));
  }
  return true;
}

CHORUS_INLINE AtomicFile::AtomicFile(std::string path) : AtomicFile(Unopened{}, std::move(path)) {
  // The object is complete now, so the destructor cleans up if anything below throws.
  open_folder();
  const mode_t mode = check_old_file();
  remove_leftovers();
  create(mode);
}

CHORUS_INLINE void AtomicFile::write(std::span<const std::byte> data) {
  check<UsageError>(!temporary_.empty(), "saving ", shown(path_), ": write to a file that is committed or has failed");
  const chorus::detail::HeldSignal held(SIGXFSZ);
  while (!data.empty()) {
    const ssize_t count = ::write(file_.value, data.data(), std::min(data.size(), io_chunk));
    if (count < 0 && errno == EINTR) continue;
    if (count == 0) errno = EIO;
    if (count <= 0) fail_at("writing");
    data = data.subspan(static_cast<std::size_t>(count));
  }
}

CHORUS_INLINE std::string AtomicFile::extend(std::uint64_t bytes) {
  check<UsageError>(!temporary_.empty(), "saving ", shown(path_), ": extend of a file that is committed or has failed");
  const chorus::detail::HeldSignal held(SIGXFSZ);
  if (::ftruncate(file_.value, static_cast<off_t>(bytes)) != 0) fail_at("extending the file");
  return folder_path_ + temporary_;
}

CHORUS_INLINE void AtomicFile::write_at(std::uint64_t offset, std::span<const std::byte> data) {
  if (!chorus::io::write_at(file_.value, offset, data)) fail_at("writing");
}

CHORUS_INLINE void AtomicFile::commit() {
  check<UsageError>(!temporary_.empty(), "saving ", shown(path_), ": commit of a file that is committed or has failed");
  if (sync(file_) != 0) fail_at("syncing the file to the disk");
  if (::renameat(folder_.value, temporary_.c_str(), folder_.value, name_.c_str()) != 0) {
    fail_at("renaming the temporary file");
  }
  temporary_.clear();
  // Some file systems cannot sync a folder and return EINVAL.
  if (sync(folder_) != 0 && errno != EINVAL) {
    fail_at("the file is in place, but a loss of power may bring the old one back: syncing the folder");
  }
}

CHORUS_INLINE void AtomicFile::discard() {
  if (!temporary_.empty()) ::unlinkat(folder_.value, temporary_.c_str(), 0);
  temporary_.clear();
}

CHORUS_INLINE void AtomicFile::fail_at(std::string_view step) {
  const char* reason = std::strerror(errno);
  discard();
  fail<FileError>("saving ", shown(path_), ": ", step, " failed: ", reason);
}

CHORUS_INLINE int AtomicFile::sync(const Descriptor& descriptor) {
  int status = 0;
  do {
    status = ::fsync(descriptor.value);
  } while (status != 0 && errno == EINTR);
  return status;
}

CHORUS_INLINE void AtomicFile::open_folder() {
  constexpr int most_links = 40;  // as in Linux
  std::string target = path_;
  struct stat facts {};
  // realpath would fail for a missing file.
  for (int links = 0; ::lstat(target.c_str(), &facts) == 0 && S_ISLNK(facts.st_mode); ++links) {
    char next[PATH_MAX];
    const ssize_t length = ::readlink(target.c_str(), next, sizeof next);
    if (links == most_links) errno = ELOOP;
    if (links == most_links || length < 0) fail_at("following the symbolic link");
    const std::size_t name = next[0] == '/' ? 0 : target.rfind('/') + 1;
    target.replace(name, target.npos, next, static_cast<std::size_t>(length));
  }
  const std::size_t slash = target.rfind('/');
  folder_path_ = slash == target.npos ? "" : target.substr(0, slash + 1);
  const std::string folder = folder_path_.empty() ? "." : folder_path_;
  name_ = slash == target.npos ? target : target.substr(slash + 1);
  check<FileError>(!name_.empty(), "saving ", path_.empty() ? "\"\"" : shown(path_), ": the path has no file name");
  check<FileError>(::stat(path_.c_str(), &facts) != 0 || S_ISREG(facts.st_mode), "saving ", shown(path_),
                   ": it exists and is not a regular file");
  // NAME_MAX is 255 bytes. Longer names may share a prefix; the locks make that harmless.
  prefix_ = cat('.', name_.substr(0, 200), '.');
  folder_ = Descriptor(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder_.value < 0) fail_at(cat("opening the folder ", folder));
}

CHORUS_INLINE mode_t AtomicFile::check_old_file() {
  struct stat facts {};
  if (::fstatat(folder_.value, name_.c_str(), &facts, AT_SYMLINK_NOFOLLOW) != 0) {
    if (errno != ENOENT) fail_at("looking at the old file");
    return 0;
  }
  if (::faccessat(folder_.value, name_.c_str(), W_OK, 0) != 0) fail_at("replacing the old file");
  return facts.st_mode & 0777;
}

CHORUS_INLINE void AtomicFile::remove_leftovers() const {
  const auto close_folder = [](DIR* folder) { ::closedir(folder); };
  Descriptor own(::openat(folder_.value, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  const std::unique_ptr<DIR, decltype(close_folder)> folder(own.value < 0 ? nullptr : ::fdopendir(own.value));
  if (folder == nullptr) return;
  own.value = -1;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (name.size() != prefix_.size() + digits + suffix.size()) continue;
    if (!name.starts_with(prefix_) || !name.ends_with(suffix)) continue;
    const Descriptor file(::openat(folder_.value, entry->d_name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (file.value < 0 || ::flock(file.value, LOCK_EX | LOCK_NB) != 0) continue;
    ::unlinkat(folder_.value, entry->d_name, 0);
  }
}

CHORUS_INLINE void AtomicFile::create(mode_t mode) {
  constexpr int attempts = 100;
  for (int attempt = 0; attempt < attempts; ++attempt) {
    const std::string name = random_name();
    Descriptor file(::openat(folder_.value, name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (file.value < 0) {
      if (errno == EEXIST || errno == EINTR) continue;
      fail_at("creating a temporary file in its folder");
    }
    temporary_ = name;
    file_ = std::move(file);
    // Another process's remove_leftovers may run before this lock: then it holds the lock, or the file is unlinked.
    const bool taken = ::flock(file_.value, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK;
    struct stat facts {};
    if (::fstat(file_.value, &facts) != 0) fail_at("looking at the temporary file");
    if (taken || facts.st_nlink == 0) continue;
    if (mode != 0 && ::fchmod(file_.value, mode) != 0) fail_at("setting the permissions");
    return;
  }
  fail<FileError>("saving ", shown(path_), ": no temporary file could be made in its folder in ", attempts,
                  " attempts");
}

CHORUS_INLINE std::string AtomicFile::random_name() {
  unsigned char bytes[digits / 2];
  if (::getentropy(bytes, sizeof bytes) != 0) fail_at("getting a random name");
  std::string name = prefix_;
  for (const unsigned char byte : bytes) {
    constexpr std::string_view hex = "0123456789abcdef";
    (name += hex[byte >> 4]) += hex[byte & 15];
  }
  return name += suffix;
}

CHORUS_INLINE void write_file(std::string_view who, const std::string& path, std::string_view text) {
  struct stat facts {};
  if (::stat(path.c_str(), &facts) != 0 || S_ISREG(facts.st_mode)) {
    try {
      AtomicFile file(path);
      file.write(text);
      return file.commit();
    } catch (const FileError& error) {
      fail<FileError>(who, ": cannot write '", shown(path), "': ", error.what());
    }
  }
  const chorus::detail::HeldSignal no_reader(SIGPIPE), too_long(SIGXFSZ);
  std::FILE* const file = chorus::detail::open_to_write(path.c_str());
  bool written = file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size();
  int error = errno;
  if (file != nullptr && std::fclose(file) != 0 && std::exchange(written, false)) error = errno;
  check<FileError>(written, who, ": cannot write '", shown(path), "': ", std::strerror(error));
}

}  // namespace chorus::io
