// Kernels: they are registered, counted and timed by what their name, grid and arguments say; nothing is computed.
#include <cxxabi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <unordered_map>

#include "durations.h"

using namespace virtual_gpu;

namespace virtual_gpu {

std::vector<Kernel *> &kernels() {
  static auto *all = new std::vector<Kernel *>;
  return *all;
}

static std::unordered_map<const void *, Kernel *> &by_handle() {
  static auto *all = new std::unordered_map<const void *, Kernel *>;
  return *all;
}

static Kernel *add_kernel(const void *handle, const char *symbol) {
  LOCKED;
  auto *kernel = new Kernel;
  kernel->symbol = symbol;
  kernels().push_back(kernel);
  by_handle()[handle ? handle : kernel] = kernel;
  return kernel;
}

// A handle is the address of a host stub that was registered, or a kernel that was given out.
static Kernel *kernel_of(const void *handle) {
  auto at = by_handle().find(handle);
  Kernel *kernel = at != by_handle().end() ? at->second : add_kernel(handle, "a kernel that was not registered");
  if (kernel->name.empty()) {
    int status;  // a plain name is none of C++, and could be read as one of its types
    const bool mangled = kernel->symbol.rfind("_Z", 0) == 0;
    char *text = mangled ? abi::__cxa_demangle(kernel->symbol.c_str(), nullptr, nullptr, &status) : nullptr;
    kernel->name = text ? text : kernel->symbol;
    free(text);
  }
  return kernel;
}

// A kernel that no operator covers would leave garbage. One that only takes time may run.
static bool lacks_arithmetic(const Kernel &kernel) {
  if (!computes() || vgpu_covered() || kernel.name.find("spin_kernel") != std::string::npos) return false;
  fprintf(stderr, "virtual GPU: the kernel %.300s has no arithmetic: no operator of torch launches it\n", kernel.name.c_str());
  return true;
}

// Seconds of this thread's next kernel, if a program has told its bytes or its operations in fp32 (none of a tensor core).
static thread_local double next_takes = 0;
EXPORT void vgpu_next_kernel(double bytes, double fp32_operations) {
  next_takes = std::max(bytes / settings().memory_rate, fp32_operations / settings().fp32);
}

static int launch(const void *handle, Dim3 grid, Dim3 block, void **arguments, Stream *stream) {
  LOCKED;
  if (!grid.x || !grid.y || !grid.z || !block.x || (uint64_t)block.x * block.y * block.z > 1024) return set_error(kInvalidConfiguration);
  Kernel *kernel = kernel_of(handle);
  if (lacks_arithmetic(*kernel)) return set_error(kNotSupported);
  const double seconds = next_takes > 0 ? std::max(settings().shortest_kernel, next_takes)
                                        : seconds_of(kernel->name, Shape{grid, block, arguments});
  next_takes = 0;
  kernel->launches++, kernel->seconds += seconds;
  record().launches++;
  host_spends(settings().launch);
  if (settings().trace) fprintf(stderr, "[virtual GPU] launch %.100s stream %d\n", kernel->name.c_str(), stream_of(stream)->index);
  const bool waits = kernel->name.find("spin_kernel") != std::string::npos;
  enqueue(stream, of_kernel(seconds), kernel, seconds > settings().shortest_kernel && !waits);
  return kSuccess;
}

Work work_of_signals(const std::string &name, void **arguments);  // signals.cpp

// A kernel that torch has compiled: nearly all only take time, and those by which ranks signal to each other do so.
static int launch_compiled(const void *handle, Dim3 grid, Dim3 block, void **arguments, Stream *stream) {
  Work signals;
  {
    LOCKED;
    signals = work_of_signals(kernel_of(handle)->name, arguments);
  }
  if (signals) vgpu_cover(1);  // they are its arithmetic
  const int status = launch(handle, grid, block, arguments, stream);
  if (signals) vgpu_cover(-1);
  if (signals && !status) enqueue_work(stream, "signals of symmetric memory", signals);
  return status;
}

int run_product(Stream *stream, const char *what, double operations, double bytes, double rate) {
  LOCKED;
  if (computes() && !vgpu_covered()) {
    fprintf(stderr, "virtual GPU: the product %s has no arithmetic: no operator of torch asks for it\n", what);
    return kProductNotSupported;
  }
  const double seconds = std::max({settings().shortest_kernel, operations / rate, bytes / settings().memory_rate});
  Count &count = record().products[what];
  count.times++, count.amount += seconds;
  record().launches++;
  record().operations += operations;
  host_spends(settings().launch);
  enqueue(stream, of_kernel(seconds), nullptr, true);
  return kSuccess;
}

void run_collective(Stream *stream, const char *what, double bytes, const Times &seconds) {
  LOCKED;
  Count &count = record().collectives[what];
  count.times++, count.amount += bytes;
  record().launches++;
  host_spends(settings().launch);
  enqueue(stream, seconds);
}

}  // namespace virtual_gpu

