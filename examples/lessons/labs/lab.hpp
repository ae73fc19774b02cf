#pragma once
/// What the labs share: predictions that are made before the run, and the table of what was expected and what came.

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

/// What stands where a student's code belongs.
[[noreturn]] inline void hole(const char* what) { ch::fail<ch::UsageError>("there is a hole: write ", what); }

/// One run of a lab.
class Lab {
 public:
  /// Reads the predictions. Throws UsageError while one of them is missing: to know better afterwards is easy.
  Lab(std::string title, const std::string& predictions) : text_(title + "\n"), file_(predictions) {
    std::ifstream file(predictions);
    ch::check<ch::UsageError>(bool(file), "there are no predictions: '", predictions, "' cannot be read");
    predictions_ = nlohmann::json::parse(file, nullptr, false);
    ch::check<ch::UsageError>(predictions_.is_object(), "'", predictions, "' is no JSON object");
    for (const auto& [key, value] : predictions_.items())
      ch::check<ch::UsageError>(!value.is_null(), "'", predictions, "': predict \"", key, "\" before the run");
  }

  /// A number that was predicted. Throws UsageError where it is none.
  double predicted(const std::string& key) const {
    const auto found = predictions_.find(key);
    ch::check<ch::UsageError>(found != predictions_.end() && (found->is_number() || found->is_boolean()), "'", file_,
                              "': expected a number, true or false for \"", key, "\"");
    return found->is_boolean() ? static_cast<double>(found->get<bool>()) : found->get<double>();
  }
  /// Compares the prediction of that name with what was measured; `relative`: how far apart they may be.
  void compare(const std::string& key, double measured, double relative = 0) {
    const double guess = predicted(key);
    row(key, guess, measured, std::abs(guess - measured) <= relative * std::abs(measured));
  }
  /// What the student's code gives, and what it has to give.
  void expect(const std::string& what, double expected, double got, double apart = 0) {
    row(what, expected, got, std::abs(expected - got) <= apart);
  }
  /// What has to hold, with the reason where it does not.
  void require(const std::string& what, bool holds, const std::string& why_not) {
    text_ += ch::cat(holds ? "  right   " : "  WRONG   ", what, holds ? "" : ": " + why_not, "\n");
    wrong_ += !holds;
  }
  void say(const std::string& line) { text_ += line + "\n"; }

  bool passed() const { return wrong_ == 0; }
  std::string text() const {
    return text_ + (passed() ? "all is right\n" : ch::cat(wrong_, wrong_ == 1 ? " line is" : " lines are", " wrong\n"));
  }

 private:
  void row(const std::string& what, double expected, double got, bool right) {
    char line[200];
    std::snprintf(line, sizeof line, "  %-7s %-46s expected %14.10g   got %14.10g\n", right ? "right" : "WRONG",
                  what.c_str(), expected, got);
    text_ += line;
    wrong_ += !right;
  }

  std::string text_, file_;
  nlohmann::json predictions_;
  int wrong_ = 0;
};

/// Runs a lab and prints its table: for main. The predictions' file is the first argument.
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

/// Calls `body(communicator)` for each rank of a group, each in a thread, and throws what one of them has thrown. Ranks
/// wait for each other at most `patience`: a collective that hangs ends in an error.
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
