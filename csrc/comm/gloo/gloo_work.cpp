#include "comm/gloo/gloo_work.h"

#include <algorithm>
#include <utility>

namespace bmtrain {

GlooWork::GlooWork(std::shared_ptr<GlooLink> link, GlooOperation operation)
    : link_(std::move(link)),
      operation_(std::move(operation)),
      carried_on_(operation_.num_collectives_before) {}

WorkPtr GlooWork::start(std::shared_ptr<GlooLink> link, GlooOperation operation) {
  link->number(operation);
  const auto is_later = [](const Piece& piece) { return piece.phase == 1; };
  const bool has_two_phases =
      operation.share || std::any_of(operation.sends.begin(), operation.sends.end(), is_later);
  const std::shared_ptr<GlooWork> work(new GlooWork(std::move(link), std::move(operation)));
  {
    const Lock lock(work->mutex_);
    work->post(0);
  }
  if (has_two_phases) {
    work->link_->add_two_phase(work->carried_on_, work);
  }
  return work;
}

GlooWork::~GlooWork() {
  if (!done_ && !transfers_.empty()) {
    link_->keep_abandoned({std::move(operation_), std::move(transfers_), phase_});
  }
}

void GlooWork::post(int phase) {
  for (const Piece& piece : operation_.receives) {
    if (piece.phase == phase) {
      link_->post(operation_, piece, piece.peer, /*is_send=*/false, transfers_);
    }
  }
  for (const Piece& piece : operation_.sends) {
    if (piece.phase == phase && piece.peer != Piece::kEveryPeer) {
      link_->post(operation_, piece, piece.peer, /*is_send=*/true, transfers_);
    } else if (piece.phase == phase) {
      for (int distance = 1; distance < link_->size(); ++distance) {
        link_->post(operation_, piece, (link_->rank() + distance) % link_->size(), /*is_send=*/true,
                    transfers_);
      }
    }
  }
}

void GlooWork::wait() {
  link_->carry_on_before(carried_on_);
  const Lock lock(mutex_);
  while (!done_) {
    advance();
  }
  if (error_) {
    std::rethrow_exception(error_);
  }
}

void GlooWork::carry_on() {
  const Lock lock(mutex_);
  if (phase_ == 0 && !done_) {
    advance();
  }
}

void GlooWork::advance() {
  bool is_last = true;
  try {
    is_last = finish_phase();
  } catch (...) {
    error_ = std::current_exception();
  }
  if (is_last) {
    transfers_.clear();
    shared_.clear();
    operation_ = GlooOperation();
    done_.store(true, std::memory_order_release);
  }
}

bool GlooWork::finish_phase() {
  link_->await(operation_, transfers_);
  transfers_.clear();
  for (const WorkPtr& work : shared_) {
    work->wait();
  }
  if (phase_ == 0) {
    phase_ = 1;
    if (operation_.combine) {
      operation_.combine();
    }
    post(1);
    if (operation_.share) {
      shared_ = operation_.share();
    }
    if (!transfers_.empty() || !shared_.empty()) {
      return false;
    }
  }
  if (operation_.publish) {
    operation_.publish();
  }
  return true;
}

}  // namespace bmtrain
