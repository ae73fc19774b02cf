#pragma once
/// `HybridTransport`: shared memory between ranks of one machine, TCP between machines.

#include <chorus/comm/algorithms/bruck.hpp>
#include <chorus/comm/meeting/rendezvous.hpp>
#include <chorus/comm/transport/shm_transport.hpp>
#include <chorus/comm/transport/tcp_transport.hpp>
#include <chorus/core/environment.hpp>
#include <chorus/core/say.hpp>
#include <chrono>
#include <memory>
#include <vector>

namespace chorus::comm {

class HybridTransport final : public Transport {
 public:
  /// `tcp` joins all ranks. They exchange their machines' ids, and the ranks of one machine map a region.
  /// CHORUS_HOST_ID replaces a process's machine id, for tests. If one of a machine's ranks can't map the region, for
  /// example under another user, none of them uses it. Throws CommError.
  [[gnu::cold]] explicit HybridTransport(std::unique_ptr<TcpTransport> tcp)
      : Transport(tcp->rank, tcp->size, std::min(TcpTransport::slot_bytes, ShmTransport::slot_bytes),
                  std::min(TcpTransport::slots, ShmTransport::slots), tcp->timeout),
        tcp_(std::move(tcp)),
        machines_(static_cast<std::size_t>(size)),
        local_(static_cast<std::size_t>(size), -1) {
    const auto ids = gather(own_id());
    std::vector<int> ranks;  // of this machine
    for (std::size_t i = 0; i < ids.size(); ++i) {
      machines_[i] = static_cast<int>(std::find(ids.begin(), ids.end(), ids[i]) - ids.begin());
      if (ids[i] != ids[static_cast<std::size_t>(rank)]) continue;
      local_[i] = static_cast<int>(ranks.size());
      ranks.push_back(static_cast<int>(i));
    }
    const auto pids = gather(static_cast<std::uint64_t>(getpid()));
    const int here = static_cast<int>(ranks.size());
    const auto leader = static_cast<std::size_t>(ranks.front());
    SharedRegion region;
    const auto get = [&](const auto& made) {
      try {
        region = made();
      } catch (const CommError& error) {
        chorus::detail::say(cat("rank ", rank, ": ", error.what(), "; the ranks of this machine use TCP"));
      }
    };
    if (here > 1 && rank == ranks.front())
      get([&] {
        auto made = ShmTransport::make_region(here);
        for (std::size_t i = 0; i < ranks.size(); ++i)
          ShmTransport::name_process(made, i, static_cast<int>(pids[static_cast<std::size_t>(ranks[i])]));
        return made;
      });
    const auto fds = gather(static_cast<std::uint64_t>(region.fd()));
    if (rank != ranks.front() && static_cast<int>(fds[leader]) >= 0)
      get([&] {
        return SharedRegion::open(static_cast<int>(pids[leader]), static_cast<int>(fds[leader]),
                                  ShmTransport::region_bytes(here));
      });
    const auto have = gather(region ? 1 : 0);  // the leader's stays open until all have tried
    const bool shared =
        std::all_of(ranks.begin(), ranks.end(), [&](int who) { return have[static_cast<std::size_t>(who)] != 0; });
    if (!shared)
      std::fill(local_.begin(), local_.end(), -1);
    else
      shm_ = std::make_unique<ShmTransport>(std::make_shared<SharedRegion>(std::move(region)),
                                            local_[static_cast<std::size_t>(rank)], here, timeout, std::move(ranks));
    if (shm_) listen_on_both_sides();
  }

