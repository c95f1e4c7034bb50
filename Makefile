CPP := $(shell find csrc tests/emulator -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: install cuda-build test test-device launch-audit mutants gpu-bench-peers bench bench-cpu bench-compare lint \
	format ci clean

install:
	pip install '.[test,benchmarks]'

# The package with its CUDA kernels, for the torch that is installed, which must be a CUDA build; then what of it can be
# tested without a GPU.
cuda-build:
	FORCE_CUDA=1 pip install '.[test]'
	python -m layernorm_ext
	python -m pytest --backends cpu tests/test_cuda.py tests/test_build.py tests/test_errors.py tests/test_autograd.py

test:
	python -m pytest -n auto

# The CUDA kernels, without a GPU: in the emulator, and what nvcc has made of them if the package was built with CUDA.
test-device:
	python -m pytest -n auto --dist loadfile tests/emulator
	python -m pytest -n auto --backends emulated -k emulated

# The launches that a GPU would refuse, for every GPU of tests/emulator/gpu_models.h; --table prints the launches on an
# H200. It needs a package that was built with CUDA, but no GPU.
launch-audit:
	python tests/emulator/launch_audit.py

# Whether the tests notice every change of the CUDA kernels. Takes long; goes on where it was interrupted.
mutants:
	python tests/emulator/mutants.py

# For a machine with a GPU: each part within eight minutes, without a network; logs and summaries go to OUT. What has
# passed is not repeated, and what was interrupted goes on. COMMIT is for sources that lie in no repository.
OUT ?= build/gpu
GPU_OPTIONS = --out $(OUT) $(if $(COMMIT),--commit $(COMMIT))
GPU_TARGETS = gpu-all gpu-build gpu-test gpu-sanitize gpu-graphs gpu-devices gpu-bench gpu-profile gpu-peers gpu-quick

.PHONY: $(GPU_TARGETS)
$(GPU_TARGETS): gpu-%:
	python tests/gpu.py $* $(GPU_OPTIONS)

gpu-bench-peers: gpu-peers

BENCH_OUT ?= build/benchmarks
DEVICE ?= cpu
BASE ?= HEAD

bench-cpu:
	python -m benchmarks kernels --out $(BENCH_OUT)

# All benchmarks except compare. DEVICE=cuda runs them on a GPU.
bench:
	python -m benchmarks all --device $(DEVICE) --out $(BENCH_OUT)

# Builds the revision BASE and the working tree and fails if the working tree is slower.
bench-compare:
	python -m benchmarks compare $(BASE) --device $(DEVICE) --out $(BENCH_OUT)

lint:
	ruff check . && ruff format --check . && clang-format --dry-run -Werror $(CPP)

format:
	ruff check --fix . && ruff format . && clang-format -i $(CPP)

ci:
	bash .ci/run

clean:
	rm -rf build *.egg-info layernorm_ext/_build_info.py layernorm_ext/_C*.so
