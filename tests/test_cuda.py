"""CUDA code that can be tested without a GPU: shape functions, error handling, and the size of the binary."""

from pathlib import Path

import pytest
import torch
from reference import statistics_dtype
from shapes import ALL, all_dtypes
from torch._subclasses.fake_tensor import FakeTensorMode

from layernorm_ext import _C, _build_info

built_with_cuda = pytest.mark.skipif(not _build_info.with_cuda, reason="the package was built without CUDA")


@all_dtypes
def test_shape_functions(dtypes):
    """torch.compile traces with fake CUDA tensors, which need no GPU."""
    with FakeTensorMode():
        x = torch.empty(3, 4, 8, dtype=dtypes[0], device="cuda")
        w = torch.empty(8, dtype=dtypes[1], device="cuda")
        output, mean, rstd = torch.ops.layernorm.forward(x, [8], w, w)
        gradients = torch.ops.layernorm.backward(output, x, [8], mean, rstd, w, w, ALL)
    results = (output, mean, rstd, *gradients)
    assert {result.device for result in results} == {torch.device("cuda:0")}
    assert [result.shape for result in results] == [(3, 4, 8), (3, 4, 1), (3, 4, 1), (3, 4, 8), (8,), (8,)]
    statistics = [statistics_dtype(dtypes[0])] * 2
    assert [result.dtype for result in results] == [dtypes[0], *statistics, dtypes[0], dtypes[1], dtypes[1]]


@built_with_cuda
@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the calls succeed")
def test_cuda_runtime_failure_is_a_runtime_error():
    """Without a GPU every call fails. The test calls by dispatch key, because no CUDA tensor exists."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)
    x, statistics = torch.ones(2, 3), torch.ones(2, 1)
    message = r"^layernorm: [\w ]+: (CUDA driver|no CUDA-capable device)"
    with pytest.raises(RuntimeError, match=message):
        torch.ops.layernorm.forward.default.redispatch(keys, x, [3], None, None, 1e-5)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.layernorm.backward.default.redispatch(keys, x, x, [3], statistics, statistics, None, None, ALL)


@built_with_cuda
@pytest.mark.skipif(_build_info.debug, reason="built with DEBUG=1")
def test_binary_size():
    """This project allows 10 MB for three architectures, and as much more for each further one."""
    assert Path(_C.__file__).stat().st_size < 10e6 / 3 * max(3, len(_build_info.cuda_architectures.split(";")))
