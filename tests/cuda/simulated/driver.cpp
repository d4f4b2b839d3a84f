// libcuda.so.1: that the driver is there, and which devices are in use, is all that torch asks it here.
#include <cuda.h>

extern "C" {

CUresult cuInit(unsigned /*flags*/) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int* version) {
  *version = 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice /*device*/, unsigned* flags, int* is_active) {
  *flags = 0;
  *is_active = 1;
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = nullptr;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult /*error*/, const char** text) {
  *text = "not simulated";
  return CUDA_SUCCESS;
}
}
