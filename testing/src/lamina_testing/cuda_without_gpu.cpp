// What torch asks of a CUDA device before it computes on fake tensors of that device: which one is
// current, and on which stream. A build of torch for CPUs has no answers; these are of one device
// with one stream. Nothing here computes.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr auto kind = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<kind> {
  c10::Device exchangeDevice(c10::Device) const override { return {kind, 0}; }
  c10::Device getDevice() const override { return {kind, 0}; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}

  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, {kind, 0}); }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks : at::CUDAHooksInterface {  // torch looks for this name
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace
