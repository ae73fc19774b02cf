#pragma once
/// Shared code of the labs: predictions, which are made before the run, and the table that reports which of them, and
/// of the student's results, are right.

#include <chorus/chorus.hpp>
#include <chorus/comm/thread_group.hpp>
#include <cmath>
#include <cstdio>
#include <exception>
#include <fstream>
#include <functional>
#include <mutex>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace ch = chorus;

namespace lab {

/// Marks the place of a student's code.
[[noreturn]] inline void hole(const char* what) { ch::fail<ch::UsageError>("lab: incomplete code: write ", what); }

/// One run of a lab. Predictions are compared with measurements that don't depend on the student's code; results of
/// that code with their expected values. Wrong lines say what is wrong without the answer.
class Lab {
 public:
  /// Reads the predictions. Throws UsageError that names all missing ones: a prediction after the run would prove
  /// nothing.
  Lab(std::string title, const std::string& predictions) : text_(title + "\n") {
    std::ifstream file(predictions);
    ch::check<ch::UsageError>(bool(file), "lab: can't read the predictions: '", predictions, "'");
    predictions_ = nlohmann::json::parse(file, nullptr, false);
    ch::check<ch::UsageError>(predictions_.is_object(), "'", predictions, "': expected a JSON object");
    std::string missing;
    for (const auto& [key, value] : predictions_.items())
      if (!value.is_number() && !value.is_boolean()) missing += "\n  " + key;
    ch::check<ch::UsageError>(missing.empty(), "'", predictions,
                              "': predict before the run, each by a number, true or false:", missing);
  }

  /// Compares the prediction of that name with a measured number; `apart`: the allowed difference. Returns whether it
  /// is right.
  bool compare(const std::string& key, double measured, double apart, const std::string& hint) {
    const auto* const guess = prediction(key, &nlohmann::json::is_number, "a number");
    if (guess == nullptr) return false;
    const auto predicted = guess->get<double>();
    if (std::abs(predicted - measured) <= apart)
      return row("right", key, ch::cat("predicted ", number(predicted), ", measured ", number(measured)));
    return row("WRONG", key,
               ch::cat("predicted ", number(predicted), ", which is too ", predicted < measured ? "small" : "large",
                       ". ", hint));
  }
  /// The same for an answer that is true or false.
  bool compare(const std::string& key, bool measured, const std::string& hint) {
    const auto* const guess = prediction(key, &nlohmann::json::is_boolean, "true or false");
    if (guess == nullptr) return false;
    const char* const predicted = guess->get<bool>() ? "true" : "false";
    if (guess->get<bool>() == measured) return row("right", key, ch::cat("predicted ", predicted, ", and so it is"));
    return row("WRONG", key, ch::cat("predicted ", predicted, ", and it is not so. ", hint));
  }
  /// Compares a result of the student's code with its expected value.
  bool expect(const std::string& what, double expected, double got, double apart, const std::string& hint) {
    const bool right = std::abs(expected - got) <= apart;
    return row(right ? "right" : "WRONG", what,
               ch::cat("expected ", number(expected), ", got ", number(got), right ? "" : ". " + hint));
  }
  /// Checks a condition on the student's code; `why_not`: the reason if it does not hold.
  bool require(const std::string& what, bool holds, const std::string& why_not) {
    return row(holds ? "right" : "WRONG", what, holds ? "" : why_not);
  }
  /// Runs `calls`, which call the student's code. An unfilled hole, or another exception, gives a wrong line. Returns
  /// whether they ended normally.
  bool run(const std::string& what, const std::function<void()>& calls) {
    try {
      calls();
      return true;
    } catch (const std::exception& error) {
      return row("WRONG", what, error.what());
    }
  }
  void say(const std::string& line) { text_ += line + "\n"; }

  bool passed() const { return wrong_ == 0; }
  std::string text() const {
    return text_ + (passed() ? "all is right\n" : ch::cat(wrong_, wrong_ == 1 ? " line is" : " lines are", " wrong\n"));
  }

 private:
  const nlohmann::json* prediction(const std::string& key, bool (nlohmann::json::*is)() const noexcept,
                                   const char* kind) {
    const auto found = predictions_.find(key);
    if (found != predictions_.end() && ((*found).*is)()) return &*found;
    row("WRONG", key,
        found == predictions_.end() ? "predict.json has no line of this name" : ch::cat("predict ", kind));
    return nullptr;
  }
  static std::string number(double x) {
    char text[40];
    std::snprintf(text, sizeof text, "%.10g", x);
    return text;
  }
  bool row(const char* verdict, const std::string& what, const std::string& why) {
    text_ += ch::cat("  ", verdict, "   ", what, why.empty() ? "" : ": " + why, "\n");
    const bool right = *verdict == 'r';
    wrong_ += !right;
    return right;
  }

  std::string text_;
  nlohmann::json predictions_;
  int wrong_ = 0;
};

/// Runs a lab and prints its table: for main. The first argument is the file of predictions.
template <class Run>
int run(int argc, char** argv, const char* title, const Run& body) {
  try {
    ch::check<ch::UsageError>(argc == 2, "usage: ", argv[0], " PREDICTIONS.json");
    Lab lab(title, argv[1]);
    body(lab);
    std::printf("%s", lab.text().c_str());
    return lab.passed() ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}

/// Calls `body(communicator)` for each rank of a group, each in its own thread, and rethrows an exception of one of
/// them. Ranks wait for each other for at most `patience`: a collective that hangs ends in an error.
inline void on_ranks(int ranks, const std::function<void(ch::comm::AnyCommunicator&)>& body,
                     std::chrono::milliseconds patience = std::chrono::seconds(20),
                     ch::comm::Algorithm all_reduce = ch::comm::Algorithm::automatic) {
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
