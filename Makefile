# make            builds ./llm, with all devices
# make demo       ... without devices, and tells a tale with the bundled model
# make OPTIMIZE='-O0 -g' NVCC= EMULATED= OBSERVED= llm   builds in 10 s, for a debugger
# make test       runs all tests; the last line sums them up
# make test DEVICE=cuda   the same on an NVIDIA GPU (or on the emulated one, which takes hours)
# make sanitize   the same with the address and undefined-behaviour sanitizers
# make fuzz SECONDS=60   each fuzzer for a minute
# make soak MINUTES=30   random workloads, with failures, for half an hour (soak-sanitized: with the sanitizers)
# make mutants    do the tests notice planted bugs? ONLY=tokenizer/: those of a chapter; SAMPLE=10: so many of them
# make arm64      some of the tests on arm64, under qemu
# make docs       the book again: its quotes, its output, its pictures (make quotes: only the first)
# make clean
#
# llm.cu is compiled for NVIDIA GPUs where nvcc is found (NVCC= turns that off), and for the emulated device (tests/cuda_on_cpu.h)
# where a C++ compiler is (EMULATED= turns that off). `llm` is built without either, too.
#
# `make demo` and `make test` install what they miss (a C compiler; libcmocka for the tests) with apt
# where they may, and otherwise say what to install.

OPTIMIZE = -O3
WARN     = -Wall -Wextra
# -g1: lines and functions, which is what a backtrace, a profile and a sanitizer's report show. To know of each variable where it is
# would take the compiler as long again; who wants that says OPTIMIZE='-O0 -g'.
CFLAGS   = -g1 $(OPTIMIZE) $(WARN)
SECONDS  = 60
MINUTES  = 30
# The device that the tests run on: DEVICE=emulated or cuda. If nothing is said, the engine's tests run on the CPU, and those of
# llm.cu's kernels on the emulated device.
DEVICE   =
B        = build$(if $(DEVICE),/$(DEVICE))
LLM      = llm

# OpenMP where the compiler has it. Asked when a recipe runs, so after the compiler was installed.
OPENMP   = $(shell echo 'int main(void){return 0;}' | $(CC) -fopenmp -x c - -o /dev/null 2>/dev/null && echo -fopenmp)
COMPILE  = $(CC) -std=gnu11 $(CFLAGS) -ffp-contract=fast $(OPENMP) $(SANITIZE) -I. $(CPPFLAGS)

# Line editing and history in `llm chat`, where libedit is there (EDITLINE= turns it off).
EDITLINE = $(shell printf '\043include <stdio.h>\n\043include <editline/readline.h>\nint main(void){return !readline;}\n' | $(CC) -x c - -ledit -o /dev/null 2>/dev/null && echo yes)
EDIT_FLAGS = $(if $(EDITLINE),-DLLM_WITH_EDITLINE)
EDIT_LIBS = $(if $(EDITLINE),-ledit)

# ---- Devices ----------------------------------------------------------------------------
NVCC     := $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPUS     = 80 86 89 90
CUDA     = $(patsubst %/bin/nvcc,%,$(realpath $(NVCC)))
# llm.cu compiled as C++ over tests/cuda_on_cpu.h: the device "emulated"
COMPILE_CXX = $(CXX) -std=c++17 $(CFLAGS) $(SANITIZE) $(if $(SANITIZE),-fno-sanitize=enum) -I. -Itests $(CPPFLAGS)
EMULATOR = $(B)/emulated.o $(B)/cuda_on_cpu.o
EMULATED := $(shell command -v $(CXX) 2>/dev/null)
# ... and once more with a call before each load and store, which the emulator counts: for docs/12-kernel.c. Its inline functions are
# its own, so that no other object calls them.
OBJCOPY  = $(shell $(CC) -print-prog-name=objcopy 2>/dev/null)
OBSERVED := $(if $(EMULATED),$(shell command -v $(OBJCOPY) 2>/dev/null))
OBSERVE  = $(CXX) -std=c++17 -O2 $(WARN) -fsanitize=thread -fno-tree-sra -fno-tree-vectorize -fno-store-merging -I. -Itests $(CPPFLAGS) \
	-DLLM_EMULATED -Dllm_emulated_backend=llm_observed_backend -x c++ -c
