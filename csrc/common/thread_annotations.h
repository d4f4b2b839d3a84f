// Mutexes whose contracts clang checks: the data that a mutex guards, and the functions that expect it to be
// held.
//
// tests/run.sh has clang-tidy check them (-Wthread-safety); for other compilers the annotations are comments.
// The classes add nothing to those of the standard library, which has no annotations, except the annotations.
//
//     Mutex mutex_;
//     std::deque<Update> updates_ BMT_GUARDED_BY(mutex_);
//     void drop_oldest() BMT_REQUIRES(mutex_);
//
//     Lock lock(mutex_);
//     wake_.wait(lock, [this]() BMT_REQUIRES(mutex_) { return !updates_.empty(); });
#pragma once

#include <mutex>

#if defined(__clang__)
#define BMT_THREAD_ATTRIBUTE(...) __attribute__((__VA_ARGS__))
#else
#define BMT_THREAD_ATTRIBUTE(...)
#endif

/// Data that is read and written only while `mutex` is held.
#define BMT_GUARDED_BY(mutex) BMT_THREAD_ATTRIBUTE(guarded_by(mutex))
/// A function whose caller holds the mutex.
#define BMT_REQUIRES(...) BMT_THREAD_ATTRIBUTE(requires_capability(__VA_ARGS__))
/// A function that takes the mutex, which its caller therefore must not hold.
#define BMT_EXCLUDES(...) BMT_THREAD_ATTRIBUTE(locks_excluded(__VA_ARGS__))
/// A function that clang cannot follow; a comment gives the reason why it is correct.
#define BMT_UNCHECKED BMT_THREAD_ATTRIBUTE(no_thread_safety_analysis)

namespace bmtrain {

class BMT_THREAD_ATTRIBUTE(capability("mutex")) Mutex : public std::mutex {
 public:
  void lock() BMT_THREAD_ATTRIBUTE(acquire_capability()) { std::mutex::lock(); }
  void unlock() BMT_THREAD_ATTRIBUTE(release_capability()) { std::mutex::unlock(); }
};

/// Holds a mutex for a scope. A condition variable takes it as the std::unique_lock that it is.
class BMT_THREAD_ATTRIBUTE(scoped_lockable) Lock : public std::unique_lock<std::mutex> {
 public:
  explicit Lock(Mutex& mutex) BMT_THREAD_ATTRIBUTE(acquire_capability(mutex))
      : std::unique_lock<std::mutex>(mutex) {}
  ~Lock() BMT_THREAD_ATTRIBUTE(release_capability()) = default;
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  void lock() BMT_THREAD_ATTRIBUTE(acquire_capability()) { std::unique_lock<std::mutex>::lock(); }
  void unlock() BMT_THREAD_ATTRIBUTE(release_capability()) { std::unique_lock<std::mutex>::unlock(); }
};

}  // namespace bmtrain
