// Memory. All device memory of this process lies in one file in memory, which the system fills page by page when it is touched:
// 80 GB cost nothing until then. Another process can open it (CUDA IPC), and a range can be mapped twice (virtual memory API).
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

#include "machine.h"

using namespace virtual_gpu;

namespace virtual_gpu {

constexpr size_t kGranule = 2 << 20, kPage = 4096;

static size_t rounded(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// ---- the file

class Arena {
 public:
  Arena() : file(memfd_create("virtual-gpu", MFD_CLOEXEC)) {}
  // Returns the offset of a free range; the smallest that fits, or a new one at the end.
  size_t take(size_t bytes) {
    auto best = free_.end();
    for (auto at = free_.begin(); at != free_.end(); ++at)
      if (at->second >= bytes && (best == free_.end() || at->second < best->second)) best = at;
    if (best != free_.end()) {
      size_t offset = best->first, rest = best->second - bytes;
      free_.erase(best);
      if (rest) free_[offset + bytes] = rest;
      return offset;
    }
    size_t offset = end_;
    end_ += bytes;
    if (ftruncate(file, (off_t)end_)) perror("virtual GPU: ftruncate");
    return offset;
  }
  void give_back(size_t offset, size_t bytes) {
    fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)offset, (off_t)bytes);
    auto after = free_.emplace(offset, bytes).first, next = std::next(after);
    if (next != free_.end() && offset + bytes == next->first) after->second += next->second, free_.erase(next);
    if (after != free_.begin()) {
      auto before = std::prev(after);
      if (before->first + before->second == after->first) before->second += after->second, free_.erase(after);
    }
  }
  const int file;

 private:
  size_t end_ = 0;
  std::map<size_t, size_t> free_;
};

static Arena &arena() {
  static auto *made = new Arena;
  return *made;
}

// Physical memory of one device: a range of the file.
struct Physical {
  size_t offset, bytes;
  int device, file;
  int references = 1;
};

static double used[kMostDevices];

static Physical *take_physical(size_t bytes, int device, bool own_file = false) {
  if (used[device] + (double)bytes > settings().memory - settings().context) return nullptr;
  used[device] += (double)bytes;
  if (!own_file) return new Physical{arena().take(bytes), bytes, device, arena().file};
  int file = memfd_create("virtual-gpu-shared", MFD_CLOEXEC);
  if (ftruncate(file, (off_t)bytes)) perror("virtual GPU: ftruncate");
  return new Physical{0, bytes, device, file};
}

static void drop(Physical *memory) {
  if (--memory->references) return;
  if (memory->file == arena().file) arena().give_back(memory->offset, memory->bytes);
  else close(memory->file);
  if (memory->device >= 0) used[memory->device] -= (double)memory->bytes;
  delete memory;
}

// ---- addresses

struct Range : Allocation {
  size_t mapped;
  Physical *memory;
};

static std::map<uintptr_t, Range> &ranges() {
  static auto *all = new std::map<uintptr_t, Range>;
  return *all;
}

Allocation *allocation_at(const void *address, uintptr_t *base) {
  auto &all = ranges();
  auto at = all.upper_bound((uintptr_t)address);
  if (at == all.begin()) return nullptr;
  --at;
  if ((uintptr_t)address >= at->first + at->second.bytes) return nullptr;
  if (base) *base = at->first;
  return &at->second;
}

// Address space of whole granules, aligned to one.
static char *reserve(size_t bytes) {
  char *raw = (char *)mmap(nullptr, bytes + kGranule, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char *start = (char *)rounded((uintptr_t)raw, kGranule);
  if (start > raw) munmap(raw, start - raw);
  if (size_t tail = raw + kGranule - start) munmap(start + bytes, tail);
  return start;
}

static bool map_file(char *at, const Physical &memory) {
  return mmap(at, memory.bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, memory.file, (off_t)memory.offset) != MAP_FAILED;
}

static int allocate(void **out, size_t bytes) {
  *out = nullptr;
  if (!bytes) return kSuccess;
  size_t whole = rounded(bytes, kPage);
  Physical *memory = take_physical(whole, current_device());
  if (!memory) return set_error(kOutOfMemory);
  char *at = reserve(rounded(whole, kGranule));
  if (!at || !map_file(at, *memory)) return drop(memory), set_error(kOutOfMemory);
  ranges()[(uintptr_t)at] = Range{{bytes, memory->device, Kind::device}, rounded(whole, kGranule), memory};
  *out = at;
  return kSuccess;
}

static int release(void *address, Kind kind) {
  auto at = ranges().find((uintptr_t)address);
  if (at == ranges().end() || at->second.kind != kind) return set_error(kInvalidValue);
  munmap(address, at->second.mapped);
  forget(address, at->second.mapped);
  if (at->second.memory) drop(at->second.memory);
  ranges().erase(at);
  return kSuccess;
}

}  // namespace virtual_gpu

