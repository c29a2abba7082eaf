"""Operators with named inputs and outputs, ordered by what they need, on the ranks of roles; and programs on ranks."""

from megaverl.dataflow.flow import DataFlow
from megaverl.dataflow.plan import Operator

__all__ = ["DataFlow", "Operator"]
