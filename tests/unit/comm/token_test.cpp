// Only ranks that know the job's token can join.
#include <ifaddrs.h>
#include <sys/resource.h>

#include <catch.hpp>

#include "processes.hpp"

namespace token_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;

#if CHORUS_USE_OPENSSL

constexpr const char* secret = "correct horse battery staple";

std::string sum_of_ranks(const comm::World& world, comm::Backend backend = comm::Backend::automatic) {
  auto c = comm::connect(world, {.backend = backend});
  std::vector<int> x{world.rank + 1};
  c.all_reduce(std::span(x));
  return cat(x[0]);
}

comm::Socket visit(int port) {
  return comm::Socket::connect(comm::Address::resolve("127.0.0.1", port), comm::Clock::now() + 1s);
}

/// Sends a hello with this token, or with the proof of an earlier connection; returns the host's answer.
std::string intrude(int port, comm::detail::Hello hello, const std::string& token, const comm::Mac* replayed = nullptr,
                    comm::Mac* overheard = nullptr) {
  const auto socket = visit(port);
  comm::Challenge challenge;
  if (!socket.receive_all(comm::bytes_of(challenge), comm::Clock::now() + 1s)) return "no challenge";
  hello.proof = replayed ? *replayed
                         : comm::prove(token, {std::as_bytes(std::span(challenge.nonce)), comm::detail::proven(hello)});
  if (overheard) *overheard = hello.proof;
  if (overheard) return "";  // and closes the connection
  socket.send_all(comm::bytes_of(hello), comm::Clock::now() + 1s);
  comm::detail::Answer answer;
  if (!socket.receive_all(comm::bytes_of(answer), comm::Clock::now() + 1s)) return "closed";
  return answer.welcome ? "welcome" : std::string(answer.refusal.view());
}

/// An address of this machine that other machines can reach, or "".
std::string outer_address() {
  ifaddrs* all = nullptr;
  if (getifaddrs(&all) != 0) return "";
  std::string found;
  for (const auto* at = all; at != nullptr; at = at->ifa_next) {
    if (at->ifa_addr == nullptr || at->ifa_addr->sa_family != AF_INET) continue;
    const auto ip = reinterpret_cast<const sockaddr_in*>(at->ifa_addr)->sin_addr;
    if (ntohl(ip.s_addr) >> 24 == 127) continue;
    char text[INET_ADDRSTRLEN];
    found = inet_ntop(AF_INET, &ip, text, sizeof text);
  }
  freeifaddrs(all);
  return found;
}

TEST_CASE("ranks with one token form a group, whatever those without it do", "[comm]") {
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(3, [backend](comm::World world) {
      world.token = secret;
      if (world.rank == 2) std::this_thread::sleep_for(400ms);
      return sum_of_ranks(world, backend);
    });
    comm::detail::Hello hello{.rank = 2, .size = 3, .pid = 17, .kind = backend};
    const std::string refusal = "process 17, which says that it is rank 2, does not know the job's token";
    CHECK_THAT(intrude(ranks.port(), hello, ""), Contains(refusal));
    CHECK_THAT(intrude(ranks.port(), hello, "correct horse battery stable"), Contains(refusal));
    comm::Mac overheard;
    intrude(ranks.port(), hello, secret, nullptr, &overheard);  // a valid proof, for another challenge
    CHECK_THAT(intrude(ranks.port(), hello, "", &overheard), Contains(refusal));
    CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
  }
}

TEST_CASE("a rank with another token is told, and named when it is missed", "[comm]") {
  test::Ranks ranks(
      2,
      [](comm::World world) {
        world.token = world.rank == 0 ? secret : "another secret of the same job";
        return sum_of_ranks(world);
      },
      500ms);
  const auto texts = ranks.texts();
  CHECK_THAT(texts[0], Contains("rank 1 of 2 did not arrive") && Contains("does not know the job's token"));
  CHECK_THAT(texts[1], Contains("rank 1: rank 0: rendezvous at") && Contains("does not know the job's token"));
}

