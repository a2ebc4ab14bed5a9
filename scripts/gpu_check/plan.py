"""What is measured, in the order of worth: all of it eagerly first, then compiled, which costs a compilation each."""

from dataclasses import dataclass

LENGTHS = {"full": (128, 512), "smoke": (32,)}
MODELS = {"full": ("bert_mini", "bert_base", "bert_large"), "smoke": ("bert_tiny",)}
PEERS = ("ours", "hugging_face")
# Seconds to expect of an entry, by which one that no longer fits is left out rather than begun.
EAGER_SECONDS = 12.0
COMPILED_SECONDS = {"bert_tiny": 10.0, "bert_mini": 40.0, "bert_base": 75.0, "bert_large": 130.0}
# The compiler of the real check, and one that only takes the graph, for a CPU.
BACKENDS = {"full": "inductor", "smoke": "aot_eager"}


@dataclass(frozen=True)
class Entry:
    """One row of the table."""

    peer: str
    model: str
    length: int
    compiled: bool

    @property
    def key(self) -> str:
        """Its name."""
        return f"{self.peer} {self.model} {self.length} {'compiled' if self.compiled else 'eager'}"

    @property
    def seconds(self) -> float:
        """What it may take."""
        return COMPILED_SECONDS[self.model] if self.compiled else EAGER_SECONDS


def entries(size: str) -> list[Entry]:
    """Every row of a size."""
    return [
        Entry(peer, model, length, compiled)
        for compiled in (False, True)
        for length in LENGTHS[size]
        for model in MODELS[size]
        for peer in PEERS
    ]
