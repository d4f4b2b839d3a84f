// What torch's libraries name of the runtime and nobody here calls. Without the runtime's header, which would
// want their parameters.
#include <cstdio>

#define NOT_SIMULATED(name)                                               \
  extern "C" int name() {                                                 \
    std::fprintf(stderr, "simulated CUDA: " #name " is not simulated\n"); \
    return 801; /* cudaErrorNotSupported */                               \
  }

NOT_SIMULATED(cudaDeviceGetDefaultMemPool)
NOT_SIMULATED(cudaFreeAsync)
NOT_SIMULATED(cudaGetSymbolAddress)
NOT_SIMULATED(cudaGraphAddNode)
NOT_SIMULATED(cudaGraphConditionalHandleCreate)
NOT_SIMULATED(cudaGraphDebugDotPrint)
NOT_SIMULATED(cudaGraphLaunch)
NOT_SIMULATED(cudaGraphNodeGetDependencies)
NOT_SIMULATED(cudaIpcCloseMemHandle)
NOT_SIMULATED(cudaIpcGetEventHandle)
NOT_SIMULATED(cudaIpcGetMemHandle)
NOT_SIMULATED(cudaIpcOpenEventHandle)
NOT_SIMULATED(cudaIpcOpenMemHandle)
NOT_SIMULATED(cudaKernelSetAttributeForDevice)
NOT_SIMULATED(cudaLibraryGetKernel)
NOT_SIMULATED(cudaLibraryLoadData)
NOT_SIMULATED(cudaLibraryUnload)
NOT_SIMULATED(cudaMallocAsync)
NOT_SIMULATED(cudaMemPoolGetAttribute)
NOT_SIMULATED(cudaMemPoolSetAccess)
NOT_SIMULATED(cudaMemPoolSetAttribute)
NOT_SIMULATED(cudaMemPoolTrimTo)
NOT_SIMULATED(cudaMemcpyToSymbol)
NOT_SIMULATED(cudaStreamBeginCaptureToGraph)
NOT_SIMULATED(cudaStreamUpdateCaptureDependencies)
