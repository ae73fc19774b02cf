#pragma once
/// `SimulatedTransport`: links of ranks of one process in virtual time, over which the algorithms of algorithms/ run as
/// they are.
///
/// A piece leaves when its sender has come to that and the sender's port is free; the port is busy with it for
/// bytes * beta. Its first byte arrives alpha later; the receiver has it when its own port has been free for as long:
///
///   leaves   = max(sender's clock, sender's port free)       sender's port free   = leaves + bytes * beta
///   begins   = max(leaves + alpha, receiver's port free)     receiver's port free = begins + bytes * beta
///   receiver's clock = max(receiver's clock, begins + bytes * beta)
///
/// A port of one rank receives in the order in which the rank asks; so no time depends on which rank runs first, and
/// nothing has to be sorted. Ports that ranks share serve them in the order of time: there ranks run in time order.

#include <sys/mman.h>

#include <algorithm>
#include <chorus/comm/transport/transport.hpp>
#include <chorus/core/trace_listener.hpp>
#include <chorus/simulate/faults.hpp>
#include <chorus/simulate/links.hpp>
#include <chorus/simulate/tasks.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace chorus::comm::simulated {

/// Memory that costs nothing until it is touched.
class ReservedMemory {
 public:
  explicit ReservedMemory(std::size_t bytes) : bytes_(bytes) {
    void* const memory =
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check<CommError>(memory != MAP_FAILED, "simulation: ", bytes, " bytes cannot be reserved");
    data_ = static_cast<std::byte*>(memory);
  }
  ReservedMemory(const ReservedMemory&) = delete;
  ReservedMemory& operator=(const ReservedMemory&) = delete;
  ~ReservedMemory() { munmap(data_, bytes_); }
  std::byte* data() const { return data_; }
  std::size_t size() const { return bytes_; }

 private:
  std::size_t bytes_;
  std::byte* data_ = nullptr;
};

/// What the transports of a group have in common.
class Network {
 public:
  static constexpr std::size_t piece_bytes = 512 << 10, queue_pieces = 8;  // those of TcpTransport

  struct Piece {
    Envelope envelope;
    std::size_t bytes = 0;
    std::byte* data = nullptr;
    Time head{};     // when its first byte arrives
    Time arrival{};  // through a shared port: when its last one has
  };
  /// Pieces on their way from one rank to another, and who waits for them.
  struct Queue {
    explicit Queue(std::size_t limit) : pieces(limit) {}
    std::vector<Piece> pieces;  // in turn
    std::size_t sent = 0, arrived = 0, received = 0;
    Time last_head{};
    int receiver = -1, sender = -1;  // tasks that wait
    Piece& slot(std::size_t number) { return pieces[number % pieces.size()]; }
  };
  struct Port {
    Time sends{}, receives{};  // from when on it is free
  };
  struct Kind {
    Time alpha;
    AlphaBeta speed;
    std::vector<Port> ports;
  };

  /// `moves_data`: else the ranks' data is never looked at. `those_alike`: rank r + those_alike does what rank r does
  /// at the same time, so that ranks below it are the only ones there are: what one sends to rank p, another one, as
  /// far before it, sends to rank p % those_alike.
  Network(Tasks& to_run, const Links& ls, int ranks, bool data, int those_alike = 0)
      : tasks(to_run),
        links(ls),
        size(ranks),
        alike(those_alike == 0 ? ranks : those_alike),
        island(ls.island == 0 ? ranks : ls.island),
        call(time_of("call", ls.call)),
        moves_data(data),
        inside{ls.inside.latency(), ls.inside, std::vector<Port>(static_cast<std::size_t>(ranks))},
        between{ls.between.latency(), ls.between,
                std::vector<Port>(static_cast<std::size_t>(ls.shared ? (ranks - 1) / ls.island + 1 : ranks))},
        scratch(data ? piece_bytes : std::size_t{1} << 38) {
    if (island > 1 && island < ranks)
      for (int rank = 0; rank < ranks; ++rank) islands.push_back(rank / island);
  }

  bool crosses(int a, int b) const { return a / island != b / island; }
  Port& port(Kind& kind, int rank) {
    rank %= alike;
    return kind.ports[static_cast<std::size_t>(&kind == &between && links.shared ? rank / island : rank)];
  }
  Queue& queue(int from, int to, int group) {
    from = (from - (to - to % alike) + size) % size;
    to %= alike;
    constexpr int bits = 17;  // of a rank
    auto& queue = queues_[(static_cast<std::uint64_t>(group) << bits | static_cast<std::uint64_t>(from)) << bits |
                          static_cast<std::uint64_t>(to)];
    // How far ranks run ahead of each other costs memory, not virtual time.
    if (!queue) queue = std::make_unique<Queue>(moves_data ? queue_pieces : 64);
    return *queue;
  }
  std::byte* take_slot() {
    if (!moves_data) return scratch.data();
    if (slots_.empty()) return (all_slots_.emplace_back(std::make_unique<ReservedMemory>(piece_bytes)))->data();
    std::byte* const slot = slots_.back();
    slots_.pop_back();
    return slot;
  }
  void give_slot(std::byte* slot) {
    if (moves_data) slots_.push_back(slot);
  }

