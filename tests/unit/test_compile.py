"""torch.compile takes every preset and every position scheme whole, without a graph break, and changes no value.

Presets keep their structure and lose their size; those that become the same are compiled once.
"""

import dataclasses
import functools
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.contract.test_encoder_axes import LONGEST, SCHEMES, gradients, position, toy, toy_batch, toy_option
from tests.contract.test_model_presets import PRESETS, preset

from clozelab.models.encoder import EncoderOption


def small(name: str) -> EncoderOption:
    """The preset at toy size: as many kinds of layers, groups and widths as it has, each as small as can be."""
    option = preset(name)
    scheme: Any = option.position
    if scheme.longest is not None:
        scheme = dataclasses.replace(scheme, length=LONGEST)
    unit = option.share_groups * option.share_inner
    sizes: dict[str, Any] = {"hidden": 24, "heads": 6, "ffn": 20, "layers": 2 * unit, "init_scale": 0.2}
    if option.kv_heads is not None:
        sizes["kv_heads"] = 6 if option.kv_heads == option.heads else min(option.kv_heads, 2)
    if option.embedding is not None:
        sizes["embedding"] = 24 if option.embedding == option.hidden else 10
    if option.output is not None:
        sizes["output"] = 8
    if option.window is not None:
        sizes |= {"window": 4, "layers": unit * (option.global_every + 1)}
    return dataclasses.replace(option, position=scheme, **sizes)


@functools.cache
def presets() -> dict[str, EncoderOption]:
    """The presets at toy size, of each kind the first."""
    kinds: dict[str, tuple[str, EncoderOption]] = {}
    for name in PRESETS:
        kinds.setdefault(repr(small(name)), (name, small(name)))
    return dict(kinds.values())


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def check_compiled(option: EncoderOption, backend: str) -> None:
    """One graph, and the loss and gradients of the model that is not compiled, to 1e-5."""
    model, batch = toy(option), toy_batch()
    loss, expected = gradients(model, batch)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    model.zero_grad()
    sums = compiled(batch)
    found = sums.mlm_loss + sums.pair_loss
    found.backward()
    torch.testing.assert_close(found.detach(), loss, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )
    plain = model(batch)
    assert sums.mlm_targets == plain.mlm_targets
    assert sums.mlm_correct == plain.mlm_correct
    assert sums.pair_correct == plain.pair_correct


def test_every_preset_keeps_its_kind() -> None:
    kinds = {repr(option) for option in presets().values()}
    assert kinds == {repr(small(name)) for name in PRESETS}


@pytest.mark.parametrize("name", presets())
def test_a_preset_is_one_graph_and_the_same_values(name: str) -> None:
    check_compiled(presets()[name], "aot_eager")


@pytest.mark.parametrize("name", presets())
def test_a_preset_in_training_under_autocast_is_one_graph(name: str) -> None:
    option = dataclasses.replace(presets()[name], dropout=0.1, attention_dropout=0.1, ffn_dropout=0.1)
    model = toy(option).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with torch.autocast("cpu", torch.bfloat16):
        sums = compiled(toy_batch())
    (sums.mlm_loss + sums.pair_loss).backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert bool(parameter.grad.isfinite().all()), parameter_name


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_position_scheme_is_one_graph_and_the_same_values(scheme: str) -> None:
    check_compiled(toy_option(position=position(scheme), window=4, global_every=2, kv_heads=2), "eager")


@pytest.mark.slow
def test_the_compiler_that_makes_machine_code_gives_the_same_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not any(shutil.which(compiler) for compiler in ("g++", "clang++", "c++")):
        pytest.skip("torch's inductor needs a C++ compiler on a CPU")
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        pytest.skip("torch's inductor needs the headers of Python")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    check_compiled(dataclasses.replace(presets()["bert_base"], layers=1), "inductor")
