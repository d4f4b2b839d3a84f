#include "comm/nccl/nccl_api.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "common/check.h"
#include "common/thread_annotations.h"

namespace bmtrain {
namespace {

constexpr const char* kOverride = "BMTRAIN_NCCL_LIBRARY";
constexpr const char* kSoname = "libnccl.so.2";
constexpr std::chrono::milliseconds kPollPeriod{100};
constexpr const char* kRemedy =
    "; install one with `pip install nvidia-nccl-cu13` (or -cu12, as torch.version.cuda says), or name the "
    "file in "
    "BMTRAIN_NCCL_LIBRARY";

// The path of the NCCL that some other library of this process depends on, empty if there is none.
std::string find_mapped() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, std::size_t /*size*/, void* context) {
        const char* name = std::strrchr(info->dlpi_name, '/');
        if (name == nullptr || std::strncmp(name, "/libnccl.so", 11) != 0) {
          return 0;
        }
        *static_cast<std::string*>(context) = info->dlpi_name;
        return 1;
      },
      &found);
  return found;
}

template <typename Function>
void look_up_one(void* handle, const std::string& path, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(handle, name));
  BMT_CHECK(StateError, function != nullptr, "NCCL: ", path, " has no function ", name,
            ": it is not an NCCL library of version 2.19 or later", kRemedy);
}

}  // namespace

std::string nccl_version_text(int version) {
  // Until 2.8 one digit less stood for the minor version.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  return detail::join(major, ".", minor, ".", version % 100);
}

// See [Note: Who looks for failures].
struct NcclLibrary::Members {
  Mutex mutex;
  std::condition_variable changed;
  std::vector<std::weak_ptr<NcclMember>> all BMT_GUARDED_BY(mutex);
  std::uint64_t num_added BMT_GUARDED_BY(mutex) = 0;
  bool is_watched BMT_GUARDED_BY(mutex) = false;
  bool is_over BMT_GUARDED_BY(mutex) = false;

  [[nodiscard]] std::vector<std::weak_ptr<NcclMember>> snapshot() BMT_EXCLUDES(mutex) {
    const Lock lock(mutex);
    return all;
  }

  // Until the library or the last communicator is gone, or all are closed: at the end of the process the
  // thread must not ask a device that has gone.
  void watch() BMT_EXCLUDES(mutex) {
    Lock lock(mutex);
    while (!changed.wait_for(lock, kPollPeriod, [this]() BMT_REQUIRES(mutex) { return is_over; })) {
      std::erase_if(all, [](const std::weak_ptr<NcclMember>& member) { return member.expired(); });
      if (all.empty()) {
        break;
      }
      const std::uint64_t num_seen = num_added;
      lock.unlock();
      const bool is_any_open = poll_all();
      lock.lock();
      if (!is_any_open && num_seen == num_added) {
        break;
      }
    }
    is_watched = false;
  }

  // False if all are over.
  [[nodiscard]] bool poll_all() BMT_EXCLUDES(mutex) {
    bool is_any_open = false;
    try {
      for (const std::weak_ptr<NcclMember>& member : snapshot()) {
        if (const std::shared_ptr<NcclMember> alive = member.lock()) {
          alive->poll();
          is_any_open = is_any_open || !alive->is_over();
        }
      }
    } catch (const std::exception&) {
      return true;  // no memory, say: the next look may have some
    }
    return is_any_open;
  }
};

NcclLibrary::~NcclLibrary() {
  const Lock lock(members_->mutex);
  members_->is_over = true;
  members_->changed.notify_all();
}

NcclLibrary::NcclLibrary(const std::vector<std::string>& candidates) : members_(std::make_shared<Members>()) {
  open(candidates);
  try {
    look_up();
  } catch (...) {
    dlclose(handle_);  // nothing of it has run: it must not be taken for the one that torch uses
    throw;
  }
}

