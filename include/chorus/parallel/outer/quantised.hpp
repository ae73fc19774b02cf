#pragma once
/// Outer optimizers whose differences travel in 4 or 8 bits a number.

#include <algorithm>
#include <chorus/parallel/outer/nesterov.hpp>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <span>
#include <vector>

namespace chorus {
namespace detail {

/// Numbers in blocks of 128: a float each, the block's unit, then integers of `Bits` bits, at most 127 or 7 units.
template <int Bits>
struct QuantisedNumbers {
  static_assert(Bits == 4 || Bits == 8, "Quantised: expected 4 or 8 bits");
  static constexpr std::size_t block = 128;
  static constexpr int most = (1 << (Bits - 1)) - 1;

  static constexpr std::size_t bytes_of_units(std::size_t count) { return (count + block - 1) / block * sizeof(float); }
  static constexpr std::size_t bytes(std::size_t count) { return bytes_of_units(count) + (count * Bits + 7) / 8; }

  /// Writes weight * x. `units` and `steps`: zeros.
  template <class T>
  static void write(std::span<const T> x, double weight, std::uint8_t* units, std::uint8_t* steps) {
    for (std::size_t begin = 0; begin < x.size(); begin += block) {
      const auto part = x.subspan(begin, std::min(block, x.size() - begin));
      T largest = 0;
      for (const T each : part)
        if (std::abs(each) > largest || std::isnan(each)) largest = std::abs(each);
      const auto unit = static_cast<float>(largest / most);
      const bool finite = std::isfinite(unit);
      for (std::size_t i = 0; i < part.size(); ++i) {
        const auto in_units = finite && unit > 0 ? static_cast<double>(part[i]) / static_cast<double>(unit) : 0.0;
        // Times a unit that is no number.
        const int step = finite ? static_cast<int>(std::nearbyint(std::clamp<double>(in_units, -most, most))) : 1;
        const std::size_t at = begin + i;
        if constexpr (Bits == 8)
          steps[at] = static_cast<std::uint8_t>(step);
        else
          steps[at / 2] = static_cast<std::uint8_t>(steps[at / 2] | (step & 15) << at % 2 * 4);
      }
      const float sent = unit * static_cast<float>(weight);
      std::memcpy(units + begin / block * sizeof(float), &sent, sizeof sent);
    }
  }
  /// sum += the numbers.
  template <class T>
  static void add(const std::uint8_t* units, const std::uint8_t* steps, std::span<T> sum) {
    for (std::size_t i = 0; i < sum.size(); ++i) {
      float unit;
      std::memcpy(&unit, units + i / block * sizeof(float), sizeof unit);
      int step = steps[i * Bits / 8];
      if constexpr (Bits == 8)
        step = static_cast<std::int8_t>(step);
      else
        step = ((step >> i % 2 * 4 & 15) ^ 8) - 8;
      sum[i] += static_cast<T>(unit) * static_cast<T>(step);
    }
  }
};

/// Each rank adds a chunk of all ranks' differences, in rank order, and all gather the sums. Every difference is
/// rounded once before it is sent, and every sum before the gather, so all ranks have the same bits.
template <int Bits>
struct QuantisedMessage {
  static constexpr int parts = 2;
  using Numbers = QuantisedNumbers<Bits>;

  /// See WholeNumbers. A single rank sends nothing and rounds nothing.
  template <class T, Device D, class Communicator>
  static std::function<bool()> start(D device, std::span<T> data, double weight, Communicator& communicator) {
    if (communicator.size() == 1) return [] { return true; };
    auto exchange = std::make_shared<Exchange<T, D, Communicator>>(device, data, communicator);
    exchange->scatter(weight);
    return [exchange] { return exchange->go_on(); };
  }

 private:
  template <class T, Device D, class Communicator>
  class Exchange {
   public:
    Exchange(D device, std::span<T> data, Communicator& communicator)
        : device_(device),
          data_(data),
          communicator_(communicator),
          ranks_(static_cast<std::size_t>(communicator.size())),
          rank_(static_cast<std::size_t>(communicator.rank())),
          count_((data.size() + ranks_ - 1) / ranks_),
          values_(data.size()),
          sent_(ranks_ * size()),
          received_(ranks_ * size()) {}

