// libcudart.so.13 over the simulated device: what torch and this library call of the runtime, and no more.
// Kernels of torch are not run here (operators.cpp computes what they would); launching one is an error that
// names it.
#include <cuda_runtime_api.h>
#include <cxxabi.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "device.h"

using simulated::Work;

namespace {

thread_local cudaError_t last_error = cudaSuccess;
std::atomic<cudaStream_t> captured = nullptr;

cudaError_t done(cudaError_t error = cudaSuccess) {
  if (error != cudaSuccess && error != cudaErrorNotReady) last_error = error;
  return error;
}

// Names of kernels by the functions that start them.
struct Kernels {
  std::mutex mutex;
  std::map<const void*, const char*> names;
};
Kernels& kernels() {
  static auto* const all = new Kernels();
  return *all;
}

cudaError_t refuse_kernel(const void* function) {
  const char* name = "an unknown kernel";
  {
    const std::lock_guard lock(kernels().mutex);
    const auto found = kernels().names.find(function);
    if (found != kernels().names.end()) name = found->second;
  }
  int status = 0;
  char* const readable = abi::__cxa_demangle(name, nullptr, nullptr, &status);
  std::fprintf(stderr, "simulated CUDA: no kernels here, so not %.400s\n", status == 0 ? readable : name);
  std::free(readable);
  return done(cudaErrorNotSupported);
}

// Events live until what refers to them in streams is done, as a device's do.
using SharedEvent = std::shared_ptr<simulated::Event>;
struct Events {
  std::mutex mutex;
  std::map<cudaEvent_t, SharedEvent> alive;
};
Events& events() {
  static auto* const all = new Events();
  return *all;
}
SharedEvent shared(cudaEvent_t event) {
  const std::lock_guard lock(events().mutex);
  const auto found = events().alive.find(event);
  return found == events().alive.end() ? nullptr : found->second;
}

// Whether the host may go on once a copy is in its stream: not if it is from or to memory that is not pinned.
bool is_asynchronous(const void* a, const void* b) {
  const auto is_known = [](const void* x) { return simulated::is_device(x) || simulated::is_pinned(x); };
  return is_known(a) && is_known(b);
}

cudaError_t copy(void* to, const void* from, std::size_t size, cudaStream_t handle, bool waits) {
  auto& stream = simulated::stream_of(handle);
  stream.enqueue([=] {
    const Work open;
    std::memmove(to, from, size);
  });
  if (waits) stream.wait();
  return done();
}

cudaError_t fill(void* at, int value, std::size_t size, cudaStream_t handle, bool waits) {
  auto& stream = simulated::stream_of(handle);
  stream.enqueue([=] {
    const Work open;
    std::memset(at, value, size);
  });
  if (waits) stream.wait();
  return done();
}

// The operators need torch's libraries, so they are not linked.
void load_operators() {
  const char* const path = std::getenv("SIMULATED_CUDA_OPERATORS");
  static void* const library = path == nullptr ? nullptr : dlopen(path, RTLD_NOW);
  if (path == nullptr || library != nullptr) return;
  std::fprintf(stderr, "simulated CUDA: %s\n", dlerror());
  std::_Exit(70);
}

void wait_for_device() {
  simulated::for_each_stream(simulated::current_device(), [](simulated::Stream& stream) { stream.wait(); });
}

}  // namespace

