// Arrays of NumPy, in both memory orders.
#include <chorus/io/npy.hpp>

#include "fuzz.hpp"

namespace fuzz_npy {

/// Every number is where the array's own order has it.
template <class T>
void compare(const chorus::io::detail::NpyArray& array) {
  const auto tensor = chorus::io::detail::to_tensor<T, 2>(array, "FILE");
  const auto rows = static_cast<std::size_t>(tensor.size(0)), columns = static_cast<std::size_t>(tensor.size(1));
  for (std::size_t i = 0; i < rows; ++i)
    for (std::size_t j = 0; j < columns; ++j) {
      const auto at = array.fortran_order ? j * rows + i : i * columns + j;
      FUZZ_REQUIRE(std::memcmp(array.data.data() + at * sizeof(T), tensor.data() + i * columns + j, sizeof(T)) == 0);
    }
}

}  // namespace fuzz_npy

FUZZ_TARGET(npy) {
  using namespace chorus;
  const auto array = io::detail::parse_npy(std::as_bytes(input), "FILE");
  std::size_t bytes = size_of(array.dtype);
  for (const Index size : array.shape) bytes *= static_cast<std::size_t>(size);
  FUZZ_REQUIRE(array.shape.size() <= 8 && bytes == array.data.size());
  auto text = io::detail::npy_header(array.dtype, array.shape, "FILE");
  FUZZ_REQUIRE(text.size() % 64 == 0);
  text.append(reinterpret_cast<const char*>(array.data.data()), array.data.size());
  const auto again = io::detail::parse_npy(std::as_bytes(std::span(text)), "FILE");
  FUZZ_REQUIRE(again.dtype == array.dtype && again.shape == array.shape && !again.fortran_order);
  if (array.shape.size() == 2) {
    if (array.dtype == DType::f32) compare<float>(array);
    if (array.dtype == DType::i64) compare<std::int64_t>(array);
    if (array.dtype == DType::boolean) compare<bool>(array);
  }
  io::detail::to_tensor<double, 3>(array, "FILE");
}
