#pragma once
/// The common options of the example programs, and the choice of a policy.

#include <algorithm>
#include <charconv>
#include <chorus/chorus.hpp>
#include <chorus/launch/variables.hpp>
#include <chorus/parallel/mesh/axes.hpp>
#include <chorus/same_bits.hpp>
#include <chorus/trace.hpp>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "advice_trace.hpp"
#include "command_line.hpp"

/// Options of every example. Each sets its own defaults before `add_options`.
struct TrainingOptions {
  std::string policy = "single", optimizer = "sgd", schedule = "none";
  std::optional<int> devices{};
  int canonical_shares = 0;
  std::string device{};
  chorus::Index batch = 64, epochs = 5, steps = 0, warmup = 0, accumulate = 1, patience = 0;
  std::uint64_t seed = 1;
  double lr = 0.02, momentum = 0.9, weight_decay = 0, clip = 0;
  std::optional<double> timeout{}, grace{};
  std::string all_reduce{};
  bool quiet = false, trace_ring = false, advise = false;
  std::string metrics{}, csv{}, tensorboard{}, save{}, trace{}, trace_steps{};
};

/// Samples in a batch. -1, which other programs accept for automatic batch sizes, is refused with the reason.
inline CLI::Validator batch_size() {
  const auto number = in_range(1, 1 << 24);
  const auto check = [number](std::string& text) {
    return text == "-1" ? "expected the number of samples over all devices, got -1: a size is not chosen for you, for "
                          "it changes what is learned; see --help on the learning rate"
                        : number(text);
  };
  return CLI::Validator(check, number.get_description());
}

/// An option that chorus parses: `read(text)` throws UsageError with a message that begins with ": ".
template <class Read>
CLI::Validator read_by_chorus(const Read& read, const char* form) {
  const auto check = [read](const std::string& text) -> std::string {
    try {
      read(text);
      return "";
    } catch (const chorus::UsageError& error) {
      return std::string(error.what()).substr(2);
    }
  };
  return CLI::Validator(check, form);
}
inline CLI::Validator trace_steps() {
  return read_by_chorus([](const auto& text) { chorus::TraceOptions().set_steps("", text); }, "FIRST:COUNT");
}
inline CLI::Validator device_list() {
  return read_by_chorus([](const auto& text) { chorus::DeviceList::of("", text); }, "LIST");
}

/// The axes of a mesh that a policy names: `mesh:2x2x2` is pipe x data x tensor, `mesh:2x2` data x tensor; tp and pp
/// have one axis with all processes. Nothing for other policies.
inline std::optional<chorus::mesh::Sizes> mesh_of(const std::string& policy) {
  using chorus::mesh::rest;
  if (policy == "tp") return chorus::mesh::Sizes{.tensor = rest};
  if (policy == "pp") return chorus::mesh::Sizes{.pipe = rest};
  std::vector<int> sizes;
  std::istringstream text(policy.starts_with("mesh:") ? policy.substr(5) : "");
  for (int size = 0; text >> size;) {
    sizes.push_back(size);
    if (text.peek() == 'x') text.get();
  }
  const bool whole = text.eof() && std::all_of(sizes.begin(), sizes.end(), [](int size) { return size > 0; });
  if (!whole || sizes.size() < 2 || sizes.size() > 3) return std::nullopt;
  if (sizes.size() == 2) return chorus::mesh::Sizes{.data = sizes[0], .tensor = sizes[1]};
  return chorus::mesh::Sizes{.pipe = sizes[0], .data = sizes[1], .tensor = sizes[2]};
}
/// Whether `policy` names `Net`.
template <class Net>
bool is_named(const std::string& policy) {
  if constexpr (std::string_view(Net::name) == "mesh")
    return mesh_of(policy).has_value();
  else if constexpr (std::string_view(Net::name) == "tensor_parallel")
    return policy == "tp";
  else if constexpr (std::string_view(Net::name) == "pipeline")
    return policy == "pp";
  else
    return policy == Net::name;
}

/// Checks a policy's name; "mesh:PxDxT" or "mesh:DxT" in `names` stands for all meshes with at most as many axes.
inline CLI::Validator policy_of(const std::vector<std::string>& names) {
  const auto axes = [](const std::string& text) { return std::count(text.begin(), text.end(), 'x'); };
  return CLI::Validator(
      [=](const std::string& text) {
        for (const auto& name : names)
          if (name == text || (name.starts_with("mesh:") && text.starts_with("mesh:") && mesh_of(text) &&
                               axes(text) <= axes(name)))
            return std::string();
        return chorus::cat("unknown policy '", chorus::printable(text), "': expected ", CLI::detail::join(names, ", "));
      },
      "POLICY");
}

