#include "comm/guard/sentinel.h"

#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <exception>
#include <string_view>
#include <utility>

namespace bmtrain {
namespace {

// Counted, not measured: a process that was stopped has not been silent, it was away.
constexpr double kPeriod = 0.25;

void write_all(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(file, text.data(), text.size());
    if (written <= 0) {
      return;
    }
    text.remove_prefix(static_cast<std::size_t>(written));
  }
}

enum class Line : std::uint8_t {
  kOpen,     // the peer waits, as far as can be seen
  kLeft,     // it ended in good order
  kGivenUp,  // it sent a verdict, or its connection ended without a word
};

// Looks at a connection without taking anything from it.
Line look_at(int line) {
  char waiting[1 << 16];
  const ssize_t length = ::recv(line, waiting, sizeof waiting, MSG_PEEK | MSG_DONTWAIT);
  const std::string_view text(waiting, static_cast<std::size_t>(std::max<ssize_t>(length, 0)));
  if (text.find("\"do\": \"verdict\"") != text.npos) {
    return Line::kGivenUp;
  }
  if (text.find("\"do\": \"bye\"") != text.npos || text.find("\"do\": \"closing\"") != text.npos) {
    return Line::kLeft;
  }
  pollfd polled{line, POLLRDHUP, 0};
  return ::poll(&polled, 1, 0) > 0 ? Line::kGivenUp : Line::kOpen;
}

}  // namespace

Sentinel::Sentinel(std::string who, int signal, int stacks, double silence_seconds)
    : who_(std::move(who)),
      signal_(signal),
      stacks_(stacks),
      silence_(silence_seconds),
      process_(::getpid()),
      thread_([this] { run(); }) {}

Sentinel::~Sentinel() {
  if (::getpid() != process_) {  // a forked child has no such thread
    thread_.detach();
    return;
  }
  {
    const Lock lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Sentinel::set_lines(std::vector<int> lines) {
  const Lock lock(mutex_);
  lines_ = std::move(lines);
}

void Sentinel::arm(double seconds, std::string why) {
  const Lock lock(mutex_);
  left_ = seconds;
  why_ = std::move(why);
}

void Sentinel::release() {
  const Lock lock(mutex_);
  left_.reset();
}

void Sentinel::run() {
  Lock lock(mutex_);
  while (!stop_) {
    changed_.wait_for(lock, std::chrono::duration<double>(kPeriod));
    if (stop_) {
      return;
    }
    std::string why;
    try {
      why = look();
    } catch (const std::exception&) {
      continue;  // no memory: the next look may have some
    }
    if (!why.empty()) {
      end(why);
    }
  }
}

std::string Sentinel::look() {
  if (left_ && (*left_ -= kPeriod) <= 0) {
    return why_;
  }
  const std::uint64_t beats = beats_.load(std::memory_order_relaxed);
  missing_ = beats == std::exchange(seen_, beats) ? missing_ + kPeriod : 0;
  if (missing_ >= silence_ && peers_have_given_up()) {
    return "the other ranks have given up, and native code has held the interpreter's lock for a long time";
  }
  return "";
}

bool Sentinel::peers_have_given_up() const {
  bool any = false;
  for (const int line : lines_) {
    const Line found = look_at(line);
    if (found == Line::kOpen) {
      return false;
    }
    any |= found == Line::kGivenUp;
  }
  return any;
}

void Sentinel::end(const std::string& why) const {
  try {
    report(why);
  } catch (const std::exception&) {
    write_all(STDERR_FILENO, why);
  }
  ::_exit(1);
}

void Sentinel::report(const std::string& why) const {
  std::string text = who_ + " ends itself: " + why + ". Its threads:\n";
  if (stacks_ != STDERR_FILENO) {
    ::raise(signal_);  // in this thread, so that all is written when it returns
    char part[4096];
    ssize_t length = 0;
    for (off_t at = 0; (length = ::pread(stacks_, part, sizeof part, at)) > 0; at += length) {
      text.append(part, static_cast<std::size_t>(length));
    }
    write_all(STDERR_FILENO, text);
  } else {
    write_all(STDERR_FILENO, text);
    ::raise(signal_);
  }
}

void end_by_signal(int number) {
  struct sigaction by_default{};
  by_default.sa_handler = SIG_DFL;
  ::sigaction(number, &by_default, nullptr);
  sigset_t only;
  ::sigemptyset(&only);
  ::sigaddset(&only, number);
  ::pthread_sigmask(SIG_UNBLOCK, &only, nullptr);
  ::raise(number);
  ::_exit(128 + number);
}

}  // namespace bmtrain
