// A rank whose rank 0 says anything.
#include <chorus/comm/rendezvous.hpp>
#include <thread>

#include "fuzz.hpp"

FUZZ_TARGET(rendezvous_join) {
  using namespace chorus::comm;
  using namespace std::chrono_literals;
  fuzz::Parts parts(input);
  const auto how = parts.number();
  std::vector<std::uint8_t> says;
  const auto add = [&](const auto& message) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(&message);
    says.insert(says.end(), bytes, bytes + sizeof message);
  };
  if (how >= 64) add(Challenge{detail::magic, {}});
  if (how >= 128) {
    detail::Answer answer;
    answer.welcome = 1;
    answer.kind = static_cast<Backend>(parts.number());
    answer.pid = how % 2 == 0 ? getpid() : static_cast<std::int32_t>(parts.number(4));
    answer.fd = static_cast<std::int32_t>(parts.number());
    answer.port = static_cast<std::int32_t>(parts.number(4));
    add(answer);
  }
  const auto rest = parts.rest();
  says.insert(says.end(), rest.begin(), rest.end());
  static const auto listener = Socket::listen(Address::resolve("127.0.0.1", 0));
  while (listener.accept()) {  // who came last time, too late
  }
  std::jthread host([&] {
    if (!listener.wait(POLLIN, Clock::now() + 200ms)) return;
    const auto guest = listener.accept();
    if (!guest) return;
    fuzz::say(guest, says);
    std::array<std::byte, 4096> some;
    const auto deadline = Clock::now() + 200ms;
    while (guest.try_receive(some) >= 0 && Clock::now() < deadline) guest.wait(POLLIN, Clock::now() + 1ms);
  });
  const World world{.rank = 2, .size = 3, .master_port = listener.local().port(), .timeout = 5ms};
  const auto kind = static_cast<Backend>(how % 3);
  const auto meeting = detail::join(world, kind);
  FUZZ_REQUIRE(meeting.kind == Backend::tcp || meeting.kind == Backend::shm);
  for (int rank = 0; rank < world.size && meeting.kind == Backend::tcp; ++rank)
    FUZZ_REQUIRE(meeting.addresses[static_cast<std::size_t>(rank)].sound());
}
