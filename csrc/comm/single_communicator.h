// The communicator of a group with one rank: every collective is a local copy, or nothing.
#pragma once

#include <deque>
#include <string>

#include "comm/transport.h"
#include "common/thread_annotations.h"

namespace bmtrain {

class SingleCommunicator final : public Transport {
 public:
  explicit SingleCommunicator(std::string name);

  [[nodiscard]] std::string backend() const override { return "single"; }
  void abort(const std::string& reason) override BMT_EXCLUDES(mutex_);
  void close() override BMT_EXCLUDES(mutex_);
  [[nodiscard]] bool closed() const override BMT_EXCLUDES(mutex_);

 protected:
  [[nodiscard]] WorkPtr perform(const Call& call) override BMT_EXCLUDES(mutex_);
  [[nodiscard]] std::int64_t wire_bytes(const Call& /*call*/) const override { return 0; }

 private:
  // The oldest message to itself. Raises CommunicationError when nothing was sent: with one rank nobody else
  // ever will.
  [[nodiscard]] at::Tensor take_message(const at::Tensor& expected) BMT_REQUIRES(mutex_);

  mutable Mutex mutex_;
  Standing standing_ BMT_GUARDED_BY(mutex_);
  std::deque<at::Tensor> mailbox_ BMT_GUARDED_BY(mutex_);  // a rank may send to itself
};

}  // namespace bmtrain
