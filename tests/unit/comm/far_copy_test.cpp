// Copies with non-temporal stores, and writes to connections that the peer has closed.
#include <sys/socket.h>
#include <unistd.h>

#include <catch.hpp>
#include <chorus/comm/transport/far_copy.hpp>
#include <chorus/core/held_signal.hpp>
#include <vector>

namespace far_copy_test {

using namespace chorus;

TEST_CASE("FarCopy copies every byte and no other, whichever way it takes", "[comm]") {
  constexpr std::size_t most = 40'000, border = 64;
  std::vector<std::byte> from(most + 1), memory(most + 2 * border + 64);
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251);
  const auto misaligned = reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
  std::byte* const out = memory.data() + border + (64 - misaligned) % 64;
  comm::FarCopy copy;
  // More iterations than there are between two measurements.
  for (int turn = 0; turn < 100; ++turn) {
    for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, std::size_t{63}, std::size_t{64}, std::size_t{4097},
                                    std::size_t{16'384}, std::size_t{16'385}, most}) {
      std::fill(memory.begin(), memory.end(), std::byte{0xee});
      const std::byte* const in = from.data() + turn % 2;
      copy(out, in, bytes);
      if (!std::equal(in, in + bytes, out)) FAIL("turn " << turn << ", " << bytes << " bytes: something else came");
      if (out[-1] != std::byte{0xee} || out[bytes] != std::byte{0xee})
        FAIL("turn " << turn << ", " << bytes << " bytes: more than them were written");
    }
  }
}

TEST_CASE("HeldSignal: a write to a closed connection fails, and the process lives", "[comm]") {
  int pair[2];
  REQUIRE(socketpair(AF_UNIX, SOCK_STREAM, 0, pair) == 0);
  close(pair[1]);
  const auto blocked = [] {
    sigset_t mask;
    pthread_sigmask(SIG_BLOCK, nullptr, &mask);
    return sigismember(&mask, SIGPIPE) == 1;
  };
  {
    const detail::HeldSignal block(SIGPIPE);
    CHECK(blocked());
    CHECK(write(pair[0], "x", 1) == -1);
    CHECK(errno == EPIPE);
  }
  CHECK(!blocked());
  sigset_t pending;
  sigpending(&pending);
  CHECK(sigismember(&pending, SIGPIPE) == 0);
  close(pair[0]);
}

}  // namespace far_copy_test
