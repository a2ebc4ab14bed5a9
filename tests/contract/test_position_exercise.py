"""A new position scheme is one new file: the one in docs/extending.md is written, discovered, chosen through Hydra, and
kept to the contracts of every other."""

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hydra.core.config_store import ConfigStore
from tests.contract.test_encoder_axes import TOY, check_all, check_bf16, process_group, toy, toy_batch, toy_option

from clozelab import options
from clozelab.models import positions
from clozelab.models.encoder import SHARES, EncoderOption
from clozelab.models.layers import PLACES
from clozelab.models.norms import NORMS
from clozelab.options import build, discover, registered
from clozelab.running.compose import compose_run, composer, validate

__all__ = ["process_group"]

DOCS = Path(__file__).parents[2] / "docs" / "extending.md"
CHOSEN = ["model/position=kerple", "model.position.start=2", *(f"model.{key}={value}" for key, value in TOY.items())]


@pytest.fixture
def kerple(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file stands in a second folder of the package, and everything that its discovery leaves behind goes again."""
    (source,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "kerple.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(positions, "__path__", [*positions.__path__, str(tmp_path)])
    importlib.invalidate_caches()
    yield
    sys.modules.pop("clozelab.models.positions.kerple", None)
    vars(positions).pop("kerple", None)
    options._registered.pop(("model/position", "kerple"), None)
    ConfigStore.instance().repo["model"]["position"].pop("kerple.yaml", None)


def composed(*overrides: str) -> EncoderOption:
    with composer():
        config = compose_run([*CHOSEN, *overrides])
    validate(config)
    option = build(config["model"])
    assert isinstance(option, EncoderOption)
    return option


@pytest.mark.usefixtures("kerple", "process_group")
def test_one_new_file_is_found_chosen_and_kept_to_every_contract() -> None:
    assert "kerple" not in registered("model/position")
    discover("clozelab.models")
    assert "kerple" in registered("model/position")
    option = composed()
    assert type(option.position).__name__ == "KerpleOption"
    assert vars(option.position) == {"start": 2.0}
    for norm, place in itertools.product(NORMS, PLACES):
        check_bf16(toy(toy_option(position=option.position, norm=norm, norm_place=place)))
    for share, place in itertools.product(SHARES, PLACES):
        check_all(toy_option(position=option.position, share=share, norm_place=place, window=4, kv_heads=2))


@pytest.mark.usefixtures("kerple")
def test_it_does_what_its_file_says() -> None:
    model, batch = toy(composed()), toy_batch()
    scheme = model.encoder.embeddings.position
    with torch.no_grad():
        scheme.weight[:] = torch.arange(12).view(2, 6) / 10
        bias = scheme.bias(torch.tensor([[4]]), torch.tensor([[1, 4]]))
        before = model(batch).mlm_loss
        scheme.weight += 1
        after = model(batch).mlm_loss
    a, b = 2 * torch.tensor([0.3, 0.9]).exp()
    assert bias.shape == (1, 6, 1, 2)
    torch.testing.assert_close(bias[0, 3, 0], torch.stack([-a * (1 + 3 * b).log(), torch.tensor(0.0)]))
    assert before != after


@pytest.mark.usefixtures("kerple")
@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.position.start=0", r"model\.position\.start must be positive"),
        ("model.position.start=none", r"model\.position\.start"),
        ("model.position.length=9", r"model\.position\.length"),
    ],
)
def test_its_own_settings_are_checked_by_name(override: str, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        composed(override)


def test_without_its_file_it_does_not_exist() -> None:
    with composer(), pytest.raises(ValueError, match="kerple"):
        compose_run(CHOSEN)
