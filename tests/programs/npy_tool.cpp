/// The C++ side of tests/python/npy_check.py.
///   npy_tool rewrite DTYPE RANK IN OUT   reads a .npy or .npz file of arrays of that dtype and rank, and writes all to
///   another

#include <chorus/io/npz.hpp>
#include <cstdio>
#include <string>
#include <string_view>

namespace {

using namespace chorus;

template <Scalar T, int Rank>
void rewrite(const std::string& from, const std::string& to) {
  if (from.ends_with(".npy")) return io::save_npy(to, io::load_npy<T, Rank>(from));
  const io::NpzReader in(from);
  io::NpzWriter out;
  for (const std::string& name : in.names()) out.add(name, in.read<T, Rank>(name));
  out.save(to);
}

template <Scalar T>
void rewrite(const std::string& rank, const std::string& from, const std::string& to) {
  if (rank == "0") return rewrite<T, 0>(from, to);
  if (rank == "1") return rewrite<T, 1>(from, to);
  if (rank == "3") return rewrite<T, 3>(from, to);
  fail<UsageError>("npy_tool: rank ", rank, " is none of 0, 1, 3");
}

}  // namespace

int main(int argc, char** argv) {
  try {
    check<UsageError>(argc == 6 && std::string_view(argv[1]) == "rewrite", "usage: npy_tool rewrite DTYPE RANK IN OUT");
    const std::string type = argv[2];
    const auto run = [&]<class T>(T) { rewrite<T>(argv[3], argv[4], argv[5]); };
    if (type == "bool")
      run(bool{});
    else if (type == "uint8")
      run(std::uint8_t{});
    else if (type == "int8")
      run(std::int8_t{});
    else if (type == "int16")
      run(std::int16_t{});
    else if (type == "uint16")
      run(std::uint16_t{});
    else if (type == "int32")
      run(std::int32_t{});
    else if (type == "uint32")
      run(std::uint32_t{});
    else if (type == "int64")
      run(std::int64_t{});
    else if (type == "uint64")
      run(std::uint64_t{});
    else if (type == "float16")
      run(half{});
    else if (type == "float32")
      run(float{});
    else if (type == "float64")
      run(double{});
    else
      fail<UsageError>("npy_tool: unknown dtype ", type);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
