// Drives ShmLink from several threads, for ThreadSanitizer: see tests/unit/test_shm_races.py.
//
// The ranks are threads of one process that share each segment at one address (shared_mappings.cpp), so that
// the sanitizer sees both sides of a ring: data that is read before it was published is a report.
#include <ATen/ops/from_blob.h>
#include <c10/core/CPUAllocator.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <atomic>
#include <cerrno>
#include <cfenv>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "comm/shm/shm_link.h"
#include "common/check.h"
#include "common/float_environment.h"
#include "expect.h"
#include "ranks.h"

namespace {

using bmtrain::Piece;
using bmtrain::ShmLink;
using bmtrain::ShmOperation;
using bmtrain::ShmOperationPtr;
using bmtrain::ShmPlace;

constexpr int kRanks = 3;
constexpr int kRounds = 40;

char mark(int rank, int round) { return static_cast<char>(1 + rank + 7 * round); }

// Around the size of a chunk and, in the last two rounds, together more than a ring (32 MiB) takes.
constexpr std::int64_t kLargest = 17LL << 20;
std::int64_t size_of(int round) {
  constexpr std::int64_t kSizes[] = {1, 1000, 256 * 1024, 256 * 1024 + 1, 600'000};
  return round >= kRounds - 2 ? kLargest : kSizes[round % 5];
}

// Twice more than the ring of messages (4 MiB) takes at once.
std::int64_t message_size_of(int round) { return round % (kRounds / 2) == 3 ? (5LL << 20) : 100; }

ShmOperationPtr operation_of(const char* op, std::int64_t bytes, int peer = -1) {
  auto operation = std::make_shared<ShmOperation>();
  operation->op = op;
  operation->bytes = bytes;
  operation->fingerprint = static_cast<std::uint64_t>(bytes);
  operation->message_peer = peer;
  return operation;
}

void post(ShmLink& link, const ShmOperationPtr& operation, std::vector<Piece> sends,
          std::vector<Piece> receives) {
  operation->sends = std::move(sends);
  operation->receives = std::move(receives);
  link.post(operation);
}

// Tries an operation that has to fail.
bool fails(ShmLink& link, const ShmOperationPtr& operation, std::vector<Piece> sends,
           std::vector<Piece> receives) {
  try {
    post(link, operation, std::move(sends), std::move(receives));
    link.await(*operation);
  } catch (const bmtrain::CommunicationError&) {
    return true;
  }
  return false;
}

// What one rank sends and receives. Kept from round to round: under a sanitizer fresh memory takes
// most of the time.
struct Buffers {
  std::vector<char> own;
  std::vector<std::vector<char>> others{kRanks};
};

// Everybody's bytes to everybody; posted in pairs, waited for in the order of posting.
void gather(ShmLink& link, int round, Buffers& buffers) {
  const std::int64_t bytes = size_of(round);
  const auto size = static_cast<std::size_t>(bytes);
  auto& [own, others] = buffers;
  own.assign(size, mark(link.rank(), round));
  for (std::vector<char>& other : others) other.resize(size);
  std::vector<Piece> receives;
  for (int r = 0; r < kRanks; ++r) {
    if (r != link.rank()) receives.push_back({others[static_cast<std::size_t>(r)].data(), bytes, r});
  }
  const ShmOperationPtr first = operation_of("all_gather", bytes);
  post(link, first, {{own.data(), bytes}}, receives);
  char small = mark(link.rank(), round + 1);
  std::vector<char> small_others(kRanks, 0);
  receives.clear();
  for (int r = 0; r < kRanks; ++r) {
    if (r != link.rank()) receives.push_back({&small_others[static_cast<std::size_t>(r)], 1, r});
  }
  const ShmOperationPtr second = operation_of("all_gather", 1);
  post(link, second, {{&small, 1}}, receives);
  link.await(*first);
  link.await(*second);
  for (int r = 0; r < kRanks; ++r) {
    if (r == link.rank()) continue;
    const auto& received = others[static_cast<std::size_t>(r)];
    expect(received.front() == mark(r, round) && received.back() == mark(r, round), "what the rank sent");
    expect(small_others[static_cast<std::size_t>(r)] == mark(r, round + 1), "the second one's too");
  }
}

// Messages in a circle, from a thread of their own.
void messages(ShmLink& link) {
  const int next = (link.rank() + 1) % kRanks;
  const int previous = (link.rank() + kRanks - 1) % kRanks;
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t bytes = message_size_of(round);
    std::vector<char> sent(static_cast<std::size_t>(bytes), mark(link.rank(), round));
    std::vector<char> received(sent.size(), 0);
    const ShmOperationPtr send = operation_of("send", bytes, next);
    const ShmOperationPtr receive = operation_of("recv", bytes, previous);
    send->fingerprint = receive->fingerprint = 1;
    post(link, send, {{sent.data(), bytes, next}}, {});
    post(link, receive, {}, {{received.data(), bytes, previous}});
    link.await(*receive);
    link.await(*send);
    expect(received.front() == mark(previous, round) && received.back() == mark(previous, round),
           "the message");
  }
}

std::atomic<int> num_emptied = 0;

// Gathers into buffers that the ranks write together, of which some are given back and some just dropped.
class InPlace {
 public:
  explicit InPlace(ShmLink& link) : link_(link) {}

