"""A training step as operators with named inputs and outputs."""

from megaverl.dataflow.flow import DataFlow
from megaverl.dataflow.plan import Operator

__all__ = ["DataFlow", "Operator"]
