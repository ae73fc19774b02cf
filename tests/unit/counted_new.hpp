#pragma once
/// Counts what a program asks of the heap: replaces `operator new` of the program that includes it, in one file.

#include <atomic>
#include <cstdlib>
#include <new>

inline std::atomic<int> heap_allocations{0}, heap_releases{0};

// Not inlined: the compiler would see memory of malloc meet `delete`.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  heap_allocations.fetch_add(1, std::memory_order_relaxed);
  if (void* data = std::malloc(bytes)) return data;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t bytes, const std::nothrow_t&) noexcept {
  heap_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes);
}
[[gnu::noinline]] void operator delete(void* data) noexcept {
  if (data != nullptr) heap_releases.fetch_add(1, std::memory_order_relaxed);
  std::free(data);
}
[[gnu::noinline]] void operator delete(void* data, std::size_t) noexcept { operator delete(data); }
