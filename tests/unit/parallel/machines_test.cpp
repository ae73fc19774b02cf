// Launchers that find each other, where what they find is not what a launcher would say.
#include <catch.hpp>
#include <chorus/parallel/machines.hpp>

namespace machines_test {

using namespace chorus;
using Catch::Matchers::Contains;

TEST_CASE("what is in the launchers' store and is no number gives an error that says so") {
  auto listener = comm::Socket::listen(comm::Address::resolve("127.0.0.1", 0));
  const int port = listener.local().port();
  comm::Store store(std::make_shared<comm::StoreServer>(std::move(listener), "", 0));
  store.multi_set({"id", "0/open", "0/nodes", "0/most", "0/restarts", "0/port", "0/address", "restarts"},
                  {"run", "2", "2", "2", "0", "4000", "localhost", "0"});
  MachineOptions options;
  options.port = port;
  RankGroup group;
  group.ranks = 2;
  group.run_id = "run";
  detail::Console console;
  const auto refuse = [&](const std::string& key, const std::string& value) {
    store.set("round", "0");
    store.set(key, value);
    detail::Machines machines(options, group, console);
    CHECK_THROWS_WITH(machines.form(group),
                      Contains("machines meet at 127.0.0.1:") &&
                          Contains("expected a number from 0 to 1073741824 there, got '" + value));
  };
  refuse("round", "");
  refuse("round", "-1");
  refuse("round", "99999999999999999999");
  refuse("0/nodes", "two");
  refuse("0/nodes", "2147483647");
  store.set("0/nodes", "2");
  refuse("0/restarts", "1 ");
}

}  // namespace machines_test
