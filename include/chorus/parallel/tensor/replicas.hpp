#pragma once
/// Checks that parameters that all ranks of TensorParallel have whole get bit-identical gradients on all ranks, every
/// few backward passes.

#include <array>
#include <chorus/autograd/tape.hpp>
#include <chorus/comm/communicator.hpp>
#include <chorus/nn/flat_parameters.hpp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <span>
#include <vector>

namespace chorus::detail {

template <Device D, class Communicator>
class ReplicaCheck {
 public:
  /// Checks in every `every`-th backward pass; 0: never.
  ReplicaCheck(const nn::FlatParameters<D>& flat, Communicator& communicator, const std::weak_ptr<void>& alive,
               int every)
      : flat_(flat), communicator_(communicator), every_(every) {
    if (every == 0 || communicator.size() == 1) return;
    for (const auto& entry : flat.entries())
      entry.parameter().on_grad([this, alive] {
        if (alive.expired() || last_run_ == backward_run()) return;
        last_run_ = backward_run();
        if (runs_++ % static_cast<std::uint64_t>(every_) != 0) return;
        at_backward_end([this, alive] {
          if (!alive.expired()) check_now();
        });
      });
  }
  ReplicaCheck(const ReplicaCheck&) = delete;
  ReplicaCheck& operator=(const ReplicaCheck&) = delete;

  /// Throws UsageError, on every rank, if gradients differ. A collective.
  [[gnu::cold]] void check_now() {
    std::vector<std::uint64_t> own;
    std::uint64_t all = 0;
    for (const auto& entry : flat_.entries()) {
      if (entry.parameter().part() != nullptr) continue;
      own.push_back(hash(entry.parameter()));
      all = 31 * all + own.back();
    }
    const auto number = static_cast<std::int64_t>(all >> 1);
    std::array<std::int64_t, 2> largest{number, std::numeric_limits<std::int64_t>::max() - number};
    communicator_.all_reduce(std::span(largest), comm::ReduceOp::max, {});
    if (std::numeric_limits<std::int64_t>::max() - largest[1] != largest[0]) raise(own);
  }

 private:
  static std::uint64_t hash(const ParameterOn<D>& parameter) {
    if (!parameter.grad_arrived()) return 0;
    std::vector<std::uint32_t> words(parameter.size_bytes() / sizeof(std::uint32_t));
    copy_bytes(Cpu{}, words.data(), parameter.where(), parameter.grad_place(), parameter.size_bytes());
    std::uint64_t bits = 14695981039346656037ull;
    for (const std::uint32_t word : words) bits = (bits ^ word) * 1099511628211ull;  // FNV-1a, of words
    return bits;
  }
  [[noreturn, gnu::cold]] void raise(const std::vector<std::uint64_t>& own) {
    std::vector<std::uint64_t> all(own.size() * static_cast<std::size_t>(communicator_.size()));
    communicator_.all_gather(std::span<const std::uint64_t>(own), std::span<std::uint64_t>(all), {});
    std::size_t i = 0;
    for (const auto& entry : flat_.entries()) {
      if (entry.parameter().part() != nullptr) continue;
      for (std::size_t at = i; at < all.size(); at += own.size())
        if (all[at] != all[i])
          fail<UsageError>("TensorParallel: rank ", at / own.size(), " has a different gradient of '", entry.named.name,
                           "' than rank 0: expected the same bits for parameters that are not split. Use the same "
                           "batch on all ranks (net.sampler), and use the columns of a ColumnParallelLinear only "
                           "through RowParallelLinear or gather_columns");
      ++i;
    }
    fail<UsageError>("TensorParallel: ranks have different gradients of parameters that are not split");
  }

  const nn::FlatParameters<D>& flat_;
  Communicator& communicator_;
  int every_;
  std::uint64_t runs_ = 0, last_run_ = 0;
};

}  // namespace chorus::detail
