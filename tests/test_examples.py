"""The scripts of docs/examples run, and print what they promise. The code blocks of all documents run as they are."""

import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import layernorm_ext

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = ROOT / "docs" / "examples"
# Runs a script whose processes are forked, so that torch is imported once and not three times.
RUN_FORKED = """
import functools, runpy, sys, torch.multiprocessing as multiprocessing
multiprocessing.spawn = functools.partial(multiprocessing.start_processes, start_method="fork")
runpy.run_path(sys.argv[1], run_name="__main__")
"""
# Example -> a pattern of its output: the loss falls, and differences from the original are at most 9e-6.
SMALL = r"(0e\+00|\de-(0[6-9]|1\d))\n"
PROMISES = {
    "gpt_block": r"step 0: loss [2-9]\.\d+\n.*\nstep 100: loss 0\.[01]",
    "convert_transformers": rf"5 replaced, 0 skipped(?s:.*)difference from the original {SMALL}",
    "fsdp2": rf"holds 16 of the 32 weights(?s:.*)difference from one process {SMALL}",
}


def parameter(*values, id=None):
    needs_package = re.search(
        "diffusers|transformers|torchvision|(from|import) (kernels|megatron|timm|torchtitan)", values[-1]
    )
    return pytest.param(*values, id=id, marks=[pytest.mark.integration] if needs_package else [])


@pytest.mark.parametrize("name", [parameter(path.stem) for path in sorted(EXAMPLES.glob("*.py"))])
def test_example_keeps_its_promise(name, one_thread, capsys, request):
    if "transformers" in name:
        request.getfixturevalue("torchvision")
        pytest.importorskip("transformers")
    script = str(EXAMPLES / f"{name}.py")
    if name == "fsdp2":
        assert callable(runpy.run_path(script, run_name="__mp_main__")["run"])  # as spawned processes import it
        assert not capsys.readouterr().out
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        output = subprocess.check_output([sys.executable, "-P", "-c", RUN_FORKED, script], text=True, env=environment)
    else:
        runpy.run_path(script, run_name="__main__")
        output = capsys.readouterr().out
    assert re.search(PROMISES[name], output), output


def blocks(language):
    """Return the code blocks of all documents, each with its document and the line above it."""
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("tools/*/*.md")]
    fence = re.compile(rf"^([^\n]*)\n```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    matches = [(str(path.relative_to(ROOT)), *match) for path in documents for match in fence.findall(path.read_text())]
    return [parameter(*match, id=f"{match[0]}-{i}") for i, match in enumerate(sorted(matches))]


@pytest.mark.parametrize(("document", "line_above", "code"), blocks("python"))
def test_python_block_runs_when_copied(document, line_above, code, one_thread, request):
    packages = re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE)
    if {"diffusers", "timm", "torchvision", "transformers"} & {*packages}:
        request.getfixturevalue("torchvision")  # the others import it
    for package in packages:
        pytest.importorskip(package, exc_type=ImportError)
    exec(compile(code, document, "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("document", "line_above", "code"), blocks("bash"))
def test_bash_block_runs_in_the_ci(document, line_above, code):
    """A comment above it names the stage of .ci/run that runs it."""
    name = re.fullmatch("<!-- ci: (.*) -->", line_above)[1]
    assert re.search(rf"^stage .* block {document} {name}$", (ROOT / ".ci/run").read_text(), re.MULTILINE)


def test_adaptive_block_equals_the_block_before_it(one_thread):
    """docs/adaln.md shows both. They add in another order: some hundred roundings of 1e-16 each."""
    width, outputs = 8, []
    mlp, x, condition = torch.nn.Linear(width, width), torch.randn(2, 3, width), torch.randn(2, width)
    for document, _, code in (block.values for block in blocks("python")):
        if document == "docs/adaln.md" and "class Block" in code:
            namespace = {}
            exec(compile(code, document, "exec"), namespace)
            torch.manual_seed(0)
            block = namespace["Block"](width, torch.nn.Identity(), mlp).double()
            outputs.append(block(x.double(), condition.double()))
    before, after = outputs
    torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)


def signature(function):
    """Return the arguments as docs/functions.md has them: no types, and "..." for those that all modules have."""
    found = inspect.signature(function)
    arguments = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    text = str(found.replace(parameters=arguments, return_annotation=found.empty))
    return re.sub(r"elementwise_affine=True, (bias=True, )?device=None, dtype=None", "...", text)


def test_list_of_functions_has_the_signatures_of_the_code():
    """docs/functions.md has everything that the package exports but the report, which no user creates."""
    expected = set()
    for name in set(layernorm_ext.__all__) - {"ConversionReport"}:
        function = getattr(layernorm_ext, name)
        is_module = inspect.isclass(function) and issubclass(function, torch.nn.Module)
        expected.add(name + signature(function) + (signature(function.forward) if is_module else ""))
    [block] = re.findall("```text\n(.*?)```", (ROOT / "docs/functions.md").read_text(), re.DOTALL)
    assert {line for line in block.splitlines() if line} == expected
