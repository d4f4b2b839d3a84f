// Drives OffloadUpdate with StagedCopies and SentGradients, and the queue of updates, from several threads:
// see tests/unit/test_staged_copies_races.py.
//
// The device is host memory, and each of its streams a thread that does what was queued, late and in order:
// memory that is read before an event says so is a report, on whichever side. Torch's own copies, which the
// sanitizer does not see, are replaced (the wrapped copy_ and zero_), and so are the kernels.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/check.h"
#include "common/device_runtime.h"
#include "cpu/isa.h"
#include "expect.h"
#include "optim/momentum.h"
#include "optim/offload_update.h"
#include "testing/disturbance.h"

namespace {

using bmtrain::DeviceEvent;
using bmtrain::DeviceRuntime;
using bmtrain::OffloadUpdate;
using bmtrain::SentGradients;
using bmtrain::SentNumber;
using bmtrain::StagedCopies;
using bmtrain::StagingLane;

constexpr int kBlocks = 6;
constexpr int kSlots = 2;
constexpr int kSteps = 60;
constexpr std::int64_t kLargest = 70'000;  // elements: three chunks

// Work in the order in which it was queued, by a thread that now and then is late.
class Stream {
 public:
  void queue(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }

  void drain() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void run() {
    std::uint32_t random = 1;
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();
      lock.unlock();
      random = random * 1664525 + 1013904223;
      if (random >> 31 != 0) std::this_thread::sleep_for(std::chrono::microseconds(random >> 24));
      task();
      lock.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;  // protects what follows
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_{[this] { run(); }};  // as long as the process
};

enum StreamNumber : std::int64_t { kMain, kSide, kNumOwn };

std::vector<Stream>& streams() {
  static auto* const all = new std::vector<Stream>(kNumOwn + 2);  // and the two of the lane
  return *all;
}

Stream& stream_of(std::int64_t number) { return streams().at(static_cast<std::size_t>(number)); }

thread_local std::int64_t current = kMain;
thread_local Stream* queueing =
    nullptr;  // where tensor operations of this thread go; null: they are done at once

class Event final : public DeviceEvent {
 public:
  void record(std::int64_t stream) override {
    mark_ = std::make_shared<Mark>();
    stream_of(stream).queue([mark = mark_] {
      const std::lock_guard lock(mark->mutex);
      mark->is_past = true;
      mark->passed.notify_all();
    });
  }
  void block(std::int64_t stream) override {
    if (mark_ == nullptr) return;
    stream_of(stream).queue([mark = mark_] {
      std::unique_lock lock(mark->mutex);
      mark->passed.wait(lock, [&] { return mark->is_past; });
    });
  }
  [[nodiscard]] bool is_complete() override {
    if (mark_ == nullptr) return true;
    const std::lock_guard lock(mark_->mutex);
    return mark_->is_past;
  }

 private:
  struct Mark {
    std::mutex mutex;  // protects what follows
    std::condition_variable passed;
    bool is_past = false;
  };
  std::shared_ptr<Mark> mark_;
};

class Runtime final : public DeviceRuntime {
 public:
  [[nodiscard]] std::int64_t make_stream() override { return next_++; }
  [[nodiscard]] std::int64_t current_stream() override { return current; }
  [[nodiscard]] void* native_handle(std::int64_t /*stream*/) override { return nullptr; }
  [[nodiscard]] std::unique_ptr<DeviceEvent> make_event() override { return std::make_unique<Event>(); }
  void synchronize() override {}
  void run_on(std::int64_t stream, std::function<void()> work) override {
    queueing = &stream_of(stream);
    work();
    queueing = nullptr;
  }

 private:
  std::int64_t next_ = kNumOwn;
};

void do_or_queue(std::function<void()> task) {
  if (queueing != nullptr) {
    queueing->queue(std::move(task));
  } else {
    task();
  }
}

}  // namespace

// at::Tensor::copy_ and zero_.
extern "C" at::Tensor& __wrap__ZN2at4_ops5copy_4callERNS_6TensorERKS2_b(at::Tensor& to,
                                                                        const at::Tensor& from,
                                                                        bool /*non_blocking*/) {
  expect(to.is_contiguous() && from.is_contiguous() && to.nbytes() == from.nbytes(), "tensors alike");
  do_or_queue([target = to.data_ptr(), source = from.const_data_ptr(), bytes = to.nbytes()] {
    std::memcpy(target, source, bytes);
  });
  return to;
}

extern "C" at::Tensor& __wrap__ZN2at4_ops5zero_4callERNS_6TensorE(at::Tensor& tensor) {
  do_or_queue([data = tensor.data_ptr(), bytes = tensor.nbytes()] { std::memset(data, 0, bytes); });
  return tensor;
}

namespace bmtrain {

std::shared_ptr<DeviceRuntime> device_runtime(const c10::Device& /*device*/) {
  return std::make_shared<Runtime>();
}

void cpu::momentum(const MomentumSlice* /*slices*/, std::int64_t /*num_slices*/) {
  std::abort();  // in the background
}

const cpu::KernelTable& cpu::kernel_table() {
  static const KernelTable table = [] {
    KernelTable made{};
    made.momentum = [](const MomentumSlice& slice, std::int64_t offset, std::int64_t n) {
      const auto* const grad = static_cast<const float*>(slice.grad);
      for (std::int64_t i = offset; i < offset + n; ++i) {
        slice.weight[i] += slice.factors.negative_lr * grad[i];
      }
    };
    made.ordered_sum = [](void* grad, const void* const* /*srcs*/, int /*num_srcs*/, std::int64_t offset,
                          std::int64_t n, DType /*dtype*/, DType /*src_dtype*/, bool /*accumulate*/,
                          double factor) {  // of gradients that were multiplied on the device
      for (std::int64_t i = offset; i < offset + n; ++i) {
        static_cast<float*>(grad)[i] *= static_cast<float>(factor);
      }
    };
    return made;
  }();
  return table;
}

}  // namespace bmtrain

namespace {

at::Tensor memory(std::int64_t numel) {
  const at::Tensor tensor = at::empty({numel}, at::kFloat);
  std::fill_n(tensor.mutable_data_ptr<float>(), numel, 0.0F);
  return tensor;
}

void queue_fill(std::int64_t stream, const at::Tensor& tensor, float value) {
  stream_of(stream).queue([data = tensor.mutable_data_ptr<float>(), numel = tensor.numel(), value] {
    std::fill_n(data, numel, value);
  });
}

void queue_check(std::int64_t stream, const at::Tensor& tensor, float value, const char* what) {
  stream_of(stream).queue([data = tensor.const_data_ptr<float>(), numel = tensor.numel(), value, what] {
    expect(std::all_of(data, data + numel, [value](float x) { return x == value; }), what);
  });
}

// What becomes of gradients before there is an update.
enum class Ahead : std::uint8_t { kNothing, kSent, kDropped };

struct Block {
  at::Tensor gradient, parameter;  // on the device
  at::Tensor master;
  at::Tensor sent;            // host memory
  at::Tensor factor, number;  // of the device and the host
  std::shared_ptr<OffloadUpdate> update;
};

class Training {
 public:
  Training() : lane_(std::make_shared<StagingLane>(at::kCPU, kSlots)) {
    for (int i = 0; i < kBlocks; ++i) {
      const std::int64_t numel = i % 3 == 2 ? 100 : kLargest - i;
      blocks_.push_back({memory(numel), memory(numel), memory(numel), memory(numel),
                         at::empty({}, at::kDouble), at::empty({}, at::kDouble), nullptr});
    }
    for (int i = 0; i < kSlots; ++i) slots_.push_back({memory(kLargest), memory(kLargest)});
  }

  // What the device computes: a gradient that is sent twice as large, and then multiplied by a half. The
  // copies, if they can be used.
  std::shared_ptr<SentGradients> compute(const Block& block, float gradient, Ahead ahead) {
    queue_fill(kMain, block.gradient, ahead == Ahead::kNothing ? gradient : 2 * gradient);
    if (ahead == Ahead::kNothing) return nullptr;
    auto sent =
        std::make_shared<SentGradients>(lane_, bmtrain::StagedTensors{{block.gradient}, {block.sent}});
    if (ahead == Ahead::kSent) {
      stream_of(kMain).queue([data = block.factor.mutable_data_ptr<double>()] { *data = 0.5; });
      sent->scale(std::make_shared<SentNumber>(lane_, block.factor, block.number));
    } else {
      sent->drop();
    }
    queue_fill(kMain, block.gradient, gradient);
    return ahead == Ahead::kSent ? sent : nullptr;
  }

