// What the binary interface of CUDA 13 needs: numbers and layouts, declared here and not taken from NVIDIA's headers.
// Structures name only the members that are read or written; the rest is padding.
#pragma once
#include <stddef.h>
#include <stdint.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

// Statuses of the runtime and of the driver that the stand-ins return.
enum Status {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kNotFound = 500,
  kNotReady = 600,
  kPeerAccessAlreadyEnabled = 704,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kLaunchFailure = 719,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureUnjoined = 904,
  kCaptureIsolation = 905,
  kCapturedEvent = 907,
  kCaptureWrongThread = 908,
};

enum CaptureStatus { kNotCapturing = 0, kCapturing = 1, kCaptureBroken = 2 };
enum CaptureMode { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum MemoryType { kUnregistered = 0, kHost = 1, kDevice = 2 };

// Flags of streams, events and registrations.
constexpr unsigned kNonBlocking = 1;    // a stream that does not wait for the legacy default stream
constexpr unsigned kDisableTiming = 2;  // an event without a time

struct Dim3 {
  unsigned x, y, z;
};

struct IpcHandle {
  char bytes[64];
};

struct PointerAttributes {
  int type, device;
  void *device_pointer, *host_pointer;
  long reserved[8];
};

struct FunctionAttributes {
  size_t static_shared, constants, locals;
  int most_threads, registers, ptx_version, binary_version, cache_mode, most_dynamic_shared, carveout;
  char rest[144 - 52];
};

struct RuntimeLaunch {  // cudaLaunchConfig_t
  Dim3 grid, block;
  size_t shared;
  struct Stream *stream;
  void *attributes;
  unsigned attribute_count;
};

struct DriverLaunch {  // CUlaunchConfig
  Dim3 grid, block;
  unsigned shared;
  struct Stream *stream;
  void *attributes;
  unsigned attribute_count;
};

struct PhysicalProperties {  // CUmemAllocationProp
  int type, handle_types, location_type, device;
  char rest[16];
};

// Byte offsets of the members of cudaDeviceProp that are filled in; the structure has 1,008 bytes.
namespace device_property {
constexpr size_t kSize = 1008, kName = 0, kUuid = 256, kTotalMemory = 288, kSharedPerBlock = 296, kRegistersPerBlock = 304, kWarp = 308,
                 kPitch = 312, kThreadsPerBlock = 320, kThreadsDim = 324, kGridDim = 336, kConstants = 352, kMajor = 360, kMinor = 364,
                 kTextureAlignment = 368, kProcessors = 384, kCanMapHost = 392, kConcurrentKernels = 560, kEcc = 564, kPciBus = 568,
                 kCopyEngines = 584, kUnifiedAddressing = 588, kBusWidth = 592, kL2 = 596, kPersistingL2 = 600, kThreadsPerProcessor = 604,
                 kPriorities = 608, kGlobalL1 = 612, kLocalL1 = 616, kSharedPerProcessor = 624, kRegistersPerProcessor = 632, kManaged = 636,
                 kConcurrentManaged = 656, kPreemption = 660, kRegisteredPointer = 664, kCooperative = 668, kSharedOptIn = 672,
                 kBlocksPerProcessor = 688, kReservedShared = 696, kHostRegister = 704, kMemoryPools = 720, kIpcEvents = 744, kClusters = 748,
                 kFunctionPointers = 752;
}
