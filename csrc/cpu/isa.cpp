#include "cpu/isa.h"

#include <cstdlib>

#include "common/check.h"

namespace bmtrain::cpu {

const KernelTable& kernel_table() { return base::kTable; }

}  // namespace bmtrain::cpu
