#include <catch.hpp>
#include <chorus/trace/advice.hpp>
#include <string>
#include <vector>

#include "made_trace.hpp"

namespace advice_test {

namespace ch = chorus;
using nlohmann::json;
using Texts = std::vector<std::string>;

Texts sentences(const made::File& file) {
  const auto trace = file.trace();
  Texts out;
  for (const auto& [text, section] : ch::sentences_of(trace, ch::facts_of(trace)))
    out.push_back(ch::cat(section, ": ", text));
  return out;
}
/// "text [figures]"
Texts advice(const made::File& file) {
  const auto trace = file.trace();
  Texts out;
  for (const auto& each : ch::advice_of(trace, ch::facts_of(trace)))
    out.push_back(ch::cat(each.text, " [", each.figures, "]"));
  return out;
}
std::string first_with(const Texts& texts, const std::string& part) {
  for (const auto& text : texts)
    if (text.find(part) != text.npos) return text;
  return "nothing";
}
ch::TracedRun run(const char* name, const made::File& file) {
  ch::TracedRun out{name, file.trace(), {}};
  out.facts = ch::facts_of(out.trace);
  return out;
}
Texts comparison(const std::vector<ch::TracedRun>& runs) {
  Texts out;
  for (const auto& [text, section] : ch::compare_runs(runs)) out.push_back(ch::cat(section, ": ", text));
  return out;
}

TEST_CASE("advice on a pipeline's bubbles: where they are a tenth of the step and more") {
  auto pipeline = run("pp", made::ddp());
  const auto text = [&] {
    std::string all;
    for (const auto& each : ch::advice_of(pipeline.trace, pipeline.facts))
      all += each.text + " [" + each.figures + "]\n";
    return all;
  };
  CHECK(text().find("Stages of the pipeline") == std::string::npos);
  pipeline.facts.bubble_us = {220, 330};
  CHECK(text().find("Stages of the pipeline wait for each other: more micro-batches, another schedule") !=
        std::string::npos);
  CHECK(text().find("[bubbles of 220 us to 330 us in a step of 1.10 ms]") != std::string::npos);
  pipeline.facts.bubble_us = {100, 100};
  CHECK(text().find("Stages of the pipeline") == std::string::npos);
}

TEST_CASE("what a trace of ddp says") {
  CHECK(
      sentences(made::ddp()) ==
      Texts{
          "happened: Policy ddp on 2 cpu devices: 3 steps recorded from step 5 on; step 7, the median, is shown in "
          "full.",
          "happened: A batch has 64 samples; each rank has 32 of them.",
          "timeline: A step takes 1.10 ms (median of 3, slowest rank).",
          "timeline: In it a rank computes for 730 us to 740 us (t1): 66 % to 67 % of its step.",
          "timeline: Communication is under way for 210 us to 220 us (t2); the program waits for it 110 us to 120 "
          "us, and 47 % of it overlaps computing.",
          "timeline: Others waited for rank 1 10 us a step, in 1.0 calls a step, where it was last.",
          "timeline: The longest wait for the next batch took 100 us of the step.",
          "links: In a step rank 0 sends rank 1 12000 bytes of gradients; the formula, 2 (N-1)/N K, gives 12000.",
          "links: In a step rank 1 sends rank 0 12000 bytes of gradients; the formula, 2 (N-1)/N K, gives 12000.",
          "memory: At its peak rank 0 holds 4.0 MiB: activations 3.0 MiB, parameters 1.0 MiB.",
          "memory: At its peak rank 1 holds 3.0 MiB: activations 2.0 MiB, parameters 1.0 MiB.",
          "gradients: The model has 11.7 KiB of gradients (K).",
          "gradients: They leave in 2 buckets; on rank 0 the first is full 300 us before backward ends.",
          "formulas: Averaging K bytes of gradients in n buckets by rings takes 2 (N-1)/N K/B + n 2 (N-1) alpha: "
          "with N = 2, K = 11.7 KiB, n = 2, links of B = 71.5 MiB/s and alpha = 10 us a message, fitted to 9 calls of "
          "this run, 200 us."});
}

// By hand: alpha = 10 us, all_gather's with rank 1; the buckets take 200 us, 40 of them for 4 messages, so
// the bandwidth is 12000 bytes / 160 us. A step: passes 690 us, optimizer 50, the rest 250, and 230/430 of 200 us.
TEST_CASE("the model of a step") {
  const auto trace = made::ddp().trace();
  const auto model = *ch::fit_step_model(trace, ch::facts_of(trace));
  CHECK(model.link.alpha_us == Approx(10));
  CHECK(model.link.bandwidth == Approx(75));
  CHECK(model.bytes == 12000);
  CHECK(model.buckets == 2);
  CHECK(model.link.calls == 9);
  CHECK(model.averaging_us == Approx(200));
  CHECK(model.passes_us == Approx(690));
  CHECK(model.optimizer_us == Approx(50));
  CHECK(model.other_us == Approx(250));
  CHECK(model.communication_us(1) == 0);
  CHECK(model.communication_us(2) == Approx(200));
  CHECK(model.communication_us(4) == Approx(1.5 * 12000 / 75 + 2 * 6 * 10));
  CHECK(model.step_us(2) == Approx(990 + 200 * 230.0 / 430));
  CHECK(model.step_us(4) == Approx(345 + 300 + 360 * 230.0 / 430));
  CHECK(model.step_us(2, 2) == Approx(1380 + 300 + 200 * 230.0 / 430));

  // Where no ring ran there is none to be priced.
  const auto in_place = made::ddp(made::ddp_notes(), 32, "in_place").trace();
  const auto other = *ch::fit_step_model(in_place, ch::facts_of(in_place));
  CHECK(other.link.calls == 0);
  CHECK(other.communication_us(4) == Approx(200));
  CHECK(first_with(advice(made::ddp(made::ddp_notes(), 32, "in_place")), "Twice the devices") == "nothing");

  const auto dp = made::dp().trace();
  CHECK(!ch::fit_step_model(dp, ch::facts_of(dp)));
}

TEST_CASE("advice on ddp: each with its figures") {
  const auto all = advice(made::ddp());
  CHECK(
      all ==
      Texts{
          "Computing takes longer than communication, but waiting for it is more than a tenth of the step. [computing "
          "t1 = 740 us, communication t2 = 220 us, t2/t1 = 0.30, waits for who comes last 10 us on average, waited "
          "for 120 us of a step of 1.10 ms]",
          "Twice the devices would help. An estimate: 4 devices with the same batch would be 1.31 times as fast "
          "as 2, if each device has its own cores and the time of a pass is proportional to its share of the batch. "
          "[step by the model 1.10 ms with 2, 838 us with 4 devices (late ranks not counted; measured 1.10 ms); "
          "communication 200 us and 360 us; K = 11.7 KiB, n = 2, B = 71.5 MiB/s, alpha = 10 us from 9 calls, 47 % "
          "hidden]",
          "A larger batch would use the devices better. An estimate: twice the batch would take 1.23 times as many "
          "samples a second, if each device has its own cores and the time of a pass is proportional to its share of "
          "the batch. [step by the model 1.10 ms now, 1.79 ms with twice the batch: of it 1.38 ms forward and "
          "backward, communication as before; K = 11.7 KiB, n = 2, B = 71.5 MiB/s, alpha = 10 us from 9 calls, 47 "
          "% hidden]",
          "A rank is idle for up to 34 % of the step. [computing / step: 66 % to 67 %; of its step rank 0 computes "
          "730 us, waits 120 us for communication and 100 us for the next batch]",
          "A batch has few samples of each class: by a rule of thumb it should have ten. [batch 64, 10 x 10 classes "
          "= 100]",
          "For a batch k times as large take k times the learning rate, reached in a warm-up: with 128 samples 0.1 "
          "(Goyal et al. 2017, for SGD). [batch 64, learning rate 0.05]",
          "Training waits for data: more threads that prepare batches (--workers), or cheaper transforms. [100 us of "
          "1.10 ms, 9 % of the step]"});
}

TEST_CASE("ranks that share cores, and a machine that is busy, are told of where runs are compared") {
  auto notes = made::ddp_notes();
  notes["cores"] = 1;
  notes["core_wait_us"] = 1650;  // of 3300
  const std::string said =
      "The 2 ranks shared 1 core: with one for each a step would be shorter. Rank 0 was ready to run and had no core "
      "for "
      "1.65 ms, 50 % of the recorded steps: the machine was busy, and times tell of that, too.";
  CHECK(first_with(sentences(made::ddp(notes)), "shared") == "happened: " + said);
  const auto run = [](const char* name, const made::File& file) {
    ch::TracedRun out{name, file.trace(), {}};
    out.facts = ch::facts_of(out.trace);
    return out;
  };
  const auto single = run("single", made::single({{"gradient_bytes", 12000}})), ddp = run("ddp", made::ddp(notes));
  CHECK(ch::compare_runs({single, ddp}).front().text.ends_with("times as fast. " + said));
}

TEST_CASE("advice is left out where the trace lacks what it needs, or there is nothing to say") {
  const auto few = advice(made::ddp({{"gradient_bytes", 12000}}));
  CHECK(first_with(few, "of each class") == "nothing");
  CHECK(first_with(few, "learning rate") == "nothing");
  CHECK(first_with(few, "is small") == "nothing");
  CHECK(first_with(few, "Others wait") == "nothing");
  auto notes = made::ddp_notes();
  notes["optimizer"] = "adam";  // whose rate goes by another rule
  CHECK(first_with(advice(made::ddp(notes)), "learning rate") == "nothing");
  notes["batch"] = 128;
  CHECK(
      first_with(advice(made::ddp(notes)), "of each class") ==
      "A batch has ten samples of each class or more, which is the rule of thumb. [batch 128, 10 x 10 classes = 100]");
  const auto single = advice(made::single());
  CHECK(first_with(single, "t1") == "nothing");
  CHECK(first_with(single, "Twice the devices") == "nothing");  // no call from which to take alpha and beta
  CHECK(
      first_with(single, "larger batch") ==
      "A larger batch would use the devices better. An estimate: twice the batch would take 1.18 times as many samples "
      "a second, if each device has its own cores and the time of a pass is proportional to its share of the batch. "
      "[step by the model 1.00 ms now, 1.70 ms with twice the batch: of it 1.40 ms forward and backward]");
  CHECK(first_with(advice(made::dp()), "estimate") == "nothing");
}

TEST_CASE("advice on small shares, late ranks, uneven work, and communication that takes longest") {
  CHECK(first_with(advice(made::ddp(made::ddp_notes(), 5)), "is small") ==
        "The share of rank 0 is small: below 8 samples, passes don't get much shorter with fewer. Fewer devices or a "
        "larger batch use them better. [5 samples, 146 us of computing for each]");
  CHECK(first_with(advice(made::ddp(made::ddp_notes(), 8)), "is small") == "nothing");

  // Rank 1 computes for 100 us more, and rank 0 waits for it.
  made::File file("ddp", 2);
  for (int rank = 0; rank < 2; ++rank) {
    file.step_of(rank, 5, 0, 1000);
    file.span(rank, made::forward, "forward", "forward", 0, rank == 0 ? 100 : 200);
    file.span(rank, made::wait, "wait", "all_reduce", rank == 0 ? 100 : 200, 800);
    file.call(rank, "all_reduce", 1, rank == 0 ? 100 : 200, 800, 4000, "gradients", "ring", 0);
  }
  file.arrow("late", 1, 200, 0, 799.999, 1);
  const auto late = advice(file);
  CHECK(first_with(late, "Others") ==
        "Others wait for rank 1: look whether it has more work, a slower machine, or a core that it shares. [100 us a "
        "step, 10 % of the mean step, in 1.0 calls]");
  CHECK(
      first_with(late, "idle") ==
      "A rank is idle for up to 90 % of the step; the work is not even: rank 0 has least of it. [computing / step: 10 "
      "% to 20 %; of its step rank 0 computes 100 us, waits 700 us for communication and 0 us for the next batch]");
  CHECK(first_with(late, "Communication takes longer than computing: a larger batch, or fewer devices") != "nothing");
  CHECK(first_with(late, "Twice the devices would not help. ") != "nothing");

  // A call that takes 20 us once all are there, 600 us after the first one.
  made::File waiting("ddp", 2);
  for (int rank = 0; rank < 2; ++rank) {
    waiting.step_of(rank, 5, 0, 1000);
    waiting.span(rank, made::forward, "forward", "forward", 0, 100);
    waiting.call(rank, "all_reduce", 1, rank == 0 ? 100 : 700, 720, 4000, "gradients", "ring", 0);
  }
  waiting.arrow("late", 1, 700, 0, 719.999, 1);
  CHECK(first_with(advice(waiting), "most of it is waiting for the rank that comes last") != "nothing");

  // Hardly any communication.
  made::File quick("ddp", 2);
  for (int rank = 0; rank < 2; ++rank) {
    quick.step_of(rank, 5, 0, 1000);
    quick.span(rank, made::backward, "backward", "backward", 0, 990);
    quick.call(rank, "all_reduce", 1, 100, 110, 4000, "gradients", "ring", 0);
  }
  CHECK(first_with(advice(quick), "the wait for it is short") != "nothing");
  CHECK(first_with(advice(quick), "idle") == "nothing");
}

TEST_CASE("sentences of other policies, of rings, of many links, ranks and devices") {
  made::File local("local_sgd", 2, {{"period", 8}});
  for (int rank = 0; rank < 2; ++rank) {
    local.step_of(rank, 5, 0, 100);
    local.step_of(rank, 6, 100, 300);
    local.call(rank, "all_reduce", 1, 110, 160, 512, "parameters", "direct");
  }
  const auto said = sentences(local);
  CHECK(first_with(said, "every 8 steps") == "happened: Ranks take the mean of their parameters every 8 steps.");
  CHECK(first_with(said, "No communication") ==
        "timeline: No communication lies in this step; 1 of the 2 recorded steps has up to 50 us of it.");

  made::File ring("ddp", 12);
  for (int rank = 0; rank < 12; ++rank) {
    ring.step_of(rank, 5, 0, 100);
    ring.call(rank, "all_reduce", 1, 10, 60, 1200, "gradients", "ring", 0);
    ring.metadata["peak"].push_back({{"activations", rank == 7 ? 2048 : 1024}});
    ring.count(rank, 60, ch::cat("sent to ", (rank + 1) % 12, ", bytes"), {{"gradients", 2200}});
    if (rank > 0) ring.arrow("late", rank, 10.0 + rank, 0, 59.999, rank);
  }
  ring.events[1].at("ts") = 9;
  for (int i = 0; i < 22; ++i)
    ring.span(0, made::communication, "ring", "send 1", 10 + 2 * i, 11 + 2 * i, {{"sequence", 1}});
  const auto many = sentences(ring);
  CHECK(first_with(many, "ring:") ==
        "ring: Rank 0 makes 22 steps in 1 call; a ring of 12 ranks takes 22 rounds: 11 that add and 11 that copy.");
  CHECK(first_with(many, "links:") ==
        "links: In a step each of 12 links between ranks carries 2200 bytes of gradients; "
        "the formula, 2 (N-1)/N K, gives 2200.");
  CHECK(first_with(many, "memory:") ==
        "memory: At its peak rank 7, which has most, holds 2.0 KiB: activations 2.0 KiB.");
  CHECK(first_with(many, "They waited less") == "timeline: They waited less for 8 other ranks.");
}

TEST_CASE("runs beside each other") {
  const auto single = run("single", made::single({{"gradient_bytes", 12000}, {"batch", 64}})),
             dp = run("dp", made::dp({{"gradient_bytes", 12000}, {"batch", 64}})), ddp = run("ddp", made::ddp());
  CHECK(comparison({single}).empty());
  CHECK(
      comparison({single, dp, ddp}) ==
      Texts{"happened: A step of dp takes 1.00 ms, one of single 1.00 ms: dp is 1.00 times as fast.",
            "happened: A step of ddp takes 1.10 ms, one of single 1.00 ms: ddp is 0.91 times as fast.",
            "timeline: ddp waits 120 us a step for communication, dp 100 us: here the ranks wait for each other, 10 us "
            "a step on average for who comes last; 47 % of communication is hidden behind backward.",
            "memory: Under dp device 0 holds 5.0 MiB at its peak, device 1 2.0 MiB: 2.0 MiB more of activations, 1.0 "
            "MiB more of optimizer state. The whole batch, all outputs and the loss are on device 0, and only there "
            "the optimizer steps."});
  auto quick = ddp;
  quick.facts.exposed_us = {30, 20};
  CHECK(
      first_with(comparison({dp, quick}), "timeline:") ==
      "timeline: ddp waits 30 us a step for communication, dp 100 us: gradients leave in buckets while backward still "
      "computes, and 47 % of communication is hidden so; the copies of DataParallel lie between its passes.");
  const auto other = run("ddp", made::ddp({{"gradient_bytes", 12000}, {"batch", 128}}));
  CHECK(first_with(comparison({single, other}), "happened:") ==
        "happened: The batches differ: ddp trains on 116364 samples a second (batch 128), single on 64000 (batch 64): "
        "ddp is 1.82 times as fast.");
  const auto model = run("ddp", made::ddp({{"gradient_bytes", 24000}}));
  CHECK(comparison({single, model}) ==
        Texts{"happened: ddp trains another model than single, of 23.4 KiB of gradients instead of 11.7 KiB: they are "
              "not compared."});
}

TEST_CASE("advice as text") {
  const auto text = ch::advice_text(made::ddp().trace());
  CHECK(text.starts_with("What the trace says:\n  Policy ddp on 2 cpu devices: "));
  CHECK(text.find("\nAdvice:\n  Computing takes longer than communication") != text.npos);
  CHECK(text.find("(Goyal et al. 2017, for SGD).\n    batch 64, learning rate 0.05\n") != text.npos);
}

TEST_CASE("times and bytes as text") {
  using namespace ch::detail;
  CHECK(time_text(0) == "0 us");
  CHECK(time_text(1.24) == "1.2 us");
  CHECK(time_text(999.4) == "999 us");
  CHECK(time_text(1234) == "1.23 ms");
  CHECK(time_text(12345) == "12.3 ms");
  CHECK(time_text(123456) == "123 ms");
  CHECK(time_text(1234567) == "1.23 s");
  CHECK(bytes_text(1000) == "1000 bytes");
  CHECK(bytes_text(1536) == "1.5 KiB");
  CHECK(bytes_text(3 * 1048576) == "3.0 MiB");
  CHECK(bytes_text(3e10) == "27.94 GiB");
}

}  // namespace advice_test
