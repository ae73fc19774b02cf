#pragma once
/// What a call throws.

#include <string>

/// What `call` throws, as text; "nothing" where it throws none of that kind.
template <class Kind, class Call>
std::string message_of(const Call& call) {
  try {
    call();
  } catch (const Kind& error) {
    return error.what();
  }
  return "nothing";
}
