// What a kernel moves and computes, by its name, its grid and its arguments. Two streams do not slow each other down.
#include "durations.h"

#include <stdio.h>
#include <string.h>

#include <algorithm>

namespace virtual_gpu {

namespace {

struct Named {
  const std::string &name;
  const Shape &shape;
  bool has(const char *part) const { return name.find(part) != std::string::npos; }
  // What stands behind `part`, or nothing.
  const char *behind(const char *part) const {
    const size_t at = name.find(part);
    return at == std::string::npos ? "" : name.c_str() + at + strlen(part);
  }
  template <class T>
  T argument(int number) const {
    return *(const T *)shape.arguments[number];
  }
};

double moved(double bytes, double share) {  // a rate that was set is a copy's
  return bytes / (settings().memory_rate * share / kCopies);
}

double cycles(double number) { return number / (settings().gpu->processors * kClock); }

// Bytes of the type whose name begins here, behind its namespaces.
double width_of(const char *type) {
  for (const char *space : {"c10::", "unsigned "})
    if (!strncmp(type, space, strlen(space))) type += strlen(space);
  for (const char *narrow : {"bool", "char", "signed char", "Float8"})
    if (!strncmp(type, narrow, strlen(narrow))) return 1;
  for (const char *half : {"BFloat16", "Half", "short"})
    if (!strncmp(type, half, strlen(half))) return 2;
  return !strncmp(type, "double", 6) || !strncmp(type, "long", 4) ? 8 : 4;
}

// Attention is that of torch's flash kernels, and takes as long as cuDNN's, which torch prefers where it has them.
double attention(const Named &kernel) {
  const Shape &shape = kernel.shape;
  int width = 128, rows = 128, columns = 64;  // of a head, and of a tile
  sscanf(kernel.behind("kernel_traits<"), "%d, %d, %d", &width, &rows, &columns);
  if (kernel.has("dot_do_o") || kernel.has("convert_dq")) return moved(shape.blocks() * rows * width * 2 * 3, kCopies);
  const bool backward = kernel.has("bwd");
  const double length = (double)shape.grid.x * (backward ? columns : rows), heads = (double)shape.grid.y * shape.grid.z;
  const double scores = length * length * heads / 2;  // causal: half of all pairs
  const double operations = 4 * scores * width * (backward ? 2.5 : 1);
  record().operations += operations;
  return operations / settings().bf16 + cycles(scores / (backward ? kScoresBackward : kScores));
}

// torch's kernels over lists of tensors: a block has a chunk of 65,536 elements of one of them.
double over_lists(const Named &kernel) {
  const double elements = kernel.shape.blocks() * 65536;
  const char *functor = kernel.behind("Functor<");
  double width = width_of(functor), passes = 2;
  if (kernel.has("FusedAdam")) return moved(elements * width * 7, kFusedAdam);  // reads four lists, writes three
  if (kernel.has("CopyFunctor<")) {
    width = (width + width_of(strchr(functor, ',') + 2)) / 2;
  } else if (kernel.has("LpNormFunctor")) {
    passes = 1;
  } else {
    int lists, read, result;  // of `Functor<type, lists, lists that are read, the one that is written>`
    const char *comma = strchr(functor, ',');
    if (comma && sscanf(comma, ", %d, %d, %d", &lists, &read, &result) == 3) passes = read + 1;
  }
  return moved(elements * width * passes, kListCopies);
}

// The type that an elementwise kernel computes in: its functor's first, or that of its lambda's first argument.
const char *computed_type(const Named &kernel) {
  if (const char *type = strchr(kernel.behind("Functor"), '<')) return type + 1;
  const char *lambda = kernel.behind("{lambda(");
  while (*lambda == ')') {
    const char *next = strstr(lambda, "{lambda(");
    if (!next) break;
    lambda = next + strlen("{lambda(");
  }
  return lambda;
}

double elementwise(const Named &kernel) {
  const double elements = kernel.argument<int>(0);
  if (elements <= 0) return 0;
  int operands = kernel.has("BinaryFunctor") || kernel.has("CUDAFunctor_add<") ? 3 : kernel.has("FillFunctor") ? 1 : 2;
  sscanf(kernel.behind("std::array<char*, "), "%d", &operands);
  double bytes = elements * width_of(computed_type(kernel)) * operands;
  if (kernel.has("float16_copy_kernel")) bytes = elements * (4 + 2);
  const bool casts = kernel.has("WithCast<") || kernel.has("gpu_kernel_impl<");
  if (kernel.has("LoadWithCast<1>") && kernel.has("StoreWithCast<1>")) {  // {a type in a byte, its size}
    struct Cast {
      char type;
      unsigned size;
    };
    bytes = elements * (kernel.argument<Cast>(5).size + kernel.argument<Cast>(6).size);
  }
  const bool strides = casts || kernel.has("gpu_kernel_impl_nocast<");
  const double addresses = strides ? cycles(elements * operands / (casts ? kCastOperands : kOperands)) : 0;
  return std::max(moved(bytes, kCopies), addresses);
}

// Bytes that other kernels of torch read and write, by their arguments, as far as they are known.
double known_bytes(const Named &kernel) {
  const Shape &shape = kernel.shape;
  const double rows = shape.grid.x;
  if (!shape.arguments) return 0;
  if (kernel.has("cunn_SoftMaxForward<")) return 4 * 4 * rows * kernel.argument<int>(2);  // two readings, or three, and a result
  if (kernel.has("cunn_SoftMaxBackward<")) return 4 * 4 * rows * kernel.argument<long>(3);
  if (kernel.has("split_with_sizes_copy_out_contiguous")) return 2.0 * kernel.argument<long>(5) * kernel.argument<long>(6);
  if (kernel.has("vectorized_layer_norm_kernel<"))
    return 2 * rows * kernel.argument<int>(0) * width_of(kernel.behind("vectorized_layer_norm_kernel<"));
  if (kernel.has("layer_norm_grad_input_kernel_vectorized<"))
    return 3 * rows * kernel.argument<int>(6) * width_of(kernel.behind("layer_norm_grad_input_kernel_vectorized<"));
  if (kernel.has("GammaBetaBackwardCUDAKernelTemplate<"))
    return 2.0 * kernel.argument<long>(0) * kernel.argument<long>(1) * width_of(kernel.behind("GammaBetaBackwardCUDAKernelTemplate<"));
  int width, batch;
  if (sscanf(kernel.behind("CatArrInputTensorMetadata<at::native::(anonymous namespace)::OpaqueType<"), "%du>, unsigned int, %d", &width, &batch) == 2) {
    // {pointers, offsets, sizes of a dimension, elements}, each as often as there can be inputs; a row of the grid has an input
    const unsigned *elements = (const unsigned *)((const char *)shape.arguments[1] + 16 * batch);
    double all = 0;
    for (unsigned input = 0; input < shape.grid.y && (int)input < batch; input++) all += elements[input];
    return 2 * all * width;
  }
  return 0;
}

// Four floats for each thread, where nothing is known, or where another torch has other arguments.
double bytes_of(const Named &kernel) {
  const double known = known_bytes(kernel);
  return known > 0 && known < 8 * settings().memory ? known : kernel.shape.threads() * 16;
}

}  // namespace

double seconds_of(const std::string &name, const Shape &shape) {
  const Named kernel{name, shape};
  if (kernel.has("spin_kernel") && shape.arguments) return kernel.argument<long>(0) / kClock;
  double seconds;
  if (kernel.has("flash_fwd") || kernel.has("flash_bwd"))
    seconds = attention(kernel);
  else if (kernel.has("multi_tensor_apply_kernel"))
    seconds = over_lists(kernel);
  else if (kernel.has("elementwise_kernel<") && shape.arguments && shape.arguments[0])
    seconds = elementwise(kernel);
  else if (kernel.has("chunk_cat_cuda_kernel<"))  // a thread writes 16 bytes
    seconds = moved(shape.threads() * 16 * (kernel.has("<float, c10::BFloat16>") ? 1.5 : 2), kChunkCat);
  else
    seconds = moved(bytes_of(kernel), kCopies);
  return std::max(settings().shortest_kernel, seconds);
}

}  // namespace virtual_gpu
