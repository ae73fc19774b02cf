// A store's user whose server says anything.
#include <chorus/comm/store.hpp>
#include <chorus/comm/store/store_messages.hpp>
#include <chorus/comm/store/store_server.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(store_client) {
  using namespace chorus::comm;
  using namespace std::chrono_literals;
  fuzz::Parts parts(input);
  const auto how = parts.number();
  std::vector<std::uint8_t> says;
  if (how >= 16) {  // what a server says first, as it should
    fuzz::append(says, Challenge{.magic = detail::store_magic});
    fuzz::append(says, detail::StoreWelcome{.welcome = 1});
  }
  const auto rest = parts.rest();
  says.insert(says.end(), rest.begin(), rest.end());
  const fuzz::Impostor server(std::move(says));
  auto store = Store::connect("127.0.0.1", server.port(), "", 10ms);
  store.set_timeout(50ms);
  switch (how % 16) {
    case 0:
      return store.set("a", "b");
    case 1:
      store.get("a");
      return;
    case 2:
      store.add("a", 1);
      return;
    case 3:
      store.compare_set("a", "b", "c");
      return;
    case 4:
      store.delete_key("a");
      return;
    case 5:
      store.check({"a", "b"});
      return;
    case 6:
      return store.wait({"a", "b"}, 10ms);
    case 7:
      store.num_keys();
      return;
    case 8:
      FUZZ_REQUIRE(store.multi_get({"a", "b"}).size() == 2);
      return;
    default:
      return store.multi_set({"a", "b"}, {"c", "d"});
  }
}
