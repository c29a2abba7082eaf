"""Tables of each architecture's weights, looked up by the Hugging Face name of the architecture.

`table` turns the rules of a table into weights, `catalog` holds the tables, and the
other modules hold the rules of one family each.
"""

from megaverl.models.architectures.catalog import weights_of

__all__ = ["weights_of"]
