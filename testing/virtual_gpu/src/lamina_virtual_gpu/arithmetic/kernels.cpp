// Arithmetic: the value of each operator, by ATen's CPU kernel over the same memory.
//
// Every operator of ATen that has a kernel for CUDA gets another one here. It calls the first, which allocates, launches
// (nothing is computed by that) and returns tensors. Then it puts one piece of work into the current stream: the same operator
// over CPU tensors that alias the memory of the arguments, and its results go to the memory of the outputs. So the
// allocator, streams, launches and autograd are torch's for CUDA, and the values alone are the CPU's. An operator that the
// CPU has no kernel for gets one in Python (arithmetic/), or is refused.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "machine.h"

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

extern "C" int cudaStreamSynchronize(::Stream *);

namespace {

// How an operator is computed.
enum class Kind {
  queued,   // by a piece of work in the stream
  at_once,  // the host waits for it: the shapes of its outputs depend on values, or its kernel asks a library that is not modelled
  copy,     // of device to device it is queued; to and from the host the runtime's copies do it
  indexed,  // queued; masks among its indices become places first
  memory,   // it gives memory: the adversary makes its contents NaN, when its stream comes to it
};

// ---- the state of this thread

thread_local int inside = 0;  // kernels for CUDA that run: what they call is a part of them, and is not computed again
thread_local bool has_key = false;
thread_local uint64_t random_key = 0;

struct Inside {
  Inside() { inside++, vgpu_cover(1); }
  ~Inside() { inside--, vgpu_cover(-1); }
};

struct WithKey {
  WithKey(bool has, uint64_t key) { has_key = has, random_key = key; }
  ~WithKey() { has_key = false; }
};

// ---- random numbers: those that the CPU's generator gives for a key, which comes from the state of the GPU's generator

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// With the seed alone the numbers are those of a CPU's generator with that seed. The offset counts what was drawn before.
uint64_t key_of(uint64_t seed, uint64_t offset) { return offset ? mixed(seed ^ mixed(offset)) : seed; }

uint64_t captured_draws = 0;

uint64_t key_of(const at::Generator &generator, bool capturing) {
  // The state can't be asked for in a capture; each replay draws others (see `runs` below).
  if (capturing) return mixed(0x67726170680000u + ++captured_draws);
  return key_of(generator.current_seed(), generator.unsafeGetGeneratorImpl()->get_offset());
}

// ---- CPU tensors over a device's memory

class Aliases {
 public:
  explicit Aliases(bool later) : later_(later) {}

  // What an operator writes. Numbers of the host among it have been written by the kernel for CUDA, when it was called.
  IValue of_written(const IValue &value) {
    const bool before = std::exchange(later_, true);
    IValue alias = of(value);
    later_ = before;
    return alias;
  }

  at::Tensor of(const at::Tensor &tensor) {
    if (!tensor.defined()) return tensor;
    for (auto &[from, to] : made_)  // a tensor that is given twice is one
      if (from == tensor.unsafeGetTensorImpl()) return to;
    at::Tensor alias = tensor;
    if (tensor.is_cuda()) {
      alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
      if (tensor.is_conj()) alias._set_conj(true);
      if (tensor.is_neg()) alias._set_neg(true);
    } else if (later_ && !tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias = tensor.clone();  // a kernel for CUDA takes its value when it is launched
    }
    made_.emplace_back(tensor.unsafeGetTensorImpl(), alias);
    return alias;
  }

