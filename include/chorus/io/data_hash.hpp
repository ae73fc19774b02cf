#pragma once
/// A checksum of a file's tensors in its metadata. The data are cut into pieces of 1 MiB. The checksum is the SHA-256
/// of the pieces' SHA-256: several ranks can share the work, and their number does not matter.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <chorus/core/error.hpp>
#include <chorus/io/sha256.hpp>

namespace chorus::io {

/// Its key in the metadata; the value has 64 hexadecimal digits. A writer with this key gets the right value. A reader
/// compares it if the build has OpenSSL.
inline constexpr std::string_view data_hash_key = "training/data_sha256";

namespace detail {

inline constexpr std::size_t hash_digits = 64, hashed_piece = std::size_t{1} << 20;

/// The hashes (64 digits) of every `ranks`-th piece of `bytes`, from piece `rank` on. `read(begin, to)` fills `to`.
template <class Read>
std::string piece_hashes(std::uint64_t bytes, int rank, int ranks, const Read& read) {
  std::string hashes;
  std::vector<std::byte> piece;
  const auto stride = static_cast<std::uint64_t>(ranks) * hashed_piece;
  for (auto begin = static_cast<std::uint64_t>(rank) * hashed_piece; begin < bytes; begin += stride) {
    piece.resize(static_cast<std::size_t>(std::min<std::uint64_t>(hashed_piece, bytes - begin)));
    read(begin, std::span(piece));
    hashes += sha256_hex(piece);
  }
  return hashes;
}

/// The checksum from the results of `piece_hashes` on each rank.
inline std::string data_hash(const std::vector<std::string>& of_ranks) {
  std::string all;
  for (std::size_t row = 0, before = 1; before != all.size(); row += hash_digits) {
    before = all.size();
    for (const auto& hashes : of_ranks)
      if (row < hashes.size()) all += hashes.substr(row, hash_digits);
  }
  return sha256_hex(all);
}

/// The checksum of data that arrive in parts of any size.
class DataHash {
 public:
  void update(std::span<const std::byte> data) {
    while (!data.empty()) {
      const auto part = data.first(std::min(data.size(), hashed_piece - in_piece_));
      piece_.update(part);
      data = data.subspan(part.size());
      if ((in_piece_ += part.size()) == hashed_piece) end_piece();
    }
  }
  std::string hex() {
    if (in_piece_ > 0) end_piece();
    return data_hash({hashes_});
  }

 private:
  void end_piece() {
    hashes_ += piece_.hex();
    piece_ = Sha256();
    in_piece_ = 0;
  }

  Sha256 piece_;
  std::size_t in_piece_ = 0;
  std::string hashes_;
};

/// Throws FileError, with the name `who`, if a checksum differs from the file's.
inline void check_data_hash(std::string_view who, std::string_view noted, std::string_view hash) {
  check<FileError>(noted == hash, who, ": the file is damaged: its data changed after it was written (", data_hash_key,
                   " says ", printable(noted), ", the data give ", hash, ")");
}

/// The same for a whole file.
template <class Reader>
void check_data_hash(const Reader& file) {
  const auto noted = file.metadata().find(std::string(data_hash_key));
  if (!Sha256::available || noted == file.metadata().end()) return;
  const auto read = [&](std::uint64_t begin, std::span<std::byte> to) { file.read_data(begin, to); };
  const auto hash = data_hash({piece_hashes(file.data_bytes(), 0, 1, read)});
  check_data_hash(cat("loading ", file.path()), noted->second, hash);
}

}  // namespace detail

}  // namespace chorus::io
