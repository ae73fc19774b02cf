// TLS between ranks: what a relay without the token can and cannot do.
#include <atomic>
#include <catch.hpp>
#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/comm/transport/mesh.hpp>
#include <cstdlib>

#include "connection.hpp"
#include "processes.hpp"

namespace tls_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using comm::Clock;
using test::connection;

#if CHORUS_USE_OPENSSL

constexpr const char* secret = "correct horse battery staple";

/// A relay between two sockets. It calls `change` on each part, which may change it, drop it or add to it; from 0 for
/// parts of the client, 1 for parts of the server.
class Relay {
 public:
  using Change = std::function<void(int from, std::vector<std::byte>& bytes)>;
  Relay(comm::Socket a, comm::Socket b, Change change)
      : ends_{std::move(a), std::move(b)}, change_(std::move(change)), thread_([this](const std::stop_token& stop) {
          while (!stop.stop_requested())
            for (int from : {0, 1}) pass(from);
        }) {}

 private:
  void pass(int from) {
    if (!ends_[from] || !ends_[from].wait(POLLIN, Clock::now() + 1ms)) return;
    std::vector<std::byte> bytes(1 << 16);
    const auto n = ends_[from].try_receive(bytes);
    if (n < 0) {
      ends_[0] = comm::Socket(), ends_[1] = comm::Socket();
      return;
    }
    bytes.resize(static_cast<std::size_t>(n));
    change_(from, bytes);
    ends_[1 - from].send_all(bytes, Clock::now() + 1s);
  }

  comm::Socket ends_[2];
  Change change_;
  std::jthread thread_;
};

struct Encrypted {
  comm::Socket client, server;
  std::unique_ptr<Relay> relay;

  explicit Encrypted(Relay::Change change = {}, const std::string& token = secret) {
    auto [near, middle] = connection();
    client = std::move(near);
    server = std::move(middle);
    if (change) {
      auto [other, far] = connection();
      relay = std::make_unique<Relay>(std::move(server), std::move(other), std::move(change));
      server = std::move(far);
    }
    client.encrypt(comm::Tls::Side::client, token);
    server.encrypt(comm::Tls::Side::server, secret);
  }

  /// Sends `bytes` to the server; returns the bytes that arrive there within 2 s.
  std::vector<std::byte> pass(std::span<const std::byte> bytes) {
    std::jthread sender([&] { client.send_all(bytes, Clock::now() + 2s); });
    std::vector<std::byte> got(bytes.size());
    const auto deadline = Clock::now() + 2s;
    std::size_t received = 0;
    while (received < got.size() && Clock::now() < deadline) {
      const auto n = server.try_receive(std::span(got).subspan(received));
      if (n < 0) break;
      if (n == 0) server.wait(POLLIN, Clock::now() + 20ms);
      received += static_cast<std::size_t>(n);
    }
    got.resize(received);
    return got;
  }
};

std::vector<std::byte> some_bytes(std::size_t count) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7 % 251);
  return bytes;
}

/// A bool: Catch would print all bytes.
bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) { return a == b; }

TEST_CASE("what is sent over TLS arrives, and can't be read on the way", "[comm]") {
  const auto bytes = some_bytes(3 << 20);
  std::vector<std::byte> overheard;
  Encrypted pair(
      [&](int, std::vector<std::byte>& part) { overheard.insert(overheard.end(), part.begin(), part.end()); });
  CHECK(same(pair.pass(bytes), bytes));
  CHECK(overheard.size() > bytes.size());
  const auto found = std::search(overheard.begin(), overheard.end(), bytes.begin(), bytes.begin() + 32);
  CHECK((found == overheard.end()));
}

