"""clozelab: published pre-training claims as controlled, checkable experiments."""

__version__ = "0.1.0"
