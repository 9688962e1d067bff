// Devices: how many, what they say of themselves, errors, and the driver's entries for devices and contexts.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "machine.h"

using namespace virtual_gpu;

namespace virtual_gpu {

static thread_local int chosen = 0, last_error = kSuccess;

int current_device() { return chosen; }

int set_error(int status) {
  if (status) last_error = status;
  return status;
}

static bool exists(int device) { return device >= 0 && device < settings().devices; }

// What cudaDeviceGetAttribute and cuDeviceGetAttribute answer; the numbers are those of CUdevice_attribute.
static int attribute(int number) {
  const Profile &gpu = *settings().gpu;
  const int shared = (int)(gpu.shared_per_processor_kib * 1024);
  switch (number) {
    case 1: case 2: case 3: return 1024;               // threads of a block, along x and y
    case 4: return 64;                                 // along z
    case 5: return 2147483647;                         // blocks of a grid along x
    case 6: case 7: return 65535;                      // y, z
    case 8: return 49152;                              // shared memory of a block
    case 9: case 12: case 82: return 65536;            // constants, registers
    case 10: return 32;                                // warp
    case 11: return 2147483647;                        // pitch
    case 13: return 1980000;                           // clock, kHz
    case 14: return 512;                               // alignment of textures
    case 16: return gpu.processors;
    case 36: return 2619000;                           // memory clock, kHz
    case 37: return 5120;                              // memory bus, bits
    case 38: return (int)(gpu.l2_mib * kMiB);
    case 39: return 2048;                              // threads of a processor
    case 40: return 3;                                 // copy engines
    case 75: return gpu.major;
    case 76: return gpu.minor;
    case 81: return shared;
    case 97: return shared - 1024;                     // shared memory of a block, opt-in
    case 106: return 32;                               // blocks of a processor
    case 108: return 134217728;                        // window of access policy
    case 111: return 1024;                             // reserved shared memory
    case 132: return settings().multicast;
    // Overlap, mapped host memory, concurrent kernels, unified addresses, priorities, caches, managed memory, preemption,
    // cooperative launches, host registration, virtual memory, POSIX handles, pools, clusters and the like: yes.
    case 15: case 19: case 31: case 41: case 78: case 79: case 80: case 83: case 89: case 90: case 91: case 95: case 99:
    case 102: case 103: case 115: case 120: return 1;
    default: return 0;
  }
}

template <class T>
static void put(char *properties, size_t offset, T value) {
  memcpy(properties + offset, &value, sizeof value);
}

}  // namespace virtual_gpu

EXPORT int cudaGetDeviceCount(int *out) {
  *out = settings().devices;
  return *out ? kSuccess : set_error(kNoDevice);
}
EXPORT int cudaGetDevice(int *out) {
  *out = chosen;
  return kSuccess;
}
EXPORT int cudaSetDevice(int device) {
  if (!exists(device)) return set_error(kInvalidDevice);
  chosen = device;
  return kSuccess;
}
EXPORT int cudaDeviceGetAttribute(int *out, int number, int) {
  *out = attribute(number);
  return kSuccess;
}

