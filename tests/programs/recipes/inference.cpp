/// Answers of a saved model: --weights FILE is what fine_tune.cpp saved, --data FILE a table with the columns x, y. One
/// line for each row, in the table's order, with the probabilities of the classes.

#include <chorus/chorus.hpp>
#include <chorus/data/csv.hpp>
#include <chorus/data/datasets.hpp>
#include <chorus/io/load_model.hpp>
#include <chorus/parallel/launch_any.hpp>
#include <cstdio>
#include <vector>

namespace ch = chorus;

namespace {

template <class Device>
struct Answerer : ch::nn::Module {
  ch::nn::Sequential<ch::nn::Linear<Device>, ch::nn::Tanh> encoder{ch::nn::Linear<Device>{2, 16}, ch::nn::Tanh{}};
  ch::nn::Linear<Device> head{16, 3};
  CHORUS_MODULE(Answerer, encoder, head)
  auto forward(const auto& x) const { return ch::softmax(head(encoder(x)), 1); }
};

}  // namespace

int main(int argc, char** argv) {
  using Model = Answerer<ch::Cpu>;
  const auto answer = []<class Net>(ch::Run& run) {
    const auto table = ch::data::read_csv(run.option("data"));
    const ch::data::TensorDataset rows{table.numbers({"x", "y"}), ch::arange(table.rows())};
    Net net{Model{}, run};
    ch::io::load(net, run.option("weights"));
    net.eval();
    const ch::NoGrad no_grad;
    std::vector<double> answers(static_cast<std::size_t>(3 * table.rows()));
    ch::data::DataLoader loader{rows, net.sampler(rows, {.shuffle = false}), {.batch = 16}};
    for (auto& [x, row] : loader) {
      const auto y = net(x).value();
      for (ch::Index i = 0; i < row.numel(); ++i)
        for (ch::Index c = 0; c < 3; ++c)
          answers[static_cast<std::size_t>(3 * row(i) + c)] = static_cast<double>(y(i, c));
    }
    net.sum(answers);  // a row is one rank's, and 0 on the others
    if (!run.is_main()) return;
    for (std::size_t i = 0; i < answers.size(); i += 3)
      std::printf("answer %.7f %.7f %.7f\n", answers[i], answers[i + 1], answers[i + 2]);
  };
  return ch::launch_any_of<ch::SingleDevice<Model>, ch::DataParallel<Model>, ch::DistributedDataParallel<Model>>(
      argc, argv, answer);
}
