#pragma once
/// Draws promised values.

#include <sys/mman.h>

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/tensor/paged_memory.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

namespace chorus {

CHORUS_INLINE PromisedNumbers*& PromisedNumbers::current() {
  thread_local PromisedNumbers* promises = nullptr;
  return promises;
}

CHORUS_INLINE bool PromisedNumbers::move(const void* from, void* to) {
  Promise* const promise = find(from);
  if (promise == nullptr) return false;
  promise->at = to;
  promise->memory.reset();
  return true;
}

CHORUS_INLINE void PromisedNumbers::forget(const void* from) {
  std::erase_if(promises_, [&](const Promise& promise) { return promise.at == from; });
}

CHORUS_INLINE bool PromisedNumbers::draw(const void* at, void* out, std::size_t first, std::size_t count) {
  const Promise* const promise = find(at);
  if (promise == nullptr) return false;
  if (count > 0) promise->draw(out, first, count);
  return true;
}

CHORUS_INLINE void PromisedNumbers::keep_the_rest() {
  for (const Promise& promise : promises_) {
    if (promise.memory) promise.memory->take(0, promise.bytes);
    promise.draw(const_cast<void*>(promise.at), 0, promise.count);
  }
  promises_.clear();
}

CHORUS_INLINE void PromisedNumbers::check_untouched(const void* at, const std::string& name) {
  const Promise* const promise = find(at);
  if (promise != nullptr) check_untouched(*promise, cat("'", name, "'"));
}

CHORUS_INLINE void PromisedNumbers::check_untouched() const {
  for (const Promise& promise : promises_) check_untouched(promise, "a tensor of nn::init");
}

CHORUS_INLINE PromisedNumbers::Promise* PromisedNumbers::find(const void* at) {
  const auto found =
      std::find_if(promises_.begin(), promises_.end(), [&](const Promise& promise) { return promise.at == at; });
  return found == promises_.end() ? nullptr : &*found;
}

CHORUS_INLINE Storage<Cpu> PromisedNumbers::add(std::size_t bytes, std::size_t count, DrawAny draw) {
  auto [storage, memory] = untouched_pages(bytes);
  promises_.push_back({storage.data(), bytes, count, std::move(draw), std::move(memory)});
  return std::move(storage);
}

CHORUS_INLINE void PromisedNumbers::check_untouched(const Promise& promise, const std::string& name) {
  std::vector<unsigned char> resident((promise.bytes + PagedMemory::page() - 1) / PagedMemory::page());
  const bool known = mincore(const_cast<void*>(promise.at), promise.bytes, resident.data()) == 0;
  const bool touched = known && std::any_of(resident.begin(), resident.end(), [](auto page) { return page & 1; });
  check<UsageError>(
      !touched, "deferred: the model's constructor reads or writes ", name,
      ", whose numbers are drawn later, a part on each rank: construct the model itself, not a deferred one");
}

}  // namespace chorus
