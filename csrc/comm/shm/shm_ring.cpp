#include "comm/shm/shm_ring.h"

#include <algorithm>
#include <cstring>

#include "common/sizes.h"

namespace bmtrain {
namespace {

constexpr std::size_t kLine = 64;

}  // namespace

std::size_t ShmRingShape::descriptors_at() const {
  return round_up(static_cast<std::size_t>(2 + readers) * kLine, kPage);
}

std::size_t ShmRingShape::data_at() const {
  return descriptors_at() + round_up(kSlots * sizeof(ShmDescriptor), kPage);
}

std::size_t ShmRingShape::bytes() const { return data_at() + round_up(capacity, kPage); }

std::atomic<std::uint64_t>& ShmRing::counter(int index) const {
  return *reinterpret_cast<std::atomic<std::uint64_t>*>(base_ + static_cast<std::size_t>(index) * kLine);
}

ShmDescriptor& ShmRing::slot(std::uint64_t index) const {
  auto* const slots = reinterpret_cast<ShmDescriptor*>(base_ + shape_.descriptors_at());
  return slots[index % ShmRingShape::kSlots];
}

const ShmDescriptor& ShmRing::descriptor(std::uint64_t index) const { return slot(index); }

void ShmRingWriter::reclaim(const std::function<bool(int)>& is_gone) {
  const std::uint64_t end = published();
  std::uint64_t past = end;
  for (int reader = 0; reader < shape().readers; ++reader) {
    const std::uint64_t seen = consumed(reader);
    if (seen < past && !is_gone(reader)) {
      past = seen;
    }
  }
  for (; reclaimed_ < past; ++reclaimed_) {
    live_.pop_front();
  }
}

bool ShmRingWriter::place(std::uint64_t length, std::uint64_t* offset) {
  const std::uint64_t capacity = shape().capacity;
  if (live_.empty()) {
    *offset = 0;
  } else {
    const std::uint64_t begin = live_.front().offset;
    const std::uint64_t end = live_.back().offset + live_.back().length;
    const bool wrapped = live_.back().offset < begin;
    if (wrapped && end + length > begin) {
      return false;
    }
    if (wrapped || end + length <= touched_) {
      *offset = end;
    } else if (length <= begin) {
      *offset = 0;
    } else if (end + length <= capacity) {
      *offset = end;
    } else {
      return false;
    }
  }
  touched_ = std::max(touched_, *offset + length);
  return true;
}

std::uint64_t ShmRingWriter::write(const char* data, std::uint64_t bytes, ShmDescriptor meta,
                                   const std::function<bool(int)>& is_gone) {
  reclaim(is_gone);
  const std::uint64_t index = published();
  const std::uint64_t length = std::min(bytes, kChunk);
  const std::uint64_t rounded = round_up(length, kLine);
  if (index - reclaimed_ >= ShmRingShape::kSlots || !place(rounded, &meta.offset)) {
    return 0;
  }
  meta.length = length;
  std::memcpy(this->data() + meta.offset, data, length);
  slot(index) = meta;
  live_.push_back({meta.offset, rounded});
  counter(0).store(index + 1, std::memory_order_seq_cst);
  return length;
}

bool ShmRingWriter::has_slot(const std::function<bool(int)>& is_gone) {
  reclaim(is_gone);
  return published() - reclaimed_ < ShmRingShape::kSlots;
}

void ShmRingWriter::publish(const ShmDescriptor& meta) {
  const std::uint64_t index = published();
  slot(index) = meta;
  live_.push_back(live_.empty() ? Span{0, 0}
                                : live_.back());  // takes no space: it ends where the last one does
  counter(0).store(index + 1, std::memory_order_seq_cst);
}

const ShmDescriptor* ShmRingReader::next() {
  const std::uint64_t end = published();
  for (std::uint64_t at = consumed(reader_); at < end; ++at) {
    const ShmDescriptor& found = descriptor(at);
    if (found.reader == kEverybody || found.reader == reader_) {
      return &found;
    }
    consume();
  }
  return nullptr;
}

void ShmRingReader::consume() {
  counter(2 + reader_).fetch_add(1, std::memory_order_seq_cst);
  took_any_ = true;
}

}  // namespace bmtrain
