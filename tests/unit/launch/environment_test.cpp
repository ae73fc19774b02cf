// launch in ranks that another launcher has started.

#include <chorus/launch/run.hpp>

#include "launched.hpp"

namespace launch_environment_test {

using namespace launched;

TEST_CASE("launch joins ranks that a torchrun-like launcher has started") {
  const int port = free_port();
  Program one({probe(), "--do", "reduce", "--devices", "5"}, torchrun_like(1, 2, port));
  Program zero({probe(), "--do", "reduce", "--devices", "5"}, torchrun_like(0, 2, port));
  CHECK(zero.finish(20s) == 0);
  CHECK(one.finish(20s) == 0);
  CHECK(zero.text() ==
        cat("chorus: --devices 5 is ignored: the launcher has started 2 processes\n",
            "chorus: warning: launch: no CHORUS_TOKEN is set: any user of this machine can take a rank's place at "
            "127.0.0.1:",
            port, "\nsum 3\n"));
  CHECK(one.text() == "sum 3\n");
}

TEST_CASE("under another launcher --device names one device for each process of the machine") {
  for (const int rank : {0, 1}) {
    Program program({probe(), "--do", "device", "--device", "3,1"}, torchrun_like(rank, 2, free_port()));
    CHECK(program.finish() == 0);
    CHECK(has(program, cat("rank ", rank, " of 2 computes on ", rank == 0 ? 3 : 1, "\n")));
    CHECK(!has(program, "ignored"));
  }
  for (const std::string list : {"0", "0,1,2"})
    require_refused(
        {"--do", "device", "--device", list}, 2,
        cat("--device ", list,
            ": expected one device for each of the 2 processes that the launcher started on this machine, got ",
            list.size() / 2 + 1, "\n"),
        torchrun_like(1, 2, free_port()));
  auto part = torchrun_like(3, 4, free_port());  // of two machines
  part[1] = "LOCAL_RANK=1";
  part.push_back("LOCAL_WORLD_SIZE=2");
  Program program({probe(), "--do", "device", "--device", "5,6"}, part);
  CHECK(program.finish() == 0);
  CHECK(has(program, "rank 3 of 4 computes on 6\n"));
}

TEST_CASE("ranks meet at an IPv6 address, with and without the brackets of one in front of a port") {
  const int probe_socket = socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 address{};
  address.sin6_family = AF_INET6;
  address.sin6_addr = in6addr_loopback;
  const bool none = bind(probe_socket, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0;
  close(probe_socket);
  const int port = free_port();
  auto first = torchrun_like(0, 2, port), second = torchrun_like(1, 2, port);
  first[3] = "MASTER_ADDR=[::1]";
  second[3] = "MASTER_ADDR=::1";
  for (const auto* variables : {&first, &second}) {
    Program hello({probe(), "--do", "hello"}, *variables);
    CHECK(hello.finish() == 0);
    CHECK(has(hello, cat(" of 2, ::1:", port)));
  }
  if (none) {
    WARN("not run: there is no IPv6 here");
    return;
  }
  for (auto* variables : {&first, &second}) variables->push_back("CHORUS_TOKEN=a secret of this test");
  Program one({probe(), "--do", "reduce", "--backend", "tcp"}, second);
  Program zero({probe(), "--do", "reduce", "--backend", "tcp"}, first);
  CHECK(zero.finish(20s) == 0);
  CHECK(one.finish(20s) == 0);
  CHECK(zero.text() == "sum 3\n");
}

TEST_CASE("under another launcher each rank makes every call of launch, and they meet anew for each") {
  const int port = free_port();
  Program one({probe(), "--main", "as it is"}, torchrun_like(1, 2, port));
  Program zero({probe(), "--main", "as it is"}, torchrun_like(0, 2, port));
  CHECK(zero.finish(20s) == 0);
  CHECK(one.finish(20s) == 0);
  for (const auto* program : {&zero, &one})
    for (const char* number : {"1", "2"})
      CHECK(count(program->text(), cat("setting ", number, ": rank ", program == &one ? 1 : 0, " of 2, sum 2\n")) == 1);
  // Each process trains alone, which is probably a mistake.
  CHECK(has(zero, "setting 0: rank 0 of 1, sum 1\n"));
  CHECK(has(zero,
            "chorus: warning: launch: policy 'one process' is of one process, but a launcher has started 2: each does "
            "all of the work\n"));
  CHECK(!has(one, "chorus:"));
}

TEST_CASE("ranks that come for different calls of launch don't meet") {
  const int port = free_port();
  Program one({probe(), "--main", "misses", "--timeout", "2"}, torchrun_like(1, 2, port));
  Program zero({probe(), "--main", "misses", "--timeout", "2"}, torchrun_like(0, 2, port));
  CHECK(zero.finish(20s) == 76);
  CHECK(one.finish(20s) == 76);
  INFO(zero.text() << one.text());
  const std::string why =
      "rank 1 connects for launch 2, policy 'processes', rank 0 for launch 1, policy 'processes'\n";
  CHECK(has(zero, why));
  CHECK(has(one, why));
  CHECK(!has(zero, "setting 2: "));
  CHECK(!has(one, "setting 2: "));
}

TEST_CASE("an error in a rank of another launcher names the rank") {
  Program program({probe(), "--do", "throw", "--rank", "1"}, torchrun_like(1, 2, 1));
  CHECK(program.finish() == 1);
  CHECK(program.text() == "chorus: rank 1: load: no such file: weights\n");
}

TEST_CASE("where torchrun itself listens at MASTER_PORT, ranks meet one above") {
  auto variables = torchrun_like(0, 1, 30000);
  variables.push_back("TORCHELASTIC_USE_AGENT_STORE=True");
  Program program({probe(), "--do", "hello"}, variables);
  CHECK(program.finish() == 0);
  CHECK(has(program, "127.0.0.1:30001"));
}

TEST_CASE("the environment of mpirun and srun") {
  using Variables = Program::Variables;
  const auto hello = [](const Variables& variables) {
    Program program({probe(), "--do", "hello"}, variables);
    CHECK(program.finish() == 0);
    return program.text();
  };
  const auto port_of = [](const std::string& text) { return text.substr(text.find("127.0.0.1:"), 16); };

  const auto open_mpi = hello({"OMPI_COMM_WORLD_RANK=1", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_RANK=1",
                               "OMPI_COMM_WORLD_LOCAL_SIZE=4", "PMIX_NAMESPACE=77"});
  CHECK(open_mpi.find("rank 1 of 4, local 1 of 4, 127.0.0.1:") != std::string::npos);
  const Variables mpich = {"PMI_RANK=2", "PMI_SIZE=3", "MPI_LOCALRANKID=2", "MPI_LOCALNRANKS=3"};
  const auto first = hello(mpich), second = hello(mpich);
  CHECK(first.find("rank 2 of 3, local 2 of 3") != std::string::npos);
  CHECK(port_of(first) == port_of(second));  // same parent, same port
  CHECK(port_of(first) != port_of(open_mpi));

  Variables slurm = {"SLURM_PROCID=1", "SLURM_NTASKS=2", "SLURM_LOCALID=1", "SLURM_JOB_ID=9", "SLURM_STEP_ID=0"};
  CHECK(hello(slurm).find("rank 1 of 2, local 1 of 2") != std::string::npos);
  slurm.pop_back();  // a batch script, not a task of srun
  const int all = chorus::default_devices();
  CHECK(count(hello(slurm), cat(" of ", all, ", local")) == all);
  CHECK(hello({"SLURM_PROCID=0", "SLURM_NTASKS=1", "SLURM_STEP_NUM_TASKS=1", "SLURM_STEP_ID=0"})
            .find(cat("rank ", all - 1, " of ", all)) != std::string::npos);
  const auto other_hosts = hello({"SLURM_PROCID=3", "SLURM_NTASKS=4", "SLURM_LOCALID=1", "SLURM_NNODES=2",
                                  "MASTER_ADDR=10.0.0.1", "MASTER_PORT=2000"});
  CHECK(other_hosts.find("rank 3 of 4, local 1 of 1, 10.0.0.1:2000") != std::string::npos);
}

TEST_CASE("an environment that makes no sense is refused") {
  const std::vector<std::string> hello = {"--do", "hello"};
  require_refused(hello, 2, "environment variable RANK is set but WORLD_SIZE is not", {"RANK=0"});
  require_refused(hello, 2, "environment variable WORLD_SIZE is set but RANK is not", {"WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variable RANK must be a whole number from 0", {"RANK=x", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variable WORLD_SIZE must be a whole number", {"RANK=0", "WORLD_SIZE=0"});
  require_refused(hello, 2, "environment variable RANK is 2, but WORLD_SIZE is 2", {"RANK=2", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variables RANK and WORLD_SIZE are set but MASTER_ADDR is not",
                  {"RANK=0", "WORLD_SIZE=2"});
  require_refused(hello, 2, "environment variables RANK and WORLD_SIZE are set but MASTER_PORT is not",
                  {"RANK=0", "WORLD_SIZE=2", "MASTER_ADDR=localhost"});
  require_refused(hello, 2, "environment variable MASTER_PORT must be a whole number from 1 to 65535, got '70000'",
                  torchrun_like(0, 2, 70000));
  require_refused(hello, 2, "launch: ranks run on several hosts: set MASTER_ADDR",
                  {"OMPI_COMM_WORLD_RANK=0", "OMPI_COMM_WORLD_SIZE=4", "OMPI_COMM_WORLD_LOCAL_SIZE=2"});
  const auto with = [](std::vector<std::string> more) {
    auto variables = torchrun_like(0, 2, 29999);
    variables[1] = more[0];
    variables.insert(variables.end(), more.begin() + 1, more.end());
    return variables;
  };
  require_refused(hello, 2, "environment variable LOCAL_RANK is 5, but this machine has 2 ranks: they count from 0",
                  with({"LOCAL_RANK=5"}));
  require_refused(hello, 2, "environment variable LOCAL_RANK is 1, but this machine has 1 rank: they count from 0",
                  with({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=1"}));
  require_refused(hello, 2, "environment variable LOCAL_WORLD_SIZE is 3, but WORLD_SIZE is 2",
                  with({"LOCAL_RANK=1", "LOCAL_WORLD_SIZE=3"}));
  require_refused(hello, 2,
                  "environment variable CHORUS_RENDEZVOUS_FD must be a descriptor of a listening socket, got '999'",
                  with({"LOCAL_RANK=0", "CHORUS_RENDEZVOUS_FD=999"}));
  require_refused(hello, 128 + SIGKILL,
                  "the process that started this rank (CHORUS_SUPERVISOR_PID=999999999) has ended",
                  with({"LOCAL_RANK=0", "CHORUS_SUPERVISOR_PID=999999999", "CHORUS_REPORT_FD=3"}));
}

TEST_CASE("a port that is taken is named") {
  const TakenPort taken;
  Program program({probe(), "--do", "reduce", "--timeout", "2"}, torchrun_like(0, 2, taken.port));
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(has(program, "chorus: rank 0: "));
  CHECK(has(program, cat(taken.port)));
  CHECK(has(program, "in use"));
}

TEST_CASE("a rank that never arrives is named at the deadline") {
  Program program({probe(), "--do", "reduce", "--timeout", "1"}, torchrun_like(0, 2, free_port()));
  CHECK(program.finish() == 76);
  INFO(program.text());
  CHECK(has(program, "rank 1"));
}

TEST_CASE("launch joins the ranks of a real mpirun") {
  if (std::system("command -v mpirun >/dev/null") != 0) {
    WARN("not run: there is no mpirun here");
    return;
  }
  Program program({"mpirun", "--oversubscribe", "-n", "3", probe(), "--do", "reduce"},
                  {"OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"});
  CHECK(program.finish(30s) == 0);
  INFO(program.text());
  CHECK(count(program.text(), "sum 6\n") == 3);
}

}  // namespace launch_environment_test
