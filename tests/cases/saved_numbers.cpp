// Numbers that backward needs and that are written before it: refused by name under every policy.
#include "policies.hpp"

namespace cases {
namespace {

// pytorch#39141: both losses of a GAN are computed, the critic steps, then the generator's loss goes backward through
// the critic's new weights.
const Add gan_steps_between("gan_steps_between", R"(
single: between: refused for 'b.weight'; afterwards: gradient -0.050
dp:     between: refused for 'b.weight'; afterwards: gradient -0.050
ddp:    between: refused for 'b.weight'; afterwards: gradient -0.050
)",
                            [](std::ostream& out) {
  under_each(out, [](const auto& make, const Share& share) {
    const auto trial = [&](bool between) {
      const auto generator = make(filled<Line<ch::Cpu>>());
      const auto critic = make(filled<Critic<ch::Cpu>>(50));
      ch::optim::Sgd optimizer{critic->parameters(), {.lr = 0.5}};
      const auto score = (*critic)((*generator)(share.rows(6)));
      const auto generator_loss = -ch::mean(score), critic_loss = ch::mean(ch::square(score));
      critic_loss.backward(true);
      if (between) optimizer.step();
      for (const auto& named : generator->parameters()) named.parameter->set_grad_arrived(false);
      generator_loss.backward();
      return generator->module().fc.weight.grad()(0, 0);
    };
    const std::string text = refusal([&] { trial(true); });
    const bool named = text.find("backward of 'linear': it needs 'b.weight'") != text.npos;
    return (named ? "between: refused for 'b.weight'" : text) +
           "; afterwards: gradient " + rounded(trial(false));
  });
});

}  // namespace
}  // namespace cases
