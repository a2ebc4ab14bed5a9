"""Which positions are hidden and what is put there: one file a policy."""
