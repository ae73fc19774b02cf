// Rank 0 where others meet, and guests who say anything: each of up to three a length and bytes, of which every other
// stays. Where it takes them for ranks, they are its peers in the mesh, too.
#include <chorus/comm/transport/mesh.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(rendezvous_host) {
  using namespace chorus::comm;
  using namespace std::chrono_literals;
  fuzz::Parts parts(input);
  const auto how = parts.number();
  const auto kind = static_cast<Backend>(how % 3);
  auto listener = Socket::listen(Address::resolve("127.0.0.1", 0));
  const auto address = listener.local();
  World world{.rank = 0, .size = 2 + static_cast<int>(how / 4 % 2), .timeout = 5ms, .purpose = "fuzz"};
  std::vector<Socket> guests;
  for (int i = 0; i < 3 && !parts.empty(); ++i) {
    const auto length = parts.number();
    const auto says = parts.bytes(length % 250);
    std::vector<std::uint8_t> bytes(says.begin(), says.end());
    if (how / 8 % 2 == 1 && bytes.size() >= sizeof(detail::Hello)) {  // from this machine, which no input can know
      const auto machine = detail::machine_id();
      std::memcpy(bytes.data() + offsetof(detail::Hello, machine), &machine, sizeof machine);
    }
    guests.push_back(Socket::connect(address, Clock::now() + 1s));
    guests.back().try_send(std::as_bytes(std::span(bytes)));
    if (length >= 250) shutdown(guests.back().fd(), SHUT_WR);
  }
  world.listen_fd = listener.release();
  auto meeting = detail::Host(world, kind).meet();
  FUZZ_REQUIRE(meeting.kind == Backend::tcp || meeting.kind == Backend::shm);
  FUZZ_REQUIRE(kind != Backend::shm || meeting.kind == kind);
}
