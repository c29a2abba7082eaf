"""Dataflow: operators with named inputs and outputs, ordered by their dependencies. Programs on a job's ranks."""

from megaverl.dataflow.flow import DataFlow
from megaverl.dataflow.plan import Operator

__all__ = ["DataFlow", "Operator"]
