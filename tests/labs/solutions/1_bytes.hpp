// Lab 1: a solution that replaces the student's `Mine`.

struct Solution {
  static void all_send_all(ch::comm::AnyCommunicator& ranks, std::span<float> data) {
    const std::vector<float> own(data.begin(), data.end());
    std::vector<float> from(data.size());
    std::vector<std::vector<float>> all(static_cast<std::size_t>(ranks.size()));
    for (int peer = 0; peer < ranks.size(); ++peer) {
      if (peer == ranks.rank()) continue;
      if (ranks.rank() < peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      ranks.recv(std::span(from), peer);
      if (ranks.rank() > peer) ranks.send(std::span(own), peer, {.traffic = ch::trace::Traffic::gradients});
      all[static_cast<std::size_t>(peer)] = from;
    }
    all[static_cast<std::size_t>(ranks.rank())] = own;
    for (std::size_t i = 0; i < data.size(); ++i) {
      data[i] = all[0][i];
      for (std::size_t rank = 1; rank < all.size(); ++rank) data[i] += all[rank][i];
    }
  }
};
