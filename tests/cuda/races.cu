// Kernels with barriers for `races.py`: prints how each is launched, in the form that sentryward reads. With nvcc alone.
#include <chorus/kernels/cuda/cumulative.hpp>
#include <chorus/kernels/cuda/index_order.hpp>
#include <chorus/kernels/cuda/optimizer.hpp>
#include <chorus/kernels/cuda/softmax.hpp>
#include <cstdio>
#include <cstring>

namespace races {

using namespace chorus::kernels;
namespace gpu = chorus::kernels::cuda;

/// An array on the device; its address is only a name.
template <class T>
T* array(int number) {
  return reinterpret_cast<T*>(std::uintptr_t{0xA0000000} + static_cast<std::uintptr_t>(number));
}

/// Prints a launch of the kernel that has `name` in its name: its parameters as words of 8 bytes, or 4 for a lone int.
template <class... Parameters, class... Arguments>
void describe(const char* name, unsigned blocks, void (*)(Parameters...), const Arguments&... arguments) {
  std::string arrays, numbers;
  int parameter = 0;
  const auto add = [&](const auto& value) {
    for (std::size_t at = 0; at < sizeof value; at += 8) {
      std::uint64_t word = 0;
      std::memcpy(&word, reinterpret_cast<const char*>(&value) + at, std::min(sizeof value - at, sizeof word));
      const auto place = chorus::cat("{\"parameter\": ", parameter, ", \"offset\": ", at, ", \"type\": ");
      if (word >> 8 == 0xA00000)
        arrays += chorus::cat(arrays.empty() ? "" : ", ", place,
                              "\"pointer\", \"space\": \"global\", \"object\": \"array ", word & 0xFF, "\"}");
      else
        numbers += chorus::cat(numbers.empty() ? "" : ", ", place, sizeof value - at == 4 ? "\"u32\"" : "\"u64\"",
                               ", \"value\": ", word, "}");
    }
    ++parameter;
  };
  (add(static_cast<Parameters>(arguments)), ...);
  std::printf("%s\t{\"schema\": \"spverify.kernel-input/v1\", \"launch\": {\"grid_dim\": [%u, 1, 1], "
              "\"block_dim\": [%d, 1, 1]}, \"declarations\": [%s], \"arguments\": [%s]}\n",
              name, blocks, gpu::block_threads, arrays.c_str(), numbers.c_str());
}

}  // namespace races

int main() {
  using namespace races;
  using chorus::Index;
  float *const a = array<float>(1), *const b = array<float>(2), *const c = array<float>(3);
  Index *const index = array<Index>(4), *const order = array<Index>(5), *const starts = array<Index>(6);
  // Grids of few blocks, so that each has several turns.
  describe("Softmax", 2, gpu::detail::lines<gpu::Softmax<float>>, AxisShape{17, 100, 1}, gpu::plan_lines(100, 1),
           gpu::Softmax<float>{a, b, false});
  describe("Softmax", 2, gpu::detail::lines<gpu::Softmax<float>>, AxisShape{2, 20, 40}, gpu::plan_lines(20, 40),
           gpu::Softmax<float>{a, b, false});
  describe("scan_lines", 1, gpu::scan_lines<float>, Index{2}, gpu::RunningSum<float>{{2, 300, 1}, a, b, false, false});
  const gpu::detail::IndexKeys keys{index, 100};
  describe("order_passILb0", 2, gpu::detail::order_pass<false>, keys, 0, Index{700}, order, starts, array<Index>(7));
  describe("order_starts", 1, gpu::detail::order_starts<Index>, Index{256}, Index{1}, starts);
  describe("optimizer_step", 2, gpu::optimizer_step<SgdScalars, gpu::SgdRule<float>>, Index{600},
           gpu::Scalars<SgdScalars>{}, gpu::SgdRule<float>{a, b, c});
}