  std::byte* acquire(int peer) override {
    if (!is_local(peer)) return tcp_->acquire(peer);
    send_until(peer, [&] { return shm_->has_room(at(peer)); });
    auto* const slot = to(peer).acquire(at(peer));
    tcp_->tell_waiting(TcpTransport::nobody);
    return slot;
  }
  void fill(int peer, std::byte* slot, const std::byte* data, std::size_t bytes) override {
    to(peer).fill(at(peer), slot, data, bytes);
  }
  void publish(int peer, const Envelope& envelope, std::size_t bytes) override {
    to(peer).publish(at(peer), envelope, bytes);
  }
  void send(int peer, const Envelope& envelope, const std::byte* data, std::size_t bytes) override {
    if (is_local(peer)) send_until(peer, [&] { return shm_->has_room(at(peer)); });
    to(peer).send(at(peer), envelope, data, bytes);
    if (is_local(peer)) tcp_->tell_waiting(TcpTransport::nobody);
  }
  bool copies() const override { return false; }
  Piece receive(int peer) override {
    if (!is_local(peer)) return tcp_->receive(peer);
    send_until(peer, [&] { return shm_->has_piece(at(peer)); });
    const auto piece = to(peer).receive(at(peer));
    tcp_->tell_waiting(TcpTransport::nobody);
    return piece;
  }
  Piece receive_at(int peer, const Envelope& envelope, std::byte* place, std::size_t bytes) override {
    if (is_local(peer)) return receive(peer);
    return to(peer).receive_at(at(peer), envelope, place, bytes);
  }
  void release(int peer) override { to(peer).release(at(peer)); }
  bool has_piece(int peer) override { return to(peer).has_piece(at(peer)); }
  void flush() override { tcp_->flush(); }
  void set_names(const std::vector<int>& in_job) override {
    tcp_->set_names(in_job);
    if (shm_) shm_->set_names(in_job);
  }
  void check() override {
    tcp_->check();
    if (shm_) shm_->check();
  }
  void check_peers() override {
    tcp_->check();
    if (shm_) shm_->check_peers();
  }
  void abort(const std::string& why) noexcept override {
    tcp_->abort(why);
    if (shm_) shm_->abort(why);
  }
  std::span<const int> machines() const override { return machines_; }

 private:
  bool is_local(int peer) const { return local_[static_cast<std::size_t>(peer)] >= 0; }
  Transport& to(int peer) {
    if (!is_local(peer)) return *tcp_;
    shm_->may_spin = may_spin;
    return *shm_;
  }
  /// A rank that waits inside its machine also listens to the other machines, and both learn for whom it waits.
  void listen_on_both_sides() {
    tcp_->meanwhile = [this](int peer) { shm_->place().waits_elsewhere(peer); };
    shm_->place().meanwhile = [this](int peer, Clock::duration waited) {
      if (waited < std::chrono::milliseconds(20)) return;  // checking every connection takes time
      tcp_->check();
      if (waited >= tcp_->silence()) tcp_->tell_waiting(peer);
    };
  }
  /// Before this rank waits for a rank of its machine, it sends the rest of its data to other machines: the network may
  /// have had no room, and that rank may wait for one of them.
  template <class Ready>
  void send_until(int peer, const Ready& ready) {
    const auto deadline = Clock::now() + timeout;
    while (!ready() && tcp_->send_rest(std::chrono::microseconds(50))) {
      check_peers();
      if (Clock::now() >= deadline) fail<LinkTimeout>("waited ", timeout.count(), " ms for ", tcp_->chain(peer));
    }
  }
  int at(int peer) const { return is_local(peer) ? local_[static_cast<std::size_t>(peer)] : peer; }

  static std::uint64_t own_id() {
    const char* name = chorus::detail::env("CHORUS_HOST_ID");
    return name == nullptr ? detail::machine_id() : detail::fnv_1a(name);
  }

  /// Every rank's number, over TCP.
  std::vector<std::uint64_t> gather(std::uint64_t own) {
    std::vector<std::uint64_t> all(static_cast<std::size_t>(size));
    const Envelope call{.op = Op::all_gather, .dtype = DType::u64, .sequence = meetings_++, .count = 1};
    const Reduction numbers{.dtype = DType::u64, .element = sizeof own};
    bruck_all_gather({*tcp_, call, numbers}, reinterpret_cast<const std::byte*>(&own),
                     reinterpret_cast<std::byte*>(all.data()), 1);
    return all;
  }

  std::unique_ptr<TcpTransport> tcp_;
  std::unique_ptr<ShmTransport> shm_;
  std::vector<int> machines_, local_;  // by rank: its machine, and its number among this machine's ranks or -1
  std::uint32_t meetings_ = 0;
};

}  // namespace chorus::comm
