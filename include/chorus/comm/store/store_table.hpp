#pragma once
/// `StoreTable`: the content of a store, and the effect of each request.

#include <algorithm>
#include <charconv>
#include <chorus/comm/store/store_messages.hpp>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::comm::detail {

/// Keys and values, for any thread.
class StoreTable {
 public:
  using Gone = std::function<bool()>;

  /// The memory of one user's messages in transit. All users together have most_room, except for small messages, which
  /// don't wait for large ones: with the maximum number of users these take 64 MiB more.
  class Room {
   public:
    explicit Room(StoreTable& table) : table_(table) {}
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() { keep(0); }

    /// Waits until there is room for a message of that size. Returns false if the deadline or `close` comes first, or
    /// if the user is `gone`.
    [[gnu::cold]] bool take(std::size_t bytes, Deadline deadline, const Gone& gone) {
      std::unique_lock lock(table_.mutex_);
      const auto fits = [&] { return table_.closed_ || table_.has_room(bytes); };
      table_.wait(lock, deadline, gone, fits);
      return !table_.closed_ && take_now(bytes);
    }
    /// Returns the room beyond `bytes`.
    void keep(std::size_t bytes) {
      if (bytes_ <= bytes) return;
      const std::lock_guard lock(table_.mutex_);
      table_.taken_ -= bytes_ - bytes;
      bytes_ = bytes;
      table_.changed_.notify_all();
    }

   private:
    friend StoreTable;
    bool take_now(std::size_t bytes) {
      if (!table_.has_room(bytes)) return false;
      if (bytes <= small_bytes) return true;
      table_.taken_ += bytes;
      bytes_ += bytes;
      return true;
    }

    StoreTable& table_;
    std::size_t bytes_ = 0;
  };

  /// Executes one request. `get` and `wait` return when all their keys exist, when the request's time is over, after
  /// `close`, or when the user is `gone`, which is checked periodically. A large reply takes its `room`; throws
  /// CommError if there was none in time: `patience` for requests that do not wait for keys.
  [[gnu::cold]] StoreMessage answer(StoreMessage request, Room& room, Deadline patience, const Gone& gone) {
    std::unique_lock lock(mutex_);
    try {
      return carry_out(request, room, patience, lock, gone);
    } catch (const UsageError& error) {
      return {StoreCode::refused, 0, {error.what()}};
    }
  }

  /// Ends all waits.
  void close() {
    const std::lock_guard lock(mutex_);
    closed_ = true;
    changed_.notify_all();
  }

  static constexpr std::size_t small_bytes = 64 << 10, most_room = 192 << 20;

 private:
  using Texts = std::vector<std::string>;
  using Lock = std::unique_lock<std::mutex>;

  StoreMessage carry_out(StoreMessage& request, Room& room, Deadline patience, Lock& lock, const Gone& gone) {
    auto& texts = request.texts;
    check_texts(request.code, texts);
    StoreMessage reply;
    switch (request.code) {
      case StoreCode::set:
      case StoreCode::multi_set:
        put(texts);
        break;
      case StoreCode::append: {
        const auto at = values_.find(texts[0]);
        if (at != values_.end()) {
          check_value(texts[0], at->second.size() + texts[1].size());
          texts[1].insert(0, at->second);
        }
        put(texts);
        break;
      }
      case StoreCode::add:
        reply.number = sum(texts[0], request.number);
        texts.push_back(cat(reply.number));
        put(texts);
        break;
      case StoreCode::compare_set: {
        // As in TCPStore: a missing key is set if `expected` is empty; otherwise the expected value is returned.
        const std::string nothing;
        const auto other = [&]() -> const std::string* {  // a value that differs from the expected one
          const auto at = values_.find(texts[0]);
          const bool there = at != values_.end();
          if ((there ? at->second : nothing) == texts[1]) return nullptr;
          return there ? &at->second : &texts[1];
        };
        wait(lock, patience, gone, [&] { return closed_ || !other() || has_room(other()->size()); });
        if (const auto* found = other()) {
          take(room, found->size());
          reply.texts = {*found};
        } else {
          reply.texts = {texts[2]};
          std::swap(texts[1], texts[2]);
          put(std::span(texts).first(2));
        }
        break;
      }
      case StoreCode::delete_key:
        reply.number = erase(texts[0]);
        break;
      case StoreCode::check:
        reply.number = missing(texts) == 0;
        break;
      case StoreCode::num_keys:
        reply.number = static_cast<std::int64_t>(values_.size());
        break;
      case StoreCode::wait:
      case StoreCode::get: {
        const auto time = std::chrono::milliseconds(std::clamp<std::int64_t>(request.number, 0, 1LL << 40));
        std::size_t bytes = 0;  // of the reply
        const auto ready = [&] {
          if (missing(texts) != 0) return false;
          bytes = request.code == StoreCode::get ? reply_bytes(texts) : 0;
          return bytes > most_message_bytes || has_room(bytes + texts.size() * sizeof(std::string));
        };
        wait(lock, Clock::now() + time, gone, [&] { return closed_ || ready(); });
        if (const auto count = missing(texts); count != 0) {
          reply = {StoreCode::timed_out, count, {}};
          for (const auto& key : texts)
            if (reply.texts.size() < 10 && !values_.contains(key)) reply.texts.push_back(printable(key));
          break;
        }
        if (request.code == StoreCode::wait) break;
        bytes = reply_bytes(texts);
        check<UsageError>(bytes <= most_message_bytes, "expected values of at most ", most_message_bytes,
                          " bytes in total");
        take(room, bytes + texts.size() * sizeof(std::string));
        for (const auto& key : texts) reply.texts.push_back(values_.find(key)->second);
        break;
      }
      default:
        fail<UsageError>("an unknown request");
    }
    return reply;
  }