// ---- allocation

EXPORT int cudaMalloc(void **out, size_t bytes) {
  LOCKED;
  CALL(cudaMalloc);
  if (capture_forbids()) return set_error(kCaptureUnsupported);
  host_spends(settings().allocation);
  return allocate(out, bytes);
}
EXPORT int cudaFree(void *address) {
  Times idle;
  {
    LOCKED;
    CALL(cudaFree);
    if (!address) return kSuccess;
    if (capture_forbids()) return set_error(kCaptureUnsupported);
    idle = end_of_device(current_device());
  }
  host_wait("cudaFree", idle);
  reach_end_of_all();
  LOCKED;
  return release(address, Kind::device);
}
EXPORT int cudaMallocAsync(void **out, size_t bytes, Stream *) {
  LOCKED;
  CALL(cudaMallocAsync);
  return allocate(out, bytes);
}
EXPORT int cudaFreeAsync(void *address, Stream *) {
  reach_end_of_all();
  LOCKED;
  CALL(cudaFreeAsync);
  return release(address, Kind::device);
}
EXPORT int cudaMemGetInfo(size_t *free_bytes, size_t *total) {
  LOCKED;
  CALL(cudaMemGetInfo);
  *total = (size_t)settings().memory;
  *free_bytes = (size_t)(settings().memory - settings().context - used[current_device()]);
  return kSuccess;
}

EXPORT int cudaHostAlloc(void **out, size_t bytes, unsigned) {
  LOCKED;
  CALL(cudaHostAlloc);
  host_spends(settings().allocation);
  size_t whole = rounded(std::max<size_t>(bytes, 1), kPage);
  *out = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (*out == MAP_FAILED) return set_error(kOutOfMemory);
  ranges()[(uintptr_t)*out] = Range{{bytes, current_device(), Kind::pinned}, whole, nullptr};
  Count &count = record().copies["pinned memory"];
  count.times++, count.amount += (double)bytes;
  return kSuccess;
}
EXPORT int cudaFreeHost(void *address) {
  reach_end_of_all();
  LOCKED;
  CALL(cudaFreeHost);
  return address ? release(address, Kind::pinned) : kSuccess;
}
EXPORT int cudaHostRegister(void *address, size_t bytes, unsigned) {
  LOCKED;
  CALL(cudaHostRegister);
  if (allocation_at(address)) return set_error(kHostMemoryAlreadyRegistered);
  ranges()[(uintptr_t)address] = Range{{bytes, current_device(), Kind::registered}, 0, nullptr};
  return kSuccess;
}
EXPORT int cudaHostUnregister(void *address) {
  reach_end_of_all();
  LOCKED;
  CALL(cudaHostUnregister);
  auto at = ranges().find((uintptr_t)address);
  if (at == ranges().end() || at->second.kind != Kind::registered) return set_error(kHostMemoryNotRegistered);
  forget(address, at->second.bytes);
  ranges().erase(at);
  return kSuccess;
}

EXPORT int cudaPointerGetAttributes(PointerAttributes *out, const void *address) {
  LOCKED;
  CALL(cudaPointerGetAttributes);
  memset(out, 0, sizeof *out);
  Allocation *at = allocation_at(address);
  if (!at) {
    out->type = kUnregistered, out->device = -2, out->host_pointer = (void *)address;
    return kSuccess;
  }
  out->type = at->kind == Kind::pinned || at->kind == Kind::registered ? kHost : kDevice;
  out->device = at->device, out->device_pointer = (void *)address;
  out->host_pointer = out->type == kHost ? (void *)address : nullptr;
  return kSuccess;
}
EXPORT int cudaGetSymbolAddress(void **out, const void *) {
  LOCKED;
  return allocate(out, kPage);
}

// ---- copies: executed up to a size, so that small values that steer the host are right

static uint64_t reads_of_devices = 0;  // of the whole process: `reset` leaves it (values.py)
EXPORT unsigned long long vgpu_reads() {
  LOCKED;
  return reads_of_devices;
}

static void (*on_read)() = nullptr;
EXPORT void vgpu_on_read(void (*act)()) { on_read = act; }

