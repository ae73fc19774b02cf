#pragma once
/// How `Store` calls its server.

#include <algorithm>
#include <array>
#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/meeting/rendezvous_messages.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_server.hpp>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

namespace chorus::comm {

namespace detail {

/// Connections to one server: each running call has its own.
class StoreLink {
 public:
  StoreLink(std::string where, std::function<Socket(Deadline)> connect)
      : where_(std::move(where)), connect_(std::move(connect)) {}

  const std::string& where() const { return where_; }
  Socket take(Deadline deadline) {
    {
      const std::lock_guard lock(mutex_);
      if (!idle_.empty()) {
        auto socket = std::move(idle_.back());
        idle_.pop_back();
        return socket;
      }
    }
    return connect_(deadline);
  }
  void give_back(Socket socket) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(socket));
  }

 private:
  std::string where_;
  std::function<Socket(Deadline)> connect_;
  std::mutex mutex_;
  std::vector<Socket> idle_;
};

/// A connection on which both sides have proved that they know the token; empty, with the reason, if it must be retried
/// later.
[[gnu::cold]] inline Socket visit_store(const Address& address, const std::string& token, std::uint64_t key,
                                        Deadline deadline, std::string& why) {
  auto socket = Socket::connect(address, std::min(deadline, Clock::now() + std::chrono::seconds(5)));
  if (!socket) {
    why = std::strerror(errno);
    return socket;
  }
  const auto soon = std::min(deadline, Clock::now() + std::chrono::seconds(5));
  why = "it accepted the connection and did not answer";
  Challenge challenge;
  if (!socket.receive_all(bytes_of(challenge), soon)) return Socket();
  check<CommError>(challenge.magic == store_magic, "store: expected a store of this version at ", address);
  follow(challenge, socket, check_token(token, address), token, "store", address);
  StoreHello hello;
  hello.key = key;
  fill_random(hello.nonce);
  hello.proof = proof_of(hello, challenge.nonce, token);
  StoreWelcome answer;
  const bool heard = socket.send_all(bytes_of(hello), soon) && socket.receive_all(bytes_of(answer), soon);
  check<CommError>(socket.trouble().empty(), "store: the server at ", address, socket.trouble());
  if (!heard) return Socket();
  check<CommError>(answer.magic == store_magic && answer.welcome == 1, "store: the server at ", address,
                   " refused this process, which does not know the job's token");
  check<CommError>(proves(answer, hello.nonce, token), "store: the process at ", address,
                   " does not know the job's token");
  socket.no_delay();
  return socket;
}

/// The first of `count` keys.
[[gnu::cold]] inline std::string list_of(const std::vector<std::string>& keys, std::int64_t count) {
  std::string list;
  const std::size_t shown = std::min<std::size_t>(keys.size(), 10);
  for (std::size_t i = 0; i < shown; ++i) list += cat(i ? ", '" : "'", printable(keys[i]), "'");
  const auto more = count - static_cast<std::int64_t>(shown);
  return more > 0 ? cat(list, " and ", more, " more") : list;
}

}  // namespace detail

CHORUS_INLINE Store::Store() : Store(std::make_shared<StoreServer>()) {}
CHORUS_INLINE Store::Store(std::shared_ptr<detail::StoreLink> link) : link_(std::move(link)) {}
CHORUS_INLINE Store::Store(std::shared_ptr<StoreServer> server)
    : Store(std::make_shared<detail::StoreLink>("in this process", [server](Deadline) { return server->attach(); })) {}

CHORUS_INLINE Store Store::connect(const std::string& host, int port, const std::string& token,
                                   std::chrono::milliseconds timeout, std::uint64_t key) {
  check_timeout("store", timeout);
  chorus::check<UsageError>(port > 0 && port < 65536, "store: port is ", port, ", expected 1 to 65535");
  const auto deadline = Clock::now() + timeout;
  const auto address = Address::resolve(host, port, deadline);
  detail::check_token(token, address);
  const auto visit = [=](Deadline until) {
    std::string why;
    auto socket = detail::visit_store(address, token, key, until, why);
    chorus::check<CommError>(static_cast<bool>(socket), "store: the server at ", address,
                             " is unreachable: ", why);
    return socket;
  };
  Socket first;
  std::string why = "no answer";
  while (
      !(first = detail::visit_store(address, token, key, deadline, why))) {  // it may start later than this process
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    chorus::check<TimeoutError>(Clock::now() < deadline, "store: no server answered at ", address, ": ", why);
  }
  auto link = std::make_shared<detail::StoreLink>(cat("at ", address), visit);
  link->give_back(std::move(first));
  Store store(std::move(link));
  store.timeout_ = timeout;
  return store;
}

