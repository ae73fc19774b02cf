#pragma once
/// Checks the compiler and its options. Included first, so that a missing requirement gives one clear error instead of
/// thousands.

#if defined(_WIN32)
#error "chorus needs a POSIX system, such as Linux: on Windows, compile under WSL"
#elif defined(__clang__) && !defined(__apple_build_version__) && __clang_major__ < 14
#error "chorus needs clang 14 or newer, or g++ 11 or newer"
#elif defined(__GNUC__) && !defined(__clang__) && __GNUC__ < 11
#error "chorus needs g++ 11 or newer, or clang 14 or newer"
#elif __cplusplus < 202002L
#error "chorus needs C++20: compile with -std=c++20 (CMake: link chorus::chorus, or set CMAKE_CXX_STANDARD to 20)"
#elif defined(__SIZEOF_POINTER__) && __SIZEOF_POINTER__ < 8
#error "chorus needs a 64-bit target: sizes and offsets of tensors have 64 bits"
#elif !defined(__cpp_exceptions)
#error "chorus needs exceptions, which carry its errors: compile without -fno-exceptions"
#elif !defined(__cpp_rtti)
#error "chorus needs run-time type information: compile without -fno-rtti"
#elif defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__) || defined(__ASSOCIATIVE_MATH__)
#error "chorus needs exact floating point, to find NaNs and to repeat its sums: compile without -ffast-math and -Ofast"
#else
#define CHORUS_ACCEPTED
#endif

// A compiler continues after #error, but not after a missing include.
#ifndef CHORUS_ACCEPTED
#define CHORUS_REFUSED "chorus stops here, for the reason above"
#include CHORUS_REFUSED
#endif
