#pragma once
/// The environment variables that programs and launchers read, for --help.

namespace chorus::detail {

inline constexpr const char* launch_variables =
    "Other environment variables:\n"
    "  CHORUS_BIND=0           ranks run on any core, not on their share of the cores\n"
    "  CHORUS_TOKEN            the secret that processes of several machines share\n"
    "  CHORUS_ELASTIC_DOORS    HOST:PORT of living ranks, with spaces between them: the process joins their job\n"
    "  CHORUS_TLS              0: no encryption between machines; 1: encryption on loopback, too\n"
    "  CHORUS_HOST_ID          name of the machine; ranks with different names talk like different machines\n"
    "  CHORUS_FLIGHT_RECORDER  file, or stderr, for the newest calls of each rank after a failure\n"
    "  CHORUS_COMPARE_CALLS=0  no comparison of ranks' calls over MPI and gloo\n"
    "  CHORUS_CUDA_EXACT_MEMORY=1  separate memory for each tensor on a GPU, for compute-sanitizer\n"
    "  CHORUS_CUDA_PLANS=1     prints the algorithms of products and convolutions\n"
    "  CHORUS_CUDA_ATTENTION_MIB  most memory for attention's scores, 256 if unset\n"
    "  CHORUS_ALLOW_UNOPTIMIZED=1  no warning about a program without optimization\n";

}  // namespace chorus::detail
