"""The default launches of each architecture, and the launches that tuning stores."""

import json

import pytest
import torch
from kernel_cases import Case
from torch.utils._pytree import tree_leaves

from canonlm.ops.kernels import api, conv, launches, tune

CPU = torch.device("cpu")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    launches.tuned.cache_clear()
    yield tmp_path / "canonlm/kernels.json"
    launches.tuned.cache_clear()


def tokens(kernel, batch, channels):
    """The tokens of a tile, for rows of 4,096 tokens on an H100 or H200."""
    return launches.launch_of(kernel, CPU, 4, batch, 4096, channels).tokens


@pytest.mark.parametrize(
    ("kernel", "channels", "fastest"),
    [
        ("forward", 2048, {1: 32, 4: 128, 8: 256}),
        ("backward", 2048, {1: 32, 4: 128, 8: 256}),
        ("backward_act", 2048, {1: 64, 4: 256}),
        ("gated_forward", 5632, {1: 128, 4: 128}),
        ("gated_backward", 5632, {1: 256, 4: 256}),
        ("normed_forward", 2048, {1: 32, 4: 128, 8: 256}),
        ("normed_backward", 2048, {1: 32, 4: 128, 8: 256}),
        ("rotary_forward", 3 * 2048, {1: 64, 4: 128, 8: 128}),
        ("rotary_backward", 3 * 2048, {1: 64, 4: 256, 8: 256}),
    ],
)
def test_tiles_are_those_that_were_fastest(kernel, channels, fastest):
    assert {batch: tokens(kernel, batch, channels) for batch in fastest} == fastest


def test_a_grid_that_no_gpu_launches_is_an_error():
    x = torch.empty(1, 1, 4).expand(65536, 1, 4)
    with pytest.raises(ValueError, match="at most 65,535 rows"):
        api.canon([x], [torch.ones(4, 1, 4)])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_every_architecture_has_every_kernel(arch):
    assert launches.LAUNCHES[arch].keys() == launches.LAUNCHES["sm_90"].keys()


def test_a_program_with_a_norm_has_all_channels():
    launch = launches.launch_of("normed_forward", CPU, 4, 8, 4096, 2000)
    assert (launch.channels, launch.warps) == (2048, 8)


def test_the_fastest_is_kept_and_used(cache):
    case = Case(time=9)
    calls = {
        "forward": lambda: conv.run_forward(
            case.xs, case.taps, [], None, None, None, residual=True, act=0, scale=1.0, return_state=False
        )
    }
    times = iter([3.0, 1.0])

    def seconds(call):
        return next(times, 2.0)

    best = tune.fastest(calls, 4, "sm_90", seconds)
    second = tune.candidates("forward", 4)[1]
    assert best == {"forward K=4": second}
    assert launches.launch_at("sm_90", "forward", 4) == second
    assert launches.launch_at("sm_80", "forward", 4) == launches.LAUNCHES["sm_80"]["forward"][0]
    [y] = api.canon(case.xs, case.taps)
    assert y.shape == case.xs[0].shape


def test_a_fast_launch_with_other_results_is_not_kept(cache):
    usual, wrong = tune.candidates("forward", 4)[:2]

    def call():
        launch = launches.launch_at("sm_90", "forward", 4)
        return [torch.tensor([1.0, torch.nan if launch == wrong else 1.001])]

    def seconds(call):
        return 1.0 if call()[0].isnan().any() else 2.0

    assert tune.fastest({"forward": call}, 4, "sm_90", seconds) == {"forward K=4": usual}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"sm_90": 3}', '{"sm_90": {"forward K=4": {"colour": 3}}}'])
def test_a_damaged_file_is_skipped(cache, text):
    cache.parent.mkdir()
    cache.write_text(text)
    assert launches.launch_at("sm_90", "forward", 4) == launches.LAUNCHES["sm_90"]["forward"][0]


def test_keeping_leaves_other_kernels_alone(cache):
    launches.keep("sm_80", {"forward K=4": launches.Launch(512, 4)})
    launches.keep("sm_90", {"backward K=4": launches.Launch(512, 4)})
    assert json.loads(cache.read_text()).keys() == {"sm_80", "sm_90"}


def test_the_tuned_calls_run():
    """There is one for each kernel with tuned sizes, and each returns results of its inputs' shape."""
    calls = tune.calls(CPU, 1, 5, 16, 16, 4)
    assert calls.keys() == tune.CANDIDATES.keys()
    for name, call in calls.items():
        tensors = [x for x in tree_leaves(call()) if isinstance(x, torch.Tensor)]
        assert any(x.shape[-3:] == (1, 5, 16) for x in tensors), name
        assert all(x.isfinite().all() for x in tensors), name