/// `more`: policies of this program besides the common ones.
inline void add_options(CLI::App& app, TrainingOptions& options, const std::vector<std::string>& more = {}) {
  // Lets later options override a script's earlier ones.
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::vector<std::string> policies{"single", "dp", "ddp"};
  policies.insert(policies.end(), more.begin(), more.end());
  app.add_option("--policy", options.policy, CLI::detail::join(policies, ", "))
      ->check(policy_of(policies))
      ->capture_default_str();
  app.add_option(
         "--devices", options.devices,
         "number of devices; if the policy has a process per device, of processes (default: 1 for single, else 2)")
      ->transform(in_range(1, 64));
  app.add_option("--device", options.device,
                 "names of the devices: 0,1 or cpu:0,1 or cuda:0,1; process r computes on the r-th of them")
      ->check(device_list());
  app.add_option(
         "--batch", options.batch,
         "samples in a batch, over all devices. Any number: the devices' shares differ by at most one sample, and "
         "are weighted by their samples")
      ->transform(batch_size())
      ->capture_default_str();
  app.add_option(
         "--canonical-shares", options.canonical_shares,
         "cut each batch into this number of shares, on any number of devices up to it, and sum over samples in "
         "one order. Every policy and number of devices then gives the same bits. Not for local_sgd or a mesh "
         "(default: one share for each device, summed in the fastest order)")
      ->transform(in_range(1, chorus::most_shares));
  app.add_option("--epochs", options.epochs, "passes over the data")
      ->transform(in_range(0, 1 << 20))
      ->capture_default_str();
  app.add_option("--steps", options.steps, "stop after this number of steps; 0: no limit")
      ->transform(in_range(chorus::Index{0}));
  app.add_option("--seed", options.seed, "seed of all random numbers")
      ->transform(in_range(std::uint64_t{0}))
      ->capture_default_str();
  app.add_option("--optimizer", options.optimizer, "sgd or adam")
      ->check(CLI::IsMember({"sgd", "adam"}))
      ->capture_default_str();
  app.add_option("--lr", options.lr,
                 "learning rate. A batch k times as large needs k times the rate (Goyal et al. 2017)")
      ->transform(in_range(0.0))
      ->capture_default_str();
  app.add_option("--momentum", options.momentum, "sgd's momentum")->transform(in_range(0.0))->capture_default_str();
  app.add_option("--weight-decay", options.weight_decay, "weight decay")->transform(in_range(0.0))->capture_default_str();
  app.add_option("--schedule", options.schedule, "none, step (a tenth after each third of the run) or cosine")
      ->check(CLI::IsMember({"none", "step", "cosine"}))
      ->capture_default_str();
  app.add_option("--warmup", options.warmup, "steps in which the learning rate rises from almost 0; 0: none")
      ->transform(in_range(0, 1 << 24))
      ->capture_default_str();
  app.add_option("--clip", options.clip, "largest norm of the gradient; 0: no limit")
      ->transform(in_range(0.0))
      ->capture_default_str();
  app.add_option("--metrics", options.metrics, "file for the run's metrics, as JSON lines");
  app.add_option("--csv", options.csv, "file for the epochs' metrics, as a table");
  app.add_option("--tensorboard", options.tensorboard, "folder for curves: tensorboard --logdir FOLDER");
  app.add_option("--timeout", options.timeout,
                 "seconds that a process waits for another process (default: CHORUS_TIMEOUT, else 60)")
      ->transform(in_range(0.001, 1e6));
  app.add_option("--grace", options.grace,
                 "seconds from a signal that ends the job, or from a process' failure, to SIGKILL for the other "
                 "processes (default: CHORUS_GRACE, else 3)")
      ->transform(in_range(0.0, 3600.0));
  app.add_option("--all-reduce", options.all_reduce,
                 "algorithm that sums gradients under ddp (default: CHORUS_ALL_REDUCE, else auto: the fastest)")
      ->check(CLI::IsMember({"auto", "ring", "direct", "in_place", "hierarchical"}));
  app.add_option("--trace", options.trace,
                 "file for a trace of a few steps, for chorus-page and https://ui.perfetto.dev");
  app.add_option("--trace-steps", options.trace_steps, "the steps of the trace: FIRST:COUNT (default: 5:3)")
      ->check(trace_steps());
  app.add_flag("--trace-ring", options.trace_ring, "trace each step of each collective, for the page's ring player");
  app.add_flag("--advise", options.advise,
               "trace a few steps, and print at the end what limits the run and what would make it faster");
  app.add_flag("--quiet", options.quiet, "print no progress and no summary");
  app.footer(chorus::detail::launch_variables);
}

