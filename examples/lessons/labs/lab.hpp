#pragma once
/// Shared interface of the labs: predictions, which are made before the run, and the table that reports which of them,
/// and of the results of the student's code, are right. A student's file compiles what this header includes.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/comm/world.hpp>
#include <chrono>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <type_traits>
#include <variant>
#include <vector>

namespace ch = chorus;

namespace lab {

/// Marks the place of a student's code. Throws UsageError that names it.
[[noreturn]] void hole(const char* what);

/// One run of a lab. Predictions are compared with measurements that don't depend on the student's code; results of
/// that code with what it has to do. Each of them is a row of the table, and a right one is a point.
class Lab {
 public:
  /// Reads the predictions. Throws UsageError that names all missing ones: a prediction after the run would prove
  /// nothing.
  Lab(std::string title, const std::string& predictions);

  /// Compares the prediction of that name with a measured number; `apart`: the allowed difference; `hint`: a question
  /// that helps where it is wrong. Returns whether it is right.
  bool compare(const std::string& key, double measured, double apart, const std::string& hint);
  /// The same for an answer that is true or false.
  bool compare(const std::string& key, bool measured, const std::string& hint);
  /// Compares a number that the student's code gave with the one that it has to give.
  bool expect(const std::string& what, double has_to_be, double got, double apart, const std::string& hint);
  /// Checks a condition on the student's code; `why_not`: what the code did instead.
  bool require(const std::string& what, bool holds, const std::string& why_not);
  /// Runs `calls`, which call the student's code. An unfilled hole, or another exception, gives a wrong row. Returns
  /// whether they ended normally.
  bool run(const std::string& what, const std::function<void()>& calls);
  /// Adds a line to the part of the table that the last row is in; to the code's before any row.
  void say(const std::string& line);

  bool passed() const;
  /// The table: the code, then the predictions.
  std::string text() const;
  /// A line of JSON for each row, {"kind", "id", "points", "message"}, and one of the kind "total". The kind of a row is
  /// "code" or "prediction".
  std::string json() const;

 private:
  enum Kind { code, prediction };
  struct Row {
    Kind kind;
    bool right;
    std::string id, message;
  };
  template <class T>
  const T* predicted(const std::string& key, const char* kind);
  bool row(Kind kind, const std::string& id, bool right, const std::string& message);

  std::string title_, text_[2];
  std::map<std::string, std::variant<double, bool>> predictions_;
  std::vector<Row> rows_;
};

/// For main: runs a lab and prints its table. Arguments: the file of predictions, and --json FILE, which gets lines of
/// JSON instead (the student's code may print what it likes). Returns the exit status: 0 if all is right, 1 if not, 2 if the lab could not begin.
int run(int argc, char** argv, const char* title, const std::function<void(Lab&)>& check);
/// The same with the student's code, which `check` judges.
template <class Code>
int run(int argc, char** argv, const char* title, void (*check)(Lab&, const Code&),
        const std::type_identity_t<Code>& code) {
  return run(argc, argv, title, [&](Lab& lab) { check(lab, code); });
}

/// Calls `body(communicator)` for each rank of a group, each in its own thread, and rethrows an exception of one of
/// them. Ranks wait for each other for at most `patience`: a collective that hangs ends in an error.
void on_ranks(int ranks, const std::function<void(ch::comm::AnyCommunicator&)>& body,
              std::chrono::milliseconds patience = std::chrono::seconds(20),
              ch::comm::Algorithm all_reduce = ch::comm::Algorithm::automatic);

}  // namespace lab
