# CONTRIBUTING.md describes the targets for contributors.

# A command that fails ends its recipe, also within a pipe or a loop.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c

CPP := $(shell find csrc tests tools -name '*.h' -o -name '*.cuh' -o -name '*.cpp' -o -name '*.cu')

.PHONY: install cuda-build test test-all test-device test-aarch64 launch-audit gpu-build gpu-test gpu-sanitize gpu-bench gpu-profile \
	bench bench-compare docs wheel lint format ci clean

install:
	pip install '.[test,benchmarks]'

cuda-build:
	FORCE_CUDA=1 pip install '.[test]'
	python -m layernorm_ext
	python -m pytest --backends cpu tests/test_build.py tests/kernels/test_errors.py tests/torch/test_autograd.py

test:
	python -m pytest -n auto

test-all:
	pip install '.[test-all]'
	python -m pytest -n auto -m integration

# One run of pytest, because each imports torch and collects the tests in every worker. The slow tests of the emulator
# start first, and few tests are sent to a worker at once, so that the workers end together.
test-device:
	python -m pytest -n auto --maxschedchunk 4 --backends "emulated registers clusters launches" -m emulated tools/cuda_emulator tests

# It needs Debian's packages g++-aarch64-linux-gnu and qemu-user. Compiling with -O1 takes half as long as with -O3.
VALUES = csrc/cpu/forward.cpp csrc/cpu/backward.cpp csrc/cpu/channels_first.cpp csrc/cpu/dispatch.cpp tools/aarch64/values.cpp
VALUES_FLAGS = -std=c++17 -O1 -ffp-contract=off -fno-math-errno -Wno-psabi -DCPU_CAPABILITY=DEFAULT -DWITH_DEFAULT -Itools/aarch64

test-aarch64:
	rm -rf build/aarch64 && mkdir -p build/aarch64
	g++ $(VALUES_FLAGS) $(VALUES) -o build/aarch64/host & \
		aarch64-linux-gnu-g++ -static $(VALUES_FLAGS) $(VALUES) -o build/aarch64/target && wait $$!
	build/aarch64/host >build/aarch64/host.txt
	qemu-aarch64 build/aarch64/target >build/aarch64/target.txt
	diff build/aarch64/host.txt build/aarch64/target.txt && wc -l build/aarch64/target.txt

# Checks the launches for several GPUs. It needs a package that was built with CUDA, but no GPU.
launch-audit:
	python tools/cuda_emulator/launch_audit.py

OUT ?= build/gpu
GPU_TESTS = python -m pytest --backends cuda
# Each shape runs different kernels. The last one uses clusters, from compute capability 9.0 on.
PROFILED = 32768x256 16384x4096 128x1048576 2048x65536

$(OUT):
	mkdir -p $@

gpu-build: | $(OUT)
	FORCE_CUDA=1 pip install --no-index --no-build-isolation --no-deps . 2>&1 | tee $(OUT)/build.log
	python -m layernorm_ext | tee $(OUT)/self_check.log

gpu-test: | $(OUT)
	$(GPU_TESTS) -n 8 -k cuda --junitxml=$(OUT)/test.xml 2>&1 | tee $(OUT)/test.log

# memcheck distinguishes tensors only if each is a separate allocation. initcheck must also see torch's kernels, which
# write the inputs; the other tools check ours alone.
gpu-sanitize: export PYTORCH_NO_CUDA_MEMORY_CACHING = 1
gpu-sanitize: | $(OUT)
	for tool in "memcheck --kernel-name kns=layernorm" "racecheck --kernel-name kns=layernorm --racecheck-report all" \
		initcheck "synccheck --kernel-name kns=layernorm"; do \
		compute-sanitizer --error-exitcode 3 --report-api-errors no --tool $$tool \
			$(GPU_TESTS) -k every_path tests/kernels/test_cuda_on_gpu.py 2>&1 | tee $(OUT)/$${tool%% *}.log; \
	done

gpu-bench: | $(OUT)
	python -m benchmarks kernels --device cuda --out $(OUT) 2>&1 | tee $(OUT)/bench.log

gpu-profile: | $(OUT)
	ncu --set full --clock-control none --filter-mode per-launch-config --launch-count 1 --force-overwrite \
		--kernel-name 'regex:^(forward|backward|add)_' --export $(OUT)/profile \
		python -m benchmarks kernels $(PROFILED) --dtypes bf16 --passes both --contenders ours --seconds 0.01 \
		--device cuda --out $(OUT)/profiled 2>&1 | tee $(OUT)/profile.log

BENCH_OUT ?= build/benchmarks
DEVICE ?= cpu
BASE ?= HEAD

# Runs the benchmarks of single calls. DEVICE=cuda runs them on a GPU.
bench:
	for name in kernels overhead accuracy family; do \
		python -m benchmarks $$name --device $(DEVICE) --out $(BENCH_OUT); \
	done

bench-compare:
	python -m benchmarks compare $(BASE) --device $(DEVICE) --out $(BENCH_OUT)

# It needs the dependency group "docs". The page omits attributes without a docstring, because the constructor's
# arguments describe them.
docs:
	pdoc layernorm_ext --docformat google --math --no-include-undocumented --output-directory build/docs

# The wheel's version names its torch, as in 0.2.0+torch2.13.cpu. auditwheel comes from the dependency group "wheel". All
# is compiled again if a variable *FLAGS* changes (fingerprint() in build_support), so the variables of make are removed.
WHEELS = build/wheels
TORCH_LABEL = import torch; cuda = torch.version.cuda; \
	print("torch" + ".".join(torch.__version__.split(".")[:2]), f"cu{cuda}".replace(".", "") if cuda else "cpu", sep=".")

wheel: export DIST_EXTRA_CONFIG = $(abspath $(WHEELS))/version.cfg
wheel:
	rm -rf $(WHEELS) && mkdir -p $(WHEELS)
	printf '[egg_info]\ntag_build = +%s\n' "$$(python -c '$(TORCH_LABEL)')" >$(DIST_EXTRA_CONFIG)
	env -u MAKEFLAGS -u MFLAGS pip wheel --no-deps --wheel-dir $(WHEELS)/built .
	auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --exclude 'libcudart*' --exclude 'libgomp*' \
		--wheel-dir $(WHEELS) $(WHEELS)/built/*.whl
	python -m venv $(WHEELS)/fresh
	$(WHEELS)/fresh/bin/python -m pip install --quiet $(WHEELS)/*.whl \
		"torch==$$(python -c 'from importlib.metadata import version; print(version("torch"))')"
	cd $(WHEELS) && fresh/bin/python -m layernorm_ext

# The grep finds actions that are not pinned to a commit and followed by the version in a comment.
lint:
	ruff check . && ruff format --check . && mypy && actionlint && clang-format --dry-run -Werror $(CPP)
	! grep -rn 'uses:' .github/workflows | grep -vE '@[0-9a-f]{40} # v[0-9.]+$$'

format:
	ruff check --fix . && ruff format . && clang-format -i $(CPP)

ci:
	bash .ci/run

clean:
	rm -rf build *.egg-info layernorm_ext/_build_info.py layernorm_ext/_C*.so
