// What every transport checks before data moves.
#pragma once

#include <string>

#include "comm/communicator.h"

namespace bmtrain {

/// One operation as errors name it: `all_gather on group "zero", rank 1 of 2`.
[[nodiscard]] std::string describe(const Communicator& comm, const char* op);

/// ValueError unless 0 <= rank < size. `argument` names it ("root", "peer").
void check_rank(const Communicator& comm, const char* op, const char* argument, int rank);

/// TypeError for tensors, dtypes and devices that the operation cannot work on, ValueError for sizes and
/// ranks that do not fit, StateError for an exchange in place where the transport knows none.
void check_arguments(const Communicator& comm, const Call& call);

}  // namespace bmtrain
