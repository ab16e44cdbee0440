/* What kernels call of the DSL's large runtime, as its CuteDSLRuntime.h declares it: raise an error of CUDA. */
#include <stdint.h>
#include <stdio.h>

void CuteDSLRT_TVMFFISetRaisedCudaError(void (*raise)(const char *, const char **, int32_t), int32_t code) {
  char text[96];
  const char *parts[] = {text};
  snprintf(text, sizeof text, "a kernel of a bundle could not be launched: CUDA error %d", (int)code);
  raise("RuntimeError", parts, 1);
}
