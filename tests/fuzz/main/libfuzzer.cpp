// A program for libFuzzer, of the target FUZZ_NAME alone.
#include <signal.h>

#include "../fuzz.hpp"

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  signal(SIGPIPE, SIG_DFL);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto target = *std::ranges::find(fuzz::targets(), std::string_view(FUZZ_NAME), &fuzz::Target::name);
  fuzz::run(target, {data, size});
  return 0;
}
