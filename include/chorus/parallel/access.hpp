#pragma once
/// Access: lets classes of the library reach members of a policy that are not for users.

namespace chorus::detail {

/// A policy that has such members specialises it.
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
