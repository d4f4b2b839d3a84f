// How a thread rounds and treats denormals.
#pragma once

#include <cfenv>

namespace bmtrain {

/// The calling thread's setting (torch.set_flush_denormal is per thread), to be taken over by threads that
/// compute for it, so that a result does not depend on where it was computed.
[[nodiscard]] inline std::fenv_t float_environment() {
  std::fenv_t environment = {};
  std::fegetenv(&environment);
  return environment;
}

/// Takes over a setting for a scope.
class FloatEnvironmentGuard {
 public:
  explicit FloatEnvironmentGuard(const std::fenv_t& environment) : own_(float_environment()) {
    std::fesetenv(&environment);
  }
  ~FloatEnvironmentGuard() { std::fesetenv(&own_); }
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  FloatEnvironmentGuard& operator=(const FloatEnvironmentGuard&) = delete;

 private:
  const std::fenv_t own_;
};

}  // namespace bmtrain