DEVICES  = $(if $(NVCC),$(B)/llm_cuda.o) $(if $(EMULATED),$(EMULATOR)) $(if $(OBSERVED),$(B)/observed.o)
DEVICE_FLAGS = $(if $(NVCC),-DLLM_WITH_CUDA) $(if $(EMULATED),-DLLM_WITH_EMULATED) $(if $(OBSERVED),-DLLM_WITH_OBSERVED)
DEVICE_LIBS  = $(if $(NVCC),$(addprefix -L,$(wildcard $(CUDA)/lib64 $(CUDA)/lib)) -lcudart_static -lpthread -ldl -lrt) $(if $(strip $(DEVICES)),-lstdc++)

TESTS    = $(sort $(wildcard tests/test_*.c tests/test_*.cpp))
FUZZERS  = $(sort $(wildcard tests/fuzz_*.c))
PROGRAMS = $(patsubst tests/%,$(B)/%,$(basename $(TESTS)))
# What takes long comes first, so that no processor has nothing to do while the last one runs.
SCRIPTS  = $(if $(SANITIZE),,tests/lessons.sh tests/embed.sh tests/docs.sh tests/races.sh) tests/cli_batch.sh tests/cli.sh
# The kernels once more, with matrix tiles that an emulator plays (tests/tiles_on_cpu.c).
TILES    = $(if $(DEVICE),,$(if $(findstring x86_64-linux,$(subst -pc-,-,$(shell $(CC) -dumpmachine))),$(B)/tiles_kernels))
LONG     = $(addprefix $(B)/test_,kernels speculation engine device cuda_kernels) $(TILES)

