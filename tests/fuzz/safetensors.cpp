// What is accepted keeps the format's promises, and is the same file again when it is written.
#include <chorus/io/safetensors_reader.hpp>
#include <chorus/io/safetensors_writer.hpp>

#include "fuzz.hpp"

FUZZ_TARGET(safetensors) {
  using namespace chorus;
  const io::SafetensorsReader file(std::as_bytes(input), "FILE");
  std::vector<std::vector<std::byte>> data;
  std::vector<io::TensorView> tensors;
  std::vector<const io::TensorView*> order;
  std::size_t end = 0;
  for (const auto& entry : file.entries()) {
    FUZZ_REQUIRE(entry.begin == end && file.find(entry.name) == &entry);
    end += entry.bytes;
    file.read(entry, data.emplace_back(entry.bytes));
    tensors.push_back({entry.name, entry.dtype, entry.shape, {}});
  }
  FUZZ_REQUIRE(end <= input.size());
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    tensors[i].data = data[i];
    order.push_back(&tensors[i]);
  }
  auto text = io::detail::safetensors_header("FILE", order, file.metadata());
  for (const auto* tensor : order) text.append(reinterpret_cast<const char*>(tensor->data.data()), tensor->data.size());
  const io::SafetensorsReader again(std::as_bytes(std::span(text)), "FILE");
  FUZZ_REQUIRE(again.entries().size() == tensors.size() && again.metadata() == file.metadata());
  for (const auto& tensor : tensors) {
    const auto* entry = again.find(tensor.name);
    FUZZ_REQUIRE(entry != nullptr && entry->dtype == tensor.dtype && std::ranges::equal(entry->shape, tensor.shape));
    std::vector<std::byte> bytes(entry->bytes);
    again.read(*entry, bytes);
    FUZZ_REQUIRE(std::ranges::equal(bytes, tensor.data));
  }
}
