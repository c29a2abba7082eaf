"""Plan a run without starting it: memory and traffic of every rank, predicted time of a step, and layouts that fit."""
