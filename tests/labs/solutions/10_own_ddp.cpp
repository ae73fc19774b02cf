/// Lab 10: a solution, in the place of the student's file.

#include "own_ddp.hpp"

template <class Model>
class MyDdp : public ch::OwnPolicy<Model> {
 public:
  MyDdp(Model model, ch::comm::AnyCommunicator& ranks, std::uint64_t seed)
      : ch::OwnPolicy<Model>("MyDdp", std::move(model), ranks, seed) {
    this->take_state(0);
    for (std::size_t i = 0, bytes = 0; i < this->parameter_count() && this->parameter(i).wants_grad(); ++i) {
      if (bytes == 0 || bytes + this->parameter(i).size_bytes() > 1 << 20 || !this->follows(i)) {
        buckets_.push_back({i, i, 0, {}});
        bytes = 0;
      }
      bytes += this->parameter(i).size_bytes();
      buckets_.back().end = i + 1;
    }
  }

 private:
  struct Bucket {
    std::size_t begin, end, missing;
    ch::comm::Work work;
  };
  void backward_begins() override {
    for (Bucket& bucket : buckets_) bucket.missing = bucket.end - bucket.begin;
    arrived_.assign(this->parameter_count(), 0);
    next_ = 0;
  }
  void gradient_is_final(std::size_t i) override {
    arrived_[i] = 1;
    for (Bucket& bucket : buckets_)
      if (bucket.begin <= i && i < bucket.end) --bucket.missing;
    while (next_ < buckets_.size() && buckets_[next_].missing == 0) send(buckets_[next_++]);
  }
  void backward_ended() override {
    for (std::size_t i = 0; i < arrived_.size(); ++i)
      if (!arrived_[i] && !this->parameter(i).grad_arrived()) this->clear_gradient(i);
    while (next_ < buckets_.size()) send(buckets_[next_++]);
    for (Bucket& bucket : buckets_) bucket.work.wait();
    this->communicator().all_reduce(std::span(arrived_), ch::comm::ReduceOp::max);
    for (std::size_t i = 0; i < arrived_.size(); ++i)
      if (arrived_[i]) this->parameter(i).set_grad_arrived(true);
  }
  void send(Bucket& bucket) {
    this->with_gradients(bucket.begin, bucket.end, [&](auto gradients) {
      bucket.work = this->communicator().all_reduce_async(
          gradients, ch::comm::ReduceOp::sum, {.scale = this->weight(), .traffic = ch::trace::Traffic::gradients});
    });
  }

  std::vector<Bucket> buckets_;
  std::vector<std::uint8_t> arrived_;
  std::size_t next_ = 0;  // the buckets before it have been sent
};

int main(int argc, char** argv) {
  return lab::run(argc, argv, own_ddp_lab::title, own_ddp_lab::check, own_ddp_lab::code<MyDdp>());
}
