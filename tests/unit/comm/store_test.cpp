// Keys and values that ranks share: what each call does, what blocks, and which clients can't do harm.
#include <catch.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_impl.hpp>
#include <chorus/comm/store/store_server.hpp>

#include "processes.hpp"

namespace store_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::Equals;
using comm::Clock;
using comm::Store;
using Texts = std::vector<std::string>;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const TimeoutError& error) {
    return cat("TimeoutError ", error.what());
  } catch (const CommError& error) {
    return cat("CommError ", error.what());
  } catch (const UsageError& error) {
    return cat("UsageError ", error.what());
  }
  return "no error";
}

/// A server with a port, and what a client needs to connect.
struct Server {
  std::string token;
  std::uint64_t key = 77;
  comm::Socket listener = test::free_port();
  int port = listener.local().port();
  std::shared_ptr<comm::StoreServer> server = std::make_shared<comm::StoreServer>(std::move(listener), token, key);
  Store user() { return Store::connect("127.0.0.1", port, token, 5s, key); }
  comm::Socket visit() const {
    return comm::Socket::connect(comm::Address::resolve("127.0.0.1", port), Clock::now() + 1s);
  }
};

/// What each call does, according to PyTorch's documentation of TCPStore.
void use(Store store) {
  store.set("first_key", "first_value");
  CHECK(store.get("first_key") == "first_value");
  const std::string bytes("\0\xff\n'", 4);
  store.set("bytes", bytes);
  CHECK(store.get("bytes") == bytes);
  store.set("bytes", "");
  CHECK(store.get("bytes") == "");
  CHECK(store.add("counter", 1) == 1);
  CHECK(store.add("counter", 6) == 7);
  CHECK(store.add("counter", -10) == -3);
  CHECK(store.get("counter") == "-3");
  store.set("counter", "40");
  CHECK(store.add("counter", 2) == 42);
  CHECK(store.compare_set("key", "first", "second") == "first");  // a missing key stays missing
  CHECK(!store.check({"key"}));
  CHECK(store.compare_set("key", "", "first") == "first");
  CHECK(store.compare_set("key", "first", "second") == "second");
  CHECK(store.compare_set("key", "first", "third") == "second");
  CHECK(store.compare_set("key", "", "third") == "second");
  CHECK(store.get("key") == "second");
  store.append("list", "a");
  store.append("list", "bc");
  CHECK(store.get("list") == "abc");
  store.multi_set({"x", "y"}, {"1", "2"});
  CHECK(store.multi_get({"y", "x"}) == Texts{"2", "1"});
  CHECK(store.multi_get({}).empty());
  CHECK(store.check({"x", "y"}));
  CHECK(!store.check({"x", "z"}));
  CHECK(store.num_keys() == 7);
  CHECK(store.delete_key("x"));
  CHECK(!store.delete_key("x"));
  CHECK(!store.check({"x"}));
  CHECK(store.num_keys() == 6);
  store.wait({"y", "key"});

  auto one = store.prefix_store("one"), two = store.prefix_store("two");
  one.set("y", "of one");
  CHECK((store.get("y") == "2" && one.get("y") == "of one" && store.get("one/y") == "of one" && !two.check({"y"})));
  CHECK(one.prefix_store("deep").add("n", 3) == 3);
  CHECK(store.get("one/deep/n") == "3");
}

TEST_CASE("what a store's calls do", "[comm]") {
  CHECK(Store().timeout() == 300s);
  SECTION("in a process alone") { use(Store()); }
  SECTION("over a connection") { use(Server().user()); }
  SECTION("in the server's own process") { use(Store(Server().server)); }
}

