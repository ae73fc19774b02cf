#pragma once
/// `Members`: who lives in a job whose ranks may be lost, and may come. The policy `Elastic` sees the processes through
/// it.

#include <chorus/comm/any_communicator.hpp>
#include <chorus/core/error.hpp>
#include <chrono>
#include <cstdint>
#include <string_view>

namespace chorus::elastic {

struct Options {
  /// A rank that gives no sign of life for so long is lost. One whose process ends or whose connection breaks is lost
  /// at once. A slow step is no silence: a thread of its own answers for each rank.
  std::chrono::milliseconds lost_after{5'000};
  int at_least = 1;  ///< with fewer ranks the job ends
};

/// Fewer ranks than `at_least` live.
class TooFewRanks : public CommError {
 public:
  using CommError::CommError;
};

/// The others have given this rank up and gone on without it.
class Evicted : public CommError {
 public:
  using CommError::CommError;
};

/// The ranks of a job that live. Between two calls of `regroup` lies an epoch, in which they don't change.
class Members {
 public:
  Members() = default;
  virtual ~Members() = default;  ///< leaves the job: it has ended well for this rank
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  /// Meets all ranks that live and those that wait to be let in. Returns the communicator of the new epoch, in which
  /// ranks are numbered by age: a newcomer comes last. The first call begins the job, or joins it. All living ranks
  /// call it, after their calls of the old communicator have ended and that is aborted or destroyed. `why`: the error
  /// that has ended the last epoch, for messages; empty if the ranks have agreed to let newcomers in. Throws
  /// TooFewRanks; Evicted; TimeoutError, with its name, if a rank lives but does not come; CommError if a rank has
  /// called `fail`.
  virtual comm::AnyCommunicator regroup(std::string_view why) = 0;
  /// Whether a newcomer waits to be let in. Reads one number: ask at each step.
  virtual bool knocked() = 0;
  /// Tells the others that this rank ends by an error of its own: their next `regroup` throws it.
  virtual void fail(std::string_view why) noexcept = 0;

  std::int64_t epoch = 0;  ///< how often the ranks have met
};

}  // namespace chorus::elastic
