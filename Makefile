# make            builds ./llm, with all devices
# make demo       builds it without devices and tells a tale with the bundled model
# make test       runs all tests (DEVICE=cuda: on an NVIDIA GPU; DEVICE=emulated takes hours)
# make sanitize   runs them with the address and undefined-behaviour sanitizers
# make fuzz SECONDS=60 ONLY=json   all fuzzers for a minute, or those whose names contain "json"
# make soak MINUTES=30 SEED=1      random workloads with failures (soak-sanitized: and sanitizers)
# make mutants    do the tests find planted bugs? ONLY=tokenizer/: of a chapter; SAMPLE=10: so many
# make arm64      some of the tests on arm64, under qemu
# make docs       renews the quotes, output and pictures of the book, and the web pages made
#                 from it, with cmark-gfm (make quotes: only the quotes and the web pages)
# make OPTIMIZE='-O0 -g' NVCC= EMULATED= OBSERVED= llm      builds in 10 s, for a debugger
# Devices are built in if their compiler is found: for NVIDIA GPUs nvcc (NVCC= turns that off), for
# the emulated GPU (tests/cuda_on_cpu.h) a C++ compiler (EMULATED= turns that off). If a compiler or
# libcmocka is missing, make installs it with apt, or says what to install.

OPTIMIZE = -O2
# -g1 (functions and lines) serves backtraces and profiles; -g takes the compiler twice as long.
CFLAGS   = -g1 $(OPTIMIZE) -Wall -Wextra
# -O3 makes kernels up to 8 % faster (without AVX, up to 70 %); nothing else gains from it.
KERNEL_FLAGS = $(if $(filter-out file,$(origin OPTIMIZE) $(origin CFLAGS)),,-O3)
B        = build$(if $(DEVICE),/$(DEVICE))
LLM      = llm
export CC

# Flags that a compiler may not know are tried once, when a recipe needs them: one is installed by
# then. EDITLINE: line editing in `llm chat`. MICROHTTPD: `llm serve` (SERVER=: never install it).
once     = $(eval $1 := $(shell echo 'int main(void) { return 0; }' | \
	$(CC) -Werror -x c - -o /dev/null $2 2>/dev/null && echo $2))$($1)
OPENMP   = $(call once,OPENMP,-fopenmp)
EDITLINE = $(call once,EDITLINE,-include stdio.h -include editline/readline.h -ledit)
MICROHTTPD = $(call once,MICROHTTPD,-include microhttpd.h -lmicrohttpd)
SERVER   = $(B)/server
COMPILE  = $(CC) -std=gnu11 $(CFLAGS) -ffp-contract=fast $(OPENMP) $(SANITIZE) -I. $(CPPFLAGS)

# ---- Devices: NVIDIA GPUs; the emulated GPU; and the same for docs/12-kernel.c and 17-product.c,
# which count its loads and stores (no weak symbols: the linker would take inline functions that are
# not counted).
NVCC    := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPUS     = 80 86 89 90a
EMULATED := $(shell command -v $(CXX) 2>/dev/null)
OBSERVED := $(if $(EMULATED),$(shell $(CXX) -fno-weak -E -x c++ /dev/null 2>/dev/null && echo yes))
EMULATOR = $(B)/emulated.o $(B)/cuda_on_cpu.o
DEVICES  = $(NVCC:%=$(B)/llm_cuda.o $(B)/product_cuda.o) $(EMULATED:%=$(EMULATOR)) $(OBSERVED:%=$(B)/observed.o)
CUDA     = $(dir $(realpath $(NVCC)))..
DEVICE_LIBS = $(NVCC:%=-L$(CUDA)/lib64 -L$(CUDA)/lib -lcudart_static -lpthread -ldl -lrt) \
	$(if $(strip $(DEVICES)),-lstdc++)