  /// Waits until `ready`, which also holds at `close`.
  template <class Ready>
  void wait(Lock& lock, Deadline deadline, const Gone& gone, const Ready& ready) {
    while (!ready() && Clock::now() < deadline && !gone())
      changed_.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(100)), ready);
  }

  bool has_room(std::size_t bytes) const { return bytes <= small_bytes || taken_ + bytes <= most_room; }
  static void take(Room& room, std::size_t bytes) {
    check<CommError>(room.take_now(bytes), "store: no room for a reply of ", bytes, " bytes");
  }
  std::size_t reply_bytes(const Texts& keys) const {
    std::size_t bytes = 0;
    for (const auto& key : keys) bytes += sizeof(std::uint32_t) + values_.find(key)->second.size();
    return bytes;
  }

  /// Throws unless these are the keys and values of such a request, and none is too long.
  static void check_texts(StoreCode code, const Texts& texts) {
    const bool pairs = code == StoreCode::set || code == StoreCode::multi_set;
    const std::size_t count = code == StoreCode::append || code == StoreCode::set       ? 2
                              : code == StoreCode::add || code == StoreCode::delete_key ? 1
                              : code == StoreCode::compare_set                          ? 3
                              : code == StoreCode::num_keys                             ? 0
                                                                                        : texts.size();
    check<UsageError>(texts.size() == count && (!pairs || count % 2 == 0), "a request with ", texts.size(), " texts");
    const std::string* key = nullptr;
    for (std::size_t i = 0; i < texts.size(); ++i) {
      if (is_key(code, i)) {
        key = &texts[i];
        check<UsageError>(!key->empty() && key->size() <= most_key_bytes, "a key has ", key->size(),
                          " bytes, expected 1 to ", most_key_bytes);
      } else {
        check_value(*key, texts[i].size());
      }
    }
  }
  static void check_value(const std::string& key, std::size_t bytes) {
    check<UsageError>(bytes <= most_value_bytes, "the value of '", printable(key), "' has ", bytes,
                      " bytes, expected at most ", most_value_bytes);
  }

  std::int64_t sum(const std::string& key, std::int64_t amount) const {
    const auto at = values_.find(key);
    const std::string_view text = at == values_.end() ? std::string_view() : at->second;
    std::int64_t value = 0, result = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = text.empty() || (error == std::errc{} && end == text.data() + text.size());
    check<UsageError>(whole, "'", printable(key), "' is not a whole number");
    check<UsageError>(!__builtin_add_overflow(value, amount, &result), "'", printable(key), "' holds ", value, ", and ",
                      amount, " more exceeds 64 bits");
    return result;
  }

  /// Stores keys, each followed by its value: all of them or, with an error, none.
  void put(std::span<std::string> pairs) {
    std::unordered_map<std::string_view, std::size_t> sizes;  // of the values; for a repeated key the last one counts
    for (std::size_t i = 0; i < pairs.size(); i += 2) sizes[pairs[i]] = pairs[i + 1].size();
    auto keys = values_.size(), bytes = bytes_;
    for (const auto& [key, size] : sizes) {
      const auto at = values_.find(key);
      keys += at == values_.end();
      bytes += at == values_.end() ? key.size() + size : size - at->second.size();
    }
    check<UsageError>(bytes <= most_store_bytes && keys <= most_store_keys, "the store is full: it holds ",
                      values_.size(), " keys and ", bytes_, " bytes, expected at most ", most_store_keys, " and ",
                      most_store_bytes);
    for (std::size_t i = 0; i < pairs.size(); i += 2) values_[pairs[i]] = std::move(pairs[i + 1]);
    bytes_ = bytes;
    changed_.notify_all();
  }

  bool erase(const std::string& key) {
    const auto at = values_.find(key);
    if (at == values_.end()) return false;
    bytes_ -= key.size() + at->second.size();
    values_.erase(at);
    return true;
  }

  std::int64_t missing(const Texts& keys) const {
    return std::count_if(keys.begin(), keys.end(), [&](const auto& key) { return !values_.contains(key); });
  }

  struct Hash : std::hash<std::string_view> {
    using is_transparent = void;
  };

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::string, Hash, std::equal_to<>> values_;
  std::size_t bytes_ = 0;  ///< of keys and values
  std::size_t taken_ = 0;  ///< of most_room
  bool closed_ = false;
};

}  // namespace chorus::comm::detail
