#include "device.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace simulated {
namespace {

constexpr std::size_t kPage = 4096;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

thread_local int device_of_thread = 0;

/// Ranges of addresses, by their first one. The ends of the process may find them gone, so they never go.
class Ranges {
 public:
  void add(void* address, std::size_t size) {
    const std::lock_guard lock(mutex_);
    sizes_[reinterpret_cast<std::uintptr_t>(address)] = size;
  }
  /// The size of the range that begins there, which is forgotten; 0 if there is none.
  std::size_t take(void* address) {
    const std::lock_guard lock(mutex_);
    const auto found = sizes_.find(reinterpret_cast<std::uintptr_t>(address));
    if (found == sizes_.end()) return 0;
    const std::size_t size = found->second;
    sizes_.erase(found);
    return size;
  }
  bool holds(const void* address) {
    const auto wanted = reinterpret_cast<std::uintptr_t>(address);
    const std::lock_guard lock(mutex_);
    const auto after = sizes_.upper_bound(wanted);
    return after != sizes_.begin() && wanted - std::prev(after)->first < std::prev(after)->second;
  }
  void for_each(const std::function<void(void*, std::size_t)>& visit) {
    const std::lock_guard lock(mutex_);
    for (const auto& [address, size] : sizes_) visit(reinterpret_cast<void*>(address), size);
  }

 private:
  std::mutex mutex_;
  std::map<std::uintptr_t, std::size_t> sizes_;
};

template <typename T>
T& lasting() {
  static T* const object = new T();  // threads of streams outlive static objects
  return *object;
}

struct OnDevice : Ranges {};
struct Pinned : Ranges {};

struct Usage {
  std::mutex mutex;
  std::size_t bytes = 0;
  int num_at_work = 0;
};

struct Streams {
  std::mutex mutex;
  std::vector<Stream*> all;
  std::map<int, std::unique_ptr<Stream>> of_device;  // the default ones
};

bool is_protecting() {
  static const bool wanted = setting("PROTECT", 0) != 0;
  return wanted;
}

void protect_all(int access) {
  lasting<OnDevice>().for_each([&](void* address, std::size_t size) { mprotect(address, size, access); });
}

// What work refers to is about to be destroyed. Some of it may wait for ranks that have gone.
void leave_in_order() {
  for (int device = 0; device < num_devices(); ++device) {
    for_each_stream(device, [](Stream& stream) { stream.wait_for(std::chrono::seconds(1)); });
  }
}

std::size_t whole_pages(std::size_t size) { return (size + kPage - 1) / kPage * kPage; }

}  // namespace

long setting(const char* name, long otherwise) {
  const char* const text = std::getenv((std::string("SIMULATED_CUDA_") + name).c_str());
  return text == nullptr || *text == '\0' ? otherwise : std::atol(text);
}

std::uint64_t Event::record() {
  const std::lock_guard lock(mutex_);
  return ++recorded_;
}

void Event::complete(std::uint64_t mark) {
  const std::lock_guard lock(mutex_);
  if (mark > completed_) completed_ = mark;
  time_ = now();
  changed_.notify_all();
}

void Event::wait(std::uint64_t mark) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return completed_ >= mark; });
}

std::uint64_t Event::last_recorded() {
  const std::lock_guard lock(mutex_);
  return recorded_;
}

bool Event::is_complete() {
  const std::lock_guard lock(mutex_);
  return completed_ >= recorded_;
}

double Event::time() {
  const std::lock_guard lock(mutex_);
  return time_;
}

Stream::Stream(int device) : device_(device) {
  auto& streams = lasting<Streams>();
  const std::lock_guard lock(streams.mutex);
  if (streams.all.empty()) std::atexit(leave_in_order);
  streams.all.push_back(this);
}

Stream::~Stream() {
  {
    auto& streams = lasting<Streams>();
    const std::lock_guard lock(streams.mutex);
    std::erase(streams.all, this);
  }
  {
    const std::lock_guard lock(mutex_);
    is_ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Stream::enqueue(std::function<void()> work) {
  std::unique_lock lock(mutex_);
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  queue_.push_back(std::move(work));
  const std::uint64_t mine = ++given_;
  changed_.notify_all();
  static const bool is_serial = setting("SERIAL", 0) != 0;
  if (is_serial) changed_.wait(lock, [&] { return done_ >= mine; });
}

void Stream::wait() {
  std::unique_lock lock(mutex_);
  const std::uint64_t all = given_;
  changed_.wait(lock, [&] { return done_ >= all; });
}

void Stream::wait_for(std::chrono::milliseconds longest) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, longest, [&] { return done_ == given_; });
}

bool Stream::is_idle() {
  const std::lock_guard lock(mutex_);
  return done_ == given_;
}

