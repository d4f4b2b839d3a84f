// Maps each part of a file once in a process, whoever asks: for drivers whose ranks are threads. They then
// share a segment at one address, and a sanitizer sees what one writes and another reads. Link with
// --wrap=mmap and
// --wrap=munmap.
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <map>
#include <mutex>
#include <utility>

extern "C" {
void* __real_mmap(void* address, std::size_t length, int protection, int flags, int file, off_t offset);
int __real_munmap(void* address, std::size_t length);
void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int file, off_t offset);
int __wrap_munmap(void* address, std::size_t length);
}

namespace {

struct Shared {
  void* address;
  int users;
};
std::mutex shared_mutex;
std::map<std::pair<ino_t, off_t>, Shared> shared;  // by file and offset

}  // namespace

void* __wrap_mmap(void* address, std::size_t length, int protection, int flags, int file, off_t offset) {
  struct stat status{};
  if (address != nullptr || file < 0 || fstat(file, &status) != 0) {
    return __real_mmap(address, length, protection, flags, file, offset);
  }
  const std::lock_guard lock(shared_mutex);
  auto [entry, is_new] = shared.try_emplace({status.st_ino, offset}, Shared{nullptr, 0});
  if (is_new) {  // a rank's private view too: the ranks write nothing into it
    flags = (flags & ~MAP_PRIVATE) | MAP_SHARED;
    entry->second.address = __real_mmap(address, length, protection, flags, file, offset);
  }
  ++entry->second.users;
  return entry->second.address;
}

int __wrap_munmap(void* address, std::size_t length) {
  const std::lock_guard lock(shared_mutex);
  for (auto entry = shared.begin(); entry != shared.end(); ++entry) {
    if (entry->second.address == address) {
      if (--entry->second.users > 0) {
        return 0;
      }
      shared.erase(entry);
      break;
    }
  }
  return __real_munmap(address, length);
}
