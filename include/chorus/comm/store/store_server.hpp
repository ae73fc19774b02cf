#pragma once
/// `StoreServer`: holds the keys and values of a store and answers its users.

#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <chorus/comm/meeting/acceptor.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/store/store_table.hpp>
#include <chorus/core/blocked_signals.hpp>
#include <chrono>
#include <cstdint>
#include <exception>
#include <list>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

namespace chorus::comm {

/// Each user's connection has a thread, which executes its requests at once or waits: a few hundred connections, as
/// many as a job has. A visitor that does not prove that it knows the token is refused.
class StoreServer {
 public:
  /// For users in this process only: no socket.
  StoreServer() = default;
  /// Also for other processes that know `token` (if empty: `key`). Throws UsageError for a token that is too
  /// short, and for a missing one if `listener` is not on loopback.
  StoreServer(Socket listener, std::string token, std::uint64_t key)
      : listener_(std::move(listener)), token_(std::move(token)), key_(key) {
    encrypted_ = detail::check_token(token_, listener_.local());
    acceptor_ = chorus::detail::start_thread("store", [this] { accept_visitors(); });
  }
  StoreServer(const StoreServer&) = delete;
  StoreServer& operator=(const StoreServer&) = delete;
  /// Ends all connections: waiting users get an error.
  ~StoreServer() {
    ending_.store(true);
    if (acceptor_.joinable()) acceptor_.join();
    table_.close();
    for (auto& user : users_) shutdown(user.socket.fd(), SHUT_RDWR);
    for (auto& user : users_) user.thread.join();
  }

  /// A connection for a user in this process. Throws CommError.
  Socket attach() {
    int ends[2] = {-1, -1};
    check<CommError>(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0,
                     "store: socketpair: ", std::strerror(errno));
    Socket near(ends[0]), far(ends[1]);
    serve(std::move(far), false);
    return near;
  }
  /// Waits until no visitor is connected, for at most `timeout`.
  void await_departures(std::chrono::milliseconds timeout) {
    const auto somebody = [&] {
      const std::lock_guard lock(mutex_);
      return std::any_of(users_.begin(), users_.end(),
                         [](const User& user) { return user.visits && !user.gone.load(); });
    };
    for (const auto deadline = Clock::now() + timeout; somebody() && Clock::now() < deadline;)
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }

 private:
  struct User {
    Socket socket;
    bool visits = false;
    std::thread thread;
    std::atomic<bool> gone{false};
  };

  void accept_visitors() {
    Acceptor acceptor(listener_, sizeof(detail::StoreHello), detail::store_magic, encrypted_, token_);
    while (!ending_.load()) {
      try {
        auto accepted = acceptor.next(Clock::now() + std::chrono::milliseconds(100));
        if (accepted.socket) admit(std::move(accepted));
      } catch (const std::exception&) {
        // Without memory or a thread for it, a visitor loses its connection; a later one may be served.
      }
    }
  }

  void admit(Accepted accepted) {
    const auto hello = accepted.hello_as<detail::StoreHello>();
    if (hello.magic != detail::store_magic) return;  // not a user
    const bool knows = hello.key == key_ && detail::proves(hello, accepted.nonce, token_);
    detail::StoreWelcome answer{.welcome = knows};
    if (knows) answer.proof = detail::proof_of(answer, hello.nonce, token_);
    accepted.socket.no_delay();
    accepted.socket.send_all(bytes_of(answer), Clock::now() + std::chrono::milliseconds(100));
    if (knows) serve(std::move(accepted.socket), true);
  }

  /// Adds a user after removing users that are gone. Beyond the limit the connection is closed. Throws CommError if no
  /// thread can be started.
  void serve(Socket socket, bool visits) {
    const std::lock_guard lock(mutex_);
    for (auto user = users_.begin(); user != users_.end();) {
      if (!user->gone.load()) {
        ++user;
        continue;
      }
      user->thread.join();
      user = users_.erase(user);
    }
    if (users_.size() >= most_users) return;
    std::list<User> one(1);
    auto& user = one.front();
    user.socket = std::move(socket);
    user.visits = visits;
    user.thread = chorus::detail::start_thread("store", [this, &user] { answer(user); });
    users_.splice(users_.end(), one);
  }

  void answer(User& user) {
    try {
      while (!ending_.load()) {
        if (!user.socket.wait(POLLIN, Clock::now() + std::chrono::minutes(1))) continue;
        detail::StoreTable::Room room(table_);
        const auto gone = [&] { return user.socket.hung_up(); };
        const auto until = Clock::now() + patience;
        auto request =
            detail::receive(user.socket, until, [&](std::size_t bytes) { return room.take(bytes, until, gone); });
        if (!request) break;
        room.keep(detail::memory_of(*request));
        const auto reply = table_.answer(std::move(*request), room, Clock::now() + patience, gone);
        if (ending_.load() || !detail::send(user.socket, reply, Clock::now() + patience)) break;
      }
    } catch (const std::exception&) {
      // No memory for this user's request: only this user loses its connection.
    }
    shutdown(user.socket.fd(), SHUT_RDWR);  // closed later, by the thread that joins this one
    user.gone.store(true);
  }

  static constexpr std::size_t most_users = 1024;
  static constexpr std::chrono::seconds patience{30};  ///< for the rest of a message that has begun

  detail::StoreTable table_;
  Socket listener_;
  std::string token_;
  std::uint64_t key_ = 0;
  bool encrypted_ = false;
  std::mutex mutex_;
  std::list<User> users_;
  std::atomic<bool> ending_{false};
  std::thread acceptor_;
};

}  // namespace chorus::comm
