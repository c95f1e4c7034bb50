CPP := $(shell find csrc tests/emulator -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: install test test-device bench-cpu lint format ci clean

install:
	pip install '.[test,benchmarks]'

test:
	python -m pytest

# The CUDA kernels, without a GPU.
test-device:
	python -m pytest tests/emulator
	python -m pytest -n auto --backends emulated -k emulated

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
