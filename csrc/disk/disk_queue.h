// DiskQueue: buffers in memory, and transfers between them and files that continue behind the caller's back.
//
// [Note: Threads of the disk tier]
// A queue belongs to the one thread that calls it: calls are made one at a time, and a buffer is used by its
// owner or by its transfer, never by both. Transfers are carried out by the kernel (io_uring) or by a thread
// pool of torch's, one for each queue; a task shares nothing with the caller but the future of its result.
// Checksums are computed in calls, by the kernel pool. A forked child's calls raise StateError.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "disk/disk_file.h"

namespace bmtrain {

class DiskQueue {
 public:
  /// Returns a queue of the back end "io_uring" or "threads"; "auto": io_uring where the kernel allows it.
  /// DiskError if io_uring was asked for and is refused, ValueError for another name.
  [[nodiscard]] static std::shared_ptr<DiskQueue> make(const std::string& back_end, int num_buffers,
                                                       std::int64_t buffer_bytes);

  virtual ~DiskQueue();
  DiskQueue(const DiskQueue&) = delete;
  DiskQueue& operator=(const DiskQueue&) = delete;

  [[nodiscard]] int num_buffers() const { return static_cast<int>(transfers_.size()); }
  [[nodiscard]] std::int64_t buffer_bytes() const { return buffer_bytes_; }
  /// Page-aligned memory; none if the queue's buffers have 0 bytes.
  [[nodiscard]] char* buffer(int number) const { return memory_ + number * buffer_bytes_; }

  /// Starts to fill a buffer from a file, or to write it there, which seals the range. Offsets and lengths
  /// are multiples of kDiskAlignment. The buffer belongs to the transfer until `wait` has returned; `memory`,
  /// if there is any, is at least as long and aligned, and takes its place.
  void read(int buffer, std::shared_ptr<DiskFile> file, std::int64_t offset, std::int64_t nbytes,
            std::shared_ptr<char> memory = nullptr);
  void write(int buffer, std::shared_ptr<DiskFile> file, std::int64_t offset, std::int64_t nbytes,
             std::shared_ptr<char> memory = nullptr);

  /// Waits for a buffer's transfer, if there is one. DiskError if it failed, or if what was read is not what
  /// the range was sealed with. Then the buffer is the caller's again, in any case.
  void wait(int buffer);

  /// Bytes that transfers have moved since the queue was made.
  [[nodiscard]] std::int64_t bytes_read() const { return bytes_read_; }
  [[nodiscard]] std::int64_t bytes_written() const { return bytes_written_; }

  /// Calls of io_uring_enter.
  [[nodiscard]] std::int64_t num_calls() const { return num_calls_; }

  [[nodiscard]] virtual const char* back_end() const = 0;
  /// Why it is not io_uring; empty where it is, or where it was not asked for.
  [[nodiscard]] const std::string& reason() const { return reason_; }

 protected:
  // One buffer's transfer. Partial ones are continued.
  struct Transfer {
    std::shared_ptr<DiskFile> file;  // null: none
    std::shared_ptr<char> memory;    // null: the buffer
    std::int64_t offset = 0, nbytes = 0, done = 0;
    bool is_write = false;
  };

  DiskQueue(int num_buffers, std::int64_t buffer_bytes);

  /// Starts what is left of a buffer's transfer.
  virtual void submit(int buffer) = 0;
  /// Waits for it; returns the bytes moved, or a negative error number. Once for each `submit`.
  virtual std::int64_t complete(int buffer) = 0;

  [[nodiscard]] const Transfer& transfer(int buffer) const {
    return transfers_[static_cast<std::size_t>(buffer)];
  }
  /// Where the bytes of a buffer's transfer are.
  [[nodiscard]] char* data(const Transfer& transfer, int buffer) const {
    return transfer.memory ? transfer.memory.get() : this->buffer(buffer);
  }
  [[nodiscard]] bool is_forked() const;
  void count_call() { ++num_calls_; }
  /// Waits for all transfers, whatever their result; the destructor of a back end calls it first.
  void drain() noexcept;

 private:
  void start(int buffer, Transfer transfer);

  const std::int64_t buffer_bytes_;
  const pid_t owner_;
  char* memory_ = nullptr;
  std::vector<Transfer> transfers_;
  std::int64_t bytes_read_ = 0, bytes_written_ = 0, num_calls_ = 0;
  std::string reason_;
};

}  // namespace bmtrain
