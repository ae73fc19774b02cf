// Is compiled for processors with AVX2 and without AVX-512, whatever the rest of the build is for: trains with
// canonical shares by several policies, and says whether all end with the same bits. canonical_avx2_test.py runs it.
#include <cstdio>

#include "../unit/parallel/canonical_programs.hpp"

#if !defined(__AVX2__) || defined(__AVX512F__)
#error "expected -march=x86-64-v3"
#endif

using namespace test::canonical;

int main() {
  Program other{.shares = 4, .norm = true, .dropped = 0.3, .rows_loss = true, .clip = 0.3, .steps = {}};
  for (const chorus::Index size : {8, 7, 3})
    other.steps.push_back({.passes = {{.key = static_cast<std::uint32_t>(size), .size = size}}});
  bool same = true;
  for (const auto& program : {program_for_engines(), other}) {
    const auto expected = result(program, {});
    if (expected.find('|') == expected.npos) {
      std::puts(expected.c_str());
      return 1;
    }
    for (const Setup& setup : {Setup{.who = Who::dp, .devices = 2}, Setup{.who = Who::ddp, .devices = 2},
                               Setup{.who = Who::ddp, .devices = 3}}) {
      const auto wrong = difference(result(program, setup), expected);
      same = same && wrong.empty();
      std::printf("%s: %s\n", setup.text().c_str(), wrong.empty() ? "the bits of one device" : wrong.c_str());
    }
  }
  return same ? 0 : 1;
}
