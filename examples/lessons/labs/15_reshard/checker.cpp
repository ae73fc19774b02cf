/// Measurements of lab 15: files that one number of ranks writes and another one reads. SPOILERS: read this when your
/// lab is right.

#include <algorithm>
#include <chorus/core/error.hpp>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>

#include "reshard.hpp"

namespace reshard_lab {
namespace {

using Units = std::vector<std::size_t>;
using ch::comm::AnyCommunicator;

std::size_t part_of(std::size_t unit, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  return (unit + n - 1) / n;
}
std::size_t bytes_of_rank(const Units& units, int ranks) {
  std::size_t numbers = 0;
  for (const auto unit : units) numbers += part_of(unit, ranks);
  return numbers * sizeof(float);
}
constexpr float padding = -1, unread = -2;
float number(std::size_t unit, std::size_t i) { return static_cast<float>(unit * 100'000 + i); }

/// A rank's parts, with padding.
std::vector<float> parts_of(const Units& units, int ranks, int rank) {
  std::vector<float> all;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto each = part_of(units[u], ranks);
    for (std::size_t i = 0; i < each; ++i) {
      const auto at = each * static_cast<std::size_t>(rank) + i;
      all.push_back(at < units[u] ? number(u, at) : padding);
    }
  }
  return all;
}

/// A folder that lives as long as this.
class Folder {
 public:
  Folder() {
    std::string name = (std::filesystem::temp_directory_path() / "chorus_lab_XXXXXX").string();
    ch::check<ch::UsageError>(mkdtemp(name.data()) != nullptr, "lab: can't make the folder '", name, "'");
    path_ = name;
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  std::filesystem::path file(int rank) const { return path_ / ch::cat("rank", rank, ".bin"); }

 private:
  std::filesystem::path path_;
};
/// Each rank writes its parts.
void save(const Folder& folder, const Units& units, int ranks) {
  lab::on_ranks(ranks, [&](AnyCommunicator& group) {
    const auto parts = parts_of(units, ranks, group.rank());
    std::ofstream file(folder.file(group.rank()), std::ios::binary);
    file.write(reinterpret_cast<const char*>(parts.data()), static_cast<std::streamsize>(parts.size() * sizeof(float)));
    ch::check<ch::UsageError>(bool(file.flush()), "lab: can't write '", folder.file(group.rank()).string(), "'");
    group.barrier();
  });
}

/// What a rank has read.
struct Loaded {
  std::vector<float> parts;
  double bytes = 0;
  std::set<int> files;
};
Loaded load(const Folder& folder, const Units& units, int saved_by, int read_by, int rank,
            const std::vector<Read>& reads) {
  Loaded loaded;
  loaded.parts.assign(bytes_of_rank(units, read_by) / sizeof(float), unread);
  const auto memory = loaded.parts.size() * sizeof(float);
  for (const auto& [file, from, bytes, to] : reads) {
    if (bytes == 0) continue;
    const auto what =
        ch::cat("rank ", rank, " reads ", bytes, " bytes from byte ", from, " of file ", file, " to byte ", to);
    ch::check<ch::UsageError>(file >= 0 && file < saved_by, what, ": there are ", saved_by, " files");
    const auto size = static_cast<std::size_t>(std::filesystem::file_size(folder.file(file)));
    ch::check<ch::UsageError>(from <= size && bytes <= size - from, what, ": the file has ", size, " bytes");
    ch::check<ch::UsageError>(to <= memory && bytes <= memory - to, what, ": its parts have ", memory, " bytes");
    std::ifstream in(folder.file(file), std::ios::binary);
    in.seekg(static_cast<std::streamoff>(from));
    in.read(reinterpret_cast<char*>(loaded.parts.data()) + to, static_cast<std::streamsize>(bytes));
    ch::check<ch::UsageError>(bool(in), "lab: can't read '", folder.file(file).string(), "'");
    loaded.bytes += static_cast<double>(bytes);
    loaded.files.insert(file);
  }
  return loaded;
}
/// All ranks read what `reads_of` says.
std::vector<Loaded> load_all(const Folder& folder, const Units& units, int saved_by, int read_by,
                             const std::function<std::vector<Read>(int rank)>& reads_of) {
  std::vector<Loaded> all(static_cast<std::size_t>(read_by));
  std::mutex mutex;  // the student's code need not be safe among threads
  lab::on_ranks(read_by, [&](AnyCommunicator& ranks) {
    std::unique_lock lock(mutex);
    const auto reads = reads_of(ranks.rank());
    lock.unlock();
    all[static_cast<std::size_t>(ranks.rank())] = load(folder, units, saved_by, read_by, ranks.rank(), reads);
    ranks.barrier();
  });
  return all;
}

/// What is wrong with a rank's numbers.
std::string look_at(const Units& units, int read_by, int rank, const std::vector<float>& got) {
  std::size_t at = 0;
  for (std::size_t u = 0; u < units.size(); ++u) {
    const auto each = part_of(units[u], read_by), begin = each * static_cast<std::size_t>(rank);
    for (std::size_t i = 0; i < each; ++i, ++at) {
      if (begin + i >= units[u]) continue;
      const float is = got[at], right = number(u, begin + i);
      if (is == right) continue;
      const auto place = ch::cat("rank ", rank, ", unit ", u, ", number ", i, " of its part");
      if (is == unread) return ch::cat(place, " is not read");
      if (is == padding) return ch::cat(place, " is padding");
      for (std::size_t other = 0; other < units.size(); ++other)
        if (is >= number(other, 0) && is < number(other, units[other]) && is == std::floor(is))
          return ch::cat(place, " is number ", is - number(other, 0), " of unit ", other,
                         other == u ? ch::cat(", and not number ", begin + i) : std::string());
      return ch::cat(place, " was never saved. Where does a number begin in a file?");
    }
  }
  return "";
}
/// Bytes of padding in a rank's parts.
std::size_t padding_of(const Units& units, int ranks, int rank) {
  const auto parts = parts_of(units, ranks, rank);
  return sizeof(float) * static_cast<std::size_t>(std::count(parts.begin(), parts.end(), padding));
}

/// Returns whether the code is right.
bool judge(lab::Lab& lab, const Code& code, const Units& units, int saved_by, int read_by) {
  std::string sizes;
  for (const auto unit : units) sizes += ch::cat(sizes.empty() ? "" : " + ", unit);
  const auto name = [&](const char* what) {
    return ch::cat(sizes, " numbers, ", saved_by, " to ", read_by, " ranks: ", what);
  };
  const Folder folder;
  save(folder, units, saved_by);
  std::vector<Loaded> all;
  if (!lab.run(name("reads"), [&] {
        all = load_all(folder, units, saved_by, read_by,
                       [&](int rank) { return code.reads(units, saved_by, read_by, rank); });
      }))
    return false;
  std::string why;
  for (int rank = 0; rank < read_by && why.empty(); ++rank)
    why = look_at(units, read_by, rank, all[static_cast<std::size_t>(rank)].parts);
  if (!lab.require(name("each rank has its numbers"), why.empty(), why)) return false;
  for (int rank = 0; rank < read_by && why.empty(); ++rank) {
    const auto& its = all[static_cast<std::size_t>(rank)];
    const double needed = static_cast<double>(bytes_of_rank(units, read_by) - padding_of(units, read_by, rank)),
                 everything = static_cast<double>(bytes_of_rank(units, saved_by)) * saved_by;
    const bool pads = padding_of(units, read_by, rank) > 0 &&
                      its.bytes <= static_cast<double>(bytes_of_rank(units, read_by)) && its.bytes > needed;
    if (its.bytes > needed)
      why = ch::cat("rank ", rank, " reads ", its.bytes, " bytes",
                    its.bytes >= everything ? ": all files"
                    : pads                  ? ": it reads padding"
                                            : ", and its parts have less. What does it read twice, or without a use?");
  }
  return lab.require(name("no rank reads more than its parts"), why.empty(), why);
}

/// The reads of the lab's own code, for the predictions.
std::vector<Read> reads_of_lab(const Units& units, int saved_by, int read_by, int rank) {
  std::vector<Read> reads;
  std::size_t in_file = 0, in_memory = 0;
  for (const auto unit : units) {
    const auto old = part_of(unit, saved_by), own = part_of(unit, read_by),
               begin = own * static_cast<std::size_t>(rank);
    for (std::size_t i = begin; i < std::min(begin + own, unit);) {
      const auto file = i / old, stop = std::min({(file + 1) * old, begin + own, unit});
      reads.push_back({static_cast<int>(file), sizeof(float) * (in_file + i - file * old), sizeof(float) * (stop - i),
                       sizeof(float) * (in_memory + i - begin)});
      i = stop;
    }
    in_file += old;
    in_memory += own;
  }
  return reads;
}

}  // namespace

void check(lab::Lab& lab, const Code& code) {
  bool right = true;
  for (const auto& units : {Units{1200}, Units{1001, 7, 502}, Units{1000, 1, 501, 2}})  // the harder the later
    for (const auto& [saved_by, read_by] : {std::pair(4, 3), std::pair(3, 4), std::pair(4, 1), std::pair(1, 4)})
      right = right && judge(lab, code, units, saved_by, read_by);

  const Units units{1201, 4};
  const Folder folder;
  save(folder, units, 4);
  const auto all = load_all(folder, units, 4, 3, [&](int rank) { return reads_of_lab(units, 4, 3, rank); });
  lab.compare("bytes of a file", static_cast<double>(std::filesystem::file_size(folder.file(0))), 0,
              "Each unit is padded by itself.");
  std::ifstream last(folder.file(3), std::ios::binary);
  double pads = 0;
  for (float x = 0; last.read(reinterpret_cast<char*>(&x), sizeof x);) pads += x == padding ? sizeof x : 0;
  lab.compare("bytes of padding in file 3", pads, 0, "How many numbers has 4 times a part more than its unit?");
  for (int rank = 0; rank < 3; ++rank)
    lab.compare(ch::cat("rank ", rank, " of 3 reads, bytes"), all[static_cast<std::size_t>(rank)].bytes, 0,
                "How long are its parts now, without padding?");
  for (int rank = 0; rank < 3; ++rank)
    lab.compare(ch::cat("rank ", rank, " of 3 reads, files"),
                static_cast<double>(all[static_cast<std::size_t>(rank)].files.size()), 0,
                "Draw both cuts of each unit above each other.");
}

}  // namespace reshard_lab
