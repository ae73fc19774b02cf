/// Lab 1: a solution, in the place of the student's file.

#include "bytes.hpp"

void all_send_all(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
  const std::vector<float> own(data.begin(), data.end());
  std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks.size()), own);
  for (int peer = 0; peer < ranks.size(); ++peer) {
    if (peer == ranks.rank()) continue;
    if (ranks.rank() < peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
    ranks.recv(std::span(all[static_cast<std::size_t>(peer)]), peer);
    if (ranks.rank() > peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
  }
  for (std::size_t i = 0; i < data.size(); ++i) {
    data[i] = all[0][i];
    for (std::size_t rank = 1; rank < all.size(); ++rank) data[i] += all[rank][i];
  }
}

int main(int argc, char** argv) {
  return lab::run(argc, argv, bytes_lab::title, bytes_lab::check, {.all_send_all = all_send_all});
}