TEST_CASE("a rank does not join a host that does not know the token", "[comm]") {
  const auto port = test::free_port();
  std::thread impostor([&] {
    comm::Socket guest;
    while (!guest) guest = port.accept();
    const auto deadline = comm::Clock::now() + 2s;
    comm::Challenge challenge{.magic = comm::detail::magic};
    comm::detail::Hello hello;
    comm::detail::Answer answer{.welcome = 1};
    guest.send_all(comm::bytes_of(challenge), deadline);
    guest.receive_all(comm::bytes_of(hello), deadline);
    guest.send_all(comm::bytes_of(answer), deadline);
  });
  comm::World world{.rank = 1, .size = 2, .master_port = port.local().port(), .token = secret};
  world.timeout = 2s;
  CHECK_THROWS_WITH(comm::connect(world), Contains("the process there does not know the job's token"));
  impostor.join();
}

TEST_CASE("off loopback a token is obligatory", "[comm]") {
  comm::World world{.size = 2, .token = "short"};
  world.timeout = 100ms;
  world.listen_fd = dup(test::free_port().fd());
  CHECK_THROWS_WITH(comm::connect(world), "connect: the job's token has 5 characters, expected at least 16");
  const auto address = outer_address();
  if (address.empty()) {
    WARN("not checked: this machine has no address but loopback");
    return;
  }
  const auto port = comm::Socket::listen(comm::Address::resolve(address, 0)).local().port();
  for (const std::string& where : {address, std::string("0.0.0.0")})
    CHECK_THROWS_WITH(comm::connect({.size = 2, .master_addr = where, .master_port = port, .timeout = 100ms}),
                      Contains("is not on loopback, so ranks need a token"));
  CHECK_THROWS_AS(comm::connect({.rank = 1, .size = 2, .master_addr = address, .master_port = port, .timeout = 100ms}),
                  UsageError);
  for (const auto backend : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(3, [=](comm::World own) {
      own.listen_fd = -1;
      own.master_addr = address;
      own.master_port = port;
      own.token = secret;
      return sum_of_ranks(own, backend);
    });
    CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
  }
}
#else
TEST_CASE("tokens", "[comm]") { WARN("not checked: this build is without OpenSSL"); }
#endif

TEST_CASE("a crowd of strangers does not keep ranks out, and is counted where one is missed", "[comm]") {
  rlimit most{};
  getrlimit(RLIMIT_NOFILE, &most);
  const auto before = std::exchange(most.rlim_cur, most.rlim_max);
  setrlimit(RLIMIT_NOFILE, &most);
  const std::size_t strangers = std::min<std::size_t>(1500, most.rlim_cur / 2);
  std::vector<comm::Socket> crowd;  // more than the host reads at once; they stay, and send nothing
  const auto come = [&](int port) {
    for (std::size_t i = 0; i < strangers; ++i)
      crowd.push_back(comm::Socket::begin_connect(comm::Address::resolve("127.0.0.1", port)));
  };
  {
    test::Ranks ranks(3, [](const comm::World& world) {
      if (world.rank != 0) std::this_thread::sleep_for(500ms);
      const auto start = comm::Clock::now();
      auto c = comm::connect(world);
      std::vector<int> x{world.rank + 1};
      c.all_reduce(std::span(x));
      return cat(x[0], comm::Clock::now() - start < 3s ? "" : " late");
    });
    come(ranks.port());
    CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
  }
  crowd.clear();
  {
    test::Ranks ranks(
        2,
        [](const comm::World& world) {
          if (world.rank == 0) comm::connect(world);
          return std::string();
        },
        1500ms);
    come(ranks.port());
    CHECK_THAT(ranks.outcome(0).text, Contains("rank 1 of 2 did not arrive within 1500 ms; ") &&
                                          Contains(" other connections are not from ranks"));
  }
  most.rlim_cur = before;
  setrlimit(RLIMIT_NOFILE, &most);
}

}  // namespace token_test
