// A communicator over Gloo: c10d's point-to-point messages carry the bytes, everything else is ours. Gloo's
// device thread moves them; what is computed from them runs in wait(), on the caller's thread.
#pragma once

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "comm/exchange_communicator.h"
#include "comm/gloo/gloo_link.h"

namespace bmtrain {

class GlooCommunicator : public ExchangeCommunicator {
 public:
  /// `process_group` must have a Gloo backend for the CPU that serves nobody else. Operations give up after
  /// `timeout_seconds` in wait().
  GlooCommunicator(c10::intrusive_ptr<c10d::ProcessGroup> process_group, int rank, int size, std::string name,
                   double timeout_seconds);
  ~GlooCommunicator() override { link_->close(); }

  [[nodiscard]] std::string backend() const override { return "gloo"; }
  void abort(const std::string& reason) override { link_->abort(reason); }
  void close() override { link_->close(); }
  [[nodiscard]] bool closed() const override { return link_->closed(); }

 protected:
  [[nodiscard]] WorkPtr submit(Exchange exchange) override;

  // Shared with the works, which may outlive the communicator.
  const std::shared_ptr<GlooLink> link_;
};

}  // namespace bmtrain
