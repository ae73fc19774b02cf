#pragma once
/// The messages between ranks and rank 0 at their meeting.
///
/// Each message is a struct of fixed size, without padding, in this machine's byte order: Challenge (rank 0 to rank),
/// Hello (back), Answer (a refusal with its reason, or the transport), then for TCP the addresses of all ranks, and for
/// shared memory an Ack (rank to rank 0: whether it could open the region) and a Verdict (back: the transport for all).
///
/// If the job has a token, Hello holds an HMAC of rank 0's challenge and of itself, and Answer one of the rank's own
/// challenge and of itself. The connections of TcpTransport begin in the same way, see mesh.hpp. Each side proves that
/// it knows the token, which is never sent; a proof is valid for one connection. Outside of loopback a token is
/// obligatory, and everything after the Challenge is TLS 1.3 (tls.hpp): an attacker who can read and change packets
/// learns and changes nothing, but can end connections. CHORUS_TLS=0 on all ranks switches it off; CHORUS_TLS=1
/// switches it on for loopback, too.

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chorus/comm/meeting/acceptor.hpp>
#include <chorus/comm/meeting/hmac.hpp>
#include <chorus/comm/transport/socket.hpp>
#include <chorus/comm/world.hpp>
#include <chorus/core/environment.hpp>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace chorus::comm::detail {

inline constexpr std::uint64_t magic = 0x0005'7375'726f'6863;  // "chorus", then the protocol's version

struct Hello {
  std::uint64_t magic = detail::magic;
  Nonce nonce{};  ///< this rank's challenge to rank 0
  std::int32_t rank = 0, size = 0, pid = 0, port = 0;
  std::uint64_t machine = 0;
  Backend kind = Backend::automatic;
  Algorithm all_reduce = Algorithm::automatic;
  std::array<std::uint8_t, 6> reserved{};
  FixedText<64> purpose{};
  Mac proof{};
};
static_assert(is_message<Hello, 152>);

struct Answer {
  std::uint64_t magic = detail::magic;
  std::uint64_t key = 0;
  std::int32_t welcome = 0, pid = 0, fd = -1, port = 0;
  Backend kind = Backend::tcp;
  std::array<std::uint8_t, 7> reserved{};
  FixedText<1024> refusal{};
  Mac proof{};
};
static_assert(is_message<Answer, 1096>);

/// A message without its proof, which comes last.
template <class Message>
std::span<const std::byte> proven(const Message& message) {
  return std::as_bytes(std::span(&message, 1)).first(offsetof(Message, proof));
}

/// The proof that the sender of `message` knows the token, for the other side's challenge.
template <class Message>
Mac proof_of(const Message& message, const Nonce& challenge, const std::string& token) {
  return prove(token, {std::as_bytes(std::span(challenge)), proven(message)});
}
template <class Message>
bool proves(const Message& message, const Nonce& challenge, const std::string& token) {
  return same(message.proof, proof_of(message, challenge, token));
}

/// The rules of a meeting: its address, and whether it is encrypted. Throws UsageError.
[[gnu::cold]] inline bool check_token(const std::string& token, const Address& address) {
  check<UsageError>(token.empty() || token.size() >= 16, "connect: the job's token has ", token.size(),
                    " characters, expected at least 16");
  check<UsageError>(provable(token),
                    "connect: CHORUS_TOKEN is set, but this program was built without OpenSSL, which checks it: build "
                    "it with OpenSSL, or unset CHORUS_TOKEN");
  const bool encrypted = chorus::detail::env_switch("CHORUS_TLS", !address.loopback());
  check<UsageError>(!encrypted || can_authenticate || !address.loopback(),
                    "connect: CHORUS_TLS is 1, but this program was built without OpenSSL");
  check<UsageError>(!encrypted || !token.empty() || !address.loopback(),
                    "connect: CHORUS_TLS is 1, but CHORUS_TOKEN, the source of the key, is not set");
  if (address.loopback()) return encrypted;
  check<UsageError>(can_authenticate, "connect: ", address,
                    " is not on loopback, but this program was built without OpenSSL, which authenticates ranks");
  check<UsageError>(!token.empty(), "connect: ", address,
                    " is not on loopback, so ranks need a token: set CHORUS_TOKEN on all ranks to one secret of at "
                    "least 16 characters");
  return encrypted;
}

/// The connecting side answers the other side's challenge. Throws CommError, naming `who` and `there`, if the other
/// side requires no encryption although it is obligatory.
[[gnu::cold]] inline void follow(const Challenge& challenge, Socket& socket, bool encrypted, const std::string& token,
                                 std::string_view who, const Address& there) {
  check<CommError>(challenge.encrypts != 0 || !encrypted, who, ": the process at ", there,
                   " does not encrypt, and this rank does: set the same CHORUS_TLS on all ranks");
  check<CommError>(challenge.encrypts == 0 || !token.empty(), who, ": the process at ", there,
                   " encrypts with CHORUS_TOKEN, which is not set for this rank");
  if (challenge.encrypts != 0) socket.encrypt(Tls::Side::client, token);
}

/// The address at which the other ranks reach this one: its machine's address towards rank 0. Throws CommError.
inline Address own_address(const World& world) {
  const auto master = Address::resolve(world.master_addr, world.master_port, Clock::now() + world.timeout);
  if (world.rank == 0) return master;
  const Socket probe(::socket(master.storage.ss_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));  // sends nothing
  return ::connect(probe.fd(), master.data(), master.length) == 0 ? probe.local() : master;
}

inline std::uint64_t fnv_1a(std::string_view text) {
  std::uint64_t hash = 14695981039346656037ull;
  for (const char c : text) hash = (hash ^ static_cast<unsigned char>(c)) * 1099511628211ull;
  return hash;
}

/// An id that is equal for processes that can open each other's memory: one boot of one kernel, one pid namespace.
inline std::uint64_t machine_id() {
  char text[256] = {};
  if (const int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC); fd >= 0) {
    [[maybe_unused]] const auto n = read(fd, text, 64);
    close(fd);
  }
  [[maybe_unused]] const auto n = readlink("/proc/self/ns/pid", text + 64, 128);
  return fnv_1a({text, sizeof text});
}

}  // namespace chorus::comm::detail