TEST_CASE("what makes no sense is refused, and the store goes on", "[comm]") {
  Server server;
  for (auto store : {Store(), server.user()}) {
    store.set("text", "12x");
    store.set("most", "9223372036854775807");
    const std::string big(8'388'609, 'x'), long_key(8193, 'k');
    CHECK_THAT(error_of([&] { store.add("text", 1); }), Equals("UsageError store.add: 'text' is not a whole number"));
    CHECK_THAT(error_of([&] { store.add("most", 1); }),
               Contains("UsageError store.add: 'most' holds 9223372036854775807"));
    CHECK_THAT(error_of([&] { store.set("", "x"); }),
               Contains("UsageError store.set: a key has 0 bytes, expected 1 to 8192"));
    CHECK_THAT(error_of([&] { store.get(long_key); }), Contains("UsageError store.get: a key has 8193 bytes"));
    CHECK_THAT(error_of([&] { store.set("k", big); }),
               Contains("UsageError store.set: the value of 'k' has 8388609 bytes, expected at most 8388608"));
    CHECK_THAT(error_of([&] {
                 store.multi_set({"a", "b"}, {"1"});
               }),
               Contains("UsageError store.multi_set: 2 keys, expected the same number of values, got 1 values"));
    CHECK_THAT(error_of([] { Store::connect("127.0.0.1", 1, "", std::chrono::milliseconds::max()); }),
               Contains("UsageError store: timeout is 9223372036854775807 ms"));
    CHECK_THAT(error_of([&] { store.wait({"a"}, -1ms); }),
               Contains("UsageError store.wait: expected a timeout of at least 0 ms, got -1 ms"));
    CHECK_THAT(error_of([&] {
                 store.multi_set({"first", "k"}, {"1", big});
               }),
               Contains("UsageError store.multi_set: the value of 'k' has 8388609 bytes"));
    CHECK_FALSE(store.check({"first"}));  // all or nothing
    const std::string most(8'388'608, 'x');
    for (int i = 0; i < 9; ++i) store.set(cat("big", i), most);
    CHECK_THAT(error_of([&] { store.append("big0", "y"); }),
               Contains("UsageError store.append: the value of 'big0' has"));
    CHECK_THAT(error_of([&] {
                 store.multi_get({"big0", "big1", "big2", "big3", "big4", "big5", "big6", "big7"});
               }),
               Contains("UsageError store.get: expected values of at most 67108864 bytes in total"));
    CHECK_THAT(error_of([&] { store.multi_set(Texts(9, "m"), Texts(9, most)); }),
               Contains("UsageError store.multi_set: "));
    CHECK(store.get("big8") == most);
  }
}

TEST_CASE("waits end when the key comes, at their deadline, or with the server", "[comm]") {
  Server server;
  auto store = server.user();
  auto start = Clock::now();
  CHECK_THAT(error_of([&] {
               store.wait({"a", "b"}, 200ms);
             }),
             Equals("TimeoutError store.wait: 'a', 'b' were not set within 200 ms"));
  store.set_timeout(100ms);
  store.set("b", "");
  CHECK_THAT(error_of([&] {
               store.multi_get({"b", "a"});
             }),
             Equals("TimeoutError store.get: 'a' was not set within 100 ms"));
  CHECK(Clock::now() - start < 1s);
  // Another thread with the same Store sets it.
  store.set_timeout(10s);
  start = Clock::now();
  std::thread setter([&] {
    std::this_thread::sleep_for(100ms);
    store.set("a", "now");
  });
  CHECK(store.get("a") == "now");
  CHECK(Clock::now() - start < 2s);
  setter.join();
  // The server ends while a call waits.
  std::thread ender([&] {
    std::this_thread::sleep_for(100ms);
    server.server.reset();
  });
  CHECK_THAT(error_of([&] { store.get("never"); }),
             Contains("CommError store.get: the server at 127.0.0.1:") && Contains("closed the connection"));
  ender.join();
  CHECK_THAT(error_of([&] { store.set("a", "b"); }),
             Contains("CommError store") && (Contains("closed the connection") || Contains("is unreachable")));
  CHECK(Clock::now() - start < 5s);
}

TEST_CASE("ranks share a store", "[comm]") {
  test::Ranks ranks(4, [](const comm::World& world) {
    auto c = comm::connect(world);
    auto store = Store::of(world, c);
    if (store.timeout() != 300s) return cat("timeout ", store.timeout().count());
    store.set(cat("rank", world.rank), cat(world.rank * 10));
    std::string text;
    for (const auto& value : store.multi_get({"rank0", "rank1", "rank2", "rank3"})) text += value + " ";
    for (int i = 0; i < 500; ++i) store.add("sum", world.rank + 1);
    store.append("all", "x");
    c.barrier();
    text += store.get("sum") + " " + store.get("all");
    c.barrier();
    return text;
  });
  for (const auto& text : ranks.texts()) CHECK(text == "0 10 20 30 5000 xxxx");
}

