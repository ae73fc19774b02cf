#pragma once
/// A ring of ranks, in which each sends to the next and receives from the one before.

#include <algorithm>
#include <chorus/comm/communicator.hpp>
#include <chorus/core/trace.hpp>
#include <span>
#include <vector>

namespace chorus::sequence {

/// Member i is rank `first + i * stride` of the communicator, which must outlive it.
template <class Communicator>
class Ring {
 public:
  explicit Ring(Communicator& communicator) : Ring(communicator, 0, 1, communicator.size()) {}
  Ring(Communicator& communicator, int first, int stride, int size)
      : communicator_(&communicator),
        first_(first),
        stride_(stride),
        size_(size),
        member_((communicator.rank() - first) / stride) {}

  int size() const { return size_; }
  int member() const { return member_; }
  /// The member that is `steps` before this one: whose data arrive after so many hops.
  int before(int steps) const { return ((member_ - steps) % size_ + size_) % size_; }

  /// Two messages on their way; their memory must stay until `wait` returns.
  struct Hop {
    comm::Work first, second;
    void wait() {
      first.wait();
      second.wait();
    }
  };
  /// Begins to send `out` to the next member and to receive `in` from the one before. Messages run in the order of
  /// calls, and a large one waits for its receiver: members of odd number receive first.
  template <class T>
  [[nodiscard]] Hop hop(std::span<const T> out, std::span<T> in) const {
    const comm::CollectiveOptions options{.traffic = trace::Traffic::activations};
    const auto send = [&] { return communicator_->send_async(out, peer(before(-1)), options); };
    const auto receive = [&] { return communicator_->recv_async(in, peer(before(1)), options); };
    Hop both;
    const bool receives_first = member_ % 2 == 1;
    both.first = receives_first ? receive() : send();
    both.second = receives_first ? send() : receive();
    return both;
  }

  /// The sums of all members' numbers, in place, in the order of members: all get the same bits.
  void sum(std::span<double> numbers) const {
    const std::size_t count = numbers.size();
    std::vector<double> of(count * static_cast<std::size_t>(size_));
    const auto at = [&](int steps) {
      return std::span<double>(of).subspan(count * static_cast<std::size_t>(before(steps)), count);
    };
    std::copy(numbers.begin(), numbers.end(), at(0).begin());
    for (int step = 0; step + 1 < size_; ++step) hop<double>(at(step), at(step + 1)).wait();
    for (std::size_t i = 0; i < count; ++i) {
      numbers[i] = 0;
      for (std::size_t member = 0; member < of.size() / count; ++member) numbers[i] += of[member * count + i];
    }
  }

 private:
  int peer(int member) const { return first_ + member * stride_; }

  Communicator* communicator_;
  int first_, stride_, size_, member_;
};

}  // namespace chorus::sequence
