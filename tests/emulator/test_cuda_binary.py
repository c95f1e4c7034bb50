"""Every kernel compiles for every architecture without a warning, and keeps its values in registers."""

import itertools
import subprocess

import cuda_binary
import emulated_build
import emulated_ops
import pytest
import sass
import torch
from reference import DTYPES
from test_kernels import STAGED, TILES, arguments, images, run, run_images

architectures = pytest.mark.parametrize("architecture", cuda_binary.ARCHITECTURES)


@architectures
@pytest.mark.parametrize("source", sorted(cuda_binary.CSRC.glob("*.cu")), ids=lambda path: path.name)
def test_kernels(source, architecture):
    kernels = cuda_binary.compile_kernels(source, architecture)
    assert [fault for kernel in kernels for fault in cuda_binary.faults(kernel)] == []


def test_table_is_the_one_in_the_repository():
    """With `python tests/emulator/cuda_binary.py --write`."""
    kept = cuda_binary.TABLE.read_text().splitlines()
    if f"nvcc {cuda_binary.version()};" not in "\n".join(kept):
        pytest.skip("the table is of another version of nvcc")
    assert kept == [*cuda_binary.PREFACE, *cuda_binary.table(cuda_binary.compile_all())]


@architectures
def test_every_kernel_is_run(architecture):
    """The kernels in the real binary are those that run in the emulator."""
    library = emulated_ops.library(emulated_build.PLAIN)
    library.launched()
    with library.schedule(architecture=architecture, one_launch_limit=0):
        for dtypes, limit in itertools.product(DTYPES, [*TILES, 2049, 8193]):
            x, dy, w, b = arguments(1, limit * 16 // dtypes[0].itemsize, dtypes)
            run(library, x, dy, w, b)
            run(library, x, dy, None, None)  # parameters like the input
    for dtypes, path_limit in itertools.product(DTYPES, STAGED):
        x, dy, w, b = arguments(1, 81 * 32 * 16 // dtypes[0].itemsize, dtypes)
        with library.schedule(architecture=architecture, path_limit=path_limit):
            run(library, x, dy, w, b)
            run_images(library, *images((1, 2, 3), dtypes))
    kernels = {k.name for source in cuda_binary.SOURCES for k in cuda_binary.compile_kernels(source, architecture)}
    if architecture < 90:  # where host code chooses others
        kernels = {name for name in kernels if "in_cluster<" not in name}
    assert library.launched() == kernels
    assert len(kernels) > 100


@architectures
def test_every_instruction_of_device_h(architecture):
    kernels = cuda_binary.compile_kernels(cuda_binary.ROOT / "tests/emulator/semantics.cu", architecture)
    assert [fault for kernel in kernels for fault in cuda_binary.faults(kernel)] == []
    memory = {kernel.name: kernel.memory for kernel in kernels}
    assert memory["async_copies"]["LDGSTS", 128] == 2
    if architecture >= 90:
        assert memory["phases"]["UBLKCP", 32] > 0
        assert memory["clusters"]["STAS", 64] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_semantics_on_a_gpu(tmp_path):
    """The checks that the emulator passes hold on the real thing."""
    program = tmp_path / "semantics"
    source = cuda_binary.ROOT / "tests/emulator/semantics.cu"
    command = [
        cuda_binary.tool("nvcc"),
        *cuda_binary.FLAGS,
        "-arch=native",
        f"-I{cuda_binary.CSRC}",
        source,
        "-o",
        program,
    ]
    subprocess.run(command, check=True)
    assert subprocess.run([program], capture_output=True, text=True, check=True).stdout == "0\n"


def test_launch_error_tells_the_configuration(tmp_path):
    """Whether for want of a GPU, or of one that runs so many threads."""
    source, program = tmp_path / "launch.cu", tmp_path / "launch"
    source.write_text(
        '#include "device.h"\n'
        "#include <cstdio>\n"
        "__global__ void kernel(int) {}\n"
        "int main() {\n"
        "  try { layernorm::launch({1, 2048, 50000}, kernel, 1); }\n"
        '  catch (const std::runtime_error& error) { std::printf("%s", error.what()); }\n'
        "}\n"
    )
    command = [cuda_binary.tool("nvcc"), *cuda_binary.FLAGS, *cuda_binary.WARNINGS, f"-I{cuda_binary.CSRC}"]
    subprocess.run([*command, source, "-o", program], check=True)
    told = subprocess.run([program], capture_output=True, text=True, check=True).stdout
    assert "with grid (1, 1, 1), block (2048, 1, 1), cluster 1, 50000 bytes of dynamic shared memory: " in told


def kernels_of(tmp_path, body):
    source = tmp_path / "kernel.cu"
    source.write_text(f'#include "device.h"\n__global__ void kernel(const float* in, float* out, int i) {{ {body} }}\n')
    return cuda_binary.compile_kernels(source, 90)


# What the checks above rely on: each of these must be noticed.
def test_wide_loads_are_counted(tmp_path):
    (kernel,) = kernels_of(tmp_path, "((float4*)out)[i] = layernorm::cluster_rank() ? ((float4*)in)[i] : float4{};")
    assert kernel.name == "kernel"
    assert kernel.memory == {("LDG", 128): 1, ("STG", 128): 1}
    assert list(cuda_binary.faults(kernel)) == []


def test_local_memory_is_a_fault(tmp_path):
    (kernel,) = kernels_of(
        tmp_path, "float v[64]; for (int j = 0; j < i; ++j) v[j * i % 64] = in[j]; *out = v[i % 64];"
    )
    assert kernel.stack == 256
    assert any("local memory" in fault for fault in cuda_binary.faults(kernel))


def test_spill_is_a_fault(tmp_path):
    source = tmp_path / "spills.cu"
    source.write_text(
        "template <int n> __device__ float keep(const float* in) {\n"
        "  float v[n], sum = 0;\n"
        "  for (int j = 0; j < n; ++j) v[j] = in[j * 1024];\n"
        "  __syncthreads();\n"
        "  for (int j = 0; j < n; ++j) sum += v[j] * v[n - 1 - j];\n"
        "  return sum;\n"
        "}\n"
        "__global__ void __launch_bounds__(1024, 2)\n"
        "kernel(const float* in, float* out) { *out = keep<128>(in); }\n"
    )
    (kernel,) = cuda_binary.compile_kernels(source, 90)
    assert kernel.spilled > 0
    assert any("spills" in fault for fault in cuda_binary.faults(kernel))


def test_warning_is_an_error(tmp_path):
    with pytest.raises(cuda_binary.CompileError, match="never referenced"):
        kernels_of(tmp_path, "int unused;")


def test_narrow_access_is_a_fault(tmp_path):
    """A kernel of the name and type of a real one, that loads vectors of 8 bytes."""
    source = tmp_path / "narrow.cu"
    template = (
        '#include "device.h"\n'
        "namespace layernorm::cuda {{\n"
        "template <class T> __global__ void backward_sums(const {0}* x, {0}* y, int n) {{\n"
        "  if (n > 3) for (int i = 0; i < 4; ++i) y[i * 32] = x[i * 64 + 1];\n"
        "#pragma unroll\n"
        "  for (int i = 0; i < 24; ++i) y[i * 512] = x[i * 512];\n"
        "}}\n"
        "template __global__ void backward_sums<float>(const {0}*, {0}*, int);\n"
        "}}\n"
    )
    source.write_text(template.format("float2"))
    (kernel,) = cuda_binary.compile_kernels(source, 90)
    assert kernel.path == cuda_binary.Path(16, sass.Work(16, 4, 0), None)
    assert any("accesses of 16 bytes: Work(staged=16, loads=4" in fault for fault in cuda_binary.faults(kernel))


LISTING = """
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_1) ;
        /*0020*/                   LDG.E R8, desc[UR4][R2.64] ;
        /*0030*/                   LDG.E R9, desc[UR4][R2.64+0x4] ;
        /*0040*/                   BRA `(.L_x_2) ;
.L_x_1:
        /*0050*/                   LDG.E.128 R8, desc[UR4][R2.64] ;
.L_x_2:
        /*0060*/                   FADD R4, R4, R8 ;
        /*0070*/              @P1 BRA `(.L_x_2) ;
        /*0080*/              @P2 EXIT ;
        /*0090*/                   CALL.REL.NOINC `(slow) ;
        /*00a0*/                   STG.E.128 desc[UR4][R2.64], R4 ;
        /*00b0*/                   EXIT ;
.L_x_3:
        /*00c0*/                   BRA `(.L_x_3) ;
        /*00d0*/                   NOP ;
"""


@pytest.mark.parametrize(
    ("loads", "stores", "instructions"),
    [(2, 1, 9), (1, 1, 11), (2, 0, 6), (1, 0, 8), (3, 1, None), (2, 2, None)],
)
def test_way_of_a_row(loads, stores, instructions):
    """Round no loop twice, by the shortest way that makes the accesses."""
    assert sass.executed(LISTING, sass.Work(0, loads, stores), None) == instructions


SKIPS = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R2], desc[UR4][R2.64] ;
        /*0010*/              @P0 BRA `(.L_x_1) ;
        /*0020*/                   FFMA R4, R4, R4, R4 ;
        /*0030*/                   FFMA R5, R4, R4, R4 ;
        /*0040*/                   FADD R5, R4, R4 ;
.L_x_1:
        /*0050*/              @P1 BRA `(.L_x_2) ;
        /*0060*/                   FFMA R5, R4, R4, R4 ;
.L_x_2:
        /*0070*/                   EXIT ;
"""


@pytest.mark.parametrize(("skipped", "instructions"), [(0, 8), (1, 7), (2, 5), (3, 4), (None, 4)])
def test_arithmetic_that_branches_skip(skipped, instructions):
    assert sass.executed(SKIPS, sass.Work(1, 0, 0), skipped) == instructions
