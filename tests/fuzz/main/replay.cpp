// Replays inputs with any compiler: replay FOLDER gives each file FOLDER/NAME/* to the target NAME; replay NAME FILE...
// these files.
#include <sys/resource.h>

#include "../fuzz.hpp"

namespace {

bool replay(const fuzz::Target& target, const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  const std::vector<std::uint8_t> input{std::istreambuf_iterator<char>(file), {}};
  try {
    fuzz::run(target, input);
    return true;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", path.c_str(), error.what());
    return false;
  }
}

}  // namespace

int main(int argc, char** argv) {
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
  const rlimit memory{rlim_t{4} << 30, rlim_t{4} << 30};  // what takes more is a finding
  setrlimit(RLIMIT_AS, &memory);
#endif
  bool good = argc > 1;
  std::size_t inputs = 0;
  for (const auto& target : fuzz::targets()) {
    if (argc > 2 && target.name != argv[1]) continue;
    for (int i = 2; i < argc; ++i, ++inputs) good = replay(target, argv[i]) && good;
    if (argc != 2) continue;
    const auto folder = std::filesystem::path(argv[1]) / target.name;
    const std::size_t before = inputs;
    for (std::filesystem::directory_iterator at(folder), end; at != end; ++at, ++inputs)
      good = replay(target, at->path()) && good;
    if (inputs == before) {
      std::fprintf(stderr, "%s: no input\n", folder.c_str());
      good = false;
    }
  }
  std::printf("%zu inputs, %zu targets\n", inputs, fuzz::targets().size());
  return good && inputs > 0 ? 0 : 1;
}