EXPORT int cudaGetDeviceProperties(char *out, int device) {
  if (!exists(device)) return set_error(kInvalidDevice);
  namespace at = device_property;
  const Profile &gpu = *settings().gpu;
  const size_t shared = (size_t)(gpu.shared_per_processor_kib * 1024);
  memset(out, 0, at::kSize);
  snprintf(out + at::kName, 256, "%s", gpu.name);
  out[at::kUuid + 15] = (char)(device + 1);
  put<size_t>(out, at::kTotalMemory, (size_t)settings().memory);
  put<size_t>(out, at::kPitch, 2147483647);
  put<size_t>(out, at::kTextureAlignment, 512);
  put<size_t>(out, at::kSharedPerProcessor, shared);
  put<size_t>(out, at::kSharedOptIn, shared - 1024);
  put<size_t>(out, at::kReservedShared, 1024);
  for (size_t offset : {at::kSharedPerBlock}) put<size_t>(out, offset, 49152);
  put<size_t>(out, at::kConstants, 65536);
  for (size_t offset : {at::kRegistersPerBlock, at::kRegistersPerProcessor}) put<int>(out, offset, 65536);
  const int threads[3] = {1024, 1024, 64}, grid[3] = {2147483647, 65535, 65535};
  memcpy(out + at::kThreadsDim, threads, sizeof threads);
  memcpy(out + at::kGridDim, grid, sizeof grid);
  const struct {
    size_t offset;
    int value;
  } rest[] = {{at::kWarp, 32}, {at::kThreadsPerBlock, 1024}, {at::kMajor, gpu.major}, {at::kMinor, gpu.minor}, {at::kProcessors, gpu.processors},
              {at::kPciBus, device + 1}, {at::kCopyEngines, 3}, {at::kBusWidth, 5120}, {at::kL2, (int)(gpu.l2_mib * kMiB)},
              {at::kPersistingL2, 32 << 20}, {at::kThreadsPerProcessor, 2048}, {at::kBlocksPerProcessor, 32}};
  for (auto &[offset, value] : rest) put<int>(out, offset, value);
  for (size_t yes : {at::kCanMapHost, at::kConcurrentKernels, at::kEcc, at::kUnifiedAddressing, at::kPriorities, at::kGlobalL1, at::kLocalL1,
                     at::kManaged, at::kConcurrentManaged, at::kPreemption, at::kRegisteredPointer, at::kCooperative, at::kHostRegister,
                     at::kMemoryPools, at::kIpcEvents, at::kClusters, at::kFunctionPointers})
    put<int>(out, yes, 1);
  return kSuccess;
}

EXPORT int cudaDeviceCanAccessPeer(int *out, int device, int peer) {
  *out = device != peer && exists(device) && exists(peer);
  return kSuccess;
}
EXPORT int cudaDeviceEnablePeerAccess(int peer, unsigned) {
  LOCKED;
  static bool enabled[kMostDevices][kMostDevices];
  if (!exists(peer) || peer == chosen) return set_error(kInvalidDevice);
  if (enabled[chosen][peer]) return set_error(kPeerAccessAlreadyEnabled);
  enabled[chosen][peer] = true;
  return kSuccess;
}
EXPORT int cudaDeviceGetPCIBusId(char *out, int length, int device) {
  snprintf(out, length, "0000:%02X:00.0", device + 1);
  return kSuccess;
}

EXPORT int cudaDeviceSynchronize() {
  Times end;
  {
    LOCKED;
    CALL(cudaDeviceSynchronize);
    if (any_capture(chosen) || capture_forbids()) return set_error(kCaptureUnsupported);
    end = end_of_device(chosen);
  }
  host_wait("cudaDeviceSynchronize", end);
  reach_end_of_all();
  return has_failed() ? set_error(kLaunchFailure) : kSuccess;
}

EXPORT int cudaDriverGetVersion(int *out) {
  *out = 13000;
  return kSuccess;
}
EXPORT int cudaRuntimeGetVersion(int *out) { return cudaDriverGetVersion(out); }
EXPORT int cudaProfilerStart() { return kSuccess; }
EXPORT int cudaProfilerStop() { return kSuccess; }

// ---- errors

EXPORT int cudaGetLastError() {
  int error = last_error;
  last_error = kSuccess;
  return error;
}
EXPORT int cudaPeekAtLastError() { return last_error; }

