#include "optim/step_check.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <span>

#include "common/check.h"
#include "common/thread_pool.h"
#include "common/word_sum.h"
#include "cpu/isa.h"
#include "optim/step_tensors.h"

namespace bmtrain {
namespace {

constexpr std::int64_t kPiece = StepJournal::kPiece;
constexpr std::size_t kMostArrays = 5;

struct Array {
  void* memory;
  std::int64_t size;  // of an element
};

std::int64_t sum_of(const Array& array, std::int64_t offset, std::int64_t n) {
  return word_sum(static_cast<const char*>(array.memory) + offset * array.size,
                  static_cast<std::size_t>(n * array.size));
}

std::vector<Array> arrays_of(const cpu::StepSlice& slice, std::initializer_list<float*> state) {
  std::vector<Array> arrays = {{slice.weight, 4}};
  if (slice.rounded != nullptr) arrays.push_back({slice.rounded, size_of(slice.rounded_dtype)});
  for (float* array : state) {
    if (array != nullptr) arrays.push_back({array, 4});
  }
  arrays.push_back({const_cast<void*>(slice.grad), size_of(slice.grad_dtype)});
  return arrays;
}

std::vector<Array> arrays_of(const cpu::AdamSlice& slice) {
  return arrays_of(slice, {slice.exp_avg, slice.exp_avg_sq});
}

std::vector<Array> arrays_of(const cpu::MomentumSlice& slice) { return arrays_of(slice, {slice.momentum}); }

// Brings a part of the arrays to the second cache.
void prefetch(const std::vector<Array>& arrays, std::int64_t offset, std::int64_t n) {
  constexpr std::int64_t kLine = 64;
  for (const Array& array : arrays) {
    const char* const from = static_cast<const char*>(array.memory) + offset * array.size;
    for (std::int64_t at = 0; at < n * array.size; at += kLine) __builtin_prefetch(from + at, 0, 2);
  }
}

// Updates a piece, and meanwhile reads the next one: else the memory would have nothing to do here, and the
// processor nothing to do while the next piece is summed or saved.
template <typename Update>
void update_and_read_on(const std::vector<Array>& arrays, std::int64_t offset, std::int64_t n,
                        std::int64_t numel, const Update& update) {
  constexpr std::int64_t kPart = 256;
  for (std::int64_t at = 0; at < n; at += kPart) {
    const std::int64_t next = offset + kPiece + at;
    if (next < numel) prefetch(arrays, next, std::min(kPart, numel - next));
    update(offset + at, std::min(kPart, n - at));
  }
}

// Updates pieces that the journal does not know as done; the gradient is not written to by kernels.
template <typename Update>
void step_recorded(StepJournal& journal, std::int64_t first, const std::vector<Array>& arrays,
                   std::int64_t numel, const Update& update) {
  parallel_for(StepJournal::num_pieces_of(numel), [&](std::int64_t piece) {
    const std::int64_t offset = piece * kPiece;
    const std::int64_t n = std::min(kPiece, numel - offset);
    std::array<StepJournal::Range, kMostArrays> ranges;
    std::size_t count = 0;
    for (; count + 1 < arrays.size(); ++count) {
      ranges[count] = {static_cast<char*>(arrays[count].memory) + offset * arrays[count].size,
                       static_cast<std::size_t>(n * arrays[count].size)};
    }
    journal.run(first + piece, std::span(ranges.data(), count),
                [&] { update_and_read_on(arrays, offset, n, numel, update); });
  });
}

// Calls kernel(slice, offset, count) for all pieces.
template <typename Slice, typename Kernel>
void step_pieces(StepCheck& check, const std::vector<Slice>& slices, at::TensorList grads,
                 const Kernel& kernel) {
  BMT_CHECK(ValueError,
            slices.size() == grads.size() && check.factors.size() == grads.size() &&
                (check.journal == nullptr || check.first_pieces.size() == grads.size()),
            "checked step: expected factors for each of ", grads.size(),
            " tensors, and each with elements and in a group of its own, got ", check.factors.size(), " and ",
            slices.size(), " ranges");
  for (std::size_t s = 0; s < slices.size(); ++s) {
    const Slice& slice = slices[s];
    const std::vector<Array> arrays = arrays_of(slice);
    const auto update = [&](std::int64_t offset, std::int64_t n) {
      for (const double factor : check.factors[s])
        scale_gradient(grads[s].mutable_data_ptr(), slice.grad_dtype, factor, offset, n);
      kernel(slice, offset, n);
    };
    if (check.journal != nullptr) {
      step_recorded(*check.journal, check.first_pieces[s], arrays, slice.n, update);
      continue;
    }
    std::vector<std::atomic<std::int64_t>> before(arrays.size());
    std::vector<std::atomic<std::int64_t>> after(arrays.size());
    parallel_for(StepJournal::num_pieces_of(slice.n), [&](std::int64_t piece) {
      const std::int64_t offset = piece * kPiece;
      const std::int64_t n = std::min(kPiece, slice.n - offset);
      for (std::size_t a = 0; a < arrays.size(); ++a) before[a] += sum_of(arrays[a], offset, n);
      update_and_read_on(arrays, offset, n, slice.n, update);
      for (std::size_t a = 0; a + 1 < arrays.size(); ++a) after[a] += sum_of(arrays[a], offset, n);
    });
    check.before.insert(check.before.end(), before.begin(), before.end());
    check.after.insert(check.after.end(), after.begin(), after.end());
  }
}

}  // namespace

void StepCheck::step(const std::vector<cpu::AdamSlice>& slices, at::TensorList grads) {
  step_pieces(*this, slices, grads, [](const cpu::AdamSlice& slice, std::int64_t offset, std::int64_t n) {
    cpu::kernel_table().adam(slice, offset, n, nullptr);
  });
}

void StepCheck::step(const std::vector<cpu::MomentumSlice>& slices, at::TensorList grads) {
  step_pieces(*this, slices, grads, [](const cpu::MomentumSlice& slice, std::int64_t offset, std::int64_t n) {
    cpu::kernel_table().momentum(slice, offset, n);
  });
}

std::vector<std::int64_t> copy_and_sum(at::TensorList places, at::TensorList tensors) {
  constexpr std::size_t kBytes = std::size_t{1} << 14;
  std::vector<std::int64_t> sums;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    const at::Tensor& place = places.at(i);
    BMT_CHECK(ValueError,
              tensor.is_cpu() && tensor.is_contiguous() && place.is_cpu() && place.is_contiguous() &&
                  place.nbytes() == tensor.nbytes(),
              "copy_and_sum: expected contiguous CPU tensors of one size, got ", tensor.nbytes(),
              " bytes on ", tensor.device(), " for ", place.nbytes());
    const auto* const from = static_cast<const char*>(tensor.const_data_ptr());
    auto* const to = static_cast<char*>(place.mutable_data_ptr());
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < tensor.nbytes(); at += kBytes) {
      const std::size_t n = std::min(kBytes, tensor.nbytes() - at);
      std::memcpy(to + at, from + at, n);
      sum += static_cast<std::uint64_t>(word_sum(from + at, n));
    }
    sums.push_back(static_cast<std::int64_t>(sum));
  }
  return sums;
}

}  // namespace bmtrain
