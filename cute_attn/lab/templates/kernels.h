/* Kernels of cute_attn. {kernels}; {runtime}. */
#pragma once

#include <tvm/ffi/c_api.h>

#ifdef __cplusplus
extern "C" {{
#endif
{declarations}
#ifdef __cplusplus
}}
#endif
