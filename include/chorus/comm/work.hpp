#pragma once
/// `Work`: the handle of a collective that runs in the background.

#include <chorus/core/config.hpp>
#include <chorus/core/trace_listener.hpp>
#include <cstdint>
#include <memory>
#include <utility>

namespace chorus::comm {

/// A communicator's record of its asynchronous collectives. They finish in the order of their calls, so a number, the
/// ticket, identifies one without an allocation per call.
class Progress {
 public:
  virtual ~Progress() = default;
  virtual void wait(std::uint64_t ticket) = 0;  ///< returns when it has finished, throws its exception
  virtual bool done(std::uint64_t ticket) = 0;  ///< whether it has finished or failed
};

/// An asynchronous collective. Its buffers must stay alive and untouched until `wait` returns or `done` is true. So the
/// destructor waits, too, for at most the communicator's timeout, and ignores errors.
class Work {
 public:
  Work() = default;
  Work(std::shared_ptr<Progress> progress, std::uint64_t ticket) : progress_(std::move(progress)), ticket_(ticket) {}
  Work(Work&& other) noexcept : progress_(std::move(other.progress_)), ticket_(other.ticket_) {}
  Work& operator=(Work&& other) noexcept {
    if (this == &other) return *this;
    finish();
    progress_ = std::move(other.progress_);
    ticket_ = other.ticket_;
    return *this;
  }
  ~Work() { finish(); }

  /// Returns when the collective has finished. Throws CommError if it failed.
  void wait() {
    const auto progress = std::move(progress_);
    if (!progress) return;
    const trace::Span waits(trace::Lane::wait, "wait", "a call in the background");
    progress->wait(ticket_);
  }
  /// Whether `wait` would return or throw at once.
  bool done() const { return !progress_ || progress_->done(ticket_); }

 private:
  void finish() noexcept {
    try {
      wait();
    } catch (...) {
      // The communicator stays failed: its next call throws.
    }
  }

  std::shared_ptr<Progress> progress_;
  std::uint64_t ticket_ = 0;
};

}  // namespace chorus::comm
