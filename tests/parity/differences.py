"""The largest differences that were seen."""

COLUMNS = ("logits", "loss", "gradients")


class Worst:
    """Largest differences: model -> column -> value."""

    def __init__(self, rows: dict[str, dict[str, float]]) -> None:
        self.rows = rows

    def see(self, model: str, column: str, difference: float) -> None:
        """Enter a difference."""
        row = self.rows.setdefault(model, dict.fromkeys(COLUMNS, 0.0))
        row[column] = max(row[column], difference)
