// cuDNN: it says who it is and refuses to work. torch's own kernels are used in its place (`activate.py` switches it off).
#include <stddef.h>

#include "machine.h"

constexpr int kUnsupported = 3000;

EXPORT size_t cudnnGetVersion() { return 92400; }
EXPORT size_t cudnnGetCudartVersion() { return 13000; }
EXPORT int cudnnGetProperty(int which, int *out) {
  *out = which == 0 ? 9 : which == 1 ? 24 : 0;  // major, minor, patch
  return kSuccess;
}
EXPORT const char *cudnnGetErrorString(int) { return "not modelled by the virtual GPU"; }
EXPORT void cudnnGetLastErrorString(char *out, size_t length) {
  if (length) *out = 0;
}
EXPORT int cudnnBackendCreateDescriptor(int, void **out) {
  *out = nullptr;
  vgpu_not_modelled("cudnnBackendCreateDescriptor");
  return kUnsupported;
}
