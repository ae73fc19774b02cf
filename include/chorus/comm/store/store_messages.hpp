#pragma once
/// The messages between a store and its users.
///
/// A visitor receives a Challenge and answers with a StoreHello, which proves that it knows the job's token.
/// StoreWelcome proves the same for the server. Then each request gets one reply. Both are a StoreMessage: a StoreHead,
/// then each text as its length (32 bits) and its bytes.

#include <algorithm>
#include <array>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/fixed_text.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::comm::detail {

inline constexpr std::uint64_t store_magic = 0x0002'6572'6f74'7363;  // "cstore", then the protocol's version

struct StoreHello {
  std::uint64_t magic = store_magic;
  std::uint64_t key = 0;  ///< a number that only the store's users know; refuses strangers without a token
  Nonce nonce{};          ///< the visitor's challenge to the server
  Mac proof{};
};
static_assert(is_message<StoreHello, 64>);

struct StoreWelcome {
  std::uint64_t magic = store_magic;
  std::uint64_t welcome = 0;
  Mac proof{};
};
static_assert(is_message<StoreWelcome, 48>);

/// Limits of a key, a value, a message, and a whole store, checked before anything is stored.
inline constexpr std::size_t most_key_bytes = 8 << 10, most_value_bytes = 8 << 20, most_message_bytes = 64 << 20,
                             most_store_keys = 128 << 10, most_store_bytes = 1 << 30,
                             most_message_texts = 2 * most_store_keys;

enum class StoreCode : std::uint8_t {
  // requests
  set,
  get,
  add,
  compare_set,
  delete_key,
  check,
  wait,
  num_keys,
  append,
  multi_set,
  // replies
  done,
  timed_out,
  refused
};

/// `set`, as in TCPStore.
constexpr std::string_view name(StoreCode code) {
  constexpr std::string_view names[] = {"set",   "get",  "add",      "compare_set", "delete_key",
                                        "check", "wait", "num_keys", "append",      "multi_set"};
  const auto i = static_cast<std::size_t>(code);
  return i < std::size(names) ? names[i] : "unknown";
}

/// Whether text `i` of a request is a key; the others are values.
constexpr bool is_key(StoreCode code, std::size_t i) {
  const bool keys_alone = code == StoreCode::get || code == StoreCode::wait || code == StoreCode::check;
  const bool pairs = code == StoreCode::set || code == StoreCode::multi_set;
  return i == 0 || keys_alone || (pairs && i % 2 == 0);
}

/// A request: keys, values, and a number to add or the milliseconds of a wait. Or a reply: values, a number, or an
/// error; for missing keys their number and the first few.
struct StoreMessage {
  StoreCode code = StoreCode::done;
  std::int64_t number = 0;
  std::vector<std::string> texts;
};

struct StoreHead {
  StoreCode code = StoreCode::done;
  std::array<std::uint8_t, 3> reserved{};
  std::uint32_t count = 0;  ///< texts
  std::uint64_t bytes = 0;  ///< of all that follows
  std::int64_t number = 0;
};
static_assert(is_message<StoreHead, 24>);

inline std::size_t body_bytes(const StoreMessage& message) {
  std::size_t bytes = 0;
  for (const auto& text : message.texts) bytes += sizeof(std::uint32_t) + text.size();
  return bytes;
}

/// Returns false if the connection ends or the deadline comes first. Large texts are not copied.
[[gnu::cold]] inline bool send(const Socket& socket, const StoreMessage& message, Deadline deadline) {
  constexpr std::size_t large = 64 << 10;
  StoreHead head;
  head.code = message.code;
  head.count = static_cast<std::uint32_t>(message.texts.size());
  head.bytes = body_bytes(message);
  head.number = message.number;
  std::string bytes(reinterpret_cast<const char*>(&head), sizeof head);
  const auto flush = [&] {
    const bool sent = socket.send_all(std::as_bytes(std::span(bytes)), deadline);
    bytes.clear();
    return sent;
  };
  for (const auto& text : message.texts) {
    const auto length = static_cast<std::uint32_t>(text.size());
    bytes.append(reinterpret_cast<const char*>(&length), sizeof length);
    if (text.size() < large) bytes.append(text);
    if ((bytes.size() >= large || text.size() >= large) && !flush()) return false;
    if (text.size() >= large && !socket.send_all(std::as_bytes(std::span(text)), deadline)) return false;
  }
  return flush();
}

/// The texts in a message's body; nothing if it is malformed.
[[gnu::cold]] inline std::optional<std::vector<std::string>> texts_in(std::string_view body, std::uint32_t count) {
  if (count > std::min(body.size() / sizeof(std::uint32_t), most_message_texts)) return std::nullopt;
  std::vector<std::string> texts;
  texts.reserve(count);
  while (!body.empty()) {
    std::uint32_t length = 0;
    if (body.size() < sizeof length) return std::nullopt;
    std::memcpy(&length, body.data(), sizeof length);
    body.remove_prefix(sizeof length);
    if (length > body.size() || texts.size() == count) return std::nullopt;
    texts.emplace_back(body.substr(0, length));
    body.remove_prefix(length);
  }
  if (texts.size() != count) return std::nullopt;
  return texts;
}

/// The memory of a message while it arrives: its bytes and the texts made from them.
inline std::size_t memory_for(const StoreHead& head) { return 2 * head.bytes + head.count * sizeof(std::string); }
/// The memory of a message after it has arrived.
inline std::size_t memory_of(const StoreMessage& message) {
  return body_bytes(message) + message.texts.size() * sizeof(std::string);
}

/// The next message; nothing if the connection ends, the deadline comes first, the data are malformed, or
/// `admit(bytes)` finds no room. Memory is allocated as bytes arrive, not by the announced size.
template <class Admit>
[[gnu::cold]] std::optional<StoreMessage> receive(const Socket& socket, Deadline deadline, const Admit& admit) {
  constexpr std::size_t step = 1 << 20;
  StoreHead head;
  if (!socket.receive_all(bytes_of(head), deadline)) return std::nullopt;
  if (head.bytes > most_message_bytes || head.code > StoreCode::refused) return std::nullopt;
  if (head.count > most_message_texts || !admit(memory_for(head))) return std::nullopt;
  std::string body;
  while (body.size() < head.bytes) {
    const auto before = body.size();
    body.resize(std::min<std::size_t>(before + step, head.bytes));
    if (!socket.receive_all(std::as_writable_bytes(std::span(body)).subspan(before), deadline)) return std::nullopt;
  }
  auto texts = texts_in(body, head.count);
  if (!texts) return std::nullopt;
  return StoreMessage{head.code, head.number, std::move(*texts)};
}
inline std::optional<StoreMessage> receive(const Socket& socket, Deadline deadline) {
  return receive(socket, deadline, [](std::size_t) { return true; });
}

}  // namespace chorus::comm::detail