  void round(int number) {
    gather(number);
    if (number % 3 == 0) {
      gather(number + 1);
    }
    for (const at::Tensor& gathered : gathered_) {
      if (number % 4 != 3) link_.give_back_common(gathered.data_ptr(), kRanks * kBytes);
    }
    gathered_.clear();
    exchange(number);
  }

 private:
  static constexpr std::int64_t kBytes = 400'000;

  [[nodiscard]] static at::Tensor tensor_of(c10::DataPtr memory) {
    expect(static_cast<bool>(memory), "a buffer");
    auto owner = std::make_shared<c10::DataPtr>(std::move(memory));
    return at::from_blob(owner->get(), {kRanks * kBytes}, [owner](void*) {}, at::kByte);
  }

  void gather(int number) {
    const at::Tensor& output = gathered_.emplace_back(tensor_of(link_.borrow_common(kRanks * kBytes)));
    const int slot = link_.find_common(output);
    std::vector<char> own(kBytes, mark(link_.rank(), number));
    const ShmOperationPtr operation = operation_of("all_gather", kBytes);
    operation->fingerprint = static_cast<std::uint64_t>(1000 + slot);  // the same on all ranks
    operation->place = ShmPlace::kCommon;
    operation->slot = slot;
    std::vector<Piece> receives;
    for (int r = 0; r < kRanks; ++r) {
      if (r != link_.rank()) receives.push_back({nullptr, kBytes, r});
    }
    post(link_, operation, {{own.data(), kBytes}}, receives);
    link_.await(*operation);
    const char* const data = static_cast<const char*>(output.const_data_ptr());
    for (int r = 0; r < kRanks; ++r) {
      expect(data[r * kBytes] == mark(r, number) && data[(r + 1) * kBytes - 1] == mark(r, number),
             "a slice in the common buffer");
    }
  }

  // Each rank reads its slices where the others have them, who give back meanwhile what nobody reads.
  void exchange(int number) {
    c10::DataPtr memory = link_.borrow_own(kRanks * kBytes);
    at::Tensor input = tensor_of(std::move(memory));
    input.fill_(mark(link_.rank(), number));
    const ShmOperationPtr operation = operation_of("all_to_all", kBytes);
    operation->place = ShmPlace::kOwn;
    operation->slot = link_.publish_own(input);
    operation->slices = std::make_shared<bmtrain::ShmPeerSlices>(link_.shared_from_this(), kRanks);
    std::vector<Piece> sends;
    std::vector<Piece> receives;
    for (int r = 0; r < kRanks; ++r) {
      if (r == link_.rank()) continue;
      sends.push_back({static_cast<char*>(input.data_ptr()) + r * kBytes, kBytes, r});
      receives.push_back({nullptr, kBytes, r});
    }
    post(link_, operation, sends, receives);
    link_.await(*operation);
    input.reset();
    static_cast<void>(link_.borrow_own(0));
    ++num_emptied;
    while (num_emptied < kRanks * (number + 1)) std::this_thread::yield();
    for (int r = 0; r < kRanks; ++r) {
      if (r == link_.rank()) continue;
      const char* const slice =
          static_cast<const char*>(operation->slices->by_rank[static_cast<std::size_t>(r)]);
      expect(slice[0] == mark(r, number) && slice[kBytes - 1] == mark(r, number),
             "a slice where its rank has it");
    }
    operation->slices->release();
  }

