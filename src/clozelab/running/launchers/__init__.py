"""Where cells run: one file a launcher, an option of the group `launcher`."""
