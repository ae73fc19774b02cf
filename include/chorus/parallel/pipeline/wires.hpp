#pragma once
/// The messages between neighbouring stages of a pipeline.

#include <algorithm>
#include <chorus/autograd/activation.hpp>
#include <chorus/comm/split.hpp>
#include <chorus/core/error.hpp>
#include <chorus/core/json_object.hpp>
#include <chorus/core/trace_listener.hpp>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

namespace chorus::pipeline {

/// A communicator's calls run in order, and a `send` may block until the peer receives. If two neighbours had
/// activations and gradients in one queue, large messages would deadlock: so each edge has a two-rank group per
/// direction. Edges that share a rank can't be made by one `split`, so even and odd edges are made in turn.
template <Device D>
class Wires {
 public:
  enum class Direction : std::uint8_t { forward, backward };

  /// Messages count as `Traffic::activations`, headers as control. A ring, with an edge from the last rank to the
  /// first, is for ranks with several stages. A collective of all ranks.
  Wires(comm::AnyCommunicator& all, const comm::World& world, bool ring) : rank_(all.rank()), size_(all.size()) {
    const int edges = size_ == 1 ? 0 : ring ? size_ : size_ - 1;
    const int colors = edges == size_ && size_ % 2 == 1 ? 3 : std::min(edges, 2);
    for (const Direction direction : {Direction::forward, Direction::backward})
      for (int color = 0; color < colors; ++color) {
        int own = -1;  // the edge of this color that ends at this rank
        for (int edge = 0; edge < edges; ++edge)
          if (color_of(edge) == color && (edge == rank_ || (edge + 1) % size_ == rank_)) own = edge;
        auto group = comm::connect(comm::split(all, world, own >= 0 ? own : size_ + rank_,
                                               /*key=*/own == rank_ ? 0 : 1));
        if (own >= 0) links_[static_cast<std::size_t>(direction)][own == rank_ ? out : in].emplace(std::move(group));
      }
  }

  /// Sends data of `header.stage` to rank `to`: an activation's numbers, or the gradient by it. Returns before they
  /// have been sent; the activation is kept until then.
  void send(Direction direction, int to, const Header& header, std::shared_ptr<AnyActivation<D>> what) {
    if (to == rank_) return local_.push_back({direction, header, std::move(what)});
    auto& wire = link(direction, direction == Direction::forward ? out : in);
    auto& message = on_their_way_.emplace_back();
    message.header = header;
    message.what = std::move(what);
    const auto numbers = direction == Direction::forward ? message.what->numbers() : message.what->gradient();
    message.head = wire.send_async(bytes_of(message.header), 1 - wire.rank());
    message.body = wire.send_async(std::span(static_cast<const std::uint8_t*>(numbers), message.what->bytes()),
                                   1 - wire.rank(), activations);
    while (!on_their_way_.empty() && on_their_way_.front().body.done()) on_their_way_.pop_front();
  }

  /// Waits for the message of that stage, micro-batch and part. `place(header)` gives the activation whose numbers or
  /// gradient to fill. Messages that arrive before it are kept.
  template <class Place>
  std::shared_ptr<AnyActivation<D>> receive(Direction direction, const Header& which, const Place& place) {
    const auto is_it = [&](Direction d, const Header& header) {
      return d == direction && header.stage == which.stage && header.micro_batch == which.micro_batch &&
             header.part == which.part;
    };
    for (auto message = local_.begin(); message != local_.end(); ++message)
      if (is_it(message->direction, message->header)) {
        auto what = std::move(message->what);
        const Header header = message->header;
        local_.erase(message);
        auto into = place(header);
        copy_bytes(D{}, room(direction, *into), D{},
                   direction == Direction::forward ? what->numbers() : what->gradient(), into->bytes());
        return into;
      }
    for (auto message = early_.begin(); message != early_.end(); ++message)
      if (is_it(message->direction, message->header)) {
        auto into = place(message->header);
        copy_bytes(D{}, room(direction, *into), D{}, message->numbers.data(), into->bytes());
        early_.erase(message);
        return into;
      }
    auto& wire = link(direction, direction == Direction::forward ? in : out);
    trace::Span bubble(trace::Lane::wait, "bubble", "bubble");
    if (bubble)
      bubble.describe(
          trace::place(),
          cat("bubble before ", direction == Direction::forward ? "forward" : "backward", " of micro-batch ",
              which.micro_batch),
          detail::JsonObject().field("micro_batch", which.micro_batch).field("stage", which.stage).fields());
    for (;;) {
      Header header;
      wire.recv(std::span(reinterpret_cast<std::uint8_t*>(&header), sizeof header), 1 - wire.rank());
      if (is_it(direction, header)) {
        auto into = place(header);
        wire.recv(std::span(static_cast<std::uint8_t*>(room(direction, *into)), into->bytes()), 1 - wire.rank(),
                  activations);
        return into;
      }
      const std::size_t bytes = header.bytes();
      early_.push_back({direction, header, Storage<D>(D{}, bytes)});
      wire.recv(std::span(static_cast<std::uint8_t*>(early_.back().numbers.data()), bytes), 1 - wire.rank(),
                activations);
    }
  }

  /// Returns when all messages have been sent.
  void flush() {
    for (Message& message : on_their_way_) message.head.wait(), message.body.wait();
    on_their_way_.clear();
  }
  void abort(std::string_view why) noexcept {
    for (auto& direction : links_)
      for (auto& link : direction)
        if (link) link->abort(why);
  }

 private:
  static constexpr comm::CollectiveOptions activations{.traffic = trace::Traffic::activations};
  enum End : std::uint8_t { out, in };  // of an edge, in the activations' direction

  struct Message {
    Header header;
    std::shared_ptr<AnyActivation<D>> what;
    comm::Work head, body;
  };
  struct Local {
    Direction direction;
    Header header;
    std::shared_ptr<AnyActivation<D>> what;
  };
  struct Early {
    Direction direction;
    Header header;
    Storage<D> numbers;
  };

  // Edge e goes from rank e to the next one.
  int color_of(int edge) const { return edge == size_ - 1 && size_ % 2 == 1 ? 2 : edge % 2; }
  comm::AnyCommunicator& link(Direction direction, End end) {
    return *links_[static_cast<std::size_t>(direction)][end];
  }
  static std::span<const std::uint8_t> bytes_of(const Header& header) {
    return {reinterpret_cast<const std::uint8_t*>(&header), sizeof header};
  }
  static void* room(Direction direction, AnyActivation<D>& into) {
    return direction == Direction::forward ? into.numbers() : into.gradient_buffer();
  }

  const int rank_, size_;
  std::optional<comm::AnyCommunicator> links_[2][2];
  std::deque<Message> on_their_way_;
  std::deque<Local> local_;
  std::deque<Early> early_;
};

}  // namespace chorus::pipeline
