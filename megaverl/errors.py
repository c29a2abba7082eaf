"""Errors meant for the person who has to fix them: each names the key, file, row or rank, and what to do."""

# Exit code of a run that was asked to leave (SIGTERM, SIGUSR1) and has saved what it had: start it again
# (EX_TEMPFAIL of sysexits.h).
SAVED_AND_LEFT = 75
# Of one that has saved, and goes on at once in new processes: the agent that started its ranks starts them again.
STARTS_AGAIN = 76
# The other exit codes of a command besides 0.
FAILED, MISTAKE, INTERRUPTED = 1, 2, 130


class MegaverlError(Exception):
    """Base of every error caused by input, configuration or environment rather than by a bug.

    Commands print its message without a traceback and exit non-zero on every rank.
    """


class ConfigError(MegaverlError):
    """One or more mistakes in the configuration; the message lists all of them."""


class GridError(ConfigError):
    """A parallel grid that the world or the model does not allow."""


class DataError(MegaverlError):
    """A data set, row, prompt or tokenizer that cannot be used."""


class ModelError(MegaverlError):
    """A model folder that is missing, damaged or of an unsupported architecture."""


class RewardError(MegaverlError):
    """A reward function that is missing, raises, or returns the wrong thing."""


class EpisodeError(MegaverlError):
    """An environment, game or tool that is missing, raises, or answers with the wrong thing."""


class RolloutError(MegaverlError):
    """A generation engine that refuses a request or returns the wrong thing."""


class ReshardError(MegaverlError):
    """Two layouts that do not fit together, or weights that did not arrive."""


class CheckpointError(MegaverlError):
    """A checkpoint that is missing, torn or does not fit the run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose bytes are not those that were written; another one may be whole."""


class TrainingStopped(MegaverlError):
    """The run cannot go on: a non-finite loss, a wrong first reshard, a lost rank."""
