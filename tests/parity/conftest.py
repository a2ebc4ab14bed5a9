"""The largest differences that the parity tests saw, as a table at the end of the run (`make parity`)."""

from typing import Any

import pytest
from differences import COLUMNS, Worst

_WORST = pytest.StashKey[dict[str, dict[str, float]]]()


@pytest.fixture
def worst(request: pytest.FixtureRequest) -> Worst:
    """Where a parity test enters what it saw."""
    return Worst(request.config.stash.setdefault(_WORST, {}))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table, if a parity test ran."""
    rows = config.stash.get(_WORST, {})
    if not rows:
        return
    width = max(len(model) for model in rows)
    terminalreporter.write_line(f"\n{'largest |difference| in float32':{width}}" + "".join(f"{c:>12}" for c in COLUMNS))
    for model, row in rows.items():
        terminalreporter.write_line(f"{model:{width}}" + "".join(f"{row[column]:12.1e}" for column in COLUMNS))
