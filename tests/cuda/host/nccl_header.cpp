// What comm/nccl/nccl_api.h declares by hand, beside NCCL's own header. Compiling it is the test.
#include <nccl.h>

#include <cstddef>
#include <type_traits>

#include "comm/nccl/nccl_api.h"

namespace {

using namespace bmtrain;  // NOLINT(google-build-using-namespace)

// Whether a value of one type is passed as one of the other is.
template <typename Ours, typename Theirs>
constexpr bool kAlike =
    sizeof(Ours) == sizeof(Theirs) && alignof(Ours) == alignof(Theirs) &&
    std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> && std::is_class_v<Ours> == std::is_class_v<Theirs>;

template <typename Ours, typename Theirs>
constexpr bool kSameCall = false;
template <typename R1, typename... Ours, typename R2, typename... Theirs>
constexpr bool kSameCall<R1 (*)(Ours...), R2 (*)(Theirs...)> = [] {
  if constexpr (sizeof...(Ours) != sizeof...(Theirs)) {
    return false;
  } else {
    return kAlike<R1, R2> && (kAlike<Ours, Theirs> && ...);
  }
}();

#define EXPECT_CALL(name) static_assert(kSameCall<decltype(nccl::Functions::name), decltype(&nccl##name)>)
EXPECT_CALL(GetVersion);
EXPECT_CALL(GetUniqueId);
EXPECT_CALL(CommInitRankConfig);
EXPECT_CALL(CommSplit);
EXPECT_CALL(CommFinalize);
EXPECT_CALL(CommDestroy);
EXPECT_CALL(CommAbort);
EXPECT_CALL(CommGetAsyncError);
EXPECT_CALL(GetErrorString);
EXPECT_CALL(GetLastError);
EXPECT_CALL(AllGather);
EXPECT_CALL(ReduceScatter);
EXPECT_CALL(AllReduce);
EXPECT_CALL(Reduce);
EXPECT_CALL(Broadcast);
EXPECT_CALL(Send);
EXPECT_CALL(Recv);
EXPECT_CALL(GroupStart);
EXPECT_CALL(GroupEnd);

// The beginning of theirs: later libraries have more, and take what is not there for its default.
static_assert(sizeof(nccl::Config) <= sizeof(ncclConfig_t));
#define EXPECT_FIELD(ours, theirs)                                                \
  static_assert(offsetof(nccl::Config, ours) == offsetof(ncclConfig_t, theirs) && \
                std::is_same_v<decltype(nccl::Config::ours), decltype(ncclConfig_t::theirs)>)
EXPECT_FIELD(size, size);
EXPECT_FIELD(magic, magic);
EXPECT_FIELD(version, version);
EXPECT_FIELD(blocking, blocking);
EXPECT_FIELD(cga_cluster_size, cgaClusterSize);
EXPECT_FIELD(min_ctas, minCTAs);
EXPECT_FIELD(max_ctas, maxCTAs);
EXPECT_FIELD(net_name, netName);
EXPECT_FIELD(split_share, splitShare);
constexpr ncclConfig_t kTheirs = NCCL_CONFIG_INITIALIZER;
static_assert(nccl::Config{}.magic == kTheirs.magic && nccl::Config{}.version == NCCL_VERSION(2, 19, 0) &&
              nccl::Config::kUndefined == NCCL_CONFIG_UNDEF_INT &&
              nccl::kUniqueIdBytes == NCCL_UNIQUE_ID_BYTES);

#define EXPECT_VALUE(ours, theirs) static_assert(static_cast<int>(nccl::ours) == static_cast<int>(theirs))
EXPECT_VALUE(Result::kSuccess, ncclSuccess);
EXPECT_VALUE(Result::kUnhandledCudaError, ncclUnhandledCudaError);
EXPECT_VALUE(Result::kSystemError, ncclSystemError);
EXPECT_VALUE(Result::kInternalError, ncclInternalError);
EXPECT_VALUE(Result::kInvalidArgument, ncclInvalidArgument);
EXPECT_VALUE(Result::kInvalidUsage, ncclInvalidUsage);
EXPECT_VALUE(Result::kRemoteError, ncclRemoteError);
EXPECT_VALUE(Result::kInProgress, ncclInProgress);
EXPECT_VALUE(Type::kInt8, ncclInt8);
EXPECT_VALUE(Type::kUint8, ncclUint8);
EXPECT_VALUE(Type::kInt32, ncclInt32);
EXPECT_VALUE(Type::kUint32, ncclUint32);
EXPECT_VALUE(Type::kInt64, ncclInt64);
EXPECT_VALUE(Type::kUint64, ncclUint64);
EXPECT_VALUE(Type::kFloat16, ncclFloat16);
EXPECT_VALUE(Type::kFloat32, ncclFloat32);
EXPECT_VALUE(Type::kFloat64, ncclFloat64);
EXPECT_VALUE(Type::kBfloat16, ncclBfloat16);
EXPECT_VALUE(Op::kSum, ncclSum);
EXPECT_VALUE(Op::kProd, ncclProd);
EXPECT_VALUE(Op::kMax, ncclMax);
EXPECT_VALUE(Op::kMin, ncclMin);
EXPECT_VALUE(Op::kAvg, ncclAvg);

}  // namespace
