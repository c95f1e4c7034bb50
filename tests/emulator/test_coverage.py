"""Every line of the device code is run: gcov counts, with nothing left out.

What only nvcc compiles (in device.h) and templates that nobody instantiates are no lines to g++.
"""

import json
import os
import shutil
import subprocess
import sys

import emulated_build

HERE = emulated_build.EMULATOR
CUDA = emulated_build.ROOT / "csrc" / "cuda"


def counts(data):
    """Yield file, line and how often it was run, for each instance of a template, from the .gcda files in a folder."""
    for path in data.rglob("*.gcda"):
        shutil.copy(emulated_build.CACHE / path.with_suffix(".gcno").name, path.parent)
        gcov = subprocess.run(["gcov", "--json-format", "--stdout", path], capture_output=True, cwd=data, check=True)
        for file in json.loads(gcov.stdout)["files"]:
            for line in file["lines"]:
                yield file["file"], line["line_number"], line["count"]


def test_every_line_is_run(tmp_path):
    environment = {**os.environ, "LAYERNORM_EMULATED_MODE": "COVERAGE", "GCOV_PREFIX": str(tmp_path)}
    tests = [sys.executable, "-m", "pytest", "-xq", HERE / "test_kernels.py"]
    subprocess.run(tests, env=environment, check=True, cwd=emulated_build.ROOT)
    lines = {path: {} for path in CUDA.iterdir()}
    for file, line, count in counts(tmp_path):
        path = (CUDA / file).resolve()
        if path.parent == CUDA:
            lines[path][line] = lines[path].get(line, 0) + count
    for path, of_file in lines.items():
        assert of_file, f"nothing of {path.name} was compiled"
        text = path.read_text().splitlines()
        never = [f"{path.name}:{line}: {text[line - 1].strip()}" for line in sorted(of_file) if of_file[line] == 0]
        assert not never
