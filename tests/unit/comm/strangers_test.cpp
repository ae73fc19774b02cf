// What a group's connections do with strangers, and with messages that no rank sends.
#include <sys/resource.h>

#include <catch.hpp>
#include <chorus/comm/transport/mesh.hpp>

#include "connection.hpp"
#include "processes.hpp"

namespace strangers_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using comm::Clock;
using test::connection;

template <class Message>
void say(const comm::Socket& socket, const Message& message) {
  socket.send_all(std::as_bytes(std::span(&message, 1)), Clock::now() + 1s);
}

TEST_CASE("a guest that sends a byte now and then is heard for 5 s, beside others, and no longer", "[comm]") {
  const auto port = test::free_port();
  const auto slow = comm::Socket::connect(port.local(), Clock::now() + 1s);
  comm::Acceptor guests(port, 16);
  std::jthread drip([&](const std::stop_token& stop) {
    for (int i = 0; i < 15 && !stop.stop_requested(); ++i, std::this_thread::sleep_for(1s))
      slow.try_send(std::as_bytes(std::span("x", 1)));
  });
  CHECK(!guests.next(Clock::now() + 300ms).socket);
  const auto quick = comm::Socket::connect(port.local(), Clock::now() + 1s);
  say(quick, std::array<char, 16>{});
  CHECK(guests.next(Clock::now() + 2s).socket);
  CHECK(!slow.ended());
  const auto start = Clock::now();
  CHECK(!guests.next(start + 7s).socket);
  CHECK(slow.ended());
  CHECK(Clock::now() - start < 9s);
}

TEST_CASE("a crowd of strangers that leaves no descriptors does not keep ranks out", "[comm]") {
  const auto body = [](const comm::World& world) {
    const rlimit few{40, 40};
    if (world.rank == 0) setrlimit(RLIMIT_NOFILE, &few);
    if (world.rank != 0) std::this_thread::sleep_for(500ms);
    auto c = comm::connect(world);
    std::vector<int> x{world.rank + 1};
    c.all_reduce(std::span(x));
    return cat(x[0]);
  };
  test::Ranks ranks(3, body, 9s);
  const auto address = comm::Address::resolve("127.0.0.1", ranks.port());
  std::vector<comm::Socket> crowd;
  for (int i = 0; i < 100; ++i) crowd.push_back(comm::Socket::connect(address, Clock::now() + 100ms));
  CHECK(ranks.texts() == std::vector<std::string>(3, "6"));
}

TEST_CASE("strangers at a rank's own port don't become its peers", "[comm]") {
  comm::Meeting meeting;
  meeting.key = 0x1234'5678'9abc'def0;
  meeting.listener = test::free_port();
  const auto address = meeting.listener.local();
  const comm::World world{.rank = 0, .size = 2, .timeout = 2s};
  std::vector<comm::Socket> open;
  const auto visit = [&](comm::detail::MeshHello hello) {
    open.push_back(comm::Socket::connect(address, Clock::now() + 1s));
    comm::Challenge challenge;
    open.back().receive_all(comm::bytes_of(challenge), Clock::now() + 1s);
    hello.proof = comm::detail::proof_of(hello, challenge.nonce, world.token);
    say(open.back(), hello);
  };
  const auto hello_for = [&](int lane) {
    return comm::detail::MeshHello{.key = meeting.key, .rank = 1, .lane = lane, .to = 0};
  };
  const auto strangers = [&] {
    const auto changed = [&](auto change) {  // on both lanes
      for (const int lane : {0, 1}) {
        auto hello = hello_for(lane);
        change(hello);
        visit(hello);
      }
    };
    changed([](auto& hello) { hello.key = 1; });
    changed([](auto& hello) { hello.rank = 0; });
    changed([](auto& hello) { hello.rank = -1; });
    changed([](auto& hello) { hello.rank = 1 << 30; });
    changed([](auto& hello) { hello.lane += 2; });
    changed([](auto& hello) { hello.lane = -1 << 30; });
    changed([](auto& hello) { hello.to = 1; });
    for (const auto& text : {"GET / HTTP/1.1\r\n\r\n" + std::string(200, ' '), std::string(100'000, '\xff')}) {
      open.push_back(comm::Socket::connect(address, Clock::now() + 1s));
      open.back().try_send(std::as_bytes(std::span(text)));
    }
  };
  SECTION("alone, they are no rank 1") {
    const std::jthread others(strangers);
    comm::TcpTransport::Peers peers;
    CHECK_THROWS_WITH(comm::connect_all(world, meeting, peers), "rank 0: rank 1 did not connect within 2000 ms");
  }
  SECTION("and the real one gets its place") {
    comm::TcpTransport link(0, 2, 2s);
    {
      const std::jthread others([&] {
        strangers();
        for (const int lane : {0, 1}) visit(hello_for(lane));
      });
      comm::connect_all(world, meeting, link.peers());
    }
    for (const int lane : {0, 1}) {
      const auto& own = lane == 0 ? link.peers()[1].data : link.peers()[1].news;
      CHECK(own.remote().port() == open[open.size() - 2 + static_cast<std::size_t>(lane)].local().port());
    }
  }
  SECTION("and keeps it, whoever says the same again") {
    comm::TcpTransport link(0, 2, 2s);
    {
      const std::jthread others([&] {
        visit(hello_for(0));
        std::this_thread::sleep_for(50ms);
        visit(hello_for(0));
        std::this_thread::sleep_for(50ms);
        visit(hello_for(1));
      });
      comm::connect_all(world, meeting, link.peers());
    }
    CHECK(link.peers()[1].data.remote().port() == open[0].local().port());
  }
#if CHORUS_USE_OPENSSL
  SECTION("nor does anyone come in with what was overheard") {
    const comm::World secret{.rank = 0, .size = 2, .token = "a secret of this test", .timeout = 1s};
    comm::TcpTransport::Peers peers;
    const std::jthread others([&] {
      auto hello = hello_for(0);
      hello.proof = comm::detail::proof_of(hello, {}, secret.token);  // for another challenge
      for (const int lane : {0, 1}) {
        open.push_back(comm::Socket::connect(address, Clock::now() + 1s));
        hello.lane = lane;
        say(open.back(), hello);
      }
    });
    CHECK_THROWS_WITH(comm::connect_all(secret, meeting, peers), "rank 0: rank 1 did not connect within 1000 ms");
    CHECK(!peers[1].data);
  }
#endif
}

TEST_CASE("what no rank would send over a group's connections is an error", "[comm]") {
  auto [data, far_data] = connection();
  auto [news, far_news] = connection();
  comm::TcpTransport link(0, 2, 500ms);
  link.peers()[1].data = std::move(data);
  link.peers()[1].news = std::move(news);
  const comm::Envelope call{.op = comm::Op::all_gather, .dtype = DType::u64, .count = 1};
  SECTION("a length of 2^63") {
    say(far_data, comm::detail::PieceHead{call, 1ull << 63});
    CHECK_THROWS_WITH(link.receive(1),
                      "rank 1 announced a piece of 9223372036854775808 bytes, expected at most 524288");
  }
  SECTION("garbage") {
    say(far_data, std::array<std::uint64_t, 100>{~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull, ~0ull});
    CHECK_THROWS_WITH(link.receive(1), Contains("rank 1 announced a piece of 18446744073709551615 bytes"));
  }
  SECTION("a piece longer than the place for it") {
    say(far_data, comm::detail::PieceHead{call, 1000});
    say(far_data, std::array<char, 1000>{});
    std::array<std::byte, 24> place;
    place.fill(std::byte{7});
    const auto piece = link.receive_at(1, call, place.data() + 8, 8);
    CHECK(piece.bytes == 1000);
    CHECK(piece.data != place.data() + 8);
    CHECK(std::all_of(place.begin(), place.end(), [](std::byte b) { return b == std::byte{7}; }));
  }
  SECTION("half a piece, and no more") {
    say(far_data, comm::detail::PieceHead{call, 1000});
    say(far_data, std::array<char, 500>{});
    CHECK_THROWS_AS(link.receive(1), comm::LinkTimeout);
  }
  SECTION("news about ranks that there are not") {
    comm::detail::News odd{.kind = comm::detail::News::waits, .other = 1 << 30};
    odd.reason.characters.fill('x');
    say(far_news, odd);
    odd.kind = 77;
    say(far_news, odd);
    CHECK_THROWS_WITH(link.receive(1), "waited 500 ms for rank 1, which is stopped or busy");
    odd.kind = comm::detail::News::gives_up;  // its reason has no terminating zero
    say(far_news, odd);
    CHECK_THROWS_WITH(link.receive(1), Contains("rank 1 gave up: xxx"));
  }
}

TEST_CASE("what a rank has sent counts, though it is heard first that the rank has left", "[comm]") {
  auto [data, far_data] = connection();
  auto [news, far_news] = connection();
  comm::TcpTransport link(0, 2, 2s);
  link.peers()[1].data = std::move(data);
  link.peers()[1].news = std::move(news);
  const comm::Envelope call{.op = comm::Op::all_gather, .dtype = DType::u64, .count = 1};
  say(far_news, comm::detail::News{.kind = comm::detail::News::leaves});
  std::jthread late([&, &far = far_data] {
    std::this_thread::sleep_for(50ms);
    say(far, comm::detail::PieceHead{call, 1000});
    say(far, std::array<char, 1000>{});
    far = comm::Socket();
  });
  CHECK(link.receive(1).bytes == 1000);
  link.release(1);
  CHECK_THROWS_WITH(link.receive(1), "rank 1 has left the group");
}

TEST_CASE("a rank that goes away before all have come is gone, whatever it has said", "[comm]") {
  auto port = test::free_port();
  comm::detail::Hello hello;
  hello.rank = 1;
  hello.size = 3;
  hello.kind = comm::Backend::tcp;
  {
    const auto guest = comm::Socket::connect(port.local(), Clock::now() + 1s);
    say(guest, hello);
    say(guest, 'x');
  }
  const comm::World world{.rank = 0, .size = 3, .listen_fd = port.release(), .timeout = 5s};
  CHECK_THROWS_WITH(comm::detail::Host(world, comm::Backend::tcp).meet(),
                    Contains("rank 1 (process 0) exited before all ranks had connected"));
}

TEST_CASE("a rank 0 that answers nonsense is an error of who joins it", "[comm]") {
  const auto answers = [](comm::detail::Answer answer) {
    const auto port = test::free_port();
    std::jthread impostor([&] {
      comm::Socket guest;
      while (!guest) guest = port.accept();
      say(guest, comm::Challenge{.magic = comm::detail::magic});
      comm::detail::Hello hello;
      guest.receive_all(comm::bytes_of(hello), Clock::now() + 1s);
      say(guest, answer);
      say(guest, std::array<std::uint64_t, 1 << 11>{~0ull, ~0ull, ~0ull});
    });
    const auto start = Clock::now();
    std::string what;
    try {
      const comm::World world{.rank = 2, .size = 3, .master_port = port.local().port(), .timeout = 1s};
      comm::connect(world);
    } catch (const CommError& error) {
      what = error.what();
    }
    CHECK(Clock::now() - start < 5s);
    return what;
  };
  comm::detail::Answer answer;
  answer.refusal.characters.fill('x');  // without a terminating zero
  answer.proof.fill(decltype(answer.proof)::value_type{'y'});
  CHECK_THAT(answers(answer), Contains("rank 2: xxx") && !Contains("y"));
  answer.refusal = comm::FixedText<1024>("\x1b[2Jall is\nwell\xff");
  CHECK_THAT(answers(answer), Contains("rank 2: \\x1b[2Jall is\\x0awell\\xff"));
  answer.proof = {};
  answer.refusal = {};
  CHECK_THAT(answers(answer), Contains("rank 2: rank 0 refused it without a reason"));
  answer.magic ^= 1;
  CHECK_THAT(answers(answer), Contains("the answer of rank 0 is damaged"));
  answer.magic ^= 1;
  answer.welcome = 1;
  for (const auto kind : {static_cast<comm::Backend>(99), comm::Backend::thread, comm::Backend::tcp}) {
    answer.kind = kind;
    CHECK_THAT(answers(answer), Contains("rank 2: ") && Contains("the answer of rank 0 is damaged"));
  }
  answer.kind = comm::Backend::shm;
  answer.pid = answer.fd = -1 << 30;
  CHECK_THAT(answers(answer), Contains("rank 2: "));
}

}  // namespace strangers_test
