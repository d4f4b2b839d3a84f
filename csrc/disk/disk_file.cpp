#include "disk/disk_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "common/check.h"
#include "common/thread_pool.h"
#include "disk/checksum.h"

namespace bmtrain {
namespace {

// A file that no path leads to. Filesystems without O_TMPFILE get one with a name, for a moment.
int open_nameless(const std::string& directory, int flags) {
  const int file = ::open(directory.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC | flags, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != ENOENT)) return file;
  std::string path = directory + "/bmtrain-tier-XXXXXX";
  const int named = ::mkostemp(path.data(), O_CLOEXEC | flags);
  if (named >= 0) ::unlink(path.c_str());
  return named;
}

}  // namespace

DiskMapping::DiskMapping(int file, std::int64_t offset, std::int64_t nbytes, const std::string& name)
    : nbytes_(nbytes) {
  void* const data =
      ::mmap(nullptr, static_cast<std::size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, file, offset);
  BMT_CHECK(DiskError, data != MAP_FAILED, name, ": mapping ", nbytes, " bytes at offset ", offset, ": ",
            std::strerror(errno));
  data_ = static_cast<char*>(data);
}

DiskMapping::~DiskMapping() { ::munmap(data_, static_cast<std::size_t>(nbytes_)); }

DiskFile::DiskFile(std::string directory)
    : directory_(std::move(directory)), name_("disk tier in " + directory_) {
  int file = open_nameless(directory_, O_DIRECT);
  if (file < 0 && errno == EINVAL) {
    is_direct_ = false;
    file = open_nameless(directory_, 0);
  }
  BMT_CHECK(DiskError, file >= 0, name_, ": cannot make a file there: ", std::strerror(errno));
  descriptor_ = FileDescriptor(file);
}

void DiskFile::reserve(std::int64_t nbytes) {
  if (nbytes <= size_) return;
  const int failure = ::posix_fallocate(descriptor(), size_, nbytes - size_);
  if (failure != 0) {
    struct statvfs drive{};
    const bool known = ::fstatvfs(descriptor(), &drive) == 0;
    if (::ftruncate(descriptor(), size_) != 0) std::abort();  // shorter always fits
    if (known && ::fstatvfs(descriptor(), &drive) != 0) drive = {};
    throw DiskError(detail::join(
        name_, ": cannot reserve space: ", std::strerror(failure), "; ", nbytes - size_,
        " bytes are needed, ", static_cast<std::uint64_t>(drive.f_bavail) * drive.f_frsize,
        " are free; free some, or name another directory in init_distributed(tier_directories=...)"));
  }
  size_ = nbytes;
}

std::shared_ptr<DiskMapping> DiskFile::map(std::int64_t offset, std::int64_t nbytes) const {
  BMT_CHECK(ValueError, offset >= 0 && nbytes > 0 && offset % kDiskAlignment == 0 && offset + nbytes <= size_,
            name_, ": map: expected an aligned range in ", size_, " bytes, got ", nbytes, " at ", offset);
  return std::make_shared<DiskMapping>(descriptor(), offset, nbytes, name_);
}

void DiskFile::zero(std::int64_t offset, std::int64_t nbytes) {
  BMT_CHECK(ValueError, offset >= 0 && nbytes > 0 && offset + nbytes <= size_, name_,
            ": zero: expected a range in ", size_, " bytes, got ", nbytes, " at ", offset);
  unseal(offset, nbytes);
  if (::fallocate(descriptor(), FALLOC_FL_ZERO_RANGE | FALLOC_FL_KEEP_SIZE, offset, nbytes) == 0) return;
  const DiskMapping range(descriptor(), offset, nbytes, name_);  // a filesystem that cannot
  std::memset(range.data(), 0, static_cast<std::size_t>(nbytes));
}

void DiskFile::seal(std::int64_t offset, std::int64_t nbytes, const void* data) {
  unseal(offset, nbytes);
  std::vector<Seal> made(static_cast<std::size_t>((nbytes + kSealBytes - 1) / kSealBytes));
  parallel_for(static_cast<std::int64_t>(made.size()), [&](std::int64_t i) {
    const std::int64_t at = i * kSealBytes;
    const std::int64_t length = std::min(kSealBytes, nbytes - at);
    made[static_cast<std::size_t>(i)] = {.nbytes = length,
                                         .sum = crc32_of(static_cast<const char*>(data) + at, length)};
  });
  for (const Seal& seal : made) {
    seals_[offset] = seal;
    offset += kSealBytes;
  }
}

void DiskFile::unseal(std::int64_t offset, std::int64_t nbytes) {
  auto first = seals_.lower_bound(offset);
  if (first != seals_.begin() && std::prev(first)->first + std::prev(first)->second.nbytes > offset) --first;
  seals_.erase(first, seals_.lower_bound(offset + nbytes));
}

void DiskFile::check(std::int64_t offset, std::int64_t nbytes, const void* data) {
  auto at = seals_.lower_bound(offset);
  if (at == seals_.end() || at->first >= offset + nbytes) {
    seal(offset, nbytes, data);
    return;
  }
  std::vector<std::pair<std::int64_t, Seal>> known;
  for (; at != seals_.end() && at->first + at->second.nbytes <= offset + nbytes; ++at)
    known.emplace_back(*at);
  std::vector<std::uint32_t> found(known.size());
  parallel_for(static_cast<std::int64_t>(known.size()), [&](std::int64_t i) {
    const auto& [begin, seal] = known[static_cast<std::size_t>(i)];
    const char* const piece = static_cast<const char*>(data) + (begin - offset);
    found[static_cast<std::size_t>(i)] = crc32_of(piece, seal.nbytes);
  });
  for (std::size_t i = 0; i < known.size(); ++i) {
    BMT_CHECK(
        DiskError, found[i] == known[i].second.sum, name_, ": ", known[i].second.nbytes, " bytes at offset ",
        known[i].first,
        " are not those that were written there: their checksum differs. The drive, or memory on the way, "
        "changed them; continue from the last checkpoint");
  }
}

std::vector<std::uint32_t> DiskFile::seals(std::int64_t offset, std::int64_t nbytes) const {
  std::vector<std::uint32_t> found;
  for (std::int64_t at = offset; at < offset + nbytes; at += kSealBytes) {
    const auto seal = seals_.find(at);
    if (seal == seals_.end() || seal->second.nbytes != std::min(kSealBytes, offset + nbytes - at)) return {};
    found.push_back(seal->second.sum);
  }
  return found;
}

}  // namespace bmtrain
