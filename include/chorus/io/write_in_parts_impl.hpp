#pragma once
/// How several ranks write a file together and learn of a failure on any of them.

#include <algorithm>
#include <cerrno>
#include <chorus/comm/communicator.hpp>
#include <chorus/comm/objects.hpp>
#include <chorus/io/data_hash.hpp>
#include <chorus/io/safetensors_writer.hpp>
#include <chorus/io/write_in_parts.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::io::detail {

/// Calls `step()`. If it throws on one rank, all ranks throw: each its own error if all failed, otherwise a FileError
/// that names the first such rank. Before that `undo()` has ended on all of them, and all have the reason, as a rank that
/// throws may end the job. All ranks call it.
template <class Communicator, class Step, class Undo>
void on_all_ranks(Communicator& ranks, const Step& step, const Undo& undo) {
  std::exception_ptr own;
  std::string text;
  try {
    step();
  } catch (const CommError&) {  // the others can't be told
    undo();
    throw;
  } catch (const std::exception& error) {
    own = std::current_exception();
    text = dynamic_cast<const std::bad_alloc*>(&error) != nullptr ? "out of memory" : error.what();
  }
  std::int32_t failed = own ? 1 : 0;
  ranks.all_reduce(std::span(&failed, 1), comm::ReduceOp::max, {});
  if (failed == 0) return;
  undo();
  const auto texts = comm::all_gather_object(ranks, text);
  try {
    ranks.barrier();
  } catch (const CommError&) {  // another one has them all, too, and has thrown
  }
  const auto same = [&](const std::string& other) { return other == text; };
  if (own && std::all_of(texts.begin(), texts.end(), same)) std::rethrow_exception(own);
  const auto first = std::find_if(texts.begin(), texts.end(), [](const std::string& each) { return !each.empty(); });
  fail<FileError>("rank ", first - texts.begin(), ": ", *first);
}

/// The tensors of all ranks, in the file's order, and this rank's parts of them.
template <Device D>
class TensorsOfAll {
 public:
  struct Item {
    std::vector<Index> shape;
    TensorView view;            ///< of the whole tensor; without data
    const TensorPlace<D>* own;  ///< null if this rank has nothing to write
  };

  /// Ranks may have different tensors; equal names must have equal shapes. All ranks call it. Throws UsageError on all
  /// of them if shapes differ.
  template <class Communicator>
  TensorsOfAll(Communicator& ranks, const std::vector<TensorPlace<D>>& places) {
    auto list = nlohmann::json::array();
    for (const auto& place : places) list.push_back({place.name, static_cast<int>(place.dtype), place.shape});
    std::map<std::string, std::size_t, std::less<>> known;
    const auto lists = comm::all_gather_object(ranks, list.dump());
    for (std::size_t rank = 0; rank < lists.size(); ++rank)
      for (const auto& entry : nlohmann::json::parse(lists[rank])) {
        const auto name = entry[0].template get<std::string>();
        const auto dtype = static_cast<DType>(entry[1].template get<int>());
        auto shape = entry[2].template get<std::vector<Index>>();
        const auto [found, is_new] = known.emplace(name, items_.size());
        if (is_new) {
          const auto bytes = static_cast<std::size_t>(numel(shape)) * size_of(dtype);
          items_.push_back({std::move(shape), {}, nullptr});
          items_.back().view = {
              name, file_dtype(dtype), items_.back().shape, {static_cast<const std::byte*>(nullptr), bytes}};
          continue;
        }
        const Item& first = items_[found->second];
        check<UsageError>(first.view.dtype == file_dtype(dtype) && first.shape == shape, "saving: rank ", rank, " has ",
                          name, " as ", dtype, " ", std::span(shape), ", and another rank has ", first.view.dtype, " ",
                          std::span(first.shape));
      }
    for (const auto& place : places)
      if (place.writes) items_[known.find(place.name)->second].own = &place;
  }

  /// Sorts the tensors in the file's order, and returns its header.
  std::string sort(const std::string& path, const Metadata& metadata) {
    std::vector<const TensorView*> order;
    for (const Item& item : items_) order.push_back(&item.view);
    std::string header = safetensors_header(path, order, metadata);
    std::vector<Item> sorted;
    for (const TensorView* view : order)
      sorted.push_back(
          std::move(*std::find_if(items_.begin(), items_.end(), [&](const Item& item) { return &item.view == view; })));
    items_ = std::move(sorted);
    return header;
  }
  const std::vector<Item>& items() const { return items_; }

 private:
  std::vector<Item> items_;
};

/// Calls `f(begin, bytes)` for each range of a whole tensor that this rank writes.
template <Device D, class F>
void for_own_ranges(const typename TensorsOfAll<D>::Item& tensor, const F& f) {
  if (tensor.own == nullptr || tensor.own->bytes() == 0) return;
  std::vector<std::byte> numbers(tensor.own->bytes());
  tensor.own->copy_to(numbers.data());
  tensor.own->for_runs([&](std::size_t in_whole, std::size_t here, std::size_t count) {
    f(in_whole, std::span<const std::byte>(numbers).subspan(here, count));
  });
}

