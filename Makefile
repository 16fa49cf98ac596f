# m3-gguf. `make demo` and `make test` are all that a new machine needs. `make V=1` shows the compiler's command lines.
PYTHON ?= python3
CC ?= cc
VENV := .venv
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python
LIB := runtime/m3_runtime/lib
NANO := models/m3-nano
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
Q := $(if $(V),,@)

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wno-overlength-strings $(WERROR)
# Vectors wider than the instruction set's are passed between functions of one file only, so how a call does that (psabi)
# does not matter.
WARNINGS += -Wno-psabi
# Warnings are errors where they are looked after (make WERROR=-Werror, as CI does), not on every compiler of a user.
WERROR ?=
# No contraction: what is fused is said in the source. No -march: kernels are chosen when the library runs.
BASE := -std=c11 -D_GNU_SOURCE -fopenmp -fPIC -fvisibility=hidden -ffp-contract=off $(WARNINGS) -Inative/include -Inative/src -Ibuild/generated
CFLAGS ?= -O2 -g1
SANITIZE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

SOURCES := $(wildcard native/src/*.c) $(wildcard native/src/cpu/*.c) $(wildcard native/src/quant/*.c)
HEADERS := $(wildcard native/include/*.h) $(wildcard native/src/*.h) $(wildcard native/src/cpu/*.h) $(wildcard native/src/quant/*.h)
TABLES := build/generated/tables.h
OBJECTS := $(SOURCES:native/src/%.c=build/release/%.o)

# The GPU. `make cuda` writes its choices to build/cuda.mk, and from then on every make builds with CUDA, until make clean.
# CUDA_ARCHS: what kernels are compiled for, the first one also as PTX, which the driver compiles for later GPUs.
-include build/cuda.mk
NVCC ?= nvcc
CUDA_ARCHS ?= 80 90a
CUDA_CHECK_ARCHS ?= 90a
CUDA_SOURCES := $(wildcard native/src/cuda/*.cu)
CUDA_HEADERS := $(wildcard native/src/cuda/*.cuh)
# Where the toolkit lies, which the nvcc of the PATH may only refer to.
CUDA_ROOT = $(shell $(NVCC) --dryrun -E Makefile.cu 2>&1 | sed -n 's/^\#$$ TOP=//p')
# The rules of CFLAGS hold here too: what is fused is said in the source. No exceptions: the library needs no C++ runtime.
NVCC_FLAGS := -std=c++20 -O3 -fmad=false -Xcompiler -fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-Wall,-Wextra \
  $(if $(WERROR),-Werror all-warnings) -Inative/include -Inative/src -Ibuild/generated
comma := ,
gencode = $(foreach arch,$(1),-gencode arch=compute_$(arch),code=sm_$(arch))
ptx = $(addprefix -gencode arch=compute_,$(foreach arch,$(filter-out %a %f,$(firstword $(1))),$(arch)$(comma)code=compute_$(arch)))
ifdef CUDA
OBJECTS := $(filter-out build/release/no_cuda.o,$(OBJECTS)) $(CUDA_SOURCES:native/src/%.cu=build/release/%.o)
# All that a launch needs of libstdc++ is the guard of a static variable.
CUDA_LIBS = -L$(CUDA_ROOT)/lib64 -Wl,--exclude-libs,ALL -lcudart_static -Wl,-Bstatic -lstdc++ -Wl,-Bdynamic -static-libgcc \
  -lpthread -ldl -lrt
TEST_FLAGS = -DM3_TEST_CUDA -I$(CUDA_ROOT)/include
endif
ASAN_OBJECTS := $(SOURCES:native/src/%.c=build/asan/%.o)
AARCH64_OBJECTS := $(SOURCES:native/src/%.c=build/aarch64/%.o)
C_TESTS := $(patsubst tests/native/%.c,%,$(wildcard tests/native/test_*.c))
C_TEST_HEADERS := $(wildcard tests/native/*.h)

ifeq ($(shell uname -m),x86_64)
%/cpu/kernels_avx2.o %/cpu/decode_avx2.o %/cpu/products_avx2.o: ISA := -mavx2 -mfma -mf16c
%/quant/codebook_search_avx2.o: ISA := -mavx2
%/quant/scale_search_avx2.o %/quant/rounding_avx2.o: ISA := -mavx2 -mf16c
%/cpu/kernels_avx512.o %/cpu/products_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
%/cpu/products_avx512_vnni.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mfma -mf16c
endif
%/version.o: ISA := -DM3_VERSION_STRING='"$(VERSION)"'

.PHONY: all native cuda cuda-check install demo test test-programs check-native test-gpu test-aarch64 test-lowest lint format oracle golden \
  scale scale-check bench-convert bench-msa bench-products bench-machine clean nano-data train-nano compare-nano evaluate-nano check-nano
.SECONDARY:
all: native

# ------------------------------------------------------------------------------------------------ engine

native: $(LIB)/libm3.so $(LIB)/m3.h

$(LIB)/libm3.so: $(OBJECTS) $(wildcard build/cuda.mk)
	@mkdir -p $(@D)
	@echo "LD $@"
	$(Q)$(CC) -shared -fopenmp -Wl,-z,defs -o $@.part $(filter %.o,$^) $(CUDA_LIBS) -lm
	@mv $@.part $@

$(LIB)/m3.h: native/include/m3.h
	@mkdir -p $(@D)
	@cp $< $@

build/release/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	@echo "CC $<"
	$(Q)$(CC) $(BASE) $(CFLAGS) $(ISA) -c -o $@ $<

build/asan/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	@echo "CC $< (sanitizers)"
	$(Q)$(CC) $(BASE) $(SANITIZE) $(ISA) -c -o $@ $<

# Adds the GPU to the library, which works as before on a machine without one.
cuda:
	@command -v $(NVCC) > /dev/null || { echo "make cuda needs nvcc of the CUDA toolkit, version 12.8 or later; set NVCC=" >&2; exit 1; }
	@mkdir -p build
	@printf 'CUDA := 1\nNVCC := %s\nCUDA_ARCHS := %s\n' '$(NVCC)' '$(CUDA_ARCHS)' > build/cuda.mk.part
	@cmp -s build/cuda.mk.part build/cuda.mk || mv build/cuda.mk.part build/cuda.mk
	@rm -f build/cuda.mk.part
	@$(MAKE) --no-print-directory native

build/release/cuda/%.o: native/src/cuda/%.cu build/cuda.mk | $(TABLES)
	@mkdir -p $(@D)
	@echo "NVCC $<"
	$(Q)$(NVCC) $(NVCC_FLAGS) $(call gencode,$(CUDA_ARCHS)) $(call ptx,$(CUDA_ARCHS)) -MMD -MF $(@:.o=.d) -c -o $@ $<

-include $(CUDA_SOURCES:native/src/%.cu=build/release/%.d)

# Compiles the CUDA code where there is nvcc, with no GPU: what CI can check of it. The code is not kept, so nvcc 12.9 and
# later need not make it fast, which takes a fifth of the time.
CUDA_CHECK_FLAGS = $(if $(shell $(NVCC) --help | grep Ofast-compile),-Ofc=max)
cuda-check: $(if $(shell command -v $(NVCC)),$(CUDA_SOURCES:native/src/cuda/%.cu=build/cuda-check/%.o))
	$(if $^,,@echo "cuda-check: no nvcc here, the CUDA code is not compiled")

build/cuda-check/%.o: native/src/cuda/%.cu $(CUDA_HEADERS) $(HEADERS) Makefile | $(TABLES)
	@mkdir -p $(@D)
	@echo "NVCC $< (check)"
	$(Q)$(NVCC) $(NVCC_FLAGS) $(CUDA_CHECK_FLAGS) $(call gencode,$(CUDA_CHECK_ARCHS)) -c -o $@ $<

# The codebooks of the IQ types come from the gguf package. setup.py names a Python that has it (the environment of a
# package build); else it is the one of the virtual environment, which is made first.
ifdef GGUF_PYTHON
$(TABLES): native/make_tables.py
else
GGUF_PYTHON = $(PY)
$(TABLES): native/make_tables.py $(STAMP)
endif
	@echo "MAKE $@"
	$(Q)$(GGUF_PYTHON) $< $@

build/release/cpu/products_avx512_vnni.o build/asan/cpu/products_avx512_vnni.o: native/src/cpu/products_avx512.c
build/release/quant/scale_search_avx2.o build/asan/quant/scale_search_avx2.o: native/src/quant/scale_search.c
build/release/quant/codebook_search_avx2.o build/asan/quant/codebook_search_avx2.o: native/src/quant/codebook_search.c

build/release/quant/codebooks.o build/asan/quant/codebooks.o: $(TABLES)

# ------------------------------------------------------------------------------------------------ installation

# One stamp for everything installed: the project itself (editable) and the tools of tests and lint. M3_ENGINE=make tells
# setup.py that the engine is built here.
$(STAMP): pyproject.toml setup.py
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "m3-gguf needs Python 3.11 or later, this is $$($(PYTHON) --version); set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "no virtual environment could be made: on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	M3_ENGINE=make $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

install: native $(STAMP)

# m3-nano, the small trained model in models/: converted, checked against its folder, asked a question, and asked for a
# fact that lies 3,500 tokens back in a text.
demo: install
	@mkdir -p demo
	$(VENV)/bin/m3-convert $(NANO) demo/m3-nano-q4_k_m.gguf --type q4_k_m
	$(VENV)/bin/m3-check-selection $(NANO) demo/m3-nano-q4_k_m.gguf --context 4096
	$(VENV)/bin/m3-run demo/m3-nano-q4_k_m.gguf -p "What is 7 plus 5?"
	$(VENV)/bin/m3-run demo/m3-nano-q4_k_m.gguf -f $(NANO)/recall.txt --temperature 0
	@echo "to chat: $(VENV)/bin/m3-run demo/m3-nano-q4_k_m.gguf"

# ------------------------------------------------------------------------------------------------ checks

build/release/tests/%: tests/native/%.c $(C_TEST_HEADERS) $(OBJECTS)
	@mkdir -p $(@D)
	@echo "LD $@"
	$(Q)$(CC) $(BASE) $(CFLAGS) $(TEST_FLAGS) -Itests/native -o $@ $< $(OBJECTS) $(CUDA_LIBS) -lm

build/asan/tests/%: tests/native/%.c $(C_TEST_HEADERS) $(ASAN_OBJECTS)
	@mkdir -p $(@D)
	@echo "LD $@"
	$(Q)$(CC) $(BASE) $(SANITIZE) -Itests/native -o $@ $< $(ASAN_OBJECTS) -lm

# The C tests, plain and under AddressSanitizer and UndefinedBehaviorSanitizer.
C_TEST_PROGRAMS := $(C_TESTS:%=build/release/tests/%) $(C_TESTS:%=build/asan/tests/%)
test-programs: $(C_TEST_PROGRAMS)

check-native: $(C_TEST_PROGRAMS)
	@for t in $^; do echo "== $$t"; $$t || exit 1; done

# The tests that compare times first, by themselves, then all others, on all cores.
test: install check-native
	$(VENV)/bin/pytest -m alone
	$(VENV)/bin/pytest -m "not alone" --numprocesses auto --dist loadscope

# The case tables and sessions on the GPU, compared with the CPU; the golden vectors through the engine; the first two again,
# in part, with the checkers of the CUDA toolkit. On a machine with a GPU, after make cuda.
GPU_TESTS := $(addprefix build/release/tests/,test_ops test_session test_hopper test_pages test_many)
test-gpu: install $(GPU_TESTS)
	@$(if $(CUDA),,echo "test-gpu: run make cuda first" >&2; exit 1)
	@for t in $(GPU_TESTS); do echo "== $$t cuda"; $$t cuda || exit 1; done
	build/release/tests/test_session cuda experts
	$(VENV)/bin/pytest tests/golden tests/runtime/test_experts_on.py --device cuda
	compute-sanitizer --tool memcheck --error-exitcode 1 build/release/tests/test_ops cuda few
	compute-sanitizer --tool racecheck --error-exitcode 1 build/release/tests/test_ops cuda fewest
	compute-sanitizer --tool memcheck --error-exitcode 1 build/release/tests/test_session cuda
	compute-sanitizer --tool memcheck --error-exitcode 1 build/release/tests/test_session cuda experts
	compute-sanitizer --tool memcheck --error-exitcode 1 build/release/tests/test_hopper cuda few

# pytest with the lowest versions of the dependencies, in an environment of its own.
test-lowest: native
	$(PYTHON) -m venv build/lowest
	M3_ENGINE=make build/lowest/bin/pip install --quiet --disable-pip-version-check --constraint tests/lowest.txt --editable '.[dev]'
	build/lowest/bin/python -m pytest

# The same C tests on AArch64 (NEON) by emulation: Debian packages gcc-aarch64-linux-gnu and qemu-user.
test-aarch64: $(C_TESTS:%=build/aarch64/tests/%)
	@for t in $^; do echo "== $$t"; qemu-aarch64 $$t || exit 1; done

build/aarch64/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	@echo "CC $< (AArch64)"
	$(Q)aarch64-linux-gnu-gcc $(BASE) -O2 $(filter -D%,$(ISA)) -c -o $@ $<

build/aarch64/quant/codebooks.o: $(TABLES)

build/aarch64/tests/%: tests/native/%.c $(C_TEST_HEADERS) $(AARCH64_OBJECTS)
	@mkdir -p $(@D)
	@echo "LD $@"
	$(Q)aarch64-linux-gnu-gcc -static $(BASE) -O2 -Itests/native -o $@ $< $(AARCH64_OBJECTS) -lm

# Peak memory of m3-convert on a checkpoint of 20 GB under a limit of 4 GiB. 43 GB of disk, some ten minutes.
SCALE_FOLDER ?= build
scale: install
	PYTHONPATH=tests $(PY) tests/scale.py --folder $(SCALE_FOLDER)

# Peak memory of m3-check-selection on the release's widths under a limit of 20 GiB. 28 GB of disk, half an hour on two cores.
scale-check: install
	PYTHONPATH=tests $(PY) tests/scale_check.py --folder $(SCALE_FOLDER)

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES) $(HEADERS) $(CUDA_SOURCES) $(CUDA_HEADERS) $(wildcard tests/native/*.c tests/bench/*.c tests/bench/gpu/*.cu tests/bench/gpu/*.cuh tests/bench/gpu/*.h) $(C_TEST_HEADERS)

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(SOURCES) $(HEADERS) $(CUDA_SOURCES) $(CUDA_HEADERS) $(wildcard tests/native/*.c tests/bench/*.c tests/bench/gpu/*.cu tests/bench/gpu/*.cuh tests/bench/gpu/*.h) $(C_TEST_HEADERS)

# ------------------------------------------------------------------------------------------------ references

# An environment of its own for what needs torch and transformers: references, and the training of m3-nano.
REFERENCE := build/reference/.installed
REFERENCE_PY := build/reference/bin/python
$(REFERENCE): pyproject.toml
	$(PYTHON) -m venv $(@D)
	M3_ENGINE=make $(REFERENCE_PY) -m pip install --quiet --disable-pip-version-check torch==2.13.0 --editable '.[dev,train]'
	@touch $@

# The engine and the converter against stored runs of transformers that lie outside the repository, in $(SHARED)/oracle.
SHARED ?= ../shared
oracle: install $(REFERENCE)
	tests/oracle.sh $(SHARED)/oracle $(VENV)/bin build/reference/bin

# Makes the golden vectors of tests/golden again; the bytes of quantizers change only where their search was changed.
# Not images.npz: tests/golden/make_images.py needs torchvision, whose packages fit one build of torch each.
golden: install $(REFERENCE)
	$(PY) tests/golden/make_encoded.py
	$(PY) tests/golden/make_encoded_iq.py
	$(REFERENCE_PY) tests/golden/make_golden.py
	$(REFERENCE_PY) tests/golden/make_vision.py
	$(REFERENCE_PY) tests/golden/make_chat_templates.py $(wildcard $(SHARED)/oracle/chat_template.jinja)

# Time of m3-convert. With LLAMA=, a Python that has llama-cpp-python, and SCRIPT=, convert_hf_to_gguf.py in the source of
# the same version, against llama.cpp's two steps; TORCH= is a Python that has torch and transformers. 9 GB of disk.
TORCH ?= $(REFERENCE_PY)
bench-convert: install $(if $(LLAMA),$(if $(filter $(REFERENCE_PY),$(TORCH)),$(REFERENCE)))
	PYTHONPATH=tests $(PY) tests/bench/convert.py --folder $(SCALE_FOLDER) \
	  $(if $(LLAMA),--llama $(LLAMA) --script $(SCRIPT) --torch $(TORCH) --csv tests/bench/convert.csv)

# Time of selection and attention of one layer, and of matrix products.
bench-msa: build/release/bench/msa
	@$<

bench-products: build/release/bench/products
	@$<

# Time to the first token from a cold cache, and what more threads give. 4 GB of disk while its model is made.
bench-machine: install
	PYTHONPATH=tests $(PY) tests/bench/machine.py $(SCALE_FOLDER) --commit "$$(git rev-parse --short HEAD)" \
	  --csv tests/bench/machine.csv

build/release/bench/%: tests/bench/%.c $(C_TEST_HEADERS) $(OBJECTS)
	@mkdir -p $(@D)
	@echo "LD $@" >&2
	$(Q)$(CC) $(BASE) $(CFLAGS) -Itests/native -o $@ $< $(OBJECTS) -lm

# ------------------------------------------------------------------------------------------------ m3-nano

# models/m3-nano is in the repository; nano-data (Debian's packages) and train-nano (a GPU) make it again.
NANO_ENV := PYTHONPATH=$(NANO)/train:tests:convert:runtime
NANO_CORPUS ?= build/nano/corpus
NANO_DATA ?= build/nano/data
NANO_RUN ?= build/nano/run
NANO_SECONDS ?= 1170
TRAIN_PYTHON ?= $(REFERENCE_PY)

nano-data: $(REFERENCE)
	$(NANO_ENV) $(REFERENCE_PY) $(NANO)/train/corpus.py $(NANO_CORPUS)
	$(NANO_ENV) $(REFERENCE_PY) $(NANO)/train/vocabulary.py $(NANO_CORPUS) $(NANO_DATA)

# On a machine with a GPU; TRAIN_PYTHON= names a Python that has the packages of the extra [train] already.
train-nano:
	$(NANO_ENV) $(TRAIN_PYTHON) $(NANO)/train/train.py $(NANO_DATA) $(NANO_RUN) --seconds $(NANO_SECONDS)
	$(NANO_ENV) $(TRAIN_PYTHON) $(NANO)/train/checkpoint.py $(NANO_RUN) $(NANO_DATA) $(NANO)

# What models/m3-nano/REPORT.md tells: equality with transformers on any machine, the evaluation on a GPU.
compare-nano: install $(REFERENCE)
	$(NANO_ENV) $(REFERENCE_PY) $(NANO)/train/compare.py $(NANO)

evaluate-nano:
	$(NANO_ENV) $(TRAIN_PYTHON) $(NANO)/train/evaluate.py $(NANO) $(NANO)/train/evaluation.json
	$(NANO_ENV) $(TRAIN_PYTHON) $(NANO)/train/evaluate.py --markdown $(NANO)/train/evaluation.json

# The training code on a CPU with a model made for tests.
check-nano: native $(REFERENCE)
	$(REFERENCE_PY) -m pytest tests/models/test_attention.py tests/models/test_checkpoint.py tests/models/test_train.py

clean:
	rm -rf build demo $(LIB)/libm3.so $(LIB)/m3.h

# ------------------------------------------------------------------------------------------------ MSA kernels on a GPU

# The check and timing program of the MSA kernels, for compute capability 9.0: build/gpu/msa [check] [check-low-bit]
# [check-prefill] [time] [time-low-bit] [time-prefill].
NVCC ?= nvcc
MSA_OBJECTS := $(patsubst native/src/cuda/%.cu,build/gpu/%.o,$(wildcard native/src/cuda/msa_*.cu)) \
  $(patsubst tests/bench/gpu/%.cu,build/gpu/bench_%.o,$(filter-out %/products.cu,$(wildcard tests/bench/gpu/*.cu)))
MSA_NVCC := $(NVCC) -std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Inative/include

.PHONY: gpu-msa
gpu-msa: build/gpu/msa
build/gpu/msa: $(MSA_OBJECTS)
	$(MSA_NVCC) -cudart static -o $@ $^
build/gpu/%.o: native/src/cuda/%.cu $(wildcard native/src/cuda/msa_*)
	@mkdir -p $(@D)
	$(MSA_NVCC) -Xptxas -v -c -o $@ $< 2> $@.log || { cat $@.log; exit 1; }
build/gpu/bench_%.o: tests/bench/gpu/%.cu $(wildcard tests/bench/gpu/*.cuh tests/bench/gpu/*.h) native/src/cuda/msa_kernels.h
	@mkdir -p $(@D)
	$(MSA_NVCC) -c -o $@ $<

# The targets of speed on a GPU, after make cuda. GPU_PYTHON= is a Python that has torch and cffi.
GPU_PYTHON ?= $(REFERENCE_PY)
.PHONY: bench-gpu
bench-gpu: build/gpu/msa native $(if $(filter $(REFERENCE_PY),$(GPU_PYTHON)),$(REFERENCE))
	@$(if $(CUDA),,echo "bench-gpu: run make cuda first" >&2; exit 1)
	PYTHONPATH=runtime $(GPU_PYTHON) tests/bench/gpu_bench.py

# Times of the engine's matrix products on a GPU, after make cuda: build/gpu/products [few] [many] [layer].
.PHONY: gpu-products
gpu-products: build/gpu/products
build/gpu/products: tests/bench/gpu/products.cu $(wildcard tests/bench/gpu/*.cuh) $(OBJECTS)
	@mkdir -p $(@D)
	$(NVCC) $(NVCC_FLAGS) $(call gencode,$(CUDA_ARCHS)) -cudart static -o $@ $< $(OBJECTS) -lgomp
