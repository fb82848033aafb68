// Stand-in: the name only, so that an include of kernel_operator_reg_others_impl.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_IMPL_DAV_C220_KERNEL_OPERATOR_REG_OTHERS_IMPL_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_IMPL_DAV_C220_KERNEL_OPERATOR_REG_OTHERS_IMPL_H
#endif
