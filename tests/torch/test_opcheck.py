"""torch.library.opcheck: schema, shape functions and autograd registration of the operators are right."""

import operator
import random

import pytest
import torch
from support.operator_calls import OPERATORS, strided, valid_call
from torch._subclasses.fake_tensor import FakeTensorMode

DIFFERENTIABLE = ("input", "weight", "bias", "residual", "gate", "input_scale")


@pytest.mark.parametrize("name", OPERATORS)
def test_random_calls(backend, name):
    """Half of the tensors are strided. test_operator_calls.py compares shape functions and operators in more calls."""
    function = operator.attrgetter(name if "." in name else f"{name}.default")(backend.ops)
    for seed in (0, 3, 4, 6, 7, 8):  # these draw a residual, a gate, groups, images and memory_efficient
        rng = random.Random(seed)
        torch.manual_seed(seed)
        arguments = valid_call(name, rng)
        for key, value in arguments.items():
            if isinstance(value, torch.Tensor):
                value = strided(value, rng) if rng.random() < 0.5 else value
                is_recorded = name in ("forward", "forward.fused") and key in DIFFERENTIABLE
                arguments[key] = value.to(backend.device).requires_grad_(is_recorded)
        torch.library.opcheck(function, (), arguments)


def test_fake_cuda_tensors():
    """torch.compile traces with fake CUDA tensors, which need no GPU."""
    with FakeTensorMode():
        x, w = torch.empty(3, 4, 8, device="cuda"), torch.empty(8, device="cuda")
        output, mean, rstd = torch.ops.layernorm.forward(x, [8], w, w)
        mask = [True, True, True, False, False, False]
        results = (output, mean, rstd, *torch.ops.layernorm.backward(output, x, [8], mean, rstd, w, w, mask)[:3])
    assert {result.device for result in results} == {torch.device("cuda:0")}
    assert [result.shape for result in results] == [x.shape, (3, 4, 1), (3, 4, 1), x.shape, (8,), (8,)]
