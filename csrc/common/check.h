// Typed errors of the core, and the macros that raise them.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace bmtrain {

/// A value of the right type that is not acceptable (becomes Python's ValueError).
struct ValueError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// A tensor of the wrong dtype, device or layout (becomes Python's TypeError).
struct TypeError : std::invalid_argument {
  using std::invalid_argument::invalid_argument;
};

/// A call in a state that does not allow it (becomes Python's RuntimeError).
struct StateError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A peer is gone, late, or did something else (becomes bmtrain.errors.CommunicationError).
struct CommunicationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A file of a disk tier cannot be made, grown, read or written, or holds other bytes than were written to it
/// (becomes bmtrain.errors.DiskError).
struct DiskError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

namespace detail {
template <typename... Parts>
[[nodiscard]] std::string join(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}
}  // namespace detail
}  // namespace bmtrain

/// BMT_CHECK(ErrorType, condition, "message ", parts...): throws ErrorType unless condition holds.
#define BMT_CHECK(Error, condition, ...)                            \
  do {                                                              \
    if (!(condition)) [[unlikely]] {                                \
      throw ::bmtrain::Error(::bmtrain::detail::join(__VA_ARGS__)); \
    }                                                               \
  } while (false)