  IValue of(const IValue &value) {
    if (value.isTensor()) return of(value.toTensor());
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor &tensor : value.toTensorVector()) list.push_back(of(tensor));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList())
        list.push_back(tensor ? std::optional<at::Tensor>(of(*tensor)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(at::kCPU);
    return value;
  }

 private:
  bool later_;
  std::vector<std::pair<const c10::TensorImpl *, at::Tensor>> made_;
};

// The first CUDA tensor in some values.
at::Tensor first_on_device(at::ArrayRef<IValue> values) {
  for (const IValue &value : values) {
    if (value.isTensor() && value.toTensor().defined() && value.toTensor().is_cuda()) return value.toTensor();
    if (value.isTensorList())
      for (const at::Tensor &tensor : value.toTensorVector())
        if (tensor.defined() && tensor.is_cuda()) return tensor;
  }
  return {};
}

// ---- the bytes that an operator touches

constexpr size_t kMostRuns = 256;

// A tensor's bytes: runs without gaps, or all from the first to the last where there are very many.
void add_bytes(const at::Tensor &tensor, bool writes, virtual_gpu::Accesses &out) {
  if (!tensor.defined() || !tensor.has_storage() || !tensor.numel() || !tensor.storage().nbytes()) return;
  std::vector<std::pair<int64_t, int64_t>> steps;  // stride and size of each dimension, in elements; the narrowest first
  for (int64_t i = 0; i < tensor.dim(); i++)
    if (tensor.size(i) > 1 && tensor.stride(i)) steps.emplace_back(tensor.stride(i), tensor.size(i));
  std::sort(steps.begin(), steps.end());
  int64_t run = 1;
  size_t first = 0, count = 1;
  while (first < steps.size() && steps[first].first <= run) run += steps[first].first * (steps[first].second - 1), first++;
  for (size_t i = first; i < steps.size(); i++) count *= (size_t)steps[i].second;
  if (count > kMostRuns) {
    for (; first < steps.size(); first++) run += steps[first].first * (steps[first].second - 1);
    count = 1;
  }
  const auto width = (int64_t)tensor.element_size();
  const char *start = (const char *)tensor.const_data_ptr();
  for (size_t number = 0; number < count; number++) {
    int64_t offset = 0;
    size_t rest = number;
    for (size_t i = first; i < steps.size(); i++) offset += steps[i].first * (int64_t)(rest % (size_t)steps[i].second), rest /= (size_t)steps[i].second;
    out.push_back({start + offset * width, (size_t)(run * width), writes});
  }
}

void add_bytes(const IValue &value, bool writes, virtual_gpu::Accesses &out) {
  if (value.isTensor()) return add_bytes(value.toTensor(), writes, out);
  if (value.isTensorList())
    for (const at::Tensor &tensor : value.toTensorVector()) add_bytes(tensor, writes, out);
  else if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor> &tensor : value.toOptionalTensorList())
      if (tensor) add_bytes(*tensor, writes, out);
}

bool is_written(const c10::Argument &argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// Reads come first, so that an operator in place is compared with what wrote before it.
virtual_gpu::Accesses accesses_of(const OperatorHandle &op, at::ArrayRef<IValue> arguments, at::ArrayRef<IValue> outputs) {
  virtual_gpu::Accesses all;
  if (!virtual_gpu::watches_races()) return all;
  const auto &formal = op.schema().arguments();
  for (const bool writes : {false, true})
    for (size_t i = 0; i < arguments.size(); i++)
      if (is_written(formal[i]) == writes) add_bytes(arguments[i], writes, all);
  for (const IValue &output : outputs) add_bytes(output, true, all);
  return all;
}

// ---- one execution of an operator on the CPU

// Kernels run without autograd, autocast and modes: the caller's are at work above the kernel.
struct Plain {
  c10::impl::ForceDispatchKeyGuard guard{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
          c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot, c10::DispatchKey::PreDispatch})};
};

struct Computation {
  OperatorHandle op;
  std::vector<IValue> arguments;  // over the CPU
  std::vector<IValue> outputs;    // where results go; nothing for those that are arguments
  std::optional<uint64_t> key;
  uint64_t runs = 0;
  bool captured = false;

  // Returns the operator's results.
  Stack run() {
    Plain plain;
    uint64_t now = key.value_or(0);
    if (captured && runs++) now = mixed(now + runs);
    WithKey with(key.has_value(), now);
    Stack stack(arguments.begin(), arguments.end());
    if (key) {
      const auto &formal = op.schema().arguments();
      for (size_t i = 0; i < formal.size(); i++)
        if (formal[i].type()->str().rfind("Generator", 0) == 0) stack[i] = at::detail::createCPUGenerator(now);
    }
    op.callBoxed(&stack);
    return stack;
  }

  void give(const at::Tensor &to, const at::Tensor &result) {
    if (!to.defined() || !result.defined()) return;
    TORCH_CHECK(to.sizes() == result.sizes(), "the virtual GPU's kernel for ", op.operator_name(), " gives ", result.sizes(),
                " where CUDA's gives ", to.sizes());
    to.copy_(result);
  }

  void run_into_outputs() {
    Stack results = run();
    Plain plain;
    for (size_t i = 0; i < outputs.size(); i++) {
      if (outputs[i].isTensor()) give(outputs[i].toTensor(), results[i].toTensor());
      if (!outputs[i].isTensorList()) continue;
      const auto to = outputs[i].toTensorVector(), from = results[i].toTensorVector();
      for (size_t k = 0; k < to.size(); k++) give(to[k], from[k]);
    }
  }
};

// An error of work that runs while the caller is still here goes to the caller; later it ends the streams.
struct Failure {
  std::atomic<bool> caller_is_gone{false};
  std::exception_ptr error;
};

// An operator's name, and the node of autograd that has called it: a backward has no line of Python.
const char *name_of(const OperatorHandle &op) {
  static auto &names = *new std::set<std::string>;
  std::string name = toString(op.operator_name());
  if (const auto node = torch::autograd::get_current_node()) name += " of " + node->name();
  std::lock_guard<std::recursive_mutex> locked(virtual_gpu::state_lock());
  return names.insert(name).first->c_str();
}

void queue(::Stream *stream, std::shared_ptr<Computation> computation) {
  auto failure = std::make_shared<Failure>();
  const char *name = name_of(computation->op);
  auto accesses = accesses_of(computation->op, computation->arguments, computation->outputs);
  virtual_gpu::enqueue_work(stream, name, virtual_gpu::in_one_go([computation, failure, name] {
    try {
      computation->run_into_outputs();
    } catch (const std::exception &error) {
      if (failure->caller_is_gone)
        virtual_gpu::fail(name, error.what());
      else
        failure->error = std::current_exception();
    }
  }), std::move(accesses));
  failure->caller_is_gone = true;
  if (failure->error) std::rethrow_exception(failure->error);
}

// ---- the kernel for CUDA

::Stream *current_stream(c10::Device device) {
  const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
  return virtual_gpu::stream_on((::Stream *)cuda.getStreamNativeHandle(cuda.getStream(device)), device.index());
}

// What a stream is given next comes after all that another one was given.
void come_after(::Stream *stream, ::Stream *other) {
  const std::lock_guard<std::recursive_mutex> locked(virtual_gpu::state_lock());
  if (!stream->capture && !other->capture) virtual_gpu::wait_for_mark(stream, virtual_gpu::record_mark(other));
}

class Kernel final : public c10::OperatorKernel {
 public:
  Kernel(c10::SafeKernelFunction original, Kind kind, bool draws) : original_(std::move(original)), kind_(kind), draws_(draws) {}

