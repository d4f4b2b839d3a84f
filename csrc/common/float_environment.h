// How a thread rounds and treats denormals.
#pragma once

namespace bmtrain {

/// The calling thread's setting (torch.set_flush_denormal is per thread), to be taken over by threads that
/// compute for it, so that a result does not depend on where it was computed.
[[nodiscard]] unsigned float_environment();
void set_float_environment(unsigned environment);

/// Takes over a setting for a scope.
class FloatEnvironmentGuard {
 public:
  explicit FloatEnvironmentGuard(unsigned environment) : own_(float_environment()) {
    set_float_environment(environment);
  }
  ~FloatEnvironmentGuard() { set_float_environment(own_); }
  FloatEnvironmentGuard(const FloatEnvironmentGuard&) = delete;
  FloatEnvironmentGuard& operator=(const FloatEnvironmentGuard&) = delete;

 private:
  const unsigned own_;
};

}  // namespace bmtrain
