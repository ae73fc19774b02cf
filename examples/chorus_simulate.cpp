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
    R"(Simulates parallel training. Every rank makes the collective calls of its policy, by chorus' own algorithms, over links
with a latency (alpha) and a bandwidth. Times are virtual, and the same on every machine.

  chorus-simulate --ranks 64 --links 25gbit --model resnet50 --compute 150
  chorus-simulate --ranks 1024 --links nvlink8+25gbit --model bert_large --compute 400 --straggler 5:1.3
  chorus-simulate --ranks 64 --links 100gbit --recorded run.json --trace simulated.json
  chorus-simulate --policy dp --devices 4 --links nvlink --trace dp.json
  chorus-simulate --policy fsdp --ranks 64 --links nvlink8+25gbit --model bert_large --compute 400
  chorus-simulate --policy tp --ranks 8 --links nvlink --model bert_large --batch 32 --compute 3000
  chorus-simulate --policy pp --ranks 8 --links 100gbit --model bert_large --batch 128 --schedule zb-h1 --micro-batches 32
  chorus-simulate --policy mesh --mesh pipe=4,data=8,tensor=8 --links nvlink8+100gbit --model gpt3_6.7b --compute 9000

It prints the step's time by number of ranks, the communication that computing does not hide, the best size of
buckets, and ring against hierarchical all-reduce. For --policy dp (DataParallel, devices of one machine) it prints the
traffic of device 0's link over time; for fsdp the time and memory of sizes of units; for pp schedules and numbers of
micro-batches; for mesh what each axis adds. Under tp and pp all ranks share one batch, in a mesh those along pipe and
tensor do: --compute is its time on one device.)";

}  // namespace