static bool on_device(Allocation *at) { return at && (at->kind == Kind::device || at->kind == Kind::reserved); }

static int copy(void *to, const void *from, size_t bytes, Stream *stream, bool waits, const char *call) {
  Times end;
  std::string what;
  bool pageable, read;
  {
    LOCKED;
    Allocation *target = allocation_at(to), *source = allocation_at(from);
    bool into = on_device(target), out_of = on_device(source);
    pageable = (into && !out_of && !source) || (out_of && !into && !target);
    what = std::string(into ? (out_of ? "device to device" : "host to device") : out_of ? "device to host" : "host to host") +
           (pageable ? ", pageable" : "");
    if (waits && capture_forbids()) return set_error(kCaptureUnsupported);
    if (stream_of(stream)->capture && pageable) {
      stream_of(stream)->capture->broken = true;
      return set_error(kCaptureUnsupported);
    }
    Count &count = record().copies[what];
    count.times++, count.amount += (double)bytes;
    read = out_of && !into;
    reads_of_devices += read;
    host_spends(settings().call + settings().launch);
    bool inside = into && out_of;
    if (!queues_work() && bytes <= (inside ? settings().largest_device_copy : settings().largest_copy)) memmove(to, from, bytes);
    end = enqueue(stream, inside ? of_kernel(2 * (double)bytes / settings().memory_rate + 1.5e-6) : everywhere((double)bytes / settings().host_rate + 1.5e-6),
                  nullptr, inside);
  }
  const bool recorded_alone = vgpu_covered() && !read && what.rfind("device to device", 0) == 0;
  if (!recorded_alone) enqueue_work(stream, "a copy", in_one_go([=] { memmove(to, from, bytes); }), {{from, bytes, false}, {to, bytes, true}});
  if (waits || pageable) reach_end_of(stream);
  if (read && on_read) on_read();
  if (waits || pageable) host_wait((std::string(call) + " " + what).c_str(), end);
  return kSuccess;
}

EXPORT int cudaMemcpy(void *to, const void *from, size_t bytes, int) {
  CALL(cudaMemcpy);
  return copy(to, from, bytes, nullptr, true, "cudaMemcpy");
}
EXPORT int cudaMemcpyAsync(void *to, const void *from, size_t bytes, int, Stream *stream) {
  CALL(cudaMemcpyAsync);
  return copy(to, from, bytes, stream, false, "cudaMemcpyAsync");
}
EXPORT int cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t bytes, Stream *stream) {
  CALL(cudaMemcpyPeerAsync);
  return copy(to, from, bytes, stream, false, "cudaMemcpyPeerAsync");
}
static Accesses rows_of(const char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height) {
  Accesses rows;
  for (size_t row = 0; row < height; row++) {
    rows.push_back({from + row * from_pitch, width, false});
    rows.push_back({to + row * to_pitch, width, true});
  }
  return rows;
}
EXPORT int cudaMemcpy2DAsync(char *to, size_t to_pitch, const char *from, size_t from_pitch, size_t width, size_t height, int, Stream *stream) {
  auto copy_rows = [=] {
    for (size_t row = 0; row < height; row++) memmove(to + row * to_pitch, from + row * from_pitch, width);
  };
  {
    LOCKED;
    CALL(cudaMemcpy2DAsync);
    if (!queues_work() && width * height <= settings().largest_device_copy) copy_rows();
    Count &count = record().copies["rows"];
    count.times++, count.amount += (double)(width * height);
    enqueue(stream, of_kernel(2 * (double)(width * height) / settings().memory_rate + 1.5e-6), nullptr, true);
  }
  if (!vgpu_covered()) enqueue_work(stream, "a copy of rows", in_one_go(copy_rows), rows_of(to, to_pitch, from, from_pitch, width, height));
  return kSuccess;
}
EXPORT int cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, int) { return kSuccess; }

