// A rank whose rank 0 says anything.
#include <chorus/comm/meeting/rendezvous.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(rendezvous_join) {
  using namespace chorus::comm;
  using namespace std::chrono_literals;
  fuzz::Parts parts(input);
  const auto how = parts.number();
  std::vector<std::uint8_t> says;
  if (how >= 64) fuzz::append(says, Challenge{.magic = detail::magic});
  if (how >= 128) {
    detail::Answer answer;
    answer.welcome = 1;
    answer.kind = static_cast<Backend>(parts.number());
    answer.pid = how % 2 == 0 ? getpid() : static_cast<std::int32_t>(parts.number(4));
    answer.fd = static_cast<std::int32_t>(parts.number());
    answer.port = static_cast<std::int32_t>(parts.number(4));
    fuzz::append(says, answer);
  }
  const auto rest = parts.rest();
  says.insert(says.end(), rest.begin(), rest.end());
  const fuzz::Impostor host(std::move(says));
  const World world{.rank = 2, .size = 3, .master_port = host.port(), .timeout = 5ms};
  const auto kind = static_cast<Backend>(how % 3);
  const auto meeting = detail::join(world, kind);
  FUZZ_REQUIRE(meeting.kind == Backend::tcp || meeting.kind == Backend::shm);
  for (int rank = 0; rank < world.size && meeting.kind == Backend::tcp; ++rank)
    FUZZ_REQUIRE(meeting.addresses[static_cast<std::size_t>(rank)].sound());
}