  // What the device computes, and the updates of all blocks.
  void post(float gradient) {
    std::vector<std::shared_ptr<OffloadUpdate>> updates;
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      Block& block = blocks_[i];
      const auto ahead = static_cast<Ahead>((i + num_steps_) % 3);
      const std::shared_ptr<SentGradients> sent = compute(block, gradient, ahead);
      const Slot& slot = slots_[i % kSlots];
      const std::vector<at::Tensor> masters{block.master};
      const std::vector<at::Tensor> gradients{
          sent != nullptr ? block.sent : slot.gradients.narrow(0, 0, block.gradient.numel())};
      const std::vector<at::Tensor> parameters{slot.parameters.narrow(0, 0, block.parameter.numel())};
      bmtrain::SgdOptions options;
      options.lr = 1;
      block.update = std::make_shared<OffloadUpdate>("block " + std::to_string(i));
      const bmtrain::MomentumTensors tensors{{masters, {}, gradients}, {}, {}};
      block.update->add(tensors.step, bmtrain::slices_of(tensors, bmtrain::SgdGroups{{1}, {options}}));
      block.update->stage(std::make_shared<StagedCopies>(
          lane_, static_cast<int>(i % kSlots), bmtrain::StagedTensors{{block.gradient}, gradients},
          bmtrain::StagedTensors{{block.parameter}, parameters}, masters, sent));
      updates.push_back(block.update);
    }
    OffloadUpdate::post(updates);
    ++num_steps_;
  }

  // Each thread waits for blocks of its own and goes on in a stream of its own.
  void wait_apart(float weight) {
    std::thread other([&] {
      current = kSide;
      for (std::size_t i = 1; i < blocks_.size(); i += 2) {
        blocks_[i].update->wait();
        queue_check(kSide, blocks_[i].parameter, weight, "the weight, in another stream");
      }
      stream_of(kSide).drain();
    });
    for (std::size_t i = 0; i < blocks_.size(); i += 2) {
      blocks_[i].update->wait();
      queue_check(kMain, blocks_[i].parameter, weight, "the weight");
    }
    other.join();
  }

  // Both wait for all of them, from both ends; gradients are asked to be zeroed while they are under way.
  void wait_together(float weight) {
    for (Block& block : blocks_) expect(block.update->zero_gradients_afterwards(), "zeros afterwards");
    std::thread other([&] {
      for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block) block->update->wait();
    });
    for (Block& block : blocks_) {
      block.update->wait();
      queue_check(kMain, block.parameter, weight, "the weight");
      queue_check(kMain, block.gradient, 0, "zeros");
    }
    other.join();
  }

  // One block fails: all who wait for it are told, and the others are updated.
  void wait_for_failure(std::size_t failing, float weight) {
    std::atomic<int> told = 0;
    const auto wait = [&] {
      for (std::size_t i = 0; i < blocks_.size(); ++i) {
        try {
          blocks_[i].update->wait();
          expect(i != failing, "an error of the block that fails");
        } catch (const bmtrain::StateError&) {
          expect(i == failing, "an error of no other block");
          ++told;
        }
      }
    };
    std::thread other(wait);
    wait();
    other.join();
    expect(told == 2, "both threads told");
    for (std::size_t i = 0; i < blocks_.size(); ++i) {
      if (i != failing) queue_check(kMain, blocks_[i].parameter, weight, "the weight of another block");
    }
  }

 private:
  struct Slot {
    at::Tensor gradients, parameters;  // host memory
  };

  const std::shared_ptr<StagingLane> lane_;
  std::vector<Block> blocks_;
  std::vector<Slot> slots_;
  std::size_t num_steps_ = 0;
};

}  // namespace

int main() {
  at::set_num_threads(8);  // two workers
  Training training;
  float weight = 0;
  for (int step = 0; step < kSteps; ++step) {
    bmtrain::disturb_updates(step % 3 == 0 ? 100 : 0, "");
    weight -= static_cast<float>(step);
    training.post(static_cast<float>(step));
    if (step % 2 == 0) {
      training.wait_apart(weight);
    } else {
      training.wait_together(weight);
    }
  }
  bmtrain::disturb_updates(0, "block 3");
  training.post(1);
  training.wait_for_failure(3, weight - 1);
  stream_of(kMain).drain();
  std::puts("ok");
  std::fflush(stdout);
  std::_Exit(0);  // with the streams and the workers waiting for more
}
