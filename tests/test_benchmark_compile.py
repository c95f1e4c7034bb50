"""The benchmark of torch.compile on tiny blocks with meaningless times: the results of all contenders are right."""

import pytest

pytestmark = pytest.mark.integration
for package in ("click", "matplotlib", "rich"):
    pytest.importorskip(package)

from benchmarks import compiled, timing  # noqa: E402


@pytest.mark.parametrize("block", ["residual, norm, modulate", "pre-norm transformer block"])
def test_every_contender_computes_the_block(block, monkeypatch):
    monkeypatch.setattr(timing, "MIN_ROUNDS", 2)
    monkeypatch.setattr(compiled, "ROWS", 4)
    records = list(compiled.measure(timing.Device("cpu"), block, "fp32", 0.001))
    assert [(r["pass"], r["contender"], r["status"]) for r in records] == [
        (each, name, "ok") for each in ("forward", "training") for name in ("kernel", "aten", "torch")
    ]
    assert all(r["us"] > 0 and r["of_torch"] > 0 for r in records)
