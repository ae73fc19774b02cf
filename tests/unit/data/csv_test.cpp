#include <catch.hpp>
#include <chorus/data/csv.hpp>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "files.hpp"

namespace csv_test {

namespace data = chorus::data;
using chorus::FileError;

class Table {
 public:
  explicit Table(const std::string& text)
      : path_(folder_.write("t.csv", {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()})) {}
  data::CsvTable read(const data::CsvOptions& options = {}) const { return data::read_csv(path_, options); }
  /// The message of a FileError, from the file's name on.
  template <class Action>
  std::string refused(Action action) const {
    const auto message = message_of<FileError>(action);
    return message.substr(std::min(message.find("t.csv"), message.size()));
  }

 private:
  TestFolder folder_;
  std::string path_;
};

TEST_CASE("a table with names, quotes and numbers") {
  const Table file("\xEF\xBB\xBFname,x,y\r\n\"a, \"\"b\"\"\nc\",1, 2.5 \r\n\nd,+3,-4e1");
  const auto table = file.read();
  CHECK(table.names() == std::vector<std::string>{"name", "x", "y"});
  CHECK(table.rows() == 2);
  CHECK(table.texts("name") == std::vector<std::string>{"a, \"b\"\nc", "d"});
  CHECK(table.numbers({"y", "x"}).to_vector() == std::vector<float>{2.5f, 1, -40, 3});
  CHECK(table.column<std::int64_t>("x").to_vector() == std::vector<std::int64_t>{1, 3});
  CHECK(file.refused([&] { table.column("name"); }) ==
        "t.csv, line 2, column 1 (name): expected a number of F32, got 'a, \"b\"\\x0ac'");
  CHECK(file.refused([&] { table.column<std::int64_t>("y"); }) ==
        "t.csv, line 2, column 3 (y): expected a number of I64, got '2.5'");
  CHECK(message_of<chorus::UsageError>([&] {
          table.column("z");
        }).ends_with("has no column 'z'; expected one of name, x, y"));
}

TEST_CASE("lines that end with CR alone, as of old Macs, are lines") {
  const auto table = Table("x,y\r1,2\r\r\"3\",4\r\n5,6").read();
  CHECK(table.names() == std::vector<std::string>{"x", "y"});
  CHECK(table.numbers({"x", "y"}).to_vector() == std::vector<float>{1, 2, 3, 4, 5, 6});
}

TEST_CASE("a table without names; values that are missing; another separator") {
  const auto table = Table("1;\n2;3\n").read({.separator = ';', .header = false, .missing = -1.0});
  CHECK(table.numbers({"0", "1"}).to_vector() == std::vector<float>{1, -1, 2, 3});
  const Table holes("x,y\n1,\n");
  CHECK(
      holes.refused([&] { holes.read().column("y"); }) ==
      "t.csv, line 2, column 2 (y): expected a number of F32, got ''; CsvOptions::missing says what an empty value is");
}

TEST_CASE("tables that are none are refused with their line") {
  const auto refused = [](const char* text) {
    const Table file(text);
    return file.refused([&] { file.read(); });
  };
  CHECK(refused("") == "t.csv: the file is empty");
  CHECK(refused("x,y\n\"1\n\",2\n3\n") == "t.csv, line 4: expected 2 values, as in the first line, got 1");
  CHECK(refused("x,y\n1,\"2\n") == "t.csv, line 2, column 2: expected a closing quote, got the end of the file");
  CHECK(refused("x\n\"1\"2\n") ==
        "t.csv, line 2, column 1: expected ',' or the line's end after a closing quote, got '2'");
}

}  // namespace csv_test