    void scatter(double weight) {
      copy_bytes(Cpu{}, values_.data(), device_, data_.data(), data_.size_bytes());
      for (std::size_t to = 0; to < ranks_; ++to) write(std::span<const T>(chunk(to)), weight, sent_, to);
      // In round k ranks a and b with a + b = k (mod n) exchange, the lower one sends first: all go on in this order.
      for (std::size_t round = 0; round < ranks_; ++round) {
        const std::size_t peer = (round + ranks_ - rank_) % ranks_;
        if (peer == rank_) continue;
        for (const bool sends : {rank_ < peer, rank_ > peer}) {
          const auto at = std::span(sends ? sent_ : received_).subspan(peer * size(), size());
          works_.push_back(sends ? communicator_.send_async(std::span<const std::uint8_t>(at), int(peer), options)
                                 : communicator_.recv_async(at, int(peer), options));
        }
      }
    }
    bool go_on() {
      for (auto& work : works_) work.wait();
      if (gathers_) {
        std::fill(values_.begin(), values_.end(), T{0});
        for (std::size_t from = 0; from < ranks_; ++from) add(received_, from, chunk(from));
        copy_bytes(device_, data_.data(), Cpu{}, values_.data(), data_.size_bytes());
        return true;
      }
      works_.clear();
      std::vector<T> sum(chunk(rank_).size());
      for (std::size_t from = 0; from < ranks_; ++from)
        from == rank_ ? add(sent_, from, std::span<T>(sum)) : add(received_, from, std::span<T>(sum));
      std::fill(sent_.begin(), sent_.end(), std::uint8_t{0});
      write(std::span<const T>(sum), 1, sent_, 0);
      works_.push_back(communicator_.all_gather_async(std::span<const std::uint8_t>(sent_).first(size()),
                                                      std::span<std::uint8_t>(received_), options));
      gathers_ = true;
      return false;
    }

   private:
    static constexpr comm::CollectiveOptions options{.traffic = trace::Traffic::parameters};

    std::size_t size() const { return Numbers::bytes(count_); }
    std::span<T> chunk(std::size_t i) {
      const auto begin = std::min(i * count_, values_.size());
      return std::span(values_).subspan(begin, std::min(count_, values_.size() - begin));
    }
    void write(std::span<const T> x, double weight, std::vector<std::uint8_t>& to, std::size_t i) const {
      auto* const units = to.data() + i * size();
      Numbers::write(x, weight, units, units + Numbers::bytes_of_units(count_));
    }
    void add(const std::vector<std::uint8_t>& from, std::size_t i, std::span<T> sum) const {
      const auto* const units = from.data() + i * size();
      Numbers::add(units, units + Numbers::bytes_of_units(count_), sum);
    }

    D device_;
    std::span<T> data_;
    Communicator& communicator_;
    std::size_t ranks_, rank_, count_;  // count: numbers in a chunk; the last ones may have fewer
    std::vector<T> values_;
    std::vector<std::uint8_t> sent_, received_;  // a message for each rank
    bool gathers_ = false;
    std::vector<comm::Work> works_;
  };
};

}  // namespace detail

/// `LocalSgd<Model, Quantised<>>` is DiLoCo, and `Quantised<Streaming<4>>` Streaming DiLoCo, with messages of `Bits`
/// bits a number: blocks of 128 have a float, their largest number over 127 or 7, and integers. (arXiv 2501.18512 has
/// floats of 4 bits.) Ranks round their weighted differences once, and each rounds the sums of its chunk of ceil(K / n)
/// of K numbers, added in the parameters' type, once; rounding errors are dropped. Each of n ranks sends 2 (n - 1)
/// times a chunk's bytes: Bits / 8 a number, and 4 bytes a block.
template <class Outer = Nesterov, int Bits = 4>
struct Quantised {
  Outer outer = {};

  static constexpr int fragments = Outer::fragments;
  using Message = detail::QuantisedMessage<Bits>;
  OuterSchedule schedule() const { return outer.schedule(); }
  template <Device D, class Communicator>
  using Steps = detail::OuterSteps<D, Communicator, Quantised>;
};

}  // namespace chorus
