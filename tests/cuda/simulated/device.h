// The simulated device behind runtime.cpp: streams, events and memory.
//
// [Note: What is simulated]
// Device memory is memory of the host, and a stream is a thread that does what it was given, in order.
// Streams run beside each other and beside the host, with delays drawn at random if asked for: what is not
// ordered by events, by a stream or by a wait goes wrong here as it would on a device, and more often. Fresh
// device memory holds NaNs. While no stream has work, device memory can be closed to the host
// (SIMULATED_CUDA_PROTECT=1), so that a pointer to it that the host follows ends the process.
#pragma once

#include <cuda_runtime_api.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace simulated {

/// SIMULATED_CUDA_name as a number.
long setting(const char* name, long otherwise);

/// A mark that a stream passes; each record is a new one, and those who wait know which they mean.
class Event {
 public:
  std::uint64_t record();
  void complete(std::uint64_t mark);
  void wait(std::uint64_t mark);
  std::uint64_t last_recorded();
  bool is_complete();
  /// Seconds of the last completion.
  double time();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::uint64_t recorded_ = 0, completed_ = 0;
  double time_ = 0;
};

class Stream {
 public:
  explicit Stream(int device);
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  void enqueue(std::function<void()> work);
  /// Blocks the caller until everything given so far is done.
  void wait();
  void wait_for(std::chrono::milliseconds longest);
  bool is_idle();
  [[nodiscard]] int device() const { return device_; }

 private:
  void run();

  const int device_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_;
  std::uint64_t given_ = 0, done_ = 0;
  bool is_ending_ = false;
  std::thread thread_;
};

/// Calls `visit` on all streams of a device.
void for_each_stream(int device, const std::function<void(Stream&)>& visit);
/// The stream of a handle: the legacy handles mean the default stream of the calling thread's device.
Stream& stream_of(cudaStream_t handle);

// Memory. Sizes are bytes.
void* allocate_device(std::size_t size);  // nullptr: the device is full
bool release_device(void* address);
void* allocate_pinned(std::size_t size);
bool release_pinned(void* address);
bool pin(void* address, std::size_t size);
bool unpin(void* address);
bool is_device(const void* address);
bool is_pinned(const void* address);
std::size_t free_memory();
std::size_t total_memory();

/// While one exists, device memory is open to this process.
class Work {
 public:
  Work();
  ~Work();
  Work(const Work&) = delete;
  Work& operator=(const Work&) = delete;
};

int current_device();
void use_device(int device);
int num_devices();

}  // namespace simulated
