// A rank of an MPI job that mpi_test starts with mpirun: `mpi_ranks WHAT`.
#include <chorus/comm/split.hpp>
#include <chorus/launch/world_from_environment.hpp>
#include <cstdio>

#include "../unit/comm/astray.hpp"
#include "../unit/comm/conformance.hpp"
#include "../unit/comm/random_rank.hpp"

#if CHORUS_USE_MPI
#include <chorus/comm/mpi.hpp>

using namespace chorus;

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  std::string text;
  try {
    if (what == "typed") {
      comm::MpiCommunicator c;
      text = test::conforms(c);
    } else if (what == "astray") {
      for (const auto& astray : test::calls_astray()) {  // each in a group of its own, as it breaks it
        comm::MpiCommunicator c(std::chrono::seconds(10));
        const auto said = test::go_astray(c, astray);
        std::printf("%d> %s\n", c.rank(), said.c_str());
      }
    } else if (what == "third_astray") {
      comm::MpiCommunicator c(std::chrono::seconds(10));
      std::printf("%d> %s\n", c.rank(), test::third_astray(c).c_str());
    } else if (what == "split") {  // even and odd ranks, the odd ones backwards
      const auto world = world_from_environment().value();
      auto all = comm::connect(world, {.backend = comm::Backend::mpi});
      const bool odd = world.rank % 2 == 1;
      const auto place = comm::split(all, world, odd, odd ? -world.rank : 0);
      auto group = comm::connect(place, {.backend = comm::Backend::mpi});
      text = test::conforms(group);
      if (text.empty()) text = test::conforms<float>(all, 1001);
      std::vector<int> members(static_cast<std::size_t>(group.size()));
      group.all_gather(std::span(&world.rank, 1), std::span(members));
      if (text.empty()) text = cat(std::span(members), " ", std::span(place.members), " ", group.backend());
    } else if (what == "random") {  // programs that seeds draw
      const auto world = world_from_environment().value();
      for (std::uint64_t seed = 1; seed <= 10 && text.empty(); ++seed) {
        const auto program = test::calls::draw(seed, {test::calls::Carrier::mpi}, world.size);
        const auto said = test::calls::Rank(program, world).run();
        if (!said.starts_with("ended with ")) text = said;
      }
    } else {
      auto world = world_from_environment().value_or(comm::World{});
      world.timeout = std::chrono::seconds(what == "late" || what == "unborn" || what.starts_with("absent") ? 1 : 30);
      if (what == "unborn" && world.rank == 1) std::this_thread::sleep_for(std::chrono::seconds(30));
      if (what == "single") MPI_Init(nullptr, nullptr);
      if (what == "late" || what.starts_with("absent")) comm::detail::MpiLibrary::instance();  // starts together
      if (what == cat("absent", world.rank)) std::this_thread::sleep_for(std::chrono::seconds(3));
      auto c = comm::connect(world, {.backend = comm::Backend::mpi});
      std::vector<float> x(100'000, 1);
      if (what == "conforms") {
        text = test::conforms(c);
        if (text.empty() && world.size > 1 && c.backend() != "mpi") text = c.backend();
        if (text.empty() && world.size > 1 && c.busy().count() == 0) text = "its calls took no time";
      } else {
        c.all_reduce(std::span(x));
        if (world.rank == 1 && what == "abort") c.abort("no flour left");
        if (world.rank == 1 && what == "late") std::this_thread::sleep_for(std::chrono::seconds(2));
        c.all_reduce(std::span(x));
      }
    }
  } catch (const TimeoutError& error) {
    text = cat("late: ", error.what());
  } catch (const std::exception& error) {
    text = error.what();
  }
  std::printf("%s\n", text.empty() ? "ok" : text.c_str());
  std::fflush(stdout);
  // Where ranks have failed, MPI's end would wait for them. But mpirun ends all of them when one leaves without it: the
  // others get time to say what they have to say.
  if (what == "conforms" || what == "typed" || what == "split" || what == "random") return 0;
  std::this_thread::sleep_for(std::chrono::seconds(what.starts_with("absent") ? 6 : 2));
  std::_Exit(0);
}
#else
int main() {
  std::puts("this build is without MPI");
  return 77;
}
#endif