  /// Ends all waiting, for that reason.
  void abort(const std::string& why) {
    if (why_.empty()) why_ = why;
    for (auto& [ends, queue] : queues_)
      for (const int task : {queue->receiver, queue->sender})
        if (task >= 0) tasks.wake(task, tasks.clock_of(task));
  }
  void check(int rank, int group) const {
    if (faults) faults->check_rank(rank, group);
    chorus::check<LinkError>(why_.empty(), why_);
  }

  Tasks& tasks;
  std::unique_ptr<Faults> faults;  ///< null: nothing goes wrong, and no wait has a deadline
  const Links links;
  const int size, alike, island;
  const Time call;  ///< what each collective call costs
  const bool moves_data;
  Kind inside, between;
  std::vector<int> islands;  // by rank, where there are several
  std::size_t pieces_sent = 0;
  std::function<void(std::size_t)> progress;
  ReservedMemory scratch;

 private:
  std::unordered_map<std::uint64_t, std::unique_ptr<Queue>> queues_;
  std::vector<std::unique_ptr<ReservedMemory>> all_slots_;
  std::vector<std::byte*> slots_;
  std::string why_;
};

/// A step of an algorithm; times in ns, as its listener has them.
struct StepSpan {
  std::string name, args;
  std::int64_t begun = 0, ended = 0;
  trace::Lane lane = trace::Lane::communication;
};

/// Keeps the steps of one rank, by virtual time.
class StepKeeper final : public trace::Listener {
 public:
  /// `true_numbers`: else the first number of a step is none.
  StepKeeper(Tasks& tasks, bool true_numbers) : tasks_(tasks), true_numbers_(true_numbers) {}
  std::int64_t now() override { return std::chrono::floor<std::chrono::nanoseconds>(tasks_.clock()).count(); }
  void span(const trace::Event& event) override {
    auto args = event.args;
    if (!true_numbers_) args = args.substr(0, args.find(",\"first\":"));
    steps.push_back({std::string(event.name), std::string(args), event.begin, event.end, event.lane});
  }
  void instant(const trace::Event&) override {}
  void sent(int, int, trace::Traffic, std::size_t) override {}
  void allocated(int, trace::Memory, std::int64_t) override {}
  bool wants_steps() const override { return true; }

  std::vector<StepSpan> steps;

 private:
  Tasks& tasks_;
  const bool true_numbers_;
};

/// One rank's end. All calls come from one task of `network`'s.
class SimulatedTransport final : public Transport {
 public:
  /// `members`: of a group of some ranks, which is number `group`, their numbers; for all ranks empty.
  SimulatedTransport(Network& network, int me, const std::vector<int>& members = {}, int group = 0)
      : Transport(me, members.empty() ? network.size : static_cast<int>(members.size()), Network::piece_bytes,
                  Network::queue_pieces, std::chrono::minutes(1)),
        network_(network),
        tasks_(network.tasks),
        members_(members),
        group_(group),
        self_(at(me)),
        steps_(network.tasks, network.moves_data) {
    counts_bytes = network.size <= trace::max_devices;
  }

