// Host names whose look-up takes longer than the timeout.
#include <dlfcn.h>
#include <netdb.h>

#include <catch.hpp>
#include <chorus/comm/store.hpp>

#include "processes.hpp"

/// Calls the system's getaddrinfo; two names take long, as if no name server answered.
extern "C" int getaddrinfo(const char* node, const char* service, const addrinfo* hints, addrinfo** result) {
  using Function = int (*)(const char*, const char*, const addrinfo*, addrinfo**);
  static const auto system = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
  const std::string name = node == nullptr ? "" : node;
  const bool numbers = hints != nullptr && (hints->ai_flags & AI_NUMERICHOST) != 0;
  if (!numbers && name == "silent.test") std::this_thread::sleep_for(std::chrono::seconds(8));
  if (!numbers && name == "slow.test") {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    node = "127.0.0.1";
  }
  return system(node, service, hints, result);
}

namespace name_lookup_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::Equals;
using comm::Clock;

TEST_CASE("a name is looked up by a deadline", "[comm]") {
  const auto start = Clock::now();
  CHECK(comm::Address::resolve("127.0.0.1", 5, start).port() == 5);  // a numeric address: no look-up
  CHECK(comm::Address::resolve("::1", 6, start).host() == "::1");
  CHECK(comm::Address::resolve("[::1]", 6, start).host() == "::1");
  CHECK(!comm::Address::resolve("[0:0:0:0:0:0:0:1]", 6, start).misleads("[0:0:0:0:0:0:0:1]"));
  CHECK_THROWS_WITH(comm::Address::resolve("[::1", 6, start + 20s), Contains("address '[::1': "));
  CHECK_THROWS_WITH(comm::Address::resolve("[127.0.0.1]", 6, start + 20s), Contains("address '[127.0.0.1]': "));
  CHECK_THROWS_WITH(
      comm::Address::resolve("silent.test", 5, start + 200ms),
      Equals("address 'silent.test': the system did not resolve the name in time: check the name server"));
  CHECK_THROWS_AS(comm::Address::resolve("silent.test", 5, start), TimeoutError);
  CHECK(Clock::now() - start < 2s);
  CHECK(comm::Address::resolve("slow.test", 5, start + 5s).host() == "127.0.0.1");
  CHECK_THROWS_WITH(comm::Address::resolve("no such name", 5, start + 20s), Contains("address 'no such name': "));
}

TEST_CASE("name_lookup: a name that no thread can be started for", "[comm]") {
  const test::NoThreads none;
  CHECK_THROWS_AS(comm::Address::resolve("slow.test", 5), CommError);
  CHECK_THROWS_WITH(comm::Address::resolve("slow.test", 5),
                    Contains("address 'slow.test': a thread cannot be started"));
}

TEST_CASE("nobody waits longer for a name than for a rank", "[comm]") {
  const auto start = Clock::now();
  const std::string name = "silent.test";
  for (const int rank : {0, 1})
    CHECK_THROWS_WITH(comm::connect({.rank = rank, .size = 2, .master_addr = name, .master_port = 5, .timeout = 200ms}),
                      Contains("address 'silent.test': "));
  CHECK_THROWS_AS(comm::Store::connect(name, 5, "", 200ms), TimeoutError);
  CHECK(Clock::now() - start < 3s);
}

}  // namespace name_lookup_test
