import numpy as np
import pytest

from infer_server.engines.backends.llvm.codegen.isa import ALL, AVX2
from infer_server.engines.lowering.epilogue.program import EpilogueProgram, ProgramBuilder
from infer_server.engines.lowering.problems.images import Pool
from infer_server.engines.lowering.problems.view import dense_view
from scripts.testing.suite import check, gapped, random_array, requantise, run
from tests.engines.backends.llvm.runner import CpuRunner, kernel_of
from tests.engines.backends.runners import EVERY_ISA_WIDTH, EVERY_WIDTH, WIDTHS, by_name, rotated

BATCH = 2
PLAIN = EpilogueProgram((), 0, 0)
WINDOWS = {     # kernel, stride, pads, dilation, extent of x
    "3x3 stride 2 padded": ((3, 3), (2, 2), (1, 1, 1, 1), (1, 1), (9, 12)),
    "2x2": ((2, 2), (2, 2), (0, 0, 0, 0), (1, 1), (6, 10)),
    "5x5 same": ((5, 5), (1, 1), (2, 2, 2, 2), (1, 1), (6, 7)),
    "7x7 of a small image": ((7, 7), (1, 1), (3, 3, 3, 3), (1, 1), (4, 5)),
    "1x3 dilated": ((1, 3), (1, 1), (0, 2, 0, 2), (1, 2), (3, 9)),
    "3x3 padded at the end": ((3, 3), (2, 2), (0, 0, 1, 1), (1, 1), (8, 8)),
    "volumes": ((3, 2, 3), (2, 1, 2), (1, 0, 1, 1, 1, 0), (1, 2, 1), (5, 6, 7)),
}


def pool(kind, dtype, channels, window, program=PLAIN, target=None, operands=0, **options):
    kernel, stride, pads, dilation, extent = window
    outputs = [(n + pads[a] + pads[a + len(kernel)] - (kernel[a] - 1) * dilation[a] - 1) // stride[a] + 1
               for a, n in enumerate(extent)]
    y = gapped(target or dtype, (*outputs, channels))
    return Pool(gapped(dtype, (*extent, channels)), y, (dense_view(dtype, y.shape),) * operands, program, kind, kernel,
                stride, pads, dilation, **options)


def data(spec):
    random = np.random.default_rng(0)
    return [random_array(random, view.dtype, (BATCH, *view.shape)) for view in spec.inputs]


@rotated("window, runner, dtype", WINDOWS, by_name(WIDTHS), {"uint8": "uint8", "float32": "float32"})
def test_a_maximum_is_that_of_the_window_inside_the_image(window, dtype, runner):
    spec = pool("max", dtype, 17, window)
    check(spec, runner, data(spec), {"program": []}, pieces=2)


@rotated("window, runner, include", WINDOWS, by_name(WIDTHS), {"uint8": True, "float32": False})
def test_an_average_counts_padded_taps_as_asked(window, include, runner):
    dtype = "uint8" if include else "float32"
    program, constants = requantise(10, np.random.default_rng(0), residual=True)
    spec = pool("average", dtype, 10, window, program, operands=1, count_include_pad=include, pad_value=13)
    check(spec, runner, data(spec), constants, pieces=2)


@EVERY_ISA_WIDTH
@pytest.mark.parametrize("channels, kind", [(1, "max"), (3, "average"), (24, "max"), (33, "average"), (116, "max")])
def test_channels_that_do_not_fill_a_vector(channels, kind, cpu):
    program, constants = requantise(channels, np.random.default_rng(0))
    spec = pool(kind, "uint8", channels, WINDOWS["2x2"], program)
    for tactic in kernel_of(spec).tactics(cpu.isa)[::2]:
        check(spec, cpu, data(spec), constants, tactic=tactic)


@EVERY_WIDTH
@pytest.mark.parametrize("source, target", [("uint8", "float32"), ("float16", "float16"), ("bfloat16", "uint8")])
def test_other_dtypes(source, target, runner):
    b = ProgramBuilder(True)
    b.add("fma", b.accumulator, 20.0, 3.0)
    spec = pool("average", source, 20, WINDOWS["2x2"], b.program(), target)
    check(spec, runner, data(spec), {"program": b.constants})


@EVERY_WIDTH
def test_windows_cut_by_ceil_mode_do_not_count_beyond_the_pads(runner):
    x, y = dense_view("float32", (6, 6, 4)), dense_view("float32", (3, 3, 4))
    spec = Pool(x, y, (), PLAIN, "average", (3, 3), (2, 2), count_include_pad=True)
    ones = np.ones((1, *x.shape), np.float32)
    result, = run(spec, runner, [ones], {"program": []})
    np.testing.assert_allclose(result, 1, 1e-6)
    check(spec, runner, data(spec), {"program": []})


def test_a_wrong_count_is_caught():
    spec = pool("average", "uint8", 8, WINDOWS["3x3 stride 2 padded"])
    wrong = pool("average", "uint8", 8, WINDOWS["3x3 stride 2 padded"], count_include_pad=True)
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(run(spec, CpuRunner(AVX2), data(spec), {"program": []}, native=False),
                                      wrong.reference(data(spec), {"program": []}))


def test_bytes_stay_bytes_where_nothing_is_computed():
    from infer_server.engines.codegen.ir_builder import Module
    kernel, module = kernel_of(pool("max", "uint8", 64, WINDOWS["2x2"])), Module()
    kernel.emit(module, "kernel", ALL[0], kernel.tactics(ALL[0])[0])
    assert "x float" not in module.text()
