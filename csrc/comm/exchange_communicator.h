// The collectives of the transports through host memory, Gloo and shared memory.
//
// [Note: Collectives from pieces]
// A gather is a set of sends straight into the slices of the output, and a reduction is an all-to-all
// followed by one local pass in rank order (ordered_reduce.h): the same bytes sent as in a ring, the same
// result on every run and over every transport. Gloo's own collectives copy through buffers, run in its
// worker threads and reduce in the order in which data arrives.
#pragma once

#include "comm/exchange.h"
#include "comm/transport.h"

namespace bmtrain {

class ExchangeCommunicator : public Transport {
 public:
  using Transport::Transport;

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override { return carry_out(exchange_of(call)); }
  /// The exchange that the operation consists of, not yet started.
  [[nodiscard]] Exchange exchange_of(const Call& call) const;
  /// Copies this rank's own slice and starts the exchange.
  [[nodiscard]] WorkPtr carry_out(Exchange exchange);
  [[nodiscard]] std::int64_t wire_bytes(const Call& call) const override;

  /// Numbers the exchange and starts it.
  [[nodiscard]] virtual WorkPtr submit(Exchange exchange) = 0;
  /// Bytes that were copied from memory to memory.
  virtual void count_copied(std::int64_t /*bytes*/) {}

  /// An exchange without pieces. `detail` is what ranks must agree on besides operation, label and size.
  [[nodiscard]] static Exchange begin(const Call& call, std::int64_t bytes, int detail);
};

}  // namespace bmtrain
