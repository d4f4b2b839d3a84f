// DiskFile: reserved space on a drive, in a file without a name, which ends with the process.
//
// Not for several threads at once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/file_descriptor.h"

namespace bmtrain {

/// Offsets and lengths of transfers are multiples of it: the largest block of the drives that O_DIRECT meets.
constexpr std::int64_t kDiskAlignment = 4096;

/// The most bytes under one checksum, as in the manifests of checkpoints.
constexpr std::int64_t kSealBytes = std::int64_t{1} << 18;

/// A range of a file in memory, shared with the file: the kernel reads pages when they are touched, and may
/// take them away. It sees what transfers have written, and they see what is written to it.
class DiskMapping {
 public:
  DiskMapping(int file, std::int64_t offset, std::int64_t nbytes, const std::string& name);
  ~DiskMapping();
  DiskMapping(const DiskMapping&) = delete;
  DiskMapping& operator=(const DiskMapping&) = delete;

  [[nodiscard]] char* data() const { return data_; }
  [[nodiscard]] std::int64_t nbytes() const { return nbytes_; }

 private:
  char* data_;
  std::int64_t nbytes_;
};

class DiskFile {
 public:
  /// DiskError if the directory takes no file.
  explicit DiskFile(std::string directory);

  /// Makes the file `nbytes` long, all of them reserved; what is new reads as zeros. DiskError, with the
  /// bytes needed and the bytes free, if the drive has no room; the file is as long as before then.
  void reserve(std::int64_t nbytes);

  /// Maps a range that starts at a multiple of kDiskAlignment. It may outlive the file's object.
  [[nodiscard]] std::shared_ptr<DiskMapping> map(std::int64_t offset, std::int64_t nbytes) const;

  /// Makes a range zeros, which costs no transfer where the filesystem can do that.
  void zero(std::int64_t offset, std::int64_t nbytes);

  /// Records checksums of a range that is written whole, or has been read before it had any. Each covers at
  /// most kSealBytes, so that a range can be read in other pieces than it was written in.
  void seal(std::int64_t offset, std::int64_t nbytes, const void* data);
  /// Forgets the checksums of ranges that meet this one, before it is written otherwise than by transfers.
  void unseal(std::int64_t offset, std::int64_t nbytes);
  /// DiskError if a part of the range was sealed with another checksum; seals a range without any.
  void check(std::int64_t offset, std::int64_t nbytes, const void* data);
  /// The checksum of each kSealBytes of a range, the last one of what is left; empty unless all are recorded.
  [[nodiscard]] std::vector<std::uint32_t> seals(std::int64_t offset, std::int64_t nbytes) const;

  /// For messages.
  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] int descriptor() const { return descriptor_.get(); }
  [[nodiscard]] std::int64_t size() const { return size_; }
  /// Whether transfers go around the page cache; some filesystems cannot.
  [[nodiscard]] bool is_direct() const { return is_direct_; }

 private:
  struct Seal {
    std::int64_t nbytes;
    std::uint32_t sum;
  };

  const std::string directory_, name_;
  FileDescriptor descriptor_;
  bool is_direct_ = true;
  std::int64_t size_ = 0;
  std::map<std::int64_t, Seal> seals_;  // by offset; they do not overlap
};

}  // namespace bmtrain
