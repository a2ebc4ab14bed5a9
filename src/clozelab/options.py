"""Options: a dataclass is its own Hydra schema.

`@option("masking", "cloze")` on a dataclass stores it in Hydra's ConfigStore together with its own `_target_`, so that

* an unknown key or a wrong type fails at compose time,
* every field can be overridden without `+`, and defaults live in one place,
* `build(cfg)` gives back the dataclass itself, which holds the behaviour.

`conf/<group>/*.yaml` are presets over these schemas and state only what differs.
"""

import dataclasses
import importlib
import importlib.util
import os
import pkgutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf

# Packages in which options live; a new option is one new file in one of them.
OPTION_PACKAGES = (
    "clozelab.data",
    "clozelab.models",
    "clozelab.training",
    "clozelab.evaluation",
    "clozelab.tracking",
    "clozelab.running",
)

T = TypeVar("T")

_registered: dict[tuple[str, str], type] = {}


def option(group: str, name: str, package: str | None = None) -> Callable[[type[T]], type[T]]:
    """Register a dataclass as the Hydra option `group=name`.

    Args:
        group: Hydra config group, for example "masking".
        name: name of the option in its group.
        package: where the node lands in the config (default: the group), for groups of which several can be chosen.
    """

    def decorate(cls: type[T]) -> type[T]:
        if not dataclasses.is_dataclass(cls):
            raise TypeError(f"@option wants a dataclass, {cls.__qualname__} is none")
        target = f"{cls.__module__}.{cls.__qualname__}"
        added: list[tuple[str, Any, Any]] = [("_target_", str, dataclasses.field(default=target))]
        inner = {f.name: f.metadata["chosen"] for f in dataclasses.fields(cls) if "chosen" in f.metadata}
        if inner:
            # An option within this one is a group of its own below it, filled by Hydra's defaults list.
            added += [(name, Any, dataclasses.field(default=MISSING)) for name in inner]
            chosen = [*({name: choice} for name, choice in inner.items()), "_self_"]
            added.append(("defaults", list[Any], dataclasses.field(default_factory=lambda: list(chosen))))
        schema = dataclasses.make_dataclass(cls.__name__, added, bases=(cls,), kw_only=True)
        ConfigStore.instance().store(group=group, name=name, node=schema, package=package, provider="clozelab")
        _registered[group, name] = cls
        return cls

    return decorate


def inner_option(choice: str) -> dict[str, str]:
    """Metadata of a field that is an option itself: field `position` of `model` is the group `model/position`.

    Args:
        choice: the name of the option that stands there unless another is chosen.
    """
    return {"chosen": choice}


def discover(*packages: str) -> None:
    """Import the modules of the option packages that define options, so that Hydra knows them.

    Other modules are left alone: composing a configuration must not cost the import of the training loop. Modules named
    in the environment variable CLOZELAB_OPTIONS (parted by commas) are options of the user's own.

    Raises:
        ValueError: a module of CLOZELAB_OPTIONS cannot be imported.
    """
    for name in packages or OPTION_PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, name + "."):
            spec = importlib.util.find_spec(module.name)
            if spec is None or spec.origin is None or "@option(" in Path(spec.origin).read_text(encoding="utf-8"):
                importlib.import_module(module.name)
    for name in filter(None, os.environ.get("CLOZELAB_OPTIONS", "").split(",")):
        try:
            importlib.import_module(name.strip())
        except ImportError as error:
            raise ValueError(f"CLOZELAB_OPTIONS names {name.strip()}, which cannot be imported: {error}") from None


def registered(group: str) -> dict[str, type]:
    """The options of a group that were discovered so far: name -> dataclass."""
    return {name: cls for (g, name), cls in sorted(_registered.items()) if g == group}


def build(config: DictConfig | Mapping[str, Any]) -> Any:
    """Make the option that a composed (or saved) config node describes.

    Raises:
        ValueError: the node names no `_target_`, has a key its option lacks, or a value the option refuses.
    """
    plain = OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else dict(config)  # type: ignore[arg-type]
    assert isinstance(plain, dict)
    target = plain.pop("_target_", None)
    if not isinstance(target, str):
        raise ValueError(f"config node without a _target_: {sorted(map(str, plain))}")
    module, _, name = target.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        raise ValueError(f"there is no option {target}; the configuration was made by another version") from None
    known = {field.name for field in dataclasses.fields(cls)}
    unknown = sorted(str(key) for key in plain if key not in known)
    if unknown:
        raise ValueError(f"{target} has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
    return cls(**{str(key): build(value) if _is_option(value) else value for key, value in plain.items()})


def _is_option(node: Any) -> bool:
    return isinstance(node, Mapping) and "_target_" in node
