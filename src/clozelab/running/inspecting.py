"""`clozelab inspect`: the sequences that a run would read, as a person sees them."""

from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from clozelab.data.batches import Batches
from clozelab.data.masking.cloze import IGNORED
from clozelab.data.tokenizers import Tokenizer
from clozelab.running.compose import compose_run, composer, prepare_data, validate

STYLES = {"hidden": "bold red", "exchanged": "bold yellow", "kept": "underline green", "special": "dim cyan"}
_SEGMENTS = ("", "on grey15")


def inspect(overrides: list[str], n: int, step: int) -> int:
    """Print the first `n` sequences of batch `step`, one a paragraph; what follows is the batch after it.

    Raises:
        ValueError: the configuration cannot run, or fewer than one sequence is asked for.
    """
    from clozelab.data.store import cache_dir, open_store
    from clozelab.options import build
    from clozelab.training.reading import reading

    if n < 1:
        raise ValueError(f"n is {n}; give 1 or more sequences")
    if step < 0:
        raise ValueError(f"--step is {step}; batches are counted from 0")
    with composer():
        config = compose_run(overrides)
        validate(config)
        prepare_data([config])
        store = open_store(build(config["corpus"]), build(config["tokenizer"]), cache_dir())
        read = reading(config, store)
    console = Console(highlight=False, soft_wrap=True)
    console.print(_legend(read.last.masking.causal))
    shown = 0
    while shown < n:
        number = read.phases.number(step)
        batches = read.phases.phases[number]
        for text in _sequences(batches, step - read.phases.first_steps[number])[: n - shown]:
            console.print()
            console.print(text)
            shown += 1
        step += 1
    return 0


def _legend(causal: bool) -> Text:
    if causal:
        return Text("every token is predicted from those before it; ", end="").append("special", STYLES["special"])
    legend = Text("predicted: ")
    for name, meaning in (
        ("hidden", "hidden (what stood there)"),
        ("exchanged", "exchanged for a random token (what stood there)"),
        ("kept", "kept as it is"),
    ):
        legend.append(meaning, STYLES[name]).append(", ")
    return legend.append("not predicted but changed: the same without what stood there; the second segment is shaded")


def _sequences(batches: Batches, step: int) -> list[Text]:
    """Every row of a batch."""
    made = batches.batch(step)
    plain = _before_masking(batches, step)
    found = []
    first = 0
    for epoch, indices in batches.rows(step):
        segment_R, row_R, labels_B = batches.runs(epoch, indices, "pair")
        for row in range(len(indices)):
            documents = batches.examples.segment_document[segment_R[row_R == row]]
            head = f"sequence {indices[row]}, epoch {epoch}, document {', '.join(map(str, dict.fromkeys(documents)))}"
            if batches.pair.labels is not None:
                head += f": {batches.pair.labels[labels_B[row]]}"
            text = Text(f"{head}\n", style="bold")
            here = {key: value[first + row] for key, value in made.items()}
            found.append(text.append(_row(here, plain[first + row], batches.store.tokenizer, batches.masking.causal)))
        first += len(indices)
    return found


def _before_masking(batches: Batches, step: int) -> np.ndarray:
    """[B, S]: the ids that the masking was given."""
    parts = []
    for epoch, indices in batches.rows(step):
        segment_R, row_R, _ = batches.runs(epoch, indices, "pair")
        made = batches.format.assemble(batches.store, batches.examples, segment_R, row_R, len(indices))
        parts.append(made["input_ids"])
    return np.concatenate(parts)


def _row(batch: dict[str, Any], before_S: np.ndarray, tokenizer: Tokenizer, causal: bool) -> Text:
    predicted = set() if causal else set(batch["target_positions"][batch["target_ids"] != IGNORED].tolist())
    text = Text(style="not bold")
    for place in range(int(batch["attention_mask"].sum())):
        now, before = int(batch["input_ids"][place]), int(before_S[place])
        shade = _SEGMENTS[int(batch["segment_ids"][place])]
        kind = _kind(now, before, place in predicted, tokenizer)
        shown = _piece(now, tokenizer)
        if place in predicted and now != before:
            shown += f"({_piece(before, tokenizer)})"
        text.append(shown, f"{STYLES.get(kind, '')} {shade}".strip()).append(" ", shade)
    return text


def _kind(now: int, before: int, predicted: bool, tokenizer: Tokenizer) -> str:
    if now != before:
        return "hidden" if now == tokenizer.mask_id else "exchanged"
    if predicted:
        return "kept"
    return "special" if tokenizer.is_special_V[now] else "plain"


def _piece(identifier: int, tokenizer: Tokenizer) -> str:
    return str(tokenizer.inner.id_to_token(identifier))
