// Switches in environment variables.
#include <catch.hpp>
#include <chorus/core/environment.hpp>
#include <cstdlib>
#include <string>

#include "../message_of.hpp"

namespace environment_test {

using namespace chorus;

constexpr const char* name = "CHORUS_SWITCH_OF_A_TEST";

TEST_CASE("environment: a switch is 0, 1 or not set, and nothing else") {
  unsetenv(name);
  CHECK(detail::env(name) == nullptr);
  CHECK(detail::env_switch(name, true));
  CHECK_FALSE(detail::env_switch(name, false));
  setenv(name, "", 1);
  CHECK(detail::env(name) == nullptr);
  CHECK(detail::env_switch(name, true));
  setenv(name, "0", 1);
  CHECK_FALSE(detail::env_switch(name, true));
  setenv(name, "1", 1);
  CHECK(detail::env_switch(name, false));
  for (const std::string value : {"2", "no", "false", "00", " 0"}) {
    setenv(name, value.c_str(), 1);
    CHECK(message_of<UsageError>([] { detail::env_switch(name, true); }) ==
          cat("environment variable CHORUS_SWITCH_OF_A_TEST must be 0 or 1, got '", value, "'"));
  }
  setenv(name, "1\x1b[2J\n0", 1);
  CHECK(message_of<UsageError>([] { detail::env_switch(name, true); }).ends_with("got '1\\x1b[2J\\x0a0'"));
  unsetenv(name);
}

}  // namespace environment_test
