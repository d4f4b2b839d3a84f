#include "optim/offload_update.h"

#include <ATen/Parallel.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <variant>

#include "common/check.h"
#include "common/per_process.h"
#include "common/race_point.h"
#include "common/thread_pool.h"
#include "cpu/isa.h"

namespace bmtrain {
namespace {

// Elements of a chunk: some tens of microseconds, so that a waiting thread finds chunks to share.
constexpr std::int64_t kChunk = std::int64_t{1} << 15;

// 0: they follow torch's.
std::atomic<int> update_threads{0};

// A backward through a graph that was recorded before the step adds to gradients that are being read.
class WaitBeforeAccumulating final : public torch::autograd::FunctionPreHook {
 public:
  explicit WaitBeforeAccumulating(std::shared_ptr<OffloadUpdate> update) : update_(std::move(update)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    update_->wait();
    return gradients;
  }
  void replace(std::shared_ptr<OffloadUpdate> update) { update_ = std::move(update); }

 private:
  std::shared_ptr<OffloadUpdate> update_;
};

using Slice = std::variant<cpu::AdamSlice, cpu::MomentumSlice>;

const cpu::StepSlice& arrays_of(const Slice& slice) {
  return std::visit([](const cpu::StepSlice& arrays) -> const cpu::StepSlice& { return arrays; }, slice);
}

void compute_piece(const Slice& slice, std::int64_t offset, std::int64_t numel) {
  const cpu::KernelTable& table = cpu::kernel_table();
  if (const auto* adam = std::get_if<cpu::AdamSlice>(&slice)) {
    table.adam(*adam, offset, numel, nullptr);
  } else {
    table.momentum(std::get<cpu::MomentumSlice>(slice), offset, numel);
  }
}

}  // namespace

// What is to be computed, shared with the workers.
struct OffloadUpdate::Plan {
  // Consecutive pieces make a chunk: many small parameters are one, a large one is many.
  struct Piece {
    std::size_t slice;
    std::int64_t offset, numel;
  };

  std::string label;
  std::vector<Slice> slices;
  std::vector<Piece> pieces;
  std::vector<std::size_t> chunk_ends;  // one past the last piece of each chunk

  // Where parameters are on a device. Dropped, with the tensors it holds, when the update is over.
  std::mutex mutex;  // protects `copies` of several waiters
  std::shared_ptr<StagedCopies> copies;
  std::once_flag arrived;
  std::vector<double> factors;  // of the gradients, once they have arrived
  std::atomic<std::size_t> num_computed = 0;