TEST_CASE("a bit that is changed on the way ends the connection, on both sides, with the reason", "[comm]") {
  const auto bytes = some_bytes(1 << 20);
  std::size_t passed = 0;
  Encrypted pair([&](int from, std::vector<std::byte>& part) {
    if (from == 0 && passed < 500'000 && passed + part.size() >= 500'000) part[part.size() / 2] ^= std::byte{1};
    if (from == 0) passed += part.size();
  });
  CHECK(pair.pass(bytes).size() < 520'000);
  CHECK_THAT(pair.server.trouble(), Contains("bad record mac"));
  std::byte answer;
  CHECK(!pair.client.receive_all(std::span(&answer, 1), Clock::now() + 2s));
  CHECK_THAT(pair.client.trouble(), Contains("bad record mac"));
}

TEST_CASE("what was sent before is not taken again", "[comm]") {
  const auto bytes = some_bytes(100);
  std::vector<std::byte> last;
  std::atomic<bool> again{false};
  Encrypted pair([&](int from, std::vector<std::byte>& part) {
    if (from == 0 && again) part = last;
    if (from == 0) last = part;
  });
  CHECK(same(pair.pass(bytes), bytes));  // may arrive together with the end of the handshake
  CHECK(same(pair.pass(bytes), bytes));
  again = true;
  CHECK(pair.pass(bytes).empty());
  CHECK_THAT(pair.server.trouble(), Contains("bad record mac"));
}

TEST_CASE("a handshake that was overheard proves nothing to another server", "[comm]") {
  std::vector<std::byte> overheard;
  {
    Encrypted pair([&](int from, std::vector<std::byte>& part) {
      if (from == 0) overheard.insert(overheard.end(), part.begin(), part.end());
    });
    CHECK(pair.pass(some_bytes(100)).size() == 100);
  }
  auto [near, far] = connection();
  far.encrypt(comm::Tls::Side::server, secret);
  near.send_all(overheard, Clock::now() + 1s);
  std::array<std::byte, 100> got;
  CHECK(!far.receive_all(got, Clock::now() + 1s));
}

TEST_CASE("who has another token gets nowhere, and says why", "[comm]") {
  Encrypted pair({}, "correct horse battery stable");
  CHECK(pair.pass(some_bytes(100)).empty());
  CHECK_THAT(pair.server.trouble(), Contains("TLS: "));
  std::byte answer;
  CHECK(!pair.client.receive_all(std::span(&answer, 1), Clock::now() + 2s));
  CHECK_THAT(pair.client.trouble(), Contains("the tokens differ (TLS: "));
}

std::string sums(const comm::World& world, int steps = 1) {
  auto c = comm::connect(world, {.backend = comm::Backend::tcp});
  std::vector<float> x(100'000, static_cast<float>(world.rank + 1));
  for (int i = 0; i < steps; ++i) c.all_reduce(std::span(x));
  return cat(x.front(), " ", x.back());
}

comm::World with_tls(comm::World world, bool tls = true) {
  setenv("CHORUS_TLS", tls ? "1" : "0", 1);
  world.token = secret;
  world.timeout = 3s;
  return world;
}

/// The errors of both of two ranks (threads) in an all-reduce whose data connection goes through a relay.
std::array<std::string, 2> errors_through(const Relay::Change& change) {
  Encrypted data(change), news;
  auto transports =
      std::array{std::make_unique<comm::TcpTransport>(0, 2, 2s), std::make_unique<comm::TcpTransport>(1, 2, 2s)};
  transports[0]->peers()[1].data = std::move(data.client), transports[0]->peers()[1].news = std::move(news.client);
  transports[1]->peers()[0].data = std::move(data.server), transports[1]->peers()[0].news = std::move(news.server);
  std::array<std::string, 2> errors;
  const auto run = [&](std::size_t rank) {
    auto c = comm::AnyCommunicator(comm::TransportCommunicator("tcp", std::move(transports[rank]), {}));
    std::vector<float> x(1'000'000, 1.0F);
    try {
      for (int step = 0; step < 20; ++step) c.all_reduce(std::span(x));
    } catch (const CommError& error) {
      errors[rank] = error.what();
    }
  };
  std::jthread other([&] { run(1); });
  run(0);
  other.join();
  return errors;
}

TEST_CASE("ranks name what happens to their connection on the way, within the deadline", "[comm]") {
  std::size_t passed = 0;
  const auto after = [&](std::size_t bytes, auto what) {
    return [&passed, bytes, what](int from, std::vector<std::byte>& part) {
      if (from == 0) passed += part.size();
      if (from == 0 && passed > bytes) what(part);
    };
  };
  const auto changed = errors_through(after(5'000'000, [](auto& part) { part[part.size() / 3] ^= std::byte{16}; }));
  for (const auto& error : changed)
    CHECK_THAT(error, Contains("the data were damaged on the way, or the tokens differ (TLS: "));
  passed = 0;
  const auto start = Clock::now();
  const auto cut = errors_through(after(5'000'000, [](auto& part) { part.clear(); }));
  CHECK(Clock::now() - start < 6s);
  for (const auto& error : cut) CHECK_THAT(error, Contains("waited 2000 ms for rank") || Contains("gave up"));
}

TEST_CASE("ranks whose connections are TLS compute what others do", "[comm]") {
  for (const int size : {2, 4}) {
    test::Ranks ranks(size, [](const comm::World& world) { return sums(with_tls(world)); });
    const auto sum = size * (size + 1) / 2;
    CHECK(ranks.texts() == std::vector<std::string>(static_cast<std::size_t>(size), cat(sum, " ", sum)));
  }
}

TEST_CASE("ranks of which one does not encrypt are refused by name, whoever it is", "[comm]") {
  test::Ranks plain_host(2, [](const comm::World& world) { return sums(with_tls(world, world.rank == 1)); });
  CHECK_THAT(plain_host.outcome(1).text,
             Contains("rank 1: the process at 127.0.0.1:") &&
                 Contains("does not encrypt, and this rank does: set the same CHORUS_TLS on all ranks"));
  // A rank without TLS adopts rank 0's setting.
  test::Ranks plain_guest(2, [](const comm::World& world) { return sums(with_tls(world, world.rank == 0)); });
  CHECK(plain_guest.texts() == std::vector<std::string>(2, "3 3"));
}

TEST_CASE("a rank with another token is told over TLS, too, and named when it is missed", "[comm]") {
  test::Ranks ranks(2, [](const comm::World& world) {
    auto own = with_tls(world);
    if (world.rank == 1) own.token = "another secret of the same job";
    own.timeout = 1s;
    return sums(own);
  });
  const auto texts = ranks.texts();
  CHECK_THAT(texts[0], Contains("rank 1 of 2 did not arrive") && Contains("1 other connection is not from ranks") &&
                           Contains("the tokens differ"));
  CHECK_THAT(texts[1], Contains("rank 1: rendezvous at") && Contains("the tokens differ"));
}

TEST_CASE("TLS where it can't be is refused", "[comm]") {
  setenv("CHORUS_TLS", "1", 1);
  CHECK_THROWS_WITH(comm::connect({.rank = 1, .size = 2, .master_port = 1, .timeout = 100ms}),
                    "connect: CHORUS_TLS is 1, but CHORUS_TOKEN, the source of the key, is not set");
  setenv("CHORUS_TLS", "yes", 1);
  CHECK_THROWS_WITH(comm::connect({.rank = 1, .size = 2, .master_port = 1, .timeout = 100ms}),
                    "environment variable CHORUS_TLS must be 0 or 1, got 'yes'");
  unsetenv("CHORUS_TLS");
}

TEST_CASE("a store speaks TLS", "[comm]") {
  setenv("CHORUS_TLS", "1", 1);
  auto listener = test::free_port();
  const auto address = listener.local();
  {
    const auto server = std::make_shared<comm::StoreServer>(std::move(listener), secret, 7);
    auto store = comm::Store::connect("127.0.0.1", address.port(), secret, 2s, 7);
    const std::string value(3'000'000, 'v');
    store.set("key", value);
    CHECK(store.get("key") == value);
    CHECK_THROWS_WITH(comm::Store::connect("127.0.0.1", address.port(), "another secret of the same job", 2s, 7),
                      Contains("store: the server at 127.0.0.1") && Contains("the tokens differ"));
  }
  unsetenv("CHORUS_TLS");
}

#else
TEST_CASE("TLS", "[comm]") { WARN("not checked: this build is without OpenSSL"); }
#endif

}  // namespace tls_test
