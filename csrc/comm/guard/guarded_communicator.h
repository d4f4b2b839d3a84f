// A communicator around another one: records each operation, and lets the watchdog explain what fails.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "comm/communicator.h"
#include "comm/guard/flight_recorder.h"
#include "comm/guard/watchdog.h"

namespace bmtrain {

/// What an operation needs after its communicator may be gone.
struct Guard {
  std::shared_ptr<FlightRecorder> recorder;
  std::shared_ptr<Watchdog> watchdog;
  int rank;  // in the group
  int size;
  bool check;  // compare fingerprints before data moves

  /// Raises the verdict for an operation that `error` ended, unless it is void. Called in a catch block.
  void fail(const OpRecord& record, const std::string& error) const;
  /// `all_gather #3 ... on group "zero", rank 0 of 4`.
  [[nodiscard]] std::string describe(const OpRecord& record) const;
};

class GuardedCommunicator final : public Communicator {
 public:
  /// `key` names the group in the whole job, `members` its ranks there, in group order.
  GuardedCommunicator(std::shared_ptr<Communicator> inner, std::shared_ptr<Watchdog> watchdog,
                      std::string key, std::vector<int> members, bool check);

  [[nodiscard]] const std::shared_ptr<Communicator>& inner() const { return inner_; }

  [[nodiscard]] std::string backend() const override { return inner_->backend(); }

  /// Records, compares, starts.
  [[nodiscard]] WorkPtr start(const Call& call) override;
  [[nodiscard]] bool works_in_place() const override {
    return !guard_->watchdog->is_void() && inner_->works_in_place();
  }
  [[nodiscard]] c10::DataPtr borrow_output(std::int64_t nbytes) override {
    return guard_->watchdog->is_void() ? c10::DataPtr() : inner_->borrow_output(nbytes);
  }
  void give_back_output(const void* data, std::int64_t nbytes) override {
    inner_->give_back_output(data, nbytes);
  }
  [[nodiscard]] c10::DataPtr borrow_input(std::int64_t nbytes) override {
    return guard_->watchdog->is_void() ? c10::DataPtr() : inner_->borrow_input(nbytes);
  }
  [[nodiscard]] std::int64_t bytes_copied() const override { return inner_->bytes_copied(); }
  [[nodiscard]] std::int64_t bytes_in_place() const override { return inner_->bytes_in_place(); }
  void forget_completed() override {
    inner_->forget_completed();
    guard_->recorder->poll();
  }
  [[nodiscard]] bool settle(double seconds) override { return inner_->settle(seconds); }
  [[nodiscard]] std::string failure() const override;
  /// Aborts all communicators of the process, and tells the other ranks.
  void abort(const std::string& reason) override;
  void close() override { inner_->close(); }
  [[nodiscard]] bool closed() const override { return inner_->closed(); }
  [[nodiscard]] std::vector<std::pair<std::string, Traffic>> traffic() const override {
    return inner_->traffic();
  }
  void reset_traffic() override { inner_->reset_traffic(); }

 private:
  // Returns when all ranks have posted the same operation; raises when they have not.
  void compare(const OpRecord& record);

  const std::shared_ptr<Communicator> inner_;
  std::shared_ptr<Guard> guard_;
};

}  // namespace bmtrain
