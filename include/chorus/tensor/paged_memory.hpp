#pragma once
/// PagedMemory: host memory with fixed addresses whose pages can be released.

#include <sys/mman.h>
#include <unistd.h>

#include <chorus/core/error.hpp>
#include <chorus/core/trace.hpp>
#include <chorus/tensor/allocator.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace chorus {

/// A zeroed block of host memory. Ranges can be released to the system; tensors in them keep their addresses. Released
/// ranges count as free on device `slot`; a later access finds zeros. Only whole pages are released, not those at the
/// ends of a range.
///
/// Made for a Storage, which counts the whole block as allocated while it lives.
class PagedMemory {
 public:
  /// Throws Error if the system has no address space left.
  PagedMemory(std::size_t bytes, int slot, trace::Memory kind)
      : bytes_(round_up(bytes == 0 ? 1 : bytes)), slot_(slot), kind_(kind) {
    void* const data =
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<Error>(data != MAP_FAILED, "paged memory: the system has no room for ", bytes_, " bytes of addresses");
    data_ = static_cast<std::byte*>(data);
  }
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;
  ~PagedMemory() {
    trace::allocated(slot_, kind_, absent_);
    munmap(data_, bytes_);
  }

  std::byte* data() const { return data_; }

  /// Releases the pages within bytes [begin, end); their contents are lost. They must be counted as in use before.
  void give_back(std::size_t begin, std::size_t end) {
    const auto inner = pages_within(begin, end);
    if (inner == 0) return;
    madvise(data_ + round_up(begin), inner, MADV_DONTNEED);
    count(-static_cast<std::int64_t>(inner));
  }
  /// Counts these pages as in use again.
  void take(std::size_t begin, std::size_t end) { count(static_cast<std::int64_t>(pages_within(begin, end))); }

  static std::size_t page() {
    static const auto size = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return size;
  }

 private:
  static std::size_t round_up(std::size_t bytes) { return (bytes + page() - 1) / page() * page(); }
  static std::size_t pages_within(std::size_t begin, std::size_t end) {
    const std::size_t first = round_up(begin), last = end / page() * page();
    return first < last ? last - first : 0;
  }
  void count(std::int64_t bytes) {
    absent_ -= bytes;
    trace::allocated(slot_, kind_, bytes);
  }

  std::size_t bytes_;
  int slot_;
  trace::Memory kind_;
  std::byte* data_ = nullptr;
  std::int64_t absent_ = 0;  // bytes that are released although the Storage counts them
};

/// Zeroed memory without pages, which counts as free; and its PagedMemory.
[[gnu::cold]] inline std::pair<Storage<Cpu>, std::shared_ptr<PagedMemory>> untouched_pages(std::size_t bytes) {
  const int slot = trace_slot(Cpu{});
  auto pages = std::make_shared<PagedMemory>(bytes, slot, MemoryScope::current());
  const trace::PeakKept kept(slot);
  Storage<Cpu> storage(Cpu{}, std::shared_ptr<void>(pages, pages->data()), bytes);
  pages->give_back(0, bytes);
  return {std::move(storage), std::move(pages)};
}
inline Storage<Cpu> untouched_memory(std::size_t bytes) { return untouched_pages(bytes).first; }

}  // namespace chorus
