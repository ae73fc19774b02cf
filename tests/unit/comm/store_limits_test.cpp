// Limits of a store's requests, and of the server's memory for all users together.
#include <catch.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_impl.hpp>
#include <chorus/comm/store/store_server.hpp>

#include "../peak_memory.hpp"
#include "processes.hpp"

namespace store_limits_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::Equals;
using comm::Clock;
using comm::Store;
using comm::detail::StoreCode;
using comm::detail::StoreHead;
using comm::detail::StoreMessage;
using comm::detail::StoreTable;
using Texts = std::vector<std::string>;

/// A user that sends arbitrary requests.
struct RawUser {
  comm::Socket socket;
  explicit RawUser(comm::StoreServer& server) : socket(server.attach()) {}

  std::optional<StoreMessage> ask(const StoreMessage& request) const {
    if (!comm::detail::send(socket, request, Clock::now() + 20s)) return std::nullopt;
    return comm::detail::receive(socket, Clock::now() + 20s);
  }
  std::string refusal(const StoreMessage& request) const {
    const auto reply = ask(request);
    if (!reply) return "closed";
    return reply->code == StoreCode::refused ? reply->texts.at(0) : "done";
  }
  void say(StoreHead head, std::string_view body = "") const {
    socket.send_all(comm::bytes_of(head), Clock::now() + 20s);
    socket.send_all(std::as_bytes(std::span(body)), Clock::now() + 20s);
  }
  bool closed(std::chrono::milliseconds patience) const {
    return socket.wait(POLLIN, Clock::now() + patience) && socket.ended();
  }
};

TEST_CASE("store: a reply's size is known before it is made", "[comm]") {
  auto server = std::make_shared<comm::StoreServer>();
  Store store(server);
  store.set("big", std::string(8 << 20, 'x'));
  store.set("big/too", std::string(8 << 20, 'y'));
  const RawUser user(*server);
  std::string refusal;
  CHECK(peak_memory_of([&] { refusal = user.refusal({StoreCode::get, 1000, Texts(150, "big")}); }) < 100 << 20);
  CHECK_THAT(refusal, Equals("expected values of at most 67108864 bytes in total"));
  CHECK(peak_memory_of([&] {
          refusal = user.refusal({StoreCode::append, 0, {"big", std::string(8 << 20, 'z')}});
        }) < 64 << 20);
  CHECK_THAT(refusal, Equals("the value of 'big' has 16777216 bytes, expected at most 8388608"));
  CHECK(store.multi_get(Texts(7, "big")) == Texts(7, std::string(8 << 20, 'x')));
  CHECK(store.compare_set("big", "other", "new") == std::string(8 << 20, 'x'));
}

TEST_CASE("store: the server itself looks at keys and values, of every request, before it keeps them", "[comm]") {
  comm::StoreServer server;
  const RawUser user(server);
  const std::string long_key(1 << 20, 'k'), long_value((8 << 20) + 1, 'v');
  const StoreMessage requests[] = {
      {StoreCode::set, 0, {long_key, "v"}},      {StoreCode::multi_set, 0, {"a", "v", long_key, "v"}},
      {StoreCode::append, 0, {long_key, "v"}},   {StoreCode::add, 1, {long_key}},
      {StoreCode::delete_key, 0, {long_key}},    {StoreCode::compare_set, 0, {long_key, "", "v"}},
      {StoreCode::check, 0, {"a", long_key}},    {StoreCode::wait, 0, {long_key}},
      {StoreCode::get, 0, {"a", "b", long_key}},
  };
  for (const auto& request : requests) {
    CAPTURE(name(request.code));
    CHECK_THAT(user.refusal(request), Equals("a key has 1048576 bytes, expected 1 to 8192"));
    auto empty = request;
    for (auto& text : empty.texts)
      if (text == long_key) text.clear();
    CHECK_THAT(user.refusal(empty), Equals("a key has 0 bytes, expected 1 to 8192"));
  }
  for (const auto& request : {StoreMessage{StoreCode::compare_set, 0, {"k", long_value, "v"}},
                              StoreMessage{StoreCode::compare_set, 0, {"k", "", long_value}},
                              StoreMessage{StoreCode::append, 0, {"k", long_value}}})
    CHECK_THAT(user.refusal(request), Contains("the value of 'k' has 8388609 bytes, expected at most 8388608"));
  CHECK(user.ask({StoreCode::num_keys, 0, {}})->number == 0);

  // If the bytes are no request, the connection ends before the server allocates anything.
  const std::string body(64 << 20, '\0');  // 16 Mi empty texts
  const RawUser many(server);
  CHECK(peak_memory_of([&] {
          many.say({.code = StoreCode::check, .count = 16 << 20, .bytes = body.size()}, body);
          CHECK(many.closed(10s));
        }) < 100 << 20);
  const RawUser liar(server);
  liar.say({.code = StoreCode::check, .count = 0, .bytes = body.size()}, body);
  CHECK(liar.closed(10s));
}

