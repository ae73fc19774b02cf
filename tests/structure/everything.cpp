// Everything that programs can include, and state that all units of a program share.
#include <chorus/all.hpp>

int main() { static_cast<void>(chorus::trace::detail::counters(0)); }