void Stream::run() {
  use_device(device_);
  static const long longest_delay = setting("DELAY", 0);  // microseconds
  std::mt19937 generator(static_cast<unsigned>(reinterpret_cast<std::uintptr_t>(this) >> 6) +
                         static_cast<unsigned>(setting("SEED", 0)));
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return !queue_.empty() || is_ending_; });
    if (queue_.empty()) return;
    const std::function<void()> work = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    if (longest_delay > 0 && generator() % 4 == 0) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(generator() % static_cast<unsigned long>(longest_delay)));
    }
    work();
    lock.lock();
    done_ += 1;
    changed_.notify_all();
  }
}

void for_each_stream(int device, const std::function<void(Stream&)>& visit) {
  std::vector<Stream*> all;
  {
    auto& streams = lasting<Streams>();
    const std::lock_guard lock(streams.mutex);
    all = streams.all;
  }
  for (Stream* const stream : all) {
    if (stream->device() == device) visit(*stream);
  }
}

Stream& stream_of(cudaStream_t handle) {
  if (handle != nullptr && handle != cudaStreamLegacy && handle != cudaStreamPerThread) {
    return *reinterpret_cast<Stream*>(handle);
  }
  auto& streams = lasting<Streams>();
  const int device = current_device();
  {
    const std::lock_guard lock(streams.mutex);
    const auto found = streams.of_device.find(device);
    if (found != streams.of_device.end()) return *found->second;
  }
  auto made = std::make_unique<Stream>(device);
  const std::lock_guard lock(streams.mutex);
  return *streams.of_device.try_emplace(device, std::move(made)).first->second;
}

void* allocate_device(std::size_t size) {
  const std::size_t pages = whole_pages(size);
  auto& usage = lasting<Usage>();
  const std::lock_guard lock(usage.mutex);
  if (usage.bytes + pages > total_memory()) return nullptr;
  // A page that nobody may touch follows.
  void* const address = mmap(nullptr, pages + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (address == MAP_FAILED) return nullptr;
  mprotect(address, pages, PROT_READ | PROT_WRITE);
  std::memset(address, 0xff, pages);
  lasting<OnDevice>().add(address, pages);
  usage.bytes += pages;
  if (is_protecting() && usage.num_at_work == 0) mprotect(address, pages, PROT_NONE);
  return address;
}

bool release_device(void* address) {
  auto& usage = lasting<Usage>();
  const std::lock_guard lock(usage.mutex);
  const std::size_t size = lasting<OnDevice>().take(address);
  if (size == 0) return false;
  usage.bytes -= size;
  return munmap(address, size + kPage) == 0;
}

// The driver gives small allocations a part of a page.
constexpr std::size_t kShift = 512;
std::size_t shift_of(std::size_t pages) { return pages <= 16 * kPage ? kShift : 0; }

void* allocate_pinned(std::size_t size) {
  const std::size_t pages = whole_pages(size + kShift);
  void* const page = mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return nullptr;
  char* const address = static_cast<char*>(page) + shift_of(pages);
  lasting<Pinned>().add(address, pages - shift_of(pages));
  return address;
}

bool release_pinned(void* address) {
  const std::size_t size = lasting<Pinned>().take(address);
  const std::size_t shift = reinterpret_cast<std::uintptr_t>(address) % kPage;
  return size != 0 && munmap(static_cast<char*>(address) - shift, size + shift) == 0;
}

bool pin(void* address, std::size_t size) {
  if (is_pinned(address) || is_device(address)) return false;
  lasting<Pinned>().add(address, size);
  return true;
}

bool unpin(void* address) { return lasting<Pinned>().take(address) != 0; }
bool is_device(const void* address) { return lasting<OnDevice>().holds(address); }
bool is_pinned(const void* address) { return lasting<Pinned>().holds(address); }

std::size_t total_memory() { return static_cast<std::size_t>(setting("MEMORY", 4L << 30)); }

std::size_t free_memory() {
  auto& usage = lasting<Usage>();
  const std::lock_guard lock(usage.mutex);
  return total_memory() - usage.bytes;
}

Work::Work() {
  if (!is_protecting()) return;
  auto& usage = lasting<Usage>();
  const std::lock_guard lock(usage.mutex);
  if (usage.num_at_work++ == 0) protect_all(PROT_READ | PROT_WRITE);
}

Work::~Work() {
  if (!is_protecting()) return;
  auto& usage = lasting<Usage>();
  const std::lock_guard lock(usage.mutex);
  if (--usage.num_at_work == 0) protect_all(PROT_NONE);
}

int current_device() { return device_of_thread; }
void use_device(int device) { device_of_thread = device; }
int num_devices() {
  const char* const visible = std::getenv("CUDA_VISIBLE_DEVICES");
  const int all = static_cast<int>(setting("DEVICES", 1));
  if (visible == nullptr) return all;
  const std::string text = visible;
  if (text.empty() || text == "-1") return 0;
  return std::min(all, static_cast<int>(std::count(text.begin(), text.end(), ',')) + 1);
}

}  // namespace simulated
