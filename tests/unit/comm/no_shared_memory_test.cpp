// Machines with little or no shared memory.
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <catch.hpp>
#include <cerrno>
#include <cstdio>

#include "../message_of.hpp"
#include "processes.hpp"

// These functions override the C library's; they fail while a test sets a flag.
namespace no_shared_memory_test {
bool no_memfd = false, no_room = false;
}
extern "C" int memfd_create(const char* name, unsigned flags) noexcept {
  if (no_shared_memory_test::no_memfd) return errno = EPERM, -1;
  return static_cast<int>(syscall(SYS_memfd_create, name, flags));
}
extern "C" int posix_fallocate(int fd, off_t begin, off_t bytes) {
  if (no_shared_memory_test::no_room) return ENOSPC;
  return syscall(SYS_fallocate, fd, 0, begin, bytes) == 0 ? 0 : errno;
}

namespace no_shared_memory_test {

using namespace chorus;
using namespace std::chrono_literals;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;
using comm::Backend;

/// An all-reduce of `count` numbers; returns "" or the difference.
std::string adds_up(comm::AnyCommunicator& c, std::size_t count) {
  std::vector<float> own(count);
  const auto lent = c.allocate(count * sizeof(float));
  const auto sum = static_cast<float>(c.size() * (c.size() + 1) / 2);
  const auto other = lent ? std::span(reinterpret_cast<float*>(lent.get()), count) : std::span(own);
  for (const auto numbers : {std::span(own), other}) {
    std::fill(numbers.begin(), numbers.end(), static_cast<float>(c.rank() + 1));
    c.all_reduce(numbers);
    for (const float x : numbers)
      if (x != sum) return cat("got ", x, " for ", sum);
  }
  return "";
}

TEST_CASE("without shared memory ranks use TCP, and rank 0 says so", "[comm]") {
  enum Lack { no_file, no_space, no_size };
  for (const auto lack : {no_file, no_space, no_size})
    for (const auto backend : {Backend::automatic, Backend::hierarchical}) {
      const auto body = [&](const comm::World& world) {
        no_memfd = lack == no_file, no_room = lack == no_space;
        const rlimit small{100'000, 100'000};  // like `ulimit -f 100`
        if (lack == no_size) setrlimit(RLIMIT_FSIZE, &small);
        return test::with_stderr([&]() -> std::string {
          auto c = comm::connect(world, {.backend = backend});
          if (backend == Backend::automatic && c.backend() != "tcp") return std::string(c.backend());
          return adds_up(c, 300'000);
        });
      };
      const auto texts = test::Ranks(3, body).texts();
      INFO(texts[0]);
      CHECK_THAT(texts[0], StartsWith("chorus: rank 0") && Contains("use TCP\n"));
      CHECK_THAT(texts[0], Contains(lack == no_file    ? "memfd_create: Operation not permitted"
                                    : lack == no_space ? "memory: no room for "
                                                       : "may write (ulimit -f): 100000"));
      CHECK(texts[1] + texts[2] == "");
    }
}

TEST_CASE("ranks that may not open each other's memory use TCP, and say so", "[comm]") {
  for (const auto backend : {Backend::automatic, Backend::hierarchical}) {
    const auto body = [&](const comm::World& world) {
      if (world.rank == 1 && getuid() == 0) REQUIRE(setresuid(65534, 65534, 65534) == 0);
      if (world.rank == 0 && getuid() != 0) prctl(PR_SET_DUMPABLE, 0);
      return test::with_stderr([&]() -> std::string {
        auto c = comm::connect(world, {.backend = backend});
        return adds_up(c, 300'000);
      });
    };
    const auto texts = test::Ranks(3, body).texts();
    INFO(texts[0] << texts[1] << texts[2]);
    for (const auto& text : texts) CHECK((text.empty() || text.ends_with("; the ranks of this machine use TCP\n")));
    if (backend == Backend::hierarchical) CHECK_THAT(texts[1], StartsWith("chorus: rank 1: shared memory: /proc/"));
  }
}

TEST_CASE("shared memory that was asked for and is not there is an error of all ranks", "[comm]") {
  test::Ranks ranks(3, [](const comm::World& world) {
    no_room = true;
    comm::connect(world, {.backend = Backend::shm});
    return std::string("connected");
  });
  for (int rank = 0; rank < 3; ++rank) {
    const auto outcome = ranks.outcome(rank);
    CHECK_THAT(outcome.text, Contains("shared memory: no room for ") && Contains("No space left on device"));
    CHECK(outcome.seconds < 5);
  }
}

TEST_CASE("a communicator that has no room for a buffer lends none, and goes on", "[comm]") {
  test::Ranks ranks(2, [](const comm::World& world) -> std::string {
    auto c = comm::connect(world, {.backend = Backend::shm});
    no_room = world.rank == 1;  // the other rank's are in shared memory
    if ((c.allocate(1000) == nullptr) != (world.rank == 1)) return "allocate";
    return adds_up(c, 1'000'000);
  });
  for (const auto& text : ranks.texts()) CHECK(text == "");
}

TEST_CASE("threads that meet where there is no memory all hear why, and may meet again", "[comm]") {
  const auto meet = [] {
    std::vector<std::string> said(3);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 3; ++rank)
      threads.emplace_back([&said, rank] {
        comm::World world{.rank = rank, .size = 3, .master_port = 7};
        world.timeout = 10s;
        said[static_cast<std::size_t>(rank)] =
            message_of<CommError>([&] { comm::connect(world, {.backend = Backend::thread}).barrier(); });
      });
    for (auto& thread : threads) thread.join();
    return said;
  };
  no_memfd = true;
  const auto start = comm::Clock::now();
  const auto said = meet();
  CHECK(comm::Clock::now() - start < 5s);
  no_memfd = false;
  for (int rank = 0; rank < 3; ++rank)
    CHECK_THAT(said[static_cast<std::size_t>(rank)],
               StartsWith(cat("rank ", rank, ": ")) && Contains("memfd_create: Operation not permitted"));
  for (const auto& text : meet()) CHECK(text == "nothing");
}

TEST_CASE("queues that find no room once the group has formed are an error of all ranks", "[comm]") {
  using Use = void (*)(comm::AnyCommunicator&);
  const Use uses[] = {[](comm::AnyCommunicator& c) { c.barrier(); },
                      [](comm::AnyCommunicator& c) { c.monitored_barrier(); },
                      [](comm::AnyCommunicator& c) { adds_up(c, 10); }};
  for (const Use use : uses) {
    test::Ranks ranks(4, [use](const comm::World& world) -> std::string {
      auto c = comm::connect(world, {.backend = Backend::shm});
      no_room = true;
      use(c);
      return "it went well";
    });
    for (int rank = 0; rank < 4; ++rank) {
      const auto outcome = ranks.outcome(rank);
      CHECK_THAT(outcome.text, Contains("shared memory: no room for ") && Contains("No space left on device"));
      CHECK(outcome.status == 0);
      CHECK(outcome.seconds < 5);
    }
  }
}

TEST_CASE("eight ranks need nothing of /dev/shm", "[comm]") {
  const auto body = [](const comm::World& world) -> std::string {
    if (unshare(CLONE_NEWNS) != 0 || mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        mount("small", "/dev/shm", "tmpfs", 0, "size=64k") != 0)
      return cat("skipped: ", std::strerror(errno));
    struct statvfs size {};
    if (statvfs("/dev/shm", &size) != 0 || size.f_blocks * size.f_frsize > 65536) return "it is not small";
    auto c = comm::connect(world, {.backend = Backend::shm});
    return adds_up(c, 1'500'000);
  };
  const auto texts = test::Ranks(8, body, 30s).texts();
  if (texts[0].starts_with("skipped")) {
    WARN("not checked with a small /dev/shm: this process may not mount one: " << texts[0]);
    return;
  }
  for (const auto& text : texts) CHECK(text == "");
}

}  // namespace no_shared_memory_test
