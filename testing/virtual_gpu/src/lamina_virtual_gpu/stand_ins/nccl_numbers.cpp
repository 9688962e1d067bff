#include "nccl_numbers.h"

#include <math.h>
#include <string.h>

#include <algorithm>
#include <type_traits>

namespace virtual_gpu {

size_t width_of(int type) {
  static const size_t widths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
  return widths[type];
}

// A float of 8 or 16 bits: `Exponent` and `Mantissa` bits beneath a sign. Without infinities (e4m3) only the last code is no number.
template <class Bits, int Exponent, int Mantissa, bool infinities>
struct Small {
  Bits bits;
  static constexpr int kBias = (1 << (Exponent - 1)) - 1, kSign = 1 << (Exponent + Mantissa);
  static constexpr int kInfinity = infinities ? ((1 << Exponent) - 1) << Mantissa : kSign - 1, kNan = infinities ? kInfinity | 1 << (Mantissa - 1) : kSign - 1;

  operator float() const {
    const int code = bits & (kSign - 1), exponent = code >> Mantissa, fraction = code & ((1 << Mantissa) - 1);
    float value = exponent ? ldexpf((float)(fraction | 1 << Mantissa), exponent - kBias - Mantissa) : ldexpf((float)fraction, 1 - kBias - Mantissa);
    if (code >= kInfinity) value = infinities && code == kInfinity ? INFINITY : NAN;
    return bits & kSign ? -value : value;
  }
  // To the nearest, ties to even. What is too large becomes infinite, or no number where there is no infinity.
  static Small rounded(float value) {
    const int sign = signbit(value) ? kSign : 0;
    value = fabsf(value);
    int code = kNan;
    if (value == 0) {
      code = 0;
    } else if (isinf(value)) {
      code = kInfinity;
    } else if (!isnan(value)) {
      const int exponent = std::max(ilogbf(value), 1 - kBias);
      const int units = (int)nearbyintf(ldexpf(value, Mantissa - exponent));  // of the last place; those of a subnormal are few
      code = std::min(units + ((exponent + kBias - 1) << Mantissa), kInfinity);
    }
    return {(Bits)(sign | code)};
  }
};
using Float16 = Small<uint16_t, 5, 10, true>;
using Bfloat16 = Small<uint16_t, 8, 7, true>;
using Float8e4m3 = Small<uint8_t, 4, 3, false>;
using Float8e5m2 = Small<uint8_t, 5, 2, true>;

// ---- a type that is calculated in, for each that is stored

template <class T>
auto widened(T value) {
  if constexpr (std::is_floating_point_v<T>) return value;
  else if constexpr (std::is_integral_v<T>) return value;
  else return (float)value;
}
template <class T, class Wide>
T narrowed(Wide value) {
  if constexpr (std::is_arithmetic_v<T>) return (T)value;
  else return T::rounded(value);
}

template <class Wide>
Wide combined(Wide a, Wide b, int operation) {
  switch (operation) {
    case kMaximum: return std::is_floating_point_v<Wide> ? (Wide)fmax((double)a, (double)b) : std::max(a, b);
    case kMinimum: return std::is_floating_point_v<Wide> ? (Wide)fmin((double)a, (double)b) : std::min(a, b);
    case kProduct:
      if constexpr (std::is_integral_v<Wide>) return (Wide)((uint64_t)a * (uint64_t)b);  // wraps; that of a signed type is not defined
      else return a * b;
    default:
      if constexpr (std::is_integral_v<Wide>) return (Wide)((uint64_t)a + (uint64_t)b);
      else return a + b;
  }
}

template <class T>
struct Rows {
  static void reduce(T *to, const std::vector<const void *> &rows, size_t count, int operation) {
    for (size_t i = 0; i < count; i++) {
      auto value = widened(((const T *)rows[0])[i]);
      for (size_t row = 1; row < rows.size(); row++) value = combined(value, widened(((const T *)rows[row])[i]), operation);
      if (operation == kMean) value = (decltype(value))(value / (decltype(value))rows.size());
      to[i] = narrowed<T>(value);
    }
  }
  static void multiply(T *to, const T *from, size_t count, const T *factor) {
    for (size_t i = 0; i < count; i++) to[i] = narrowed<T>(combined(widened(from[i]), widened(*factor), kProduct));
  }
};

// Calls `act` with a null pointer to the type.
template <class Act>
static void with_type(int type, Act act) {
  switch (type) {
    case kInt8: return act((int8_t *)nullptr);
    case kUint8: return act((uint8_t *)nullptr);
    case kInt32: return act((int32_t *)nullptr);
    case kUint32: return act((uint32_t *)nullptr);
    case kInt64: return act((int64_t *)nullptr);
    case kUint64: return act((uint64_t *)nullptr);
    case kFloat16: return act((Float16 *)nullptr);
    case kFloat32: return act((float *)nullptr);
    case kFloat64: return act((double *)nullptr);
    case kBfloat16: return act((Bfloat16 *)nullptr);
    case kFloat8e4m3: return act((Float8e4m3 *)nullptr);
    case kFloat8e5m2: return act((Float8e5m2 *)nullptr);
  }
}

void reduce_rows(void *to, const std::vector<const void *> &rows, size_t count, int type, int operation) {
  with_type(type, [&](auto *of) { Rows<std::remove_pointer_t<decltype(of)>>::reduce((decltype(of))to, rows, count, operation); });
}

void multiply_row(void *to, const void *from, size_t count, int type, const void *factor) {
  with_type(type, [&](auto *of) {
    using T = std::remove_pointer_t<decltype(of)>;
    Rows<T>::multiply((T *)to, (const T *)from, count, (const T *)factor);
  });
}

}  // namespace virtual_gpu