  ShmLink& link_;
  std::vector<at::Tensor> gathered_;
};

void exchange(ShmLink& link) {
  std::thread other([&link] { messages(link); });
  Buffers buffers;
  InPlace in_place(link);
  for (int round = 0; round < kRounds; ++round) {
    gather(link, round, buffers);
    in_place.round(round);
  }
  other.join();
  link.close();
}

std::atomic<int> num_posted = 0;

#if defined(__aarch64__)
constexpr std::uint64_t kFlushToZero = std::uint64_t{1} << 24;  // FZ of the register FPCR

std::uint64_t control_of_floats() {
  std::uint64_t control = 0;
  asm volatile("mrs %0, fpcr" : "=r"(control));
  return control;
}
#endif

// Whether the calling thread takes denormals for zeros; of other processors the setting is not known here.
bool flushes() {
#if defined(__x86_64__)
  return (_mm_getcsr() & 0x8040) == 0x8040;
#elif defined(__aarch64__)
  return (control_of_floats() & kFlushToZero) != 0;
#else
  return false;
#endif
}

void set_flush() {
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // read and written
#elif defined(__aarch64__)
  const std::uint64_t flushing = control_of_floats() | kFlushToZero;
  asm volatile("msr fpcr, %0" : : "r"(flushing));
#endif
}

// What is computed between the phases of an operation is computed as the thread that posted it would.
void combine_elsewhere(ShmLink& link) {
  bool found = false;
  char own = mark(link.rank(), 0);
  std::vector<char> others(kRanks, 0);
  const ShmOperationPtr operation = operation_of("all_reduce", 1);
  operation->combine = [&found] { found = flushes(); };
  std::vector<Piece> receives;
  for (int r = 0; r < kRanks; ++r) {
    if (r != link.rank()) receives.push_back({&others[static_cast<std::size_t>(r)], 1, r});
  }
  while (num_posted % kRanks != link.rank()) std::this_thread::yield();
  const std::fenv_t usual = bmtrain::float_environment();
  set_flush();
  const bool wanted = flushes();
  post(link, operation, {{&own, 1}}, receives);
  std::fesetenv(&usual);
  ++num_posted;
  link.await(*operation);  // the last one to post finds all others', and computes at once
  expect(found == wanted, "the setting of the thread that posted");
  expect(!flushes(), "and afterwards its own");
}

std::atomic<bool> is_posted = false;
std::atomic<bool> is_combined = false;

// An error between the phases is the operation's, also where the thread that computes is the link's own: here
// the one of the last rank, which sends more than a ring takes, and waits for nothing before it has computed.
void combine_in_vain(ShmLink& link) {
  const bool is_last = link.rank() == kRanks - 1;
  const auto size_from = [](int rank) { return rank == kRanks - 1 ? 2 * kLargest : 1; };
  std::vector<char> own(static_cast<std::size_t>(size_from(link.rank())), mark(link.rank(), 0));
  std::vector<std::vector<char>> others(kRanks);
  const ShmOperationPtr operation = operation_of("all_reduce", 2 * kLargest);
  operation->combine = [is_last, posted_by = std::this_thread::get_id()] {
    if (is_last) {
      expect(std::this_thread::get_id() != posted_by, "a computation of the link's thread");
      is_combined = true;
      is_combined.notify_one();
    }
    throw std::bad_alloc();
  };
  std::vector<Piece> receives;
  for (int r = 0; r < kRanks; ++r) {
    if (r == link.rank()) continue;
    std::vector<char>& other = others[static_cast<std::size_t>(r)];
    other.resize(static_cast<std::size_t>(size_from(r)));
    receives.push_back({other.data(), size_from(r), r});
  }
  if (!is_last) is_posted.wait(false);  // before it nobody makes room in the ring
  post(link, operation, {{own.data(), size_from(link.rank())}}, receives);
  if (is_last) {
    is_posted = true;
    is_posted.notify_all();
    is_combined.wait(false);
  }
  bool raised = false;
  try {
    link.await(*operation);
  } catch (const bmtrain::CommunicationError& error) {
    raised = std::string(error.what()).find("bad_alloc") != std::string::npos;
  }
  expect(raised, "the error of the computation");
}

// Has none for slices of an exchange that is copied.
class Memory final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    if (bytes == kNone) throw std::bad_alloc();
    return torchs_->allocate(bytes);
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  static constexpr std::int64_t kNone = 12345;

