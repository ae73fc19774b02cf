#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>

#include <catch.hpp>
#include <chorus/train/metrics.hpp>
#include <nlohmann/json.hpp>

namespace metrics_test {

namespace ch = chorus;

// A folder that goes with the test.
struct Folder {
  std::string path = "/tmp/chorus_metrics_XXXXXX";
  Folder() { REQUIRE(mkdtemp(path.data()) != nullptr); }
  ~Folder() {
    std::remove((path + "/log").c_str());
    std::remove(path.c_str());
  }
  std::string log() const { return path + "/log"; }
};

std::string contents(const std::string& path) {
  std::stringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

std::string message(const std::string& path) {
  try {
    ch::MetricsLog log(path);
  } catch (const ch::FileError& error) {
    return error.what();
  }
  return "";
}

TEST_CASE("metrics are lines of JSON in the documented form") {
  const Folder folder;
  {
    ch::MetricsLog log(folder.log());
    log.step(0, 2.3);
    log.epoch(0, 1.5, 0.25, 4);
    log.done({.policy = "ddp",
              .devices = 2,
              .canonical_shares = 4,
              .samples_per_second = 1250.5,
              .bytes_sent_per_device = {10, 18446744073709551615u},
              .peak_memory_bytes_per_device = {7, 8},
              .parameters_sha256 = "ab"});
  }
  CHECK(contents(folder.log()) ==
        R"({"event":"step","step":0,"loss":2.3}
{"event":"epoch","epoch":0,"train_loss":1.5,"test_accuracy":0.25,"seconds":4}
{"event":"done","policy":"ddp","devices":2,"canonical_shares":4,"samples_per_second":1250.5,)"
        R"("bytes_sent_per_device":[10,18446744073709551615],"peak_memory_bytes_per_device":[7,8],"parameters_sha256":"ab"}
)");
}

TEST_CASE("metrics keep every digit, and what JSON cannot say is null") {
  const Folder folder;
  const double values[] = {0.1 + 0.2, 1e300, 5e-324, -1.0 / 3, std::numeric_limits<double>::quiet_NaN(),
                           -std::numeric_limits<double>::infinity()};
  {
    ch::MetricsLog log(folder.log());
    for (const double value : values) log.step(1, value);
  }
  std::ifstream in(folder.log());
  for (const double value : values) {
    std::string line;
    REQUIRE(std::getline(in, line));
    const auto loss = nlohmann::json::parse(line).at("loss");
    if (std::isfinite(value)) {
      CHECK(loss.get<double>() == value);
    } else {
      CHECK(loss.is_null());
    }
  }
}

TEST_CASE("metrics escape text") {
  const Folder folder;
  const std::string odd = "a \"quoted\"\\ \n\x01 na\u00efve";
  {
    ch::MetricsLog log(folder.log());
    log.done({.policy = odd, .bytes_sent_per_device = {}, .peak_memory_bytes_per_device = {}, .parameters_sha256 = ""});
  }
  const auto done = nlohmann::json::parse(contents(folder.log()));
  CHECK(done.at("policy") == odd);
  CHECK_FALSE(done.contains("parameters_sha256"));
  CHECK_FALSE(done.contains("canonical_shares"));
}

TEST_CASE("an epoch is on disk when it was logged") {
  const Folder folder;
  ch::MetricsLog log(folder.log());
  log.step(0, 1);
  CHECK(contents(folder.log()).empty());
  log.epoch(0, 1, 1, 1);
  CHECK(contents(folder.log()).find("\"epoch\":0") != std::string::npos);
}

TEST_CASE("a metrics log replaces the file of an earlier run") {
  const Folder folder;
  ch::MetricsLog(folder.log()).epoch(0, 1, 1, 1);
  ch::MetricsLog(folder.log()).epoch(7, 1, 1, 1);
  CHECK(contents(folder.log()).find("\"epoch\":0") == std::string::npos);
}

TEST_CASE("metrics without a path write nothing") {
  ch::MetricsLog log("");
  log.step(0, 1);
  log.epoch(0, 1, 1, 1);
  log.done({});
}

TEST_CASE("metrics name the file that can't be written") {
  CHECK(message("/nonexistent/m.jsonl") == "metrics: cannot write '/nonexistent/m.jsonl': No such file or directory");
  CHECK(message("/tmp") == "metrics: cannot write '/tmp': Is a directory");
}

TEST_CASE("metrics report a full disk") {
  if (access("/dev/full", W_OK) != 0) return;
  ch::MetricsLog log("/dev/full");
  CHECK_THROWS_WITH(log.epoch(0, 1, 1, 1), "metrics: cannot write '/dev/full': No space left on device");
}

TEST_CASE("a metrics file that is as long as it may be is an error, and not the end of the process") {
  const Folder folder;
  const pid_t child = fork();
  if (child == 0) {
    const rlimit limits{100, 100};
    setrlimit(RLIMIT_FSIZE, &limits);
    int status = 1;
    {
      ch::MetricsLog log(folder.log());
      try {
        for (int step = 0; step < 3; ++step) log.step(step, 0.5);
        log.epoch(0, 1, 1, 1);
      } catch (const ch::FileError& error) {
        if (std::string(error.what()).ends_with("File too large")) status = 0;
      }
    }
    _exit(status);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

}  // namespace metrics_test