TEST_CASE("rank 0 is killed, or stands still: the others' calls end", "[comm]") {
  for (const int signal : {SIGKILL, SIGSTOP}) {
    test::Ranks ranks(3, [signal](const comm::World& world) {
      auto c = comm::connect(world);
      auto store = Store::of(world, c);
      store.set_timeout(signal == SIGKILL ? 30s : 1s);
      c.barrier();
      test::Ranks::give_sign();
      store.get("never");
      return std::string();
    });
    for (const int rank : {0, 1, 2}) ranks.await_sign(rank);
    const auto start = Clock::now();
    kill(ranks.pid(0), signal);
    for (const int rank : {1, 2}) {
      const auto text = ranks.outcome(rank).text;
      CHECK_THAT(text, Contains("store.get: the server at 127.0.0.1:"));
      CHECK_THAT(text, Contains(signal == SIGKILL ? " closed the connection" : " did not answer within 1000 ms"));
    }
    CHECK(Clock::now() - start < 6s);
  }
}

TEST_CASE("rank 0 cannot open its store: every rank is told", "[comm]") {
  test::Ranks ranks(2, [](comm::World world) {
    auto c = comm::connect(world);
    world.master_addr = "192.0.2.1";
    return error_of([&] { Store::of(world, c); });
  });
  for (const auto& text : ranks.texts())
    CHECK_THAT(text, Contains("CommError rank ") && Contains("rank 0 has no store: cannot listen on 192.0.2.1:0"));
}

TEST_CASE("rank 0 says why it has no store, and no end of it", "[comm]") {
  const comm::World world{.rank = 0, .size = 2, .master_port = 4711, .timeout = 2s};
  std::jthread rank0([&] {
    auto all = comm::connect(world, {.backend = comm::Backend::thread});
    std::array<std::uint8_t, 264> news{};  // the key, no port, and the reason
    std::fill(news.begin() + 12, news.end(), 'x');
    all.broadcast(std::span(news), 0);
  });
  auto other = world;
  other.rank = 1;
  auto all = comm::connect(other, {.backend = comm::Backend::thread});
  CHECK_THROWS_WITH(comm::Store::of(other, all), "rank 1: rank 0 has no store: " + std::string(251, 'x'));
}

TEST_CASE("many users at once", "[comm]") {
  Server server;
  std::vector<std::jthread> threads;
  for (int user = 0; user < 32; ++user)
    threads.emplace_back([&, user] {
      auto store = server.user();
      for (int i = 0; i < 200; ++i) {
        store.add("sum", 1);
        store.set(cat(user, "/", i), "x");
      }
    });
  threads.clear();
  CHECK(server.user().get("sum") == "6400");
  CHECK(server.user().num_keys() == 6401);
}

TEST_CASE("strangers at a store's port", "[comm]") {
  Server server;
  auto store = server.user();
  store.set("a", "b");
  const auto say = [](const comm::Socket& socket, std::string_view text) {
    socket.send_all(std::as_bytes(std::span(text)), Clock::now() + 1s);
  };
  const auto answer_to = [&](comm::detail::StoreHello hello) -> std::string {
    const auto socket = server.visit();
    comm::Challenge challenge;
    comm::detail::StoreWelcome welcome;
    if (!socket.receive_all(comm::bytes_of(challenge), Clock::now() + 1s)) return "no challenge";
    hello.proof = comm::prove(server.token, {std::as_bytes(std::span(challenge.nonce)), comm::detail::proven(hello)});
    socket.send_all(comm::bytes_of(hello), Clock::now() + 1s);
    if (!socket.receive_all(comm::bytes_of(welcome), Clock::now() + 1s)) return "closed";
    return welcome.welcome ? "welcome" : "refused";
  };
  CHECK(answer_to({.key = server.key}) == "welcome");
  CHECK(answer_to({.key = server.key + 1}) == "refused");
  CHECK(answer_to({.magic = 5, .key = server.key}) == "closed");
  CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", server.port, "", 2s); }),
             Contains("CommError store: the server at 127.0.0.1:") && Contains("which does not know the job's token"));
  std::vector<comm::Socket> guests;
  for (int i = 0; i < 20; ++i) guests.push_back(server.visit());  // half open
  say(guests[0], "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a browser\r\nAccept: */*\r\n\r\n");
  say(guests[1], std::string(100'000, '\xff'));
  CHECK(server.user().get("a") == "b");
  CHECK(store.get("a") == "b");
  const int nobody = test::free_port().local().port();
  CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", nobody, "", 100ms); }),
             Contains("TimeoutError store: no server answered at 127.0.0.1:") && Contains("Connection refused"));
  const auto silent = test::free_port();
  CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", silent.local().port(), "", 100ms); }),
             Contains("it accepted the connection and did not answer"));
}

