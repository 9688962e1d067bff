// NVML: as many devices as CUDA has, no processes, no fabric. torch asks it before it uses expandable segments.
#include <stdio.h>
#include <string.h>

#include "machine.h"

constexpr int kNvmlNotSupported = 3;

static void *device_handle(unsigned index) { return (void *)(uintptr_t)(index + 1); }

EXPORT int nvmlInit() { return kSuccess; }
EXPORT int nvmlInit_v2() { return kSuccess; }
EXPORT int nvmlInitWithFlags(unsigned) { return kSuccess; }
EXPORT int nvmlShutdown() { return kSuccess; }
EXPORT const char *nvmlErrorString(int status) { return status ? "not modelled by the virtual GPU" : "no error"; }
EXPORT int nvmlDeviceGetCount_v2(unsigned *out) {
  *out = (unsigned)virtual_gpu::settings().devices;
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **out) {
  *out = device_handle(index);
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, void **out) {
  unsigned domain = 0, device = 1;
  sscanf(bus, "%x:%x", &domain, &device);
  *out = device_handle(device - 1);
  return kSuccess;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *, void **out) {
  *out = device_handle(0);
  return kSuccess;
}
EXPORT int nvmlDeviceGetUUID(void *device, char *out, unsigned length) {
  snprintf(out, length, "GPU-00000000-0000-0000-0000-%012lx", (unsigned long)(uintptr_t)device);
  return kSuccess;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *, unsigned *count, void *) {
  *count = 0;
  return kSuccess;
}
EXPORT int nvmlDeviceGetP2PStatus(void *, void *, int, int *out) {
  *out = 0;  // peers can be reached
  return kSuccess;
}
EXPORT int nvmlDeviceGetGpuFabricInfoV(void *, char *info) {
  info[28] = 0;  // its member `state`: the device is in no fabric
  return kSuccess;
}
EXPORT int nvmlDeviceGetNvLinkRemoteDeviceType(void *, unsigned, int *out) {
  *out = 1;  // a switch
  return kSuccess;
}
EXPORT int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *, unsigned, void *) { return kNvmlNotSupported; }
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *out) {
  *out = 13000;
  return kSuccess;
}
EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned length) {
  snprintf(out, length, "580.65.06");
  return kSuccess;
}
