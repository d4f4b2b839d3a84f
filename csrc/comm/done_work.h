// The work of an operation that has nothing left to do once it was issued: on CUDA what it did is in the
// order of the current stream.
#pragma once

#include "comm/communicator.h"

namespace bmtrain {

class DoneWork final : public Work {
 public:
  void wait() override {}
  [[nodiscard]] bool is_completed() override { return true; }
};

}  // namespace bmtrain