/// Sends a request, with the prefix added to its keys; returns the reply. A connection with an error is not reused.
CHORUS_INLINE detail::StoreMessage Store::ask(detail::StoreCode code, std::vector<std::string> texts,
                                              std::int64_t number) const {
  using detail::StoreCode;
  const bool waits = code == StoreCode::get || code == StoreCode::wait;
  const auto patience = waits ? std::chrono::milliseconds(number) : timeout_;
  chorus::check<UsageError>(patience.count() >= 0, "store.", name(code), ": expected a timeout of at least 0 ms, got ",
                            patience.count(), " ms");
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (!is_key(code, i)) continue;
    const auto bytes = prefix_.size() + texts[i].size();
    chorus::check<UsageError>(!texts[i].empty() && bytes <= detail::most_key_bytes, "store.", name(code),
                              ": a key has ", bytes, " bytes, expected 1 to ", detail::most_key_bytes);
    texts[i].insert(0, prefix_);
  }
  const detail::StoreMessage request{code, number, std::move(texts)};
  chorus::check<UsageError>(body_bytes(request) <= detail::most_message_bytes, "store.", name(code), ": ",
                            body_bytes(request), " bytes, expected at most ", detail::most_message_bytes);
  chorus::check<UsageError>(request.texts.size() <= detail::most_message_texts, "store.", name(code), ": ",
                            request.texts.size(), " keys and values, expected at most ", detail::most_message_texts);
  // The server itself reports the end of a wait, possibly a little late.
  const auto deadline = Clock::now() + std::min<std::chrono::milliseconds>(patience, std::chrono::hours(1'000'000)) +
                        (waits ? std::chrono::seconds(2) : std::chrono::seconds(0));
  auto socket = link_->take(deadline);
  auto reply = detail::send(socket, request, deadline) ? detail::receive(socket, deadline) : std::nullopt;
  if (!reply && Clock::now() >= deadline)
    fail<TimeoutError>("store.", name(code), ": the server ", link_->where(), " did not answer within ",
                       patience.count(), " ms");
  chorus::check<CommError>(reply.has_value(), "store.", name(code), ": the server ", link_->where(),
                           " closed the connection", socket.trouble());
  link_->give_back(std::move(socket));
  if (reply->code == StoreCode::timed_out)
    fail<TimeoutError>("store.", name(code), ": ", detail::list_of(reply->texts, reply->number),
                       reply->number == 1 ? " was" : " were", " not set within ", patience.count(), " ms");
  chorus::check<UsageError>(reply->code == StoreCode::done, "store.", name(code), ": ",
                            reply->texts.empty() ? "refused" : printable(reply->texts[0], 1000));
  return std::move(*reply);
}

CHORUS_INLINE void Store::set(std::string_view key, std::string_view value) {
  ask(detail::StoreCode::set, {std::string(key), std::string(value)});
}
CHORUS_INLINE std::string Store::get(std::string_view key) { return multi_get({std::string(key)}).front(); }
CHORUS_INLINE std::int64_t Store::add(std::string_view key, std::int64_t amount) {
  return ask(detail::StoreCode::add, {std::string(key)}, amount).number;
}
CHORUS_INLINE std::string Store::compare_set(std::string_view key, std::string_view expected,
                                             std::string_view desired) {
  auto reply = ask(detail::StoreCode::compare_set, {std::string(key), std::string(expected), std::string(desired)});
  return reply.texts.empty() ? "" : std::move(reply.texts.front());
}
CHORUS_INLINE bool Store::delete_key(std::string_view key) {
  return ask(detail::StoreCode::delete_key, {std::string(key)}).number != 0;
}
CHORUS_INLINE bool Store::check(const std::vector<std::string>& keys) {
  return ask(detail::StoreCode::check, keys).number != 0;
}
CHORUS_INLINE void Store::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }
CHORUS_INLINE void Store::wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout) {
  ask(detail::StoreCode::wait, keys, timeout.count());
}
CHORUS_INLINE std::int64_t Store::num_keys() { return ask(detail::StoreCode::num_keys, {}).number; }
CHORUS_INLINE void Store::append(std::string_view key, std::string_view value) {
  ask(detail::StoreCode::append, {std::string(key), std::string(value)});
}
CHORUS_INLINE std::vector<std::string> Store::multi_get(const std::vector<std::string>& keys) {
  auto reply = ask(detail::StoreCode::get, keys, timeout_.count());
  chorus::check<CommError>(reply.texts.size() == keys.size(), "store.get: the server ", link_->where(), " returned ",
                           reply.texts.size(), " values, expected ", keys.size());
  return std::move(reply.texts);
}
CHORUS_INLINE void Store::multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values) {
  chorus::check<UsageError>(keys.size() == values.size(), "store.multi_set: ", keys.size(),
                            " keys, expected the same number of values, got ", values.size(), " values");
  std::vector<std::string> texts;
  for (std::size_t i = 0; i < keys.size(); ++i) texts.insert(texts.end(), {keys[i], values[i]});
  ask(detail::StoreCode::multi_set, std::move(texts));
}

CHORUS_INLINE Store Store::prefix_store(std::string_view prefix) const {
  auto other = *this;
  other.prefix_ += std::string(prefix) + "/";
  return other;
}

CHORUS_INLINE Store Store::of(const World& world, AnyCommunicator& communicator) {
  struct News {
    std::uint64_t key = 0;
    std::int32_t port = 0;
    FixedText<252> why{};
  } news;
  static_assert(is_message<News, 264>);
  std::optional<Store> store;
  if (communicator.size() == 1) return Store();
  if (communicator.rank() == 0) {
    try {
      auto listener = Socket::listen(Address::resolve(world.master_addr, 0, Clock::now() + world.timeout));
      news.key = random_key();
      news.port = listener.local().port();
      store = Store(std::make_shared<StoreServer>(std::move(listener), world.token, news.key));
    } catch (const Error& error) {  // so that the others do not wait
      news.port = 0;
      news.why = FixedText<252>(error.what());
    }
  }
  const auto bytes = std::span(reinterpret_cast<std::uint8_t*>(&news), sizeof news);
  communicator.broadcast(bytes, 0);
  chorus::check<CommError>(news.port > 0, "rank ", communicator.rank(),
                           ": rank 0 has no store: ", printable(news.why.view(), sizeof news.why));
  if (!store) {
    store = Store::connect(world.master_addr, news.port, world.token, world.timeout, news.key);
    store->set_timeout(Store::default_timeout);
  }
  return *store;
}

}  // namespace chorus::comm