  void operator()(const OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) {
    const size_t count = op.schema().arguments().size();
    std::vector<IValue> arguments(stack->end() - (long)count, stack->end());
    const at::Tensor tensor = first_on_device(arguments);
    if (inside || through_the_runtime(arguments)) return original_.callBoxed(op, keys, stack);
    if (kind_ == Kind::memory) return fresh_memory(op, keys, stack);
    TORCH_CHECK_NOT_IMPLEMENTED(op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU), op.operator_name(),
                                " has no arithmetic on the virtual GPU: the CPU has no kernel for it.\nRegister one with "
                                "torch.library for the key CPU, or run without VGPU_COMPUTE");
    if (kind_ == Kind::at_once && tensor.defined()) return at_once(op, tensor, std::move(arguments), stack);
    if (kind_ == Kind::indexed) masks_to_places(arguments, stack);
    auto computation = std::make_shared<Computation>(Computation{op, {}, {}, {}});
    if (draws_ && tensor.defined()) take_key(*computation, arguments, tensor.device());
    const bool between_devices = kind_ == Kind::copy && arguments[0].toTensor().device() != arguments[1].toTensor().device();
    if (between_devices) {
      // The work goes to the source's stream, after what the target's was given. torch makes both streams
      // wait for each other within the call below, which is too late for the first of the two waits.
      add(computation, arguments, {});
      ::Stream *stream = current_stream(arguments[1].toTensor().device());
      come_after(stream, current_stream(arguments[0].toTensor().device()));
      queue(stream, computation);
    }
    {
      Inside guard;
      original_.callBoxed(op, keys, stack);
    }
    if (between_devices) return;
    const at::ArrayRef<IValue> outputs(stack->data() + stack->size() - op.schema().returns().size(), op.schema().returns().size());
    const at::Tensor there = tensor.defined() ? tensor : first_on_device(outputs);
    if (!there.defined()) return;
    add(computation, arguments, outputs);
    queue(current_stream(there.device()), computation);
  }

 private:
  bool through_the_runtime(const std::vector<IValue> &arguments) const {
    return kind_ == Kind::copy && !(arguments[0].toTensor().is_cuda() && arguments[1].toTensor().is_cuda());
  }

  void take_key(Computation &computation, const std::vector<IValue> &arguments, c10::Device device) const {
    at::Generator generator = at::globalContext().defaultGenerator(device);
    for (const IValue &value : arguments)
      if (value.isGenerator()) generator = value.toGenerator();
    computation.captured = current_stream(device)->capture != nullptr;
    computation.key = key_of(generator, computation.captured);
  }

  static void add(const std::shared_ptr<Computation> &computation, const std::vector<IValue> &arguments, at::ArrayRef<IValue> outputs) {
    Aliases aliases(virtual_gpu::settings().order != virtual_gpu::Order::at_once || computation->captured);
    const auto &formal = computation->op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) computation->arguments.push_back(is_written(formal[i]) ? aliases.of_written(arguments[i]) : aliases.of(arguments[i]));
    const auto &returns = computation->op.schema().returns();
    for (size_t i = 0; i < outputs.size(); i++) computation->outputs.push_back(is_written(returns[i]) || on_host(outputs[i]) ? IValue() : aliases.of(outputs[i]));
  }

  void fresh_memory(const OperatorHandle &op, c10::DispatchKeySet keys, Stack *stack) const {
    original_.callBoxed(op, keys, stack);
    const at::Tensor tensor = stack->back().toTensor();
    if (tensor.is_cuda()) vgpu_spoil(current_stream(tensor.device()), tensor.storage().mutable_data(), tensor.storage().nbytes());
  }

  // Seeds that a kernel has given to the host stay as they are.
  static bool on_host(const IValue &value) { return value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cuda(); }

  // A mask's places are as many as it has true elements, so the host waits for them, as on a GPU.
  static void masks_to_places(std::vector<IValue> &arguments, Stack *stack) {
    // A number of the host goes where a mask says without a wait: ATen fills then.
    if (arguments.size() > 2 && arguments[2].isTensor() && arguments[2].toTensor().is_cpu() && arguments[2].toTensor().numel() == 1) return;
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!arguments[i].isOptionalTensorList() && !(arguments[i].isList() && !arguments[i].isTensorList() && i == 1)) continue;
      c10::List<std::optional<at::Tensor>> list;
      bool any = false;
      for (const std::optional<at::Tensor> &tensor : arguments[i].toOptionalTensorList()) {
        if (!tensor || !tensor->defined() || (tensor->scalar_type() != at::kBool && tensor->scalar_type() != at::kByte)) {
          list.push_back(tensor);
          continue;
        }
        any = true;
        for (const at::Tensor &places : tensor->nonzero().unbind(1)) list.push_back(places);
      }
      if (any) (*stack)[stack->size() - arguments.size() + i] = arguments[i] = list;
    }
  }

  // Waits for the stream, computes, and gives what comes out to the device.
  static void at_once(const OperatorHandle &op, const at::Tensor &tensor, std::vector<IValue> arguments, Stack *stack) {
    const c10::impl::VirtualGuardImpl cuda(at::kCUDA);
    ::Stream *stream = current_stream(tensor.device());
    TORCH_CHECK(!cudaStreamSynchronize(stream), op.operator_name(), ": the host can't wait for its result here");
    Aliases aliases(false);
    Computation computation{op, {}, {}, {}};
    const auto &formal = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); i++) {
      const bool out = is_written(formal[i]) && formal[i].is_out() && arguments[i].isTensor();
      computation.arguments.push_back(out ? IValue(at::empty({0}, arguments[i].toTensor().options().device(at::kCPU))) : aliases.of(arguments[i]));
    }
    vgpu_touched_at_once(stream, name_of(op), accesses_of(op, computation.arguments, {}));
    Stack results = computation.run();
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!is_written(formal[i]) || !formal[i].is_out() || !arguments[i].isTensor()) continue;
      arguments[i].toTensor().resize_(computation.arguments[i].toTensor().sizes());
      Aliases(false).of(arguments[i].toTensor()).copy_(computation.arguments[i].toTensor());
    }
    stack->resize(stack->size() - arguments.size());
    Inside guard;  // the outputs' memory is written here and now: nothing may spoil it later
    size_t given = 0;
    for (size_t i = 0; i < results.size(); i++) {
      if (is_written(op.schema().returns()[i])) {
        while (!is_written(formal[given])) given++;
        stack->push_back(arguments[given++]);
      } else if (results[i].isTensor() && results[i].toTensor().defined()) {
        const at::Tensor from = results[i].toTensor();
        const at::Tensor to = at::empty_strided(from.sizes(), from.strides(), from.options().device(tensor.device()));
        if (from.numel()) Aliases(false).of(to).copy_(from);
        stack->push_back(to);
      } else {
        stack->push_back(results[i]);
      }
    }
  }

  const c10::SafeKernelFunction original_;
  const Kind kind_;
  const bool draws_;
};

}  // namespace

