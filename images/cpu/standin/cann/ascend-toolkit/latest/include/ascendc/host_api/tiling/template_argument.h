// Stand-in: the name only, so that an include of template_argument.h resolves. Holds no CANN code.
#ifndef STRATA_STANDIN_INCLUDE_ASCENDC_HOST_API_TILING_TEMPLATE_ARGUMENT_H
#define STRATA_STANDIN_INCLUDE_ASCENDC_HOST_API_TILING_TEMPLATE_ARGUMENT_H
#endif
