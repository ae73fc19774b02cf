#pragma once
/// `DeviceList`: the devices of a run, as named by `--device 0,1`.

#include <algorithm>
#include <charconv>
#include <chorus/core/error.hpp>
#include <chorus/core/printable.hpp>
#include <cstddef>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

namespace chorus {

/// Different numbers of devices of one kind. Under DataParallel the first holds the model; if each process has one
/// device, its local rank is the index.
struct DeviceList {
  std::string kind = {};      ///< "cpu" or "cuda"; empty: the model's
  std::vector<int> ids = {};  ///< empty: as many of the kind as the run has

  static constexpr int most = 64;  ///< of a kind

  /// Parses `0,1`, `cpu:0,1`, `cuda:0,1`, or a kind alone. Throws UsageError that names `what`.
  static DeviceList of(std::string_view what, std::string_view text);
  /// Throws UsageError that names `what` for an unknown kind, and for numbers that are out of range or repeated.
  void check(std::string_view what) const;

  int size() const { return static_cast<int>(ids.size()); }
  /// `cpu:0,1`, as `of` parses it.
  std::string text() const {
    std::string numbers;
    for (const int id : ids) numbers += cat(numbers.empty() ? "" : ",", id);
    return cat(kind, kind.empty() || ids.empty() ? "" : ":", numbers);
  }
  bool operator==(const DeviceList&) const = default;
};

[[gnu::cold]] inline void DeviceList::check(std::string_view what) const {
  chorus::check<UsageError>(kind.empty() || kind == "cpu" || kind == "cuda", what,
                            ": expected the kind cpu or cuda, as in cpu:0,1, got '", printable(kind), "'");
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    chorus::check<UsageError>(*id >= 0 && *id < most, what, ": expected numbers of devices from 0 to ", most - 1,
                              ", got ", *id);
    chorus::check<UsageError>(std::find(ids.begin(), id, *id) == id, what, ": expected each device once, got ", *id,
                              " twice in '", text(), "'");
  }
}

[[gnu::cold]] inline DeviceList DeviceList::of(std::string_view what, std::string_view text) {
  const auto refuse = [&](const auto&... why) {
    fail<UsageError>(what, ": expected numbers of devices, as 0,1 or cpu:0,1 or cuda:0,1, got '", printable(text), "'",
                     why...);
  };
  if (text.empty()) refuse();
  DeviceList list;
  auto rest = text;
  if (const auto colon = text.find(':'); colon != std::string_view::npos) {
    list.kind = text.substr(0, colon);
    rest = text.substr(colon + 1);
    if (list.kind.empty()) refuse(": no kind before the colon");
  } else if ((text[0] >= 'a' && text[0] <= 'z') || (text[0] >= 'A' && text[0] <= 'Z')) {
    list.kind = text;
    list.check(what);
    return list;
  }
  while (true) {
    const auto entry = rest.substr(0, rest.find(','));
    if (entry.empty()) refuse(": an entry is empty");
    int id = 0;
    const auto* const end = entry.data() + entry.size();
    const auto read = std::from_chars(entry.data(), end, id);
    if (read.ptr != end || (read.ec != std::errc{} && read.ec != std::errc::result_out_of_range))
      refuse(": '", printable(entry), "' is not a whole number");
    if (read.ec != std::errc{}) refuse(": ", printable(entry), " is not from 0 to ", most - 1);
    list.ids.push_back(id);
    if (entry.size() == rest.size()) break;
    rest.remove_prefix(entry.size() + 1);
  }
  list.check(what);
  return list;
}

}  // namespace chorus