// Zeroes of whole pages give the pages back to the system in place of touching them.
static void fill(char *at, int value, size_t bytes) {
  char *first = (char *)rounded((uintptr_t)at, kPage), *last = (char *)((uintptr_t)(at + bytes) / kPage * kPage);
  if (value == 0 && last > first && madvise(first, last - first, MADV_REMOVE) == 0) {
    memset(at, 0, first - at);
    memset(last, 0, at + bytes - last);
  } else if (bytes <= settings().largest_copy) {
    memset(at, value, bytes);
  }
}
EXPORT int cudaMemsetAsync(void *at, int value, size_t bytes, Stream *stream) {
  {
    LOCKED;
    CALL(cudaMemsetAsync);
    Count &count = record().copies["fill"];
    count.times++, count.amount += (double)bytes;
    host_spends(settings().launch);
    if (!queues_work()) fill((char *)at, value, bytes);
    enqueue(stream, of_kernel((double)bytes / settings().memory_rate + 1.5e-6), nullptr, true);
  }
  if (!vgpu_covered()) enqueue_work(stream, "a fill", in_one_go([=] { fill((char *)at, value, bytes); }), {{at, bytes, true}});
  return kSuccess;
}
EXPORT int cudaMemset(void *at, int value, size_t bytes) { return cudaMemsetAsync(at, value, bytes, nullptr); }
EXPORT int cuMemsetD32Async(uint32_t *at, unsigned value, size_t count, Stream *stream) {
  if (!queues_work()) std::fill(at, at + count, value);
  enqueue(stream, of_kernel(settings().shortest_kernel));
  if (!vgpu_covered()) enqueue_work(stream, "a fill", in_one_go([=] { std::fill(at, at + count, value); }), {{at, count * sizeof *at, true}});
  return kSuccess;
}

// ---- IPC: a handle names the process, its file and the range

struct IpcName {
  pid_t process;
  int file;
  size_t offset, bytes;
  void *address;
};

EXPORT int cudaIpcGetMemHandle(IpcHandle *out, void *address) {
  LOCKED;
  auto at = ranges().find((uintptr_t)address);
  if (at == ranges().end() || !at->second.memory) return set_error(kInvalidValue);
  const Physical &memory = *at->second.memory;
  IpcName name{getpid(), memory.file, memory.offset, memory.bytes, address};
  memset(out, 0, sizeof *out);
  memcpy(out, &name, sizeof name);
  return kSuccess;
}
EXPORT int cudaIpcOpenMemHandle(void **out, IpcHandle handle, unsigned) {
  LOCKED;
  IpcName name;
  memcpy(&name, &handle, sizeof name);
  if (name.process == getpid()) return set_error(kInvalidValue);  // CUDA opens no handle in the process that made it
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", name.process, name.file);
  int file = open(path, O_RDWR | O_CLOEXEC);
  if (file < 0) return set_error(kInvalidHandle);
  auto *memory = new Physical{name.offset, name.bytes, -1, file};
  char *at = reserve(rounded(name.bytes, kGranule));
  if (!at || !map_file(at, *memory)) return drop(memory), set_error(kOutOfMemory);
  ranges()[(uintptr_t)at] = Range{{name.bytes, current_device(), Kind::device}, rounded(name.bytes, kGranule), memory};
  *out = at;
  return kSuccess;
}
EXPORT int cudaIpcCloseMemHandle(void *address) {
  LOCKED;
  return release(address, Kind::device);
}

// ---- virtual memory management (expandable segments)

