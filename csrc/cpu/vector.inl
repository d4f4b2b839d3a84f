// Vectors of 16 lanes in the registers of a level, which has named them before: Register of floats and
// WideRegister of doubles. Here is what compilers have operators for; what takes other instructions is in
// vector_*.inl. See [Note: One body, several levels] for what must agree between the levels.

struct F32x16 {
  static constexpr int kLanes = sizeof(Register) / sizeof(float);  // of a part
  Register part[16 / kLanes];
};

struct F64x16 {
  static constexpr int kLanes = sizeof(WideRegister) / sizeof(double);
  WideRegister part[16 / kLanes];
};

// Calls body(0), body(1), ... for the parts of a vector, with numbers that the compiler knows: it keeps no
// array in registers of which it does not know the indices.
template <typename Vector, typename Body>
[[gnu::always_inline]] static inline void for_parts(const Body& body) {
  [&]<int... kPart>(std::integer_sequence<int, kPart...>) __attribute__((always_inline)) {
    (body(kPart), ...);
  }(std::make_integer_sequence<int, 16 / Vector::kLanes>());
}
// The body of a function that returns a vector whose part i is `expression`.
#define BMT_PARTS(Vector, expression)                                                           \
  Vector out;                                                                                   \
  for_parts<Vector>([&](int i) __attribute__((always_inline)) { out.part[i] = (expression); }); \
  return out

// At any address, of elements of any type.
using AnyRegister [[gnu::aligned(1), gnu::may_alias]] = Register;
using AnyWideRegister [[gnu::aligned(1), gnu::may_alias]] = WideRegister;

static inline F32x16 load(const float* p) { BMT_PARTS(F32x16, reinterpret_cast<const AnyRegister*>(p)[i]); }
static inline F64x16 load(const double* p) {
  BMT_PARTS(F64x16, reinterpret_cast<const AnyWideRegister*>(p)[i]);
}
static inline void store(float* p, F32x16 x) {
  for_parts<F32x16>([&](int i)
                        __attribute__((always_inline)) { reinterpret_cast<AnyRegister*>(p)[i] = x.part[i]; });
}
static inline void store(double* p, F64x16 x) {
  for_parts<F64x16>(
      [&](int i) __attribute__((always_inline)) { reinterpret_cast<AnyWideRegister*>(p)[i] = x.part[i]; });
}

// x - 0 is x, also where x is -0.
static inline F32x16 broadcast(float x) { BMT_PARTS(F32x16, x - Register{}); }
static inline F32x16 add(F32x16 a, F32x16 b) { BMT_PARTS(F32x16, a.part[i] + b.part[i]); }
static inline F32x16 sub(F32x16 a, F32x16 b) { BMT_PARTS(F32x16, a.part[i] - b.part[i]); }
static inline F32x16 mul(F32x16 a, F32x16 b) { BMT_PARTS(F32x16, a.part[i] * b.part[i]); }
static inline F32x16 div(F32x16 a, F32x16 b) { BMT_PARTS(F32x16, a.part[i] / b.part[i]); }
static inline F64x16 broadcast(double x) { BMT_PARTS(F64x16, x - WideRegister{}); }
static inline F64x16 add(F64x16 a, F64x16 b) { BMT_PARTS(F64x16, a.part[i] + b.part[i]); }
static inline F64x16 mul(F64x16 a, F64x16 b) { BMT_PARTS(F64x16, a.part[i] * b.part[i]); }
static inline double sum_of_lanes(F64x16 x) {
  double lane[16];
  store(lane, x);
  for (int width = 8; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
  }
  return lane[0];
}

// Words of some elements, see [Note: Words of a block], and registers of a vector as integers.
struct Words {
  static constexpr int kElements = sizeof(Register) == 64 ? 32 : 16;
  static constexpr int kParts = kElements * 2 / sizeof(Register);
  using Part [[gnu::vector_size(sizeof(Register))]] = std::uint16_t;
  using SignedPart [[gnu::vector_size(sizeof(Register))]] = std::int16_t;
  using Bits [[gnu::vector_size(sizeof(Register))]] = std::uint32_t;
  Part part[kParts];
};
static constexpr int kRegisters = 16 / F32x16::kLanes;
static inline Words::Bits bits_at(const F32x16& x, int i) { return (Words::Bits)x.part[i]; }
static inline void set_bits(F32x16& x, int i, Words::Bits bits) { x.part[i] = (Register)bits; }
