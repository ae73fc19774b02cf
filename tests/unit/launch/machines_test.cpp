// How machines find each other, and wrong values that another machine has set in their store.
#include <catch.hpp>
#include <chorus/launch/machines.hpp>
#include <string>

namespace machines_test {

using namespace chorus;
using Catch::Matchers::Equals;
using Texts = std::vector<std::string>;

/// The error of a second machine that finds this in the store.
std::string complaint(const Texts& keys, const Texts& values) {
  auto listener = comm::Socket::listen(comm::Address::resolve("127.0.0.1", 0));
  MachineOptions options;
  options.most = 1;
  options.port = listener.local().port();
  comm::Store store(std::make_shared<comm::StoreServer>(std::move(listener), "", 0));
  store.multi_set({"id", "round", "restarts", "0/open", "0/most", "0/nodes", "0/restarts", "0/address", "0/port"},
                  {"none", "0", "0", "1", "2", "2", "0", "127.0.0.1", "29500"});
  store.add("0/joined", 1);
  store.multi_set(keys, values);
  detail::Console console;
  RankGroup group;
  try {
    detail::Machines machines(options, group, console);
    machines.form(group);
    machines.count_restart(0);
  } catch (const Error& error) {
    const std::string what = error.what(), where = cat("machines meet at 127.0.0.1:", options.port, ": ");
    return what.starts_with(where) ? what.substr(where.size()) : what;
  }
  return "nothing";
}

TEST_CASE("machines: what others have set is named where it makes no sense") {
  CHECK_THAT(complaint({}, {}), Equals("nothing"));
  const std::string number = ", expected a whole number from ";
  CHECK_THAT(complaint({"round"}, {"so\x1bon"}), Equals("'round' is 'so\\x1bon'" + number + "0 to 2147483646"));
  CHECK_THAT(complaint({"round"}, {"99999999999"}), Equals("'round' is '99999999999'" + number + "0 to 2147483646"));
  CHECK_THAT(complaint({"0/nodes"}, {""}), Equals("'0/nodes' is ''" + number + "1 to 64"));
  CHECK_THAT(complaint({"0/most"}, {"2x"}), Equals("'0/most' is '2x'" + number + "1 to 64"));
  CHECK_THAT(complaint({"0/restarts"}, {"-1"}), Equals("'0/restarts' is '-1'" + number + "0 to 2147483646"));
  CHECK_THAT(complaint({"0/port"}, {"65536"}), Equals("'0/port' is '65536'" + number + "1 to 65535"));
  CHECK_THAT(complaint({"0/joined"}, {"-7"}), Equals("'0/joined' is '-6'" + number + "0 to 2147483646"));
  // A later round has keys of its own.
  CHECK_THAT(complaint({"round", "1/open", "1/joined", "1/most", "1/nodes", "1/restarts", "1/address", "1/port"},
                       {"1", "1", "1", "2", "2", "0", "127.0.0.1", "65536"}),
             Equals("'1/port' is '65536'" + number + "1 to 65535"));
  CHECK_THAT(complaint({"restarts"}, {"many"}), Equals("'restarts' is 'many'" + number + "0 to 2147483646"));
  CHECK_THAT(complaint({"id"}, {"\x1b[2J"}), Equals("expected the job '\\x1b[2J' there, got 'none'"));
}

}  // namespace machines_test
