// Requests to a store: a code, a number, and texts, each of them a length, a byte that says how long it gets or
// how often it comes, and the text, so that large answers can be asked for.
#include <chorus/comm/store/store_table.hpp>
#include <chrono>
#include <set>

#include "fuzz.hpp"

FUZZ_TARGET(store_table) {
  using namespace chorus::comm::detail;
  StoreTable table;
  std::set<std::string> keys;
  std::size_t given = 0;
  constexpr std::size_t most = 2 << 20;  // that one input gives; it may ask for more
  for (fuzz::Parts parts(input); !parts.empty();) {
    StoreMessage request;
    request.code = static_cast<StoreCode>(parts.number() % 14);
    request.number = static_cast<std::int64_t>(parts.number(parts.number() % 9));
    const auto texts = parts.number() % 8;
    for (std::size_t i = 0; i < texts && given < most; ++i) {
      const auto length = parts.number() % 32, how = parts.number();
      std::string text(fuzz::text_of(parts.bytes(length)));
      // A long text, or many times the same.
      for (std::size_t twice = how % 25; how < 128 && twice > 0 && text.size() < most / 4; --twice) text += text;
      std::size_t copies = how < 128 ? 1 : std::size_t{1} << how % 14;
      for (; copies > 0 && given < most; --copies) {
        given += text.size() + sizeof(std::uint32_t);
        request.texts.push_back(text);
      }
    }
    const auto asked = request;
    StoreTable::Room room(table);
    const auto reply = table.answer(std::move(request), room, chorus::comm::Clock::now() + std::chrono::seconds(1),
                                    [] { return true; });
    FUZZ_REQUIRE(reply.code == StoreCode::done || reply.code == StoreCode::timed_out ||
                 reply.code == StoreCode::refused);
    FUZZ_REQUIRE(body_bytes(reply) <= most_message_bytes);
    if (reply.code != StoreCode::done) continue;
    const auto& list = asked.texts;
    switch (asked.code) {
      case StoreCode::set:
      case StoreCode::multi_set:
        for (std::size_t i = 0; i < list.size(); i += 2) keys.insert(list[i]);
        break;
      case StoreCode::append:
      case StoreCode::add:
        keys.insert(list[0]);
        break;
      case StoreCode::compare_set:
        if (list[1].empty()) keys.insert(list[0]);
        break;
      case StoreCode::delete_key:
        FUZZ_REQUIRE(keys.erase(list[0]) == static_cast<std::size_t>(reply.number));
        break;
      case StoreCode::get:
        FUZZ_REQUIRE(reply.texts.size() == list.size());
        break;
      case StoreCode::check:
        FUZZ_REQUIRE((reply.number != 0) == std::ranges::all_of(list, [&](auto& key) { return keys.contains(key); }));
        break;
      case StoreCode::num_keys:
        FUZZ_REQUIRE(static_cast<std::size_t>(reply.number) == keys.size());
        break;
      default:
        FUZZ_REQUIRE(asked.code == StoreCode::wait);
    }
  }
}
