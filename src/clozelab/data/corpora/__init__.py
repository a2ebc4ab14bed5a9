"""Where text comes from: one file a source. A new source is one more file here."""
