#pragma once
/// Writes safetensors files: the reference writer's bytes for the same tensors, atomically. The format:
/// https://github.com/huggingface/safetensors#format

#include <chorus/core/config.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/atomic_file.hpp>
#include <chorus/io/tensor_entry.hpp>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace chorus::io {

static_assert(std::endian::native == std::endian::little, "safetensors: expected a little-endian machine");

/// A tensor to be written: its row-major elements, which must outlive the call.
struct TensorView {
  std::string name;
  FileDType dtype{};
  std::span<const Index> shape;
  std::span<const std::byte> data;
};

namespace detail {

/// Checks the tensors, sorts them in the file's order, and returns all bytes before the data. Throws UsageError if a
/// reader would refuse the file.
[[gnu::cold]] std::string safetensors_header(std::string_view path, std::vector<const TensorView*>& tensors,
                                             const Metadata& metadata);

}  // namespace detail

/// Writes a file and replaces the old file at `path`, atomically: see AtomicFile, also for its FileErrors. Throws
/// UsageError, and changes nothing, if a name repeats or is invalid, or if the size of data differs from shape and
/// dtype. Computes the checksum in `metadata`, see data_hash_key.
[[gnu::cold]] void write_safetensors(const std::string& path, std::span<const TensorView> tensors,
                                     const Metadata& metadata = {});

}  // namespace chorus::io

#if !CHORUS_COMPILED
#include <chorus/io/safetensors_writer_impl.hpp>
#endif