  void cut();
  void compute(std::int64_t chunk, bool zero_gradients);
  void compute_pieces(std::size_t chunk, bool zero_gradients) const;
};

OffloadUpdate::OffloadUpdate(std::string label) : label_(label), plan_(std::make_shared<Plan>()) {
  plan_->label = std::move(label);
}

template <typename Slice>
void OffloadUpdate::add(const StepTensors& tensors, const std::vector<Slice>& slices) {
  BMT_CHECK(StateError, !update_, label_, ": this update has been posted already");
  BMT_CHECK(TypeError, tensors.weights.empty() || tensors.weights[0].is_cpu(), label_,
            ": weights[0]: expected a CPU tensor, got one on ", tensors.weights[0].device());
  plan_->slices.insert(plan_->slices.end(), slices.begin(), slices.end());
}
template void OffloadUpdate::add(const StepTensors&, const std::vector<cpu::AdamSlice>&);
template void OffloadUpdate::add(const StepTensors&, const std::vector<cpu::MomentumSlice>&);

void OffloadUpdate::stage(std::shared_ptr<StagedCopies> copies) {
  BMT_CHECK(StateError, !update_, label_, ": this update has been posted already");
  plan_->copies = std::move(copies);
}

void OffloadUpdate::Plan::cut() {
  std::int64_t filled = 0;
  for (std::size_t s = 0; s < slices.size(); ++s) {
    const std::int64_t n = arrays_of(slices[s]).n;
    for (std::int64_t offset = 0; offset < n;) {
      // A piece begins where a block of 8-bit moments does.
      const std::int64_t room =
          (kChunk - filled + cpu::kMomentBlock - 1) / cpu::kMomentBlock * cpu::kMomentBlock;
      const std::int64_t numel = std::min(room, n - offset);
      pieces.push_back({.slice = s, .offset = offset, .numel = numel});
      offset += numel;
      filled += numel;
      if (filled >= kChunk) {
        chunk_ends.push_back(pieces.size());
        filled = 0;
      }
    }
  }
  if (filled > 0) chunk_ends.push_back(pieces.size());
}

void OffloadUpdate::Plan::compute(std::int64_t chunk, bool zero_gradients) {
  // First of all: an update that has failed has waited for the one before it in its slot too.
  if (copies) std::call_once(arrived, [this] { factors = copies->arrive(); });
  race_point(&label);
  compute_pieces(static_cast<std::size_t>(chunk), zero_gradients);
  if (copies && num_computed.fetch_add(1) + 1 == chunk_ends.size()) copies->give_back();
}

void OffloadUpdate::Plan::compute_pieces(std::size_t number, bool zero_gradients) const {
  for (std::size_t i = number == 0 ? 0 : chunk_ends[number - 1]; i < chunk_ends[number]; ++i) {
    const Piece& piece = pieces[i];
    const cpu::StepSlice& slice = arrays_of(slices[piece.slice]);
    // The gradient is only read by kernels, and only changed here: its copy, and zeros on behalf of its
    // owner.
    auto* const grad = static_cast<char*>(const_cast<void*>(slice.grad));
    for (const double factor : factors) {
      scale_gradient(grad, slice.grad_dtype, factor, piece.offset, piece.numel);
    }
    compute_piece(slices[piece.slice], piece.offset, piece.numel);
    if (zero_gradients) {
      const std::int64_t size = size_of(slice.grad_dtype);
      std::memset(grad + piece.offset * size, 0, static_cast<std::size_t>(piece.numel * size));
    }
  }
}

void OffloadUpdate::post(const std::vector<std::shared_ptr<OffloadUpdate>>& updates) {
  std::vector<std::shared_ptr<Update>> queued;
  std::shared_ptr<StagedCopies> before;
  for (const auto& update : updates) {
    BMT_CHECK(StateError, !update->update_, update->label_, ": this update has been posted already");
    update->plan_->cut();
    const auto num_chunks = static_cast<std::int64_t>(update->plan_->chunk_ends.size());
    update->update_ = std::make_shared<Update>(
        update->label_, num_chunks,
        [plan = update->plan_](std::int64_t chunk, bool zero) { plan->compute(chunk, zero); });
    queued.push_back(update->update_);
    if (const std::shared_ptr<StagedCopies>& copies = update->plan_->copies) {
      copies->submit(update->update_);
      if (before) before->precede(copies);
      before = copies;
      copies->begin_if_free();
    }
  }
  per_process<UpdateQueue>().post(queued, num_update_workers());
}

Update::State OffloadUpdate::state() const { return update_ ? update_->state() : Update::State::kReady; }

bool OffloadUpdate::zero_gradients_afterwards() {
  BMT_CHECK(StateError, update_, label_, ": this update has not been posted");
  std::shared_ptr<StagedCopies> copies;
  {
    const std::lock_guard<std::mutex> lock(plan_->mutex);
    copies = plan_->copies;
  }
  if (!copies) return update_->ask_for_extra();
  if (update_->state() == Update::State::kFailed) return false;
  copies->zero_gradients();
  return true;
}

void OffloadUpdate::wait() {
  BMT_CHECK(StateError, update_, label_, ": this update has not been posted");
  if (update_->run_one()) {
    parallel_for(at::get_num_threads(), [this](std::int64_t) {
      while (update_->run_one()) {
      }
    });
  }
  try {
    update_->wait();
  } catch (const std::runtime_error& error) {
    end_copies();
    throw StateError(error.what());
  }
  end_copies();
}

void OffloadUpdate::end_copies() {
  const std::lock_guard<std::mutex> lock(plan_->mutex);
  if (plan_->copies) {
    plan_->copies->join();
    plan_->copies = nullptr;
  }
}

void OffloadUpdate::guard_gradients(const std::shared_ptr<OffloadUpdate>& update,
                                    const std::vector<at::Tensor>& parameters) {
  for (const at::Tensor& parameter : parameters) {
    const auto accumulator = torch::autograd::impl::try_get_grad_accumulator(parameter);
    if (!accumulator) continue;  // no graph leads to it
    auto& hooks = accumulator->pre_hooks();
    const auto known = std::find_if(hooks.begin(), hooks.end(), [](const auto& hook) {
      return dynamic_cast<const WaitBeforeAccumulating*>(hook.get()) != nullptr;
    });
    if (known != hooks.end()) {
      static_cast<WaitBeforeAccumulating&>(**known).replace(update);
    } else {
      accumulator->add_pre_hook(std::make_unique<WaitBeforeAccumulating>(update));
    }
  }
}

bool OffloadUpdate::lead_graphs_to(const std::vector<at::Tensor>& parameters) {
  return std::any_of(parameters.begin(), parameters.end(), [](const at::Tensor& parameter) {
    return torch::autograd::impl::try_get_grad_accumulator(parameter) != nullptr;
  });
}

// One worker for every four threads that compute already: an update is bound by memory, and the thread that
// waits for it helps with all of torch's. Where the number of threads was chosen for updates, all but the
// waiting one.
int num_update_workers() {
  const int chosen = update_threads.load(std::memory_order_relaxed);
  return std::max(1, chosen > 0 ? chosen - 1 : at::get_num_threads() / 4);
}

void set_update_threads(int count) {
  BMT_CHECK(ValueError, count >= 0, "count: expected at least 0, got ", count);
  update_threads.store(count, std::memory_order_relaxed);
}

}  // namespace bmtrain
