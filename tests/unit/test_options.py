"""Options: a dataclass is its own Hydra schema."""

import dataclasses

import pytest
from omegaconf import OmegaConf

from clozelab.options import build, discover, option, registered
from clozelab.training.budget import StepBudget


def test_build_gives_the_dataclass_back() -> None:
    node = OmegaConf.create({"_target_": "clozelab.training.budget.StepBudget", "steps": 7})
    assert build(node) == StepBudget(steps=7)
    assert build({"_target_": "clozelab.training.budget.StepBudget", "steps": 7}) == StepBudget(steps=7)


def test_build_names_an_unknown_setting_and_a_missing_target() -> None:
    with pytest.raises(ValueError, match=r"no setting stepps; it has steps"):
        build({"_target_": "clozelab.training.budget.StepBudget", "stepps": 7})
    with pytest.raises(ValueError, match="without a _target_"):
        build({"steps": 7})


def test_only_dataclasses_are_options() -> None:
    with pytest.raises(TypeError, match="dataclass"):

        @option("budget", "odd")
        class Odd:
            pass


def test_every_option_has_defaults_and_documented_fields() -> None:
    discover()
    groups = (
        "budget",
        "corpus",
        "evaluation",
        "format",
        "masking",
        "model",
        "optimizer",
        "schedule",
        "task",
        "tokenizer",
    )
    for group in groups:
        assert registered(group), group
        for name, cls in registered(group).items():
            assert cls.__doc__, (group, name)
            for field in dataclasses.fields(cls):
                has_default = (
                    field.default is not dataclasses.MISSING or field.default_factory is not dataclasses.MISSING
                )
                assert has_default, (group, name, field.name)
