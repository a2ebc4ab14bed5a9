"""Weights and configurations in the layout of Hugging Face, and back. Needs no transformers.

`maps` is the data: what each family of theirs calls our parameters and settings. `config` and `state` read it in both
directions.
"""

from clozelab.models.hf.config import family_of, hf_config, option_of
from clozelab.models.hf.state import from_hf_state, to_hf_state

__all__ = ["family_of", "from_hf_state", "hf_config", "option_of", "to_hf_state"]
