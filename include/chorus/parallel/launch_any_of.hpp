#pragma once
/// Programs that select one of several policies on the command line.

#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/core/say.hpp>
#include <chorus/launch/launch.hpp>
#include <string>
#include <string_view>

namespace chorus {

namespace detail {
template <class Net, class Body>
auto run_body(const Body& body, Run& run) {
  run.option("policy", "");  // marks the option as known
  return body.template operator()<Net>(run);
}
}  // namespace detail

/// Calls `launch` with the policy of `--policy NAME`, one of `Nets`; the first by default. `body` is a lambda with a
/// template parameter:
///   return ch::launch_any_of<ch::SingleDevice<Model>, ch::LocalSgd<Model>>(argc, argv, []<class Net>(ch::Run& run) {
///     Net net{Model{}, run};
///     ...
///   });
/// Returns what `launch` returns; for an unknown policy, prints an error and returns 2.
template <class... Nets, class Body>
requires(sizeof...(Nets) > 0) int launch_any_of(int argc, char** argv, const Body& body) {
  std::string policy;
  try {
    constexpr std::string_view names[] = {Nets::name...};
    policy = Arguments(argc, argv).find("policy").value_or(names[0]);
    std::string expected;
    for (const auto name : names) expected += cat(expected.empty() ? "" : ", ", name);
    check<UsageError>(((policy == Nets::name) || ...), "option --policy: expected one of ", expected, ", got '",
                      printable(policy), "'");
  } catch (const UsageError& error) {
    detail::say(error.what());
    return 2;
  }
  int status = 2;
  const auto launch_if_named = [&]<class Net>() {
    static_assert(
        requires { &Body::template operator()<Net>; },
        "launch_any: expected a lambda with a template parameter, []<class Net>(ch::Run& run) { ... }");
    if (policy == Net::name)
      status = launch<Net>(argc, argv, [&](Run& run) { return detail::run_body<Net>(body, run); });
  };
  (launch_if_named.template operator()<Nets>(), ...);
  return status;
}

}  // namespace chorus