int main(int argc, char** argv) {
  Wishes wishes;
  CLI::App app{description, "chorus-simulate"};
  app.add_option("--ranks,--devices", wishes.named_ranks, "number of ranks (default: 64; dp: 4)")
      ->transform(in_range(1, cs::most_scheduled_ranks));
  app.add_option("--links", wishes.named_links,
                 "nvlink, pcie, 25gbit, 100mbit; nvlink8+25gbit: islands of 8 ranks, each rank with a network port; "
                 "nvlink8+25gbit:shared: one port for the island (default: 25gbit; dp: pcie)");
  app.add_option("--efficiency", wishes.efficiency, "measured part of the links' nominal rates")
      ->transform(in_range(0.001, 1.0))
      ->capture_default_str();
  app.add_option("--alpha", wishes.alpha, "latency of a message in the network, in microseconds (default: NCCL's 14)")
      ->transform(in_range(0.0, 1e6));
  app.add_option("--call", wishes.call,
                 "time that a collective call takes to begin, in microseconds (default: NCCL's 8.4)")
      ->transform(in_range(0.0, 1e6));
  auto* const model =
      app.add_option(
             "--model", wishes.model,
             "resnet50, resnet101, resnet152, vgg16, bert_base, bert_large, gpt2, gpt2_medium, gpt2_large, gpt2_xl, "
             "gpt3_6.7b, gpt3_175b, or bytes")
          ->capture_default_str();
  auto* const compute = app.add_option("--compute", wishes.compute,
                                       "milliseconds of computing in a step: a third forward, the rest backward")
                            ->transform(in_range(0.001, 1e6))
                            ->capture_default_str();
  app.add_option("--recorded", wishes.recorded,
                 "instead of --model and --compute: a trace file; the simulator takes rank 0's last step")
      ->excludes(model)
      ->excludes(compute);
  app.add_option("--policy", wishes.policy)
      ->check(CLI::IsMember({"ddp", "fsdp", "tp", "sp", "pp", "mesh", "local_sgd", "parameter_server", "dp"}))
      ->capture_default_str();
  app.add_option("--mesh", wishes.mesh,
                 "mesh: ranks along pipe, data or shard, and tensor (neighbours): pipe=2,data=4,tensor=2");
  app.add_option("--batch", wishes.batch,
                 "dp: samples of a device; tp, sp, pp: samples of all ranks; mesh: of each rank along data or shard")
      ->transform(in_range(1, 1'000'000))
      ->capture_default_str();
  constexpr std::size_t most_bytes = 1'000'000'000;
  app.add_option("--sample", wishes.sample, "dp: bytes of a sample's input (default: the model's)")
      ->transform(in_range(std::size_t{0}, most_bytes));
  app.add_option("--output", wishes.output,
                 "dp: bytes of a sample's output (default: the model's); 0: the model returns its loss")
      ->transform(in_range(std::size_t{0}, most_bytes));
  app.add_flag("--nccl", wishes.nccl,
               "dp: NCCL's broadcast and reduce for parameters and gradients, as between GPUs in a build with NCCL");
  app.add_option("--unit-cap", wishes.unit_cap, "fsdp, mesh: largest size of a unit in MiB, as in ByBytes")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_flag("--keep-parameters", wishes.keep_parameters, "fsdp, mesh: units stay from forward to backward (ZeRO-2)");
  app.add_option("--schedule", wishes.schedule, "pp, mesh: gpipe, 1f1b, interleaved (two stages on a rank) or zb-h1")
      ->check(CLI::IsMember(std::vector<std::string>(std::begin(schedules), std::end(schedules))))
      ->capture_default_str();
  app.add_option("--micro-batches", wishes.micro_batches,
                 "pp, mesh: micro-batches of a batch (default: 4 for each stage, at most one for each sample)")
      ->transform(in_range(1, 4096));
  app.add_option("--activation", wishes.activation,
                 "tp, sp, pp, mesh: bytes of a sample's activations between layers (default: the transformer's)")
      ->transform(in_range(std::size_t{1}, most_bytes));
  app.add_option("--optimizer", wishes.optimizer, "sgd, momentum or adam: its state in the trace's memory")
      ->check(CLI::IsMember({"sgd", "momentum", "adam"}))
      ->capture_default_str();
  app.add_option("--period", wishes.period, "local_sgd: steps between two averages")
      ->transform(in_range(1, 10'000))
      ->capture_default_str();
  app.add_option("--fragments", wishes.fragments,
                 "local_sgd: an outer optimizer (DiLoCo), whose model is sent in so many messages a period; 0: none")
      ->transform(in_range(0, 10'000))
      ->capture_default_str();
  app.add_option("--overlap", wishes.overlap, "local_sgd with --fragments: steps while a message travels")
      ->transform(in_range(0, 10'000))
      ->capture_default_str();
  app.add_option("--bucket-cap", wishes.bucket_cap, "largest size of a bucket of gradients, in MiB")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--first-bucket-cap", wishes.first_bucket_cap, "largest size of the first bucket, in MiB")
      ->transform(in_range(0.0, 1e6))
      ->capture_default_str();
  app.add_option("--all-reduce", wishes.all_reduce, "auto, ring, direct, hierarchical")->capture_default_str();
  app.add_option("--straggler", wishes.stragglers, "RANK:FACTOR: this rank computes FACTOR times as long");
  app.add_option("--jitter", wishes.jitter, "standard deviation of the computing time, as a part of its mean")
      ->transform(in_range(0.0, 1.0))
      ->capture_default_str();
  app.add_option("--seed", wishes.seed, "seed of the jitter")
      ->transform(in_range(std::uint64_t{0}))
      ->capture_default_str();
  app.add_option("--steps", wishes.steps, "number of steps; the printed times are their means")
      ->transform(in_range(1, 10'000))
      ->capture_default_str();
  app.add_option("--trace", wishes.trace, "file for a trace of the first 64 ranks, for chorus-page and Perfetto");
  app.add_flag("--trace-ring", wishes.trace_ring, "trace each step of each collective, for the page's ring player");
  app.add_flag("--brief", wishes.brief, "print the step alone, and try no other settings");
  if (const auto status = parse(app, argc, argv)) return *status;
  try {
    for (const double number : {wishes.efficiency, wishes.compute, wishes.bucket_cap, wishes.first_bucket_cap,
                                wishes.jitter, wishes.alpha.value_or(0), wishes.call.value_or(0)})
      ch::check<ch::UsageError>(!std::isnan(number), "chorus-simulate: an option is nan, expected a number");
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
