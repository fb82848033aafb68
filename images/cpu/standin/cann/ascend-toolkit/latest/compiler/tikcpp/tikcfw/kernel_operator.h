// Stand-in: the name only, so that an include of kernel_operator.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_KERNEL_OPERATOR_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_KERNEL_OPERATOR_H
#include "strata_standin_types.h"
#endif
