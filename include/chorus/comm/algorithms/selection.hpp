#pragma once
/// Chooses the algorithm for each call: the tables of a communicator over a Transport.

#include <algorithm>
#include <chorus/comm/algorithms/bruck.hpp>
#include <chorus/comm/algorithms/direct.hpp>
#include <chorus/comm/algorithms/hierarchical.hpp>
#include <chorus/comm/algorithms/in_place.hpp>
#include <chorus/comm/algorithms/ring.hpp>
#include <chorus/comm/world.hpp>
#include <cstddef>
#include <string>
#include <string_view>

namespace chorus::comm {

namespace detail {

/// An algorithm, and when it is the fastest: `gains(call, bytes)`, with the bytes of one rank's data. `run` returns
/// false, with data unchanged, if the ranks find that they can't or should not use it.
template <class... Data>
struct Row {
  Algorithm algorithm;
  bool (*gains)(const Collective&, std::size_t bytes);
  bool (*run)(const Collective&, Data...);
};

/// The algorithm that always works.
template <auto algorithm>
inline constexpr auto always = [](const Collective& c, auto... data) {
  algorithm(c, data...);
  return true;
};

inline bool gains_anywhere(const Collective&, std::size_t) { return true; }
inline bool gains_on_machines(const Collective& c, std::size_t) { return !c.link.machines().empty(); }
inline bool share_memory(const Transport& link) { return link.reaches_peers && link.size <= InPlace::most_ranks; }
/// Long enough that the algorithm matters more than one more message.
inline bool gains_in_place(const Collective& c, std::size_t bytes) {
  return share_memory(c.link) && bytes > std::size_t{4} << 10;
}
/// With more ranks the ring is faster for longer data: its few busy queues stay in the caches. Two ranks exchange
/// longer data, too, unless the ring saves copies, as it does not overwrite data that is still to be sent.
inline bool gains_directly(const Collective& c, std::size_t bytes) {
  if (c.link.size == 2) return c.link.copies() || bytes <= std::size_t{64} << 10;
  return c.link.size <= 8 && bytes <= std::size_t{256} << 10;
}
/// Short enough that rounds matter and bytes don't: ceil(log2 N) rounds, where the others take 2 (N - 1) rounds, or 2
/// with N - 1 messages each. Two ranks need one round anyway. For gradients and parameters bytes matter.
inline bool reduces_in_few_rounds(const Collective& c, std::size_t bytes) {
  return c.link.size > 2 && c.traffic == trace::Traffic::control && bytes <= 1024 &&
         bytes * static_cast<std::size_t>(c.link.size) <= most_bruck_bytes;
}
/// The ring has N - 1 rounds here; for three ranks both have two.
inline bool gathers_in_few_rounds(const Collective& c, std::size_t bytes) {
  return c.link.size > 3 && bytes * static_cast<std::size_t>(c.link.size) <= most_bruck_bytes;
}

// The first row whose `gains` is true is used.

inline constexpr Row<std::byte*, std::size_t> all_reduce_rows[] = {
    {Algorithm::hierarchical, &gains_on_machines, always<&hierarchical_all_reduce>},
    {Algorithm::in_place, &gains_in_place, &in_place_all_reduce},
    {Algorithm::bruck, &reduces_in_few_rounds, always<&bruck_all_reduce>},
    {Algorithm::direct, &gains_directly, always<&direct_all_reduce>},
    {Algorithm::ring, &gains_anywhere, always<&ring_all_reduce>},
};
inline constexpr Row<const std::byte*, std::byte*, std::size_t> all_gather_rows[] = {
    {Algorithm::in_place, &gains_in_place, &in_place_all_gather},
    {Algorithm::bruck, &gathers_in_few_rounds, always<&bruck_all_gather>},
    {Algorithm::ring, &gains_anywhere, always<&ring_all_gather>},
};
inline constexpr Row<const std::byte*, std::byte*, std::size_t> reduce_scatter_rows[] = {
    {Algorithm::in_place, &gains_in_place, &in_place_reduce_scatter},
    {Algorithm::ring, &gains_anywhere, always<&ring_reduce_scatter>},
};

/// The algorithms that a user can request, and when each is possible.
struct Choice {
  Algorithm algorithm;
  bool (*possible)(const Transport&);
  std::string_view needs;
};

inline constexpr Choice all_reduce_choices[] = {
    {Algorithm::automatic, [](const Transport&) { return true; }, ""},
    {Algorithm::ring, [](const Transport&) { return true; }, ""},
    {Algorithm::direct, [](const Transport& link) { return link.queue_pieces >= direct_queue_pieces; },
     "longer queues between ranks"},
    {Algorithm::in_place, &share_memory, "at most 8 ranks that share memory (backend shm or thread)"},
    {Algorithm::hierarchical,
     [](const Transport& link) {
       const auto on = link.machines();
       return std::any_of(on.begin(), on.end(), [&](int machine) { return machine != on.front(); });
     },
     "several machines, and backend hierarchical"},
};

}  // namespace detail

/// Throws UsageError if the ranks of this group, which talk over `carrier`, can't use the requested algorithm. All of
/// them throw.
[[gnu::cold]] inline void check_all_reduce(Algorithm asked, const Transport& link, std::string_view carrier) {
  std::string possible, lacking;
  for (const auto& choice : detail::all_reduce_choices) {
    if (choice.possible(link))
      possible += cat(possible.empty() ? "" : ", ", choice.algorithm);
    else if (choice.algorithm == asked)
      lacking = choice.needs;
  }
  check<UsageError>(lacking.empty(), "rank ", link.rank, ": all-reduce ", asked, " needs ", lacking, "; ", link.size,
                    " ranks over ", carrier, " can do: ", possible);
}

/// Runs the fastest algorithm for the call. If one was `asked` for, runs that, or the ring if it can't work with this
/// call's data: in_place needs memory of the communicator, unless ranks are threads. `note(algorithm)` is called when
/// one begins.
template <std::size_t rows, class... Data, class Note>
void run_fastest(const detail::Row<Data...> (&table)[rows], Algorithm asked, const Collective& c, std::size_t bytes,
                 const Note& note, std::type_identity_t<Data>... data) {
  for (const auto& row : table) {
    const bool serves = asked == Algorithm::automatic ? row.gains(c, bytes)
                                                      : row.algorithm == asked || row.algorithm == Algorithm::ring;
    if (!serves) continue;
    note(row.algorithm);
    if (row.run(c, data...)) return;
  }
}

}  // namespace chorus::comm