// ---- registration, as nvcc's code does it before `main`

EXPORT void **__cudaRegisterFatBinary(void *binary) { return new void *(binary); }
EXPORT void __cudaRegisterFatBinaryEnd(void **) {}
EXPORT void __cudaUnregisterFatBinary(void **) {}
EXPORT char __cudaInitModule(void **) { return 1; }
EXPORT void __cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int) {}
EXPORT void __cudaRegisterManagedVar(void **, void **, char *, const char *, int, size_t, int, int) {}
EXPORT void __cudaRegisterFunction(void **, const char *stub, char *, const char *symbol, int, void *, void *, void *, void *, int *) {
  add_kernel(stub, symbol);
}
EXPORT int __cudaGetKernel(Kernel **out, const void *stub) {
  LOCKED;
  *out = kernel_of(stub);
  by_handle()[*out] = *out;
  return kSuccess;
}
EXPORT int __cudaLaunchKernel(Kernel *kernel, Dim3 grid, Dim3 block, void **arguments, size_t, Stream *stream) {
  return launch_compiled(kernel, grid, block, arguments, stream);
}

struct Pending {
  Dim3 grid, block;
  size_t shared;
  Stream *stream;
};
static std::vector<Pending> &pending() {  // what stands between <<< and >>>
  static thread_local auto *all = new std::vector<Pending>;
  return *all;
}

EXPORT unsigned __cudaPushCallConfiguration(Dim3 grid, Dim3 block, size_t shared, Stream *stream) {
  pending().push_back({grid, block, shared, stream});
  return kSuccess;
}
EXPORT int __cudaPopCallConfiguration(Dim3 *grid, Dim3 *block, size_t *shared, Stream **stream) {
  const Pending last = pending().back();
  pending().pop_back();
  *grid = last.grid, *block = last.block, *shared = last.shared, *stream = last.stream;
  return kSuccess;
}

// ---- launches

EXPORT int cudaLaunchKernel(const void *stub, Dim3 grid, Dim3 block, void **arguments, size_t, Stream *stream) {
  return launch_compiled(stub, grid, block, arguments, stream);
}
EXPORT int cudaLaunchCooperativeKernel(const void *stub, Dim3 grid, Dim3 block, void **arguments, size_t, Stream *stream) {
  return launch(stub, grid, block, arguments, stream);
}
EXPORT int cudaLaunchKernelExC(const RuntimeLaunch *how, const void *stub, void **arguments) {
  return launch(stub, how->grid, how->block, arguments, how->stream);
}
// The driver returns its errors and does not keep them for the runtime.
extern "C" int cudaGetLastError();
static int returned(int status) {
  if (status) cudaGetLastError();
  return status;
}
EXPORT int cuLaunchKernel(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned, Stream *stream, void **arguments, void **) {
  return returned(launch(kernel, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, arguments, stream));
}
EXPORT int cuLaunchCooperativeKernel(void *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
                                     unsigned block_z, unsigned, Stream *stream, void **arguments) {
  return returned(launch(kernel, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, arguments, stream));
}
EXPORT int cuLaunchKernelEx(const DriverLaunch *how, void *kernel, void **arguments, void **) {
  return returned(launch(kernel, how->grid, how->block, arguments, how->stream));
}

