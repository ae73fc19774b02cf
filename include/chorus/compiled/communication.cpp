// Part of the library chorus::compiled: communicators and the launcher, which records runs in every program that links it.

#define CHORUS_BUILDS_LIBRARY
#include <chorus/comm/connect.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/comm/store.hpp>
#include <chorus/comm/thread_group.hpp>
#include <chorus/launch/launch.hpp>
#include <chorus/trace.hpp>

namespace chorus::comm {

#define CHORUS_REDUCTION(T) template Reduction reduction<T>(ReduceOp, double);
CHORUS_REDUCTION(bool)
CHORUS_REDUCTION(std::uint8_t)
CHORUS_REDUCTION(std::int8_t)
CHORUS_REDUCTION(std::int16_t)
CHORUS_REDUCTION(std::uint16_t)
CHORUS_REDUCTION(std::int32_t)
CHORUS_REDUCTION(std::uint32_t)
CHORUS_REDUCTION(std::int64_t)
CHORUS_REDUCTION(std::uint64_t)
CHORUS_REDUCTION(half)
CHORUS_REDUCTION(bf16)
CHORUS_REDUCTION(float)
CHORUS_REDUCTION(double)
#undef CHORUS_REDUCTION

}  // namespace chorus::comm