TEST_CASE("a user who sends what is no request loses its connection, nobody else's", "[comm]") {
  Server server;
  auto store = server.user();
  store.set("a", "b");
  using comm::detail::StoreCode;
  using comm::detail::StoreHead;
  const auto sent = [&](const std::string& bytes) -> std::string {
    const auto socket = server.server->attach();
    socket.send_all(std::as_bytes(std::span(bytes)), Clock::now() + 1s);
    const auto reply = comm::detail::receive(socket, Clock::now() + 5s);
    return !reply ? "closed" : reply->code == StoreCode::refused ? "refused" : "done";
  };
  const auto head = [](StoreHead of) { return std::string(reinterpret_cast<const char*>(&of), sizeof of); };
  const auto text = [](std::uint32_t length, std::string_view bytes) {
    return std::string(reinterpret_cast<const char*>(&length), 4).append(bytes);
  };
  const auto start = Clock::now();
  CHECK(sent(head({.code = StoreCode::check, .count = 1, .bytes = 5}) + text(1, "a")) == "done");
  CHECK(sent(head({.code = StoreCode::set, .bytes = 1ull << 63})) == "closed");
  CHECK(sent(head({.code = static_cast<StoreCode>(99)})) == "closed");
  CHECK(sent(head({.code = StoreCode::set, .count = 2, .bytes = 5}) + text(1, "a")) == "closed");
  CHECK(sent(head({.code = StoreCode::set, .count = 1, .bytes = 5}) + text(1u << 31, "a")) == "closed");
  CHECK(sent(head({.code = StoreCode::set, .count = 1, .bytes = 3}) + "abc") == "closed");
  CHECK(sent(head({.code = StoreCode::set, .count = 1, .bytes = 5}) + text(1, "a")) == "refused");
  CHECK(sent(head({.code = StoreCode::compare_set})) == "refused");
  CHECK(sent(head({.code = StoreCode::done})) == "refused");
  CHECK(Clock::now() - start < 4s);
  CHECK(store.get("a") == "b");
  // A client that announces much and sends nothing costs no memory, and nobody waits for it, not even the destructor.
  const auto slow = server.server->attach();
  const auto promise = head({.code = StoreCode::set, .count = 1, .bytes = 64 << 20});
  slow.send_all(std::as_bytes(std::span(promise)), Clock::now() + 1s);
  CHECK(store.get("a") == "b");
  server.server.reset();
  CHECK(Clock::now() - start < 6s);
}

TEST_CASE("store: where no more threads can be had, new users are turned away, and the others go on", "[comm]") {
  Server server;
  auto store = server.user();
  store.set("there", "yes");  // its thread has begun
  {
    const test::NoThreads none;
    CHECK_THAT(error_of([&] { Store(server.server).set("a", "b"); }),
               Contains("CommError store: a thread cannot be started: "));
    CHECK_THAT(error_of([&] { server.user().set("a", "b"); }),
               Contains("CommError store.set: the server at 127.0.0.1:"));
    CHECK(store.add("n", 1) == 1);
  }
  CHECK(server.user().add("n", 1) == 2);
  CHECK(Store(server.server).add("n", 1) == 3);
}

