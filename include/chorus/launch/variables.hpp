#pragma once
/// The variables of the environment that programs and launchers heed, for their --help.

namespace chorus::detail {

inline constexpr const char* launch_variables =
    "Other variables of the environment:\n"
    "  CHORUS_BIND=0           ranks don't keep to their share of a machine's cores\n"
    "  CHORUS_TOKEN            the secret by which processes of several machines know each other\n"
    "  CHORUS_TLS              0: what they send is not encrypted; 1: it is on loopback, too\n"
    "  CHORUS_HOST_ID          a name of the machine; ranks with another one talk as if on another machine\n"
    "  CHORUS_FLIGHT_RECORDER  a file, or stderr, for the newest calls of each rank when one fails\n"
    "  CHORUS_COMPARE_CALLS=0  over MPI and gloo, ranks' calls are not compared\n"
    "  CHORUS_CUDA_PLANS=1     says which algorithms products and convolutions get\n"
    "  CHORUS_ALLOW_UNOPTIMIZED=1  no warning of a program that is not optimized\n";

}  // namespace chorus::detail
