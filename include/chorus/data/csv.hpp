#pragma once
/// CSV files (RFC 4180).

#include <algorithm>
#include <chorus/core/error.hpp>
#include <chorus/core/from_chars.hpp>
#include <chorus/core/printable.hpp>
#include <chorus/data/text.hpp>
#include <chorus/tensor/tensor.hpp>
#include <cstddef>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

namespace chorus::data {

/// Options of read_csv.
struct CsvOptions {
  char separator = ',';
  bool header = true;  ///< the first line has the column names; else they are "0", "1", ...
  /// The number for empty values. By default an empty value is an error.
  std::optional<double> missing = {};
};

/// A table from read_csv. All rows have the same number of values.
class CsvTable {
 public:
  CsvTable(std::string path, const CsvOptions& options) : path_(std::move(path)), options_(options) { read(); }

  Index rows() const { return static_cast<Index>(lines_.size()); }
  const std::vector<std::string>& names() const { return names_; }

  /// Columns as numbers: [rows, columns]. Throws UsageError for a missing column, and FileError with the line for a
  /// value that is not a number of type T.
  template <Scalar T = float>
  Tensor<T, 2> numbers(const std::vector<std::string>& columns) const {
    const auto out = Tensor<T, 2>::empty({rows(), static_cast<Index>(columns.size())});
    for (std::size_t c = 0; c < columns.size(); ++c) {
      const std::size_t from = find(columns[c]);
      for (std::size_t r = 0; r < lines_.size(); ++r) out.data()[r * columns.size() + c] = number<T>(r, from);
    }
    return out;
  }
  /// A column as numbers: [rows]. Throws as above.
  template <Scalar T = float>
  Tensor<T, 1> column(const std::string& name) const {
    return numbers<T>({name}).view(Shape<1>{rows()});
  }
  /// A column as texts. Throws UsageError if the column is missing.
  std::vector<std::string> texts(const std::string& name) const {
    const std::size_t from = find(name);
    std::vector<std::string> out;
    for (std::size_t r = 0; r < lines_.size(); ++r) out.push_back(values_[r * names_.size() + from]);
    return out;
  }

 private:
  std::size_t find(const std::string& name) const {
    const auto at = std::find(names_.begin(), names_.end(), name);
    if (at != names_.end()) return static_cast<std::size_t>(at - names_.begin());
    std::string known;
    for (std::size_t i = 0; i < std::min(names_.size(), std::size_t{20}); ++i)
      known += cat(i == 0 ? "" : ", ", printable(names_[i]));
    fail<UsageError>("CSV: ", path_, " has no column '", printable(name), "'; expected one of ", known,
                     names_.size() > 20 ? ", ..." : "");
  }

  template <class T>
  T number(std::size_t row, std::size_t column) const {
    std::string_view text = values_[row * names_.size() + column];
    const auto blanks = [](char c) { return c == ' ' || c == '\t'; };
    while (!text.empty() && blanks(text.front())) text.remove_prefix(1);
    while (!text.empty() && blanks(text.back())) text.remove_suffix(1);
    if (text.empty() && options_.missing) return static_cast<T>(*options_.missing);
    if (text.size() > 1 && text.front() == '+' && text[1] != '-') text.remove_prefix(1);
    T out{};
    const auto* const end = text.data() + text.size();
    const auto [stop, error] = chorus::detail::from_chars(text.data(), end, out);
    check<FileError>(error == std::errc() && stop == end, "CSV: ", path_, ", line ", lines_[row], ", column ",
                     column + 1, " (", printable(names_[column]), "): expected a number of ", dtype<T>, ", got '",
                     printable(text), "'", text.empty() ? "; CsvOptions::missing says what an empty value is" : "");
    return out;
  }

  void read() {
    const std::string text = read_text(path_);
    std::size_t at = text.starts_with("\xEF\xBB\xBF") ? 3 : 0;  // byte order mark
    Index line = 1;
    std::vector<std::string> row;
    while (at < text.size()) {
      const Index first = line;
      row.clear();
      read_row(text, at, line, row);
      if (row.size() == 1 && row[0].empty()) continue;  // skip empty lines
      if (names_.empty()) {
        for (std::size_t i = 0; i < row.size(); ++i) names_.push_back(options_.header ? row[i] : cat(i));
        if (options_.header) continue;
      }
      check<FileError>(row.size() == names_.size(), "CSV: ", path_, ", line ", first, ": expected ", names_.size(),
                       " values, as in the first line, got ", row.size());
      lines_.push_back(first);
      for (auto& value : row) values_.push_back(std::move(value));
    }
    check<FileError>(!names_.empty(), "CSV: ", path_, ": the file is empty");
  }

  /// Reads one row, up to the line's end (LF, CR LF or CR). Quoted values may span several lines.
  void read_row(std::string_view text, std::size_t& at, Index& line, std::vector<std::string>& row) const {
    for (;;) {
      std::string value;
      if (at < text.size() && text[at] == '"') {
        const Index begin = line;
        for (++at;; ++at) {
          check<FileError>(at < text.size(), "CSV: ", path_, ", line ", begin, ", column ", row.size() + 1,
                           ": expected a closing quote, got the end of the file");
          if (text[at] == '"' && (at + 1 >= text.size() || text[at + 1] != '"')) break;
          at += text[at] == '"';  // two quotes are one
          line += text[at] == '\n';
          value += text[at];
        }
        ++at;
        const char after = at < text.size() ? text[at] : '\n';
        check<FileError>(after == options_.separator || after == '\n' || after == '\r', "CSV: ", path_, ", line ", line,
                         ", column ", row.size() + 1, ": expected '", options_.separator,
                         "' or the line's end after a closing quote, got '", printable(std::string_view(&after, 1)),
                         "'");
      } else {
        const char ends[] = {options_.separator, '\n', '\r'};
        const std::size_t end = std::min(text.find_first_of(std::string_view(ends, sizeof ends), at), text.size());
        value = text.substr(at, end - at);
        at = end;
      }
      row.push_back(std::move(value));
      if (at >= text.size()) return;
      const char end = text[at++];
      if (end == options_.separator) continue;
      if (end == '\r' && at < text.size() && text[at] == '\n') ++at;
      ++line;
      return;
    }
  }

  std::string path_;
  CsvOptions options_;
  std::vector<std::string> names_, values_;  // row by row
  std::vector<Index> lines_;                 // the line number of each row
};

/// Reads a table; `TensorDataset{table.numbers({"x", "y"}), table.column("price")}` turns it into samples. Throws
/// FileError with the line if a row has a different number of values than the first, or a quote is not closed.
inline CsvTable read_csv(const std::string& path, const CsvOptions& options = {}) { return {path, options}; }

}  // namespace chorus::data
