#include <array>
#include <catch.hpp>
#include <chorus/kernels/cpu/packet.hpp>

namespace packet_test {

using namespace chorus;

TEMPLATE_TEST_CASE("packets of a tail, or whole ones by their count, read and write its numbers alone", "", float, double) {
  constexpr Index w = kernels::lanes<TestType>;
  using Numbers = std::array<TestType, static_cast<std::size_t>(3 * w)>;
  Numbers from{};
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = static_cast<TestType>(i + 1);
  const auto all_lanes = [](const auto& packet) {
    std::array<TestType, static_cast<std::size_t>(w)> out{};
    kernels::store(out.data(), packet, kernels::Whole<TestType>{});
    return out;
  };
  for (Index start = 0; start <= w; ++start)
    for (Index count = 0; count <= w; ++count) {
      CAPTURE(start, count);
      const auto packet = kernels::load(from.data() + start, count, TestType{-5});
      const auto numbers = all_lanes(packet);
      for (Index i = 0; i < w; ++i)
        CHECK(numbers[static_cast<std::size_t>(i)] == static_cast<TestType>(i < count ? start + i + 1 : -5));
      for (const bool adds : {false, true}) {
        Numbers to{};
        to.fill(TestType{100});
        kernels::store(to.data() + start, packet, count, adds);
        for (Index i = 0; i < 3 * w; ++i) {
          const bool written = i >= start && i < start + count;
          CHECK(to[static_cast<std::size_t>(i)] == static_cast<TestType>(written ? (adds ? 101 : 1) + i : 100));
        }
      }
    }
}

}  // namespace packet_test
