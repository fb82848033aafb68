// Stand-in: the name only, so that an include of kernel_operator_intf.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_INTERFACE_KERNEL_OPERATOR_INTF_H
#define STRATA_STANDIN_COMPILER_TIKCPP_TIKCFW_INTERFACE_KERNEL_OPERATOR_INTF_H
#endif
