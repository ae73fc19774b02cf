#pragma once
/// Gradients with mostly zero rows, such as an embedding's.

#include <algorithm>
#include <chorus/parallel/ddp/all_reduce.hpp>
#include <chorus/parallel/hooks/bucket_states.hpp>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <vector>

namespace chorus {

/// Ranks exchange the nonzero rows of their gradients; all add them in rank order. A parameter of shape [n, ...] has n
/// rows, a vector is one row. PyTorch does this for embeddings with `sparse=True`; here gradients stay dense in memory,
/// and optimizers step all rows.
///
/// If the fullest rank has R nonzero rows with V numbers of b bytes in all, each of n ranks sends (n - 1) (8 R + b V)
/// bytes per bucket, b V rounded up to 8, and before that 16 (n - 1) for the counts. A bucket for which an all-reduce
/// sends no more is all-reduced. Give an embedding its own bucket: choose a `bucket_cap_mb` below its size. On GPUs
/// rows are found on the host.
struct SparseRows {
  static constexpr bool several_rounds = true;

  template <class T, Device D, class Communicator>
  comm::Work start(const GradBucket<T, D>& bucket, Communicator& communicator) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    if (state.rows.empty()) lay_out(bucket, state.rows);
    fetch(bucket, state);
    const T* gradients = on_host(bucket, state);
    state.own.clear();
    state.count = {};
    for (std::size_t id = 0; id < state.rows.size(); ++id) {
      const Row row = state.rows[id];
      const T* first = gradients + row.begin;
      if (std::all_of(first, first + row.count, [](T x) { return x == 0; })) continue;
      state.own.push_back(static_cast<Id>(id));
      state.count.rows += 1;
      state.count.numbers += static_cast<Id>(row.count);
    }
    state.counts.resize(static_cast<std::size_t>(communicator.size()));
    return communicator.all_gather_async(std::span<const Id>(&state.count.rows, 2),
                                         std::span<Id>(&state.counts[0].rows, 2 * state.counts.size()), {});
  }

  template <class T, Device D, class Communicator>
  std::optional<comm::Work> resume(const GradBucket<T, D>& bucket, Communicator& communicator, int round) {
    if (communicator.size() == 1) return {};
    auto& state = states.of<State<T>>(bucket.index);
    if (round == 0) return send(bucket, communicator, state);
    if (!state.message.empty()) add_up(bucket, state);
    return {};
  }

  void reset() { states.clear(); }

  using Id = std::int64_t;
  struct Row {
    std::size_t begin, count;
  };
  struct Counts {  // sent as two numbers
    Id rows = 0, numbers = 0;
  };
  static_assert(sizeof(Counts) == 2 * sizeof(Id));
  template <class T>
  struct State {
    std::vector<Row> rows;                   // of the bucket
    std::vector<Id> own;                     // this rank's nonzero rows
    Counts count;                            // the number of them
    std::vector<Counts> counts;              // of all ranks
    std::vector<std::uint8_t> message, all;  // row ids, then their numbers; empty for an all-reduce
    std::size_t values_at = 0;               // where the numbers begin in a message
    std::vector<T> host;                     // a copy of a bucket on another device
  };
  detail::BucketStates states = {};

 private:
  template <class T, Device D>
  static void lay_out(const GradBucket<T, D>& bucket, std::vector<Row>& rows) {
    for (const auto& part : bucket.parts) {
      const auto count = static_cast<std::size_t>(numel(part.shape));
      const auto n = part.shape.size() < 2 ? std::size_t{1} : static_cast<std::size_t>(part.shape[0]);
      for (std::size_t i = 0; i < n && count > 0; ++i) rows.push_back({part.begin + i * (count / n), count / n});
    }
  }

  // The bucket's numbers in host memory: the bucket itself, or the copy that `fetch` made.
  template <class T, Device D>
  static T* on_host(const GradBucket<T, D>& bucket, State<T>& state) {
    return std::is_same_v<D, Cpu> ? bucket.gradients.data() : state.host.data();
  }
  template <class T, Device D>
  static void fetch(const GradBucket<T, D>& bucket, State<T>& state) {
    if constexpr (!std::is_same_v<D, Cpu>) {
      state.host.resize(bucket.gradients.size());
      copy_bytes(Cpu{}, state.host.data(), bucket.device, bucket.gradients.data(), bucket.gradients.size_bytes());
    }
  }

  template <class T, Device D, class Communicator>
  static std::optional<comm::Work> send(const GradBucket<T, D>& bucket, Communicator& communicator, State<T>& state) {
    std::size_t rows = 0, numbers = 0;
    for (const Counts& counts : state.counts) {
      rows = std::max(rows, static_cast<std::size_t>(counts.rows));
      numbers = std::max(numbers, static_cast<std::size_t>(counts.numbers));
    }
    const std::size_t bytes = rows * sizeof(Id) + padded(numbers * sizeof(T));
    state.message.resize(bytes);
    if (rows == 0) return {};
    if (bytes * state.counts.size() >= 2 * bucket.gradients.size_bytes()) {
      state.message.clear();
      return communicator.all_reduce_async(bucket.gradients, comm::ReduceOp::sum,
                                           {.scale = bucket.weight, .traffic = trace::Traffic::gradients});
    }
    state.all.resize(bytes * state.counts.size());
    state.values_at = rows * sizeof(Id);
    std::copy(state.own.begin(), state.own.end(), reinterpret_cast<Id*>(state.message.data()));
    T* to = reinterpret_cast<T*>(state.message.data() + state.values_at);
    const T* gradients = on_host(bucket, state);
    for (const Id id : state.own) {
      const Row row = state.rows[static_cast<std::size_t>(id)];
      for (std::size_t k = 0; k < row.count; ++k) *to++ = static_cast<T>(bucket.weight) * gradients[row.begin + k];
    }
    return communicator.all_gather_async(std::span<const std::uint8_t>(state.message),
                                         std::span<std::uint8_t>(state.all), {.traffic = trace::Traffic::gradients});
  }

  template <class T, Device D>
  static void add_up(const GradBucket<T, D>& bucket, State<T>& state) {
    T* gradients = on_host(bucket, state);
    for (const Id id : state.own) {
      const Row row = state.rows[static_cast<std::size_t>(id)];
      std::fill_n(gradients + row.begin, row.count, T{0});
    }
    for (std::size_t rank = 0; rank < state.counts.size(); ++rank) {
      const std::uint8_t* message = state.all.data() + rank * state.message.size();
      const Id* ids = reinterpret_cast<const Id*>(message);
      const T* from = reinterpret_cast<const T*>(message + state.values_at);
      for (Id i = 0; i < state.counts[rank].rows; ++i) {
        const Row row = state.rows[static_cast<std::size_t>(ids[i])];
        for (std::size_t k = 0; k < row.count; ++k) gradients[row.begin + k] += *from++;
      }
    }
    if constexpr (!std::is_same_v<D, Cpu>)
      copy_bytes(bucket.device, bucket.gradients.data(), Cpu{}, gradients, bucket.gradients.size_bytes());
  }

  static std::size_t padded(std::size_t bytes) { return (bytes + sizeof(Id) - 1) / sizeof(Id) * sizeof(Id); }
};

}  // namespace chorus
