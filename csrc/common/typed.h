// Implementations of operators, with errors that torch knows.
#pragma once

#include <c10/util/Exception.h>

#include <utility>

#include "common/check.h"

namespace bmtrain {

/// An implementation whose errors torch knows: through an operator, only torch's own classes keep their type.
template <auto kFunction>
struct Typed;

template <typename Result, typename... Arguments, Result (*kFunction)(Arguments...)>
struct Typed<kFunction> {
  static Result call(Arguments... arguments) {
    try {
      return kFunction(std::forward<Arguments>(arguments)...);
    } catch (const TypeError& error) {
      C10_THROW_ERROR(TypeError, error.what());
    } catch (const ValueError& error) {
      C10_THROW_ERROR(ValueError, error.what());
    }
  }
};

}  // namespace bmtrain
