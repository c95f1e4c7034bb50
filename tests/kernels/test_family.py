"""The results of the operators match float64, for every size and with every option.

The options are RMSNorm, residuals, zero-centered weights, backward from the output, images, and samples: rows that
share parameters of their own. test_gates.py has the gates; test_forward.py and test_backward.py have hard inputs.
"""

import itertools

import pytest
import torch
from support.backends import (
    MASKS,
    Results,
    assert_same_bits,
    bits,
    check,
    check_images,
    forward,
    rows_and_images,
    run,
    run_images,
    run_pixels,
)
from support.inputs import (
    BATCH_SIZES,
    VARIANTS,
    all_dtypes,
    amid_nans,
    arguments,
    batch_sizes,
    columns,
    data_dtypes,
    layer_variants,
    randn,
    random_args,
    rms_or_not,
    rows_for,
    transposed,
    variants,
)
from support.reference import (
    BF16,
    DTYPES,
    DTYPES_16_BIT,
    F16,
    F32,
    F64,
    broadcast_rows,
    dtypes_id,
    statistics_dtype,
    xhat_error_from_output,
)

from layernorm_ext import add_ada_layer_norm

# Numbers of columns on both sides of limits: of a pack, of narrow rows, of the columns of a warp and of a block on a
# GPU, and of chunks of sums.
COLUMNS = [1, 3, 31, 32, 33, 64, 100, 257, 768, 1023, 1025, 2048, 2049, 4100, 9000, 20001]
# In the CPU kernels, a pack has 4 to 32 pixels, and a tile, whose channels are summed together, 64 to 256.
PIXELS = [*range(1, 70), 127, 128, 129, 196, 255, 256, 257, 300, 511, 520]
# Sums run over 16 channels at a time; 96 and 192 are widths of ConvNeXt.
CHANNELS = [1, 2, 3, 15, 16, 17, 31, 33, 96, 192]
IMAGES = {  # shapes [N, C, pixels]
    "every tail of packs and tiles": [(2, 5, pixels) for pixels in PIXELS],
    "numbers of channels": [(n, c, p) for c in CHANNELS for n, p in ((3, 7), (2, 45), (1, 300))],
    "shorter tiles, and too many channels for shared memory": [(2, 1100, 130), (1, 5000, 3)],
    "partial sums over several images": [(31, 3, 1), (33, 3, 2), (70, 3, 5)],
    "partial sums over one image or a part of it": [(3, 3, 31), (5, 3, 32), (20, 3, 300), (1, 3, 2000), (4, 2, 16384)],
}

# Results


@all_dtypes
@columns
def test_every_number_of_columns_matches_float64(backend, dtypes, columns):
    """The tensors are surrounded by NaN here and below: it appears in the results if a kernel reads outside a row."""
    for cols in columns:
        for rows in rows_for(cols):
            x, dy, w, b = random_args(backend, dtypes, rows, cols)
            x, dy, w, b = amid_nans(x, gap=3), amid_nans(dy, gap=5), amid_nans(w), amid_nans(b)
            before = bits(x), bits(dy)
            check(run(backend, x, dy, w, b), x, dy, w, b, context=(rows, cols))
            assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"


@all_dtypes
@pytest.mark.parametrize("shapes", IMAGES.values(), ids=IMAGES)
def test_images_match_float64(backend, dtypes, shapes):
    for shape in shapes:
        x, dy, w, b = (amid_nans(t) for t in random_args(backend, dtypes, *shape))
        before = bits(x), bits(dy)
        check_images(run_images(backend, x, dy, w, b), x, dy, w, b, context=shape)
        assert torch.equal(bits(x), before[0]) and torch.equal(bits(dy), before[1]), "arguments have changed"


