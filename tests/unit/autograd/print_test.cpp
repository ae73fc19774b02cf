// Prints variables, parameters and shapes.
#include <chorus/autograd/print.hpp>

#include <sstream>

#include <catch.hpp>

namespace autograd_print_test {

namespace ch = chorus;

TEST_CASE("variables, parameters and shapes are printed as their numbers") {
  const auto numbers = ch::Tensor<float, 2>::from({1, 2.5, -3, 4}, {2, 2});
  const ch::Variable<float, 2> x(numbers, true);
  const ch::Parameter<float, 2> weight(numbers);
  std::ostringstream out;
  out << x << ' ' << weight << ' ' << x.shape() << ' ' << ch::Shape<0>{} << ' ' << ch::Variable<float, 2>{};
  CHECK(out.str() == "[[1, 2.5], [-3, 4]] [[1, 2.5], [-3, 4]] [2, 2] [] undefined");
  CHECK(ch::cat(x, " and ", weight) == "[[1, 2.5], [-3, 4]] and [[1, 2.5], [-3, 4]]");
}

/// A program's own operator for arrays; a shape is an array.
struct Log {
  std::string text;
};
template <class T, std::size_t N>
Log& operator<<(Log& log, const std::array<T, N>&) {
  log.text += "array";
  return log;
}
TEST_CASE("a stream without text keeps its own operator") {
  Log log;
  log << ch::Shape<2>{2, 3};
  CHECK(log.text == "array");
}

}  // namespace autograd_print_test
