// Functions that glibc has since 2.30 to 2.34, and libstdc++ since GCC 11, for a core that loads with the
// older ones of manylinux_2_28 (build_wheel.py links this file into each). Hidden, so that nobody else uses
// them.
#include <dlfcn.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <ctime>
#include <future>

#pragma GCC visibility push(hidden)

namespace {

// For functions that take a time of the system's clock: the same moment.
timespec by_system_clock(const timespec& deadline, clockid_t clock) {
  timespec now{}, system{};
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &system);
  constexpr long kSecond = 1'000'000'000;
  timespec moment{deadline.tv_sec - now.tv_sec + system.tv_sec,
                  deadline.tv_nsec - now.tv_nsec + system.tv_nsec};
  while (moment.tv_nsec < 0) {
    moment.tv_sec -= 1;
    moment.tv_nsec += kSecond;
  }
  while (moment.tv_nsec >= kSecond) {
    moment.tv_sec += 1;
    moment.tv_nsec -= kSecond;
  }
  return moment;
}

template <typename Function>
Function newer(const char* name) {
  return reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

extern "C" {

// Of libstdc++'s reference counts, which are atomic unless this says that the process has one thread.
char __libc_single_threaded = 0;

int fstat(int file, struct stat* status) noexcept {
  return static_cast<int>(syscall(SYS_fstat, file, status));
}

// glibc's own where there is one: it stays right when the system's clock is set while a thread waits.
int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                           const timespec* deadline) {
  static const auto call = newer<decltype(&pthread_cond_clockwait)>("pthread_cond_clockwait");
  if (call != nullptr) {
    return call(condition, mutex, clock, deadline);
  }
  const timespec moment = by_system_clock(*deadline, clock);
  return pthread_cond_timedwait(condition, mutex, &moment);
}

int pthread_mutex_clocklock(pthread_mutex_t* mutex, clockid_t clock, const timespec* deadline) noexcept {
  static const auto call = newer<decltype(&pthread_mutex_clocklock)>("pthread_mutex_clocklock");
  if (call != nullptr) {
    return call(mutex, clock, deadline);
  }
  const timespec moment = by_system_clock(*deadline, clock);
  return pthread_mutex_timedlock(mutex, &moment);
}

}  // extern "C"

// What std::future's timed waits do: sleeps while *address is `seen`. False if the time is over.
bool std::__atomic_futex_unsigned_base::_M_futex_wait_until_steady(unsigned* address, unsigned seen,
                                                                   bool has_timeout, chrono::seconds seconds,
                                                                   chrono::nanoseconds nanoseconds) {
  const timespec deadline{static_cast<time_t>(seconds.count()), static_cast<long>(nanoseconds.count())};
  const long done = syscall(SYS_futex, address, FUTEX_WAIT_BITSET_PRIVATE, seen,
                            has_timeout ? &deadline : nullptr, nullptr, FUTEX_BITSET_MATCH_ANY);
  return done == 0 || errno != ETIMEDOUT;
}
