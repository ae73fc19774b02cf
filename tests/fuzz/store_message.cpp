// Messages of a store as they come in, one behind the other: what is understood is sent as it came.
#include <chorus/comm/store/store_messages.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(store_message) {
  using namespace chorus::comm;
  const auto [near, far] = fuzz::connection();
  input = input.first(std::min<std::size_t>(input.size(), 100'000));
  fuzz::say(near, input);
  std::size_t read = 0;
  while (const auto message = detail::receive(far, Clock::now() + std::chrono::seconds(1))) {
    const auto [back, forth] = fuzz::connection();
    FUZZ_REQUIRE(detail::send(back, *message, Clock::now() + std::chrono::seconds(1)));
    std::vector<std::uint8_t> bytes(sizeof(detail::StoreHead) + detail::body_bytes(*message));
    FUZZ_REQUIRE(forth.receive_all(std::as_writable_bytes(std::span(bytes)), Clock::now() + std::chrono::seconds(1)));
    constexpr auto reserved = offsetof(detail::StoreHead, reserved);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      FUZZ_REQUIRE(bytes[i] == input[read + i] || (i >= reserved && i < reserved + 3));
    read += bytes.size();
  }
}
