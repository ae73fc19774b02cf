// How ranks find each other, and that strangers can't prevent it.
#include <catch.hpp>

#include "processes.hpp"

namespace rendezvous_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::Equals;

std::string sum_of_ranks(const comm::World& world) {
  auto c = comm::connect(world);
  std::vector<int> x{world.rank + 1};
  c.all_reduce(std::span(x));
  return cat(x[0]);
}

comm::Socket visit(int port) {
  return comm::Socket::connect(comm::Address::resolve("127.0.0.1", port), comm::Clock::now() + 1s);
}
void say(const comm::Socket& socket, std::string_view text) {
  socket.send_all(std::as_bytes(std::span(text)), comm::Clock::now() + 100ms);
}
std::string hear_refusal(const comm::Socket& socket, bool challenged = false) {
  comm::Challenge challenge;
  comm::detail::Answer answer;
  if (!challenged && !socket.receive_all(comm::bytes_of(challenge), comm::Clock::now() + 1s)) return "closed";
  if (!socket.receive_all(comm::bytes_of(answer), comm::Clock::now() + 1s)) return "closed";
  return answer.welcome ? "welcome" : std::string(answer.refusal.view());
}

TEST_CASE("ranks that come in any order, and late, form a group", "[comm]") {
  test::Ranks ranks(4, [](const comm::World& world) {
    std::this_thread::sleep_for(world.rank * 20ms);
    return sum_of_ranks(world);
  });
  CHECK(ranks.texts() == std::vector<std::string>(4, "10"));
  const auto port = test::free_port().local().port();  // nobody listens yet: they retry until rank 0 does
  test::Ranks others(3, [port](comm::World world) {
    world.listen_fd = -1;
    world.master_port = port;
    if (world.rank == 0) std::this_thread::sleep_for(100ms);
    return sum_of_ranks(world);
  });
  CHECK(others.texts() == std::vector<std::string>(3, "6"));
}

