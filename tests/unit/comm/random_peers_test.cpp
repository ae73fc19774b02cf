// Peers that send anything: a group that forms or runs over connections on which bytes are changed. Each rank gets its
// result or an error by the deadline, and no resources leak. CHORUS_RANDOM_SEEDS=FIRST-LAST runs other seeds.
#include <catch.hpp>
#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/transport/mesh.hpp>
#include <filesystem>
#include <future>
#include <memory>
#include <thread>

#include "connection.hpp"
#include "processes.hpp"
#include "random_wire.hpp"

namespace random_peers_test {

using namespace chorus;
using namespace std::chrono_literals;
using comm::Clock;
using test::connection;
using test::Mischief;
using Draw = test::WireDraw;

/// The timeout. If all data arrives, it is long enough for a busy machine.
std::chrono::milliseconds limit(bool harmless) { return harmless ? 10s : 200ms; }

std::ptrdiff_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), std::filesystem::directory_iterator());
}
/// File descriptors and threads of this process. The thread sanitizer starts a thread of its own with the first one.
std::string belongings() {
  [[maybe_unused]] static const bool first = [] {
    std::thread([] {}).join();
    std::this_thread::sleep_for(20ms);
    return true;
  }();
  return cat(entries("/proc/self/fd"), " descriptors, ", entries("/proc/self/task"), " threads");
}

/// Descriptors and threads that differ from `before`; "" if none. Waits a moment, since a joined thread may still be
/// listed.
std::string left_behind(const std::string& before) {
  for (const auto end = Clock::now() + 1s; belongings() != before && Clock::now() < end;)
    std::this_thread::sleep_for(1ms);
  return belongings() == before ? "" : cat(": before ", before, ", after ", belongings());
}