TEST_CASE("store: who goes away while it waits for a key has gone", "[comm]") {
  Server server;
  std::string why;
  const auto address = comm::Address::resolve("127.0.0.1", server.port);
  const auto start = Clock::now();
  {
    const auto visitor = comm::detail::visit_store(address, "", server.key, start + 5s, why);
    comm::detail::send(visitor, {comm::detail::StoreCode::get, 60'000, {"never"}}, start + 5s);
    std::this_thread::sleep_for(200ms);
  }
  server.server->await_departures(30s);
  CHECK(Clock::now() - start < 15s);
}

TEST_CASE("store: where several keys don't fit any more, none of them is set", "[comm]") {
  Store store;
  Texts keys, values;
  for (std::size_t i = 1; i < comm::detail::most_store_keys; ++i) {
    keys.push_back(cat("key ", i));
    values.push_back("x");
  }
  store.multi_set(keys, values);
  CHECK_THAT(error_of([&] {
               store.multi_set({"new", "newer"}, {"1", "2"});
             }),
             Contains("UsageError store.multi_set: the store is full: it holds 131071 keys"));
  CHECK(!store.check({"new"}));
  store.multi_set({"new", "new", "key 1"}, {"1", "2", "3"});
  CHECK(store.multi_get({"new", "key 1"}) == Texts{"2", "3"});
  CHECK_THAT(error_of([&] { store.set("newer", "1"); }), Contains("the store is full"));
  CHECK(store.num_keys() == 131072);
  store.delete_key("new");
  store.set("newer", "1");
}

TEST_CASE("store: its threads take no signals, and a signal is no message", "[comm]") {
  test::Ranks ranks(1, [](const comm::World&) -> std::string {
    Store store;
    store.set("a", "b");
    sigset_t one;
    sigemptyset(&one);
    sigaddset(&one, SIGUSR1);
    pthread_sigmask(SIG_BLOCK, &one, nullptr);
    kill(getpid(), SIGUSR1);
    std::this_thread::sleep_for(50ms);
    sigpending(&one);
    return sigismember(&one, SIGUSR1) ? "nobody took it" : "a thread took it";
  });
  CHECK(ranks.outcome(0).text == "nobody took it");

  const auto port = test::free_port();
  const auto before = std::signal(SIGUSR1, [](int) {});
  {
    std::jthread caller([main = pthread_self()] {
      std::this_thread::sleep_for(100ms);
      pthread_kill(main, SIGUSR1);
    });
    CHECK(!port.wait(POLLIN, Clock::now() + 500ms));
  }
  std::signal(SIGUSR1, before);
}

TEST_CASE("store: a port that is none", "[comm]") {
  for (const int port : {-1, 0, 65536, 65536 + 80})
    CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", port); }),
               Contains(cat("UsageError store: port is ", port, ", expected 1 to 65535")));
}

#if CHORUS_USE_OPENSSL
TEST_CASE("who does not know the token has no store, nor is one", "[comm]") {
  Server server{.token = "a secret of this test"};
  CHECK(server.user().add("n", 1) == 1);
  const auto told = [&](const std::string& token) {
    return error_of([&] { Store::connect("127.0.0.1", server.port, token, 2s, server.key); });
  };
  CHECK_THAT(told("another secret, as long"), Contains("refused this process, which does not know the job's token"));
  CHECK_THAT(told(""), Contains("refused this process"));
  CHECK_THAT(told("short"), Contains("UsageError") && Contains("has 5 characters, expected at least 16"));
  // A server that knows the key but not the token.
  Server impostor;
  CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", impostor.port, server.token, 2s, impostor.key); }),
             Contains("refused this process"));
  const auto welcoming = test::free_port();
  std::jthread liar([&] {
    comm::Socket guest;
    while (!guest) guest = welcoming.accept();
    comm::Challenge challenge{.magic = comm::detail::store_magic};
    comm::detail::StoreWelcome welcome{.welcome = 1};
    guest.send_all(comm::bytes_of(challenge), Clock::now() + 1s);
    guest.send_all(comm::bytes_of(welcome), Clock::now() + 1s);
  });
  CHECK_THAT(error_of([&] { Store::connect("127.0.0.1", welcoming.local().port(), server.token, 2s, 77); }),
             Contains("CommError store: the process at 127.0.0.1:") && Contains("does not know the job's token"));
}
#endif

}  // namespace store_test