static const struct {
  int status;
  const char *name, *text;
} kErrors[] = {
    {kSuccess, "cudaSuccess", "no error"},
    {kInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {kOutOfMemory, "cudaErrorMemoryAllocation", "out of memory"},
    {kInvalidConfiguration, "cudaErrorInvalidConfiguration", "invalid configuration argument"},
    {kNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {kInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {kInvalidHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {kIllegalState, "cudaErrorIllegalState", "the operation cannot be performed in the present state"},
    {kNotFound, "cudaErrorSymbolNotFound", "named symbol not found"},
    {kNotReady, "cudaErrorNotReady", "device not ready"},
    {kPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {kHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {kHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {kLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {kNotSupported, "cudaErrorNotSupported", "operation not supported (not modelled by the virtual GPU)"},
    {kCaptureUnsupported, "cudaErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {kCaptureInvalidated, "cudaErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {kCaptureUnjoined, "cudaErrorStreamCaptureUnjoined", "capturing stream has unjoined work"},
    {kCaptureIsolation, "cudaErrorStreamCaptureIsolation", "dependency created on uncaptured work in another stream"},
    {kCapturedEvent, "cudaErrorCapturedEvent", "operation not permitted on an event last recorded in a capturing stream"},
    {kLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure: stderr has the work that failed"},
    {kCaptureWrongThread, "cudaErrorStreamCaptureWrongThread", "attempt to terminate a thread-local capture sequence from another thread"},
};
EXPORT const char *cudaGetErrorName(int status) {
  for (auto &error : kErrors)
    if (error.status == status) return error.name;
  return "cudaErrorUnknown";
}
EXPORT const char *cudaGetErrorString(int status) {
  for (auto &error : kErrors)
    if (error.status == status) return error.text;
  return "unknown error of the virtual GPU";
}

// ---- the driver's entries for devices and contexts; a context is a number

static void *context_of(int device) { return (void *)(uintptr_t)(0x1000 + device); }

EXPORT int cuInit(unsigned) { return kSuccess; }
EXPORT int cuDriverGetVersion(int *out) { return cudaDriverGetVersion(out); }
EXPORT int cuDeviceGetCount(int *out) { return cudaGetDeviceCount(out); }
EXPORT int cuDeviceGet(int *out, int ordinal) {
  *out = ordinal;
  return exists(ordinal) ? kSuccess : kInvalidDevice;
}
EXPORT int cuDeviceGetName(char *out, int length, int) {
  snprintf(out, length, "%s", settings().gpu->name);
  return kSuccess;
}
EXPORT int cuDeviceGetUuid_v2(char *out, int device) {
  memset(out, 0, 16);
  out[15] = (char)(device + 1);
  return kSuccess;
}
EXPORT int cuDeviceTotalMem_v2(size_t *out, int) {
  *out = (size_t)settings().memory;
  return kSuccess;
}
EXPORT int cuDeviceGetAttribute(int *out, int number, int) {
  *out = attribute(number);
  return kSuccess;
}
EXPORT int cuDevicePrimaryCtxGetState(int, unsigned *flags, int *active) {
  *flags = 0, *active = 1;
  return kSuccess;
}
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
  *out = context_of(device);
  return kSuccess;
}
EXPORT int cuCtxGetCurrent(void **out) {
  *out = context_of(chosen);
  return kSuccess;
}
EXPORT int cuCtxSetCurrent(void *context) {
  if ((uintptr_t)context >= 0x1000) chosen = (int)((uintptr_t)context - 0x1000);
  return kSuccess;
}
EXPORT int cuCtxPushCurrent_v2(void *context) { return cuCtxSetCurrent(context); }
EXPORT int cuCtxPopCurrent_v2(void **out) { return cuCtxGetCurrent(out); }
EXPORT int cuCtxGetDevice(int *out) { return cudaGetDevice(out); }
EXPORT int cuCtxGetLimit(size_t *out, int) {
  *out = 1024;
  return kSuccess;
}
EXPORT int cuCtxSetLimit(int, size_t) { return kSuccess; }
EXPORT int cuGetErrorString(int status, const char **out) {
  *out = cudaGetErrorString(status);
  return kSuccess;
}
EXPORT int cuGetErrorName(int status, const char **out) {
  *out = cudaGetErrorName(status);
  return kSuccess;
}
EXPORT int cuLogsRegisterCallback(void *, void *, void **out) {
  if (out) *out = nullptr;
  return kSuccess;
}
EXPORT int cuLogsUnregisterCallback(void *) { return kSuccess; }

// Entries of the driver are asked for by name. One that is not here is answered with a function that refuses.
static int refuse() { return kNotSupported; }

EXPORT int cudaGetDriverEntryPointByVersion(const char *name, void **out, unsigned, unsigned long long, int *found) {
  static void *self = [] {
    Dl_info here;
    dladdr((void *)&cuInit, &here);
    return dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD);
  }();
  *out = dlsym(self, name);
  if (!*out) *out = dlsym(self, (std::string(name) + "_v2").c_str());
  if (!*out) {
    LOCKED;
    record().calls[std::string("unknown entry ") + name]++;
    *out = (void *)&refuse;
  }
  if (found) *found = 0;
  return kSuccess;
}
