"""What must not change a single bit of the results: the other rows, places in memory, and threads."""

import threading

import pytest
import torch
from reference import BF16, F32, F64, dtypes_id
from shapes import all_dtypes, amid_nans, bits, randn

pytestmark = pytest.mark.usefixtures("poisoned_memory")

ALL = [True, True, True]

# One for each way through the kernels, with their reason; 8 threads are more than most have slots.
PATHS = [
    pytest.param(4099, 64, id="narrow rows, many slots"),
    pytest.param(37, 96, id="narrow rows, a few slots"),
    pytest.param(300, 1100, id="wide rows, many slots"),
    pytest.param(20, 5000, id="fewer slots than threads: columns are shared out in tiles"),
    pytest.param(5, 20001, id="fewer rows than threads: a row is shared, chunk by chunk"),
    pytest.param(1, 300_001, id="one long row"),
    pytest.param(2, (1 << 20) + 5000, id="groups of chunks"),
]


def everything(backend, x, dy, w, b):
    """Return output, mean, rstd, grad_input, grad_weight and grad_bias."""
    shape = x.shape[-1:]
    output, mean, rstd = backend.forward(x, shape, w, b, 1e-5)
    return output, mean, rstd, *backend.backward(dy, x, shape, mean, rstd, w, b, ALL)


def arguments(backend, dtypes, rows, cols):
    x, dy = (randn((rows, cols), dtypes[0], backend.device, offset=10) for _ in range(2))
    w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
    return x, dy, w, b


def assert_same(results, expected, *context):
    for name, result, right in zip(
        ("output", "mean", "rstd", "grad_input", "grad_weight", "grad_bias"), results, expected, strict=False
    ):
        assert torch.equal(bits(result), bits(right)), (name, *context)


@all_dtypes
@pytest.mark.parametrize("odd", [0, 1], ids=["whole vectors", "odd columns"])
def test_beyond_the_caches(backend, dtypes, odd):
    """An output of 64 MB and more may be written past the caches, and gets the same numbers."""
    cols = 8192 // dtypes[0].itemsize + odd
    x = randn((7, cols), dtypes[0], backend.device, offset=10).repeat(1200, 1)
    w, b = (randn(cols, dtypes[1], backend.device) for _ in range(2))
    expected = backend.forward(x[:7], (cols,), w, b, 1e-5)
    results = backend.forward(x, (cols,), w, b, 1e-5)
    assert_same([r.view(1200, -1) for r in results], [e.view(1, -1).expand(1200, -1) for e in expected])


@all_dtypes
@pytest.mark.parametrize("cols", [1, 5, 33, 64, 100, 129, 256, 257, 511, 513, 1024, 1100, 5000, 9001])
def test_batch_and_position(backend, dtypes, cols):
    """A row gives the same alone, among others, and wherever it stands among them."""
    x, dy, w, b = arguments(backend, dtypes, 21, cols)
    expected = everything(backend, x, dy, w, b)[:4]
    for rows in [(r, r + 1) for r in range(21)] + [(0, 2), (1, 4), (2, 6), (3, 8), (7, 20), (0, 20), (16, 21)]:
        part = slice(*rows)
        results = everything(backend, x[part], dy[part], w, b)[:4]
        assert_same(results, [right[part] for right in expected], cols, rows)
    order = torch.randperm(21)
    results = everything(backend, x[order], dy[order], w, b)[:4]
    assert_same(results, [right[order] for right in expected], cols, "shuffled")


@all_dtypes
@pytest.mark.parametrize("cols", [5, 64, 257, 1100])
def test_row_among_huge_ones(backend, dtypes, cols):
    """A row that goes the slow way takes none of those along that are swept with it."""
    x, dy, w, b = arguments(backend, dtypes, 8, cols)
    expected = everything(backend, x, dy, w, b)[:4]
    for row in range(8):
        changed = x.clone()
        changed[row] = torch.finfo(dtypes[0]).max
        changed[row, ::2] *= -1
        others = torch.arange(8) != row
        results = everything(backend, changed, dy, w, b)[:4]
        assert_same([result[others] for result in results], [right[others] for right in expected], cols, row)


@all_dtypes
@pytest.mark.parametrize("cols", [5, 64, 257, 1100, 5000])
def test_alignment(backend, dtypes, cols):
    """Of input, grad_output and parameters; with gaps between the rows and without."""
    x, dy, w, b = arguments(backend, dtypes, 9, cols)
    expected = everything(backend, x, dy, w, b)
    for offset in (0, 1, 3, 8, 13):
        for gap in (0, 1, 7):
            views = [amid_nans(t, gap, offset) for t in (x, dy)]
            views += [amid_nans(t[None], gap, offset + 1)[0] for t in (w, b)]
            assert_same(everything(backend, *views), expected, offset, gap)


@pytest.mark.parametrize("dtypes", [(F64, F64), (F32, F32), (BF16, BF16), (BF16, F32)], ids=dtypes_id)
@pytest.mark.parametrize("rows, cols", PATHS)
def test_threads(backend, use_threads, dtypes, rows, cols):
    """The whole results, weight gradients too, which torch's own depend on."""
    values = arguments(backend, dtypes, rows, cols)
    use_threads(1)
    expected = everything(backend, *values)
    for threads in (2, 3, 8):
        use_threads(threads)
        assert_same(everything(backend, *values), expected, threads)


def test_two_python_threads_at_once(backend):
    values = [arguments(backend, (F32, F32), *shape) for shape in ((500, 64), (5, 20001))]
    expected = [everything(backend, *v) for v in values]
    failures = []

    def work(value, right):
        try:
            for _ in range(20):
                assert_same(everything(backend, *value), right)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=pair) for pair in zip(values, expected, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@all_dtypes
def test_again(backend, dtypes):
    values = arguments(backend, dtypes, 40, 300)
    expected = everything(backend, *values)
    for _ in range(3):
        assert_same(everything(backend, *values), expected)


@all_dtypes
def test_inference_mode(backend, dtypes):
    x, dy, w, b = arguments(backend, dtypes, 9, 100)
    expected = everything(backend, x, dy, w, b)
    with torch.inference_mode():
        assert_same(everything(backend, x, dy, w, b), expected)
        assert_same([backend.layer_norm(x, (100,), w, b)], expected[:1])
    with torch.no_grad():
        assert_same([backend.layer_norm(x.requires_grad_(), (100,), w, b)], expected[:1])
