"""`clozelab inspect`: what a person sees is what a run would read."""

import subprocess
import sys

import pytest

from tests.e2e.conftest import TINY

NOT_DATA = ("budget", "trainer", "tracker", "model", "evaluation")
DATA = [override for override in TINY if not override.startswith(NOT_DATA)]


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "clozelab.cli", "inspect", *DATA, "model=bert_tiny", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=None)


@pytest.mark.parametrize("masking", ["dynamic", "span"])
def test_sequences_with_their_labels_and_what_stood_there(masking: str) -> None:
    shown = inspect("task=mlm_nsp", f"masking={masking}", "n=3")
    assert shown.returncode == 0, shown.stderr
    legend, *sequences = shown.stdout.strip().split("\n\n")
    assert legend.startswith("predicted: hidden")
    assert len(sequences) == 3
    for sequence in sequences:
        head, row = sequence.split("\n", 1)
        assert head.startswith("sequence ")
        assert head.endswith((": next", ": random"))
        assert "[MASK](" in row
        assert row.startswith("[CLS] ")
        assert row.count("[SEP]") == 2


def test_a_format_of_one_segment_and_an_objective_without_masks() -> None:
    shown = inspect("format=packed", "masking=causal", "evaluation=[heldout_clm]", "n=2")
    assert shown.returncode == 0, shown.stderr
    assert "[MASK]" not in shown.stdout
    assert "from those before it" in shown.stdout


def test_bad_numbers_are_refused() -> None:
    for wrong, message in (("n=many", "n=many is no number"), ("n=0", "n is 0")):
        refused = inspect(wrong)
        assert refused.returncode == 2
        assert message in refused.stderr
        assert len(refused.stderr.strip().splitlines()) == 1