 private:
  c10::Allocator* const torchs_ = c10::GetCPUAllocator();
};

std::atomic<bool> is_closed = false;

// With `closes` one rank has closed its link before the others send.
void exchange_without_memory(ShmLink& link, bool closes) {
  constexpr std::int64_t kBytes = Memory::kNone;
  std::vector<char> input(kRanks * kBytes, mark(link.rank(), 0));
  const ShmOperationPtr operation = operation_of("all_to_all", kBytes);
  operation->slices = std::make_shared<bmtrain::ShmPeerSlices>(link.shared_from_this(), kRanks);
  std::vector<Piece> sends;
  std::vector<Piece> receives;
  for (int r = 0; r < kRanks; ++r) {
    if (r == link.rank()) continue;
    sends.push_back({input.data() + r * kBytes, kBytes, r});
    receives.push_back({nullptr, kBytes, r});
  }
  if (closes && link.rank() != 0) is_closed.wait(false);
  bool raised = false;
  try {
    post(link, operation, sends, receives);
    if (closes && link.rank() == 0) {
      link.close();
      is_closed = true;
      is_closed.notify_all();
    }
    link.await(*operation);
  } catch (const bmtrain::CommunicationError&) {
    raised = true;
  }
  expect(raised, "an error where there is no memory");
}

// One rank gives up while the others wait for it.
void abort_one(ShmLink& link) {
  if (link.rank() == 1) {
    link.abort("on request");
    return;
  }
  bool raised = false;
  try {
    Buffers buffers;
    gather(link, 2, buffers);
  } catch (const bmtrain::CommunicationError&) {
    raised = true;
  }
  expect(raised, "an error on the ranks that wait");
}

void run_ranks(void (*work)(ShmLink&)) {
  std::vector<int> files;
  for (int r = 0; r < kRanks; ++r) files.push_back(memory_file(ShmLink::segment_bytes(kRanks)));
  run_in_threads(kRanks, [&files, work](int rank) {
    const auto link =
        std::make_shared<ShmLink>(files, std::vector<int>(2 * kRanks, -1), rank, kRanks, "test", 60.0);
    work(*link);
  });
  for (const int file : files) ::close(file);
}

}  // namespace

// A signal comes during every second call.
extern "C" {
int __real_fallocate(int file, int mode, off_t offset, off_t length);
int __wrap_fallocate(int file, int mode, off_t offset, off_t length) {
  thread_local bool comes = false;
  comes = !comes;
  if (!comes) return __real_fallocate(file, mode, offset, length);
  errno = EINTR;
  return -1;
}
}

int main() {
  run_ranks(exchange);
  run_ranks(combine_elsewhere);
  run_ranks(combine_in_vain);
  Memory memory;
  c10::SetCPUAllocator(&memory, /*priority=*/1);
  run_ranks([](ShmLink& link) { exchange_without_memory(link, /*closes=*/false); });
  run_ranks([](ShmLink& link) { exchange_without_memory(link, /*closes=*/true); });
  for (int i = 0; i < 10; ++i) run_ranks(abort_one);
  std::puts("ok");
}
