"""Position schemes: one file a scheme, an option of the group `model/position`."""
