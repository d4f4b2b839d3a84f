// Exchange: an operation through host memory as the bytes that a rank sends and receives, and what it
// computes from them. What carries the bytes, messages or shared memory, is a link's own.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "comm/communicator.h"

namespace bmtrain {

/// Bytes to be sent to `peer`, or to be received from it.
struct Piece {
  static constexpr int kEveryPeer = -1;

  char* data = nullptr;
  std::int64_t bytes = 0;
  int peer = kEveryPeer;  // a receive has one peer
  int phase = 0;          // 0 or 1
};

/// Pieces of phase 1 are sent after `combine`, which follows the last piece of phase 0. They may write into
/// what pieces of phase 0 to the same peer were read from.
struct Exchange {
  const char* op = "";
  std::string label;
  std::int64_t bytes = 0;         // of the operation, as errors name it
  std::uint64_t fingerprint = 0;  // differs, most likely, where ranks call different operations
  std::int64_t sequence = 0;      // among the collectives or the messages with a peer; the link counts
  int message_peer = -1;          // of a send or receive; -1 for collectives

  std::vector<Piece> sends, receives;
  std::function<void()> combine;  // or null: nothing to compute
  /// Between the phases: starts operations of another communicator, which belong to this one; or null.
  std::function<std::vector<WorkPtr>()> share;
  std::function<void()> publish;  // copies the result to the caller's device, by whoever waits; or null
  at::Tensor from, to;            // of the caller, or their stand-ins on the host
  std::vector<at::Tensor> kept;   // what else has to live until the operation is over
  // This rank's own slice, copied to its place among the others before anything travels.
  struct {
    char* to = nullptr;
    const char* from = nullptr;
    std::int64_t bytes = 0;
  } own;

  [[nodiscard]] bool is_message() const { return message_peer >= 0; }
};

/// `all_gather #3 for "block 2" (40 bytes) on group "zero", rank 0 of 2`.
[[nodiscard]] std::string describe(const Exchange& exchange, const std::string& group, int rank, int size);

// Errors of links, without and with their reasons; `what` describes the exchange.

[[nodiscard]] std::string lost_message(const std::string& what, int peer, const std::string& reason);
/// `direction`: " to send", " to receive" or nothing.
[[nodiscard]] std::string late_message(const std::string& what, double seconds, int peer,
                                       const char* direction);

}  // namespace bmtrain
