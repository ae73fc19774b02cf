// Lab 15: its solution passes; wrong answers are told apart.
#include "../../examples/lessons/labs/15_reshard/reshard.hpp"
#include "labs.hpp"

namespace labs_test::reshard {

namespace given {
#define main main_of_mine
#include "../../examples/lessons/labs/15_reshard/mine.cpp"
}  // namespace given
namespace solution {
#include "solutions/15_reshard.cpp"
#undef main
}  // namespace solution

using reshard_lab::Read;
using Units = std::span<const std::size_t>;
using Reads = std::vector<Read>;

std::size_t rounded_up(std::size_t unit, int ranks) {
  return (unit + static_cast<std::size_t>(ranks) - 1) / static_cast<std::size_t>(ranks);
}
/// The solution, with another length of a unit's parts, and with or without the padding of its last part.
Reads with(Units units, int saved_by, int read_by, int rank, std::size_t (*part)(std::size_t, int), bool pads) {
  Reads reads;
  std::size_t in_file = 0, in_memory = 0;
  for (const auto unit : units) {
    const auto old = part(unit, saved_by), own = part(unit, read_by);
    const auto begin = own * static_cast<std::size_t>(rank);
    const auto end = std::min(begin + own, pads ? old * static_cast<std::size_t>(saved_by) : unit);
    for (std::size_t i = begin; i < end;) {
      const auto file = i / old, stop = std::min((file + 1) * old, end);
      reads.push_back(
          {static_cast<int>(file), 4 * (in_file + i - file * old), 4 * (stop - i), 4 * (in_memory + i - begin)});
      i = stop;
    }
    in_file += old;
    in_memory += own;
  }
  return reads;
}
Reads reads_padding(Units units, int saved_by, int read_by, int rank) {
  return with(units, saved_by, read_by, rank, rounded_up, true);
}
/// The remainder of the division is forgotten.
Reads rounds_down(Units units, int saved_by, int read_by, int rank) {
  const auto down = [](std::size_t unit, int ranks) { return unit / static_cast<std::size_t>(ranks); };
  return with(units, saved_by, read_by, rank, down, false);
}
/// Takes the files for one row of all units' numbers.
Reads one_row(Units units, int saved_by, int read_by, int rank) {
  std::size_t all = 0;
  for (const auto unit : units) all += unit;
  const std::size_t row[] = {all};
  return solution::reads(row, saved_by, read_by, rank);
}
/// Counts places in files in numbers.
Reads in_numbers(Units units, int saved_by, int read_by, int rank) {
  auto reads = solution::reads(units, saved_by, read_by, rank);
  for (auto& read : reads) read.from /= 4;
  return reads;
}
/// Each rank has a file of its own.
Reads own_file(Units units, int saved_by, int read_by, int rank) {
  auto reads = solution::reads(units, saved_by, read_by, rank);
  for (auto& read : reads) read.file = rank;
  return reads;
}
/// Reads everything, number by number, then what it needs.
Reads everything(Units units, int saved_by, int read_by, int rank) {
  Reads reads;
  std::size_t numbers = 0;
  for (const auto unit : units) numbers += rounded_up(unit, saved_by);
  for (int file = 0; file < saved_by; ++file)
    for (std::size_t i = 0; i < numbers; ++i) reads.push_back({file, 4 * i, 4, 0});
  for (const auto& read : solution::reads(units, saved_by, read_by, rank)) reads.push_back(read);
  return reads;
}

TEST_CASE("lab 15: the solution passes, and wrong answers are told apart") {
  const auto right = solved("15_reshard");
  const auto with_reads = [](auto* reads) { return judged(reshard_lab::check, {reads}); };
  check_empty("15_reshard", right);
  check_solution(with_reads(solution::reads), right);
  check_guesses(with_reads(solution::reads), right, {{"rank 2 of 3 reads, bytes", 1612}, {"bytes of a file", 1205}});
  check_hole(with_reads(given::reads), right, "reads");
  check_told_apart(right, {{"reads everything", with_reads(everything), ": all files"},
                           {"reads padding", with_reads(reads_padding), ": it reads padding"},
                           {"rounds down", with_reads(rounds_down), "of file 4 to byte 1332: there are 4 files"},
                           {"one row", with_reads(one_row), "number 251 of its part is number 0 of unit 1"},
                           {"in numbers", with_reads(in_numbers), "is number 325 of unit 0, and not number 400"},
                           {"its own file", with_reads(own_file), "is number 0 of unit 0, and not number 300"}});
}

}  // namespace labs_test::reshard
