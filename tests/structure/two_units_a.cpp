// Two units that include everything link into one program and share its state.
#include <chorus/all.hpp>

const void* seen_from_b();

int main() { return &chorus::trace::detail::counters(0) == seen_from_b() ? 0 : 1; }