@all_dtypes
@variants
def test_variants_match_float64(backend, dtypes, variant):
    """With a residual, all results but grad_input, to which grad_sum is added, have the bits of the norm of the sum."""
    for cols in COLUMNS:
        shape = (6 if cols < 2000 else 1, cols)
        x, residual, dy, grad_sum = (amid_nans(randn(shape, dtypes[0], backend.device)) for _ in range(4))
        w, b = (amid_nans(randn(cols, dtypes[1], backend.device)) for _ in range(2))
        total = amid_nans(x + residual)
        plain = run(backend, total, dy, w, b, **variant)
        check(plain, total, dy, w, b, context=(cols,), **variant)
        inputs = {"residual": residual, "grad_sum": grad_sum}
        added = run(backend, x, dy, w, b, **inputs, **variant)
        assert added.total.is_contiguous()
        assert_same_bits(added._replace(total=None, grad_input=None), plain._replace(grad_input=None))
        check(added, x, dy, w, b, context=(cols,), **inputs, **variant)


@all_dtypes
@batch_sizes
def test_samples_match_float64(backend, dtypes, batches):
    every_variant = itertools.product((3, 100), VARIANTS.values())
    for cols, variant in [*every_variant, (1025, VARIANTS["rms"]), (4100, VARIANTS["layer-centered"])]:
        tensors = arguments(batches, cols, dtypes, backend.device, amid_nans)
        check(run(backend, *tensors, **variant), *tensors, context=(cols,), **variant)


@pytest.mark.parametrize("dtypes", DTYPES_16_BIT, ids=dtypes_id)
@pytest.mark.parametrize("name", ["shared", "per sample", "outer and inner dimension"])
@rms_or_not
def test_float32_residual_matches_float64(backend, dtypes, name, rms):
    """The norm reads the sum in float32, not rounded to 16 bits. The gradient of the sum is float32 too."""
    for cols in (5, 100, 1025, 4100):
        x, dy, w, b = arguments(BATCH_SIZES[name], cols, dtypes, backend.device, amid_nans)
        residual, grad_sum = (amid_nans(randn(x.shape, F32, backend.device) * 4) for _ in range(2))
        inputs = {"residual": residual, "grad_sum": grad_sum}
        results = run(backend, x, dy, w, b, **inputs, rms=rms)
        check(results, x, dy, w, b, context=(cols,), **inputs, rms=rms)
        in_place = residual.clone()
        output, mean, rstd = backend.ops.forward_.fused(x, (cols,), w, b, 1e-5, in_place, rms=rms)
        assert_same_bits(Results(output, in_place, mean, rstd), results.requested([False] * 3))


@all_dtypes
@rms_or_not
@rows_and_images
def test_absent_parameters_and_masks(backend, run, dtypes, rms):
    """A gradient that is not requested is None. The others do not depend on the mask."""
    variant = {"rms": rms, "zero_centered_weight": rms}
    shared = [((rows,), w, b) for rows, w, b in itertools.product((3, 600), ((), None), ((), None))]
    cases = [(batches, cols) for batches in shared for cols in (40, 1100, 5000) if batches[0] == (3,) or cols == 40]
    takes_images = run is run_pixels  # images have no residual, and no parameters that vary within an image
    for name, batches in BATCH_SIZES.items():
        if not takes_images or "per sample" in name or name == "shared":
            cases.append((batches, 40))
    for batches, cols in cases:
        x, dy, w, b = arguments(batches, cols, dtypes, backend.device)
        residual, grad_sum = (randn(x.shape, dtypes[0], backend.device) for _ in range(2))
        options = variant if takes_images else {"residual": residual, "grad_sum": grad_sum, **variant}
        results = run(backend, x, dy, w, b, **options)
        check(results, x, dy, w, b, context=(batches, cols), **options)
        for mask in MASKS:
            some = run(backend, x, dy, w, b, mask=mask, **options)
            assert_same_bits(some, results.requested(mask), batches, cols, mask)