extern "C" {

// Devices

cudaError_t cudaGetDeviceCount(int* count) {
  *count = simulated::num_devices();
  return done(*count == 0 ? cudaErrorNoDevice : cudaSuccess);
}
cudaError_t cudaGetDevice(int* device) {
  *device = simulated::current_device();
  return done();
}
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= simulated::num_devices()) return done(cudaErrorInvalidDevice);
  simulated::use_device(device);
  return done();
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return done();
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return done();
}
// torch asks for it before anything else, so torch is loaded now.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  load_operators();
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "Simulated CUDA device");
  properties->uuid.bytes[0] = static_cast<char>(device + 1);
  properties->totalGlobalMem = simulated::total_memory();
  properties->sharedMemPerBlock = 48 << 10;
  properties->sharedMemPerBlockOptin = properties->sharedMemPerMultiprocessor = 227 << 10;
  properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
  properties->warpSize = 32;
  properties->maxThreadsPerBlock = 1024;
  properties->maxThreadsPerMultiProcessor = 2048;
  std::fill_n(properties->maxThreadsDim, 3, 1024);
  std::fill_n(properties->maxGridSize, 3, 65535);
  properties->maxGridSize[0] = 0x7fffffff;
  properties->major = 9;
  properties->multiProcessorCount = 132;
  properties->textureAlignment = 512;
  properties->pciBusID = device + 1;
  properties->unifiedAddressing = properties->canMapHostMemory = 1;
  properties->l2CacheSize = 50 << 20;
  properties->asyncEngineCount = 2;
  properties->concurrentKernels = 1;
  return done();
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int /*device*/) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = 132;
      break;
    case cudaDevAttrWarpSize:
      *value = 32;
      break;
    default:
      *value = 0;
  }
  return done();
}
cudaError_t cudaDeviceGetPCIBusId(char* text, int length, int device) {
  std::snprintf(text, static_cast<std::size_t>(length), "0000:%02x:00.0", device + 1);
  return done();
}
cudaError_t cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return done();
}
cudaError_t cudaDeviceEnablePeerAccess(int /*peer*/, unsigned /*flags*/) { return done(); }
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return done();
}
cudaError_t cudaDeviceSynchronize() {
  wait_for_device();
  return done();
}
cudaError_t cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = simulated::free_memory();
  *total = simulated::total_memory();
  return done();
}
cudaError_t cudaGetDriverEntryPointByVersion(const char* /*symbol*/, void** function, unsigned /*version*/,
                                             unsigned long long /*flags*/,
                                             cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (result != nullptr) *result = cudaDriverEntryPointSymbolNotFound;
  return done();
}

// Errors

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}
const char* cudaGetErrorString(cudaError_t error) {
  static thread_local std::string text;
  text = error == cudaErrorMemoryAllocation ? "out of memory" : "simulated error " + std::to_string(error);
  return text.c_str();
}

// Memory

