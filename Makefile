# m3-gguf. `make demo` and `make test` are all that a new machine needs.
PYTHON ?= python3
CC ?= cc
VENV := .venv
LIB := runtime/m3_runtime/lib
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

WARNINGS := -Wall -Wextra -Wpedantic -Wshadow -Wvla -Wstrict-prototypes -Wmissing-prototypes -Wno-overlength-strings -Werror
# No contraction: what is fused is said in the source. No -march: kernels are chosen when the library runs.
BASE := -std=c11 -D_GNU_SOURCE -fopenmp -fPIC -fvisibility=hidden -ffp-contract=off $(WARNINGS) -Inative/include -Inative/src
CFLAGS ?= -O2 -g1
SANITIZE := -O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer

SOURCES := $(wildcard native/src/*.c) $(wildcard native/src/cpu/*.c)
HEADERS := $(wildcard native/include/*.h) $(wildcard native/src/*.h) $(wildcard native/src/cpu/*.h)
OBJECTS := $(SOURCES:native/src/%.c=build/release/%.o)
ASAN_OBJECTS := $(SOURCES:native/src/%.c=build/asan/%.o)

ifeq ($(shell uname -m),x86_64)
%/cpu/kernels_avx2.o: ISA := -mavx2 -mfma -mf16c
%/cpu/kernels_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c
endif
%/version.o: ISA := -DM3_VERSION_STRING='"$(VERSION)"'

.PHONY: all native
all: native

native: $(LIB)/libm3.so $(LIB)/m3.h

$(LIB)/libm3.so: $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) -shared -fopenmp -o $@.part $^ -lm
	mv $@.part $@

$(LIB)/m3.h: native/include/m3.h
	@mkdir -p $(@D)
	cp $< $@

build/release/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) $(ISA) -c -o $@ $<

build/asan/%.o: native/src/%.c $(HEADERS) Makefile pyproject.toml
	@mkdir -p $(@D)
	$(CC) $(BASE) $(SANITIZE) $(ISA) -c -o $@ $<

# ------------------------------------------------------------------------------------------------ Python

# One stamp for everything installed: the project itself (editable) and the tools of tests and lint.
STAMP := $(VENV)/.installed
PY := $(VENV)/bin/python

$(STAMP): pyproject.toml setup.py | native
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "m3-gguf needs Python 3.11 or later; set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "no virtual environment: on Debian and Ubuntu install python3-venv" >&2; exit 1; }
	$(PY) -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

.PHONY: install test lint format demo oracle golden check-native clean
install: native $(STAMP)

# ------------------------------------------------------------------------------------------------ checks

C_TESTS := $(patsubst tests/native/%.c,%,$(wildcard tests/native/test_*.c))

build/release/tests/%: tests/native/%.c $(wildcard tests/native/*.h) $(OBJECTS)
	@mkdir -p $(@D)
	$(CC) $(BASE) $(CFLAGS) -Itests/native -o $@ $< $(OBJECTS) -lm

build/asan/tests/%: tests/native/%.c $(wildcard tests/native/*.h) $(ASAN_OBJECTS)
	@mkdir -p $(@D)
	$(CC) $(BASE) $(SANITIZE) -Itests/native -o $@ $< $(ASAN_OBJECTS) -lm

# The C tests, plain and under AddressSanitizer and UndefinedBehaviorSanitizer.
check-native: $(C_TESTS:%=build/release/tests/%) $(C_TESTS:%=build/asan/tests/%)
	@for t in $^; do echo "== $$t"; $$t || exit 1; done

test: install check-native
	$(VENV)/bin/pytest

lint: install
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(SOURCES) $(HEADERS) $(wildcard tests/native/*.c tests/native/*.h)

format: install
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/clang-format -i $(SOURCES) $(HEADERS) $(wildcard tests/native/*.c tests/native/*.h)

# The engine and the converter against stored runs of transformers that lie outside the repository.
SHARED ?= ../shared
oracle: install
	tests/oracle.sh $(SHARED) $(VENV)

clean:
	rm -rf build demo $(LIB)/libm3.so $(LIB)/m3.h
