#pragma once
/// Fuzz targets: functions that hand bytes from outside to one parser each. What a parser refuses it refuses with a
/// chorus::Error; any other exception, a broken FUZZ_REQUIRE and whatever sanitizers see are findings.

#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/core/error.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace fuzz {

namespace ch = chorus;
using Bytes = std::span<const std::uint8_t>;

struct Target {
  std::string_view name;
  void (*run)(Bytes input);
};

/// All targets of this program.
inline std::vector<Target>& targets() {
  static std::vector<Target> all;
  return all;
}
inline bool add(std::string_view name, void (*run)(Bytes)) {
  targets().push_back({name, run});
  return true;
}

inline void run(const Target& target, Bytes input) {
  try {
    target.run(input);
  } catch (const ch::Error& error) {
    if (error.what()[0] == '\0') throw std::logic_error("an error without a message");
  }
}

/// Takes parts from the front of an input; zeros behind its end.
class Parts {
 public:
  explicit Parts(Bytes input) : rest_(input) {}

  std::size_t number(std::size_t width = 1) {
    std::size_t out = 0;
    for (std::size_t i = 0; i < width; ++i) {
      out |= static_cast<std::size_t>(rest_.empty() ? 0 : rest_[0]) << (8 * i);
      if (!rest_.empty()) rest_ = rest_.subspan(1);
    }
    return out;
  }
  Bytes bytes(std::size_t count) {
    const auto out = rest_.first(std::min(count, rest_.size()));
    rest_ = rest_.subspan(out.size());
    return out;
  }
  Bytes rest() { return bytes(rest_.size()); }
  bool empty() const { return rest_.empty(); }

 private:
  Bytes rest_;
};

inline std::string_view text_of(Bytes bytes) { return {reinterpret_cast<const char*>(bytes.data()), bytes.size()}; }

/// A regular file that lies in memory.
class MemoryFile {
 public:
  explicit MemoryFile(Bytes content)
      : fd_(memfd_create("fuzz", MFD_CLOEXEC)), path_("/proc/self/fd/" + std::to_string(fd_)) {
    if (fd_ < 0 || write(fd_, content.data(), content.size()) != static_cast<ssize_t>(content.size()))
      throw std::runtime_error("no file in memory");
  }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  ~MemoryFile() { close(fd_); }
  const std::string& path() const { return path_; }

 private:
  int fd_;
  std::string path_;
};

/// A folder, in memory where the system has one there, that is gone with its files in the end.
class Folder {
 public:
  Folder() {
    const auto where = std::filesystem::exists("/dev/shm") ? "/dev/shm" : std::filesystem::temp_directory_path();
    path_ = (where / "chorus_fuzz_XXXXXX").string();
    if (mkdtemp(path_.data()) == nullptr) throw std::runtime_error("no folder");
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string put(std::string_view name, Bytes content) const {
    const std::string file = path_ + "/" + std::string(name);
    std::ofstream(file, std::ios::binary).write(text_of(content).data(), static_cast<std::streamsize>(content.size()));
    return file;
  }

 private:
  std::string path_;
};

/// Two ends of a connection.
inline std::pair<ch::comm::Socket, ch::comm::Socket> connection() {
  int ends[2];
  if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0)
    throw std::runtime_error("no sockets");
  return {ch::comm::Socket(ends[0]), ch::comm::Socket(ends[1])};
}

/// Sends what the system takes at once; nothing follows.
inline void say(const ch::comm::Socket& socket, Bytes bytes) {
  socket.try_send(std::as_bytes(bytes));
  shutdown(socket.fd(), SHUT_WR);
}

/// Appends a message as it is sent.
template <class Message>
void append(std::vector<std::uint8_t>& bytes, const Message& message) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(&message);
  bytes.insert(bytes.end(), begin, begin + sizeof message);
}

/// Listens on loopback, says `says` to the first who comes, and hears what that one answers, for 200 ms each.
class Impostor {
 public:
  explicit Impostor(std::vector<std::uint8_t> says) {
    while (listener().accept()) {  // who came last time, too late
    }
    thread_ = std::jthread([says = std::move(says)] {
      using namespace std::chrono_literals;
      using ch::comm::Clock;
      if (!listener().wait(POLLIN, Clock::now() + 200ms)) return;
      const auto guest = listener().accept();
      if (!guest) return;
      say(guest, says);
      std::array<std::byte, 4096> some;
      const auto deadline = Clock::now() + 200ms;
      while (guest.try_receive(some) >= 0 && Clock::now() < deadline) guest.wait(POLLIN, Clock::now() + 1ms);
    });
  }
  int port() const { return listener().local().port(); }

 private:
  static const ch::comm::Socket& listener() {
    static const auto socket = ch::comm::Socket::listen(ch::comm::Address::resolve("127.0.0.1", 0));
    return socket;
  }
  std::jthread thread_;
};

}  // namespace fuzz

/// Defines the target NAME: FUZZ_TARGET(npy) { ... } with its input in `input`. Names of its file are in namespace
/// fuzz_NAME.
#define FUZZ_TARGET(NAME)                                                   \
  namespace fuzz_##NAME {                                                   \
    static void run(fuzz::Bytes input);                                     \
    [[maybe_unused]] static const bool registered = fuzz::add(#NAME, &run); \
  }                                                                         \
  void fuzz_##NAME::run(fuzz::Bytes input)

/// What has to hold whatever the input is.
#define FUZZ_REQUIRE(CONDITION)                                                    \
  do {                                                                             \
    if (!(CONDITION)) {                                                            \
      std::fprintf(stderr, "%s:%d: broken: %s\n", __FILE__, __LINE__, #CONDITION); \
      std::abort();                                                                \
    }                                                                              \
  } while (false)
