// Rank 0 of a mesh, whose peers are to connect, and guests who say anything: each a byte, and in every other input what
// a peer would say first.
#include <chorus/comm/transport/mesh.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(mesh) {
  using namespace chorus::comm;
  using namespace std::chrono_literals;
  fuzz::Parts parts(input);
  Meeting meeting;
  meeting.key = 7;
  meeting.listener = Socket::listen(Address::resolve("127.0.0.1", 0));
  const auto address = meeting.listener.local();
  const World world{.rank = 0, .size = 2, .timeout = 5ms};
  std::vector<Socket> guests;
  for (int i = 0; i < 4 && !parts.empty(); ++i) {
    const auto how = parts.number();
    guests.push_back(Socket::connect(address, Clock::now() + 1s));
    detail::MeshHello hello{.key = meeting.key, .rank = 1, .lane = static_cast<std::int32_t>(how / 2 % 3), .to = 0};
    const auto changed = parts.bytes(how / 8);
    std::memcpy(&hello, changed.data(), how % 2 == 1 ? std::min(changed.size(), sizeof hello) : 0);
    guests.back().try_send(std::as_bytes(std::span(&hello, 1)));
  }
  TcpTransport link(0, 2, 5ms);
  connect_all(world, meeting, link.peers());
  FUZZ_REQUIRE(link.peers()[1].data && link.peers()[1].news);
  std::array<std::byte, 1> one;
  FUZZ_REQUIRE(link.peers()[1].news.try_receive(one) == 0);
}
