"""test_kernels.py runs every line of the device code, as counted by gcov."""

import json
import os
import shutil
import subprocess
import sys

import emulated_build

HERE = emulated_build.EMULATOR
CUDA = emulated_build.ROOT / "csrc" / "cuda"


def counts(data):
    """Yield (file, line, number of runs) for each template instance, from the .gcda files in a folder."""
    for path in data.rglob("*.gcda"):
        shutil.copy(emulated_build.CACHE / path.with_suffix(".gcno").name, path.parent)
        gcov = subprocess.run(["gcov", "--json-format", "--stdout", path], capture_output=True, cwd=data, check=True)
        for file in json.loads(gcov.stdout)["files"]:
            for line in file["lines"]:
                yield file["file"], line["line_number"], line["count"]


def test_kernel_tests_run_every_line(tmp_path):
    environment = {**os.environ, "LAYERNORM_EMULATED_MODE": "COVERAGE", "GCOV_PREFIX": str(tmp_path)}
    tests = [sys.executable, "-m", "pytest", "-xq", HERE / "test_kernels.py"]
    subprocess.run(tests, env=environment, check=True, cwd=emulated_build.ROOT)
    lines = {path: {} for path in CUDA.glob("*.cu*")}
    for file, line, count in counts(tmp_path):
        path = CUDA / os.path.basename(file)  # the compiler saw a copy
        if path in lines:
            lines[path][line] = lines[path].get(line, 0) + count
    for path, of_file in lines.items():
        assert of_file, f"nothing of {path.name} was compiled"
        text = path.read_text().splitlines()
        never = [f"{path.name}:{line}: {text[line - 1].strip()}" for line in sorted(of_file) if of_file[line] == 0]
        assert not never
