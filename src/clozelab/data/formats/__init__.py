"""How documents become sequences: one file a format."""