// ---- what Python calls (arithmetic/operators.py)

// Gives an operator of ATen, or another library's, its kernel. `kind` is a `Kind`.
EXPORT void vgpu_compute_operator(const char *name, const char *overload, int kind, int draws) {
  static auto &libraries = *new std::map<std::string, std::unique_ptr<torch::Library>>;
  const std::string whole = name, space = whole.substr(0, whole.find("::"));
  auto &library = libraries[space];
  if (!library) library = std::make_unique<torch::Library>(torch::Library::IMPL, space, c10::DispatchKey::CUDA, __FILE__, __LINE__);
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  auto original = op.getComputedKernelForDispatchKey(c10::DispatchKey::CUDA);
  auto kernel = std::make_unique<Kernel>(std::move(original), (Kind)kind, draws != 0);
  const std::string target = *overload ? whole + "." + overload : whole;
  library->impl(target.c_str(), torch::CppFunction::makeFromBoxedFunctor(std::move(kernel)));
}

// Within a kernel that draws: writes the key of the operator that is being computed, and returns 1.
EXPORT int vgpu_random_key(uint64_t *out) {
  *out = random_key;
  return has_key;
}
EXPORT uint64_t vgpu_key_of(uint64_t seed, uint64_t offset) { return key_of(seed, offset); }