/// The same, and checks for options that can't be combined.
inline std::optional<int> parse(CLI::App& app, int argc, char** argv, const TrainingOptions& options) {
  if (const auto status = parse(app, argc, argv)) return status;
  if (options.policy == "single" && options.devices.value_or(1) != 1) {
    std::fprintf(stderr, "%s: --policy single has one device, got --devices %d: choose dp or ddp\n",
                 app.get_name().c_str(), *options.devices);
    return 2;
  }
  if (options.canonical_shares == 0) return std::nullopt;
  const bool has_parts = options.policy == "tp" || options.policy == "pp";
  if (mesh_of(options.policy) && !has_parts) {
    std::fprintf(stderr,
                 "%s: --canonical-shares %d: not under --policy %s, a mesh of layers' parts and stages: choose single, "
                 "dp, ddp, fsdp, tp or pp\n",
                 app.get_name().c_str(), options.canonical_shares, options.policy.c_str());
    return 2;
  }
  if (options.policy == "local_sgd") {
    std::fprintf(stderr,
                 "%s: --canonical-shares %d: not under --policy local_sgd, where each process steps on its own samples: "
                 "choose single, dp, ddp or parameter_server\n",
                 app.get_name().c_str(), options.canonical_shares);
    return 2;
  }
  // Without a number of devices, the policy checks those that it gets.
  const int devices = options.device.empty() ? options.devices.value_or(1)
                                             : chorus::DeviceList::of("--device", options.device).size();
  if (options.canonical_shares < devices && !has_parts) {
    std::fprintf(stderr, "%s: --canonical-shares %d: each of %d devices takes whole shares: expected at least %d\n",
                 app.get_name().c_str(), options.canonical_shares, devices, devices);
    return 2;
  }
  return std::nullopt;
}

/// Whether a policy cuts batches into canonical shares.
template <class Net>
constexpr bool in_shares = requires(const Net& net) { net.canonical_shares(); };

/// The policy's argument: the model, or SameBits of it.
template <class Net>
auto model_for(typename Net::model_type model, const TrainingOptions& options) {
  if constexpr (in_shares<Net>)
    return chorus::SameBits{std::move(model), options.canonical_shares};
  else
    return model;
}

/// The policy around the model, according to the options.
template <class Net>
Net net_around(typename Net::model_type model, chorus::Run& run, const TrainingOptions& options) {
  if constexpr (std::string_view(Net::name) == "mesh")
    return Net{std::move(model), run, {.sizes = *mesh_of(options.policy)}};
  else
    return Net{model_for<Net>(std::move(model), options), run};
}

/// Calls `body.template operator()<Net>(run)` with the policy that the options name, around the model; `More` are
/// policies besides the common ones.
template <class Model, class... More, class Body>
int launch(int argc, char** argv, const TrainingOptions& options, const Body& body) {
  chorus::LaunchOptions launching;
  launching.devices = options.devices;
  if (const auto mesh = mesh_of(options.policy); mesh && !options.devices && options.device.empty())
    if (const int ranks = mesh->pipe * mesh->data * mesh->tensor; ranks > 0) launching.devices = ranks;
  if (!options.device.empty()) launching.device_ids = chorus::DeviceList::of("--device", options.device);
  launching.seed = options.seed;
  launching.trace.path = options.trace;
  if (!options.trace_steps.empty()) launching.trace.set_steps("--trace-steps", options.trace_steps);
  launching.trace.ring_steps = options.trace_ring;
  if (options.timeout)
    launching.timeout = std::chrono::milliseconds(static_cast<std::int64_t>(*options.timeout * 1000));
  if (options.grace) launching.grace = std::chrono::milliseconds(static_cast<std::int64_t>(*options.grace * 1000));
  if (!options.all_reduce.empty()) launching.all_reduce = chorus::comm::all_reduce_of(options.all_reduce);
  int status = 1;
  const auto launch_if_named = [&]<class Net>() {
    if (!is_named<Net>(options.policy) || in_shares<Net> != (options.canonical_shares > 0)) return;
    std::optional<AdviceTrace> advice;
    try {
      if (options.advise && advice.emplace(options.trace, Net::distributed).is_own())
        launching.trace.path = advice->path();
    } catch (const chorus::FileError& error) {
      chorus::detail::say(error.what());
      return;
    }
    int rank = -1, ranks = chorus::LaunchOptions::most_devices;  // of this process, if it is a rank
    status = chorus::launch<Net>(argc, argv, launching, [&](chorus::Run& run) {
      rank = run.rank();
      ranks = run.world_size();
      body.template operator()<Net>(run);
    });
    if (!advice) return;
    if (status == 0 && rank == 0) advice->print(launching.trace.first_step);
    if (rank <= 0) advice->remove(rank < 0, ranks);
  };
  launch_if_named.template operator()<chorus::SingleDevice<Model>>();
  launch_if_named.template operator()<chorus::DataParallel<Model>>();
  launch_if_named.template operator()<chorus::DistributedDataParallel<Model>>();
  (launch_if_named.template operator()<More>(), ...);
  return status;
}
