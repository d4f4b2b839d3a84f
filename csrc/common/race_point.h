// Race points: places where work goes on behind the caller's back, and where a result must not depend on
// which thread is faster.
#pragma once

#include <atomic>
#include <string>

namespace bmtrain {

/// What every race point calls, unless it is null: pauses there, or throws, are a test's. For any thread.
/// `update`: at a chunk of an update, the label of that update; else null.
using AtRacePoint = void (*)(const std::string* update);
extern std::atomic<AtRacePoint> at_race_point;

/// One relaxed load, where nothing is to be called.
void race_point(const std::string* update = nullptr);

}  // namespace bmtrain