@data_dtypes
@rms_or_not
def test_in_place_addition_replaces_the_residual_by_the_sum(backend, dtype, rms):
    """Residuals of any layout give the bits of the sum in a new tensor, also where kernels read a row twice."""
    for cols in (40, 1100, 5000):
        x, residual, w, b = (randn((4, cols), dtype, backend.device) for _ in range(4))
        if dtype == F32:
            x[1] *= 1e37  # its squares overflow, so the row is read a second time
        expected = backend.ops.forward.fused(x, (cols,), w[0], b[0], 1e-5, residual, rms=rms)
        for r in (residual.clone(), amid_nans(residual), transposed(residual)):
            version = r._version
            output, mean, rstd = backend.ops.forward_(x, (cols,), w[0], b[0], 1e-5, r, rms=rms)
            assert r._version > version
            assert_same_bits((output, r, mean, rstd), expected, cols)


# Parameters of other dtypes

FLOATS = [F64, F32, F16, BF16]
# Input, weight and bias: every combination without kernels of its own.
TRIPLES = [(x, w, b) for x, w, b in itertools.product(FLOATS, repeat=3) if w != b or (x, w) not in DTYPES]


@pytest.mark.parametrize("dtypes", TRIPLES, ids=lambda dtypes: "-".join(map(dtypes_id, dtypes)))
@rms_or_not
def test_parameters_of_other_dtypes_match_float64(backend, dtypes, rms):
    """The results also have the bits of a call whose parameters were converted to the accumulation type.

    The gradient of an absent parameter, if requested, has the dtype of the other one.
    The bounds do not allow for the conversion of a float64 parameter to float32, one more rounding of 2^-24. They hold
    because they are 8 such roundings, and random rows reach half. test_functions.py tests derivatives, images and
    residuals with such dtypes.
    """
    options = {"rms": rms, "zero_centered_weight": rms}
    for name in ("shared", "per sample", "outer and inner dimension"):
        x, dy, w, b = arguments(BATCH_SIZES[name], 40, dtypes, backend.device)
        w = w.abs() if rms else w  # 1 + w would magnify the relative error of rounding a weight near -1
        results = run(backend, x, dy, w, b, **options)
        check(results, x, dy, w, b, context=(name,), **options)
        converted = [parameter.to(statistics_dtype(x.dtype)) for parameter in (w, b)]
        expected = run(backend, x, dy, *converted, **options)
        gradients = (g.to(dtype) for g, dtype in zip(expected.gradients, dtypes, strict=True))
        assert_same_bits(results.requested([False] * 3), expected.requested([False] * 3))
        assert_same_bits(results.gradients, [*gradients])
        for present in ((w, None), (None, b)):
            check(run(backend, x, dy, *present, **options), x, dy, *present, context=(name,), **options)


# Backward from the output


@all_dtypes
@layer_variants
def test_gradients_from_the_output_match_float64(backend, dtypes, variant):
    """The bound is the documented one: the error of xhat that rounding of the output causes."""
    center = int(variant["zero_centered_weight"])  # a zero-centered weight is stored minus 1
    names = ("per sample", "per row", "outer and inner dimension", "weight per sample, bias shared")
    cases = [((3,), *present) for present in (((), ()), ((), None), (None, ()))]
    cases = [*itertools.product(cases, (5, 200, 1100, 5000), (0.5, 2.0**-16))]
    cases += [*itertools.product((BATCH_SIZES[name] for name in names), (5, 200, 1100), (0.5,))]
    for batches, cols, smallest in cases:  # backward divides by weights of at least `smallest`
        x, dy, w, b = arguments(batches, cols, dtypes, backend.device)
        x, dy = x + 1, dy + 1
        if w is not None:
            w = torch.where(w.abs() < smallest, smallest, w) - center
            w = w.clamp(-0.5) if center else w  # 1 + w would magnify the relative error of a weight near -1
        results = run(backend, x, dy, w, b, memory_efficient=True, **variant)
        error = xhat_error_from_output(*(broadcast_rows(t, x.shape[:-1]) for t in (x, w, b)), **variant)
        check(results, x, dy, w, b, context=(batches, cols, smallest), xhat_error=error, **variant)