EXPORT int cuMemGetAllocationGranularity(size_t *out, const PhysicalProperties *, int) {
  *out = kGranule;
  return kSuccess;
}
EXPORT int cuMemAddressReserve(uintptr_t *out, size_t bytes, size_t, uintptr_t, unsigned long long) {
  LOCKED;
  char *at = reserve(bytes);
  if (!at) return kOutOfMemory;
  ranges()[(uintptr_t)at] = Range{{bytes, current_device(), Kind::reserved}, bytes, nullptr};
  *out = (uintptr_t)at;
  return kSuccess;
}
EXPORT int cuMemAddressFree(uintptr_t at, size_t) {
  LOCKED;
  return release((void *)at, Kind::reserved);
}
EXPORT int cuMemCreate(Physical **out, size_t bytes, const PhysicalProperties *wanted, unsigned long long) {
  LOCKED;
  CALL(cuMemCreate);
  host_spends(settings().allocation);
  *out = take_physical(bytes, wanted->device, wanted->handle_types != 0);
  return *out ? kSuccess : kOutOfMemory;
}
EXPORT int cuMemRelease(Physical *memory) {
  LOCKED;
  CALL(cuMemRelease);
  drop(memory);
  return kSuccess;
}
EXPORT int cuMemMap(uintptr_t at, size_t, size_t, Physical *memory, unsigned long long) {
  LOCKED;
  CALL(cuMemMap);
  if (!map_file((char *)at, *memory)) return kOutOfMemory;
  return kSuccess;
}
EXPORT int cuMemUnmap(uintptr_t at, size_t bytes) {
  reach_end_of_all();
  LOCKED;
  CALL(cuMemUnmap);
  forget((void *)at, bytes);
  // The addresses stay reserved, and whoever still uses them is stopped by the system.
  mmap((void *)at, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
  return kSuccess;
}
EXPORT int cuMemSetAccess(uintptr_t, size_t, const void *, size_t) { return kSuccess; }
EXPORT int cuMemExportToShareableHandle(void *out, Physical *memory, int type, unsigned long long) {
  LOCKED;
  // 1: a POSIX file descriptor. A program that plays one rank alone would wait for its peers' for ever.
  if (type != 1 || memory->file == arena().file || !settings().shares) return kNotSupported;
  *(int *)out = dup(memory->file);
  return kSuccess;
}
EXPORT int cuMemImportFromShareableHandle(Physical **out, void *handle, int type) {
  LOCKED;
  if (type != 1) return kNotSupported;
  int file = dup((int)(uintptr_t)handle);
  off_t bytes = lseek(file, 0, SEEK_END);
  *out = new Physical{0, (size_t)bytes, -1, file};
  return kSuccess;
}
// Multicast: one address for the memory of all devices of a group. It can be made, exported and mapped as torch does. Only kernels read and write through
// it, with instructions of their own, and none of them is computed; so what is bound to it is not noted.
struct MulticastProperties {  // CUmulticastObjectProp
  unsigned devices;
  size_t bytes;
  unsigned long long handle_types, flags;
};
EXPORT int cuMulticastGetGranularity(size_t *out, const MulticastProperties *, int) {
  *out = kGranule;
  return kSuccess;
}
EXPORT int cuMulticastCreate(Physical **out, const MulticastProperties *wanted) {
  LOCKED;
  CALL(cuMulticastCreate);
  if (!settings().multicast || !settings().shares) return kNotSupported;
  const int file = memfd_create("virtual-gpu-multicast", MFD_CLOEXEC);
  if (ftruncate(file, (off_t)wanted->bytes)) perror("virtual GPU: ftruncate");
  *out = new Physical{0, wanted->bytes, -1, file};  // it takes no memory of a device
  return kSuccess;
}
EXPORT int cuMulticastAddDevice(Physical *, int) { return kSuccess; }
EXPORT int cuMulticastBindMem(Physical *, size_t, Physical *, size_t, size_t, unsigned long long) { return kSuccess; }
EXPORT int cuMulticastUnbind(Physical *, int, size_t, size_t) { return kSuccess; }

EXPORT int cuMemGetAddressRange_v2(uintptr_t *base, size_t *bytes, uintptr_t address) {
  LOCKED;
  uintptr_t start;
  Allocation *at = allocation_at((void *)address, &start);
  if (!at) return kNotFound;
  if (base) *base = start;
  if (bytes) *bytes = at->bytes;
  return kSuccess;
}

// Numbers of CUpointer_attribute: context, memory type, device and host pointer, buffer id, device ordinal, start, size.
EXPORT int cuPointerGetAttribute(void *out, int attribute, uintptr_t address) {
  LOCKED;
  uintptr_t start;
  Allocation *at = allocation_at((void *)address, &start);
  if (!at) return kInvalidValue;
  switch (attribute) {
    case 1: *(void **)out = (void *)(uintptr_t)(0x1000 + at->device); break;
    case 2: *(unsigned *)out = on_device(at) ? 2 : 1; break;
    case 3:
    case 4: *(uintptr_t *)out = address; break;
    case 7: *(uint64_t *)out = start; break;
    case 9: *(int *)out = at->device; break;
    case 11: *(uintptr_t *)out = start; break;
    case 12: *(size_t *)out = at->bytes; break;
    default: *(int *)out = 0;
  }
  return kSuccess;
}

// ---- memory pools of the runtime: there is one, and it keeps nothing

EXPORT int cudaDeviceGetDefaultMemPool(void **out, int) {
  static int pool;
  *out = &pool;
  return kSuccess;
}
EXPORT int cudaMemPoolGetAttribute(void *, int, void *value) {
  *(uint64_t *)value = 0;
  return kSuccess;
}
EXPORT int cudaMemPoolSetAttribute(void *, int, void *) { return kSuccess; }
EXPORT int cudaMemPoolSetAccess(void *, const void *, size_t) { return kSuccess; }
EXPORT int cudaMemPoolTrimTo(void *, size_t) { return kSuccess; }
EXPORT int cudaDeviceGetGraphMemAttribute(int, int, void *value) {
  *(uint64_t *)value = 0;
  return kSuccess;
}
EXPORT int cudaDeviceSetGraphMemAttribute(int, int, void *) { return kSuccess; }
