#pragma once
/// Lab 1: what the student's code is.

#include "../lab.hpp"

namespace bytes_lab {

inline constexpr const char* title = "Lab 1: bytes on the wire, a step";

struct Code {
  std::function<void(ch::comm::AnyCommunicator& ranks, std::span<float> data)> all_send_all;
};
/// Measures a step under each policy, on 2, 3, 4 and 8 devices, and judges the code.
void check(lab::Lab& lab, const Code& code);

}  // namespace bytes_lab
