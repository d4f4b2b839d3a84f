// Cross-entropy over rows of logits: one pass for the loss, one for the gradient. See [Note: What the loss
// keeps] in bmtrain/loss/_function.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtype.h"

namespace bmtrain::cuda {

/// (num_rows, width) logits, contiguous; fp32, fp16 or bf16; fewer than 2^31 rows. The columns may be one
/// rank's part of a vocabulary.
struct Logits {
  const void* data;
  DType dtype;
  std::int64_t num_rows, width;
  const std::int64_t* target;  // column of each row's target; outside [0, width): see RowSums
  const float* weight;         // of each column, or nullptr: 1
  bool smooth;                 // whether labels are smoothed
};

/// Per row; `smooth` may be nullptr if labels are not smoothed. `divided`: other ranks have more columns, so
/// that a row may be -inf here (maximum 0 then, as in Python), and a target elsewhere (logit 0 then;
/// otherwise a column that does not exist makes the loss NaN).
struct RowSums {
  float *maximum, *exp_sum, *target_logit, *smooth;
  bool divided;
};
[[nodiscard]] cudaError_t cross_entropy_sums(const Logits& logits, const RowSums& out, cudaStream_t stream);

/// Per row, as RowGradient in cross_entropy_math.h has them. Rows with `ignored` get zeros, whatever they
/// hold.
struct RowFactors {
  const float *maximum, *log_sum, *scale, *hit, *spread;
  const bool* ignored;
};
/// `gradient` has the dtype of the logits, and may be the logits.
[[nodiscard]] cudaError_t cross_entropy_gradient(const Logits& logits, const RowFactors& rows, void* gradient,
                                                 cudaStream_t stream);

}  // namespace bmtrain::cuda
