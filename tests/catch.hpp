#pragma once
/// Catch2, version 2 or 3, as one dialect: `Approx`, and `Catch::Matchers::Contains` for a part of a string.
#if __has_include(<catch2/catch_test_macros.hpp>)
#include <string>

#include <catch2/catch_approx.hpp>
#include <catch2/catch_message.hpp>
#include <catch2/catch_template_test_macros.hpp>
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators_all.hpp>
#include <catch2/matchers/catch_matchers.hpp>
#include <catch2/matchers/catch_matchers_exception.hpp>
#include <catch2/matchers/catch_matchers_floating_point.hpp>
#include <catch2/matchers/catch_matchers_string.hpp>

using Catch::Approx;

// Version 3 calls it ContainsSubstring, and gives the old name to elements of ranges.
namespace Catch::Matchers {
inline auto Contains(const std::string& part) { return ContainsSubstring(part); }
}  // namespace Catch::Matchers
#else
#include <catch2/catch.hpp>
#endif