# ---- The program. docs/course.c includes the engine and the lessons that look inside it.
COMMAND  = $(B)/command$(if $(NVCC),_CUDA)$(if $(EMULATED),_EMULATED)$(if $(OBSERVED),_OBSERVED)
WITH     = $(filter-out command,$(subst _, ,$(notdir $(COMMAND)))) $(if $(EDITLINE),EDITLINE) $(if $(MICROHTTPD),MICROHTTPD)
INSIDE   = docs/04-attention.c docs/13-tokens.c docs/14-sampling.c
SOURCES  = $(filter-out $(INSIDE),main.c tests/bench.c $(wildcard models/*.c docs/*.c)) \
	docs/examples/serve.c
llm $(B)/llm: $(B)/libkernels.a $(SOURCES:%.c=$(COMMAND)/%.o) $(B)/serve_page.o $(B)/plot_font.o \
		$(DEVICES) $(B)/linked
	$(COMPILE) $(filter %.o,$^) -o $@ $(LDFLAGS) $< -lm $(DEVICE_LIBS) $(if $(EDITLINE),-ledit) \
		$(if $(MICROHTTPD),-lmicrohttpd -lpthread)
$(COMMAND)/docs/serve.o $(COMMAND)/docs/examples/serve.o $(B)/fuzz_serve.o: $(B)/linked \
	$(wildcard docs/examples/*.[ch])
$(B)/serve_page.o: docs/examples/serve.html
$(B)/plot_font.o: docs/stb/DejaVuSans.ttf
$(B)/serve_page.o $(B)/plot_font.o: $(B)/%.o: $(B)/flags # files as arrays
	(echo 'const unsigned char $*[] = {'; \
		od -An -v -tu1 $(filter docs/%,$^) | sed 's/[0-9][0-9]*/&,/g'; \
		echo '}; const unsigned long $*_size = sizeof $*;') | $(COMPILE) -x c -c - -o $@
$(COMMAND)/docs/course.o: llm.h $(INSIDE)
$(COMMAND)/%.o: %.c $(wildcard docs/*.h docs/stb/*.h models/*.h tests/*.h) $(B)/api.h $(B)/flags
	@mkdir -p $(@D)
	$(COMPILE) -DLLM_KERNELS_HERE=-1 $(addprefix -DLLM_WITH_,$(WITH)) -c $< -o $@

# ---- The kernels take the compiler longest; one compilation serves the program and all tests.
KERNELS  = $(B)/kernels_2.o $(B)/kernels_1.o $(B)/kernels_0.o
$(B)/kernels_%.o: $(B)/kernels.h $(B)/flags
	$(COMPILE) $(KERNEL_FLAGS) -Wno-unused-function -DLLM_FILE_NAME='"kernels.h"' \
		-DLLM_IMPLEMENTATION -DLLM_KERNELS_HERE=$* -x c -c $< -o $@
$(B)/llm.o: llm.h $(B)/flags
	echo '#include "llm.h"' | $(COMPILE) -DLLM_IMPLEMENTATION -DLLM_KERNELS_HERE=-1 -x c -c - -o $@
$(B)/libkernels.a: $(KERNELS)
$(B)/libllm.a: $(B)/llm.o $(COMMAND)/models/quantize.o $(KERNELS)
$(B)/lib%.a:
	rm -f $@ && $(AR) rcs $@ $^

# ---- Flags, and the parts of llm.h that objects need: files that change only when their text does.
UPDATE   = >$@.new; if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
$(B)/flags: TEXT = $(COMPILE) $(KERNEL_FLAGS) $(CXX) $(EDITLINE)
$(B)/linked: TEXT = $(COMMAND) $(DEVICES) $(LDFLAGS) $(MICROHTTPD)
$(B)/flags $(B)/linked: FORCE | $(B)/have-cc $(SERVER)
	@echo '$(subst ','\'',$(TEXT))' $(UPDATE)
$(B)/api.h $(B)/kernels.h: llm.h tests/parts.awk | $(B)/have-cc
	@awk -v part=$(basename $(@F)) -f tests/parts.awk llm.h $(UPDATE)
$(B)/server: # without libmicrohttpd, `llm serve` says what to install
	@mkdir -p $(B) && (sh tests/need.sh microhttpd || true) && touch $@
$(B)/have-%: # a stamp: it is installed
	@mkdir -p $(B) && sh tests/need.sh $* && touch $@
$(B)/llm_cuda.o: llm.cu $(B)/api.h
$(B)/product_cuda.o: docs/17-product.cu
$(B)/%_cuda.o:
	$(NVCC) -O3 --threads 0 -lineinfo -gencode arch=compute_90,code=compute_90 \
		$(foreach n,$(GPUS),-gencode arch=compute_$n,code=sm_$n) -Xcompiler -Wall -I. -c $< -o $@
$(B)/emulated.o $(B)/observed.o: llm.cu $(B)/api.h
$(B)/observed.o: docs/12-kernel.cu docs/17-product.cu tests/counted.h
$(B)/observed.o: private CFLAGS = -O2 -Wall -Wextra -fsanitize=thread -fno-weak -fno-tree-sra \
	-fno-tree-vectorize -fno-store-merging
$(B)/%.o: tests/%.cpp tests/cuda_on_cpu.h tests/emulator.h $(B)/flags | $(B)/have-c++
	$(CXX) -std=c++17 $(CFLAGS) $(SANITIZE) -I. -Itests $(CPPFLAGS) -c $< -o $@

# ---- Tests. Those that define LLM_IMPLEMENTATION have their own engine, compiled with -O1. (gcc
# leaves out what they do not reach.) The others have the library's.
CMOCKA   = -lcmocka
PROGRAMS = $(basename $(notdir $(wildcard tests/test_*.c* tests/fuzz_*.c tests/soak.c)))
TESTS    = $(addprefix $(B)/,$(sort $(filter test_%,$(PROGRAMS))))
$(B)/%.o: tests/%.c llm.h $(wildcard models/quantize.* tests/*.h tests/cross/*.h) $(B)/flags \
		| $(CMOCKA:-l%=$(B)/have-%)
	$(COMPILE) -O1 -DLLM_KERNELS_HERE=-1 -Itests -c $< -o $@ \
		$(if $(DEVICE)$(filter test_device% soak,$*),,$(call once,WHOLE,-fwhole-program))
$(PROGRAMS:%=$(B)/%): %: %.o $(B)/libkernels.a $(B)/libllm.a
	$(COMPILE) $(filter %.o,$^) -o $@ $(LDFLAGS) $(filter %.a,$^) $(CMOCKA) -lm $(if $(filter %fuzz_serve,$@),-lmicrohttpd) \
		$(if $(filter %cuda_on_cpu.o %llm_cuda.o,$^),$(DEVICE_LIBS))
$(B)/test_tiles.o: tests/test_kernels.c tests/tiles_on_cpu.c
$(B)/test_emulator $(B)/test_product: $(B)/cuda_on_cpu.o
$(B)/test_emulator.o $(B)/test_product.o: tests/counted.h
$(B)/test_product.o: docs/17-product.cu
$(B)/test_pictures.o: $(wildcard docs/plot.* docs/scene.* docs/stb/*.h)
$(B)/test_pictures: $(B)/plot_font.o
$(filter $(B)/test_device% $(B)/test_cuda_kernels,$(TESTS)): $(EMULATOR)
$(B)/soak: $(EMULATED:%=$(EMULATOR))
$(TESTS): $(subst emulated,$(EMULATOR),$(DEVICE:cuda=$(B)/llm_cuda.o))
demo: $(B)/have-cc # with devices only if they were built before: they take minutes
	@$(MAKE) --no-print-directory -j$$(nproc 2>/dev/null || echo 2) llm \
		$(if $(wildcard $(COMMAND)/main.o),,NVCC= EMULATED= OBSERVED= SERVER=)
	@./llm demo
build-tests: $(LLM) $(TESTS)
test: $(B)/have-cmocka $(B)/have-c++ $(B)/have-microhttpd ; @sh tests/all.sh $(LLM) $(TESTS)
sanitize: ; @sh tests/sanitize.sh test
soak-sanitized: ; @sh tests/sanitize.sh soak
fuzz: ; @sh tests/fuzz.sh $(or $(SECONDS),60) $(ONLY)
soak: $(B)/soak ; @OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $< $(or $(MINUTES),30) $(SEED)
mutants: $(B)/have-cmocka $(B)/have-c++ ; @sh tests/mutants.sh
arm64: ; @sh tests/arm64.sh
quotes: ; @sh docs/make.sh quotes
docs: $(LLM) ; @LLM=./$(LLM) sh docs/make.sh all
clean: ; rm -rf build llm
.PHONY: demo build-tests test sanitize soak-sanitized fuzz soak mutants arm64 quotes docs clean
.DELETE_ON_ERROR FORCE:
