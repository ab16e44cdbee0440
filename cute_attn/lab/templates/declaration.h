
/* {name} for {target}: {registers} registers, {memory} bytes of shared memory.
   {arguments} */
int {function}(void *, const TVMFFIAny *, int32_t, TVMFFIAny *);
#define {macro} {function}
{tile}