cudaError_t cudaMalloc(void** address, std::size_t size) {
  *address = simulated::allocate_device(size);
  return done(*address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFree(void* address) {
  wait_for_device();
  return done(address == nullptr || simulated::release_device(address) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostAlloc(void** address, std::size_t size, unsigned /*flags*/) {
  *address = simulated::allocate_pinned(size);
  return done(*address == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t cudaFreeHost(void* address) {
  wait_for_device();
  return done(simulated::release_pinned(address) ? cudaSuccess : cudaErrorInvalidValue);
}
cudaError_t cudaHostRegister(void* address, std::size_t size, unsigned /*flags*/) {
  return done(simulated::pin(address, size) ? cudaSuccess : cudaErrorHostMemoryAlreadyRegistered);
}
cudaError_t cudaHostUnregister(void* address) {
  return done(simulated::unpin(address) ? cudaSuccess : cudaErrorHostMemoryNotRegistered);
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->device = simulated::current_device();
  attributes->type = simulated::is_device(address)   ? cudaMemoryTypeDevice
                     : simulated::is_pinned(address) ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeUnregistered;
  if (attributes->type == cudaMemoryTypeDevice) attributes->devicePointer = const_cast<void*>(address);
  if (attributes->type == cudaMemoryTypeHost) attributes->hostPointer = const_cast<void*>(address);
  return done();
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/,
                            cudaStream_t stream) {
  return copy(to, from, size, stream, !is_asynchronous(to, from));
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t size, cudaMemcpyKind /*kind*/) {
  return copy(to, from, size, nullptr, true);
}
cudaError_t cudaMemcpyPeerAsync(void* to, int /*to_device*/, const void* from, int /*from_device*/,
                                std::size_t size, cudaStream_t stream) {
  return copy(to, from, size, stream, false);
}
cudaError_t cudaMemcpy2DAsync(void* to, std::size_t to_pitch, const void* from, std::size_t from_pitch,
                              std::size_t width, std::size_t height, cudaMemcpyKind /*kind*/,
                              cudaStream_t handle) {
  auto& stream = simulated::stream_of(handle);
  stream.enqueue([=] {
    const Work open;
    for (std::size_t row = 0; row < height; ++row) {
      std::memmove(static_cast<char*>(to) + row * to_pitch, static_cast<const char*>(from) + row * from_pitch,
                   width);
    }
  });
  if (!is_asynchronous(to, from)) stream.wait();
  return done();
}
cudaError_t cudaMemsetAsync(void* at, int value, std::size_t size, cudaStream_t stream) {
  return fill(at, value, size, stream, false);
}
cudaError_t cudaMemset(void* at, int value, std::size_t size) { return fill(at, value, size, nullptr, true); }

// Streams

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned /*flags*/, int /*priority*/) {
  *stream = reinterpret_cast<cudaStream_t>(new simulated::Stream(simulated::current_device()));
  return done();
}
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  auto* const ours = reinterpret_cast<simulated::Stream*>(stream);
  ours->wait();
  delete ours;
  return done();
}
cudaError_t cudaStreamGetPriority(cudaStream_t /*stream*/, int* priority) {
  *priority = 0;
  return done();
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  simulated::stream_of(stream).wait();
  return done();
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
  return done(simulated::stream_of(stream).is_idle() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t handle, unsigned /*flags*/) {
  const SharedEvent event = shared(handle);
  if (event == nullptr) return done(cudaErrorInvalidResourceHandle);
  const std::uint64_t mark = event->last_recorded();
  simulated::stream_of(stream).enqueue([event, mark] { event->wait(mark); });
  return done();
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* argument) {
  simulated::stream_of(stream).enqueue([=] {
    const Work open;
    function(argument);
  });
  return done();
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* argument,
                                  unsigned /*flags*/) {
  simulated::stream_of(stream).enqueue([=] { function(stream, cudaSuccess, argument); });
  return done();
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus* status) {
  *status =
      stream != nullptr && captured == stream ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
  return done();
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, cudaStreamCaptureStatus* status,
                                     unsigned long long* id, cudaGraph_t* /*graph*/,
                                     const cudaGraphNode_t** /*dependencies*/,
                                     const cudaGraphEdgeData** /*edges*/, std::size_t* /*number*/) {
  if (id != nullptr) *id = 1;
  return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* /*mode*/) { return done(); }

// Captures, of one stream at a time: its work runs at once, and the graph is empty

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode /*mode*/) {
  captured = stream;
  return done();
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = reinterpret_cast<cudaGraph_t>(stream);
  captured = nullptr;
  return done();
}
cudaError_t cudaGraphGetNodes(cudaGraph_t /*graph*/, cudaGraphNode_t* /*nodes*/, std::size_t* number) {
  *number = 0;
  return done();
}
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* instance, cudaGraph_t graph,
                                          unsigned long long /*flags*/) {
  *instance = reinterpret_cast<cudaGraphExec_t>(graph);
  return done();
}
cudaError_t cudaGraphDestroy(cudaGraph_t /*graph*/) { return done(); }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t /*instance*/) { return done(); }

// Events

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned /*flags*/) {
  const auto made = std::make_shared<simulated::Event>();
  *event = reinterpret_cast<cudaEvent_t>(made.get());
  const std::lock_guard lock(events().mutex);
  events().alive[*event] = made;
  return done();
}
cudaError_t cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  const std::lock_guard lock(events().mutex);
  return done(events().alive.erase(event) == 1 ? cudaSuccess : cudaErrorInvalidResourceHandle);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t handle, cudaStream_t stream, unsigned /*flags*/) {
  const SharedEvent event = shared(handle);
  if (event == nullptr) return done(cudaErrorInvalidResourceHandle);
  const std::uint64_t mark = event->record();
  simulated::stream_of(stream).enqueue([event, mark] { event->complete(mark); });
  return done();
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  return cudaEventRecordWithFlags(event, stream, 0);
}
cudaError_t cudaEventQuery(cudaEvent_t handle) {
  const SharedEvent event = shared(handle);
  if (event == nullptr) return done(cudaErrorInvalidResourceHandle);
  return done(event->is_complete() ? cudaSuccess : cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  const SharedEvent event = shared(handle);
  if (event == nullptr) return done(cudaErrorInvalidResourceHandle);
  event->wait(event->last_recorded());
  return done();
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t first, cudaEvent_t second) {
  const SharedEvent start = shared(first), end = shared(second);
  if (start == nullptr || end == nullptr) return done(cudaErrorInvalidResourceHandle);
  if (!start->is_complete() || !end->is_complete()) return done(cudaErrorNotReady);
  *milliseconds = static_cast<float>((end->time() - start->time()) * 1e3);
  return done();
}

// Kernels

void** __cudaRegisterFatBinary(void* binary) { return static_cast<void**>(binary); }
void __cudaRegisterFatBinaryEnd(void** /*binary*/) {}
void __cudaUnregisterFatBinary(void** /*binary*/) {}
void __cudaRegisterFunction(void** /*binary*/, const char* host, char* /*device*/, const char* name,
                            int /*limit*/, uint3* /*thread*/, uint3* /*block*/, dim3* /*block_size*/,
                            dim3* /*grid_size*/, int* /*warp_size*/) {
  const std::lock_guard lock(kernels().mutex);
  kernels().names[host] = name;
}
void __cudaRegisterVar(void** /*binary*/, char* /*host*/, char* /*device*/, const char* /*name*/,
                       int /*is_external*/, std::size_t /*size*/, int /*is_constant*/, int /*is_global*/) {}
char __cudaInitModule(void** /*binary*/) { return 0; }
unsigned __cudaPushCallConfiguration(dim3 /*grid*/, dim3 /*block*/, std::size_t /*shared*/,
                                     cudaStream_t /*stream*/) {
  return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3* /*grid*/, dim3* /*block*/, std::size_t* /*shared*/,
                                       void* /*stream*/) {
  return cudaSuccess;
}
cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* function) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(function));
  return cudaSuccess;
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                               std::size_t /*shared*/, cudaStream_t /*stream*/) {
  return refuse_kernel(kernel);
}
cudaError_t cudaLaunchKernel(const void* function, dim3 /*grid*/, dim3 /*block*/, void** /*arguments*/,
                             std::size_t /*shared*/, cudaStream_t /*stream*/) {
  return refuse_kernel(function);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* /*config*/, const void* function,
                                void** /*arguments*/) {
  return refuse_kernel(function);
}
cudaError_t cudaLaunchCooperativeKernel(const void* function, dim3 /*grid*/, dim3 /*block*/,
                                        void** /*arguments*/, std::size_t /*shared*/,
                                        cudaStream_t /*stream*/) {
  return refuse_kernel(function);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* /*function*/) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return done();
}
cudaError_t cudaFuncSetAttribute(const void* /*function*/, cudaFuncAttribute /*attribute*/, int /*value*/) {
  return done();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void* /*function*/,
                                                                   int /*size*/, std::size_t /*shared*/,
                                                                   unsigned /*flags*/) {
  *blocks = 1;
  return done();
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* /*function*/, int /*size*/,
                                                          std::size_t /*shared*/) {
  *blocks = 1;
  return done();
}
cudaError_t cudaProfilerStart() { return done(); }
cudaError_t cudaProfilerStop() { return done(); }
}