# The program: an object for each file, in a folder for each set of devices. docs/course.c holds
# the implementation of llm.h; the others read only its declarations.
COMMAND  = $(B)/command$(if $(NVCC),_cuda)$(if $(EMULATED),_emulated)$(if $(OBSERVED),_observed)
IN_COURSE = docs/04-attention.c docs/13-tokens.c docs/14-sampling.c
SOURCES  = main.c tests/bench.c $(wildcard models/*.c) \
	$(filter-out $(IN_COURSE),$(wildcard docs/*.c))
llm $(B)/llm: $(SOURCES:%.c=$(COMMAND)/%.o) $(B)/libkernels.a $(DEVICES) $(B)/linked
	$(COMPILE) $(filter-out %/linked,$^) -o $@ $(LDFLAGS) -lm $(DEVICE_LIBS) $(EDIT_LIBS)

$(COMMAND)/docs/course.o: llm.h $(IN_COURSE)
HEADERS  = $(wildcard docs/*.h docs/stb/*.h models/*.h) tests/bench.h tests/emulator.h
$(COMMAND)/%.o: %.c $(B)/declarations $(HEADERS) $(B)/flags
	@mkdir -p $(@D)
	$(COMPILE) -DLLM_KERNELS_HERE=-1 $(DEVICE_FLAGS) $(EDIT_FLAGS) -c $< -o $@

# The kernels take the compiler most of its time, so they are compiled once, for the program and for
# all tests: an object per instruction set. 2, AVX-512, takes longest.
KERNELS  = $(addprefix $(B)/$(1)kernels_,2.o 1.o 0.o)
COMPILE_KERNELS = $(1) -Wno-unused-function -DLLM_IMPLEMENTATION -DLLM_FILE_NAME='"kernels.h"' \
	-DLLM_KERNELS_HERE=$* -x c -c $< -o $@
LIBRARY  = printf '\043define LLM_IMPLEMENTATION\n\043include "llm.h"\n' | \
	$(1) -DLLM_KERNELS_HERE=-1 -x c -c - -o $@

$(B)/kernels_%.o: $(B)/kernels.h $(B)/flags
	$(call COMPILE_KERNELS,$(COMPILE))
$(B)/llm.o: llm.h $(B)/flags
	$(call LIBRARY,$(COMPILE))
$(B)/libkernels.a: $(call KERNELS)
# Creating model files: for the program and for the tests.
$(B)/quantize.o: models/quantize.c models/quantize.h $(B)/declarations $(B)/flags
	$(COMPILE) -c $< -o $@
$(B)/libllm.a: $(B)/llm.o $(B)/quantize.o $(call KERNELS)
$(B)/lib%.a:
	rm -f $@ && $(AR) rcs $@ $^

# What takes long to compile depends on a part of llm.h that is a file of its own, which changes only
# when its text does. llm.cu reads the declarations. The flags are such a file, too: when they change,
# everything is compiled again.
CHANGE   = if cmp -s $@.new $@; then rm $@.new; else mv $@.new $@; fi
$(B)/declarations: llm.h tests/parts.awk
	@mkdir -p $(B)
	@awk -v part=api -f tests/parts.awk llm.h >$@.new; $(CHANGE)
$(B)/kernels.h: llm.h tests/parts.awk
	@mkdir -p $(B)
	@awk -v part=kernels -f tests/parts.awk llm.h >$@.new; $(CHANGE)
$(B)/flags: FORCE | $(B)/have-cc
	@echo '$(call QUOTED,$(COMPILE) $(CXX) $(EDIT_FLAGS))' >$@.new; $(CHANGE)
$(B)/linked: FORCE | $(B)/have-cc
	@echo '$(call QUOTED,$(COMMAND) $(DEVICES) $(LDFLAGS))' >$@.new; $(CHANGE)
QUOTED   = $(subst ','\'',$(1))
FORCE:

$(B)/llm_cuda.o: llm.cu $(B)/declarations
	$(NVCC) -O3 --threads 0 -lineinfo $(foreach n,$(GPUS),-gencode arch=compute_$n,code=sm_$n) -gencode arch=compute_90,code=compute_90 \
		-Xcompiler -Wall -I. -c $< -o $@

$(B)/emulated.o: llm.cu tests/cuda_on_cpu.h $(B)/declarations $(B)/flags | $(B)/have-c++
	$(COMPILE_CXX) -DLLM_EMULATED -x c++ -c $< -o $@

$(B)/cuda_on_cpu.o: tests/cuda_on_cpu.cpp tests/cuda_on_cpu.h tests/emulator.h $(B)/flags | $(B)/have-c++
	$(COMPILE_CXX) -c $< -o $@

$(B)/observed.o: llm.cu docs/12-kernel.cu tests/cuda_on_cpu.h $(B)/declarations | $(B)/have-c++
	$(OBSERVE) llm.cu -o $(B)/observed_llm.o
	$(OBSERVE) docs/12-kernel.cu -o $(B)/observed_lesson.o
	$(CXX) -r -nostdlib -Wl,--force-group-allocation $(B)/observed_llm.o $(B)/observed_lesson.o -o $@
	$(OBJCOPY) --keep-global-symbol=llm_observed_backend --keep-global-symbol=kernel_lesson_run $@

# (With no devices, unless they have been built before: they take minutes.)
demo: $(B)/have-cc
	@$(MAKE) --no-print-directory -j$$(nproc 2>/dev/null || echo 2) llm \
		$(if $(wildcard $(COMMAND)/main.o),,NVCC= EMULATED= OBSERVED=)
	@./llm demo

# ---- Tests ----------------------------------------------------------------------------
# A test either includes the implementation itself, to reach inside, or takes it from the library. Its own copy is compiled with -O1,
# in a third of the time; the library, its kernels and the program are what users get. It is an object by itself, which does not wait for
# the library, and of which the compiler (if it is gcc) leaves out what the test does not reach, but where a device's object wants it.
CMOCKA   = -lcmocka
REACHED  = $(if $(DEVICE),,$(shell echo 'int main(void){return 0;}' | $(CC) -Werror -fwhole-program -x c - -o /dev/null 2>/dev/null && echo -fwhole-program))
COMPILE_TEST = $(COMPILE) -O1 -DLLM_KERNELS_HERE=-1 -Itests

$(B)/test_%.o: tests/test_%.c llm.h models/quantize.c models/quantize.h $(wildcard tests/*.h tests/cross/*.h) $(B)/flags | $(if $(CMOCKA),$(B)/have-cmocka,$(B)/have-cc)
	$(COMPILE_TEST) $(REACHED) -c $< -o $@

$(B)/test_%: $(B)/test_%.o $(B)/libkernels.a $(B)/libllm.a
	$(COMPILE) $(filter %.o,$^) -o $@ $(LDFLAGS) $(B)/libkernels.a $(B)/libllm.a $(CMOCKA) -lm $(if $(filter %cuda_on_cpu.o %llm_cuda.o,$^),$(DEVICE_LIBS))

$(B)/tiles_on_cpu.o: tests/tiles_on_cpu.c $(B)/flags
	$(COMPILE) -c $< -o $@
$(B)/tiles_%.o: tests/test_%.c llm.h models/quantize.c $(wildcard tests/*.h) $(B)/flags | $(B)/have-cmocka
	$(COMPILE_TEST) $(REACHED) -DLLM_EMULATED_TILES -c $< -o $@
$(B)/tiles_%: $(B)/tiles_%.o $(B)/tiles_on_cpu.o $(B)/libkernels.a $(B)/libllm.a
	$(COMPILE) $(filter %.o,$^) -o $@ $(LDFLAGS) $(B)/libkernels.a $(B)/libllm.a $(CMOCKA) -lm

$(PROGRAMS): $(if $(filter emulated,$(DEVICE)),$(EMULATOR)) $(if $(filter cuda,$(DEVICE)),$(B)/llm_cuda.o)
$(B)/test_device $(B)/test_device_sampling $(B)/test_cuda_kernels $(B)/test_device_engine: $(EMULATOR)
$(B)/test_device.o $(B)/test_device_sampling.o: REACHED =

$(B)/test_emulator: tests/test_emulator.cpp tests/cuda_on_cpu.h $(B)/cuda_on_cpu.o $(B)/libllm.a | $(B)/have-cmocka
	$(COMPILE_CXX) $< -o $@ $(LDFLAGS) $(filter %.o,$^) $(B)/libllm.a $(OPENMP) -lcmocka -lm

test: $(B)/have-cmocka $(B)/have-c++
	@$(MAKE) --no-print-directory -j$$(nproc 2>/dev/null || echo 2) build-tests
	@CC='$(CC)' LLM_TEST_DEVICE='$(DEVICE)' LLM_KERNELS='$(B)/libkernels.a' $(if $(filter cuda,$(DEVICE)),LLM_TEST_JOBS=1) \
		sh tests/run.sh '$(LLM)' $(SCRIPTS) $(LONG) $(filter-out $(LONG),$(PROGRAMS)) tests/cli_chat.sh

build-tests: $(LLM) $(PROGRAMS) $(TILES)

# Without two checks of the undefined-behaviour sanitizer that take the compiler as long as all others together: the address sanitizer
# sees where a pointer that they would complain about is used.
sanitize:
	@LLM_TEST_LESS=1 UBSAN_OPTIONS=print_stacktrace=1 ASAN_OPTIONS=allocator_may_return_null=1 $(MAKE) --no-print-directory test B=build/sanitize LLM=build/sanitize/llm \
		NVCC= OBSERVED= OPTIMIZE=-O1 SANITIZE='-fsanitize=address,undefined -fno-sanitize=object-size,pointer-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer'

# On arm64, which qemu plays where the machine is another one. There is no cmocka for it here: tests/cross/ stands in.
ARM64_TESTS = kernels golden tokenizer numbers files
arm64: build/have-arm64 build/have-qemu
	@$(MAKE) --no-print-directory -j$$(nproc 2>/dev/null || echo 2) B=build/arm64 CC=aarch64-linux-gnu-gcc \
		OPTIMIZE=-O2 WARN='-Wall -Wextra -Werror' NVCC= EMULATED= CMOCKA= CPPFLAGS='-isystem tests/cross' $(ARM64_TESTS:%=build/arm64/test_%) build/arm64/llm
	@LLM_TEST_LESS=1 LLM_TEST_RUNNER='qemu-aarch64 -L /usr/aarch64-linux-gnu' sh tests/run.sh build/arm64/llm $(ARM64_TESTS:%=build/arm64/test_%) tests/arm64.sh

# ---- Fuzzing: libFuzzer, so clang. Each fuzzer runs for SECONDS. ------------------------------
FUZZ     = clang -std=gnu11 -O1 -g1 $(WARN) -fsanitize=fuzzer$(1),address,undefined -fno-sanitize-recover=all -I. -Itests
# The kernels without a note of every comparison, which would tell the fuzzer nothing, and with calls of the address sanitizer where it would
# put the same checks in line: the compiler needs a fraction of the time, and they are no slower.
$(B)/fuzzed-kernels_%.o: $(B)/kernels.h | $(B)/have-fuzzer
	$(call COMPILE_KERNELS,$(call FUZZ,-no-link) -fno-sanitize-coverage=trace-cmp \
		-mllvm -asan-instrumentation-with-call-threshold=0)
$(B)/fuzzed-llm.o: llm.h | $(B)/have-fuzzer
	$(call LIBRARY,$(call FUZZ,-no-link))
$(B)/libfuzzed.a: $(call KERNELS,fuzzed-) $(B)/fuzzed-llm.o
$(B)/fuzz_%.o: tests/fuzz_%.c llm.h models/quantize.c $(wildcard tests/*.h) | $(B)/have-fuzzer
	$(FUZZ) -DLLM_KERNELS_HERE=-1 -c $< -o $@
$(B)/fuzz_%: $(B)/fuzz_%.o $(B)/libfuzzed.a
	$(FUZZ) $^ -o $@ -lm

fuzz:
	@$(MAKE) --no-print-directory -j$$(nproc 2>/dev/null || echo 2) build-fuzzers
	@sh tests/fuzz.sh $(SECONDS) $(FUZZERS:tests/%.c=$(B)/%)

build-fuzzers: $(FUZZERS:tests/%.c=$(B)/%)

# ---- Mutants: patches that plant one bug each (tests/mutants.sh) -------------------------------
mutants: $(B)/have-cmocka $(B)/have-c++
	@CC='$(CC)' ONLY='$(ONLY)' SAMPLE='$(SAMPLE)' sh tests/mutants.sh

# ---- Soak: random workloads, also on the emulated device where there is a C++ compiler. SEED: of the first round. ----
SEED     =
$(B)/soak.o: tests/soak.c llm.h models/quantize.c $(wildcard tests/*.h tests/cross/*.h) $(B)/flags
	$(COMPILE) -O2 -DLLM_KERNELS_HERE=-1 -Itests -c $< -o $@
$(B)/soak: $(B)/soak.o $(B)/libkernels.a $(if $(EMULATED),$(EMULATOR))
	$(COMPILE) $(filter %.o,$^) -o $@ $(LDFLAGS) $(B)/libkernels.a -lm $(if $(EMULATED),-lstdc++)

soak: $(B)/soak
	@OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(B)/soak $(MINUTES) $(SEED)
soak-sanitized:
	@ASAN_OPTIONS=allocator_may_return_null=1 $(MAKE) --no-print-directory soak B=build/sanitize NVCC= OPTIMIZE=-O1 \
		SANITIZE='-fsanitize=address,undefined -fno-sanitize=object-size,pointer-overflow -fno-sanitize-recover=all -fno-omit-frame-pointer'

# ---- Set-up: each stamp says that something was there or has been installed -------------------
$(B)/have-%:
	@mkdir -p $(B)
	@CC='$(CC)' sh tests/need.sh $*
	@touch $@

# The book: `make quotes` takes the quoted code from the source again; `make docs` also runs what it shows and draws its pictures.
quotes:
	@sh docs/make.sh quotes

docs: $(LLM)
	@LLM=./$(LLM) sh docs/make.sh all

clean:
	rm -rf build llm

.PHONY: FORCE docs quotes demo mutants test build-tests sanitize arm64 fuzz build-fuzzers soak soak-sanitized clean
.PRECIOUS: $(B)/have-% $(B)/test_%.o $(B)/tiles_%.o $(B)/fuzz_%.o
.DELETE_ON_ERROR:
