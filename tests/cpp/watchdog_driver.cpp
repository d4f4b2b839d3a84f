// Drives Watchdog and FlightRecorder from several threads, for the sanitizers: see
// tests/unit/test_watchdog_races.py.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/guard/flight_recorder.h"
#include "comm/guard/watchdog.h"
#include "expect.h"

namespace {

using bmtrain::Failure;
using bmtrain::FlightRecorder;
using bmtrain::OpRecord;
using bmtrain::OpState;
using bmtrain::Watchdog;

constexpr int kThreads = 4;
constexpr int kOperations = 2000;
constexpr int kRounds = 50;

OpRecord operation(const std::string& label, int peer = -1) {
  OpRecord record;
  record.op = peer < 0 ? "all_gather" : "send";
  record.label = label;
  record.numel = 10;
  record.peer = peer;
  return record;
}

std::shared_ptr<FlightRecorder> make_recorder(const std::string& name) {
  return std::make_shared<FlightRecorder>(name + "/0", name, std::vector<int>{0, 1});
}

// Threads post, wait and end while another one reads, as a report does.
void record_and_read() {
  Watchdog watchdog(600.0);
  const auto recorder = make_recorder("zero");
  watchdog.watch([](const std::string&) { return true; }, recorder);
  std::atomic<bool> over = false;
  std::thread reader([&] {
    while (!over) {
      for (const auto& found : watchdog.recorders()) {
        for (const OpRecord& record : found->records()) {
          expect(!bmtrain::describe(record).empty(), "a record that can be told");
        }
      }
      expect(!watchdog.overdue().has_value(), "nothing is late");
      static_cast<void>(watchdog.blocked_for(0.0));
    }
  });
  std::vector<std::thread> writers;
  for (int t = 0; t < kThreads; ++t) {
    writers.emplace_back([&, t] {
      const std::string label = "block " + std::to_string(t);
      for (int i = 0; i < kOperations; ++i) {
        const OpRecord record = recorder->post(operation(label, i % 3 == 0 ? 1 : -1));
        recorder->start(record.id);
        if (i % 5 == 0) {
          recorder->follow(record.id, [] { return true; });
          recorder->poll();
        }
        recorder->end(record.id, OpState::kDone);
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  over = true;
  reader.join();
  int collectives = 0;
  for (int i = 0; i < kOperations; ++i) collectives += i % 3 == 0 ? 0 : 1;
  expect(recorder->posted() == std::int64_t{kThreads} * collectives, "every collective is counted");
  expect(recorder->records().size() == FlightRecorder::kCapacity, "the ring is full");
  expect(recorder->blocked().empty(), "nobody waits");
}

// Operations fail on several threads at once, an attendant judges, communicators come and go.
void fail_and_judge() {
  Watchdog watchdog(600.0);
  std::atomic<int> aborted = 0;
  const auto first = make_recorder("first");
  watchdog.watch([&](const std::string&) { return ++aborted > 0; }, first);
  watchdog.attend(true);
  std::thread attendant([&] {
    while (watchdog.verdict().empty()) {
      if (const auto failure = watchdog.take_failure()) watchdog.condemn("verdict on " + failure->what);
      std::this_thread::yield();
    }
  });
  std::vector<std::thread> threads;
  std::vector<std::string> verdicts(kThreads);
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      const auto own = make_recorder("own" + std::to_string(t));
      watchdog.watch([&](const std::string&) { return ++aborted > 0; }, own);
      const OpRecord record = own->post(operation("block"));
      verdicts[static_cast<std::size_t>(t)] =
          watchdog.explain(Failure{"failed", std::to_string(t), own->key(), record});
      own->end(record.id, OpState::kFailed);
    });
  }
  for (std::thread& thread : threads) thread.join();
  attendant.join();
  for (const std::string& verdict : verdicts) {
    expect(verdict == watchdog.verdict(), "one verdict for all");
    expect(verdict.starts_with("verdict on "), "the attendant's verdict");
  }
  expect(aborted == kThreads + 1, "every communicator is aborted, once");
}

// Fingerprints: nobody goes on before the attendant has released the operation.
void agree_in_order() {
  Watchdog watchdog(600.0);
  watchdog.attend(true);
  std::atomic<int> released = 0;
  std::atomic<bool> over = false;
  std::thread attendant([&] {
    while (!over) {
      for (const auto& print : watchdog.take_fingerprints()) {
        ++released;
        watchdog.release(print.group, print.record.sequence);
      }
      std::this_thread::yield();
    }
  });
  for (int i = 0; i < kOperations / 10; ++i) {
    OpRecord record = operation("block");
    record.sequence = i;
    expect(watchdog.agree({"zero/0", 0, 2, record}), "the ranks agree");
    expect(released == i + 1, "nobody goes on unreleased");
  }
  over = true;
  attendant.join();
  std::thread waiter([&] {
    OpRecord record = operation("block");
    record.sequence = kOperations;
    expect(!watchdog.agree({"zero/0", 0, 2, record}), "a verdict ends the wait");
  });
  watchdog.condemn("enough");
  waiter.join();
}

}  // namespace

int main() {
  record_and_read();
  for (int round = 0; round < kRounds; ++round) fail_and_judge();
  agree_in_order();
  std::puts("ok");
}
