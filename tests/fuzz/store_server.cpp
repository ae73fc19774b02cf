// A store that somebody talks to who says anything: as a user, as a stranger at its port, or as who has come in there.
// It answers everybody else as if nothing were.
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_server.hpp>

#include "fuzz.hpp"

namespace fuzz_store_server {

using namespace chorus::comm;

/// Until the server closes the connection.
void listen_to(const Socket& socket) {
  std::array<std::byte, 4096> some;
  const auto deadline = Clock::now() + std::chrono::seconds(2);
  for (std::ptrdiff_t n = 0; n >= 0 && Clock::now() < deadline; n = socket.try_receive(some))
    if (n == 0) socket.wait(POLLIN, deadline);
  FUZZ_REQUIRE(Clock::now() < deadline);
}

void expect_answers(Store store) {
  store.set_timeout(std::chrono::seconds(2));
  store.set("fuzz's own key", "value");
  FUZZ_REQUIRE(store.get("fuzz's own key") == "value");
}

}  // namespace fuzz_store_server

FUZZ_TARGET(store_server) {
  fuzz::Parts parts(input);
  const auto how = parts.number() % 4;
  if (how < 2) {
    const auto server = std::make_shared<StoreServer>();
    const auto socket = server->attach();
    fuzz::say(socket, parts.rest());
    listen_to(socket);
    expect_answers(Store(server));
    return;
  }
  constexpr std::uint64_t key = 7;
  static const auto listener = Socket::listen(Address::resolve("127.0.0.1", 0));
  static std::shared_ptr<StoreServer> server;
  if (!server) server = std::make_shared<StoreServer>(Socket(dup(listener.fd())), "", key);
  auto socket = Socket::connect(listener.local(), Clock::now() + std::chrono::seconds(2));
  if (how == 3) {
    const detail::StoreHello hello{.key = key};
    socket.try_send(std::as_bytes(std::span(&hello, 1)));
  }
  fuzz::say(socket, parts.rest());
  listen_to(socket);
  socket = Socket();
  const auto connect = [&] {
    return Store::connect("127.0.0.1", listener.local().port(), "", std::chrono::seconds(2), key);
  };
  expect_answers(connect());
  const bool full = connect().num_keys() > 1000;
  server->await_departures(std::chrono::seconds(2));  // no thread of an input is left
  if (full) server.reset();
}
