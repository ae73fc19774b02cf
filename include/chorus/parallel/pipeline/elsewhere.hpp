#pragma once
/// Parameters and buffers of other stages: frees their memory; reading them is an error.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chorus/core/held_signal.hpp>
#include <chorus/nn/module.hpp>
#include <chorus/tensor/promised_numbers.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

namespace chorus::pipeline {

/// Memory with all bits 1, NaNs as floating-point numbers, backed by one small piece that is mapped repeatedly. For
/// tensors that a program has kept of parameters that are not here any more: a pointer can't throw.
[[gnu::cold]] inline std::shared_ptr<void> only_nans(std::size_t bytes) {
  constexpr std::size_t granule = 64 << 10, most_pieces = 1024;
  const std::size_t piece = std::max(granule, (bytes / most_pieces / granule + 1) * granule);
  const std::size_t size = (bytes + piece - 1) / piece * piece;
  const int file = memfd_create("chorus-elsewhere", MFD_CLOEXEC);
  check<Error>(file >= 0, "Pipeline: can't create a memory file for the parameters of other stages");
  struct Close {
    int file;
    ~Close() { close(file); }
  } const at_end{file};
  const std::vector<unsigned char> ones(piece, 0xFF);
  const chorus::detail::HeldSignal too_long(SIGXFSZ);  // ulimit -f applies to it, too
  void* const begin = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  check<Error>(begin != MAP_FAILED && write(file, ones.data(), piece) == static_cast<ssize_t>(piece),
               "Pipeline: can't allocate memory for the parameters of other stages");
  std::shared_ptr<void> memory(begin, [size](void* mapped) { munmap(mapped, size); });
  for (std::size_t at = 0; at < size; at += piece)
    check<Error>(mmap(static_cast<std::byte*>(begin) + at, piece, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, file,
                      0) != MAP_FAILED,
                 "Pipeline: can't map addresses for the parameters of other stages");
  return memory;
}

/// Frees the memory of parameters and buffers. Handles then throw UsageError with `why`; tensors hold NaNs.
template <Device D>
void send_away(const std::vector<const detail::AtHome<D>*>& numbers, const std::vector<std::string>& why) {
  std::size_t largest = 0;
  for (const auto* each : numbers) largest = std::max(largest, each->size_bytes());
  if (largest == 0) return;
  const Storage<D> nowhere(D{}, only_nans(largest), largest);
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    if constexpr (std::is_same_v<D, Cpu>)
      if (auto* const promises = PromisedNumbers::current()) promises->forget(numbers[i]->place());
    numbers[i]->touch();
    numbers[i]->storage().move_home(nowhere, nowhere.data());
    numbers[i]->storage().writes()->end_watch();
    numbers[i]->storage().writes()->elsewhere = why[i];
  }
}

/// Allocates memory for numbers that were sent away; its contents are unspecified.
template <Device D>
void fetch_back(const detail::AtHome<D>& numbers, D device) {
  const MemoryScope scope(trace::Memory::parameters);
  const Storage<D> near(device, numbers.size_bytes());
  numbers.storage().writes()->elsewhere.clear();
  numbers.storage().move_home(near, near.data());
}

}  // namespace chorus::pipeline
