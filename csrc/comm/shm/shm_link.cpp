#include "comm/shm/shm_link.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>

#include "common/check.h"

namespace bmtrain {
namespace {

// What may be under way of one rank's collectives, and of its messages to one peer. More than that goes in
// several rounds.
constexpr std::uint64_t kCollectiveBytes = 32ULL << 20;
constexpr std::uint64_t kMessageBytes = 4ULL << 20;
constexpr std::size_t kHeaderBytes = 16384;
// How long a sleeper goes without looking whether a peer has died.
constexpr int kLookMilliseconds = 50;
// Looks at the bell before sleeping on it: a peer that is just copying is ready within microseconds.
constexpr int kLooks = 20;

constexpr std::size_t kTableAt = 2048;  // within the header

static_assert(Piece::kEveryPeer == ShmRing::kEverybody);
static_assert(sizeof(ShmHeader) <= kTableAt && kTableAt + sizeof(ShmHeapTable) <= kHeaderBytes);

ShmRingShape collective_shape(int size) { return {size, kCollectiveBytes}; }
ShmRingShape message_shape() { return {1, kMessageBytes}; }

char* collective_ring(const ShmSegment& segment) { return segment.data() + kHeaderBytes; }

char* message_ring(const ShmSegment& segment, int size, int peer) {
  return collective_ring(segment) + collective_shape(size).bytes() +
         static_cast<std::size_t>(peer) * message_shape().bytes();
}

std::vector<ShmHeapTable*> tables_of(const std::vector<ShmSegment>& segments) {
  std::vector<ShmHeapTable*> tables;
  tables.reserve(segments.size());
  for (const ShmSegment& segment : segments) {
    tables.push_back(reinterpret_cast<ShmHeapTable*>(segment.data() + kTableAt));
  }
  return tables;
}

void copy_text(char* to, std::size_t size, std::string_view text) {
  const std::size_t length = std::min(text.size(), size - 1);
  std::memcpy(to, text.data(), length);
  to[length] = '\0';
}

}  // namespace

std::size_t ShmLink::segment_bytes(int size) {
  BMT_CHECK(ValueError, size >= 1, "size: expected at least 1, got ", size);
  return kHeaderBytes + collective_shape(size).bytes() +
         static_cast<std::size_t>(size) * message_shape().bytes();
}

ShmLink::ShmLink(const std::vector<int>& files, std::vector<int> watches, int rank, int size,
                 std::string name, double timeout_seconds)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      timeout_(static_cast<std::int64_t>(std::max(timeout_seconds, 0.001) * 1000)),
      watches_(std::move(watches)),
      process_(getpid()),
      collective_writer_(nullptr, {}) {
  BMT_CHECK(ValueError, size_ >= 1 && 0 <= rank_ && rank_ < size_, "communicator \"", name_,
            "\": rank must be within 0 to size - 1, got rank ", rank_, " of ", size_);
  BMT_CHECK(ValueError, files.size() == index(size_) && watches_.size() == 2 * index(size_),
            "communicator \"", name_, "\": expected ", size_, " files and ", 2 * size_, " watches, got ",
            files.size(), " and ", watches_.size());
  for (const int file : files) {
    segments_.emplace_back(file, segment_bytes(size_));
  }
  heap_ = std::make_unique<ShmHeap>(files, tables_of(segments_), rank_, segment_bytes(size_));
  collective_writer_ = ShmRingWriter(collective_ring(segments_[index(rank_)]), collective_shape(size_));
  for (int peer = 0; peer < size_; ++peer) {
    const ShmSegment& theirs = segments_[index(peer)];
    collective_readers_.emplace_back(collective_ring(theirs), collective_shape(size_), rank_);
    message_readers_.emplace_back(message_ring(theirs, size_, rank_), message_shape(), 0);
    message_writers_.emplace_back(message_ring(segments_[index(rank_)], size_, peer), message_shape());
  }
  peers_.resize(index(size_));
  messages_sent_.resize(index(size_));
  messages_received_.resize(index(size_));
  background_ = std::thread([this] { run_in_background(); });
}

ShmLink::~ShmLink() {
  if (getpid() != process_) {
    background_.detach();
    return;
  }
  stop_.store(true);
  segments_[index(rank_)].call_urgently();
  background_.join();
  leave();
  for (const int watch : watches_) {
    if (watch >= 0) {
      ::close(watch);
    }
  }
}

std::string ShmLink::describe(const ShmOperation& operation) const {
  return bmtrain::describe(operation, name_, rank_, size_);
}

void ShmLink::post(const ShmOperationPtr& operation) {
  std::vector<ShmOperationPtr> finished;
  const Lock lock(mutex_);
  finished.swap(finished_);
  const int peer = operation->message_peer;
  auto& messages = operation->sends.empty() ? messages_received_ : messages_sent_;
  std::int64_t& count = peer < 0 ? sequence_ : messages[index(peer)];
  operation->sequence = count;
  if (!standing_.is_open()) {
    standing_.refuse(describe(*operation));
  }
  ++count;
  const auto enqueue = [&](Queue& queue, const Piece& piece) {
    if (piece.bytes > 0) {
      operation->left[piece.phase] += 1;
      queue.push_back({operation, piece});
    }
  };
  operation->environment = float_environment();
  for (const Piece& piece : operation->sends) {
    enqueue(peer < 0 ? collective_sends_ : peers_[index(peer)].sends, piece);
  }
  for (const Piece& piece : operation->receives) {
    Peer& from = peers_[index(piece.peer)];
    enqueue(peer < 0 ? from.collectives : from.messages, piece);
  }
  settle(*operation);
  progress();
}

bool ShmLink::progress() {
  if (standing_.is_aborted) {
    return false;
  }
  bool moved = send_queue(collective_sends_, collective_writer_);
  for (int peer = 0; peer < size_ && !standing_.is_aborted; ++peer) {
    if (peer != rank_) {
      Peer& other = peers_[index(peer)];
      moved |= send_queue(other.sends, message_writers_[index(peer)]);
      moved |= receive_queue(other.collectives, collective_readers_[index(peer)], peer);
      moved |= receive_queue(other.messages, message_readers_[index(peer)], peer);
    }
  }
  return moved;
}

bool ShmLink::send_queue(Queue& queue, ShmRingWriter& ring) {
  bool moved = false;
  while (!queue.empty()) {
    Pending& pending = queue.front();
    ShmOperation& operation = *pending.operation;
    if (pending.piece.phase == 1 && !operation.combined) {
      break;
    }
    const bool is_message = operation.message_peer >= 0;
    ShmDescriptor meta{};
    meta.slot = operation.slot;
    meta.sequence = operation.sequence;
    meta.bytes = operation.bytes;
    meta.fingerprint = operation.fingerprint;
    meta.reader = is_message ? ShmRing::kEverybody : pending.piece.peer;
    copy_text(meta.op, sizeof(meta.op), operation.op);
    const auto is_past = [&](int reader) BMT_REQUIRES(mutex_) {
      const int peer = is_message ? operation.message_peer : reader;
      return peer == rank_ || is_gone(peer);
    };
    std::uint64_t written = send_some(pending, ring, meta, is_past);
    if (written == 0) {
      // A reader that makes room after this looks at the mark; one that did so before is found by a second
      // try.
      ring.set_blocked(true);
      written = send_some(pending, ring, meta, is_past);
      if (written == 0) {
        std::vector<int> behind;
        add_readers_behind(pending, behind);
        for (const int peer : behind) {
          segments_[index(peer)].call_urgently();
        }
        return moved;
      }
    }
    moved = true;
    notify(pending.piece.peer);
    pending.moved += static_cast<std::int64_t>(written);
    if (pending.moved == pending.piece.bytes) {
      retire(queue);
    }
  }
  ring.set_blocked(false);
  return moved;
}

bool ShmLink::receive_queue(Queue& queue, ShmRingReader& ring, int peer) {
  bool moved = false;
  while (true) {
    const ShmDescriptor* const chunk = ring.next();
    if (ring.took_any() && ring.writer_is_blocked()) {
      segments_[index(peer)].call();
      segments_[index(peer)].call_urgently();
    }
    if (chunk == nullptr || queue.empty()) {  // nothing came, or its operation was not posted here yet
      return moved;
    }
    Pending& pending = queue.front();
    ShmOperation& operation = *pending.operation;
    const auto length = static_cast<std::int64_t>(chunk->length);
    if (chunk->fingerprint != operation.fingerprint || chunk->sequence != operation.sequence ||
        length > pending.piece.bytes - pending.moved) {
      abort_locked(detail::join(describe(operation), ": rank ", peer, " is in another operation: ", chunk->op,
                                " #", chunk->sequence, " (", chunk->bytes,
                                " bytes); all ranks must call the same operations in the same order"));
      return moved;
    }
    receive_chunk(pending, *chunk, ring, peer);
    if (standing_.is_aborted) {
      return moved;
    }
    ring.consume();
    moved = true;
    pending.moved += length;
    if (pending.moved == pending.piece.bytes) {
      retire(queue);
    }
  }
}

void ShmLink::retire(Queue& queue) {
  const Pending through = std::move(queue.front());
  queue.pop_front();
  through.operation->left[through.piece.phase] -= 1;
  settle(*through.operation);
  if (through.operation->done) {
    finished_.push_back(through.operation);
  }
  if (standing_.is_closed && !is_busy()) {
    leave();
  }
}

void ShmLink::settle(ShmOperation& operation) {
  if (operation.left[0] == 0 && !operation.combined) {
    try {
      if (operation.combine) {
        const FloatEnvironmentGuard guard(operation.environment);
        operation.combine();
      }
    } catch (const std::exception& error) {  // not of the thread that happens to be here
      abort_locked(detail::join(describe(operation), ": ", error.what()));
      return;
    }
    operation.combined = true;
  }
  if (operation.combined && operation.left[0] == 0 && operation.left[1] == 0 && !operation.done) {
    operation.done = true;
    segments_[index(rank_)].call();  // whoever waits for it here
  }
}

void ShmLink::notify(int peer) const {
  for (int other = 0; other < size_; ++other) {
    if (other != rank_ && (peer == ShmRing::kEverybody || peer == other)) {
      segments_[index(other)].call();
    }
  }
}

void ShmLink::run_in_background() {
  ShmHeader& mine = header(rank_);
  while (!stop_.load()) {
    const std::uint32_t seen = mine.urgent.count();
    bool moved = false;
    {
      const Lock lock(mutex_);
      try {
        moved = progress();
      } catch (const std::exception& error) {
        abort_locked(detail::join("the thread that moves data of group \"", name_, "\": ", error.what()));
      }
    }
    if (!moved && !stop_.load()) {
      mine.urgent.sleep(seen, 60'000);
    }
  }
}

bool ShmLink::is_done(ShmOperation& operation) {
  const Lock lock(mutex_);
  if (!operation.done) {
    progress();
  }
  return operation.done;
}

void ShmLink::await(ShmOperation& operation) {
  const auto deadline = std::chrono::steady_clock::now() + timeout_;
  ShmBell& bell = header(rank_).bell;
  std::vector<ShmOperationPtr> finished;
  std::vector<at::Tensor> tensors, kept;
  std::function<void()> combine;
  Lock lock(mutex_);
  while (true) {
    const std::uint32_t seen = bell.count();
    if (operation.done) {
      if (operation.place == ShmPlace::kCommon) {
        heap_->settle(static_cast<std::uint64_t>(operation.sequence) + 1);
      }
      finished.swap(finished_);
      tensors = {std::move(operation.from), std::move(operation.to)};
      kept.swap(operation.kept);
      combine.swap(operation.combine);
      return;
    }
    if (progress()) {
      continue;
    }
    if (standing_.is_aborted) {
      standing_.refuse(describe(operation));
    }
    const std::vector<int> waited_for = blockers(operation);
    for (const int peer : waited_for) {
      if (is_gone(peer) && !progress()) {  // what it sent before it went still counts
        fail_lost(operation, peer);
      }
    }
    if (std::chrono::steady_clock::now() >= deadline) {
      fail_late(operation, waited_for);
    }
    sleep_until_called(lock, seen, deadline);
  }
}

void ShmLink::sleep_until_called(Lock& lock, std::uint32_t seen,
                                 std::chrono::steady_clock::time_point deadline) {
  ShmBell& bell = header(rank_).bell;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
  lock.unlock();
  for (int look = 0; look < kLooks && bell.count() == seen; ++look) {
    std::this_thread::yield();
  }
  if (bell.count() == seen) {
    bell.sleep(seen, static_cast<int>(std::clamp<std::int64_t>(left.count(), 1, kLookMilliseconds)));
  }
  lock.lock();
  if (bell.count() == seen) {
    poll_peer_exits();
  }
}

void ShmLink::close() {
  if (getpid() != process_) {
    return;  // the lock may be held for ever in a forked child
  }
  const Lock lock(mutex_);
  if (standing_.is_closed) {
    return;
  }
  standing_.is_closed = true;
  if (!is_busy()) {
    leave();
  }
}

bool ShmLink::is_busy() const {
  return !collective_sends_.empty() || std::any_of(peers_.begin(), peers_.end(), [](const Peer& peer) {
    return !(peer.collectives.empty() && peer.messages.empty() && peer.sends.empty());
  });
}

void ShmLink::leave() {
  if (!standing_.is_aborted) {
    header(rank_).state.store(ShmState::kClosed);
  }
  notify(ShmRing::kEverybody);
}

bool ShmLink::closed() {
  const Lock lock(mutex_);
  return standing_.is_closed;
}

}  // namespace bmtrain
