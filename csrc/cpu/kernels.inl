// Every generic body, and the table that names them. Included after a vector_*.inl.
#include "cpu/ordered_sum.inl"

const KernelTable kTable = {
    .ordered_sum = ordered_sum,
};
