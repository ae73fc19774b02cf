#include <catch.hpp>
#include <chorus/train/metrics.hpp>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include <unit/message_of.hpp>

namespace summary_writer_test {

namespace ch = chorus;
namespace fs = std::filesystem;

struct Folder {
  std::string path = "/tmp/chorus_curves_XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() { fs::remove_all(path); }
};

std::string contents(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}
std::vector<fs::path> files_in(const std::string& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::directory_iterator(folder)) files.push_back(entry.path());
  std::sort(files.begin(), files.end());
  return files;
}

/// The events of a file, whose checksums have to fit.
std::vector<std::string> records(std::string_view bytes) {
  std::vector<std::string> out;
  const auto number = [&]<class Integer>(Integer) {
    Integer value = 0;
    REQUIRE(bytes.size() >= sizeof value);
    std::memcpy(&value, bytes.data(), sizeof value);
    bytes.remove_prefix(sizeof value);
    return value;
  };
  while (!bytes.empty()) {
    const auto of_length = ch::detail::masked_crc32c(bytes.substr(0, 8));
    const auto length = number(std::uint64_t{});
    CHECK(number(std::uint32_t{}) == of_length);
    REQUIRE(bytes.size() >= length);
    out.emplace_back(bytes.substr(0, length));
    bytes.remove_prefix(length);
    CHECK(number(std::uint32_t{}) == ch::detail::masked_crc32c(out.back()));
  }
  return out;
}

TEST_CASE("CRC-32C of the texts of RFC 3720, masked as in TFRecord files") {
  const auto masked = [](std::uint32_t crc) { return (crc >> 15 | crc << 17) + 0xa282ead8u; };
  CHECK(ch::detail::masked_crc32c("123456789") == masked(0xe3069283u));
  CHECK(ch::detail::masked_crc32c(std::string(32, '\0')) == masked(0x8a9136aau));
  CHECK(ch::detail::masked_crc32c(std::string(32, '\xff')) == masked(0x62a8ab43u));
}

TEST_CASE("an event file begins with its version and has a record for each point") {
  const Folder folder;
  {
    ch::SummaryWriter writer(folder.path + "/a/b");
    writer.add_scalar("loss", 2.5, 300);
    writer.flush();
    CHECK(records(contents(files_in(folder.path + "/a/b").at(0))).size() == 2);
  }
  const auto events = records(contents(files_in(folder.path + "/a/b").at(0)));
  REQUIRE(events.size() == 2);
  CHECK(events[0].substr(9) == "\x1a\x0d" "brain.Event:2");
  // step 300 (a varint of two bytes); a summary of one value with its tag and 2.5 as a float.
  using namespace std::string_literals;
  CHECK(events[1].substr(9) == "\x10\xac\x02\x2a\x0d\x0a\x0b\x0a\x04loss\x15\x00\x00\x20\x40"s);
}

TEST_CASE("each writer has a file of its own, and an empty path none") {
  const Folder folder;
  { ch::SummaryWriter one(folder.path), two(folder.path), none(""); }
  CHECK(files_in(folder.path).size() == 2);
}

TEST_CASE("a folder that cannot be made is named") {
  CHECK(message_of<ch::FileError>([] { ch::SummaryWriter writer("/proc/none/curves"); }).find("/proc/none/curves") !=
        std::string::npos);
}

TEST_CASE("metrics: one run as JSON lines, CSV and curves") {
  const Folder folder;
  {
    ch::MetricsLog log({folder.path + "/log", folder.path + "/table.csv", folder.path + "/curves"});
    log.step(0, 2.25);
    log.epoch(0, 1.5, 0.25, 4);
    log.epoch(1, 1.25, 0.5, 3.5);
    log.done({.policy = "single"});
  }
  CHECK(contents(folder.path + "/table.csv") ==
        "epoch,train_loss,test_accuracy,seconds\n0,1.5,0.25,4\n1,1.25,0.5,3.5\n");
  CHECK(records(contents(files_in(folder.path + "/curves").at(0))).size() == 6);
  const auto lines = contents(folder.path + "/log");
  CHECK(std::count(lines.begin(), lines.end(), '\n') == 4);
}

}  // namespace summary_writer_test
