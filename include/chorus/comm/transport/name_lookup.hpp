#pragma once
/// `look_up`: the address of a name, with a deadline. getaddrinfo has none: if name servers don't answer, it takes as
/// long as the system's settings allow, usually half a minute.

#include <netdb.h>
#include <sys/socket.h>

#include <chorus/comm/world.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace chorus::comm::detail {

/// The result of getaddrinfo.
struct Found {
  int code = EAI_FAIL;  ///< 0, or an error for gai_strerror
  sockaddr_storage storage{};
  socklen_t length = 0;
};

inline Found ask_system(const std::string& name, int flags) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  Found found;
  found.code = getaddrinfo(name.c_str(), nullptr, &hints, &list);
  if (found.code != 0 || list == nullptr) return found;
  std::memcpy(&found.storage, list->ai_addr, list->ai_addrlen);
  found.length = list->ai_addrlen;
  freeaddrinfo(list);
  return found;
}

/// Removes the brackets of an IPv6 address, as in `[::1]`; returns other names unchanged.
inline std::string without_brackets(std::string name) {
  const bool six = name.starts_with('[') && name.ends_with(']') && name.find(':') != std::string::npos;
  return six ? name.substr(1, name.size() - 2) : name;
}

/// Returns nothing at the deadline. A numeric address is parsed at once. A name is looked up in a thread, which lives
/// until the system has answered, as getaddrinfo can't be cancelled. Throws CommError if there can be no thread.
[[gnu::cold]] inline std::optional<Found> look_up(const std::string& name, Deadline deadline) {
  if (const auto numbers = ask_system(name, AI_NUMERICHOST); numbers.code == 0) return numbers;
  struct Shared {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Found> found;
  };
  const auto shared = std::make_shared<Shared>();
  chorus::detail::start_thread(cat("address '", printable(name), "'"), [shared, name] {
    const auto found = ask_system(name, 0);
    const std::lock_guard lock(shared->mutex);
    shared->found = found;
    shared->changed.notify_all();
  }).detach();
  std::unique_lock lock(shared->mutex);
  shared->changed.wait_until(lock, deadline, [&] { return shared->found.has_value(); });
  return shared->found;
}

}  // namespace chorus::comm::detail
