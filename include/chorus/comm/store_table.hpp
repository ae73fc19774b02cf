#pragma once
/// `StoreTable`: what a store holds, and what each request does to it.

#include <algorithm>
#include <array>
#include <charconv>
#include <chorus/comm/store_messages.hpp>
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

namespace chorus::inline CHORUS_ABI::comm::detail {

/// Keys and values; any thread may ask.
class StoreTable {
 public:
  /// Carries out one request. `get` and `wait` last until all their keys are there, until the request's time is over,
  /// until `close`, or until who asks is `gone`, which is looked at now and then.
  [[gnu::cold]] StoreMessage answer(StoreMessage request, const std::function<bool()>& gone) {
    std::unique_lock lock(mutex_);
    try {
      return carry_out(request, lock, gone);
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

 private:
  using Texts = std::vector<std::string>;

  StoreMessage carry_out(StoreMessage& request, std::unique_lock<std::mutex>& lock, const std::function<bool()>& gone) {
    auto& texts = request.texts;
    const auto need = [&](bool right) { check<UsageError>(right, "a request with ", texts.size(), " texts"); };
    StoreMessage reply;
    switch (request.code) {
      case StoreCode::set:
      case StoreCode::multi_set:
        need(texts.size() % 2 == 0);
        put(texts);
        break;
      case StoreCode::append:
        need(texts.size() == 2);
        put(texts[0], value_or_empty(texts[0]) + texts[1]);
        break;
      case StoreCode::add:
        need(texts.size() == 1);
        reply.number = sum(texts[0], request.number);
        put(texts[0], cat(reply.number));
        break;
      case StoreCode::compare_set: {
        need(texts.size() == 3);
        const bool there = values_.contains(texts[0]);
        // As TCPStore: a key that is not there is set where nothing is expected, and else what is expected comes back.
        const auto now = there ? values_[texts[0]] : texts[1].empty() ? "" : texts[1];
        const bool equal = there ? now == texts[1] : texts[1].empty();
        if (equal) put(texts[0], texts[2]);
        reply.texts = {equal ? texts[2] : now};
        break;
      }
      case StoreCode::delete_key:
        need(texts.size() == 1);
        reply.number = erase(texts[0]);
        break;
      case StoreCode::check:
        reply.number = missing(texts).empty();
        break;
      case StoreCode::num_keys:
        reply.number = static_cast<std::int64_t>(values_.size());
        break;
      case StoreCode::wait:
      case StoreCode::get: {
        const auto patience = std::chrono::milliseconds(std::clamp<std::int64_t>(request.number, 0, 1LL << 40));
        const auto over = [&] { return closed_ || missing(texts).empty(); };
        for (const auto deadline = Clock::now() + patience; !over() && Clock::now() < deadline && !gone();)
          changed_.wait_until(lock, std::min(deadline, Clock::now() + std::chrono::milliseconds(100)), over);
        if (auto left = missing(texts); !left.empty()) return {StoreCode::timed_out, 0, std::move(left)};
        if (request.code == StoreCode::wait) break;
        std::size_t bytes = 0;  // a key may be asked for many times
        for (const auto& key : texts) bytes += sizeof(std::uint32_t) + values_[key].size();
        check<UsageError>(bytes <= most_message_bytes, "these values have more than ", most_message_bytes,
                          " bytes together");
        for (const auto& key : texts) reply.texts.push_back(values_[key]);
        break;
      }
      default:
        fail<UsageError>("an unknown request");
    }
    return reply;
  }

  std::string value_or_empty(const std::string& key) const {
    const auto at = values_.find(key);
    return at == values_.end() ? "" : at->second;
  }

  std::int64_t sum(const std::string& key, std::int64_t amount) const {
    const auto text = value_or_empty(key);
    std::int64_t value = 0, result = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    const bool whole = text.empty() || (error == std::errc{} && end == text.data() + text.size());
    check<UsageError>(whole, "'", key, "' holds no whole number");
    check<UsageError>(!__builtin_add_overflow(value, amount, &result), "'", key, "' holds ", value, ", and ", amount,
                      " more is no number of 64 bits");
    return result;
  }

  void put(const std::string& key, std::string value) {
    std::array<std::string, 2> pair{key, std::move(value)};
    put(pair);
  }
  /// Keys, and behind each its value: all of them or, with an error, none.
  void put(std::span<std::string> pairs) {
    std::unordered_map<std::string, std::size_t> sizes;  // of the values; of a key's several the last one counts
    for (std::size_t i = 0; i < pairs.size(); i += 2) {
      const auto& value = pairs[i + 1];
      check<UsageError>(value.size() <= most_value_bytes, "the value of '", pairs[i], "' has ", value.size(),
                        " bytes, at most ", most_value_bytes, " are possible");
      sizes[pairs[i]] = value.size();
    }
    auto keys = values_.size(), bytes = bytes_;
    for (const auto& [key, size] : sizes) {
      const auto at = values_.find(key);
      keys += at == values_.end();
      bytes += at == values_.end() ? key.size() + size : size - at->second.size();
    }
    check<UsageError>(bytes <= most_store_bytes && keys <= most_store_keys, "the store is full: it holds ",
                      values_.size(), " keys and ", bytes_, " bytes, at most ", most_store_keys, " and ",
                      most_store_bytes, " are possible");
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

  Texts missing(const Texts& keys) const {
    Texts list;
    for (const auto& key : keys)
      if (!values_.contains(key)) list.push_back(key);
    return list;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::unordered_map<std::string, std::string> values_;
  std::size_t bytes_ = 0;  ///< of keys and values
  bool closed_ = false;
};

}  // namespace chorus::inline CHORUS_ABI::comm::detail