// ---- functions and modules: a module is any address, its functions are made when they are asked for

EXPORT int cudaFuncGetAttributes(FunctionAttributes *out, const void *) {
  const int version = settings().gpu->major * 10 + settings().gpu->minor;
  memset(out, 0, sizeof *out);
  out->most_threads = 1024, out->registers = 64, out->ptx_version = out->binary_version = version;
  out->most_dynamic_shared = (int)(settings().gpu->shared_per_processor_kib * 1024) - 1024;
  return kSuccess;
}
EXPORT int cudaFuncSetAttribute(const void *, int, int) { return kSuccess; }
EXPORT int cudaKernelSetAttributeForDevice(void *, int, int, int) { return kSuccess; }
EXPORT int cudaLibraryLoadData(void **out, const void *, void *, void **, unsigned, void *, void **, unsigned) {
  *out = malloc(8);
  return kSuccess;
}
EXPORT int cudaLibraryUnload(void *library) {
  free(library);
  return kSuccess;
}
EXPORT int cudaLibraryGetKernel(Kernel **out, void *, const char *name) {
  *out = add_kernel(nullptr, name);
  return kSuccess;
}
EXPORT int cuModuleLoadData(void **out, const void *) {
  *out = malloc(8);
  return kSuccess;
}
EXPORT int cuModuleLoadDataEx(void **out, const void *image, unsigned, void *, void **) { return cuModuleLoadData(out, image); }
EXPORT int cuModuleLoad(void **out, const char *) { return cuModuleLoadData(out, nullptr); }
EXPORT int cuModuleUnload(void *module) { return cudaLibraryUnload(module); }
EXPORT int cuModuleGetFunction(Kernel **out, void *, const char *name) {
  *out = add_kernel(nullptr, name);
  return kSuccess;
}
EXPORT int cuFuncGetAttribute(int *out, int number, void *) {
  *out = number == 0 ? 1024 : number == 4 ? 32 : 0;  // threads of a block, registers
  return kSuccess;
}
EXPORT int cuFuncSetAttribute(void *, int, int) { return kSuccess; }
EXPORT int cuFuncSetCacheConfig(void *, int) { return kSuccess; }

static int resident_blocks(int threads, size_t shared) {
  int blocks = threads > 0 ? 2048 / threads : 1;
  if (shared) blocks = std::min(blocks, (int)(settings().gpu->shared_per_processor_kib * 1024 / (double)(shared + 1024)));
  return std::clamp(blocks, 1, 32);
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *out, const void *, int threads, size_t shared) {
  *out = resident_blocks(threads, shared);
  return kSuccess;
}
EXPORT int cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *out, const void *, int threads, size_t shared, unsigned) {
  *out = resident_blocks(threads, shared);
  return kSuccess;
}
EXPORT int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *out, void *, int threads, size_t shared) {
  *out = resident_blocks(threads, shared);
  return kSuccess;
}
EXPORT int cuOccupancyMaxActiveClusters(int *out, void *, const DriverLaunch *) {
  *out = settings().gpu->processors / 2;
  return kSuccess;
}

// Descriptors that Triton makes for the tensor memory accelerator: kernels that read them never run.
EXPORT int cuTensorMapEncodeTiled() { return kSuccess; }
EXPORT int cuTensorMapEncodeIm2col() { return kSuccess; }

static int not_linked(const char *name) {
  not_modelled(name);
  return kNotSupported;
}
EXPORT int cuLinkCreate_v2() { return not_linked("cuLinkCreate_v2"); }
EXPORT int cuLinkAddData_v2() { return not_linked("cuLinkAddData_v2"); }
EXPORT int cuLinkComplete() { return not_linked("cuLinkComplete"); }
