#pragma once
/// A TCP connection with both ends in this process.

#include <utility>

#include "processes.hpp"

namespace test {

inline std::pair<ch::comm::Socket, ch::comm::Socket> connection() {
  const auto port = free_port();
  auto near = ch::comm::Socket::connect(port.local(), ch::comm::Clock::now() + 1s);
  ch::comm::Socket far;
  while (!far) far = port.accept();
  near.no_delay();
  far.no_delay();
  return {std::move(near), std::move(far)};
}

}  // namespace test
