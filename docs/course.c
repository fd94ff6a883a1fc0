/* course.c - the engine of the `llm` command, and the lessons that look inside it. The lessons
 * use internal functions of llm.h, so they are compiled with its implementation, as one object. */
#define LLM_IMPLEMENTATION
#include "../llm.h"

#include "04-attention.c"
#include "13-tokens.c"
#include "14-sampling.c"
