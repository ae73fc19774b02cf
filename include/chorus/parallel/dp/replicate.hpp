#pragma once
/// Step 2, replicate: a model's copy gets the changed parameters and all buffers.

#include <chorus/parallel/dp/replica.hpp>
#include <cstddef>
#include <vector>

namespace chorus::dp {

/// Calls `use(group, begin, count)` for each contiguous range of a flat buffer whose entries are all `wanted(entry
/// number)`.
template <class Entry, class Wanted, class Use>
void for_each_run(const std::vector<Entry>& entries, const Wanted& wanted, const Use& use) {
  for (std::size_t i = 0; i < entries.size();) {
    const std::size_t first = i, group = entries[i].group, begin = entries[i].begin;
    std::size_t count = 0;
    while (i < entries.size() && entries[i].group == group && entries[i].begin == begin + count && wanted(i))
      count += entries[i++].count;
    if (i == first) ++i;
    if (count > 0) use(group, begin, count);
  }
}

/// Copies from the model on the first device to the copy on device `i`; nothing to do for device 0.
template <class Model>
void replicate(const Replicas<Model>& replicas, std::size_t i) {
  if (i == 0) return;
  const trace::Span span(trace::Lane::communication, "copy", "replicate");
  auto& replica = replicas[i];
  const auto& from = replicas.parameters(0);
  const auto copy = [source = replicas.device(0), &replica](void* to, const void* numbers, std::size_t bytes,
                                                            trace::Traffic traffic) {
    copy_bytes(replica.device(), to, source, numbers, bytes);
    trace::sent(source.index, replica.device().index, traffic, bytes);
  };
  for_each_run(
      from.entries(), [&](std::size_t p) { return replica.lacks(from.entries()[p], p); },
      [&](std::size_t group, std::size_t begin, std::size_t count) {
        copy(replica.parameters().groups()[group].value(begin), from.groups()[group].value(begin),
             count * size_of(from.groups()[group].dtype), trace::Traffic::parameters);
      });
  for (std::size_t b = 0; b < replicas.buffers(0).size(); ++b) {
    const auto& buffer = *replicas.buffers(0)[b].buffer;
    copy(replica.buffers()[b].buffer->memory(), buffer.memory(), buffer.size_bytes(), trace::Traffic::buffers);
  }
  replica.is_up_to_date(from);
}

}  // namespace chorus::dp