void NcclLibrary::look_up() {
  look_up_one(handle_, path_, "ncclGetVersion", call_.GetVersion);
  const nccl::Result result = call_.GetVersion(&version_);
  BMT_CHECK(StateError, result == nccl::Result::kSuccess, "NCCL: ", path_,
            " does not tell its version, result ", static_cast<int>(result));
  BMT_CHECK(StateError, version_ >= kOldestVersion, "NCCL: expected version 2.19 or later, got ",
            nccl_version_text(version_), " in ", path_, kRemedy);
#define BMT_NCCL_FUNCTION(name) look_up_one(handle_, path_, "nccl" #name, call_.name)
  BMT_NCCL_FUNCTION(GetUniqueId);
  BMT_NCCL_FUNCTION(CommInitRankConfig);
  BMT_NCCL_FUNCTION(CommSplit);
  BMT_NCCL_FUNCTION(CommFinalize);
  BMT_NCCL_FUNCTION(CommDestroy);
  BMT_NCCL_FUNCTION(CommAbort);
  BMT_NCCL_FUNCTION(CommGetAsyncError);
  BMT_NCCL_FUNCTION(GetErrorString);
  BMT_NCCL_FUNCTION(GetLastError);
  BMT_NCCL_FUNCTION(AllGather);
  BMT_NCCL_FUNCTION(ReduceScatter);
  BMT_NCCL_FUNCTION(AllReduce);
  BMT_NCCL_FUNCTION(Reduce);
  BMT_NCCL_FUNCTION(Broadcast);
  BMT_NCCL_FUNCTION(Send);
  BMT_NCCL_FUNCTION(Recv);
  BMT_NCCL_FUNCTION(GroupStart);
  BMT_NCCL_FUNCTION(GroupEnd);
#undef BMT_NCCL_FUNCTION
}

void NcclLibrary::open(const std::vector<std::string>& candidates) {
  std::vector<std::string> order;
  if (const char* named = std::getenv(kOverride); named != nullptr && *named != '\0') {
    order.emplace_back(named);
  } else {
    if (std::string mapped = find_mapped(); !mapped.empty()) {
      order.push_back(std::move(mapped));
    }
    order.insert(order.end(), candidates.begin(), candidates.end());
    order.emplace_back(kSoname);
  }
  std::string tried;
  for (const std::string& path : order) {
    handle_ = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) {
      path_ = path;
      return;
    }
    const char* error = dlerror();
    tried += detail::join(tried.empty() ? "" : "; ", error == nullptr ? path.c_str() : error);
  }
  const bool overridden = order.size() == 1 && order[0] != kSoname;
  BMT_CHECK(StateError, false, "NCCL: no library could be opened (",
            overridden ? detail::join(kOverride, ": ") : std::string(), tried, ")", kRemedy);
}

std::string NcclLibrary::make_unique_id() const {
  nccl::UniqueId id = {};
  const nccl::Result result = call_.GetUniqueId(&id);
  BMT_CHECK(CommunicationError, result == nccl::Result::kSuccess,
            "NCCL could not make a unique id: ", explain(result));
  return {id.bytes, nccl::kUniqueIdBytes};
}

std::string NcclLibrary::explain(nccl::Result result) const {
  const char* text = call_.GetErrorString(result);
  const char* last = call_.GetLastError(nullptr);
  std::string explained = text == nullptr ? "unknown error" : text;
  explained += detail::join(" (NCCL ", nccl_version_text(version_), ", result ", static_cast<int>(result));
  if (last != nullptr && *last != '\0') {
    explained += detail::join(", last error: ", last);
  }
  explained += ')';
  return explained;
}

void NcclLibrary::add(std::weak_ptr<NcclMember> member) {
  const Lock lock(members_->mutex);
  std::erase_if(members_->all, [](const std::weak_ptr<NcclMember>& old) { return old.expired(); });
  members_->all.push_back(std::move(member));
  members_->num_added += 1;
  if (!members_->is_watched) {
    std::thread([members = members_] { members->watch(); }).detach();
    members_->is_watched = true;  // not if there is no thread to be had, which is raised
  }
}

void NcclLibrary::abort_all(const std::string& reason) {
  for (const std::weak_ptr<NcclMember>& member : members_->snapshot()) {
    if (const std::shared_ptr<NcclMember> alive = member.lock()) {
      alive->abort(reason);
    }
  }
}

}  // namespace bmtrain
