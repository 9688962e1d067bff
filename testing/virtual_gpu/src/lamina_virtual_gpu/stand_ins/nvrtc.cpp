// NVRTC: programs "compile" to eight zero bytes, which the virtual GPU loads and launches as nothing.
#include <stdlib.h>
#include <string.h>

#include "machine.h"

constexpr size_t kImage = 8;

EXPORT int nvrtcVersion(int *major, int *minor) {
  *major = 13, *minor = 0;
  return kSuccess;
}
EXPORT int nvrtcCreateProgram(void **out, const char *, const char *, int, const char *const *, const char *const *) {
  *out = calloc(1, 64);
  return kSuccess;
}
EXPORT int nvrtcDestroyProgram(void **program) {
  free(*program);
  return kSuccess;
}
EXPORT int nvrtcAddNameExpression(void *, const char *) { return kSuccess; }
EXPORT int nvrtcCompileProgram(void *, int, const char *const *) { return kSuccess; }
EXPORT int nvrtcGetPTXSize(void *, size_t *out) {
  *out = kImage;
  return kSuccess;
}
EXPORT int nvrtcGetCUBINSize(void *program, size_t *out) { return nvrtcGetPTXSize(program, out); }
EXPORT int nvrtcGetPTX(void *, char *out) {
  memset(out, 0, kImage);
  return kSuccess;
}
EXPORT int nvrtcGetCUBIN(void *program, char *out) { return nvrtcGetPTX(program, out); }
EXPORT int nvrtcGetProgramLogSize(void *, size_t *out) {
  *out = 1;
  return kSuccess;
}
EXPORT int nvrtcGetProgramLog(void *, char *out) {
  *out = 0;
  return kSuccess;
}
EXPORT int nvrtcGetLoweredName(void *, const char *name, const char **out) {
  *out = name;
  return kSuccess;
}
EXPORT const char *nvrtcGetErrorString(int) { return "not modelled by the virtual GPU"; }
