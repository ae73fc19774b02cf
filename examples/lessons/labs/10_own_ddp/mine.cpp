/// Lab 10: your own DDP. See README.md.

#include "own_ddp.hpp"

template <class Model>
class MyDdp : public ch::OwnPolicy<Model> {
 public:
  MyDdp(Model model, ch::comm::AnyCommunicator& ranks, std::uint64_t seed)
      : ch::OwnPolicy<Model>("MyDdp", std::move(model), ranks, seed) {
    lab::hole("the constructor: all ranks begin with one state");
  }

 private:
  void backward_begins() override {}
  void gradient_is_final(std::size_t i) override {
    static_cast<void>(i);
    lab::hole("gradient_is_final: full buckets leave");
  }
  void backward_ended() override { lab::hole("backward_ended: the optimizer will see averages"); }
};

int main(int argc, char** argv) {
  return lab::run(argc, argv, own_ddp_lab::title, own_ddp_lab::check, own_ddp_lab::code<MyDdp>());
}
