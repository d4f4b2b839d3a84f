// Drives UpdateQueue from several threads, for ThreadSanitizer: see tests/unit/test_update_queue.py.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "expect.h"
#include "optim/update_queue.h"

namespace {

using bmtrain::Update;
using bmtrain::UpdateQueue;

constexpr int kChunks = 32;
constexpr int kRounds = 200;

// Plain memory, written by whoever computes a chunk and read by whoever has waited.
struct Block {
  std::vector<int> values = std::vector<int>(kChunks, 0);
  std::shared_ptr<Update> update;
};

void post(UpdateQueue& queue, std::vector<Block>& blocks, int failing) {
  std::vector<std::shared_ptr<Update>> updates;
  for (std::size_t i = 0; i < blocks.size(); ++i) {
    Block& block = blocks[i];
    block.update = std::make_shared<Update>(
        "block " + std::to_string(i), kChunks, [&block, i, failing](std::int64_t chunk, bool with_extra) {
          if (static_cast<int>(i) == failing && chunk == kChunks / 2) throw std::runtime_error("on request");
          block.values[static_cast<std::size_t>(chunk)] += with_extra ? 2 : 1;
        });
    updates.push_back(block.update);
  }
  queue.post(updates, 2);
}

void help_and_wait(Update& update) {
  while (update.run_one()) {
  }
  update.wait();
}

int increment_of(const Block& block) {
  const int increment = block.values.front();
  for (const int value : block.values) expect(value == increment, "every chunk once, and all alike");
  return increment;
}

}  // namespace

int main() {
  UpdateQueue& queue = *new UpdateQueue;  // its threads live as long as the process
  for (int round = 0; round < kRounds; ++round) {
    std::vector<Block> blocks(4);
    post(queue, blocks, -1);
    const bool extra = blocks[3].update->ask_for_extra();
    std::thread other([&] { help_and_wait(*blocks[1].update); });
    for (Block& block : blocks) {
      help_and_wait(*block.update);
      expect(block.update->state() == Update::State::kDone, "done after the wait");
    }
    other.join();
    for (std::size_t i = 0; i < blocks.size(); ++i) {
      expect(increment_of(blocks[i]) == (i == 3 && extra ? 2 : 1), "the extra part where it was granted");
    }
    expect(!blocks[0].update->ask_for_extra(), "no extra part afterwards");
  }
  std::vector<Block> blocks(3);
  post(queue, blocks, 1);
  std::string error;
  for (Block& block : blocks) {
    try {
      block.update->wait();
    } catch (const std::runtime_error& failure) {
      error = failure.what();
    }
  }
  expect(error == "block 1: the update of its parameters failed: on request", "the error, with the label");
  expect(blocks[1].update->state() == Update::State::kFailed, "failed");
  expect(increment_of(blocks[0]) == 1 && increment_of(blocks[2]) == 1, "the others unharmed");
  std::puts("ok");
  std::fflush(stdout);
  std::_Exit(0);  // with the workers waiting for more
}
