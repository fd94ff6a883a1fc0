/* emulated.cpp - llm.cu for the emulated GPU. */
#define LLM_EMULATED
#include "../llm.cu"
