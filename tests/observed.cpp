/* observed.cpp - llm.cu and the lessons' kernels, for docs/12-kernel.c. The Makefile compiles this
 * with -fsanitize=thread, so that the emulated GPU sees each load and store. */
#define LLM_EMULATED
#define llm_emulated_backend llm_observed_backend
#include "../llm.cu"
#include "../docs/12-kernel.cu"
#include "../docs/17-product.cu"