TEST_CASE("strangers at the port don't keep ranks from forming", "[comm]") {
  comm::detail::Hello twin{.rank = 1, .size = 3}, wrong_size{.rank = 2, .size = 9}, no_such{.rank = 7, .size = 3},
      other_kind{.rank = 2, .size = 3, .kind = comm::Backend::tcp}, huge{.rank = 1 << 30, .size = 3};
  huge.machine = ~0ull;
  test::Ranks ranks(3, [](const comm::World& world) {
    if (world.rank == 2) std::this_thread::sleep_for(400ms);
    return sum_of_ranks(world);
  });
  std::vector<comm::Socket> silent;
  for (int i = 0; i < 20; ++i) silent.push_back(visit(ranks.port()));  // half open: they send nothing
  std::jthread slow([&] {                                              // one byte at a time, without end
    for (int i = 0; i < 10; ++i, std::this_thread::sleep_for(30ms)) say(silent[1], "c");
  });
  const auto http = visit(ranks.port()), garbage = visit(ranks.port()), length = visit(ranks.port());
  say(http, "GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a browser\r\nAccept: */*\r\n\r\n");
  say(garbage, std::string(100'000, '\xff'));
  const std::uint64_t too_long[] = {1ull << 63, 1ull << 63, 1ull << 63, 1ull << 63, 1ull << 63, 1ull << 63};
  length.send_all(std::as_bytes(std::span(too_long)), comm::Clock::now() + 100ms);
  std::this_thread::sleep_for(100ms);  // by now the real rank 1 has connected

  const auto refused = [&](comm::detail::Hello& hello) {
    const auto socket = visit(ranks.port());
    socket.send_all(comm::bytes_of(hello), comm::Clock::now() + 100ms);
    return hear_refusal(socket);
  };
  CHECK_THAT(refused(twin), Contains("rank 1 is connected already, as process "));
  CHECK_THAT(refused(wrong_size), Contains("rank 2 expects 9 ranks, rank 0 expects 3"));
  CHECK_THAT(refused(no_such), Contains("rank 7 is not in [1, 3)"));
  CHECK_THAT(refused(huge), Contains("rank 1073741824 is not in [1, 3)"));
  CHECK_THAT(refused(other_kind), Contains("rank 2 uses backend tcp, rank 0 uses auto"));
  CHECK(hear_refusal(http) == "closed");
  CHECK(hear_refusal(garbage) == "closed");
  CHECK(hear_refusal(length) == "closed");
  CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
}

TEST_CASE("a rank that never arrives is named", "[comm]") {
  test::Ranks ranks(
      4, [](const comm::World& world) { return world.rank == 1 || world.rank == 3 ? "" : sum_of_ranks(world); },
      1000ms);
  const auto expected =
      cat("rank 0: rendezvous at 127.0.0.1:", ranks.port(), ": ranks 1, 3 of 4 did not arrive within 1000 ms");
  CHECK_THAT(ranks.outcome(0).text, Equals(expected));
  const auto other = ranks.outcome(2);
  CHECK_THAT(other.text, Equals("rank 2: " + expected));
  CHECK(other.seconds < 2);
}

TEST_CASE("a rank that died before the group formed may come again", "[comm]") {
  test::Ranks ranks(3, [](const comm::World& world) {
    if (world.rank == 1) std::this_thread::sleep_for(200ms);
    if (world.rank == 2) std::this_thread::sleep_for(100ms);
    return sum_of_ranks(world);
  });
  {
    comm::detail::Hello hello{.rank = 1, .size = 3};
    visit(ranks.port()).send_all(comm::bytes_of(hello), comm::Clock::now() + 100ms);  // closes at once
  }
  CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
}

TEST_CASE("a rank that is killed while others are awaited is named at once, not at the deadline", "[comm]") {
  for (const int victim : {2, 0}) {
    const auto port = test::free_port().local().port();
    test::Ranks ranks(
        4,
        [port](comm::World world) -> std::string {
          if (world.rank == 3) {  // never joins
            std::this_thread::sleep_for(6s);
            return "";
          }
          world.listen_fd = -1;
          world.master_port = port;
          return sum_of_ranks(world);
        },
        30s);
    std::this_thread::sleep_for(500ms);  // by now ranks 1 and 2 have connected to rank 0
    const auto killed = comm::Clock::now();
    kill(ranks.pid(victim), SIGKILL);
    for (int rank = 0; rank < 3; ++rank) {
      if (rank == victim) continue;
      const auto outcome = ranks.outcome(rank);
      CHECK(comm::Clock::now() - killed < 4s);
      INFO(outcome.text);
      CHECK_THAT(outcome.text, Contains(cat("rank ", rank, ": ")) && Contains(cat("rank ", victim, " ")) &&
                                   Contains("exited before all ranks had connected"));
      if (victim == 2) CHECK_THAT(outcome.text, Contains(cat("rank 2 (process ", ranks.pid(2), ")")));
    }
  }
}

TEST_CASE("no rank 0", "[comm]") {
  const auto port = test::free_port().local().port();
  CHECK_THROWS_WITH(
      comm::connect({.rank = 1, .size = 2, .master_port = port, .timeout = 100ms}),
      cat("rank 1: rendezvous at 127.0.0.1:", port, ": rank 0 did not answer within 100 ms: Connection refused"));
  const auto silent = test::free_port();  // accepts connections, sends nothing
  CHECK_THROWS_WITH(comm::connect({.rank = 1, .size = 2, .master_port = silent.local().port(), .timeout = 100ms}),
                    Contains("it accepted the connection and did not answer"));
  const auto server = test::free_port();
  std::thread web([&] {
    comm::Socket client;
    while (!client) client = server.accept();
    say(client, "HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n");
  });
  CHECK_THROWS_WITH(comm::connect({.rank = 1, .size = 2, .master_port = server.local().port(), .timeout = 1s}),
                    Contains("the process there is not a rank 0 of this version"));
  web.join();
}

TEST_CASE("addresses that cannot be used", "[comm]") {
  const auto taken = test::free_port();
  const auto port = taken.local().port();
  CHECK_THROWS_WITH(comm::connect({.size = 2, .master_port = port, .timeout = 100ms}),
                    cat("cannot listen on 127.0.0.1:", port,
                        ": Address already in use (another job or program listens there; choose another port)"));
  CHECK_THROWS_WITH(comm::connect({.size = 2, .master_addr = "192.0.2.1", .master_port = port, .timeout = 100ms}),
                    Contains("cannot listen on 192.0.2.1:") && Contains("it is not an address of this machine"));
  CHECK_THROWS_WITH(comm::connect({.size = 2, .master_addr = "no such name", .master_port = port, .timeout = 100ms}),
                    Contains("address 'no such name': "));
}

TEST_CASE("nothing listens outside loopback, nor at all once the group has formed", "[comm]") {
  for (const auto kind : {comm::Backend::shm, comm::Backend::tcp}) {
    test::Ranks ranks(2, [kind](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = kind});
      c.barrier();
      test::Ranks::give_sign();
      for (int fd = 3; fd < 100; ++fd) {
        int listens = 0;
        socklen_t length = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &length) == 0 && listens) {
          comm::Address address;
          getsockname(fd, address.data(), &address.length);
          return cat("listens on ", address);
        }
      }
      c.barrier();
      return "";
    });
    for (const auto& text : ranks.texts()) CHECK(text == "");
  }
}

TEST_CASE("within a machine connections that carry data are not paced", "[comm]") {
  test::Ranks ranks(2, [](const comm::World& world) {
    auto c = comm::connect(world, {.backend = comm::Backend::tcp});
    int connected = 0, plain = 0;
    for (int fd = 3; fd < 100; ++fd) {
      char name[16]{};
      socklen_t length = sizeof name - 1;
      sockaddr_storage peer{};
      socklen_t peer_length = sizeof peer;
      if (getpeername(fd, reinterpret_cast<sockaddr*>(&peer), &peer_length) != 0) continue;
      if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &length) != 0) continue;
      ++connected;
      plain += std::string_view(name) == "reno";
    }
    c.barrier();
    return cat(connected >= 2 && plain >= 1 ? "" : cat(plain, " of ", connected));
  });
  for (const auto& text : ranks.texts()) CHECK(text == "");
}

TEST_CASE("IPv6", "[comm]") {
  comm::Socket listener;
  try {
    listener = comm::Socket::listen(comm::Address::resolve("::1", 0));
  } catch (const CommError&) {
    WARN("this machine has no IPv6 loopback");
    return;
  }
  const auto port = listener.local().port();
  listener = comm::Socket();
  test::Ranks ranks(3, [port](comm::World world) {
    world.listen_fd = -1;
    world.master_addr = "::1";
    world.master_port = port;
    auto c = comm::connect(world, {.backend = comm::Backend::tcp});
    std::vector<int> x{world.rank + 1};
    c.all_reduce(std::span(x));
    return cat(x[0]);
  });
  CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
}

}  // namespace rendezvous_test