  std::byte* acquire(int peer) override {
    auto& queue = out(peer);
    while (queue.sent - queue.received == queue.pieces.size()) wait_in(queue.sender, peer);
    check();
    return queue.slot(queue.sent).data = network_.take_slot();
  }
  void fill(int peer, std::byte* slot, const std::byte* data, std::size_t bytes) override {
    if (network_.moves_data) Transport::fill(peer, slot, data, bytes);
  }
  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    auto& queue = out(peer);
    auto& kind = kind_of(peer);
    const bool shared = &kind == &network_.between && network_.links.shared;
    if (shared) tasks_.await_turn();
    auto& port = network_.port(kind, self_);
    Time late{}, length = kind.speed.transfer(bytes);
    if (network_.faults) {
      const auto [later_by, slower] = network_.faults->passes(self_, at(peer), group_, bytes);
      late = later_by;
      length = Time(static_cast<std::int64_t>(static_cast<double>(length.count()) * slower));
    }
    const Time leaves = std::max(tasks_.clock(), port.sends);
    port.sends = sent_until_ = leaves + length;
    if (keeps_sent) sent[at(peer)] += bytes;
    constexpr std::size_t million = std::size_t{1} << 20;
    if (++network_.pieces_sent % million == 0 && network_.progress) network_.progress(network_.pieces_sent);
    auto& piece = queue.slot(queue.sent++);
    piece.envelope = envelope;
    piece.bytes = bytes;
    piece.head = queue.last_head = std::max(queue.last_head, leaves + kind.alpha + late);  // in turn, however late
    if (!shared) return arrived(queue, piece.head);
    tasks_.at(piece.head, [this, &queue, &piece, length, peer] {
      Time& free = network_.port(network_.between, at(peer)).receives;
      piece.arrival = free = std::max(free, piece.head) + length;
      arrived(queue, piece.arrival);
    });
  }
  /// It does; but the algorithms that serve shall be those of TcpTransport.
  bool copies() const override { return false; }
  Piece receive(int peer) override { return next(peer, nullptr); }
  Piece receive_at(int peer, const Envelope&, std::byte* place, std::size_t) override {
    return next(peer, network_.moves_data ? nullptr : place);
  }
  void release(int peer) override {
    auto& queue = in(peer);
    network_.give_slot(queue.slot(queue.received++).data);
    // A sender that waits goes on when there is room for half a queue: for less it isn't worth a change of tasks.
    if (queue.sender >= 0 && queue.sent - queue.received <= queue.pieces.size() / 2)
      tasks_.wake(queue.sender, tasks_.clock());
  }
  bool has_piece(int peer) override { return in(peer).arrived > in(peer).received; }
  void flush() override { tasks_.clock() = std::max(tasks_.clock(), sent_until_); }
  void check() override { network_.check(self_, group_); }
  void abort(const std::string& why) noexcept override {
    if (network_.faults) return network_.faults->abort(self_, group_, why);
    network_.abort(cat("rank ", self_, " gave up: ", why));
  }
  std::span<const int> machines() const override {
    return members_.empty() ? std::span<const int>(network_.islands) : std::span<const int>();
  }

  /// How long a message of that many bytes takes from the last rank through all others.
  Time chain(std::size_t bytes) const {
    const int islands = (size - 1) / network_.island + 1, hops = size - 1;
    const int crossings = islands > 1 ? std::min(islands, hops) : 0;
    const auto hop = [&](const Network::Kind& kind) { return kind.alpha + kind.speed.transfer(bytes); };
    return crossings * hop(network_.between) + (hops - crossings) * hop(network_.inside);
  }
  /// The rank that this one waits for; -1: none.
  int waits_for() const { return waits_for_; }
  /// From now on, each step of an algorithm; and those there were.
  void keep_steps() { step_listener = &steps_; }
  std::vector<StepSpan> take_steps() { return std::move(steps_.steps); }
  /// Where it is wanted: bytes, by the rank they went to.
  bool keeps_sent = false;
  std::map<int, std::size_t> sent;

 private:
  int at(int peer) const { return members_.empty() ? peer : members_[static_cast<std::size_t>(peer)]; }
  Network::Kind& kind_of(int peer) { return network_.crosses(self_, at(peer)) ? network_.between : network_.inside; }
  Network::Queue& out(int peer) {
    if (peer != out_peer_) out_ = &network_.queue(self_, at(out_peer_ = peer), group_);
    return *out_;
  }
  Network::Queue& in(int peer) {
    if (peer != in_peer_) in_ = &network_.queue(at(in_peer_ = peer), self_, group_);
    return *in_;
  }
  void wait_in(int& place, int peer) {
    check();
    if (network_.faults) {
      network_.faults->check_link(self_, at(peer), group_);
      network_.faults->waits(self_, at(peer), group_);
    }
    place = tasks_.current();
    waits_for_ = at(peer);
    tasks_.block();
    place = waits_for_ = -1;
    if (network_.faults) network_.faults->waited(self_);
  }
  void arrived(Network::Queue& queue, Time when) {
    ++queue.arrived;
    if (queue.receiver >= 0) tasks_.wake(queue.receiver, when);
  }
  Piece next(int peer, std::byte* place) {
    auto& queue = in(peer);
    while (queue.arrived == queue.received) wait_in(queue.receiver, peer);
    check();
    const auto& piece = queue.slot(queue.received);
    auto& kind = kind_of(peer);
    Time arrival = piece.arrival;
    if (&kind == &network_.inside || !network_.links.shared) {
      Time& free = network_.port(kind, self_).receives;
      arrival = free = std::max(free, piece.head) + kind.speed.transfer(piece.bytes);
    }
    tasks_.clock() = std::max(tasks_.clock(), arrival);
    return {piece.envelope, place != nullptr ? place : piece.data, piece.bytes};
  }

  Network& network_;
  Tasks& tasks_;
  const std::vector<int> members_;
  const int group_, self_;
  StepKeeper steps_;
  Time sent_until_{};
  int out_peer_ = -1, in_peer_ = -1, waits_for_ = -1;
  Network::Queue *out_ = nullptr, *in_ = nullptr;
};

}  // namespace chorus::comm::simulated
