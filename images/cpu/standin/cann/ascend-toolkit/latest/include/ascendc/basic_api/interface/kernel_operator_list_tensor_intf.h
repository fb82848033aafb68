// Stand-in: the name only, so that an include of kernel_operator_list_tensor_intf.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_INCLUDE_ASCENDC_BASIC_API_INTERFACE_KERNEL_OPERATOR_LIST_TENSOR_INTF_H
#define STRATA_STANDIN_INCLUDE_ASCENDC_BASIC_API_INTERFACE_KERNEL_OPERATOR_LIST_TENSOR_INTF_H
#endif
