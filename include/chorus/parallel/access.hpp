#pragma once
/// The door through which classes of the library reach what a policy has for them, and users don't call.

namespace chorus::detail {

/// A policy that has something for them specialises it.
template <class Net>
class Access {
 public:
  explicit Access(Net&) {}
};

template <class Net>
using AccessTo = Access<typename Net::policy_type>;
template <class Net>
AccessTo<Net> access_to(Net& net) {
  return AccessTo<Net>(net);
}

}  // namespace chorus::detail