TEST_CASE("store: what users have called their keys steers no terminal, and fills no message", "[comm]") {
  auto server = std::make_shared<comm::StoreServer>();
  Store store(server);
  const std::string wild = "\x1b[2J\nkey";
  store.set(wild, "text");
  CHECK_THROWS_WITH(store.add(wild, 1), "store.add: '\\x1b[2J\\x0akey' is not a whole number");
  CHECK_THROWS_WITH(store.wait({"\x1b[2J\nother"}, 0ms), "store.wait: '\\x1b[2J\\x0aother' was not set within 0 ms");
  Texts keys;
  for (int i = 0; i < 2000; ++i) keys.push_back(std::string(8000, 'k') + std::to_string(i));
  const auto start = Clock::now();
  const RawUser user(*server);
  const auto reply = user.ask({StoreCode::wait, 0, keys});
  REQUIRE(reply);
  CHECK((reply->code == StoreCode::timed_out && reply->number == 2000 && reply->texts.size() == 10));
  CHECK(comm::detail::body_bytes(*reply) < 2000);
  try {
    store.wait(keys, 0ms);
    CHECK(false);
  } catch (const TimeoutError& error) {
    const std::string what = error.what();
    CHECK((what.size() < 2000 && what.find(" and 1990 more were not set within 0 ms") != std::string::npos));
  }
  CHECK(Clock::now() - start < 10s);
}

TEST_CASE("store: users together have so much room for messages, and wait for each other", "[comm]") {
  StoreTable table;
  const auto never = [] { return false; };
  const auto soon = [] { return Clock::now() + 50ms; };
  StoreTable::Room first(table), second(table);
  CHECK(first.take(StoreTable::most_room - (1 << 20), soon(), never));
  CHECK(second.take(1 << 20, soon(), never));
  CHECK(!second.take(1 << 20, soon(), never));
  CHECK(second.take(StoreTable::small_bytes, soon(), never));  // small requests do not wait for large ones
  auto start = Clock::now();
  CHECK(!second.take(1 << 20, Clock::now() + 60s, [] { return true; }));
  CHECK(Clock::now() - start < 10s);
  {
    std::jthread later([&] {
      std::this_thread::sleep_for(100ms);
      first.keep(1 << 20);
    });
    CHECK(second.take(100 << 20, Clock::now() + 60s, never));
  }
  {
    StoreTable::Room third(table);
    CHECK(third.take(80 << 20, soon(), never));
    CHECK(!first.take(80 << 20, soon(), never));
  }
  CHECK(first.take(80 << 20, soon(), never));  // the third has freed it
  std::jthread closing([&] {
    std::this_thread::sleep_for(100ms);
    table.close();
  });
  start = Clock::now();
  CHECK(!first.take(80 << 20, Clock::now() + 60s, never));
  CHECK(Clock::now() - start < 10s);
}

TEST_CASE("store: a user for whose message there is no room waits, and loses its connection, and nobody else",
          "[comm]") {
  auto server = std::make_shared<comm::StoreServer>();
  Store store(server);
  const std::string big(8 << 20, 'x');
  store.set("big", big);
  std::optional<RawUser> hog(std::in_place, *server);
  hog->say({.code = StoreCode::set, .count = 2, .bytes = 64 << 20}, "the beginning of it");  // takes 128 of 192 MiB
  std::this_thread::sleep_for(200ms);
  CHECK(store.add("small", 1) == 1);
  CHECK(store.multi_get(Texts(7, "big")).size() == 7);
  RawUser other(*server);
  other.say({.code = StoreCode::set, .count = 2, .bytes = 30 << 20});  // and 60
  std::this_thread::sleep_for(200ms);
  CHECK(store.add("small", 1) == 2);
  store.set_timeout(500ms);
  CHECK_THROWS_WITH(store.get("big"), Contains("store.get: the server in this process closed the connection"));
  store.set_timeout(20s);
  std::jthread ends([&] {
    std::this_thread::sleep_for(500ms);
    hog.reset();
  });
  CHECK(store.get("big") == big);
  CHECK(store.add("small", 1) == 3);
  CHECK(!other.closed(0ms));
}

TEST_CASE("store: many users with large messages get their answers, in bounded memory", "[comm]") {
  auto server = std::make_shared<comm::StoreServer>();
  const std::string big(8 << 20, 'x');
  Store(server).set("big", big);
  std::atomic<int> right{0};
  const auto peak = peak_memory_of([&] {
    std::vector<std::jthread> users;
    for (int i = 0; i < 12; ++i)
      users.emplace_back([&] {
        // Slow readers: the server has to keep the replies.
        const RawUser user(*server);
        comm::detail::send(user.socket, {StoreCode::get, 20'000, Texts(7, "big")}, Clock::now() + 20s);
        std::this_thread::sleep_for(500ms);
        std::vector<std::byte> part(1 << 20);
        std::size_t left = sizeof(StoreHead) + 7 * (4 + big.size());
        while (left > 0) {
          const auto size = std::min(left, part.size());
          if (!user.socket.receive_all(std::span(part).first(size), Clock::now() + 20s)) return;
          left -= size;
        }
        ++right;
      });
  });
  CHECK(right == 12);
  CHECK(peak < 300 << 20);  // 12 x 56 MiB without the limit
}

}  // namespace store_limits_test
