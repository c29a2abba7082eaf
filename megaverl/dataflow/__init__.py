"""A training step as operators with named inputs and outputs."""

from megaverl.dataflow.flow import DataFlow
from megaverl.dataflow.operator import Operator

__all__ = ["DataFlow", "Operator"]
