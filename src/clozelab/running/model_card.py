"""The model card of an exported run: what it is, what it scored, what it was trained on, and how to open it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clozelab import __version__
from clozelab.data.tokenizers import Tokenizer
from clozelab.models.encoder import EncoderOption
from clozelab.records import BUDGETS, Record


def model_card(
    config: Mapping[str, Any],
    option: EncoderOption,
    record: Record | None,
    spent: Mapping[str, float],
    model_type: str,
    tokenizer: Tokenizer,
    replaced: bool = False,
) -> str:
    """The text of README.md.

    Args:
        config: of the run.
        option: of the run's encoder.
        record: of the run, if it has ended.
        spent: what the run had spent when its weights were written.
        model_type: what Hugging Face calls the encoder.
        tokenizer: of the run.
        replaced: the model tells replaced tokens, in place of hidden ones.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent / "templates"),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=False,  # the product is Markdown, and its inputs are the run's own
    )
    return environment.get_template("model_card.md.jinja").render(
        config=config,
        record=record,
        spent={key: spent[key] for key in BUDGETS if key in spent},
        option=option,
        model_type=model_type,
        replaced=replaced,
        data=_data(record),
        mask=tokenizer.special_tokens["mask"],
        language=config["corpus"].get("language"),
        corpus=_chosen(config["corpus"]),
        tokenizer=_chosen(config["tokenizer"]),
        commit=_commit(record.provenance) if record else None,
        version=__version__,
    )


def _chosen(node: Mapping[str, Any]) -> str:
    """An option and its settings on one line. Files are named without their folders, which are nobody else's."""
    settings = {key: value for key, value in node.items() if key != "_target_" and value is not None}
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in settings.items())
    return f"`{str(node['_target_']).rpartition('.')[2].removesuffix('Option')}` ({shown})"


def _data(record: Record | None) -> dict[str, str]:
    """What the training split held."""
    found = record.provenance.get("data", {}) if record else {}
    counts = ("documents", "sentences", "words", "tokens")
    shown = {"data fingerprint": f"`{found['fingerprint']}`"} if "fingerprint" in found else {}
    return shown | {f"{name} in training": f"{found[name]:,}" for name in counts if name in found}


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return Path(value).name if isinstance(value, str) and "/" in value else str(value)


def _commit(provenance: Mapping[str, Any]) -> str:
    if provenance.get("commit") is None:
        return "not known (installed package)"
    return f"`{provenance['commit']}`" + (" with uncommitted changes" if provenance.get("dirty") else "")