/// The same for the ranges of all ranks, on rank 0; the others send theirs. All ranks call it.
template <Device D, class Communicator, class F>
void for_all_ranges(Communicator& ranks, const typename TensorsOfAll<D>::Item& tensor, const F& f) {
  std::string message;  // begin, length and bytes of each range
  const auto add = [&](std::uint64_t number) { message.append(reinterpret_cast<const char*>(&number), sizeof number); };
  for_own_ranges<D>(tensor, [&](std::size_t begin, std::span<const std::byte> bytes) {
    if (ranks.rank() == 0) return f(begin, bytes);
    add(begin), add(bytes.size());
    message.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  });
  const auto lengths = comm::all_gather_structs(ranks, static_cast<std::int64_t>(message.size()));
  for (int rank = 1; rank < ranks.size(); ++rank) {
    const auto length = static_cast<std::size_t>(lengths[static_cast<std::size_t>(rank)]);
    if (length == 0 || (ranks.rank() != 0 && ranks.rank() != rank)) continue;
    message.resize(length);
    const std::span numbers(reinterpret_cast<std::uint8_t*>(message.data()), length);
    if (ranks.rank() == rank) {
      ranks.send(numbers, 0, {});
      continue;
    }
    ranks.recv(numbers, rank, {});
    std::uint64_t range[2];
    for (std::size_t at = 0; at < length; at += sizeof range + range[1]) {
      std::memcpy(range, message.data() + at, sizeof range);
      f(range[0], std::as_bytes(std::span(message)).subspan(at + sizeof range, range[1]));
    }
  }
}

template <Device D, class Communicator>
void write_in_parts(Communicator& ranks, const std::string& path, const std::vector<TensorPlace<D>>& places,
                    const Metadata& metadata, bool through_rank_0) {
  TensorsOfAll<D> tensors(ranks, places);
  Metadata noted = metadata;
  const auto checksum = noted.find(std::string(data_hash_key));
  if (checksum != noted.end()) checksum->second.assign(hash_digits, '0');  // until the data are written
  const std::string header = comm::broadcast_object(ranks, tensors.sort(path, noted));
  const bool hashes = Sha256::available && header.find(cat('"', data_hash_key, '"')) != header.npos;
  std::uint64_t end = header.size();
  for (const auto& tensor : tensors.items()) end += tensor.view.data.size();

  std::unique_ptr<AtomicFile> file;  // rank 0's
  const auto undo = [&] { file.reset(); };
  std::string at;
  const auto begin_file = [&] {
    if (ranks.rank() != 0) return;
    file = std::make_unique<AtomicFile>(path);
    file->write(header);
    at = file->extend(end);
  };
  on_all_ranks(ranks, begin_file, undo);
  at = comm::broadcast_object(ranks, std::string_view(at));
  const Descriptor own(ranks.rank() == 0 ? -1 : ::open(at.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  std::int32_t all_see_it = !through_rank_0 && (ranks.rank() == 0 || own.value >= 0) ? 1 : 0;
  ranks.all_reduce(std::span(&all_see_it, 1), comm::ReduceOp::min, {});

  const auto write = [&](std::uint64_t begin, std::span<const std::byte> bytes) {
    if (file != nullptr) return file->write_at(begin, bytes);
    const bool written = write_at(own.value, begin, bytes);  // before errno is read
    check<FileError>(written, "saving ", path, ": writing failed: ", std::strerror(errno));
  };
  const auto write_parts = [&] {
    std::string error;  // if others send, they must continue
    std::uint64_t begin = header.size();
    for (const auto& tensor : tensors.items()) {
      const auto write_range = [&](std::uint64_t in_tensor, std::span<const std::byte> bytes) {
        try {
          if (error.empty()) write(begin + in_tensor, bytes);
        } catch (const FileError& failed) {
          error = failed.what();
        }
      };
      if (all_see_it != 0)
        for_own_ranges<D>(tensor, write_range);
      else
        for_all_ranges<D>(ranks, tensor, write_range);
      begin += tensor.view.data.size();
    }
    check<FileError>(error.empty(), error);
    const bool synced = file != nullptr || all_see_it == 0 || ::fsync(own.value) == 0;  // before errno is read
    check<FileError>(synced, "saving ", path, ": syncing the file to the disk failed: ", std::strerror(errno));
  };
  on_all_ranks(ranks, write_parts, undo);
  std::string own_hashes;
  const auto hash = [&] {
    if (all_see_it == 0 && ranks.rank() != 0) return;
    const std::string who = cat("saving ", path);
    const RegularFile written(at, who);
    const auto read = [&](std::uint64_t begin, std::span<std::byte> to) {
      written.read(header.size() + begin, to, who, ": reading what was written");
    };
    own_hashes = piece_hashes(end - header.size(), ranks.rank(), all_see_it == 0 ? 1 : ranks.size(), read);
  };
  const auto note = [&] {
    const auto hashes_of_ranks = comm::all_gather_object(ranks, own_hashes);
    if (ranks.rank() != 0) return;
    checksum->second = data_hash(hashes_of_ranks);
    const std::string with_hash = tensors.sort(path, noted);
    file->write_at(0, std::as_bytes(std::span(with_hash)));
  };
  if (hashes) {
    on_all_ranks(ranks, hash, undo);
    on_all_ranks(ranks, note, undo);
  }
  const auto commit = [&] {
    if (file) file->commit();
  };
  on_all_ranks(ranks, commit, undo);
}

}  // namespace chorus::io::detail
