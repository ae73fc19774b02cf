#pragma once
/// How much memory a call takes at most.

#include <cstddef>
#include <fstream>
#include <sstream>
#include <string>

/// Bytes by which this process's memory was above what it is before `call`, at most; 0 where the system doesn't tell.
template <class Call>
std::size_t peak_memory_of(const Call& call) {
  const auto kilobytes = [](const std::string& name) {
    std::ifstream file("/proc/self/status");
    std::size_t value = 0;
    for (std::string line; std::getline(file, line);)
      if (line.starts_with(name)) std::istringstream(line.substr(name.size())) >> value;
    return value;
  };
  std::ofstream("/proc/self/clear_refs") << "5";  // the peak so far is forgotten
  const auto before = kilobytes("VmRSS:");
  call();
  const auto peak = kilobytes("VmHWM:");
  return peak > before ? (peak - before) * 1024 : 0;
}
