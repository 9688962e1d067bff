// What a product of matrices costs, for cuBLAS and cuBLASLt.
#pragma once
#include "machine.h"

namespace virtual_gpu {

// Numbers of cudaDataType.
enum DataType { kFloat32 = 0, kFloat16 = 2, kInt8 = 3, kBfloat16 = 14, kFloat8e4m3 = 28, kFloat8e5m2 = 29 };
constexpr int kTf32Mode = 3;

inline double rate_of(int type, bool tf32) {
  switch (type) {
    case kFloat16:
    case kBfloat16: return settings().bf16;
    case kFloat8e4m3:
    case kFloat8e5m2: return settings().fp8;
    default: return tf32 ? settings().tf32 : settings().fp32;
  }
}

inline double width_of(int type) {
  switch (type) {
    case kFloat32: return 4;
    case kFloat16:
    case kBfloat16: return 2;
    case kInt8:
    case kFloat8e4m3:
    case kFloat8e5m2: return 1;
    default: return 8;
  }
}

inline int product(Stream *stream, const char *what, double m, double n, double k, double batch, int type, bool tf32) {
  return run_product(stream, what, 2 * m * n * k * batch, (m * k + n * k + m * n) * batch * width_of(type), rate_of(type, tf32));
}

}  // namespace virtual_gpu
