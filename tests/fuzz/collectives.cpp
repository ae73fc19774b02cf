// A rank in a collective over TCP whose only peer says anything, on the connection of data and on that of news.
#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/comm/split_impl.hpp>
#include <chorus/comm/transport/tcp_transport.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(collectives) {
  using namespace chorus::comm;
  fuzz::Parts parts(input);
  const auto how = parts.number(), count = parts.number(), news_bytes = parts.number(2);
  auto [data, far_data] = fuzz::connection();
  auto [news, far_news] = fuzz::connection();
  auto link = std::make_unique<TcpTransport>(static_cast<int>(how / 128), 2, std::chrono::milliseconds(3));
  const int peer = 1 - static_cast<int>(how / 128);
  auto& connections = link->peers()[static_cast<std::size_t>(peer)];
  connections.data = std::move(data);
  connections.news = std::move(news);
  const auto of_news = parts.bytes(news_bytes);
  far_news.try_send(std::as_bytes(of_news));
  // Nobody waits for one that has left, nor for one that is gone.
  constexpr detail::News leaves;
  if (how / 64 % 2 == 1) far_news.try_send(std::as_bytes(std::span(&leaves, 1)));
  if (how / 64 % 2 == 0) shutdown(far_news.fd(), SHUT_WR);
  fuzz::say(far_data, parts.rest());
  TransportCommunicator all("tcp", std::move(link));

  std::vector<float> numbers(count), more(2 * count);
  const auto mine = std::span(numbers), both = std::span(more);
  switch (how % 16) {
    case 0:
      return all.all_reduce(mine);
    case 1:
      return all.broadcast(mine, peer);
    case 2:
      return all.all_gather(mine, both);
    case 3:
      return all.reduce_scatter(both, mine);
    case 4:
      return all.barrier();
    case 5:
      return all.monitored_barrier();
    case 6:
      return all.recv(mine, peer);
    case 7:
      return all.send(mine, peer);
    case 8: {
      const auto texts = all_gather_object(all, std::string(count, 'x'));
      FUZZ_REQUIRE(texts.size() == 2);
      return;
    }
    case 9:
      broadcast_object(all, "own", peer);
      return;
    case 10: {
      const auto group = split(all, {.rank = 1 - peer, .size = 2}, 0, static_cast<int>(count));
      FUZZ_REQUIRE(group.size >= 1 && group.size <= 2 && group.rank < group.size);
      FUZZ_REQUIRE(group.master_addr.size() < sizeof(detail::SplitAddress::text));
      if (group.listen_fd >= 0) close(group.listen_fd);
      return;
    }
    default:
      all.all_reduce(std::span(reinterpret_cast<std::int32_t*>(numbers.data()), count), ReduceOp::max);
      all.barrier();
  }
}
