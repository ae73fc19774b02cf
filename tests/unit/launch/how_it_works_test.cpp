// How the launcher works: the program that the user starts becomes rank 0, and starts the other ranks.

#include "launched.hpp"

namespace launch_how_it_works_test {

using namespace launched;

TEST_CASE("how launch works: a program that is started once runs as several ranks, which find each other") {
  Program program({probe(), "--do", "reduce", "--devices", "3"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(count(program.text(), "sum 6\n") == 3);  // 1 + 2 + 3, on each rank
}

TEST_CASE("how launch works: under another launcher each process is one rank, as the environment says") {
  Program program({probe(), "--do", "hello"}, {"RANK=0", "WORLD_SIZE=1", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
                                               "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29511"});
  CHECK(program.finish() == 0);
  INFO(program.text());
  CHECK(has(program, "rank 0 of 1, local 0 of 1"));
}

}  // namespace launch_how_it_works_test
