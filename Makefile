CPP := $(shell find csrc tests/emulator -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: install cuda-build test test-device mutants gpu-test gpu-sanitize gpu-quick bench-cpu lint format ci clean

install:
	pip install '.[test,benchmarks]'

# The package with its CUDA kernels, for the torch that is installed, which must be a CUDA build; then what of it can be
# tested without a GPU.
cuda-build:
	FORCE_CUDA=1 pip install '.[test]'
	python -m layernorm_ext
	python -m pytest --backends cpu tests/test_cuda.py tests/test_build.py tests/test_errors.py tests/test_autograd.py

test:
	python -m pytest

# The CUDA kernels, without a GPU.
test-device:
	python -m pytest tests/emulator
	python -m pytest -n auto --backends emulated -k emulated

# Whether the tests notice every change of the CUDA kernels. Takes long; goes on where it was interrupted.
mutants:
	python tests/emulator/mutants.py

# For a machine with a GPU: each within eight minutes, without a network; logs and summaries go to OUT.
OUT ?= build/gpu

gpu-test:
	python tests/gpu.py test --out $(OUT)

gpu-sanitize:
	python tests/gpu.py sanitize --out $(OUT)

gpu-quick:
	python tests/gpu.py quick --out $(OUT)

bench-cpu:
	python benchmarks/cpu.py --output cpu.json

lint:
	ruff check . && ruff format --check . && clang-format --dry-run -Werror $(CPP)

format:
	ruff check --fix . && ruff format . && clang-format -i $(CPP)

ci:
	bash .ci/run

clean:
	rm -rf build *.egg-info layernorm_ext/_build_info.py layernorm_ext/_C*.so