/// One of two ranks: some calls of each collective, short and in many pieces. Returns "" if all results are right.
std::string use(comm::AnyCommunicator& c) {
  const auto mine = static_cast<float>(c.rank() + 1);
  const int peer = 1 - c.rank();
  for (const std::size_t count : {std::size_t{3}, std::size_t{100'000}}) {
    std::vector<float> x(count, mine), y(2 * count, mine), z(count);
    c.all_reduce(std::span(x));
    if (x != std::vector<float>(count, 3)) return "all_reduce";
    c.all_gather(std::span<const float>(x), std::span(y));
    if (y != std::vector<float>(2 * count, 3)) return "all_gather";
    c.reduce_scatter(std::span<const float>(y), std::span(z));
    if (z != std::vector<float>(count, 6)) return "reduce_scatter";
    c.broadcast(std::span(z), 1);
    c.rank() == 0 ? c.send(std::span<const float>(x), peer) : c.recv(std::span(x), peer);
    c.barrier();
  }
  c.monitored_barrier();
  return "";
}

struct Outcome {
  std::string text;  ///< from `use`, or the error's
  double seconds = 0;
};

template <class Body>
std::future<Outcome> in_thread(Body body) {
  return std::async(std::launch::async, [body = std::move(body)]() mutable {
    const auto start = Clock::now();
    Outcome out;
    try {
      out.text = body();
    } catch (const CommError& error) {
      out.text = cat("error: ", error.what());
    }
    out.seconds = std::chrono::duration<double>(Clock::now() - start).count();
    return out;
  });
}

/// What is wrong in the outcomes of two ranks, or "". `harmless`: no byte was changed.
std::string judge(const std::array<Outcome, 2>& outcomes, bool harmless) {
  for (std::size_t rank = 0; rank < 2; ++rank) {
    const auto& [text, seconds] = outcomes[rank];
    if (seconds > 5 && !harmless) return cat("rank ", rank, " took ", seconds, " s: ", text);
    if (harmless && !text.empty()) return cat("rank ", rank, " without need: ", text);
    if (text.starts_with("error: ") && !text.starts_with(cat("error: rank ", rank, ": ")))
      return cat("rank ", rank, " does not say who it is: ", text);
  }
  return "";
}

std::string one_of_two(int rank, comm::Socket data, comm::Socket news, std::chrono::milliseconds timeout) {
  auto link = std::make_unique<comm::TcpTransport>(rank, 2, timeout);
  auto& peer = link->peers()[static_cast<std::size_t>(1 - rank)];
  peer.data = std::move(data);
  peer.news = std::move(news);
  comm::TransportCommunicator c("tcp", std::move(link));
  return use(c);
}

TEST_CASE("a group whose bytes are changed on the way: results or errors, in time", "[comm]") {
  int right = 0, failed = 0;
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    const bool in_news = draw.chance(20);
    const auto before = belongings();
    std::array<Mischief, 2> mischief{Mischief::draw(draw, in_news           ? 1200
                                                          : draw.chance(50) ? 500
                                                                            : 500'000),
                                     Mischief{}};
    if (draw.chance(50)) std::swap(mischief[0], mischief[1]);
    const auto &first = mischief[0], &second = mischief[1];
    const bool harmless = first.kind == Mischief::none && second.kind == Mischief::none;
    const auto what = cat("seed ", seed, in_news ? ", news: " : ", data: ", first.name(), "; ", second.name());
    std::array<Outcome, 2> outcomes;
    {
      auto [data0, data_a] = connection();
      auto [data1, data_b] = connection();
      auto [news0, news_a] = connection();
      auto [news1, news_b] = connection();
      test::Wire data(std::move(data_a), std::move(data_b), in_news ? Mischief{} : first,
                      in_news ? Mischief{} : second);
      test::Wire news(std::move(news_a), std::move(news_b), in_news ? first : Mischief{},
                      in_news ? second : Mischief{});
      auto rank0 = in_thread([harmless, d = std::move(data0), n = std::move(news0)]() mutable {
        return one_of_two(0, std::move(d), std::move(n), limit(harmless));
      });
      auto rank1 = in_thread([harmless, d = std::move(data1), n = std::move(news1)]() mutable {
        return one_of_two(1, std::move(d), std::move(n), limit(harmless));
      });
      outcomes = {rank0.get(), rank1.get()};
    }
    if (const auto wrong = judge(outcomes, harmless); !wrong.empty()) FAIL_CHECK(what << ": " << wrong);
    if (const auto wrong = left_behind(before); !wrong.empty()) FAIL_CHECK(what << wrong);
    (outcomes[0].text.starts_with("error") ? failed : right) += 1;
  };
  test::for_seeds(30, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  if (std::getenv("CHORUS_RANDOM_SEEDS")) return;
  CHECK(right > 0);
  CHECK(failed > 0);
}

TEST_CASE("ranks whose first words are changed on the way: a group or errors, in time", "[comm]") {
  int right = 0, failed = 0;
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    const auto before = belongings();
    const auto kind = draw.chance(60) ? comm::Backend::tcp : comm::Backend::automatic;
    auto mischief = Mischief::draw(draw, 1300);
    const bool to_host = draw.chance(40);
    if (to_host) mischief.at %= sizeof(comm::detail::Hello);
    const auto what = cat("seed ", seed, to_host ? ", to rank 0: " : ", from rank 0: ", mischief.name());
    std::array<Outcome, 2> outcomes;
    {
      auto listener = test::free_port();
      const auto proxy = test::free_port();
      const auto address = listener.local();
      std::vector<std::unique_ptr<test::Wire>> wires;
      std::jthread accepts([&](const std::stop_token& stop) {  // later connections are passed on unchanged
        while (!stop.stop_requested()) {
          proxy.wait(POLLIN, Clock::now() + 10ms);
          auto guest = proxy.accept();
          if (!guest) continue;
          auto host = comm::Socket::connect(address, Clock::now() + 1s);
          if (!host) continue;
          const bool change = wires.empty();
          wires.push_back(std::make_unique<test::Wire>(std::move(guest), std::move(host),
                                                       change && to_host ? mischief : Mischief{},
                                                       change && !to_host ? mischief : Mischief{}));
        }
      });
      comm::World world{.rank = 0, .size = 2, .local_size = 2, .timeout = limit(mischief.kind == Mischief::none)};
      const auto join = [kind](const comm::World& place) {
        auto c = comm::connect(place, {.backend = kind});
        return use(c);
      };
      world.master_port = proxy.local().port();
      world.listen_fd = listener.release();
      auto rank0 = in_thread([=] { return join(world); });
      world.rank = 1;
      world.listen_fd = -1;
      auto rank1 = in_thread([=] { return join(world); });
      outcomes = {rank0.get(), rank1.get()};
    }
    if (const auto wrong = judge(outcomes, mischief.kind == Mischief::none); !wrong.empty())
      FAIL_CHECK(what << ": " << wrong);
    if (const auto wrong = left_behind(before); !wrong.empty()) FAIL_CHECK(what << wrong);
    (outcomes[0].text.empty() && outcomes[1].text.empty() ? right : failed) += 1;
  };
  test::for_seeds(30, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
  if (std::getenv("CHORUS_RANDOM_SEEDS")) return;
  CHECK(right > 0);
  CHECK(failed > 0);
}

TEST_CASE("strangers who say almost the right words: the group forms", "[comm]") {
  const auto try_one = [&](std::uint64_t seed) {
    Draw draw(seed);
    const auto before = belongings();
    std::array<Outcome, 2> outcomes;
    {
      auto listener = test::free_port();
      const auto address = listener.local();
      comm::World world{.rank = 0, .size = 2, .local_size = 2, .master_port = address.port(), .timeout = limit(true)};
#if CHORUS_USE_OPENSSL
      if (draw.chance(50)) world.token = "a secret of this test";
#endif
      const auto join = [](const comm::World& place) {
        auto c = comm::connect(place, {.backend = comm::Backend::tcp});
        return use(c);
      };
      world.listen_fd = listener.release();
      auto rank0 = in_thread([=] { return join(world); });
      world.rank = 1;
      world.listen_fd = -1;
      std::vector<comm::Socket> strangers;
      for (auto n = draw.below(20); n > 0; --n) {
        strangers.push_back(comm::Socket::connect(address, Clock::now() + 1s));
        comm::detail::Hello hello{.rank = 1, .size = 2, .pid = getpid(), .kind = comm::Backend::tcp};
        std::string text(reinterpret_cast<const char*>(&hello), sizeof hello);
        for (auto changes = draw.below(4); changes > 0; --changes)
          text[draw.below(sizeof hello)] = static_cast<char>(draw.below(256));
        std::memcpy(&hello, text.data(), sizeof hello);
        if (world.token.empty() && hello.rank == 1 && hello.size == 2) hello.size = 3;  // as it is, it would be rank 1
        const auto length = draw.chance(80) ? sizeof hello : draw.below(sizeof hello);
        strangers.back().try_send(comm::bytes_of(hello).first(length));
        if (draw.chance(20)) strangers.back().try_send(comm::bytes_of(hello));
        if (draw.chance(30)) strangers.pop_back();
      }
      auto rank1 = in_thread([=] { return join(world); });
      outcomes = {rank0.get(), rank1.get()};
    }
    for (const auto& [text, seconds] : outcomes)
      if (!text.empty()) FAIL_CHECK("seed " << seed << ": " << text);
    if (const auto wrong = left_behind(before); !wrong.empty()) FAIL_CHECK("seed " << seed << wrong);
  };
  test::for_seeds(30, try_one, [](std::uint64_t seed) { return cat("seed ", seed, "\n"); });
}

}  // namespace random_peers_test
