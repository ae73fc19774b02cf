#pragma once
/// `Store`: keys and values that the ranks of a job share, with the names and semantics of PyTorch's TCPStore.

#include <chorus/comm/world.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::comm {

class AnyCommunicator;
class Store;
class StoreServer;
namespace detail {
enum class StoreCode : std::uint8_t;
struct StoreMessage;
class StoreLink;
}  // namespace detail

/// One rank's access to the store. Copies share it. Any thread may use it; a waiting thread does not delay the others.
///
/// Rank 0 holds the data in memory. A rank that uses the store after rank 0 has ended gets a CommError, so end with a
/// barrier. Keys have 1 to 8192 bytes, values up to 8 MiB of any content; a call has up to 64 MiB and 262144 keys and
/// values; a store up to 131072 keys and 1 GiB. All calls in transit take at most 256 MiB of rank 0's memory: a large
/// one waits for room. Each call throws UsageError if it exceeds these limits, TimeoutError for keys that are not set
/// in time or a server that does not answer, and CommError for a server that is gone or had no room in time.
class Store {
 public:
  /// A store of this process alone, without any socket.
  Store();
  /// The store of the server at this address. Waits for it to start, at most `timeout`. Throws TimeoutError, and
  /// CommError if another program answers there or the token is different.
  static Store connect(const std::string& host, int port, const std::string& token = {},
                       std::chrono::milliseconds timeout = default_timeout, std::uint64_t key = 0);
  /// The store of a group of ranks; a collective. Rank 0 holds it, at a free port of world.master_addr, under the job's
  /// token; a group of one needs no socket. Throws CommError, on every rank, if rank 0 cannot listen there.
  static Store of(const World& world, AnyCommunicator& communicator);
  /// The store of a server in this process.
  explicit Store(std::shared_ptr<StoreServer> server);

  void set(std::string_view key, std::string_view value);
  /// The value; waits for the key to be set.
  std::string get(std::string_view key);
  /// Adds to the key's integer, 0 if the key is missing, and returns the sum; `get` returns it as text.
  std::int64_t add(std::string_view key, std::int64_t amount);
  /// Sets the key to `desired` if its value is `expected`, or if it is missing and `expected` is empty. Returns the
  /// value afterwards; `expected` if the key is still missing.
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  /// Returns whether the key existed.
  bool delete_key(std::string_view key);
  /// Whether all these keys exist now.
  bool check(const std::vector<std::string>& keys);
  /// Waits for all these keys.
  void wait(const std::vector<std::string>& keys);
  void wait(const std::vector<std::string>& keys, std::chrono::milliseconds timeout);
  /// The number of keys in the whole store, including those with other prefixes.
  std::int64_t num_keys();
  /// Appends to the value of the key; a missing key counts as empty.
  void append(std::string_view key, std::string_view value);
  /// Waits for all these keys, and reads their values atomically.
  std::vector<std::string> multi_get(const std::vector<std::string>& keys);
  /// Sets all these keys atomically.
  void multi_set(const std::vector<std::string>& keys, const std::vector<std::string>& values);

  /// The time limit of a call: 300 s unless set. For this copy only.
  std::chrono::milliseconds timeout() const { return timeout_; }
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }

  /// The same store, with `prefix/` before each key (PyTorch's PrefixStore), so that independent users don't collide.
  Store prefix_store(std::string_view prefix) const;

  static constexpr std::chrono::milliseconds default_timeout{300'000};

 private:
  explicit Store(std::shared_ptr<detail::StoreLink> link);
  detail::StoreMessage ask(detail::StoreCode code, std::vector<std::string> texts, std::int64_t number = 0) const;

  std::shared_ptr<detail::StoreLink> link_;
  std::string prefix_;
  std::chrono::milliseconds timeout_ = default_timeout;
};

}  // namespace chorus::comm

#if !CHORUS_COMPILED
#include <chorus/comm/store/store_impl.hpp>
#endif
