#pragma once
/// A safetensors file that several ranks write together: each the parts of tensors that it has.

#include <algorithm>
#include <cerrno>
#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/io/model_file_impl.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace chorus::io::detail {

/// Calls `step()`; a FileError of any rank becomes one of all. All ranks call it.
template <class Communicator, class Step>
void on_all_ranks(Communicator& ranks, const std::string& path, const Step& step) {
  std::string error;
  try {
    step();
  } catch (const FileError& failed) {
    error = failed.what();
  }
  std::int32_t worst = error.empty() ? -1 : ranks.rank();
  ranks.all_reduce(std::span(&worst, 1), comm::ReduceOp::max, {});
  check<FileError>(error.empty(), error);
  check<FileError>(worst < 0, "saving ", path, ": rank ", worst, " could not write its parts");
}

/// A tensor in the file: what this rank has of it, and where the whole begins.
template <Device D>
struct PlaceInFile {
  const TensorPlace<D>* tensor;
  std::uint64_t begin;
  /// This rank's numbers; of what all ranks have, rank 0's.
  std::vector<std::byte> own(int rank) const {
    std::vector<std::byte> bytes(tensor->part_count || rank == 0 ? tensor->bytes() : 0);
    if (!bytes.empty()) tensor->copy_to(bytes.data());
    return bytes;
  }
  std::uint64_t begin_of_own() const { return begin + tensor->begin_bytes(); }
};

/// Each rank writes its parts into the temporary file, which rank 0 has open, and the others find at `path`.
template <Device D>
void write_own_parts(int rank, AtomicFile* file, const Descriptor& own, const std::string& path,
                     const std::vector<PlaceInFile<D>>& tensors) {
  for (const auto& tensor : tensors) {
    if (file != nullptr)
      file->write_at(tensor.begin_of_own(), tensor.own(rank));
    else
      check<FileError>(write_at(own.value, tensor.begin_of_own(), tensor.own(rank)), "saving ", path, ": rank ", rank,
                       ": writing failed: ", std::strerror(errno));
  }
  check<FileError>(file != nullptr || ::fsync(own.value) == 0, "saving ", path, ": rank ", rank,
                   ": syncing the file to the disk failed: ", std::strerror(errno));
}

/// Rank 0 writes all parts, which the others send it, a tensor at a time. Returns why it could not.
template <Device D, class Communicator>
std::string write_through_rank_0(Communicator& ranks, AtomicFile* file, const std::vector<PlaceInFile<D>>& tensors) {
  std::string error;  // the others go on sending
  const auto write = [&](std::uint64_t begin, std::span<const std::byte> bytes) {
    try {
      if (error.empty()) file->write_at(begin, bytes);
    } catch (const FileError& failed) {
      error = failed.what();
    }
  };
  for (const auto& tensor : tensors) {
    auto part = tensor.own(ranks.rank());
    std::vector<std::int64_t> ranges(2 * static_cast<std::size_t>(ranks.size()));
    const std::int64_t range[] = {static_cast<std::int64_t>(tensor.begin_of_own()),
                                  static_cast<std::int64_t>(part.size())};
    ranks.all_gather(std::span<const std::int64_t>(range), std::span(ranges), {});
    if (ranks.rank() == 0) write(tensor.begin_of_own(), part);
    for (int rank = 1; rank < ranks.size(); ++rank) {
      const auto r = 2 * static_cast<std::size_t>(rank);
      if (ranges[r + 1] == 0 || (ranks.rank() != 0 && ranks.rank() != rank)) continue;
      if (ranks.rank() == 0) part.resize(static_cast<std::size_t>(ranges[r + 1]));
      const std::span numbers(reinterpret_cast<std::uint8_t*>(part.data()), part.size());
      if (ranks.rank() != 0) {
        ranks.send(numbers, 0, {});
      } else {
        ranks.recv(numbers, rank, {});
        write(static_cast<std::uint64_t>(ranges[r]), part);
      }
    }
  }
  return error;
}

/// Every rank calls it with the same tensors, of which it has the part that the place says, or the whole, which rank 0
/// writes. All write into one temporary file, which rank 0 then puts in place: as AtomicFile does, whole or not at all.
/// Where a rank does not see that file, for there is no common file system, all parts go through rank 0, one tensor at
/// a time. `through_rank_0`: even where there is one. Throws FileError on all ranks where one of them fails.
template <Device D, class Communicator>
void write_in_parts(Communicator& ranks, const std::string& path, const std::vector<TensorPlace<D>>& places,
                    const Metadata& metadata, bool through_rank_0 = false) {
  // What stands where follows from names and shapes: it is the same on all ranks.
  std::vector<TensorView> views;
  for (const auto& place : places) {
    const auto whole = static_cast<std::size_t>(numel(place.shape)) * size_of(place.dtype);
    // Only the size is looked at.
    views.push_back(
        {place.name, file_dtype(place.dtype), place.shape, {static_cast<const std::byte*>(nullptr), whole}});
  }
  std::vector<const TensorView*> order;
  for (const TensorView& view : views) order.push_back(&view);
  const std::string header = safetensors_header(path, order, metadata);
  std::uint64_t end = header.size();
  std::vector<PlaceInFile<D>> tensors;
  for (const TensorView* view : order) {
    tensors.push_back({&places[static_cast<std::size_t>(view - views.data())], end});
    end += view->data.size();
  }

  std::unique_ptr<AtomicFile> file;  // rank 0's
  std::string at;
  on_all_ranks(ranks, path, [&] {
    if (ranks.rank() != 0) return;
    file = std::make_unique<AtomicFile>(path);
    file->write(header);
    at = file->extend(end);
  });
  at = comm::broadcast_object(ranks, std::string_view(at));
  const Descriptor own(ranks.rank() == 0 ? -1 : ::open(at.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  std::int32_t all_see_it = !through_rank_0 && (ranks.rank() == 0 || own.value >= 0) ? 1 : 0;
  ranks.all_reduce(std::span(&all_see_it, 1), comm::ReduceOp::min, {});
  on_all_ranks(ranks, path, [&] {
    if (all_see_it != 0) return write_own_parts(ranks.rank(), file.get(), own, path, tensors);
    const auto error = write_through_rank_0(ranks, file.get(), tensors);
    check<FileError>(error.empty(), error);
  });
  on_all_ranks(ranks, path, [&] {
    if (file) file->commit();
  });
}

}  // namespace chorus::io::detail
