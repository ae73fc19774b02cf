/// The labs' shared code, an object of its own: what students' files don't have to compile.

#include "lab.hpp"

#include <algorithm>
#include <chorus/comm/thread_group.hpp>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string_view>
#include <thread>

namespace lab {

namespace {
std::string number(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.10g", x);
  return text;
}
std::string answer(bool x) { return x ? "true" : "false"; }
}  // namespace

void hole(const char* what) { ch::fail<ch::UsageError>("lab: incomplete code: write ", what); }

Lab::Lab(std::string title, const std::string& predictions) : title_(std::move(title)) {
  std::ifstream file(predictions);
  ch::check<ch::UsageError>(bool(file), "lab: can't read the predictions: '", predictions, "'");
  const auto values = nlohmann::json::parse(file, nullptr, false);
  ch::check<ch::UsageError>(values.is_object(), "'", predictions, "': expected a JSON object");
  std::string missing;
  for (const auto& [key, value] : values.items())
    if (value.is_number())
      predictions_[key] = value.get<double>();
    else if (value.is_boolean())
      predictions_[key] = value.get<bool>();
    else
      missing += "\n  " + key;
  ch::check<ch::UsageError>(missing.empty(), "'", predictions,
                            "': predict before the run, each by a number, true or false:", missing);
}

bool Lab::compare(const std::string& key, double measured, double apart, const std::string& hint) {
  const auto* const guess = predicted<double>(key, "a number");
  if (guess == nullptr) return false;
  const bool right = std::abs(*guess - measured) <= apart;
  return row(prediction, key, right,
             ch::cat("you predicted ", number(*guess), ", measured ", number(measured), right ? "" : ". " + hint));
}
bool Lab::compare(const std::string& key, bool measured, const std::string& hint) {
  const auto* const guess = predicted<bool>(key, "true or false");
  if (guess == nullptr) return false;
  const bool right = *guess == measured;
  return row(prediction, key, right,
             ch::cat("you predicted ", answer(*guess), ", measured ", answer(measured), right ? "" : ". " + hint));
}
bool Lab::expect(const std::string& what, double has_to_be, double got, double apart, const std::string& hint) {
  const bool right = std::abs(has_to_be - got) <= apart;
  return row(code, what, right,
             right ? "" : ch::cat("your code gave ", number(got), ", and has to give ", number(has_to_be), ". ", hint));
}
bool Lab::require(const std::string& what, bool holds, const std::string& why_not) {
  return row(code, what, holds, holds ? "" : why_not);
}
bool Lab::run(const std::string& what, const std::function<void()>& calls) {
  try {
    calls();
    return true;
  } catch (const std::exception& error) {
    return row(code, what, false, error.what());
  }
}
void Lab::say(const std::string& line) { text_[rows_.empty() ? code : rows_.back().kind] += line + "\n"; }

bool Lab::passed() const { return std::all_of(rows_.begin(), rows_.end(), [](const Row& row) { return row.right; }); }
std::string Lab::text() const {
  const auto wrong = std::count_if(rows_.begin(), rows_.end(), [](const Row& row) { return !row.right; });
  return title_ + "\n" + (text_[code].empty() ? "" : "your code\n" + text_[code]) +
         (text_[prediction].empty() ? "" : "your predictions\n" + text_[prediction]) +
         (wrong == 0 ? "all is right\n" : ch::cat(wrong, wrong == 1 ? " line is" : " lines are", " wrong\n"));
}
std::string Lab::json() const {
  std::string lines;
  int points = 0;
  const auto line = [&](const char* kind, const std::string& id, int its_points, const std::string& message) {
    const nlohmann::ordered_json fields{{"kind", kind}, {"id", id}, {"points", its_points}, {"message", message}};
    lines += fields.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  };
  for (const auto& row : rows_) {
    line(row.kind == code ? "code" : "prediction", row.id, row.right, row.message);
    points += row.right;
  }
  line("total", title_, points, passed() ? "all is right" : "");
  return lines;
}

template <class T>
const T* Lab::predicted(const std::string& key, const char* kind) {
  const auto found = predictions_.find(key);
  const T* const value = found == predictions_.end() ? nullptr : std::get_if<T>(&found->second);
  if (value == nullptr)
    row(prediction, key, false,
        found == predictions_.end() ? "predict.json has no line of this name" : ch::cat("predict ", kind));
  return value;
}
bool Lab::row(Kind kind, const std::string& id, bool right, const std::string& message) {
  rows_.push_back({kind, right, id, message});
  text_[kind] += ch::cat("  ", right ? "right" : "WRONG", "   ", id, message.empty() ? "" : ": " + message, "\n");
  return right;
}

int run(int argc, char** argv, const char* title, const std::function<void(Lab&)>& check) {
  try {
    const bool json = argc == 4 && std::string_view(argv[2]) == "--json";
    ch::check<ch::UsageError>(argc == 2 || json, "usage: ", argv[0], " PREDICTIONS.json [--json FILE]");
    Lab lab(title, argv[1]);
    check(lab);
    if (json) {
      std::ofstream file(argv[3]);
      file << lab.json() << std::flush;
      ch::check<ch::UsageError>(bool(file), "lab: can't write '", argv[3], "'");
    } else {
      std::printf("%s", lab.text().c_str());
    }
    return lab.passed() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

void on_ranks(int ranks, const std::function<void(ch::comm::AnyCommunicator&)>& body,
              std::chrono::milliseconds patience, ch::comm::Algorithm all_reduce) {
  auto group = ch::comm::thread_group(ranks, patience, all_reduce);
  std::vector<std::thread> threads;
  std::mutex mutex;
  std::exception_ptr first;
  for (auto& own : group)
    threads.emplace_back([&] {
      try {
        body(own);
      } catch (const std::exception& error) {
        {
          const std::lock_guard lock(mutex);
          if (!first) first = std::current_exception();
        }
        own.abort(error.what());
      }
    });
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace lab
