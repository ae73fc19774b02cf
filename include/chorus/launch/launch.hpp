#pragma once
/// `launch`: the one call in main. It builds the Run and calls the program's body: in this process or, under a policy
/// of processes, in each rank that it or a launcher has started.

#include <chorus/core/device.hpp>
#include <chorus/launch/run.hpp>
#include <memory>
#include <type_traits>
#include <typeinfo>
#if CHORUS_USE_CUDA
#include <chorus/core/cuda/runtime.hpp>
#endif

namespace chorus {

namespace detail {

/// Sets the default device of tensors in this process: that of `--device`; otherwise each rank of a machine has its own
/// GPU, if there are enough.
template <class Net>
void choose_default_device(const Run& run) {
#if CHORUS_USE_CUDA
  if constexpr (requires { requires std::is_same_v<typename Net::device_type, Cuda>; }) {
    if (const int devices = cuda::device_count(); devices > 0)
      Cuda::default_index() = run.own_device().value_or(run.local_rank() % devices);
    return;
  }
#endif
  Cpu::default_index() = run.own_device().value_or(0);
}

/// A program's body with its type erased.
struct LaunchBody {
  const void* body;
  int (*call)(const void* body, Run& run);

  template <class Net, class Body>
  static LaunchBody of(Body& body) {
    return {std::addressof(body), [](const void* from, Run& run) {
              choose_default_device<Net>(run);
              auto& typed = *static_cast<Body*>(const_cast<void*>(from));
              if constexpr (std::is_void_v<decltype(typed(run))>) {
                typed(run);
                return 0;
              } else {
                return static_cast<int>(typed(run));
              }
            }};
  }
};

/// Facts about the launched policy.
struct LaunchedPolicy {
  const char* name;
  bool distributed;
  const char* device_kind = "cpu";
  int first_slot = 0;  ///< of this kind of device, see trace_slot
  bool one_device = false;
  void (*require)(int device) = [](int) {};  ///< throws DeviceError if this machine has no such device

  template <class Net>
  static LaunchedPolicy of() {
    LaunchedPolicy policy{nullptr, Net::distributed};
    if constexpr (requires { static_cast<const char*>(Net::name); })
      policy.name = Net::name;
    else
      policy.name = typeid(Net).name();
    if constexpr (requires { Net::device_type::first_slot; }) {
      policy.device_kind = Net::device_type::kind;
      policy.first_slot = Net::device_type::first_slot;
    }
    if constexpr (requires { Net::one_device; }) policy.one_device = Net::one_device;
#if CHORUS_USE_CUDA
    if constexpr (requires { requires std::is_same_v<typename Net::device_type, Cuda>; })
      policy.require = [](int device) { cuda::require(Cuda{device}); };
#endif
    return policy;
  }
};

/// Both forms of `launch`; if `options` is null, it reads them from the command line.
int launch(LaunchedPolicy policy, int argc, char** argv, const LaunchOptions* options, LaunchBody body);

}  // namespace detail

/// Runs `body(run)` under the policy `Net` with the given options; returns main's status. `Net::distributed` says
/// whether its devices are processes. If not, the body is called here. If so and torchrun, mpirun or srun has started
/// this process (see world_from_environment), the body is called here as that rank. Otherwise starts and supervises
/// `options.devices` processes of the same program with the same arguments. Call it early in main: code before it runs
/// in every process. It calls manual_seed(options.seed).
///
/// main may call it again, with other options or another policy. A process that one of its calls has started runs only
/// that call's body: earlier calls return the status that they returned in the starting process, later ones return this
/// call's status, and their bodies don't run. So variables of main that a body changes are seen within one call at
/// most. If a launcher has started the processes, each makes every call, and the ranks meet anew for each. A call
/// inside another call's body throws UsageError; so does a call on a rank that differs from the starting process's
/// call: another policy, or another number of devices.
///
/// `body` takes a Run& and returns nothing or a status. Its exception is printed, and the other ranks are told:
/// UsageError gives status 2, CommError 76, others 1. A standard output that could not take everything printed gives 1.
/// A rank killed by a signal gives 128 + the signal's number, as does a signal to the program itself.
template <class Net, class Body>
int launch(int argc, char** argv, const LaunchOptions& options, Body&& body) {
  return detail::launch(detail::LaunchedPolicy::of<Net>(), argc, argv, &options, detail::LaunchBody::of<Net>(body));
}

/// The same, with `--devices N`, `--device LIST`, `--seed S`, `--timeout SECONDS`, `--grace SECONDS`, `--backend NAME`,
/// `--all-reduce NAME`, `--trace FILE`, `--trace-steps FIRST:COUNT`, `--trace-ring` and `--help` from the command line.
/// Other options belong to the program, which reads them with `run.option(name)`. An option that looks misspelt is
/// refused when the net is built (Run::check_options); one that the program never reads is named at the end. `--trace`
/// is for programs that include <chorus/trace.hpp> or link chorus::compiled; others refuse it.
template <class Net, class Body>
int launch(int argc, char** argv, Body&& body) {
  return detail::launch(detail::LaunchedPolicy::of<Net>(), argc, argv, nullptr, detail::LaunchBody::of<Net>(body));
}

}  // namespace chorus

#if !CHORUS_COMPILED
#include <chorus/launch/launch_impl.hpp>
#endif
