"""What is hidden together: one file a selection, an option of the group `masking/selection`."""
