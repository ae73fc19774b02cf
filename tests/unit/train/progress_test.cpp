#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <catch.hpp>
#include <chorus/train/progress.hpp>

namespace progress_test {

namespace ch = chorus;

// A file, read back when the bar is gone.
struct File {
  std::FILE* handle = std::tmpfile();
  ~File() { std::fclose(handle); }
  std::string text() const {
    std::string text(static_cast<std::size_t>(std::ftell(handle)), ' ');
    std::rewind(handle);
    REQUIRE(std::fread(text.data(), 1, text.size(), handle) == text.size());
    return text;
  }
};

// A pseudo-terminal.
struct Terminal {
  int master = posix_openpt(O_RDWR | O_NOCTTY);
  std::FILE* handle = nullptr;
  Terminal() {
    REQUIRE(master >= 0);
    REQUIRE(grantpt(master) == 0);
    REQUIRE(unlockpt(master) == 0);
    handle = fdopen(open(ptsname(master), O_WRONLY | O_NOCTTY), "w");
    REQUIRE(handle != nullptr);
  }
  ~Terminal() {
    std::fclose(handle);
    close(master);
  }
  // Everything up to the last line's end; the kernel hands it over a little later than it was written.
  std::string text() const {
    std::string text;
    pollfd ready{.fd = master, .events = POLLIN, .revents = 0};
    char buffer[4096];
    while ((text.empty() || text.back() != '\n') && poll(&ready, 1, 2000) == 1) {
      const auto size = read(master, buffer, sizeof buffer);
      if (size <= 0) break;
      text.append(buffer, static_cast<std::size_t>(size));
    }
    return text;
  }
};

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

struct Run {
  bool main;
  bool is_main() const { return main; }
};

TEST_CASE("progress counts epochs, with or without output") {
  std::vector<int> seen;
  for (const int epoch : ch::Progress({.enabled = false, .epochs = 3})) seen.push_back(epoch);
  CHECK(seen == std::vector{0, 1, 2});

  seen.clear();
  Run worker{false};
  for (const int epoch : ch::progress(worker, 4, 2)) seen.push_back(epoch);
  CHECK(seen == std::vector{2, 3});

  for (const int epoch : ch::Progress({.enabled = false, .epochs = 0})) seen.push_back(epoch);
  CHECK(seen.size() == 2);
}

TEST_CASE("progress that is switched off writes nothing") {
  Terminal terminal;
  {
    ch::Progress progress({.enabled = false, .epochs = 1, .out = terminal.handle});
    for ([[maybe_unused]] const int epoch : progress) {
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
      progress.step(1.0, 1, 0, 2);
    }
  }
  std::fputs("end\n", terminal.handle);
  std::fflush(terminal.handle);
  CHECK(terminal.text() == "end\r\n");
}

TEST_CASE("progress of a loop that reports no steps is a line of time per epoch") {
  File file;
  for ([[maybe_unused]] const int epoch : ch::Progress({.epochs = 2, .out = file.handle})) {
  }
  const std::string text = file.text();
  CHECK(has(text, "epoch 1/2  0."));
  CHECK(has(text, " s  ETA 0:0"));
  CHECK(has(text, "\nepoch 2/2  0."));
  CHECK(!has(text, "loss"));
  CHECK(std::count(text.begin(), text.end(), '\n') == 2);
}

TEST_CASE("progress shows the mean loss over samples, and throughput") {
  File file;
  ch::Progress progress({.epochs = 1, .out = file.handle});
  for ([[maybe_unused]] const int epoch : progress) {
    progress.step(1.0, 3, 0, 2);
    progress.step(5.0, 1, 1, 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  const std::string text = file.text();
  CHECK(has(text, "epoch 1/1  loss 2.0000  "));
  CHECK(has(text, " samples/s  0."));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

TEST_CASE("an epoch starts from nothing") {
  File file;
  ch::Progress progress({.epochs = 2, .out = file.handle});
  for (const int epoch : progress) progress.step(epoch == 0 ? 8.0 : 2.0, 1, 0, 1);
  const std::string text = file.text();
  CHECK(has(text, "epoch 1/2  loss 8.0000"));
  CHECK(has(text, "epoch 2/2  loss 2.0000"));
}

TEST_CASE("on a terminal one line is redrawn, not faster than ten times a second") {
  Terminal terminal;
  {
    ch::Progress progress({.epochs = 1, .out = terminal.handle});
    for ([[maybe_unused]] const int epoch : progress) {
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
      for (int step = 0; step < 500; ++step) progress.step(1.0, 32, step, 1000);
    }
  }
  const std::string text = terminal.text();
  const auto drawn = std::count(text.begin(), text.end(), '\x1b');
  CHECK(drawn >= 2);
  CHECK(drawn < 10);
  CHECK(has(text, "epoch 1/1  [>                   ]  step 1/1000  loss 1.0000  "));
  CHECK(has(text, "ETA "));
  CHECK(std::count(text.begin(), text.end(), '\n') == 1);
}

TEST_CASE("an exception in the loop leaves the terminal on a fresh line") {
  Terminal terminal;
  const auto loop = [&] {
    ch::Progress progress({.epochs = 1, .out = terminal.handle});
    for ([[maybe_unused]] const int epoch : progress) {
      std::this_thread::sleep_for(std::chrono::milliseconds(101));
      progress.step(1.0, 1, 0, 2);
      throw std::runtime_error("stop");
    }
  };
  CHECK_THROWS_WITH(loop(), "stop");
  std::fflush(terminal.handle);
  const std::string text = terminal.text();
  REQUIRE(!text.empty());
  CHECK(text.back() == '\n');
}

TEST_CASE("each loop over a progress has all of its epochs") {
  ch::Progress progress({.enabled = false, .epochs = 3, .first_epoch = 1});
  std::vector<int> seen;
  for (const int epoch : progress) {
    seen.push_back(epoch);
    for (const int inner : progress) seen.push_back(10 * inner);
  }
  CHECK(seen == std::vector<int>{1, 10, 20, 2, 10, 20});
}

TEST_CASE("progress refuses a negative number of epochs") {
  CHECK_THROWS_WITH(ch::Progress({.epochs = -1}), "progress: epochs is -1, expected 0 or more");
}

}  // namespace progress_test