@all_dtypes
@layer_variants
def test_weights_below_2_to_the_minus_16_give_nan(backend, dtypes, variant):
    """Backward from the output divides by the weights, and refuses to magnify errors by more than 2^16.

    All of grad_input is NaN, and the gradient of that weight.
    """
    center = int(variant["zero_centered_weight"])
    for cols, size in itertools.product((5, 200, 1100, 5000), (2.0**-16, 2.0**-17, -(2.0**-17), 0.0)):
        if center and size and dtypes[1].itemsize == 2:
            continue  # size - 1 rounds to -1
        x, dy = (randn((3, cols), dtypes[0], backend.device) for _ in range(2))
        w = torch.full((cols,), 0.5 - center, dtype=dtypes[1], device=backend.device)
        w[cols // 2] = size - center
        results = run(backend, x, dy, w, memory_efficient=True, **variant)
        if abs(size) < 2.0**-16:
            assert results.grad_input.isnan().all() and results.grad_weight[cols // 2].isnan(), (cols, size)
        else:
            assert all(gradient.isfinite().all() for gradient in results.gradients), (cols, size)


# Host code


def test_host_code_reads_no_tensor_values(backend):
    """Reading a value would wait for earlier kernels on a GPU. All backends share the host code."""
    leaves = [torch.randn(s, device=backend.device, requires_grad=True) for s in ((4, 8), (4, 8), (8,))]
    flags = ("rms", "zero_centered_weight", "memory_efficient")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        for values, residual in itertools.product(MASKS, (None, leaves[1])):
            options = dict(zip(flags, values, strict=True))
            if options["memory_efficient"] and (options["rms"] or residual is not None):
                continue
            output = forward(backend, leaves[0], residual, leaves[2], None, **options).output
            output.backward(torch.ones_like(output))
    called = {event.key for event in profile.key_averages()}
    assert any("::backward" in name for name in called)
    assert called.isdisjoint({"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::equal"})


# Inputs that are read where they are, because their rows are contiguous


def copies(function):
    """Return the copying operations that a call runs, including those inside this package's operators."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    called = {event.key for event in profile.key_averages()}
    assert any(name.startswith("layernorm") for name in called)
    return called & {"aten::copy_", "aten::clone", "aten::contiguous", "aten::_to_copy", "aten::empty_strided"}


SLICES = {
    "q of [tokens, 3, heads, d]": lambda: torch.randn(7, 3, 4, 16)[:, 0],
    "k of [batch, tokens, 3, heads, d]": lambda: torch.randn(2, 7, 3, 4, 16)[:, :, 1],
    "half of the tokens": lambda: torch.randn(2, 14, 16)[:, 7:],
    "some heads": lambda: torch.randn(7, 12, 16)[:, 2:5],
    "every second row": lambda: torch.randn(9, 16)[::2],
    "expanded": lambda: torch.randn(1, 16).expand(5, 16),
}


@rms_or_not
@pytest.mark.parametrize("make", SLICES.values(), ids=SLICES)
def test_slices_are_read_in_place(backend, make, rms):
    """Forward and backward copy nothing, and have the bits of calls on contiguous tensors."""
    x, dy = (make().to(backend.device) for _ in range(2))
    w, b = (torch.randn(16, device=backend.device) for _ in range(2))
    results = []
    assert not copies(lambda: results.extend(run(backend, x, dy, w, b, rms=rms)))
    assert_same_bits(results, run(backend, x.contiguous(), dy.contiguous(), w, b, rms=rms))


def test_slices_of_a_modulation_are_read_in_place():
    """A block of a diffusion transformer computes all its scales, shifts and gates at once."""
    x, residual = (torch.randn(4, 9, 16) for _ in range(2))
    modulation = [t.detach().requires_grad_() for t in torch.randn(4, 6 * 16).chunk(6, dim=-1)[:3]]

    def call(scale, shift, gate):
        return add_ada_layer_norm(x, residual, (16,), scale, shift, gate=gate)[0]

    y, dy = call(*modulation), torch.randn_like(x)
    assert not copies(lambda: call(*modulation))
    assert not copies(lambda: torch.autograd.grad(y, modulation, dy, retain_graph=True))
    assert torch.equal(y, call(*(t.contiguous() for t in modulation)))
