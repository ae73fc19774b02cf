#pragma once
/// Ranks as threads, with a record of each rank's messages: for tests of an algorithm's steps.

#include <chorus/comm/algorithms/transport_communicator.hpp>
#include <chorus/comm/transport/shm_transport.hpp>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace test {

namespace ch = chorus;

/// One message: the receiver's rank, and the numbers.
struct Sent {
  int to = 0;
  std::vector<float> numbers;
  friend bool operator==(const Sent&, const Sent&) = default;
};
using Diary = std::vector<Sent>;

/// A ShmTransport that records what this rank sends.
class WatchedTransport final : public ch::comm::Transport {
 public:
  WatchedTransport(std::unique_ptr<ch::comm::ShmTransport> link, Diary& diary)
      : Transport(link->rank, link->size, link->piece_bytes, link->queue_pieces, link->timeout),
        link_(std::move(link)),
        diary_(diary) {}

  std::byte* acquire(int peer) override { return slot_ = link_->acquire(peer); }
  void publish(int peer, const ch::comm::Envelope& envelope, std::size_t bytes) override {
    Sent sent{peer, std::vector<float>(bytes / sizeof(float))};
    if (bytes > 0) std::memcpy(sent.numbers.data(), slot_, bytes);
    diary_.push_back(sent);
    link_->publish(peer, envelope, bytes);
  }
  Piece receive(int peer) override { return link_->receive(peer); }
  void release(int peer) override { link_->release(peer); }
  bool has_piece(int peer) override { return link_->has_piece(peer); }
  void flush() override { link_->flush(); }
  void check() override { link_->check(); }
  void abort(const std::string& why) noexcept override { link_->abort(why); }

 private:
  std::unique_ptr<ch::comm::ShmTransport> link_;
  Diary& diary_;
  std::byte* slot_ = nullptr;
};

/// Runs `body(communicator)` on each of `size` threads; returns the messages that each one sent.
template <class Body>
std::vector<Diary> diaries(int size, ch::comm::Algorithm all_reduce, const Body& body) {
  using namespace ch::comm;
  const auto region = std::make_shared<SharedRegion>(SharedRegion::create(ShmTransport::region_bytes(size)));
  std::vector<Diary> all(static_cast<std::size_t>(size));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      auto link = std::make_unique<ShmTransport>(region, rank, size, std::chrono::seconds(10));
      auto watched = std::make_unique<WatchedTransport>(std::move(link), all[static_cast<std::size_t>(rank)]);
      TransportCommunicator c("thread", std::move(watched), {}, all_reduce);
      body(c);
    });
  for (auto& thread : threads) thread.join();
  return all;
}

}  // namespace test
