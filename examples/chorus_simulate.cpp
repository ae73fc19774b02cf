/// chorus-simulate: how long a training step takes on up to 65,536 ranks, and why, in virtual time.

#include <chorus/core/check_output.hpp>
#include <chorus/core/standard_streams.hpp>
#include <cmath>
#include <exception>
#include <iterator>
#include <string>
#include <vector>

#include "command_line.hpp"
#include "simulate_program.hpp"

namespace {

constexpr const char* description =
    R"(Simulates parallel training: every rank makes the calls that its policy makes, of chorus' own collectives, over
links of a latency (alpha) and a bandwidth each. Times are virtual, and the same on every machine.

  chorus-simulate --ranks 64 --links 25gbit --model resnet50 --compute 150
  chorus-simulate --ranks 1024 --links nvlink8+25gbit --model bert_large --compute 400 --straggler 5:1.3
  chorus-simulate --ranks 64 --links 100gbit --recorded run.json --trace simulated.json
  chorus-simulate --policy dp --devices 4 --links nvlink --trace dp.json
  chorus-simulate --policy fsdp --ranks 64 --links nvlink8+25gbit --model bert_large --compute 400
  chorus-simulate --policy tp --ranks 8 --links nvlink --model bert_large --batch 32 --compute 3000
  chorus-simulate --policy pp --ranks 8 --links 100gbit --model bert_large --batch 128 --schedule zb-h1 --micro-batches 32

Prints how the step scales with the number of ranks, how much communication computing doesn't hide, the best size of
buckets, and ring against hierarchical all-reduce. Of --policy dp, DataParallel, whose devices are those of one machine:
what device 0's link carries, and when. Of fsdp: what sizes of units cost and hold; of pp: schedules and numbers of
micro-batches. Under tp and pp all ranks share one batch: --compute is what the whole of it takes on one device.)";

}  // namespace

int main(int argc, char** argv) {
  Wishes wishes;
  CLI::App app{description, "chorus-simulate"};
  app.add_option("--ranks,--devices", wishes.named_ranks, "how many (default: 64; of dp 4)")
      ->transform(in_range(1, cs::most_scheduled_ranks));
  app.add_option("--links", wishes.named_links,
                 "nvlink, pcie, 25gbit, 100mbit; nvlink8+25gbit: islands of 8 ranks, with a port to the network each; "
                 "nvlink8+25gbit:shared: with one between them (default: 25gbit; of dp pcie)");
  app.add_option("--efficiency", wishes.efficiency, "what is measured of the links' nominal rates")
      ->transform(in_range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--alpha", wishes.alpha, "microseconds that a message takes through the network (default: NCCL's 14)")
      ->transform(in_range(0.0, 1e6));
  app.add_option("--call", wishes.call, "microseconds that a collective call takes to begin (default: NCCL's 8.4)")
      ->transform(in_range(0.0, 1e6));
  auto* const model =
      app.add_option(
             "--model", wishes.model,
             "resnet50, resnet101, resnet152, vgg16, bert_base, bert_large, gpt2, gpt2_medium, gpt2_large, gpt2_xl, "
             "gpt3_6.7b, gpt3_175b, or bytes")
          ->capture_default_str();
  auto* const compute =
      app.add_option("--compute", wishes.compute,
                     "milliseconds that a rank computes in a step: a third forward, the rest backward")
          ->transform(in_range(0.001, 1e6))
          ->capture_default_str();
  app.add_option("--recorded", wishes.recorded, "instead of both: a trace file, of which rank 0's last step is taken")
      ->excludes(model)
      ->excludes(compute);
  app.add_option("--policy", wishes.policy)
      ->check(CLI::IsMember({"ddp", "fsdp", "tp", "pp", "local_sgd", "parameter_server", "dp"}))
      ->capture_default_str();
  app.add_option("--batch", wishes.batch, "dp: samples a device; tp, pp: of all")
      ->transform(in_range(1, 1'000'000))
      ->capture_default_str();
  constexpr std::size_t most_bytes = 1'000'000'000;
  app.add_option("--sample", wishes.sample, "dp: bytes of a sample's input (default: the model's)")
      ->transform(in_range(std::size_t{0}, most_bytes));
  app.add_option("--output", wishes.output,
                 "dp: bytes of a sample's output (default: the model's); 0: the model returns its loss")
      ->transform(in_range(std::size_t{0}, most_bytes));
  app.add_flag("--nccl", wishes.nccl,
               "dp: parameters and gradients by NCCL's broadcast and reduce, as between GPUs in a build with it");
  app.add_option("--unit-cap", wishes.unit_cap, "fsdp: MiB of a unit of parameters, as ByBytes cuts them")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_flag("--keep-parameters", wishes.keep_parameters, "fsdp: units stay from forward to backward (ZeRO-2)");
  app.add_option("--schedule", wishes.schedule, "pp: gpipe, 1f1b, interleaved (two stages a rank) or zb-h1")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(schedules), std::end(schedules))))
      ->capture_default_str();
  app.add_option("--micro-batches", wishes.micro_batches, "pp: of a batch (default: 4 a rank, as far as samples go)")
      ->transform(in_range(1, 4096));
  app.add_option("--activation", wishes.activation,
                 "tp, pp: bytes of a sample's activations between layers (default: the transformer's)")
      ->transform(in_range(std::size_t{1}, most_bytes));
  app.add_option("--optimizer", wishes.optimizer, "sgd, momentum or adam: what a trace's memory has of it")
      ->check(CLI::IsMember({"sgd", "momentum", "adam"}))
      ->capture_default_str();
  app.add_option("--period", wishes.period, "local_sgd: steps between means")
      ->transform(in_range(1, 10'000))
      ->capture_default_str();
  app.add_option("--bucket-cap", wishes.bucket_cap, "MiB of a bucket of gradients")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--first-bucket-cap", wishes.first_bucket_cap, "MiB of the first one")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--all-reduce", wishes.all_reduce, "auto, ring, direct, hierarchical")->capture_default_str();
  app.add_option("--straggler", wishes.stragglers, "RANK:FACTOR: that rank computes for so many times as long");
  app.add_option("--jitter", wishes.jitter, "standard deviation of how long ranks compute, a part of the mean")
      ->transform(in_range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", wishes.seed, "of the jitter")->transform(in_range(std::uint64_t{0}))->capture_default_str();
  app.add_option("--steps", wishes.steps, "the means are over")->transform(in_range(1, 10'000))->capture_default_str();
  app.add_option("--trace", wishes.trace, "file for a trace, as Perfetto reads it, of the first 64 ranks");
  app.add_flag("--trace-ring", wishes.trace_ring, "with each step of each collective: to see a ring turn");
  app.add_flag("--brief", wishes.brief, "the step alone, nothing is tried");
  if (const auto status = parse(app, argc, argv)) return *status;
  try {
    for (const double number : {wishes.efficiency, wishes.compute, wishes.bucket_cap, wishes.first_bucket_cap,
                                wishes.jitter, wishes.alpha.value_or(0), wishes.call.value_or(0)})
      ch::check<ch::UsageError>(!std::isnan(number), "an option is nan, expected a number");
    Program(wishes).run();
    ch::detail::check_output();
    return 0;
  } catch (const ch::UsageError& error) {
    ch::detail::say(error.what());
    return 2;
  } catch (const std::exception& error) {
    ch::detail::say(error.what());
    return 1;
  }
}
